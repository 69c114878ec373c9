#!/usr/bin/env python3
"""Judges the measurements of serving.sh: serving_report.py FOLDER BAR,... DEVICE.

Medians over the rounds; a ratio is the median of the rounds' own ratios. Exit code 1 when a bar is missed or nothing
was measured; a bar without measurements is told as not measured.
"""
import json
import pathlib
import statistics
import sys

OUT = pathlib.Path(sys.argv[1])


def rounds(bar, server):
    """The point of every round, by its number."""
    found = {}
    for path in OUT.glob(f"{bar}.{server}.*.json"):
        found[int(path.name.split(".")[2])] = json.loads(path.read_text())["points"][0]
    return found


class Pair:
    """Two servers (or two loads) measured in turns."""

    def __init__(self, bar, first, second, other_bar=None):
        first, second = rounds(bar, first), rounds(other_bar or bar, second)
        self.rounds = [(first[i], second[i]) for i in sorted(first.keys() & second.keys())]

    def __bool__(self):
        return bool(self.rounds)

    def first(self, value):
        return statistics.median(value(a) for a, _ in self.rounds)

    def second(self, value):
        return statistics.median(value(b) for _, b in self.rounds)

    def ratio(self, value):
        return statistics.median(value(a) / value(b) for a, b in self.rounds)


def rate(point):
    return point["requests_per_s"]


def moved(point):
    return point["bytes_per_s"]


def goodput(point):
    return point["goodput_per_s"]


def latency(name):
    return lambda point: point["latency"][name + "_us"]


def worst(points, *path):
    """The largest over the rounds."""
    def dig(point):
        for key in path:
            point = point.get(key, {})
        return point if isinstance(point, (int, float)) else 0
    return max((dig(point) for point in points), default=0)


def failed(points):
    return sum(error["count"] for point in points for error in point["errors"].values())


# Each yields (name, value, unit, "<=" or ">=", limit, remark).
def one():
    pair = Pair("one", "awqd", "echo")
    if pair:
        p50, echo, kernel = pair.first(latency("p50")), pair.second(latency("p50")), pair.first(
            lambda point: point["compute"]["p50_us"])
        over = statistics.median(a["latency"]["p50_us"] - b["latency"]["p50_us"] - a["compute"]["p50_us"]
                                 for a, b in pair.rounds)
        yield ("p50 of a 1-token call over echo + kernel", over, "us", "<=", 60,
               f"awqd {p50:.0f}, echo {echo:.0f}, kernel {kernel:.0f} us")


def callers32():
    pair = Pair("callers32", "awqd", "echo")
    if pair:
        yield ("throughput at 32 callers / echo", pair.ratio(rate), "", ">=", 0.70, told(pair))


def told(pair):
    text = f"{pair.first(rate):.0f} and {pair.second(rate):.0f} requests/s"
    wrong = failed(a for a, _ in pair.rounds) + failed(b for _, b in pair.rounds)
    return f"{text}; {wrong} FAILED" if wrong else text


def callers256():
    pair = Pair("callers256", "awqd", "echo")
    if not pair:
        return
    p99 = latency("p99")
    yield ("throughput at 256 callers / echo", pair.ratio(rate), "", ">=", 0.80, told(pair))
    yield ("p99 at 256 callers / echo", pair.ratio(p99), "", "<=", 3,
           f"{pair.first(p99) / 1000:.2f} and {pair.second(p99) / 1000:.2f} ms")
    yield ("tokens in a merged batch", pair.first(lambda point: point["batch_tokens_mean"]), "", ">=", 8, "")
    yield ("slowest health Check at 256 callers", worst([a for a, _ in pair.rounds], "health", "max_us") / 1000, "ms", "<=",
           50, f"echo {worst([b for _, b in pair.rounds], 'health', 'max_us') / 1000:.2f} ms")


def overload():
    for percent in (125, 150, 300, 1000):
        pair = Pair(f"overload{percent}", "awqd", "awqd", "peak")
        if not pair:
            continue
        overloaded = [a for a, _ in pair.rounds]
        refused = sum(point["refused"]["count"] for point in overloaded)
        yield (f"goodput at {percent} % of the peak / peak", statistics.median(goodput(a) / rate(b) for a, b in pair.rounds),
               "", ">=", 0.90, f"{pair.first(goodput):.0f} of {pair.second(rate):.0f}/s, {refused} refused, "
               f"{sum(point['unsent'] for point in overloaded)} never sent")
        yield ("answers within the deadline", statistics.median(goodput(a) / max(1, rate(a)) for a, _ in pair.rounds), "",
               ">=", 0.99, "")
        yield ("refusals, p99", worst(overloaded, "refused", "p99_us") / 1000, "ms", "<=", 10,
               f"slowest {worst(overloaded, 'refused', 'max_us') / 1000:.2f} ms; sent late by p99 "
               f"{worst(overloaded, 'send_lag', 'p99_us') / 1000:.2f} ms")
        yield ("slowest health Check", worst(overloaded, "health", "max_us") / 1000, "ms", "<=", 50, "")


def large():
    pair = Pair("large", "awqd", "echo")
    if pair:
        yield ("bandwidth of [2048,4096] -> [2048,28672] / echo", pair.ratio(moved), "", ">=", 0.80,
               f"{pair.first(moved) / 1e9:.2f} and {pair.second(moved) / 1e9:.2f} GB/s")


def peer():
    pair = Pair("peer", "awqd", "peer")
    if pair:
        yield ("throughput at 256 callers / Python peer", pair.ratio(rate), "", ">=", 10, told(pair))


BARS = {bar.__name__: bar for bar in (one, callers32, callers256, overload, large, peer)}


def main():
    measured, missed, lines = 0, 0, []
    print(f"{'bar':<50} {'got':>10}  {'limit':>10}")
    for name in sys.argv[2].split(","):
        results = list(BARS[name]())
        if not results:
            print(f"{name:<50} {'-':>10}  not measured")
        for what, value, unit, sense, limit, remark in results:
            met = value <= limit if sense == "<=" else value >= limit
            measured, missed = measured + 1, missed + (not met)
            print(f"{what:<50} {value:>7.2f} {unit:<2}  {sense} {limit:<5g} {unit:<2} {'met   ' if met else 'MISSED'} {remark}")
            lines.append(json.dumps({"bench": "serving", "device": sys.argv[3], "bar": name, "what": what, "value": value,
                                     "unit": unit, "limit": f"{sense} {limit}", "met": met, "remark": remark}))
    print("\n".join(lines))
    (OUT / "serving.jsonl").write_text("".join(line + "\n" for line in lines))
    print(f"{measured - missed} of {measured} met")
    sys.exit(0 if measured and not missed else 1)


if __name__ == "__main__":
    main()
