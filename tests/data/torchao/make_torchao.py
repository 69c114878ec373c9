#!/usr/bin/env python3
"""Makes checkpoints of the format "torchao" with torchao itself, and their goldens with its dequantization in FP32. Needs
numpy, torch, torchao and transformers (2.4.6, 2.15.0, 0.18.0 and 5.24.0 made what is checked in).

Int4Tensor can neither be made nor dequantized on a CPU: here its parts are random, and W = code * scale + zero_point, as
the kernels of MSLK have it. Of NVFP4Tensor the outer scale is a power of two: torchao multiplies it by the scales first.

Usage: make_torchao.py [--out DIR]
"""
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import torch
import torchao
import transformers
from safetensors import safe_open
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (Float8Tensor, FqnToConfig, Int4Tensor, Int8DynamicActivationInt8WeightConfig, Int8Tensor,
                                  IntxUnpackedToInt8Tensor, IntxWeightOnlyConfig)
from torchao.quantization.granularity import PerBlock, PerGroup, PerRow, PerTensor
from torchao.quantization.quant_primitives import MappingType
from torchao.quantization.quantize_.workflows.intx.intx_choose_qparams_algorithm import IntxChooseQParamsAlgorithm

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, Goldens, Typed, fnv1a64, wide

BYTES = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0"}


