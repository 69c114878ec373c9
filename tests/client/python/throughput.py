"""How fast the Python client is beside the C++ client: products whose activations take 1 MiB, closed loop, of a layer with few
columns, so that what is measured is moving bytes.

Not part of the suite, as it measures. `awqctl bench` is the C++ client:

    tests/client/python/run.sh build/cpu --collect-only    # makes the virtual environment
    AWQD_BUILD=build/cpu build/cpu/python-venv/bin/python tests/client/python/throughput.py
"""
import concurrent.futures
import json
import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "interop"))

import awqd  # noqa: E402
from server import Server, awqctl  # noqa: E402

MODEL, WEIGHT, K, N = "narrow", "layer", 4096, 64
TOKENS = (1 << 20) // (K * 2)
SECONDS = 1.5
ROUNDS = 7


def python(address, callers, shared):
    x = np.random.default_rng(0).uniform(-1, 1, (TOKENS, K)).astype(np.float16)
    with awqd.Client(address, shared_memory=shared) as client:
        client.matmul(MODEL, WEIGHT, x)
        client.matmul(MODEL, WEIGHT, x)
        end = time.monotonic() + SECONDS

        def loop(_):
            count = 0
            while time.monotonic() < end:
                client.matmul(MODEL, WEIGHT, x)
                count += 1
            return count

        with concurrent.futures.ThreadPoolExecutor(callers) as pool:
            return sum(pool.map(loop, range(callers))) / SECONDS


def stream(address):
    """One thread with matmul_stream."""
    x = np.random.default_rng(0).uniform(-1, 1, (TOKENS, K)).astype(np.float16)
    with awqd.Client(address) as client:
        client.matmul(MODEL, WEIGHT, x)
        end = time.monotonic() + SECONDS
        xs = (x for _ in iter(lambda: time.monotonic() < end, False))
        return sum(1 for _ in client.matmul_stream(MODEL, WEIGHT, xs)) / SECONDS


def cpp(address, callers, shared):
    report = awqctl("--address", address, "--json", "bench", "--weight", f"{MODEL}/{WEIGHT}", "--tokens", TOKENS,
                    "--concurrency", callers, "--warmup", 0.5, "--duration", SECONDS, *(["--shared_memory"] if shared else []))
    return json.loads(report)["points"][0]["requests_per_s"]


def checkpoint(folder):
    """A quantised model of one layer."""
    (folder / "dense").mkdir()
    weight = np.random.default_rng(0).normal(0, 0.02, (N, K)).astype(np.float16)
    save_file({f"{WEIGHT}.weight": weight}, folder / "dense" / "model.safetensors")
    (folder / "dense" / "config.json").write_text('{"model_type": "test"}')
    awqctl("quantize", folder / "dense", "-o", folder / MODEL)
    return folder / MODEL


with tempfile.TemporaryDirectory() as folder, Server(f"--model={MODEL}={checkpoint(pathlib.Path(folder))}") as server:
    for callers in (1, 4):
        for shared in (False, True):
            # They alternate, so that other load on the machine affects both.
            rates = [(cpp(server.address, callers, shared), python(server.address, callers, shared)) for _ in range(ROUNDS)]
            a, b = (statistics.median(values) for values in zip(*rates))
            print(f"{callers} callers, {'shared memory' if shared else 'messages'}: medians of {ROUNDS}: C++ {a:.0f}/s, Python {b:.0f}/s, "
                  f"{100 * b / a:.0f} %", flush=True)
    # One thread that keeps eight in flight, beside eight callers of the bench.
    rates = [(cpp(server.address, 8, False), stream(server.address)) for _ in range(ROUNDS)]
    a, b = (statistics.median(values) for values in zip(*rates))
    print(f"matmul_stream, one thread: medians of {ROUNDS}: C++ with 8 callers {a:.0f}/s, Python {b:.0f}/s, {100 * b / a:.0f} %")
