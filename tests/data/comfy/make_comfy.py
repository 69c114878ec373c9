#!/usr/bin/env python3
"""Makes single files as ComfyUI writes them and their goldens, with its package comfy-kitchen. Needs torch and comfy-kitchen
(torch 2.15.0 and comfy-kitchen 0.2.40 made what is checked in).

Codes and scales are those of the package's layouts. Values are those of its dequantisation in FP32, compared with the formula;
of nvfp4 they are the formula's, as the package multiplies both scales first, a last place apart. The package turns rotated
weights back, with rounding: there the products of both are compared.

Usage: make_comfy.py [--out DIR]
"""
import importlib.metadata
import json
import pathlib
import sys

import numpy as np
import torch
from comfy_kitchen.tensor import (AsymW4A8Int8Layout, TensorCoreAWQW4A16Layout, TensorCoreConvRotW4A4Layout,
                                  TensorCoreFP8Layout, TensorCoreMXFP8Layout, TensorCoreNVFP4Layout, TensorWiseINT8Layout)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import E2M1_VALUES, Bf16, Goldens, Typed, e4m3_values, fnv1a64, sylvester, write_safetensors

NAMES = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0"}


def stored(tensor):
    if tensor.dtype in NAMES:
        return Typed(tensor.contiguous().view(torch.uint8).numpy(), NAMES[tensor.dtype])
    return Bf16(tensor.float().numpy()) if tensor.dtype == torch.bfloat16 else tensor.contiguous().numpy()


