#!/usr/bin/env python3
"""Makes checkpoints of compressed-tensors' format "int-quantized" and their goldens, from the format's definition.
Needs numpy (2.4.6 made what is checked in).

Where the package compressed-tensors can be imported, its own compressor packs the same weights, and every byte of codes
and scales has to be the same (0.20.0 did when this was made).

Usage: make_int_quantized.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, Goldens, wide


def quantise(weight, bits, group, scale_type):
    """[N, K] FP32 -> codes I8 [N, K] and scales [N, groups]; `group` 0: one scale for all, [1]."""
    n, k = weight.shape
    most = (1 << bits) - 1
    groups = weight.reshape(1, -1) if group == 0 else weight.reshape(n, k // group, group)
    # Symmetric over the whole range of codes: the largest of both signs takes half of it.
    largest = np.abs(groups).max(axis=-1)
    scales = scale_type((largest / np.float32(most / 2)).astype(np.float32))
    codes = np.rint(groups / wide(scales)[..., None]).clip(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return codes.reshape(n, k).astype("i1"), scales


def weights_config(bits, strategy, group=None):
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group,
            "block_structure": None, "dynamic": False, "actorder": None, "observer": "minmax", "observer_kwargs": {}}


def group_config(weights, targets, activations=None):
    return {"targets": targets, "weights": weights, "input_activations": activations, "output_activations": None}


def quantization(groups, ignore=("lm_head",)):
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
            "config_groups": {f"group_{i}": group for i, group in enumerate(groups)}, "ignore": list(ignore),
            "kv_cache_scheme": None, "global_compression_ratio": None, "version": "0.20.0"}


def check_with_library(weight, codes, scales, bits, strategy, group):
    """The library's compressor makes the same codes of the same weights; its version, or None without it."""
    try:
        import compressed_tensors
        import torch
        from compressed_tensors.compressors import IntQuantizationCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    except ImportError:
        return None
    args = QuantizationArgs(**weights_config(bits, strategy, group))
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=QuantizationArgs(num_bits=8))
    state = {"weight": torch.from_numpy(weight), "weight_scale": torch.from_numpy(wide(scales).copy())}
    packed = IntQuantizationCompressor.compress(state, scheme)
    assert packed["weight"].dtype == torch.int8 and (packed["weight"].numpy() == codes).all(), "codes differ"
    back = IntQuantizationCompressor.decompress(packed, scheme)["weight"].numpy()
    rows = dequantised(codes, scales)
    assert (back.astype(np.float32) == rows.astype(np.float32)).all(), "values differ"
    return compressed_tensors.__version__


def dequantised(codes, scales):
    """[N, K] FP32 as the library has it: code * scale."""
    if scales.shape == (1,):
        return codes.astype(np.float32) * wide(scales)[0]
    group = codes.shape[1] // scales.shape[1]
    return codes.astype(np.float32) * np.repeat(wide(scales), group, axis=1)


def half(values):
    return values.astype("<f2")


def single(values):
    return values.astype("<f4")


class Checkpoint:
    def __init__(self, goldens, model):
        self.goldens, self.model, self.tensors, self.cases = goldens, model, {}, []
        self.random = np.random.default_rng(len(model) * 7919)
        self.version = None

    def unquantised(self, path, n, k):
        self.tensors[path + ".weight"] = Bf16(self.random.standard_normal((n, k)).astype(np.float32))

    def linear(self, path, description, *, k, n, bits, strategy, scale_type, group=None, bias_type=None):
        weight = self.random.standard_normal((n, k)).astype(np.float32) * np.float32(0.05)
        step = {"channel": k, "tensor": 0, "group": group}[strategy]
        codes, scales = quantise(weight, bits, step, scale_type)
        self.version = check_with_library(weight, codes, scales, bits, strategy, group)
        self.tensors[path + ".weight"], self.tensors[path + ".weight_scale"] = codes, scales
        bias = None
        if bias_type is not None:
            self.tensors[path + ".bias"] = bias = bias_type(self.random.standard_normal(n).astype(np.float32))
        expected = dequantised(codes, scales).astype(np.float16).T
        self.cases.append((path, description, np.ascontiguousarray(expected), bias))

    def write(self, config):
        self.goldens.checkpoint(self.model, config, self.tensors)
        for path, description, weight, bias in self.cases:
            self.goldens.case(self.model, path, description, weight, bias)
        return self.version


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)

    # As llm-compressor writes W8A8: activations are quantised by token, which a product of weights ignores.
    one = Checkpoint(goldens, "w8-channel")
    one.linear("layers.0.up_proj", "w8cs+bf16", k=96, n=40, bits=8, strategy="channel", scale_type=Bf16)
    one.linear("layers.0.down_proj", "w8cs+bf16", k=40, n=72, bits=8, strategy="channel", scale_type=Bf16, bias_type=Bf16)
    one.unquantised("layers.0.gate", 8, 96)
    one.unquantised("layers.0.norm", 1, 96)
    one.unquantised("lm_head", 16, 96)
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    version = one.write(quantization([group_config(weights_config(8, "channel"), ["Linear"], activations)],
                                     ["lm_head", "re:.*gate$"]))

    tensor = Checkpoint(goldens, "w8-tensor")
    tensor.linear("layer", "w8ts+fp32", k=64, n=24, bits=8, strategy="tensor", scale_type=single, bias_type=single)
    tensor.write(quantization([group_config(weights_config(8, "tensor"), ["Linear"])]))

    # Two groups of linears; the first group whose target matches is the linear's.
    mixed = Checkpoint(goldens, "mixed")
    mixed.linear("layers.0.attn.q_proj", "w8cs", k=64, n=33, bits=8, strategy="channel", scale_type=half)
    mixed.linear("layers.0.mlp.up_proj", "w4g32s", k=64, n=21, bits=4, strategy="group", group=32, scale_type=half)
    mixed.linear("layers.1.mlp.up_proj", "w4g32s", k=96, n=16, bits=4, strategy="group", group=32, scale_type=half)
    mixed.write(quantization([group_config(weights_config(8, "channel"), [r"re:.*\.attn\..*"]),
                              group_config(weights_config(4, "group", 32), ["Linear"])]))
    goldens.finish(**({"compressed-tensors": version} if version else {}))


if __name__ == "__main__":
    main()
