#!/usr/bin/env python3
"""Makes checkpoints of weights in the order of Gemlite's pack_warped_int32 and their goldens.

The packer follows what the README of Gemlite's CUDA version says: W_q [N, K] is padded along K, laid out as tiles of 32
codes, and every 32 / bits tiles become one tile of 32 words, the first in the highest bits. Three bits, groups, real zeros
and several columns' scales are more than that version has. Needs numpy (2.4.6 made what is checked in).

Usage: make_gemlite.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, Goldens, wide

LANES = 32


def pack_warped(codes, bits):
    """W_q [N, K] -> I32, [N, words of a row] where the rows fill whole tiles, else flat."""
    n, k = codes.shape
    step = 32 // bits
    padded = np.pad(codes.astype(np.uint64), ((0, 0), (0, -k % step)))
    flat = padded.reshape(-1)
    tiles = np.pad(flat, (0, -len(flat) % (LANES * step))).reshape(-1, step, LANES)
    words = np.zeros((len(tiles), LANES), np.uint64)
    for tile in range(step):
        words |= tiles[:, tile] << np.uint64(32 - bits * (tile + 1))
    words = words.astype("<u4").view("<i4").reshape(-1)
    rows = n * padded.shape[1] // step
    return words.reshape(n, -1) if rows == len(words) else words


def weight_of(codes, zeros, scales, group, divide):
    """FP16 [K, N]: (code - zero) * scale with each step in FP32, a divisor as its FP32 reciprocal."""
    k = codes.shape[1]

    def spread(values):  # [1], [N] or [groups, N] -> [K or 1, N or 1]
        values = wide(values) if isinstance(values, Bf16) or values.dtype.kind == "f" else values.astype(np.float32)
        return values[np.arange(k) // group] if values.ndim == 2 else values[None]

    scale = np.float32(1) / spread(scales) if divide else spread(scales)
    return ((codes.T.astype(np.float32) - spread(zeros)) * scale).astype(np.float32).astype(np.float16)


def make(goldens, model, description, *, k, n, bits, zeros=None, scales=None, group=None, divide=True, bias=False):
    random = np.random.default_rng(bits * 1000 + k + n)
    codes = random.integers(0, 1 << bits, (n, k))
    packed = pack_warped(codes, bits)
    tensors = {"layer.qweight": packed, "norm.weight": np.ones(k, "<f2")}
    if zeros is not None:
        tensors["layer.zeros"] = zeros(random)
    if scales is not None:
        tensors["layer.scales"] = scales(random)
    if bias:
        tensors["layer.bias"] = random.standard_normal(n).astype("<f4")
    settings = {"quant_method": "gemlite", "bits": bits, "in_features": k}
    if packed.ndim == 1:
        settings["out_features"] = n
    if group:
        settings["group_size"] = group
    if not divide:
        settings["scale_mode"] = "multiply"
    goldens.checkpoint(model, settings, tensors)
    weight = weight_of(codes, tensors.get("layer.zeros", np.zeros(1, "u1")),
                       tensors.get("layer.scales", np.ones(1, "<f4")), group or k, divide)
    integers = None if scales or bias else codes.T - tensors.get("layer.zeros", np.zeros(1, "u1")).astype(np.int64)
    goldens.case(model, "layer", description, weight, tensors.get("layer.bias"), integers)


def positive(shape, low, high, dtype):
    return lambda random: random.uniform(low, high, shape).astype(dtype)


def integers(shape, most, dtype="u1"):
    return lambda random: random.integers(0, most + 1, shape).astype(dtype)


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    make(goldens, "one", "w4cm7+1*t", k=256, n=64, bits=4, zeros=lambda _: np.array([7], "<i4"),
         scales=lambda _: np.array([37.5], "<f4"))
    make(goldens, "real-zero", "w8tr:fp32+1*t", k=256, n=32, bits=8, zeros=lambda _: np.array([127.25], "<f4"),
         scales=lambda _: np.array([900], "<f2"), bias=True)
    make(goldens, "columns", "w2cz+1*c", k=100, n=24, bits=2, zeros=integers(24, 3), scales=positive(24, 8, 32, "<f2"))
    make(goldens, "three-bits", "w3g32z", k=160, n=40, bits=3, zeros=integers((5, 40), 7),
         scales=positive((5, 40), 0.01, 0.1, "<f2"), group=32, divide=False)
    make(goldens, "one-bit", "w1g32r:fp32+bf16", k=96, n=16, bits=1, zeros=positive((3, 16), 0.25, 0.75, "<f4"),
         scales=lambda random: Bf16(random.uniform(0.01, 0.1, (3, 16))), group=32, divide=False)
    make(goldens, "divided-groups", "w4g24s+fp32", k=64, n=48, bits=4, zeros=lambda _: np.array([8], "u1"),
         scales=positive((3, 48), 8, 32, "<f4"), group=24, bias=True)
    for bits, k, zeros in ((8, 128, None), (4, 256, lambda _: np.array([7], "<i4")), (3, 50, integers(16, 7)),
                           (2, 96, integers(16, 3)), (1, 64, integers(16, 1))):
        kind = "c" if zeros is None else "cm7" if bits == 4 else "cz"
        make(goldens, f"integers-{bits}", f"w{bits}{kind}+1", k=k, n=16, bits=bits, zeros=zeros)
    goldens.finish()


if __name__ == "__main__":
    main()
