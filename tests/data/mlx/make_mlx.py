#!/usr/bin/env python3
"""Makes checkpoints of the format "mlx" with Apple's packages, and their goldens: "types" with mlx.core.quantize, "mixed" as
mlx_lm quantises and saves a model. Needs mlx and mlx-lm for Linux (mlx-cpu 0.32.4 and mlx-lm 0.32.2 made what is checked in).

Values are those of mlx.core.dequantize in FP32, compared with the formula. With a global_scale they are the formula's: MLX
multiplies the scale by it first, which is a last place apart.

Usage: make_mlx.py [--out DIR]
"""
import importlib.metadata
import pathlib
import shutil
import sys

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe
from mlx_lm.utils import quantize_model, save_config, save_model

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import E2M1_VALUES, Bf16, Goldens, e4m3_values, fnv1a64, write_json

TYPES = {mx.float16: "", mx.bfloat16: "bf16", mx.float32: "fp32"}


def fp32(array):
    return np.array(array.astype(mx.float32))


def formula(mode, bits, group, weight, scales, biases, outer):
    """FP32 [N, K], step by step."""
    stream = np.unpackbits(np.array(weight).view("u1"), axis=1, bitorder="little")
    codes = (stream.reshape(len(stream), -1, bits).astype(np.int64) << np.arange(bits)).sum(-1)
    if mode == "affine":
        scale, bias = (np.repeat(fp32(array), group, axis=1) for array in (scales, biases))
        return codes.astype(np.float32) * scale + bias
    values = e4m3_values() if mode == "mxfp8" else E2M1_VALUES
    of_scales = e4m3_values() if mode == "nvfp4" else np.ldexp(np.float32(1), np.minimum(np.arange(256), 254) - 127)
    product = values[codes] * np.repeat(of_scales[np.array(scales)], group, axis=1)
    return product.astype(np.float32) if outer is None else product * (np.float32(np.array(outer)) / np.float32(2688))


def describe(mode, bits, group, k, scales, biases, outer):
    rows = "c" if group == k else f"g{group}"
    if mode != "affine":
        return {"mxfp4": "e2m1", "nvfp4": "e2m1", "mxfp8": "e4m3"}[mode] + rows + \
            ("+e4m3" if mode == "nvfp4" else "+e8m0") + ("" if outer is None else "*t")
    zero, scale = TYPES[biases.dtype], TYPES[scales.dtype]
    return f"w{bits}{rows}o" + (f":{zero}" if zero else "") + (f"+{scale}" if scale else "")


def add_case(goldens, model, path, settings, weight, scales, biases=None, bias=None, outer=None):
    mode, bits, group = settings["mode"], settings["bits"], settings["group_size"]
    values = formula(mode, bits, group, weight, scales, biases, outer)
    wide = [array.astype(mx.float32) for array in (scales, biases)] if mode == "affine" else [scales, None]
    own = np.array(mx.dequantize(weight, *wide, group, bits, mode=mode, global_scale=outer, dtype=mx.float32))
    if outer is None:
        assert np.array_equal(values.view("u4"), own.view("u4")), path
    else:
        np.testing.assert_array_max_ulp(values, own)
    goldens.case(model, path, describe(mode, bits, group, values.shape[1], scales, biases, outer),
                 np.ascontiguousarray(values.astype(np.float16).T), bias=None if bias is None else Bf16(fp32(bias)),
                 settings=settings)
    goldens.cases[-1]["fp32_fnv1a64"] = fnv1a64(np.ascontiguousarray(values.T).tobytes())


