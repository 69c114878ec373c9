#!/usr/bin/env python3
"""Tables and a plot of a GPU bench run: gpu_report.py BENCH.jsonl [--svg FILE] [--into FILE --run NAME] > tables.md

Reads the JSON lines of awqd_bench. What serves a count of tokens by default is the fused row of the plan; the dense
path stands beside it. The plot has a panel per shape, time against tokens, both logarithmic, with the floors of the
same run drawn in. --into puts the tables where a file has marks for this run. A run of several quantization schemes
gets one table, schemes x tokens, and its plot colours the same cells. Needs nothing but Python 3.
"""
import argparse
import html
import json
import math
import pathlib
import re
import sys

PANEL = (420, 300)
MARGIN = (58, 34, 24, 40)  # left, top, right, bottom
SERIES = [  # key, label, colour, dashes
    ("fused", "awqd, fused", "#0b6", ""),
    ("invariant", "awqd, fused, --batch_invariant", "#075", "3 2"),
    ("dense", "awqd, dequantise + dense", "#e80", ""),
    ("cublaslt", "cuBLASLt FP16, dense weights", "#36c", ""),
    ("stream", "floor: reading the packed weights", "#888", "5 4"),
    ("matrix", "floor: 750 TFLOP/s", "#c44", "2 4"),
]
WIDE = 16  # counts of tokens, from which a table has a row for each instead of a column
MARK = re.compile(r"<!-- gpu_report: (\S+) (\S+) -->")
LABEL = (7, 8)  # pixels: a digit of an axis is at most so wide, two labels are at least so far apart
LIBRARY = "libawqd:"  # before the name of a row: the case by awqd.h
SLOWER = 1.05  # than a larger count: more is a fault of the choice of tiles


def load(path):
    """{(k, n): {m: {series: microseconds}}}, {(k, n): {dtype: (us, floor)}}"""
    products, dequantize = {}, {}
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        shape = run["k"], run["n"]
        library = run["row"].startswith(LIBRARY)
        if run["m"] == 0 and not library:
            dequantize.setdefault(shape, {})[run["dtype"]] = run["us"], run["expand_us"]
        if run["m"] == 0:
            continue
        at = products.setdefault(shape, {}).setdefault(run["m"], {})
        if library:
            if not run["row"].startswith(LIBRARY + "dense/"):
                at["library"], at["beside"] = run["us"], run["row_us"]
            continue
        if run.get("batch_invariant"):
            at["invariant"] = run["us"]
            continue
        at["dense" if run["row"].startswith("dense/") else "fused"] = run["us"]
        at["stream"] = run["stream_us"]
        at["matrix"] = 2 * run["m"] * run["k"] * run["n"] / 750e6
        if "cublaslt_us" in run:  # the best that any row of this run met
            at["cublaslt"] = min(run["cublaslt_us"], at.get("cublaslt", math.inf))
    return products, dequantize


def load_schemes(path):
    """{scheme: {m: {(k, n): time of the fused product / cuBLASLt's of the same run}}}"""
    ratios = {}
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if run["m"] > 0 and "cublaslt_us" in run and not run["row"].startswith("dense/"):
            at = ratios.setdefault(run["weight"], {}).setdefault(run["m"], {})
            at[run["k"], run["n"]] = run["us"] / run["cublaslt_us"]
    return ratios


def number(us):
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def product_table(products, tokens, series, floor):
    rows = []
    for (k, n), by_m in products.items():
        row = [f"{k} x {n}"]
        for m in tokens:
            at = by_m.get(m, {})
            limit = floor(at) if at else None
            row.append(f"{number(at[series])} ({at[series] / limit:.2f})" if series in at and limit else "")
        if any(row[1:]):
            rows.append(row)
    return table(["K x N"] + [f"M={m}" for m in tokens], rows)


def by_count(products, counts):
    """Microseconds of the fused product with a row for each count."""
    return table(["M"] + [f"{k} x {n}" for k, n in products], [
        [str(m)] + [number(by_m[m]["fused"]) if "fused" in by_m.get(m, {}) else "" for by_m in products.values()]
        for m in counts])


def slower_counts(by_m):
    """The counts that take at least SLOWER times a larger one, and those that take longer than cuBLASLt."""
    counts = sorted(m for m, at in by_m.items() if "fused" in at)
    than_larger, than_dense = [], []
    for i, m in enumerate(counts):
        us = by_m[m]["fused"]
        larger = min(counts[i + 1:], key=lambda count: by_m[count]["fused"], default=m)
        ratio = us / by_m[larger]["fused"]
        if ratio > SLOWER:
            than_larger.append(f"{m} ({ratio:.2f} x {larger})")
        if us > by_m[m].get("cublaslt", math.inf):
            than_dense.append(f"{m} ({us / by_m[m]['cublaslt']:.2f})")
    return len(counts), than_larger, than_dense


def slower_table(products):
    rows = []
    for (k, n), by_m in products.items():
        count, than_larger, than_dense = slower_counts(by_m)
        rows.append([f"{k} x {n}", str(count), ", ".join(than_larger) or "none", ", ".join(than_dense) or "none"])
    return table(["K x N", "counts", f"more than {SLOWER:g} x a larger count", "slower than cuBLASLt"], rows)