def stored(tensor):
    """As golden.py writes it."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype in BYTES:
        return Typed(tensor.view(torch.uint8).numpy(), BYTES[tensor.dtype])
    return Bf16(tensor.float().numpy()) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def dequantized(weight):
    """FP32 [N, K], by torchao."""
    if isinstance(weight, IntxUnpackedToInt8Tensor):
        return IntxUnpackedToInt8Tensor(weight.qdata, weight.scale.float(), weight.zero_point, weight.target_dtype,
                                        weight.block_size, torch.float32, None).dequantize()
    return weight.dequantize(torch.float32)


def settings(weight):
    """A request says this in the place of the metadata."""
    out = {"tensor_type": type(weight).__name__}
    if hasattr(weight, "target_dtype"):
        out["target_dtype"] = str(weight.target_dtype).rpartition(".")[2]
    if isinstance(weight, MXTensor):
        out["elem_dtype"] = str(weight.elem_dtype).rpartition(".")[2]
    if getattr(weight, "is_swizzled_scales", False):
        out["is_swizzled_scales"] = True
    return out


def add_case(goldens, model, path, scheme, values, bias=None, **more):
    """`values` FP32 [N, K]."""
    values = np.ascontiguousarray(values.T)
    goldens.case(model, path, scheme, values.astype(np.float16), bias, **more)
    goldens.cases[-1]["fp32_fnv1a64"] = fnv1a64(values.tobytes())


def int4(n, k, group, dtype=torch.bfloat16, symmetric=False):
    """An Int4Tensor of random parts, and its FP32 values."""
    codes = torch.randint(-8, 8, (n, k))
    scale = (torch.rand(k // group, n) * 0.02 + 1e-3).to(dtype)
    zero = torch.zeros_like(scale) if symmetric else (torch.randn(k // group, n) * 0.1).to(dtype)
    packed = (codes[:, 1::2] << 4 | codes[:, 0::2] & 15).to(torch.uint8).view(torch.int8)
    spread = [part.double().T.repeat_interleave(group, dim=1) for part in (scale, zero)]
    values = (codes.double() * spread[0] + spread[1]).float()
    return Int4Tensor(packed, scale, zero, [1, group], torch.Size((n, k))), values


class Checkpoint:
    def __init__(self, goldens, model):
        self.goldens, self.model, self.weights, self.more, self.cases = goldens, model, {}, {}, []

    def add(self, path, scheme, weight, values=None, bias=False, factor=None):
        values = dequantized(weight) if values is None else values
        if bias:
            self.more[f"{path}.bias"] = torch.randn(len(values)).bfloat16()
        if factor is not None:
            weight.act_pre_scale = factor
        self.weights[f"{path}.weight"] = weight
        self.cases.append((path, scheme, values.numpy(), settings(weight), factor))

    def write(self):
        self.more["lm_head.weight"] = torch.randn(8, 16).bfloat16()
        tensors, metadata = flatten_tensor_state_dict({**self.weights, **self.more})
        tensors = {name: stored(tensor) for name, tensor in tensors.items()}
        self.goldens.checkpoint(self.model, {"quant_method": "torchao", "modules_to_not_convert": None}, tensors,
                                {**metadata, "format": "pt"})
        for path, scheme, values, said, factor in self.cases:
            add_case(self.goldens, self.model, path, scheme, values, tensors.get(f"{path}.bias"), settings=said,
                     factor=None if factor is None else factor.float().numpy())


def add_saved_model(goldens, model):
    """A model that transformers quantised and saved: linears of two classes, and an lm_head that it left as it was."""
    folder = goldens.folder / model
    shutil.rmtree(folder, ignore_errors=True)
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                                      num_key_value_heads=1, vocab_size=24, tie_word_embeddings=False)
    quantization = transformers.TorchAoConfig(FqnToConfig({
        "_default": Int8DynamicActivationInt8WeightConfig(),
        r"re:.*down_proj": IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=PerGroup(16))}))
    with tempfile.TemporaryDirectory() as base:
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(base)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization, device_map="cpu",
                                                                   dtype=torch.bfloat16)
    loaded.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    for name, weight in loaded.state_dict().items():
        if type(weight) is torch.Tensor:
            continue
        path = name.rpartition(".")[0]
        scheme = "w3g16s+bf16" if path.endswith("down_proj") else "w8cs+fp32"
        add_case(goldens, model, path, scheme, dequantized(weight).numpy(), settings=settings(weight))
        assert safe_open(folder / "model.safetensors", "pt").get_tensor(f"{path}._weight_qdata").equal(weight.qdata)


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    torch.manual_seed(0)

    integers = Checkpoint(goldens, "integers")
    integers.add("layers.0.rows", "w8cs+fp32", Int8Tensor.from_hp(torch.randn(17, 40), PerRow()), bias=True)
    integers.add("layers.0.whole", "w8ts+fp32", Int8Tensor.from_hp(torch.randn(16, 40).bfloat16(), PerTensor()))
    integers.add("layers.0.groups", "w8g16s+fp32", Int8Tensor.from_hp(torch.randn(16, 48), PerGroup(16)))
    integers.add("layers.0.zeros", "w8cz+fp32",
                 Int8Tensor.from_hp(torch.rand(24, 40) + 0.5, PerRow(), MappingType.ASYMMETRIC), bias=True)
    integers.add("layers.0.blocks", "w8b24x8s+fp32", Int8Tensor.from_hp(torch.randn(16, 48), PerBlock([8, 24])),
                 factor=torch.rand(48).bfloat16() + 0.5)
    for bits in range(1, 9):
        symmetric = bits % 2 == 0
        weight = IntxUnpackedToInt8Tensor.from_hp(
            torch.randn(19, 64).to(torch.bfloat16 if bits > 4 else torch.float32) + 0.25, (1, 32), getattr(torch, f"int{bits}"),
            mapping_type=MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC)
        integers.add(f"layers.1.bits_{bits}", f"w{bits}g32{'s' if symmetric else 'z'}+{'bf16' if bits > 4 else 'fp32'}", weight)
    scale, zero = torch.rand(12, 2) * 0.01 + 1e-3, torch.randint(-40, 40, (12, 2)) / 16
    real = IntxUnpackedToInt8Tensor.from_hp(torch.randn(12, 64) * 0.01, (1, 32), torch.int4, custom_scale=scale,
                                            custom_zero_point=zero, intx_choose_qparams_algorithm=None)
    integers.add("layers.2.real_zeros", "w4g32r:fp32+fp32", real)
    integers.write()

    four = Checkpoint(goldens, "int4")
    weight, values = int4(24, 96, 32)
    four.add("layers.0.up_proj", "w4g32o:fp32+bf16", weight, values, bias=True)
    weight, values = int4(17, 64, 64, torch.float16)
    four.add("layers.0.down_proj", "w4co:fp32", weight, values)
    weight, values = int4(16, 64, 32, symmetric=True)
    four.add("layers.0.gate_proj", "w4g32s+bf16", weight, values, factor=torch.rand(64).bfloat16() + 0.5)
    four.write()

    floats = Checkpoint(goldens, "floats")
    floats.add("layers.0.rows", "e4m3c+fp32", Float8Tensor.from_hp(torch.randn(17, 40).bfloat16(), granularity=PerRow()), bias=True)
    floats.add("layers.0.whole", "e4m3t+fp32", Float8Tensor.from_hp(torch.randn(16, 40), granularity=PerTensor()))
    floats.add("layers.0.blocks", "e4m3b32x16+fp32", Float8Tensor.from_hp(torch.randn(48, 64), granularity=PerBlock([16, 32])))
    floats.add("layers.1.mxfp8", "e4m3g32+e8m0", MXTensor.to_mx(torch.randn(17, 64), torch.float8_e4m3fn, 32))
    floats.add("layers.1.mxfp4", "e2m1g32+e8m0", MXTensor.to_mx(torch.randn(18, 64), torch.float4_e2m1fn_x2, 32), bias=True)
    floats.add("layers.1.tiled", "e4m3g32+e8m0",
               MXTensor.to_mx(torch.randn(130, 160), torch.float8_e4m3fn, 32, is_swizzled_scales=True))
    floats.add("layers.1.nvfp4", "e2m1g16+e4m3*t", NVFP4Tensor.to_nvfp4(torch.randn(18, 64), per_tensor_scale=torch.tensor(2**-10)))
    floats.add("layers.1.nvfp4_tiled", "e2m1g16+e4m3", NVFP4Tensor.to_nvfp4(torch.randn(24, 96), is_swizzled_scales=True))
    floats.write()

    add_saved_model(goldens, "saved")
    goldens.finish(torch=torch.__version__.partition("+")[0], torchao=torchao.__version__, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
