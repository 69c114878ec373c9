#!/usr/bin/env python3
"""Prints the FNV-1a hashes (64 bit) of blocks that gguf.quants.quantize (PyPI gguf 0.19.0) makes of numbers that a test makes
likewise: tests/client/tools/gguf_test.cc has them."""
import pathlib
import sys

import gguf
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import fnv1a64


def numbers(count):
    """Integers of a linear congruential generator over 2^12 times a power of two of each block; block 3 is zeros, and block 5
    has two of the largest magnitude."""
    state, out = 1, np.empty(count, np.float32)
    for i in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        out[i] = np.float32((state >> 8) % 8191 - 4095) / np.float32(4096) * np.float32(2.0**(i // 32 % 9 - 6))
    out[96:128] = 0
    out[160 + 7], out[160 + 9] = -1, 1
    return out


for name in ("Q8_0", "Q4_0"):
    blocks = gguf.quants.quantize(numbers(64 * 256).reshape(64, 256), gguf.GGMLQuantizationType[name])
    print(name, fnv1a64(blocks.tobytes()))
