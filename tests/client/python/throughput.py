"""How fast the Python client is beside the C++ client: products whose activations take about 1 MiB, closed loop.

Not part of the suite, as it measures. `awqctl bench` is the C++ client:

    tests/client/python/run.sh build/cpu --collect-only    # makes the virtual environment
    AWQD_BUILD=build/cpu build/cpu/python-venv/bin/python tests/client/python/throughput.py
"""
import concurrent.futures
import json
import pathlib
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "interop"))

import awqd  # noqa: E402
from server import Server, awqctl  # noqa: E402

MODEL, WEIGHT = "all-MiniLM-L6-v2-awq", "encoder.layer.0.attention.self.query"
TOKENS = (1 << 20) // (384 * 2)
SECONDS = 5


def python(address, callers, shared):
    x = np.random.default_rng(0).uniform(-1, 1, (TOKENS, 384)).astype(np.float16)
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


def cpp(address, callers, shared):
    report = awqctl("--address", address, "--json", "bench", "--weight", f"{MODEL}/{WEIGHT}", "--tokens", TOKENS,
                    "--concurrency", callers, "--warmup", 0.5, "--duration", SECONDS, *(["--shared_memory"] if shared else []))
    return json.loads(report)["points"][0]["requests_per_s"]


with Server() as server:
    for callers in (1, 4):
        for shared in (False, True):
            # Twice, in turns, so that a change of the machine shows.
            rates = [(cpp(server.address, callers, shared), python(server.address, callers, shared)) for _ in range(2)]
            print(f"{callers} callers, {'shared memory' if shared else 'messages'}: " + "; ".join(
                f"C++ {a:.0f}/s, Python {b:.0f}/s, {100 * b / a:.0f} %" for a, b in rates), flush=True)