def dequantize_table(dequantize):
    types = ["FP16", "BF16", "FP32"]
    return table(["K x N"] + types, [
        [f"{k} x {n}"] + [f"{number(by[t][0])} ({by[t][0] / by[t][1]:.2f})" if t in by else "" for t in types]
        for (k, n), by in dequantize.items()])


def tables(products, dequantize):
    """{name: (heading, table)} of what the run has."""
    counts = sorted({m for by_m in products.values() for m in by_m})
    out = {"slower": ("Fused product: counts of tokens that are slower than they may be", slower_table(products))}
    if len(counts) > WIDE:
        out["counts"] = "Fused product: microseconds", by_count(products, counts)
        return out
    few, many = [m for m in counts if m <= 128], [m for m in counts if m > 128]
    out["floor"] = ("Fused product: ratio to max(reading the packed weights, 750 TFLOP/s)",
                    product_table(products, few, "fused", lambda at: max(at["stream"], at["matrix"])))
    out["cublaslt"] = ("Fused product: ratio to cuBLASLt FP16 with dense weights",
                       product_table(products, counts, "fused", lambda at: at.get("cublaslt")))
    if any("invariant" in at for by_m in products.values() for at in by_m.values()):
        out["invariant"] = ("Fused product with --batch_invariant: ratio to without",
                            product_table(products, counts, "invariant", lambda at: at.get("fused")))
    if any("library" in at for by_m in products.values() for at in by_m.values()):
        out["library"] = ("Fused product by libawqd: ratio to the row, in turns",
                          product_table(products, counts, "library", lambda at: at.get("beside")))
    if any("dense" in at for by_m in products.values() for at in by_m.values()):
        out["dense"] = ("Dequantise, then dense product: ratio to cuBLASLt",
                        product_table(products, many, "dense", lambda at: at.get("cublaslt")))
    if dequantize:
        out["dequantize"] = ("Dequantize: ratio to the expand floor (for FP32 output, one that writes FP32)",
                             dequantize_table(dequantize))
    return out


def scheme_tables(ratios):
    counts = sorted({m for by_m in ratios.values() for m in by_m})
    shapes = sorted({shape for by_m in ratios.values() for at in by_m.values() for shape in at})
    head = "Fused product: ratio to cuBLASLt FP16 with dense weights, " + " / ".join(f"{k} x {n}" for k, n in shapes)
    return {"schemes": (head, table(["scheme"] + [f"M={m}" for m in counts], [
        [f"`{scheme}`"] + [" / ".join(f"{by_m[m][s]:.2f}" if s in by_m.get(m, {}) else "-" for s in shapes)
                           for m in counts]
        for scheme, by_m in ratios.items()]))}


def shade(ratio):
    """Green below 1, white at 1, red above: the further, the darker."""
    depth = min(1.0, abs(math.log2(ratio)) / 1.5)
    pale = round(255 - 150 * depth)
    return f"rgb({pale},{round(255 - 60 * depth)},{pale})" if ratio < 1 else f"rgb(255,{pale},{pale})"


def schemes_svg(ratios, title):
    cell, row, left, top = 58, 24, 170, 60
    counts = sorted({m for by_m in ratios.values() for m in by_m})
    width, height = left + cell * len(counts) + 14, top + row * len(ratios) + 14
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           'font-family="sans-serif" font-size="12">', f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="14" y="20" font-size="14" font-weight="bold">{html.escape(title)}: time / cuBLASLt FP16 with dense '
           'weights</text>']
    for i, m in enumerate(counts):
        out.append(f'<text x="{left + cell * (i + 0.5)}" y="{top - 10}" text-anchor="middle">M={m}</text>')
    for j, (scheme, by_m) in enumerate(ratios.items()):
        y = top + row * j
        out.append(f'<text x="14" y="{y + 17}">{html.escape(scheme)}</text>')
        for i, m in enumerate(counts):
            if m in by_m:
                worst = max(by_m[m].values())
                out.append(f'<rect x="{left + cell * i}" y="{y}" width="{cell - 2}" height="{row - 2}" '
                           f'fill="{shade(worst)}"/><text x="{left + cell * (i + 0.5) - 1}" y="{y + 16}" '
                           f'text-anchor="middle">{worst:.2f}</text>')
    return "\n".join(out + ["</svg>\n"])


def put_into(text, run, by_name):
    """`text` with the table after each mark `<!-- gpu_report: RUN NAME -->` of this run replaced."""
    lines, out, marks = text.splitlines(), [], 0
    i = 0
    while i < len(lines):
        out.append(lines[i])
        mark = MARK.fullmatch(lines[i])
        i += 1
        if not mark or mark[1] != run:
            continue
        if mark[2] not in by_name:
            raise ValueError(f'mark "{mark[0]}": got no such table, expected one of {", ".join(by_name)}')
        if i == len(lines) or not lines[i].startswith("|"):
            raise ValueError(f'mark "{mark[0]}": expected a table on the next line')
        while i < len(lines) and lines[i].startswith("|"):
            i += 1
        out += by_name[mark[2]][1].splitlines()
        marks += 1
    if not marks:
        raise ValueError(f'got no mark "<!-- gpu_report: {run} NAME -->"')
    return "\n".join(out) + "\n"


