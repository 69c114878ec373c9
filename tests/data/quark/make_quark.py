#!/usr/bin/env python3
"""Makes checkpoints of the format "quark" and their goldens, from the format's definition. Needs numpy (2.4.6 made what is
checked in).

Where the package amd-quark can be imported (0.13), its rotations are compared with these.

Usage: make_quark.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from awq_tensors import pack_gemm
from golden import E2M1_VALUES, Bf16, Goldens, Typed, dequantise, e4m3_values, sylvester, wide

try:
    import torch
    from quark.torch.algorithm.rotation.rotation_utils import InputRotationWrapperHadamard
except ImportError:
    torch = None

FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0", "symmetric": None}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
CHANNEL = {"ch_axis": 0, "qscheme": "per_channel"}


def integers(dtype, group, symmetric):
    return {"dtype": dtype, "qscheme": "per_group", "ch_axis": 1, "group_size": group, "symmetric": symmetric}


def layer(weight, activations=None):
    return {"weight": weight, "input_tensors": activations, "output_tensors": None, "bias": None, "target_device": None}


class Checkpoint:
    def __init__(self, goldens, model):
        self.goldens, self.model, self.tensors, self.cases = goldens, model, {}, []
        self.random = np.random.default_rng(sum(map(ord, model)))

    def add(self, path, description, values, settings, bias=False, **tensors):
        """`values` [N, K]: the weight. `settings`: those of a request."""
        if bias:
            tensors["bias"] = Bf16(self.random.standard_normal(len(values)))
        self.tensors.update({f"{path}.{name}": tensor for name, tensor in tensors.items()})
        self.cases.append(dict(path=path, description=description, weight=np.ascontiguousarray(values.astype(np.float16).T),
                               bias=tensors.get("bias"), settings=settings))

    def rotate(self, size, factor=None):
        """Gives the latest case a rotation of its activations, after their factor."""
        case, matrix = self.cases[-1], sylvester(size)
        k = len(case["weight"])
        case["transform"] = matrix / np.sqrt(size)
        self.tensors[case["path"] + ".input_rotation"] = matrix.astype("i1")
        if factor is not None:
            case["factor"] = wide(factor)
            self.tensors[case["path"] + ".input_prescale"] = factor
        if torch is None:
            return
        linear = torch.nn.Linear(k, k, bias=False, dtype=torch.float64)
        linear.weight.data = torch.eye(k, dtype=torch.float64)
        wrapped = InputRotationWrapperHadamard(linear, size)
        assert (wrapped.input_rotation.numpy() == matrix).all(), (case["path"], "matrix differs")
        x = self.random.standard_normal((3, k))
        ours = (x.reshape(3, -1, size) @ case["transform"]).reshape(3, k)
        assert np.allclose(wrapped(torch.from_numpy(x)).numpy(force=True), ours, rtol=0, atol=1e-6), (case["path"], "differs")
        print("compared with amd-quark:", case["path"])

    def fp4(self, path, description, n, k, bias=False):
        codes = self.random.integers(0, 16, (n, k)).astype("u1")
        scales = self.random.integers(118, 124, (n, k // 32)).astype("u1")
        powers = np.ldexp(np.float32(1), scales.astype(np.int64) - 127)
        self.add(path, description, E2M1_VALUES[codes] * np.repeat(powers, 32, axis=1), {"dtype": "fp4"}, bias,
                 weight=codes[:, 0::2] | codes[:, 1::2] << 4, weight_scale=scales)

    def scales(self, *shape, make=Bf16):
        return make(self.random.uniform(1e-3, 2e-2, shape))

    def fp8(self, path, description, n, k, scales, bias=False):
        numbers = np.array([b for b in range(256) if b & 127 != 127], "u1")
        codes = self.random.choice(numbers, (n, k))
        self.add(path, description, (e4m3_values()[codes] * wide(scales).reshape(-1, 1)).astype(np.float32),
                 {"dtype": "fp8_e4m3"}, bias,
                 weight=Typed(codes, "F8_E4M3"), weight_scale=scales)

    def int8(self, path, description, n, k, scales, bias=False):
        codes = self.random.integers(-128, 128, (n, k)).astype("i1")
        self.add(path, description, codes.astype(np.float32) * wide(scales).reshape(-1, 1), {"dtype": "int8"}, bias,
                 weight=codes, weight_scale=scales)

    def int4(self, path, description, n, k, group, zeros="", bias=False):
        """`zeros`: "" for none, "none" for stored ones that are 0, "signed" or "unsigned"."""
        low = 0 if zeros == "unsigned" else -8
        codes = self.random.integers(low, low + 16, (k, n))
        zero = self.random.integers(low, low + 16, (k // group, n)) if zeros.endswith("signed") else 0
        scales = self.scales(k // group, n)
        tensors = {"weight": pack_gemm(codes & 15, 4), "weight_scale": scales}
        if zeros:
            tensors["weight_zero_point"] = pack_gemm((zero + np.zeros((k // group, n), np.int64)) & 15, 4)
        self.add(path, description, dequantise(codes, zero, scales, group).T,
                 {"dtype": "int4" if low else "uint4", "group_size": group}, bias, **tensors)

    def write(self, everywhere, layers, **more):
        self.tensors["lm_head.weight"] = Bf16(self.random.standard_normal((8, 16)))
        self.goldens.checkpoint(self.model, {
            "quant_method": "quark", "exclude": ["lm_head"], "quant_mode": "eager_mode",
            "export": {"pack_method": "reorder", "weight_format": "real_quantized", "kv_cache_group": []},
            "global_quant_config": everywhere, "layer_quant_config": layers, "layer_type_quant_config": {}, **more}, self.tensors)
        for case in self.cases:
            self.goldens.case(self.model, **case)


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)

    floats = Checkpoint(goldens, "floats")
    floats.fp4("layers.0.mlp.experts.0.up_proj", "e2m1g32+e8m0", 24, 64)
    floats.fp4("layers.0.mlp.experts.1.up_proj", "e2m1g32+e8m0", 24, 64)
    floats.fp4("layers.0.mlp.down_proj", "e2m1g32+e8m0", 33, 96, bias=True)
    floats.fp8("layers.0.self_attn.q_proj", "e4m3t+bf16", 17, 40, floats.scales())
    floats.tensors["layers.0.self_attn.q_proj.input_scale"] = Bf16(np.array(0.5))
    floats.fp8("layers.0.self_attn.o_proj", "e4m3c+bf16", 16, 64, floats.scales(16), bias=True)
    floats.write(layer(FP4, {**FP4, "is_dynamic": True}),
                 {"*q_proj": layer(FP8, FP8), "layers.0.self_attn.o_proj": layer({**FP8, **CHANNEL})})

    whole = Checkpoint(goldens, "integers")
    whole.int4("layers.0.q_proj", "w4g32s+bf16", 24, 64, 32)
    whole.int4("layers.0.k_proj", "w4g32s+bf16", 16, 96, 32, "none", bias=True)
    whole.int4("layers.0.v_proj", "w4g32z+bf16", 16, 64, 32, "signed")
    whole.int4("layers.0.up_proj", "w4g64z+bf16", 40, 128, 64, "unsigned", bias=True)
    whole.int8("layers.0.down_proj", "w8cs+bf16", 21, 40, whole.scales(21), bias=True)
    whole.int8("layers.0.gate_proj", "w8ts+fp32", 16, 33, whole.scales(1, make=lambda v: v.astype("<f4")))
    whole.write(layer(integers("int4", 32, True)), {
        "*.v_proj": layer(integers("int4", 32, False)), "*.up_proj": layer(integers("uint4", 64, False)),
        "*.down_proj": layer({"dtype": "int8", "symmetric": True, **CHANNEL}),
        "*.gate_proj": layer({"dtype": "int8", "symmetric": True, "qscheme": "per_tensor"})})

    rotated = Checkpoint(goldens, "rotated")
    rotated.fp4("model.layers.0.self_attn.q_proj", "e2m1g32+e8m0", 24, 96)
    rotated.rotate(32, Bf16(rotated.random.uniform(0.5, 2, 96)))
    rotated.fp4("model.layers.0.mlp.up_proj", "e2m1g32+e8m0", 16, 96)
    rotated.fp4("model.layers.0.mlp.down_proj", "e2m1g32+e8m0", 24, 128, bias=True)
    rotated.rotate(128, Bf16(rotated.random.uniform(0.5, 2, 128)))
    places = ["first_layer", "middle_layers", "last_layer"]
    rotated.write(layer(FP4, {**FP4, "is_dynamic": True}), {}, algo_config=[
        {"name": "rotation", "r1": True, "r2": False, "r3": False, "r4": True, "rotation_size": 32, "online_r1_rotation": True,
         "online_config": {"use_input_prescale": True},
         "scaling_layers": {place: [{"target_modules": ["model.layers.layer_id.self_attn.q_proj"]}] for place in places}}])
    goldens.finish()


if __name__ == "__main__":
    main()
