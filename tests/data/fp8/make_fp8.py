#!/usr/bin/env python3
"""Makes checkpoints of the format "fp8" and their goldens, from the format's definition. Needs numpy (2.4.6 made what is
checked in).

Where torch can be imported, its float8_e4m3fn and float8_e8m0fnu have to give the same values (2.15.0 did).

Usage: make_fp8.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import E2M1_VALUES, Bf16, Goldens, Typed, e4m3_values, wide


def powers(bits):
    """The values of the codes of F8_E8M0."""
    return np.ldexp(np.float32(1), bits.astype(np.int64) - 127)


def check_with_torch():
    try:
        import torch
    except ImportError:
        return None
    bits = torch.arange(256, dtype=torch.uint8)
    ours = e4m3_values()
    theirs = bits.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(ours, theirs, equal_nan=True) and np.array_equal(np.signbit(ours), np.signbit(theirs))
    theirs = bits[:255].view(torch.float8_e8m0fnu).float().numpy()
    assert np.array_equal(powers(np.arange(255)), theirs)
    return torch.__version__.partition("+")[0]


class Checkpoint:
    def __init__(self, goldens, model, method="fp8", **settings):
        self.goldens, self.model, self.tensors, self.cases = goldens, model, {}, []
        self.settings = {"quant_method": method, **settings}
        self.random = np.random.default_rng(sum(map(ord, model)))

    def linear(self, path, description, *, n, k, scale, block=None, name="weight_scale_inv", values=wide, bias=None):
        """`scale`: makes a tensor of uniform numbers; `block` [rows, columns] of [N, K], or None for a scale each row."""
        numbers = np.array([b for b in range(256) if b & 127 != 127], "u1")
        codes = self.random.choice(numbers, (n, k))
        stored = scale(self.random)
        rows, columns = np.indices((n, k))
        if block:
            spread = values(stored)[rows // block[0], columns // block[1]]
        else:
            spread = np.broadcast_to(values(stored).reshape(-1, 1), (n, k))
        self.tensors[path + ".weight"] = Typed(codes, "F8_E4M3")
        self.tensors[f"{path}.{name}"] = stored
        if bias is not None:
            self.tensors[path + ".bias"] = bias(self.random)
        weight = (e4m3_values()[codes] * spread).astype(np.float32).astype(np.float16).T
        self.cases.append((path, description, np.ascontiguousarray(weight), self.tensors.get(path + ".bias")))

    def mxfp4(self, path, description, *, n, k):
        """An expert of DeepSeek-V4: pairs of E2M1 as I8, 32 codes to a scale."""
        codes = self.random.integers(0, 16, (n, k)).astype("u1")
        scales = self.random.integers(118, 124, (n, k // 32)).astype("u1")
        self.tensors[path + ".weight"] = (codes[:, 0::2] | codes[:, 1::2] << 4).view("i1")
        self.tensors[path + ".scale"] = Typed(scales, "F8_E8M0")
        weight = (E2M1_VALUES[codes] * np.repeat(powers(scales), 32, axis=1)).astype(np.float16).T
        self.cases.append((path, description, np.ascontiguousarray(weight), None))

    def write(self):
        self.tensors["lm_head.weight"] = Bf16(self.random.standard_normal((8, 16)))
        self.goldens.checkpoint(self.model, self.settings, self.tensors)
        for case in self.cases:
            self.goldens.case(self.model, *case)


def single(*shape):
    return lambda random: random.uniform(1e-3, 2e-2, shape).astype("<f4")


def bf16(*shape):
    return lambda random: Bf16(random.uniform(1e-3, 2e-2, shape))


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    version = check_with_torch()

    deepseek = Checkpoint(goldens, "blocks", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128],
                          modules_to_not_convert=["lm_head"])
    deepseek.linear("layers.0.up_proj", "e4m3b128x128+fp32", n=136, k=144, scale=single(2, 2), block=(128, 128))
    deepseek.linear("layers.0.down_proj", "e4m3b0x128+bf16", n=132, k=40, scale=bf16(2, 1), block=(128, 128))
    deepseek.linear("layers.0.gate", "e4m3t+fp32", n=24, k=40, scale=single(1, 1), block=(128, 128), bias=bf16(24))
    deepseek.write()

    powers_of_two = Checkpoint(goldens, "powers", scale_fmt="ue8m0", weight_block_size=[16, 32], ignored_layers=["lm_head"])
    powers_of_two.linear("layer", "e4m3b32x16+e8m0", n=40, k=72, block=(16, 32), values=lambda s: powers(s.bits),
                         scale=lambda random: Typed(random.integers(116, 122, (3, 3)).astype("u1"), "F8_E8M0"))
    powers_of_two.write()

    one = Checkpoint(goldens, "tensor", activation_scheme="static", weight_block_size=None)
    one.linear("a", "e4m3t+fp32", n=24, k=64, scale=single(), name="weight_scale")
    one.linear("b", "e4m3t+bf16", n=17, k=33, scale=bf16(1), bias=single(17))
    one.tensors["a.input_scale"] = np.array(0.5, "<f4")
    one.write()

    channel = Checkpoint(goldens, "channel", activation_scheme="dynamic")
    channel.linear("a", "e4m3c+fp32", n=21, k=64, scale=single(21, 1), name="weight_scale")
    channel.linear("b", "e4m3c+bf16", n=16, k=40, scale=bf16(16), name="weight_scale", bias=bf16(16))
    channel.write()

    fbgemm = Checkpoint(goldens, "fbgemm", "fbgemm_fp8", activation_scale_ub=1200.0, modules_to_not_convert=["lm_head"])
    fbgemm.linear("model.layers.0.mlp.up_proj", "e4m3c+fp32", n=24, k=40, scale=single(24, 1), name="weight_scale")
    fbgemm.linear("model.layers.0.mlp.down_proj", "e4m3c+fp32", n=17, k=24, scale=single(17, 1), name="weight_scale",
                  bias=single(17))
    fbgemm.tensors["model.layers.0.mlp.up_proj.input_scale_ub"] = np.array([1200], "<f4")
    fbgemm.write()

    experts = Checkpoint(goldens, "experts-of-fp4", activation_scheme="dynamic", fmt="e4m3", scale_fmt="ue8m0",
                         expert_dtype="fp4", weight_block_size=[128, 128])
    experts.linear("layers.0.attn.wq_a", "e4m3b128x128+e8m0", n=136, k=144, block=(128, 128), name="scale",
                   values=lambda s: powers(s.bits),
                   scale=lambda random: Typed(random.integers(116, 122, (2, 2)).astype("u1"), "F8_E8M0"))
    experts.linear("layers.0.attn.wo_a", "e4m3b128x0+fp32", n=40, k=144, block=(128, 128), name="scale",
                   scale=lambda random: powers(random.integers(116, 122, (1, 2))).astype("<f4"))
    for expert in range(2):
        experts.mxfp4(f"layers.0.ffn.experts.{expert}.w1", "e2m1g32+e8m0", n=24, k=64)
    experts.tensors["layers.0.ffn.gate.weight"] = Bf16(experts.random.standard_normal((2, 64)))
    experts.write()
    goldens.finish(**({"torch": version} if version else {}))


if __name__ == "__main__":
    main()