def ticks(low, high):
    """1, 2 and 5 times powers of ten within [low, high]."""
    out = [step * 10.0**e for e in range(-1, 7) for step in (1, 2, 5)]
    return [t for t in out if low <= t <= high]


def token_labels(counts, place):
    """The powers of two among the counts, or of four, of eight, ...: the first of these whose labels keep apart."""
    powers = [m for m in counts if m & (m - 1) == 0]
    for step in range(1, 2 + max(powers, default=1).bit_length()):
        shown = [m for m in powers if (m.bit_length() - 1) % step == 0]
        if all(place(b) - place(a) >= LABEL[0] * (len(str(a)) + len(str(b))) / 2 + LABEL[1]
               for a, b in zip(shown, shown[1:])):
            break
    return shown


def panel(shape, by_m, left, top, series):
    """SVG of one shape."""
    width, height = PANEL[0] - MARGIN[0] - MARGIN[2], PANEL[1] - MARGIN[1] - MARGIN[3]
    counts = sorted(by_m)
    values = [v for at in by_m.values() for key, v in at.items() if key not in ("matrix", "library", "beside")]
    low, high = min(values) / 1.15, max(values) * 1.15
    x0, x1 = math.log(counts[0]), math.log(max(counts[-1], counts[0] + 1))

    def across(m):
        return left + MARGIN[0] + width * (math.log(m) - x0) / (x1 - x0)

    def place(m, us):
        y = top + MARGIN[1] + height * (1 - math.log(us / low) / math.log(high / low))
        return f"{across(m):.1f},{y:.1f}"

    out = [f'<text x="{left + MARGIN[0]}" y="{top + 20}" class="t">{shape[0]} x {shape[1]}</text>']
    for us in ticks(low, high):
        x, y = place(counts[0], us).split(",")
        out.append(f'<path d="M{x},{y}h{width}" class="g"/><text x="{float(x) - 6:.1f}" y="{float(y) + 4:.1f}" '
                   f'class="r">{us:g}</text>')
    for m in token_labels(counts, across):
        out.append(f'<text x="{across(m):.1f}" y="{top + PANEL[1] - 22}" class="c">{m}</text>')
    for key, _, colour, dashes in series:
        points = [place(m, by_m[m][key]) for m in counts if low <= by_m[m].get(key, 0)]
        if points:
            dash = f' stroke-dasharray="{dashes}"' if dashes else ""
            out.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
    return "\n".join(out)


def svg(products, title, series=SERIES):
    columns = min(2, len(products))
    rows = -(-len(products) // columns)
    width, height = columns * PANEL[0], rows * PANEL[1] + 66
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           'font-family="sans-serif" font-size="11">',
           "<style>.g{stroke:#ddd}.t{font-size:14px;font-weight:bold}.r{text-anchor:end}.c{text-anchor:middle}</style>",
           f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="14" y="20" class="t">{html.escape(title)}: microseconds against tokens</text>']
    x, y = 14, 42
    for _, label, colour, dashes in series:
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        if x + 30 + 6.2 * len(label) > width:
            x, y = 14, y + 16
        out.append(f'<path d="M{x},{y - 4}h24" stroke="{colour}" stroke-width="2"{dash}/>'
                   f'<text x="{x + 29}" y="{y}">{label}</text>')
        x += 45 + int(6.2 * len(label))
    for i, (shape, by_m) in enumerate(products.items()):
        out.append(panel(shape, by_m, i % columns * PANEL[0], 62 + i // columns * PANEL[1], series))
    return "\n".join(out + ["</svg>\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs")
    parser.add_argument("--svg", help="where the plot goes")
    parser.add_argument("--title", default="y = x W", help="of the plot: the GPU, the date")
    parser.add_argument("--into", help="a file whose tables after <!-- gpu_report: RUN NAME --> are replaced")
    parser.add_argument("--run", default="fp16", help="which of its marks are meant")
    args = parser.parse_args()
    ratios = load_schemes(args.runs)
    several = len(ratios) > 1
    products, dequantize = ({}, {}) if several else load(args.runs)
    if not products and not dequantize and not several:
        sys.exit(f"{args.runs}: got no runs")
    by_name = scheme_tables(ratios) if several else tables(products, dequantize)
    print("\n".join(f"### {heading}\n\n{body}" for heading, body in by_name.values()))
    if args.into:
        path = pathlib.Path(args.into)
        try:
            path.write_text(put_into(path.read_text(encoding="utf-8"), args.run, by_name), encoding="utf-8")
        except ValueError as error:
            sys.exit(f"{path}: {error}")
    if args.svg and (products or several):
        with open(args.svg, "w", encoding="utf-8") as file:
            file.write(schemes_svg(ratios, args.title) if several else svg(products, args.title))


if __name__ == "__main__":
    main()
