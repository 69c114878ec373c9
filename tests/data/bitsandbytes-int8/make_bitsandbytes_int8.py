#!/usr/bin/env python3
"""Makes a checkpoint of the format "bitsandbytes-int8" and its goldens, from the format's definition. Needs numpy (2.4.6 made
what is checked in).

Where bitsandbytes can be imported, its int8_vectorwise_quant has to make the same codes and scales of the same weights, and
its dequantisation, which multiplies by 1 / 127, values within two units in the last place (0.50.2 did).

Usage: make_bitsandbytes_int8.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, Goldens


def check_with_library(weight, codes, largest, values):
    try:
        import bitsandbytes
        import torch
    except ImportError:
        return None
    theirs, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(torch.from_numpy(weight))
    assert np.array_equal(theirs.numpy(), codes) and np.array_equal(scales.numpy(), largest), "codes differ"
    back = bitsandbytes.functional.int8_vectorwise_dequant(theirs, scales).numpy()
    assert (np.abs(back - values) <= 2 * np.spacing(np.abs(values))).all(), "values differ"
    return bitsandbytes.__version__


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    random = np.random.default_rng(8)
    tensors, cases, version = {"lm_head.weight": Bf16(random.standard_normal((8, 16)))}, [], None
    for path, n, k, bias in (("a", 24, 64, None), ("b", 17, 40, Bf16(random.standard_normal(17)))):
        weight = random.standard_normal((n, k)).astype(np.float16)
        largest = np.abs(weight).max(axis=1).astype("<f4")
        codes = np.rint(weight.astype(np.float32) * (127 / largest)[:, None]).astype("i1")
        values = codes * (largest / np.float32(127))[:, None]
        version = check_with_library(weight, codes, largest, values)
        tensors.update({path + ".weight": codes, path + ".SCB": largest, path + ".weight_format": np.array(0, "u1")})
        if bias is not None:
            tensors[path + ".bias"] = bias
        cases.append((path, "w8cs+fp32", np.ascontiguousarray(values.astype(np.float16).T), bias))
    goldens.checkpoint("int8", {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, tensors)
    for case in cases:
        goldens.case("int8", *case)
    goldens.finish(**({"bitsandbytes": version} if version else {}))


if __name__ == "__main__":
    main()
