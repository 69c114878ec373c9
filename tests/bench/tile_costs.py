#!/usr/bin/env python3
"""Fits the steps of kernels/cuda/sm90a/tile_list.h to measurements: tile_costs.py TILES.jsonl... [--write]

Reads the JSON lines of awqd_bench --tiles (tests/gpu/bench.sh --tiles), any number of files, of either type of
activations of 16 bits (those of INT8 include the prologue), with and without --batch_invariant. What is around the steps stays as the model has it; the step of each
tile that was measured becomes the one with the least squares of relative errors, in which times that are more than a
tenth above a product's fastest count for less: no choice rests on them. Prints how far the model is off before and
after; --write puts the steps into the header. Needs nothing but Python 3.
"""
import argparse
import collections
import json
import math
import pathlib
import re

HEADER = pathlib.Path(__file__).resolve().parents[2] / "kernels/cuda/sm90a/tile_list.h"
TYPES = ("FP16", "BF16")  # in the order of a row's steps
NEAR, FAR_WEIGHT = 1.1, 0.3
ARRAY = re.compile(r"TileCost (k\w+)\[\] = \{(.*?)\n\};", re.S)
ROW = re.compile(r"\{(\{[0-9, ]+\}), ([0-9.]+), ([0-9.]+)")


def array_of(run):
    """The name of the array that lists the tiles of a row of the registry for such weights."""
    bits = re.match(r"w(\d)", run["weight"])[1]
    return ("kFixedOrderTiles" if run["row"].endswith("_chained") else "kFreeTiles") + bits


def load(paths):
    """{(array, tile, type): [(microseconds, of the model, of its steps, weight)]}"""
    runs = []
    for path in paths:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
        runs += [json.loads(line) for line in lines if '"tile"' in line and '"INT8"' not in line]

    def product(run):
        return run["row"], run["weight"], run["k"], run["n"], run["m"], run["dtype"]
    fastest = collections.defaultdict(lambda: math.inf)
    for run in runs:
        fastest[product(run)] = min(fastest[product(run)], run["us"])
    out = collections.defaultdict(list)
    for run in runs:
        weight = 1 if run["us"] < NEAR * fastest[product(run)] else FAR_WEIGHT
        out[array_of(run), run["tile"], run["dtype"]].append(
            (run["us"], run["model_us"], run["model_steps_us"], weight))
    return out


def factor(cases):
    """The factor of the model's step."""
    above = sum(weight**2 * steps * (us - (model - steps)) / us**2 for us, model, steps, weight in cases)
    return above / sum(weight**2 * steps**2 / us**2 for us, _, steps, weight in cases)


def error(cases, times=1.0):
    """Root mean square of the relative errors, in per cent."""
    off = [(model + (times - 1) * steps) / us - 1 for us, model, steps, _ in cases]
    return 100 * math.sqrt(sum(x * x for x in off) / len(off))


def fit(text, measured):
    """The header's text with the steps of what was measured."""
    def array(match):
        def row(cost):
            steps = [float(cost[2]), float(cost[3])]
            for i, dtype in enumerate(TYPES):
                cases = measured.get((match[1], cost[1], dtype))
                if cases:
                    steps[i] *= factor(cases)
            return f"{{{cost[1]}, {steps[0]:.3f}, {steps[1]:.3f}"
        return match[0].replace(match[2], ROW.sub(row, match[2]))
    return ARRAY.sub(array, text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jsonl", nargs="+", help="lines of awqd_bench --tiles")
    parser.add_argument("--write", action="store_true", help="put the steps into the header")
    flags = parser.parse_args()
    measured = load(flags.jsonl)
    if not measured:
        parser.error("no line of awqd_bench --tiles in " + ", ".join(flags.jsonl))
    for (array, tile, dtype), cases in sorted(measured.items(), key=str):
        times = factor(cases)
        print(f"{array} {tile} {dtype}: {len(cases)} cases, step x {times:.3f}, "
              f"off by {error(cases):.1f} % before, {error(cases, times):.1f} % after")
    if flags.write:
        HEADER.write_text(fit(HEADER.read_text(encoding="utf-8"), measured), encoding="utf-8")


if __name__ == "__main__":
    main()