def make_types(goldens):
    random = np.random.default_rng(1)
    settings = {"group_size": 64, "bits": 4, "lm_head": False}
    tensors, cases = {"lm_head.weight": mx.array(random.standard_normal((8, 16))).astype(mx.bfloat16)}, []
    for bits, group, n, k, dtype, with_bias in (
            (4, 64, 24, 128, mx.bfloat16, True), (1, 32, 20, 96, mx.float16, False), (2, 64, 33, 128, mx.bfloat16, False),
            (3, 32, 17, 96, mx.bfloat16, True), (5, 128, 9, 128, mx.float32, False), (6, 32, 21, 160, mx.float16, False),
            (8, 64, 16, 192, mx.bfloat16, False)):
        path = f"layers.{bits}.proj"
        one = {"group_size": group, "bits": bits}
        if bits != 4:
            settings[path] = one
        weight = mx.array((random.standard_normal((n, k)) + random.uniform(-1, 1, (n, 1))).astype(np.float32)).astype(dtype)
        parts = dict(zip(("weight", "scales", "biases"), mx.quantize(weight, **one)))
        if with_bias:
            parts["bias"] = mx.array(random.standard_normal(n)).astype(mx.bfloat16)
        tensors.update({f"{path}.{name}": array for name, array in parts.items()})
        cases.append((path, {"mode": "affine", **one}, parts))
    folder = goldens.folder / "types"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_json(folder / "config.json", {"model_type": "golden", "quantization": settings})
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    for path, one, parts in cases:
        add_case(goldens, "types", path, one, **parts)


# By the ends of paths; without mode as older programs write them. The others are as the model's.
MIXED = {"q_proj": {"mode": "mxfp4", "bits": 4, "group_size": 32}, "k_proj": {"mode": "nvfp4", "bits": 4, "group_size": 16},
         "v_proj": {"mode": "mxfp8", "bits": 8, "group_size": 32}, "o_proj": {"bits": 6, "group_size": 32},
         "mlp.gate": {"bits": 8, "group_size": 64},
         "switch_mlp.gate_proj": {"mode": "nvfp4", "bits": 4, "group_size": 16, "global_scale": True},
         "switch_mlp.up_proj": {"mode": "mxfp4", "bits": 4, "group_size": 32},
         "switch_mlp.down_proj": {"bits": 3, "group_size": 32}, "lm_head": False}


def make_mixed(goldens):
    config = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64,
              "num_attention_heads": 2, "num_experts": 3, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
              "mlp_only_layers": [1], "moe_intermediate_size": 128, "rms_norm_eps": 1e-6, "vocab_size": 40,
              "num_key_value_heads": 1, "head_dim": 32, "rope_theta": 1e4, "tie_word_embeddings": False,
              "max_position_embeddings": 64, "norm_topk_prob": True}
    mx.random.seed(2)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(
        model, config, 64, 4, quant_predicate=lambda path, _: next(
            (dict(one) if one else one for end, one in MIXED.items() if path.endswith(end)), True))
    folder = goldens.folder / "mixed"
    shutil.rmtree(folder, ignore_errors=True)
    save_model(folder, model)
    save_config(config, folder / "config.json")
    (folder / "model.safetensors.index.json").unlink()  # tests rename tensors
    tensors = dict(tree_flatten(model.parameters()))
    for path, expert in (("layers.0.self_attn.q_proj", None), ("layers.1.self_attn.k_proj", None),
                         ("layers.0.self_attn.v_proj", None), ("layers.1.self_attn.o_proj", None),
                         ("layers.0.mlp.gate", None), ("layers.1.mlp.up_proj", None), ("embed_tokens", None),
                         ("layers.0.mlp.switch_mlp.gate_proj", 1), ("layers.0.mlp.switch_mlp.up_proj", 2),
                         ("layers.0.mlp.switch_mlp.down_proj", 0)):
        path = f"model.{path}"
        parts = {name.removeprefix(path + "."): array for name, array in tensors.items() if name.startswith(path + ".")}
        settings = {"mode": "affine", **config["quantization"].get(path, {"bits": 4, "group_size": 64})}
        if "global_scale" in parts:
            parts["outer"] = parts.pop("global_scale")
        if expert is not None:
            parts = {name: array[expert] for name, array in parts.items()}
            path += f".experts.{expert}"
        add_case(goldens, "mixed", path, settings, **parts)


def main():
    mx.set_default_device(mx.cpu)
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    make_types(goldens)
    make_mixed(goldens)
    goldens.finish(mlx=mx.__version__, mlx_lm=importlib.metadata.version("mlx-lm"))


if __name__ == "__main__":
    main()
