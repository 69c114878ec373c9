#!/usr/bin/env python3
"""Makes the goldens of KV4 from its definition (kernels/kv4_math.h), in numpy, independent of the C++ code. Needs numpy
(2.4.6 made what is checked in).

Usage: make_kv4.py [--out DIR]

Every case is a folder of .npy files: x [tokens, heads, head_dim] (BF16 as its bits), scale and zero, codes, and what
loading gives: exact_fp16, exact_bf16 (bits), exact_fp32 and fused_fp16. cases.json lists them.
"""
import argparse
import pathlib
import shutil
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, write_json

F = np.float32


def limits(scale_type):
    if scale_type == np.float16:
        return F(2.0**-24), F(65504), F(7.5 * 65504)
    return F(2.0**-126), np.finfo(np.float32).max, F(2.0**123)


def scale_of(row, scale_type):
    """Scale and zero of one row of FP32 numbers, as numbers of scale_type."""
    smallest, largest, reach = limits(scale_type)
    finite = row[np.isfinite(row)]
    if finite.size == 0:
        return scale_type(1), scale_type(0)
    c = F(F(0.5) * finite.min() + F(0.5) * finite.max())
    low, high = (F(np.clip(v, -reach, reach)) for v in (finite.min(), finite.max()))
    width = F(high - low)
    zero = scale_type(F(F(F(-15) * low) / width) + F(0))  # never -0
    if np.isfinite(zero):
        return scale_type(max(F(width / F(15)), smallest)), zero
    if c == 0:
        return scale_type(1), scale_type(0)
    size = abs(c)
    beyond = size > largest
    scale = scale_type(max(min(F(size / F(15)) if beyond else size, largest), smallest))
    return scale, scale_type(0 if c > 0 else 15 if beyond else 1)


def codes_of(x, scale, zero):
    """Packed codes of FP32 x[rows, head_dim]; scale and zero FP32 [rows, 1]."""
    real = (x * (F(1) / scale)).astype(np.float32) + zero
    codes = np.rint(np.clip(np.where(np.isnan(real), F(0), real), F(0), F(15))).astype(np.uint8)
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def loaded(packed, head_dim, scale, zero):
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)[:, :head_dim]
    exact = ((codes.astype(np.float32) - zero) * scale).astype(np.float32)
    half, offset = scale.astype(np.float16), (-scale * zero).astype(np.float32).astype(np.float16)
    # Sum and product are exact in float64, so that this rounds once.
    fused = (codes.astype(np.float64) * half.astype(np.float64) + offset.astype(np.float64)).astype(np.float16)
    return {"exact_fp16": exact.astype(np.float16), "exact_bf16": Bf16(exact).bits, "exact_fp32": exact,
            "fused_fp16": fused}


def block(random, shape, odd):
    """Ordinary keys, some channels far larger than others; with `odd`, rows of special values in front."""
    x = random.standard_normal(shape) * random.choice([0.05, 1.0, 8.0], (1, shape[1], shape[2]))
    x = (x + random.standard_normal((shape[0], shape[1], 1))).astype(np.float32)
    if odd:
        rows = x.reshape(-1, shape[2])
        rows[0], rows[1], rows[2] = 0, 1.5, -3.25
        rows[3, 0], rows[4, 1], rows[5, 2] = np.inf, -np.inf, np.nan
        rows[6] = np.nan
        rows[7] = np.where(np.arange(shape[2]) % 2, 1, 1 + 2.0**-9)
        rows[8] *= 2.0**-20
    return x


def case(folder, name, *, shape, dtype, scale_type, per="row", odd=False):
    random = np.random.default_rng(shape[2] * 100 + shape[1])
    x = block(random, shape, odd)
    if dtype == "FP16":
        x = x.astype(np.float16)
    elif dtype == "BF16":
        x = Bf16(x)
    wide = (x.wide() if isinstance(x, Bf16) else x.astype(np.float32)).reshape(-1, shape[2])
    if per == "row":
        scale, zero = (np.array(v, scale_type) for v in zip(*(scale_of(row, scale_type) for row in wide)))
        each = np.arange(wide.shape[0])
    else:  # narrower than the elements: many of them saturate
        count = shape[1] if per == "head" else 1
        scale = random.uniform(0.05, 0.3, count).astype(scale_type)
        zero = random.uniform(4, 11, count).astype(scale_type)
        each = np.arange(wide.shape[0]) % count
    s, z = (v.astype(np.float32)[each][:, None] for v in (scale, zero))
    packed = codes_of(wide, s, z)
    arrays = {"x": x.bits if isinstance(x, Bf16) else x, "scale": scale, "zero": zero, "codes": packed,
              **loaded(packed, shape[2], s, z)}
    (folder / name).mkdir()
    for key, array in arrays.items():
        with (folder / name / f"{key}.npy").open("wb") as file:
            np.lib.format.write_array(file, np.ascontiguousarray(array), version=(1, 0))
    return {"name": name, "tokens": shape[0], "heads": shape[1], "head_dim": shape[2], "x_dtype": dtype,
            "scale_dtype": "FP16" if scale_type == np.float16 else "FP32", "per": per}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="folder to write into (default: the script's)")
    folder = (parser.parse_args().out or pathlib.Path(__file__).resolve().parent) / "goldens"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    half, single = np.float16, np.float32
    with np.errstate(all="ignore"):
        cases = [
            case(folder, "fp16-64", shape=(5, 3, 64), dtype="FP16", scale_type=half, odd=True),
            case(folder, "bf16-7", shape=(4, 3, 7), dtype="BF16", scale_type=single, odd=True),
            case(folder, "fp32-80", shape=(5, 2, 80), dtype="FP32", scale_type=half, odd=True),
            case(folder, "fp32-33", shape=(5, 2, 33), dtype="FP32", scale_type=single, odd=True),
            case(folder, "heads-32", shape=(3, 4, 32), dtype="FP16", scale_type=half, per="head"),
            case(folder, "tensor-40", shape=(3, 2, 40), dtype="BF16", scale_type=single, per="tensor"),
        ]
    write_json(folder / "cases.json", {"source": {"numpy": np.__version__}, "cases": cases})


if __name__ == "__main__":
    main()
