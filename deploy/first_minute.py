#!/usr/bin/env python3
"""Draws first_minute.svg: a terminal in which a server starts and is called. Commands run for real, on the demo checkpoint.

    deploy/first_minute.py build/release/bin deploy/first_minute.svg
"""
import html
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL, WEIGHT = "all-MiniLM-L6-v2-awq", "encoder.layer.0.intermediate.dense"
SERVE = "awqd --model_repository tests/data/awq &"
CALLS = [
    f"awqctl models {MODEL} | head -6",
    f"awqctl matmul {MODEL} {WEIGHT} --random 8 -o y.npy",
    f"awqctl dequantize {MODEL} {WEIGHT} -o w.npy",
    f"awqctl bench --weight {MODEL}/{WEIGHT} --concurrency 1,16 --duration 2",
]
COLUMNS, LINE, LETTER, MARGIN = 112, 18, 8, 14
TYPED_S, SHOWN_S = 1.2, 0.12  # between a command and its output; between lines


def cut(line):
    line = line.rstrip()
    return line if len(line) <= COLUMNS else line[:COLUMNS - 3] + "..."


def run(binaries):
    """(is a command, line) of everything that the terminal shows."""
    lines = [(True, SERVE)]
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "log"
        environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "AWQD_ADDRESS": "127.0.0.1:8001"}
        with log.open("w") as out:
            server = subprocess.Popen([binaries / "awqd", "--model_repository", ROOT / "tests/data/awq", "--device=cpu"], stdout=out, stderr=out)
        try:
            for _ in range(200):
                if " ready " in log.read_text():
                    break
                assert server.poll() is None, log.read_text()
                time.sleep(0.05)
            told = [line for line in log.read_text().splitlines() if " device " in line or " listening " in line or " loaded " in line or " ready " in line]
            lines += [(False, cut(line)) for line in told]
            for command in CALLS:
                done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
                                      check=False)
                assert done.returncode in (0, 141), f"{command}: {done.stderr}"
                lines += [(False, ""), (True, command)] + [(False, cut(line)) for line in done.stdout.splitlines()]
        finally:
            server.terminate()
            server.wait()
    return lines


def draw(lines):
    width, height = COLUMNS * LETTER + 2 * MARGIN, (len(lines) + 1) * LINE + 2 * MARGIN
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
           'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="13" fill="#d6dde6">',
           "<title>The first minute: a server starts, lists a model, multiplies, dequantises and is measured</title>",
           "<style>text{white-space:pre}.l{animation:s .01s both}.c{fill:#8fd18f}@keyframes s{from{opacity:0}to{opacity:1}}"
           "@media (prefers-reduced-motion){.l{animation:none}}</style>",
           f'<rect width="{width}" height="{height}" rx="8" fill="#1d2430"/>']
    at = 0.0
    for number, (command, line) in enumerate(lines, 1):
        if line:
            shown = f'<tspan class="c">$ </tspan>{html.escape(line)}' if command else html.escape(line)
            out.append(f'<text x="{MARGIN}" y="{MARGIN + number * LINE}" class="l" style="animation-delay:{at:.2f}s">{shown}</text>')
        at += TYPED_S if command else SHOWN_S
    return "\n".join([*out, "</svg>", ""])


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    pathlib.Path(sys.argv[2]).write_text(draw(run(pathlib.Path(sys.argv[1]).resolve())))


if __name__ == "__main__":
    main()
