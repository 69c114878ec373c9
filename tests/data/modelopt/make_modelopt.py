#!/usr/bin/env python3
"""Makes checkpoints of the format "modelopt" and their goldens, from the format's definition. Needs numpy (2.4.6 made what is
checked in).

Usage: make_modelopt.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, E2M1_VALUES, Goldens, Typed, e4m3_values, wide, write_json

E4M3_NUMBERS = np.array([b for b in range(256) if b & 127 != 127], "u1")
E4M3_SCALES = np.arange(0x20, 0x60, dtype="u1")  # positive, 2^-3 to 2^5


class Checkpoint:
    def __init__(self, goldens, model):
        self.goldens, self.model, self.tensors, self.cases = goldens, model, {}, []
        self.random = np.random.default_rng(sum(map(ord, model)))
        self.tensors["lm_head.weight"] = Bf16(self.random.standard_normal((8, 16)))

    def put(self, path, description, values, bias=None, factor=None, **tensors):
        """`values` FP32 [N, K]: the weight."""
        for suffix, tensor in tensors.items():
            self.tensors[f"{path}.{suffix}"] = tensor
        if bias is not None:
            self.tensors[path + ".bias"] = bias
        if factor is not None:
            self.tensors[path + ".pre_quant_scale"] = factor
        self.cases.append((path, description, np.ascontiguousarray(values.astype(np.float16).T), bias, None,
                           None if factor is None else wide(factor)))

    def fp8(self, path, description, n, k, scale, spread=None, **more):
        codes = self.random.choice(E4M3_NUMBERS, (n, k))
        values = wide(scale) if spread is None else spread(wide(scale))
        self.put(path, description, e4m3_values()[codes] * values, weight=Typed(codes, "F8_E4M3"), weight_scale=scale,
                 input_scale=np.array(0.25, "<f4"), **more)

    def mxfp8(self, path, description, n, k):
        codes = self.random.choice(E4M3_NUMBERS, (n, k))
        scale = self.random.integers(116, 120, (n, k // 32)).astype("u1")
        powers = np.repeat(np.ldexp(np.float32(1), scale.astype(np.int64) - 127), 32, axis=1)
        self.put(path, description, e4m3_values()[codes] * powers, weight=Typed(codes, "F8_E4M3"), weight_scale=scale)

    def nvfp4(self, path, description, n, k, group=16, **more):
        codes = self.random.integers(0, 16, (n, k)).astype("u1")
        scales = self.random.choice(E4M3_SCALES, (n, k // group))
        outer = self.random.uniform(1e-3, 5e-3, ()).astype("<f4")
        # Each product is rounded to FP32, in this order.
        weight = E2M1_VALUES[codes] * np.repeat(e4m3_values()[scales], group, axis=1) * outer
        self.put(path, description, weight, weight=codes[:, ::2] | codes[:, 1::2] << 4,
                 weight_scale=Typed(scales, "F8_E4M3"), weight_scale_2=np.array(outer), **more)

    def awq(self, path, description, n, k, group, scale_type, **more):
        codes = self.random.integers(-8, 8, (n, k)).astype("i1")
        scales = scale_type(self.random.uniform(1e-2, 1e-1, (n, k // group)))
        nibbles = codes.view("u1") & 15
        weight = codes.astype(np.float32) * np.repeat(wide(scales), group, axis=1)
        self.put(path, description, weight, weight=nibbles[::2] | nibbles[1::2] << 4, weight_scale=scales, **more)

    def write(self, settings, side=None):
        self.goldens.checkpoint(self.model, settings, self.tensors)
        if side is not None:  # in a file of its own, as the exporter also has it
            write_json(self.goldens.folder / self.model / "config.json", {"model_type": "golden"})
            write_json(self.goldens.folder / self.model / "hf_quant_config.json", side)
        for case in self.cases:
            self.goldens.case(self.model, *case)


def config(algorithm, **more):
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.router*"],
            "producer": {"name": "modelopt", "version": "0.47.0"}, **more}


def single(values):
    return np.asarray(values, "<f4")


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)

    nvfp4 = Checkpoint(goldens, "nvfp4")
    nvfp4.nvfp4("layers.0.up_proj", "e2m1g16+e4m3*t", 24, 64)
    nvfp4.nvfp4("layers.0.down_proj", "e2m1g16+e4m3*t", 33, 80, bias=Bf16(nvfp4.random.standard_normal(33)))
    nvfp4.write(None, {"producer": {"name": "modelopt"}, "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}})

    smooth = Checkpoint(goldens, "nvfp4-awq")
    smooth.nvfp4("layer", "e2m1g16+e4m3*t", 16, 48, factor=Bf16(smooth.random.uniform(0.5, 2, 48)))
    smooth.write(config("NVFP4_AWQ", group_size=16))

    fp8 = Checkpoint(goldens, "fp8")
    fp8.fp8("layers.0.up_proj", "e4m3t+fp32", 24, 40, single(0.0125))
    fp8.fp8("layers.0.down_proj", "e4m3t+fp32", 16, 24, single([0.02]), bias=Bf16(fp8.random.standard_normal(16)))
    fp8.write(config("FP8", config_groups={"group_0": {"targets": ["Linear"]}}))

    channel = Checkpoint(goldens, "fp8-channel")
    channel.fp8("layer", "e4m3c+fp32", 20, 40, single(channel.random.uniform(1e-3, 2e-2, 20)), lambda s: s[:, None])
    channel.write(config("FP8_PER_CHANNEL_PER_TOKEN"))

    blocks = Checkpoint(goldens, "fp8-blocks")
    rows, columns = np.indices((130, 136))
    blocks.fp8("layer", "e4m3b128x128+fp32", 130, 136, single(blocks.random.uniform(1e-3, 2e-2, (2, 1, 2, 1))),
               lambda s: s[rows // 128, 0, columns // 128, 0])
    blocks.write(config("fp8_pb_wo"))

    mxfp8 = Checkpoint(goldens, "mxfp8")
    mxfp8.mxfp8("layer", "e4m3g32+e8m0", 20, 96)
    mxfp8.write(config("MXFP8", group_size=32))

    awq = Checkpoint(goldens, "awq")
    awq.awq("layers.0.up_proj", "w4g32s+bf16", 24, 64, 32, Bf16, factor=single(awq.random.uniform(0.5, 2, 64)))
    awq.awq("layers.0.down_proj", "w4g32s+fp32", 18, 96, 32, single, bias=Bf16(awq.random.standard_normal(18)))
    awq.write(config("W4A16_AWQ", group_size=32, pre_quant_scale=True, has_zero_point=False))

    mixed = Checkpoint(goldens, "mixed")
    mixed.fp8("layers.0.q_proj", "e4m3t+fp32", 16, 32, single(0.03))
    mixed.nvfp4("layers.0.up_proj", "e2m1g16+e4m3*t", 16, 32)
    mixed.awq("layers.0.down_proj", "w4g16s", 16, 32, 16, lambda values: values.astype("<f2"))
    layers = {"layers.0.q_proj": {"quant_algo": "FP8"}, "layers.0.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
              "layers.0.down_proj": {"quant_algo": "W4A16_AWQ", "group_size": 16}}
    mixed.write(config("MIXED_PRECISION", quantized_layers=layers))
    goldens.finish()


if __name__ == "__main__":
    main()
