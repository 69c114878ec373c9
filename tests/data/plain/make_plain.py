#!/usr/bin/env python3
"""Makes checkpoints of the format "plain" and their goldens. Shapes are odd on purpose: a short last group, columns
that fill no byte, codes of 3 bits. Needs numpy (2.4.6 made what is checked in).

Usage: make_plain.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, Goldens, dequantise


def make(goldens, model, description, *, k, n, bits, group, scale_type, zero=None, symmetric=False, bias_type=None):
    """`zero`: None for stored zeros, else one for all."""
    random = np.random.default_rng(bits * 1000 + k)
    groups = -(-k // group)
    codes = random.integers(0, 1 << bits, (k, n)).astype("u1")
    scales = scale_type(random.uniform(0.002, 0.03, (groups, n)).astype(np.float32))
    settings = {"quant_method": "plain", "bits": bits, "group_size": -1 if group == k else group}
    tensors = {"layer.codes": codes, "layer.scales": scales, "norm.weight": np.ones(k, "<f2")}
    value = zero
    if symmetric:
        settings["symmetric"], value = True, 1 << (bits - 1)
    elif zero is None:
        tensors["layer.zeros"] = value = random.integers(0, 1 << bits, (groups, n)).astype("u1")
        value = value.astype(np.int64)
    else:
        settings["zero"] = zero
    bias = None
    if bias_type is not None:
        tensors["layer.bias"] = bias = bias_type(random.standard_normal(n).astype(np.float32))
    goldens.checkpoint(model, settings, tensors)
    goldens.case(model, "layer", description, dequantise(codes, value, scales, group), bias)


def half(values):
    return values.astype("<f2")


def single(values):
    return values.astype("<f4")


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    make(goldens, "w4-groups", "w4g32z", k=80, n=23, bits=4, group=32, scale_type=half, bias_type=Bf16)
    make(goldens, "w8-columns", "w8cs", k=96, n=40, bits=8, group=96, scale_type=half, symmetric=True)
    make(goldens, "w8-groups", "w8g64s+bf16", k=128, n=16, bits=8, group=64, scale_type=Bf16, symmetric=True)
    make(goldens, "w8-fp32", "w8cz+fp32", k=33, n=7, bits=8, group=33, scale_type=single, bias_type=single)
    make(goldens, "w4-columns", "w4cs", k=64, n=32, bits=4, group=64, scale_type=half, symmetric=True, bias_type=half)
    make(goldens, "w4-bf16", "w4g32s+bf16", k=64, n=32, bits=4, group=32, scale_type=Bf16, symmetric=True)
    make(goldens, "w3-constant", "w3g16m5", k=48, n=13, bits=3, group=16, scale_type=half, zero=5)
    make(goldens, "w1", "w1g8z", k=24, n=9, bits=1, group=8, scale_type=half)
    goldens.finish()


if __name__ == "__main__":
    main()
