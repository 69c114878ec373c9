"""Has Triton's perf_analyzer measure a server, and prints the table of tests/bench/results/perf_analyzer.md.

    pip install perf-analyzer==2.60.0        # glibc 2.38 or newer
    python3 tests/interop/perf_table.py --address 127.0.0.1:8001 --tokens 1 --concurrency 1 2 4 8 16
"""
import argparse
import csv
import pathlib
import subprocess
import tempfile

NAME = "all-MiniLM-L6-v2-awq/encoder.layer.0.intermediate.dense"


class Unstable(Exception):
    """Ten windows did not agree with one another."""


def measure(address, tokens, folder, *options, program="perf_analyzer", name=NAME):
    """Rows of perf_analyzer's own report: a request's batch is its tokens, whose values it makes up."""
    report = folder / "report.csv"
    report.unlink(missing_ok=True)
    done = subprocess.run([program, "-m", name, "-i", "grpc", "-u", address, "-b", f"{tokens}", "-f", report, *options],
                          capture_output=True, text=True, timeout=600, check=False)
    said = done.stdout + done.stderr
    if "Failed to obtain stable measurement" in said:
        raise Unstable
    assert done.returncode == 0 and report.exists(), said
    return list(csv.DictReader(report.read_text().splitlines()))


def main():
    parser = argparse.ArgumentParser(description="Measures with perf_analyzer and prints a table.")
    parser.add_argument("--address", default="127.0.0.1:8001")
    parser.add_argument("--program", default="perf_analyzer", help="of another folder than those of PATH")
    parser.add_argument("--model", default=NAME, help="MODEL/WEIGHT")
    parser.add_argument("--tokens", type=int, default=1, help="of each request")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--window_ms", type=int, default=3000)
    parser.add_argument("--stability", type=int, default=10, help="by how many percent three windows in a row may differ")
    options = parser.parse_args()
    print("| requests at a time | requests a second | p50, ms | p99, ms |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for concurrency in options.concurrency:
            try:
                row, = measure(options.address, options.tokens, pathlib.Path(folder), "--concurrency-range", f"{concurrency}",
                               "-p", f"{options.window_ms}", "-s", f"{options.stability}", program=options.program, name=options.model)
            except Unstable:
                print(f"| {concurrency} | not stable | | |", flush=True)
                continue
            print(f"| {concurrency} | {float(row['Inferences/Second']) / options.tokens:.0f} | {float(row['p50 latency']) / 1000:.2f} "
                  f"| {float(row['p99 latency']) / 1000:.2f} |", flush=True)


if __name__ == "__main__":
    main()
