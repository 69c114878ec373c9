#!/usr/bin/env python3
"""Makes checkpoints of weights in FasterTransformer's order (Turing and Ampere) and their goldens.

Follows the steps of its preprocess_weights_for_mixed_gemm on whole arrays, one step a function, and nothing else of it:
rows permuted within a tile of the tensor core, transposed, columns interleaved within 64 rows, a bias added, elements of a
32-bit register interleaved. Its own code, built for the host, gave the same bytes for every weight here. Needs numpy
(2.4.6 made what is checked in).

Usage: make_fastertransformer.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Goldens, dequantise

ROWS = {8: [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15],
        4: [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27, 4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23,
            30, 31]}
REGISTER = {8: [0, 2, 1, 3], 4: [0, 2, 4, 6, 1, 3, 5, 7]}
COLUMNS = {8: 2, 4: 4}  # that are interleaved
TILE = 64  # rows


def quantise(weight, bits, group):
    """FP32 [K, N] -> signed [K, N] and FP16 scales [groups, N]: the largest of a column, or a group of its rows, over
    2^(bits-1); the most positive codes are clipped."""
    k, n = weight.shape
    most = 1 << (bits - 1)
    groups = weight.reshape(k // group, group, n)
    step = (np.abs(groups).max(axis=1) / np.float32(most)).astype(np.float32)
    codes = np.rint(groups / step[:, None]).clip(-most, most - 1)
    return codes.reshape(k, n).astype(np.int64), step.astype("<f2")


def permute_rows(codes, bits):
    order = np.array(ROWS[bits])
    tiles = codes.reshape(-1, len(order), codes.shape[1])
    return tiles[:, order].reshape(codes.shape)


def interleave_columns(columns, bits):
    """[N, K], each row a column of the weight -> a line for each `COLUMNS` of them: 64 rows of the first, of the second."""
    n, k = columns.shape
    width = COLUMNS[bits]
    return columns.reshape(n // width, width, k // TILE, TILE).transpose(0, 2, 1, 3).reshape(n // width, -1)


def interleave_registers(values, bits):
    order = np.array(REGISTER[bits])
    return values.reshape(-1, len(order))[:, order].reshape(-1)


def pack(values, bits):
    """Unsigned values to bytes, the first in the low bits."""
    if bits == 8:
        return values.astype("u1")
    pairs = values.reshape(-1, 2).astype(np.uint32)
    return (pairs[:, 0] | pairs[:, 1] << 4).astype("u1")


def preprocess(codes, bits):
    """Signed [K, N] -> I8 [K, N * bits / 8] in FasterTransformer's order."""
    k, n = codes.shape
    lines = interleave_columns(permute_rows(codes, bits).T, bits)
    values = interleave_registers(lines + (1 << (bits - 1)), bits)
    return pack(values, bits).view("i1").reshape(k, n * bits // 8)


def make(goldens, model, description, *, k, n, bits, group=None, bias=False):
    random = np.random.default_rng(bits * 100 + k + n)
    weight = (random.standard_normal((k, n)) * 0.05).astype(np.float32)
    codes, scales = quantise(weight, bits, group or k)
    tensors = {"layer.weight": preprocess(codes, bits),
               "layer.weight_scale": scales if group else scales[0], "norm.weight": np.ones(k, "<f2")}
    if bias:
        tensors["layer.bias"] = random.standard_normal(n).astype("<f2")
    settings = {"quant_method": "fastertransformer", "bits": bits}
    if group:
        settings["group_size"] = group
    goldens.checkpoint(model, settings, tensors)
    goldens.case(model, "layer", description, dequantise(codes, 0, scales, group or k), tensors.get("layer.bias"))


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    make(goldens, "int8-columns", "w8cs", k=128, n=64, bits=8, bias=True)
    make(goldens, "int4-columns", "w4cs", k=128, n=64, bits=4, bias=True)
    make(goldens, "int8-groups", "w8g64s", k=192, n=64, bits=8, group=64)
    make(goldens, "int4-groups", "w4g64s", k=128, n=128, bits=4, group=64)
    goldens.finish()


if __name__ == "__main__":
    main()
