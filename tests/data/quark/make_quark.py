#!/usr/bin/env python3
"""Makes checkpoints of the format "quark" and their goldens, from the format's definition. Needs numpy (2.4.6 made what is
checked in).

Where the package amd-quark can be imported (0.13), its rotations and the codes that it unpacks are compared with these.

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
    from quark.torch.kernel.float8_e5m3.lookup import E5M3_LOOKUP_TABLE
    from quark.torch.utils.pack import create_pack_method
except ImportError:
    torch = None

FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0", "symmetric": None}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
CHANNEL = {"ch_axis": 0, "qscheme": "per_channel"}
TENSOR = {"qscheme": "per_tensor"}


def small_floats(mantissa_bits, bias, count):
    """The values of `count` codes with those bits of mantissa behind those of the exponent."""
    codes, whole = np.arange(count), 1 << mantissa_bits
    exponent, mantissa = codes >> mantissa_bits, codes % whole
    normal = np.ldexp(1 + mantissa / whole, exponent - bias)
    return np.where(exponent == 0, np.ldexp(mantissa / whole, 1 - bias), normal).astype("f4")


FP6_VALUES = {name: np.concatenate([values, -values]) for name, values in
              {"fp6_e2m3": small_floats(3, 1, 32), "fp6_e3m2": small_floats(2, 3, 32)}.items()}
E5M3_VALUES = small_floats(3, 15, 255)  # 255 is NaN


def integers(dtype, group, symmetric):
    return {"dtype": dtype, "qscheme": "per_group", "ch_axis": 1, "group_size": group, "symmetric": symmetric}


def layer(weight, activations=None):
    return {"weight": weight, "input_tensors": activations, "output_tensors": None, "bias": None, "target_device": None}


def pack_words(codes, order):
    """[rows, cols] codes of 4 bits, eight to a word; the last word may be partly empty."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8)))
    if order == "reorder":
        return pack_gemm(padded, 4)
    eight = padded.reshape(len(codes), -1, 8).astype(np.uint64) << np.arange(0, 32, 4, dtype=np.uint64)
    return eight.sum(axis=-1).astype("<u4").view("<i4")


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
        x = np.random.default_rng(k).standard_normal((3, k))  # the same bytes with the package and without
        ours = (x.reshape(3, -1, size) @ case["transform"]).reshape(3, k)
        assert np.allclose(wrapped(torch.from_numpy(x)).numpy(force=True), ours, rtol=0, atol=1e-6), (case["path"], "differs")
        print("compared with amd-quark:", case["path"])

    def fp4(self, path, description, n, k, bias=False):
        codes = self.random.integers(0, 16, (n, k)).astype("u1")
        scales = self.random.integers(118, 124, (n, k // 32)).astype("u1")
        powers = np.ldexp(np.float32(1), scales.astype(np.int64) - 127)
        self.add(path, description, E2M1_VALUES[codes] * np.repeat(powers, 32, axis=1), {"dtype": "fp4"}, bias,
                 weight=codes[:, 0::2] | codes[:, 1::2] << 4, weight_scale=scales)

    def unpacked(self, path, weight, values, qscheme, dtype, order="reorder", n=None):
        """Compares the codes' values, [N, K], with those that the package unpacks."""
        if torch is None:
            return
        pack = create_pack_method(qscheme, dtype)
        more = {} if n is None else {"origin_packed_axis_size": n}
        theirs = pack.unpack(torch.from_numpy(np.ascontiguousarray(weight)), order == "reorder", **more)
        assert np.array_equal(theirs.numpy().astype("f4"), values.astype("f4")), (path, "codes differ")
        print("compared with amd-quark:", path)

    def fp6(self, path, dtype, n, k, bias=False):
        codes = self.random.integers(0, 64, (n, k)).astype("u1")
        scales = self.random.integers(118, 124, (n, k // 32)).astype("u1")
        four = codes.reshape(n, -1, 4).astype("u4")
        word = four[..., 0] | four[..., 1] << 6 | four[..., 2] << 12 | four[..., 3] << 18
        weight = np.stack([word & 255, word >> 8 & 255, word >> 16], axis=-1).astype("u1").reshape(n, -1)
        values = FP6_VALUES[dtype][codes]
        self.unpacked(path, weight, values, "per_group", dtype)
        powers = np.ldexp(np.float32(1), scales.astype(np.int64) - 127)
        self.add(path, "e4m3g32+e8m0", values * np.repeat(powers, 32, axis=1), {"dtype": dtype}, bias, weight=weight,
                 weight_scale=scales)

    def fp4_scaled(self, path, description, n, k, group, kind, settings, bias=False):
        """Scales that are E4M3, E5M3 or BF16; another of all where the scheme has one."""
        codes = self.random.integers(0, 16, (n, k)).astype("u1")
        bits = self.random.integers(30, 120, (n, k // group)).astype("u1")
        if kind == "e5m3" and torch is not None:
            assert np.array_equal(E5M3_LOOKUP_TABLE[torch.device("cpu")].numpy()[:255], E5M3_VALUES)
        stored = {"e4m3": Typed(bits, "F8_E4M3"), "e5m3": bits, "bf16": self.scales(n, k // group)}[kind]
        scales = {"e4m3": e4m3_values(), "e5m3": E5M3_VALUES}[kind][bits] if kind != "bf16" else wide(stored)
        values = (E2M1_VALUES[codes] * np.repeat(scales, group, axis=1)).astype("f4")
        tensors = {}
        if description.endswith("*t"):
            outer = np.array(self.random.uniform(1e-3, 2e-3), "<f4")
            values, tensors = values * outer, {"weight_scale_2": outer, "input_scale_2": np.array(0.5, "<f4")}
        self.add(path, description, values, {"dtype": "fp4", "group_size": group, **settings}, bias,
                 weight=codes[:, 0::2] | codes[:, 1::2] << 4, weight_scale=stored, **tensors)

    def whole(self, path, description, dtype, n, k, settings, group=0, zeros=False, scales=None, order="reorder", bias=False,
              staged=False):
        """Integers with scales of groups, of columns (`scales` [N]) or one for all."""
        bits, low = int(dtype[-1]), 0 if dtype[0] == "u" else -(1 << (int(dtype[-1]) - 1))
        codes = self.random.integers(low, low + (1 << bits), (n, k))
        scales = self.scales(k // group, n) if group else scales
        cells = wide(scales).T if group else wide(scales).reshape(-1, 1)
        zero = self.random.integers(low, low + (1 << bits), cells.shape) if zeros else np.zeros(cells.shape, np.int64)
        pack = ((lambda v: v.astype("u1" if dtype[0] == "u" else "i1")) if bits == 8 else
                (lambda v: pack_words(v & 15, order)))
        weight = pack(np.ascontiguousarray(codes.T) if group else codes)
        stored_zero = pack(np.ascontiguousarray(zero.T)) if group else pack(zero.reshape(1, -1))[0]
        self.unpacked(path, weight, codes, "per_group" if group else "per_channel", dtype, order, n if group else None)
        wide_cells, wide_zero = (np.repeat(part, group or k, axis=1) for part in (cells, zero))
        values = ((codes - wide_zero).astype("f4") * wide_cells).astype("f4")
        end, more = "_2" if staged else "", {}
        if staged:
            outer = np.array(self.random.uniform(0.5, 2), "<f4")
            values, more = values * outer, {"weight_scale": outer}
        settings = {"dtype": dtype, **settings, **({"group_size": group} if group else {})}
        self.add(path, description, values, settings, bias, weight=weight,
                 **{"weight_scale" + end: scales, "weight_zero_point" + end: stored_zero}, **more)

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

    def write(self, everywhere, layers, order="reorder", **more):
        self.tensors["lm_head.weight"] = Bf16(self.random.standard_normal((8, 16)))
        self.goldens.checkpoint(self.model, {
            "quant_method": "quark", "exclude": ["lm_head"], "quant_mode": "eager_mode",
            "export": {"pack_method": order, "weight_format": "real_quantized", "kv_cache_group": []},
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
    more = Checkpoint(goldens, "more")
    more.fp6("layers.0.e2m3", "fp6_e2m3", 24, 64)
    more.fp6("layers.0.e3m2", "fp6_e3m2", 33, 96, bias=True)
    more.fp4_scaled("layers.0.nvfp4", "e2m1g16+e4m3*t", 24, 64, 16, "e4m3", {"scale_dtype": "fp8_e4m3"}, bias=True)
    more.fp4_scaled("layers.0.amdfp4", "e2m1g16+bf16", 17, 64, 16, "e5m3", {"scale_format": "e5m3"})
    more.fp4_scaled("layers.0.amdfp4_global", "e2m1g32+bf16*t", 16, 96, 32, "e5m3", {"scale_dtype": "fp8_e5m3"})
    more.fp4_scaled("layers.0.fp4_bf16", "e2m1g32+bf16", 16, 64, 32, "bf16", {})
    channel, tensor, group = {"qscheme": "per_channel"}, {"qscheme": "per_tensor"}, {"qscheme": "per_group"}
    more.whole("layers.0.int4_channel", "w4cs+bf16", "int4", 19, 64, channel, scales=more.scales(19))
    more.whole("layers.0.uint4_channel", "w4cz+bf16", "uint4", 24, 72, channel, zeros=True, scales=more.scales(24), bias=True)
    more.whole("layers.0.int4_odd", "w4g32z+bf16", "int4", 21, 64, group, 32, zeros=True)
    more.whole("layers.0.uint8_channel", "w8cz+bf16", "uint8", 21, 40, channel, zeros=True, scales=more.scales(21))
    one = more.scales(1, make=lambda v: v[0].astype("<f4"))
    more.whole("layers.0.int8_tensor", "w8tz+fp32", "int8", 16, 33, tensor, zeros=True, scales=one)
    more.whole("layers.0.int8_group", "w8g32z+bf16", "int8", 24, 64, group, 32, zeros=True, bias=True)
    more.whole("layers.0.int4_fp8", "w4cs+fp32*t", "int4", 16, 64, {**channel, "stage_dtype": "fp8_e4m3"}, staged=True,
               scales=more.scales(16, make=lambda v: v.astype("<f4")))
    two = {name: [{**FP4, "group_size": size, "scale_format": "float32"}, {"dtype": name, "is_scale_quant": True, **TENSOR}]
           for name, size in (("fp8_e4m3", 16), ("fp8_e5m3", 32))}
    plain = {**FP4, "scale_format": None}
    more.write(layer(FP4), {
        "layers.0.e2m3": layer({**FP4, "dtype": "fp6_e2m3"}), "layers.0.e3m2": layer({**FP4, "dtype": "fp6_e3m2"}),
        "layers.0.nvfp4": layer(two["fp8_e4m3"]), "layers.0.amdfp4": layer({**FP4, "group_size": 16, "scale_format": "e5m3"}),
        "layers.0.amdfp4_global": layer(two["fp8_e5m3"]), "layers.0.fp4_bf16": layer(plain),
        "layers.0.int4_channel": layer({"dtype": "int4", "symmetric": True, **CHANNEL}),
        "layers.0.uint4_channel": layer({"dtype": "uint4", "symmetric": False, **CHANNEL}),
        "layers.0.int4_odd": layer(integers("int4", 32, False)),
        "layers.0.uint8_channel": layer({"dtype": "uint8", "symmetric": False, **CHANNEL}),
        "layers.0.int8_tensor": layer({"dtype": "int8", "symmetric": False, **TENSOR}),
        "layers.0.int8_group": layer(integers("int8", 32, False)),
        "layers.0.int4_fp8": layer([FP8, {"dtype": "int4", "symmetric": True, **CHANNEL}])})

    order = Checkpoint(goldens, "order")
    natural = {"pack_method": "order"}
    order.whole("layers.0.q_proj", "w4g32s+bf16", "int4", 24, 64, {**group, **natural}, 32, order="order")
    order.whole("layers.0.k_proj", "w4g64z+bf16", "uint4", 16, 128, {**group, **natural}, 64, zeros=True, order="order")
    order.whole("layers.0.v_proj", "w4cz+bf16", "int4", 17, 64, {**channel, **natural}, zeros=True, scales=order.scales(17),
                order="order")
    order.write(layer(integers("int4", 32, True)), {
        "*.k_proj": layer(integers("uint4", 64, False)),
        "*.v_proj": layer({"dtype": "int4", "symmetric": False, **CHANNEL})}, order="order")

    places = ["first_layer", "middle_layers", "last_layer"]
    rotated.write(layer(FP4, {**FP4, "is_dynamic": True}), {}, algo_config=[
        {"name": "rotation", "r1": True, "r2": False, "r3": False, "r4": True, "rotation_size": 32, "online_r1_rotation": True,
         "online_config": {"use_input_prescale": True},
         "scaling_layers": {place: [{"target_modules": ["model.layers.layer_id.self_attn.q_proj"]}] for place in places}}])
    goldens.finish()


if __name__ == "__main__":
    main()
