#!/usr/bin/env python3
"""Makes checkpoints of the format "bitsandbytes" and their goldens, from the format's definition. Needs numpy (2.4.6 made what
is checked in).

Where bitsandbytes can be imported, it reads the same tensors and its own dequantisation has to give the same FP32 values bit
by bit (0.50.2 did).

Usage: make_bitsandbytes.py [--out DIR]
"""
import json
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, Goldens

NF4 = np.array([-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                -0.18477343022823334, -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
                0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1], "<f4")
FP4 = np.array([0, 0.0052083334885537624, 0.6666666865348816, 1, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25], "<f4")
TABLES = {"nf4": NF4, "fp4": np.concatenate([FP4, -FP4])}


def check_with_library(kind, tensors, weight):
    """bitsandbytes makes the same FP32 [N, K] of the tensors; its version, or None without it."""
    try:
        import bitsandbytes
        import torch
    except ImportError:
        return None
    stored = {name.removeprefix("weight."): torch.from_numpy(tensor.copy()) for name, tensor in tensors.items()}
    data = stored.pop("weight")
    state = bitsandbytes.functional.QuantState.from_dict(stored, torch.device("cpu"))
    state.dtype = torch.float32
    back = bitsandbytes.functional.dequantize_4bit(data, state, quant_type=kind).numpy()
    assert np.array_equal(back, weight), "values differ"
    return bitsandbytes.__version__


class Maker:
    def __init__(self, goldens):
        self.goldens, self.random, self.version = goldens, np.random.default_rng(4), None

    def linear(self, kind, n, k, block, nested=0):
        """Tensors by suffix, and the weight FP32 [N, K]."""
        codes = self.random.integers(0, 16, n * k).astype("u1")
        count = n * k // block
        state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
        tensors = {"weight": (codes[::2] << 4 | codes[1::2]).reshape(-1, 1), "weight.quant_map": TABLES[kind]}
        if nested:
            offset = np.float32(0.0371)
            state.update(nested_blocksize=nested, nested_dtype="float32", nested_offset=float(offset))
            table = np.sort(self.random.uniform(-1, 1, 256)).astype("<f4")
            largest = self.random.uniform(0.01, 0.03, -(-count // nested)).astype("<f4")
            stored = self.random.integers(0, 256, count).astype("u1")
            tensors.update({"weight.absmax": stored, "weight.nested_quant_map": table, "weight.nested_absmax": largest})
            scales = table[stored] * largest[np.arange(count) // nested] + offset
        else:
            tensors["weight.absmax"] = scales = self.random.uniform(0.01, 0.1, count).astype("<f4")
        text = json.dumps(state).encode()
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(text, "u1")
        weight = (TABLES[kind][codes] * np.repeat(scales, block)).reshape(n, k)
        self.version = check_with_library(kind, tensors, weight)
        return tensors, weight

    def model(self, model, linears, **settings):
        tensors, cases = {"lm_head.weight": Bf16(self.random.standard_normal((8, 16)))}, []
        for path, (parts, weight), bias in linears:
            tensors.update({f"{path}.{suffix}": tensor for suffix, tensor in parts.items()})
            if bias is not None:
                tensors[path + ".bias"] = bias
            block = weight.shape[1] // (parts["weight.absmax"].size // weight.shape[0])
            grouped = f"g{block}" if block < weight.shape[1] else "c"
            cases.append((path, f"t4{grouped}+fp32", np.ascontiguousarray(weight.astype(np.float16).T), bias))
        self.goldens.checkpoint(model, {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
                                        "llm_int8_skip_modules": ["lm_head"], **settings}, tensors)
        for case in cases:
            self.goldens.case(model, *case)


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    maker = Maker(goldens)
    maker.model("nf4", [("a", maker.linear("nf4", 24, 128, 64), None),
                        ("b", maker.linear("nf4", 17, 64, 64), Bf16(maker.random.standard_normal(17)))],
                bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False)
    maker.model("nf4-double", [("layer", maker.linear("nf4", 40, 448, 64, 256), None)], bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True)
    maker.model("fp4", [("layer", maker.linear("fp4", 16, 256, 128), Bf16(maker.random.standard_normal(16)))],
                bnb_4bit_quant_type="fp4")
    goldens.finish(**({"bitsandbytes": maker.version} if maker.version else {}))


if __name__ == "__main__":
    main()
