#!/usr/bin/env python3
"""awqd's products on the CPU beside those of other libraries, in one run and in turns, with errors beside times.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install -r tests/bench/peer/cpu_requirements.txt
    /tmp/venv/bin/python tests/bench/cpu_peers.py --build build/release [--shapes=4096x4096] [--m=1,16] [--json FILE]

Peers are ONNX Runtime, OpenVINO, torch and numpy, each in a process of its own with the Python that runs this; one that
it cannot import is skipped by name. awqd's are awqd_bench's rows that a server would choose, for FP16 and BF16
activations, and for activations that are quantised to INT8 for each token. All use the same CPUs. In each of --rounds
every product of a case has a turn, in the opposite order in every second round; its time is the least of all rounds.
Prints three tables in Markdown: times with errors; awqd's time by that of the fastest peer of equal or smaller error; for
one token, awqd's time by that of reading the packed weight. tests/bench/README.md says what each peer does.
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys

import cpu_peers_report as report

HERE = pathlib.Path(__file__).resolve().parent
PEERS = ("onnxruntime", "openvino", "torch", "numpy")
LEAST_CODES = 1 << 22  # of a weight: of a smaller one it takes too many copies to be cold
KINDS = {  # of awqd's products: the flags of awqd_bench
    "FP16": ["--rows=cpu/qmatmul_a16", "--x=fp16"],
    "BF16": ["--rows=cpu/qmatmul_a16", "--x=bf16"],
    "INT8": ["--rows=cpu/qmatmul_a8_scaled", "--x=fp16"],
}


class Peer:
    """A process of peer/cpu_worker.py. `skipped` says why it has no product, once it has none."""

    def __init__(self, name, threads):
        # Each library has its own setting for the number of threads. Settings that select an OpenBLAS kernel for
        # another CPU are removed.
        environment = {key: value for key, value in os.environ.items() if not re.match("OPENBLAS_(CORETYPE|L2_SIZE)$", key)}
        environment.update({f"{key}_NUM_THREADS": str(threads) for key in ("OMP", "OPENBLAS", "MKL")})
        self.name, self.kinds, self.skipped = name, {}, {}
        self.process = subprocess.Popen([sys.executable, HERE / "peer/cpu_worker.py", name, str(threads)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        started = self.read()
        self.version = started.get("version", "")
        if "skipped" in started:
            self.skip(name, started["skipped"])

    def skip(self, product, why):
        if product not in self.skipped:
            self.skipped[product] = why.strip().split("\n")[0]
            print(f"{product}: skipped: {self.skipped[product]}", file=sys.stderr)

    def read(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"skipped": f"its process ended with {self.process.wait()}"}

    def ask(self, **command):
        if self.name in self.skipped:
            return {"skipped": self.skipped[self.name]}
        try:
            print(json.dumps(command), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # read() says with what it ended
        said = self.read()
        if self.process.poll() is not None:
            self.skip(self.name, said["skipped"])
        return said

    def prepare(self, k, n, group):
        self.kinds = {}
        for kind, said in self.ask(weight=[k, n, group]).get("kinds", {}).items():
            if "skipped" in said:
                self.skip(f"{self.name} {kind}", said["skipped"])
            else:
                self.kinds[kind] = said

    def turn(self, kind, case):
        said = self.ask(time=kind, m=case["m"])
        if "skipped" in said:
            self.skip(f"{self.name} {kind}", said["skipped"])
            return None
        return {"by": self.name, "product": f"{self.name} {kind}", **case, **self.kinds[kind], **said}

    def stop(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended before
        self.process.wait()


class Awqd:
    """awqd_bench, a process for each turn. `facts` is the line that it prints of the machine."""

    def __init__(self, build, threads):
        self.bench, self.threads, self.facts = build / "tests/bench/awqd_bench", threads, ""

    def turn(self, kind, case):
        command = [self.bench, f"--shapes={case['k']}x{case['n']}", f"--m={case['m']}", f"--weight=w4g{case['group']}z",
                   "--served", *KINDS[kind]]
        if case["m"] > 1:
            command.append("--floors=none")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stderr)
        self.facts = done.stdout.splitlines()[0]
        if f", {self.threads} threads," not in self.facts:
            sys.exit(f"awqd_bench: got \"{self.facts}\", expected {self.threads} threads: give it as --threads")
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if len(lines) != 1:
            sys.exit(f"awqd_bench: got {len(lines)} cases, expected the one that a server would choose:\n{done.stdout}")
        found = {key: lines[0][key] for key in ("row", "us", "error", "stream_us") if key in lines[0]}
        return {"by": "awqd", "product": f"awqd {kind}", **case, "activations": kind, **found}


def measure(awqd, peers, args):
    """The records of all turns."""
    records = []
    for group in args.groups:
        for k, n in args.shapes:
            for peer in peers:
                peer.prepare(k, n, group)
            for m in args.m:
                case = {"k": k, "n": n, "group": group, "m": m}
                turns = [(awqd, kind) for kind in KINDS] + [(peer, kind) for peer in peers for kind in peer.kinds]
                for turn in range(args.rounds):
                    for who, kind in turns if turn % 2 == 0 else reversed(turns):
                        if record := who.turn(kind, case):
                            records.append({**record, "round": turn})
                print(f"{k} x {n}, group {group}, M {m}: {args.rounds} rounds", file=sys.stderr, flush=True)
    return records


def load():
    return ", ".join(f"{average:.1f}" for average in os.getloadavg())


def write(facts, records):
    best = report.merge(records)
    print(facts["machine"])
    print("; ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    print(f"load average of 1, 5 and 15 minutes: {facts['load_before']} before, {facts['load_after']} after")
    for product, settings in {record["product"]: record.get("settings") for record in best}.items():
        if settings:
            print(f"{product}: {settings}")
    for product, why in facts["skipped"].items():
        print(f"{product}: skipped: {why}")
    print("\nMicroseconds, in brackets the relative error:\n\n" + report.times(best))
    print("awqd's time by that of the fastest peer of equal or smaller error:\n\n" + report.ratios(best))
    if streams := report.streams(best):
        print("awqd's time for one token by that of reading the packed weight:\n\n" + streams)


def parse():
    def numbers(text):
        return [int(part) for part in text.split(",")]

    def shapes(text):
        return [tuple(int(size) for size in part.split("x")) for part in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True, help="a build folder, with tests/bench/awqd_bench")
    parser.add_argument("--shapes", type=shapes, default="4096x4096,4096x14336,14336x4096", help="K x N")
    parser.add_argument("--m", type=numbers, default="1,4,16,64,256,1024", help="tokens")
    parser.add_argument("--groups", type=numbers, default="128", help="codes of a column with one scale, 128,32 for both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default=",".join(PEERS), help="which of them")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="the first so many CPUs")
    parser.add_argument("--json", type=pathlib.Path, help="a file for all records")
    args = parser.parse_args()
    for k, n in args.shapes:
        if k * n < LEAST_CODES:
            parser.error(f"--shapes: got {k}x{n}, expected K times N of {LEAST_CODES} or more")
        for group in args.groups:
            if group % 2 or k % (2 * group):
                parser.error(f"--shapes: got K {k}, expected a multiple of twice the group of {group}")
    args.peers = [name for name in args.peers.split(",") if name]
    if unknown := set(args.peers) - set(PEERS):
        parser.error(f"--peers: got {', '.join(sorted(unknown))}, expected some of {', '.join(PEERS)}")
    return args


def main():
    args = parse()
    # All processes inherit this. awqd and each library count the CPUs that they may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:args.threads])
    before = load()
    peers = [Peer(name, args.threads) for name in args.peers]
    awqd = Awqd(args.build, args.threads)
    records = measure(awqd, peers, args)
    for peer in peers:
        peer.stop()
    facts = {"machine": awqd.facts, "load_before": before, "load_after": load(), "rounds": args.rounds,
             "versions": {peer.name: peer.version for peer in peers if peer.version},
             "skipped": {product: why for peer in peers for product, why in peer.skipped.items()}}
    write(facts, records)
    if args.json:
        args.json.write_text(json.dumps({**facts, "records": records}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
