#!/usr/bin/env python3
"""Draws the ways to a server on this machine beside each other: ways.py --build DIR [--svg FILE] [--title TEXT] > table.md

p50 of a call of one caller, by the tokens of a request: messages over TCP, over a UNIX socket, tensors in shared memory, a
ring, and on a GPU the last two with tensors in its memory; and what the device computes. The ways run in turns; the median
over the rounds counts. With --mlp a call is a gated MLP. Needs numpy for the weight.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import gpu_report
import pairs

WAYS = [  # key, label, colour, dashes
    ("tcp", "messages, TCP", "#c44", ""),
    ("unix", "messages, UNIX socket", "#e80", ""),
    ("shared", "tensors in shared memory", "#36c", ""),
    ("device", "tensors on the GPU", "#90c", ""),
    ("ring", "ring", "#0b6", ""),
    ("ring_device", "ring, tensors on the GPU", "#063", ""),
    ("compute", "on the device", "#888", "5 4"),
]


def flags_of(way, server):
    """The arguments of awqctl before and behind its command."""
    if way == "tcp":
        return ["--address", server.tcp()], []
    more = {"unix": [], "shared": ["--shared_memory"], "device": ["--device_tensors"], "ring": ["--ring", server.ring],
            "ring_device": ["--ring", server.ring, "--device_tensors"]}
    return ["--address", server.address], more[way]


def ways_on(device):
    return [way for way, *_ in WAYS[:-1] if device.startswith("cuda") or "device" not in way]


def measure(server, target, tokens, way, seconds):
    """p50 in microseconds, of the call and of its computation."""
    before, behind = flags_of(way, server)
    report = subprocess.run(
        [server.bin / "awqctl", *before, "bench", "--json", *target, "--tokens", str(tokens),
         "--duration", str(seconds), "--warmup", "0.2", *behind], capture_output=True, text=True, check=False)
    if report.returncode != 0:
        sys.exit(report.stderr)
    point = json.loads(report.stdout)["points"][0]
    if point["errors"]:
        sys.exit(f"{way}: calls failed: {point['errors']}")
    return point["latency"]["p50_us"], point["compute"]["p50_us"]


def medians(runs):
    """{tokens: {way: microseconds}} of the lines (tokens, way, latency, computation)."""
    found = {}
    for tokens, way, latency, compute in runs:
        at = found.setdefault(tokens, {})
        at.setdefault(way, []).append(latency)
        at.setdefault("compute", []).append(compute)
    return {tokens: {way: statistics.median(us) for way, us in at.items()} for tokens, at in found.items()}


def measured(by_tokens):
    """Those of WAYS."""
    return [way for way in WAYS if any(way[0] in at for at in by_tokens.values())]


def table(by_tokens):
    shown = measured(by_tokens)
    return gpu_report.table(["tokens"] + [label for _, label, _, _ in shown], [
        [str(tokens)] + [gpu_report.number(at[key]) for key, _, _, _ in shown] for tokens, at in sorted(by_tokens.items())])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True, help="a build folder, with bin/awqd and bin/awqctl")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="4096x4096", help="K x N of the weight")
    parser.add_argument("--mlp", action="store_true", help="a gated MLP, whose down projection is N x K")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1, help="of each measurement")
    parser.add_argument("--svg", help="where the plot goes")
    parser.add_argument("--title", default="p50 of a call", help="of the plot: the machine, the date")
    args = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(prefix="awqd-") as name:
        folder = pathlib.Path(name)
        down = "x".join(reversed(args.shape.split("x")))
        linears = ([f"mlp.{name}_proj={args.shape}" for name in ("gate", "up")] + [f"mlp.down_proj={down}"] if args.mlp else
                   [f"{args.shape}={args.shape}"])
        target = ["--mlp", f"{pairs.MODEL}/mlp"] if args.mlp else ["--weight", f"{pairs.MODEL}/{args.shape}"]
        make = pairs.HERE / "make_checkpoint.py"
        subprocess.run([sys.executable, make, folder / "models" / pairs.MODEL, *linears], check=True)
        flags = ["--log_level=warning", "--shared_memory_prefix=awqctl-"]
        flags += ["--cuda_shared_memory"] if args.device.startswith("cuda") else []
        server = pairs.Server(args.build / "bin", folder, "server", flags, args.device)
        try:
            for _ in range(args.rounds):
                for tokens in map(int, args.tokens.split(",")):
                    runs += [(tokens, way, *measure(server, target, tokens, way, args.seconds)) for way in ways_on(args.device)]
        finally:
            server.stop()
    by_tokens = medians(runs)
    print(table(by_tokens), end="")
    if args.svg:
        shape = tuple(map(int, args.shape.split("x")))
        pathlib.Path(args.svg).write_text(gpu_report.svg({shape: by_tokens}, args.title, measured(by_tokens)), encoding="utf-8")


if __name__ == "__main__":
    main()
