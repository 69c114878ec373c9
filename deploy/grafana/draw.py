#!/usr/bin/env python3
"""Draws the panels of awqd.json from a Prometheus: draw.py [--prometheus URL] [--minutes N] [--out panels.png]

For a picture without a Grafana: the same expressions, titles, units and legends over the last minutes. Panels without
series are left out. Needs matplotlib.
"""
import argparse
import json
import pathlib
import re
import time
import urllib.parse
import urllib.request

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot, ticker  # noqa: E402  (the backend comes first)

RATE_INTERVAL, STEP_S, COLUMNS = "20s", 5, 3
UNITS = {"s": lambda y, _: f"{y * 1e3:g} ms",
         "bytes": lambda y, _: f"{y / 2**20:.0f} MiB",
         "percentunit": lambda y, _: f"{y * 100:g} %",
         "reqps": lambda y, _: f"{y:g}/s"}


def series(server, target, minutes):
    """(legend, times in minutes before now, values) of each series of an expression."""
    expression = target["expr"].replace("$__rate_interval", RATE_INTERVAL).replace("$instance", ".*")
    end = time.time()
    query = urllib.parse.urlencode({"query": expression, "start": end - 60 * minutes, "end": end, "step": STEP_S})
    with urllib.request.urlopen(f"{server}/api/v1/query_range?{query}", timeout=30) as answer:
        for found in json.load(answer)["data"]["result"]:
            legend = re.sub(r"{{(\w+)}}", lambda name: found["metric"].get(name[1], ""), target["legendFormat"])
            points = [(float(at), float(value)) for at, value in found["values"]]
            yield legend, [(at - end) / 60 for at, _ in points], [value for _, value in points]


def draw(panels, out):
    rows = -(-len(panels) // COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(15, 2.4 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels):]:
        axis.set_visible(False)
    for axis, (panel, lines) in zip(axes.flat, panels):
        axis.set_title(panel["title"], loc="left", fontsize=10)
        for legend, times, values in lines:
            axis.plot(times, values, label=legend, linewidth=1.2)
        unit = panel["fieldConfig"]["defaults"].get("unit")
        if unit in UNITS:
            axis.yaxis.set_major_formatter(ticker.FuncFormatter(UNITS[unit]))
        axis.set_ylim(0, max((max(values) for _, _, values in lines), default=0) * 1.25 or 1)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6, loc="upper left", framealpha=0.6)
        axis.margins(x=0.01)
    figure.supxlabel("minutes", fontsize=8)
    figure.savefig(out, dpi=80)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--out", type=pathlib.Path, default="panels.png")
    args = parser.parse_args()
    dashboard = json.loads(pathlib.Path(__file__).with_name("awqd.json").read_text())
    panels = [(panel, [line for target in panel["targets"] for line in series(args.prometheus, target, args.minutes)])
              for panel in dashboard["panels"]]
    draw([(panel, lines) for panel, lines in panels if lines], args.out)


if __name__ == "__main__":
    main()
