#!/usr/bin/env python3
"""Makes the goldens of quantised activations: QServe's W4A8 per group, and W8A8 per channel with dynamic and static scales.
From the formulas of QServe (arXiv 2405.04532, section 4) and of INT8 products:

    q = round(x / a)                                 a = max |x| / 127 of the token, or one for all
    y = a * s1 * sum(q * s2 * (u4 - z)) + bias       integers u4, z, s2 per group, s1 FP16 per channel
    y = a * s * sum(q * (u8 - 128)) + bias           s FP16 per channel

Everything but q and a is computed in float64. Needs numpy (2.4.6 made what is checked in).

Usage: make_qserve_w4a8.py [--out DIR]
"""
import argparse
import json
import pathlib

import numpy as np

TOKENS = 6


def quantise(x, given=None):
    """INT8 of float32 [tokens, K], and the scale of each token."""
    x = x.astype(np.float32)
    if given is None:
        scales = (np.abs(x).max(axis=1) / np.float32(127)).astype(np.float32)
        scales[scales == 0] = 1
        least = -127
    else:
        scales = np.full(x.shape[0], given, np.float32)
        least = -128
    q = np.clip(np.rint((x / scales[:, None]).astype(np.float32)), least, 127)
    return q.astype("i1"), scales


class Writer:
    def __init__(self, folder):
        self.folder = folder
        self.cases = []

    def npy(self, name, array):
        with (self.folder / name).open("wb") as file:
            np.lib.format.write_array(file, np.ascontiguousarray(array), version=(1, 0))

    def case(self, name, description, settings, tensors, x, weight, given=None):
        """`weight`: float64 [K, N]."""
        q, scales = quantise(x, given)
        y = (q.astype(np.float64) @ weight) * scales.astype(np.float64)[:, None]
        if "bias" in tensors:
            y = y + tensors["bias"].astype(np.float64)
        for part, array in {**tensors, "activations": x, "q": q, "token_scales": scales, "product": y}.items():
            self.npy(f"{name}.{part}.npy", array)
        self.cases.append({"name": name, "description": description, "settings": settings, "tensors": sorted(tensors),
                           "static_scale": given})


def tokens(random, k, dtype):
    """One token is zeros, and they are of very different sizes."""
    sizes = np.array([1, 0, 1e-3, 200, 0.5, 3])[:, None]
    return (random.standard_normal((TOKENS, k)) * sizes).astype(dtype)


def two_level(writer, name, k, n, group, most_s2):
    random = np.random.default_rng(k + n)
    groups = -(-k // group)
    codes = random.integers(0, 16, (k, n)).astype("u1")
    zeros = random.integers(0, 16, (groups, n)).astype("u1")
    s2 = random.integers(1, most_s2 + 1, (groups, n)).astype("i1")
    s1 = random.uniform(1e-4, 2e-3, n).astype("<f2")
    rows = np.arange(k) // group
    integers = s2.astype(np.int64)[rows] * (codes.astype(np.int64) - zeros.astype(np.int64)[rows])
    writer.case(name, f"w4g{group}z+int8*c", {"bits": "4", "group_size": str(group)},
                {"codes": codes, "zeros": zeros, "scales": s2, "outer": s1}, tokens(random, k, "<f2"),
                integers.astype(np.float64) * s1.astype(np.float64))


def per_channel(writer, name, k, n, given=None):
    random = np.random.default_rng(k * 3 + n)
    codes = random.integers(0, 256, (k, n)).astype("u1")
    scales = random.uniform(1e-3, 1e-2, (1, n)).astype("<f2")
    weight = (codes.astype(np.int64) - 128).astype(np.float64) * scales.astype(np.float64)
    writer.case(name, "w8cs", {"bits": "8", "group_size": "-1", "symmetric": "true"},
                {"codes": codes, "scales": scales, "bias": random.standard_normal(n).astype("<f2")},
                tokens(random, k, "<f4"), weight, given)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="folder to write into (default: the script's)")
    folder = parser.parse_args().out or pathlib.Path(__file__).resolve().parent
    writer = Writer(folder)
    two_level(writer, "w4a8-groups", k=256, n=40, group=128, most_s2=17)
    # Scales that QServe's own kernel cannot handle: u4 * s2 exceeds a byte.
    two_level(writer, "w4a8-large-scales", k=200, n=19, group=64, most_s2=127)
    per_channel(writer, "w8a8-channels", k=192, n=24)
    per_channel(writer, "w8a8-static", k=96, n=33, given=0.02)
    (folder / "cases.json").write_text(json.dumps({
        "about": "product = token_scales * (q @ weight) + bias in float64; q and token_scales are those of activations",
        "source": {"numpy": np.__version__}, "cases": writer.cases}, indent=2) + "\n")


if __name__ == "__main__":
    main()
