#!/usr/bin/env python3
"""Makes checkpoints of the format "hqq" and their goldens, from the format's definition. Needs numpy (2.4.6 made what is checked
in).

Where the package hqq can be imported, its Quantizer has to pack the same codes to the same words, and to give the same values of
them in FP32 (0.2.8.post1 did).

Usage: make_hqq.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, Goldens, wide

PACKINGS = {8: "8bit_u8", 6: "8bit_u8", 5: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def pack(codes, bits):
    """[rows, group] -> words: as many bands of rows as a word has codes, the first band in the highest bits."""
    bands = 10 if bits == 3 else 1 if bits > 4 else 8 // bits
    rows = -(-len(codes) // bands)
    padded = np.zeros((bands * rows, codes.shape[1]), np.int64)
    padded[:len(codes)] = codes
    words = np.zeros((rows, codes.shape[1]), np.int64)
    for band in range(bands):
        words |= padded[band * rows:(band + 1) * rows] << bits * (bands - 1 - band)
    return words.astype("<i4" if bits == 3 else "u1")


def check_with_library(codes, words, scale, zero, bits, group, weight):
    """hqq's version, or None without it."""
    try:
        import torch
        from hqq.core.quantize import Quantizer
    except ImportError:
        return None
    packed = Quantizer.pack[PACKINGS[bits]](torch.from_numpy(codes.astype("i4")))
    assert np.array_equal(packed.numpy(), words), "words differ"
    meta = {"compute_dtype": torch.float32, "packing": PACKINGS[bits], "view_as_float": False, "nbits": bits, "axis": 1,
            "group_size": group, "shape": weight.shape, "zero": torch.from_numpy(wide(zero).copy()),
            "scale": torch.from_numpy(wide(scale).copy())}
    assert np.array_equal(Quantizer.dequantize(packed, meta).numpy(), weight), "values differ"
    return "0.2.8.post1"


class Checkpoint:
    def __init__(self, goldens, model):
        self.goldens, self.model, self.tensors, self.cases = goldens, model, {}, []
        self.random = np.random.default_rng(sum(map(ord, model)))
        self.version = None

    def linear(self, path, description, *, n, k, bits, group, kind=lambda v: v.astype("<f2"), viewed=None, bias=None):
        rows = n * k // group
        codes = self.random.integers(0, 1 << bits, (rows, group))
        scale = kind(self.random.uniform(0.01, 0.1, (rows, 1)))
        zero = kind(self.random.uniform(0, (1 << bits) - 1, (rows, 1)))
        words = pack(codes, bits)
        weight = ((codes.astype(np.float32) - wide(zero)) * wide(scale)).reshape(n, k)
        self.version = check_with_library(codes, words, scale, zero, bits, group, weight)
        self.tensors.update({f"{path}.W_q": words if viewed is None else words.view(viewed), f"{path}.scale": scale,
                             f"{path}.zero": zero, f"{path}.shape": np.array([n, k], "<i8"),
                             f"{path}.nbits": np.array(bits, "<i4"), f"{path}.group_size": np.array(group, "<i4"),
                             f"{path}.axis": np.array(1, "<i4"), f"{path}.view_as_float": np.array(viewed is not None, "u1"),
                             f"{path}.packing": np.frombuffer(PACKINGS[bits].encode(), "u1")})
        if bias is not None:
            self.tensors[path + ".bias"] = bias
        self.cases.append((path, description, np.ascontiguousarray(weight.astype(np.float16).T), bias))

    def write(self, quant_config):
        self.tensors["lm_head.weight"] = Bf16(self.random.standard_normal((8, 16)))
        self.goldens.checkpoint(self.model, {"quant_method": "hqq", "quant_config": quant_config,
                                             "skip_modules": ["lm_head"]}, self.tensors)
        for case in self.cases:
            self.goldens.case(self.model, *case)
        return self.version


def params(bits, group):
    return {"offload_meta": False, "scale_quant_params": None, "zero_quant_params": None, "weight_quant_params": {
        "nbits": bits, "group_size": group, "axis": 1, "channel_wise": True, "optimize": True, "round_zero": bits == 4,
        "view_as_float": False}}


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    version = None
    for bits, group, n, k, kind, types in ((4, 64, 24, 128, Bf16, "r:bf16+bf16"), (8, 32, 21, 64, None, "r"),
                                           (3, 32, 17, 96, None, "r"), (2, 16, 20, 48, None, "r"),
                                           (1, 24, 16, 48, None, "r"), (5, 32, 9, 64, None, "r")):
        one = Checkpoint(goldens, f"bits-{bits}")
        one.linear("layer", f"w{bits}g{group}{types}", n=n, k=k, bits=bits, group=group,
                   **({"kind": kind} if kind else {}), bias=Bf16(one.random.standard_normal(n)) if bits == 8 else None)
        version = one.write(params(bits, group))

    viewed = Checkpoint(goldens, "viewed")
    viewed.linear("layer", "w4cr:fp32+fp32", n=12, k=32, bits=4, group=32, kind=lambda v: v.astype("<f4"), viewed="<f2")
    viewed.write(params(4, 32))

    tags = Checkpoint(goldens, "tags")
    tags.linear("model.layers.0.self_attn.q_proj", "w4g32r", n=16, k=64, bits=4, group=32)
    tags.linear("model.layers.0.mlp.down_proj", "w2g16r", n=16, k=32, bits=2, group=16)
    tags.write({"self_attn.q_proj": params(4, 32), "mlp.down_proj": params(2, 16), "mlp.up_proj": None})
    goldens.finish(**({"hqq": version} if version else {}))


if __name__ == "__main__":
    main()