def untiled(scales, n, groups):
    """[N, groups] of tiles of 128 x 4, element by element."""
    flat, columns = scales.reshape(-1), scales.shape[1] // 4
    row, group = np.meshgrid(np.arange(n), np.arange(groups), indexing="ij")
    return flat[512 * (row // 128 * columns + group // 4) + row % 32 * 16 + row % 128 // 32 * 4 + group % 4]


def low_first(codes):
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)


def matrix(size):
    """ConvRot's matrix, without its scale."""
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    out = four
    while len(out) < size:
        out = np.kron(out, four)
    return out


class File:
    def __init__(self, goldens, name, prefix=""):
        self.goldens, self.name, self.prefix = goldens, name, prefix
        self.random = np.random.default_rng(sum(map(ord, name)))
        self.tensors, self.layers, self.cases = {}, {}, []

    def weight(self, n, k):
        return torch.from_numpy((self.random.standard_normal((n, k)) * 0.05).astype(np.float32))

    def add(self, path, tensors, values, description, layer, bias=False, n=None, rotation=0, theirs=None):
        """`values`: FP32 [N, K] as stored, before a rotation; `theirs`: what the package makes of them."""
        n, k = n or len(values), values.shape[1]
        tensors = {key: stored(tensor) if isinstance(tensor, torch.Tensor) else tensor for key, tensor in tensors.items()}
        if bias:
            tensors["bias"] = Bf16(self.random.standard_normal(n))
        self.tensors.update({f"{self.prefix}{path}.{key}": tensor for key, tensor in tensors.items()})
        self.layers[path] = layer
        rows, more = np.ascontiguousarray(values[:n].T), {}
        if rotation:
            ours, hadamard = matrix(rotation), sylvester(rotation)
            column_signs = ours[0]
            row_signs = ours[:, 0] * column_signs[0]
            plain = row_signs[:, None] * ours * column_signs
            order = [int(np.flatnonzero((hadamard == plain[:, [j]]).all(axis=0))[0]) for j in range(rotation)]
            turned = np.empty_like(rows)
            turned.reshape(-1, rotation, n)[:, order] = rows.reshape(-1, rotation, n) * column_signs[:, None].astype(np.float32)
            turned += np.float32(0)  # integers have no zero with a sign
            more = {"transform": hadamard * rotation**-0.5, "factor": np.tile(row_signs, k // rotation).astype(np.float32),
                    "values": turned}
            whole = (more["factor"][:, None] * np.eye(k)).reshape(k, -1, rotation) @ more["transform"]
            assert np.allclose(whole.reshape(k, k) @ turned.astype(np.float64), theirs[:n].T, rtol=1e-5, atol=1e-6), path
            rows = turned
        elif theirs is not None:
            assert np.array_equal(values[:n].view("u4"), theirs[:n].view("u4")), path
        settings = {key: value for key, value in layer.items() if key != "full_precision_matrix_mult"}
        self.cases.append(dict(path=self.prefix + path, description=description, weight=rows.astype(np.float16),
                               bias=tensors.get("bias"), settings=settings, exact=rows, **more))

    def finish(self, markers=False, metadata=False):
        if markers:
            for path, layer in self.layers.items():
                text = json.dumps(layer).encode()
                self.tensors[f"{self.prefix}{path}.comfy_quant"] = np.frombuffer(text, "u1")
        header = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": self.layers})} if metadata else None
        write_safetensors(self.goldens.folder / self.name, self.tensors, header)
        for case in self.cases:
            exact = case.pop("exact")
            self.goldens.case(self.name, **case)
            self.goldens.cases[-1]["fp32_fnv1a64"] = fnv1a64(np.ascontiguousarray(exact).tobytes())


def make_metadata(goldens):
    """Paths of the metadata lack the prefix of the diffusion model."""
    file = File(goldens, "metadata.safetensors", "model.diffusion_model.")
    file.tensors["model.diffusion_model.norm.weight"] = Bf16(file.random.standard_normal(64))

    codes, params = TensorCoreFP8Layout.quantize(file.weight(24, 64))
    values = TensorCoreFP8Layout.dequantize(codes, params).numpy()
    formula = e4m3_values()[stored(codes).bits] * params.scale.numpy()
    assert np.array_equal(formula.view("u4"), values.view("u4"))
    file.add("blocks.0.fp8", {"weight": codes, "weight_scale": params.scale, "input_scale": params.scale}, formula,
             "e4m3t+fp32", {"format": "float8_e4m3fn", "full_precision_matrix_mult": True}, bias=True, theirs=values)

    for path, n, k, bias in (("blocks.0.nvfp4", 20, 96, True), ("blocks.1.nvfp4", 144, 80, False)):
        codes, params = TensorCoreNVFP4Layout.quantize(file.weight(n, k))
        values = TensorCoreNVFP4Layout.dequantize(codes, params).numpy()
        pairs = codes.numpy()
        high_first = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(len(pairs), -1)
        scales = e4m3_values()[untiled(stored(params.block_scale).bits, len(pairs), k // 16)]
        formula = E2M1_VALUES[high_first] * np.repeat(scales, 16, axis=1) * params.scale.numpy()
        np.testing.assert_array_max_ulp(formula, values)
        tensors = {"weight": codes, "weight_scale": params.block_scale, "weight_scale_2": params.scale}
        file.add(path, tensors, formula, "e2m1g16+e4m3*t", {"format": "nvfp4"}, bias=bias, n=n)

    for path, n, k, bias in (("blocks.0.mxfp8", 40, 96, True), ("blocks.1.mxfp8", 32, 160, False)):
        codes, params = TensorCoreMXFP8Layout.quantize(file.weight(n, k))
        values = TensorCoreMXFP8Layout.dequantize(codes, params).numpy()
        scales = stored(params.scale)
        powers = np.ldexp(np.float32(1), untiled(scales.bits, len(codes), k // 32).astype(int) - 127)
        formula = (e4m3_values()[stored(codes).bits] * np.repeat(powers, 32, axis=1)).astype(np.float32)
        tensors = {"weight": codes, "weight_scale": scales if bias else scales.bits}
        file.add(path, tensors, formula, "e4m3g32+e8m0", {"format": "mxfp8"}, bias=bias, n=n, theirs=values)
    file.finish(metadata=True)


def make_markers(goldens):
    file = File(goldens, "markers.safetensors")
    file.tensors["norm.weight"] = Bf16(file.random.standard_normal(64))

    for path, rows, n, k, rotation in (("attn.tensor", False, 24, 64, 0), ("attn.rows", True, 17, 48, 0),
                                       ("mlp.rotated", True, 24, 128, 64), ("mlp.rotated_256", True, 8, 256, 256)):
        turned = {"convrot": True, "convrot_groupsize": rotation} if rotation else {}
        codes, params = TensorWiseINT8Layout.quantize(file.weight(n, k), per_channel=rows, **turned)
        formula = codes.numpy().astype(np.float32) * params.scale.numpy()
        values = TensorWiseINT8Layout.dequantize(codes, params).numpy()
        file.add(path, {"weight": codes, "weight_scale": params.scale}, formula, "w8cs+fp32" if rows else "w8ts+fp32",
                 {"format": "int8_tensorwise", **turned}, bias=bool(rotation), rotation=rotation, theirs=values)

    codes, params = TensorCoreConvRotW4A4Layout.quantize(file.weight(17, 128), convrot_groupsize=16)
    signed = (low_first(codes.numpy().view("u1")) ^ 8).astype(np.float32) - 8
    file.add("mlp.w4a4", {"weight": codes, "weight_scale": params.scale}, signed * params.scale.numpy()[:, None], "w4cs+fp32",
             {"format": "convrot_w4a4", "convrot_groupsize": 16}, rotation=16,
             theirs=TensorCoreConvRotW4A4Layout.dequantize(codes, params).numpy())

    for path, bits, group, k in (("mlp.levels", 4, 16, 128), ("mlp.levels_6", 6, 32, 64)):
        codes, params = AsymW4A8Int8Layout.quantize(file.weight(20, k), group_size=group, convrot_groupsize=64, bits=bits)
        numbers = codes.numpy().view("u1")
        unsigned = low_first(numbers[:, :k // 2]).astype(int)
        if bits == 6:
            unsigned |= (numbers[:, k // 2:, None] >> np.arange(0, 8, 2) & 3).reshape(20, k) << 4
        table = np.arange(-32, 32, dtype=np.float32) if params.codebook is None else params.codebook.numpy()
        levels = np.rint(table[unsigned] * np.repeat(params.scale.float().numpy(), group, axis=1)).clip(-127, 127)
        tensors = {"weight": codes, "weight_s_rel": params.scale, "weight_s_channel": params.s_channel}
        if params.codebook is not None:
            tensors["weight_codebook"] = params.codebook
        file.add(path, tensors, levels.astype(np.float32) * params.s_channel.numpy()[:, None], "w8cs+fp32",
                 {"format": "asym_w4a8_int8", "group_size": group, "convrot_groupsize": 64}, rotation=64,
                 theirs=AsymW4A8Int8Layout.dequantize(codes, params).numpy())

    codes = file.random.integers(0, 256, (24, 64)).astype("u1")
    scale, zeros = (torch.from_numpy(file.random.standard_normal((2, 24)).astype(np.float32) * size).bfloat16()
                    for size in (0.01, 0.05))
    params = TensorCoreAWQW4A16Layout.Params(scale=scale, zeros=zeros, orig_dtype=torch.float32, orig_shape=(24, 128))
    spread = [np.repeat(tensor.float().numpy().T, 64, axis=1) for tensor in (scale, zeros)]
    file.add("mod.awq", {"weight": torch.from_numpy(codes.view("i1")), "weight_scale": scale, "weight_zeros": zeros},
             (low_first(codes).astype(np.float32) - 8) * spread[0] + spread[1], "w4g64o:fp32+bf16",
             {"format": "awq_w4a16", "group_size": 64}, bias=True,
             theirs=TensorCoreAWQW4A16Layout.dequantize(torch.from_numpy(codes.view("i1")), params).numpy())
    file.finish(markers=True)


def make_scaled(goldens):
    """As ComfyUI wrote fp8 in 2025, and weights that are just fp8."""
    file = File(goldens, "scaled.safetensors")
    file.tensors["scaled_fp8"] = Typed(np.zeros(2, "u1"), "F8_E4M3")
    codes, params = TensorCoreFP8Layout.quantize(file.weight(16, 40))
    formula = e4m3_values()[stored(codes).bits] * params.scale.numpy()
    file.add("attn.q", {"weight": codes, "scale_weight": params.scale.reshape(1), "scale_input": params.scale.reshape(1)},
             formula, "e4m3t+fp32", {"format": "float8_e4m3fn"}, bias=True,
             theirs=TensorCoreFP8Layout.dequantize(codes, params).numpy())
    codes = file.weight(16, 24).to(torch.float8_e4m3fn)
    file.add("attn.plain", {"weight": codes}, e4m3_values()[stored(codes).bits], "e4m3t+fp32",
             {"format": "float8_e4m3fn", "scaled": False}, theirs=codes.float().numpy())
    file.finish()


def main():
    torch.manual_seed(0)
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    make_metadata(goldens)
    make_markers(goldens)
    make_scaled(goldens)
    goldens.finish(torch=torch.__version__.split("+")[0], comfy_kitchen=importlib.metadata.version("comfy-kitchen"))


if __name__ == "__main__":
    main()
