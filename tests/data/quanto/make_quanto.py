#!/usr/bin/env python3
"""Makes checkpoints of the formats "quanto" and "quanto-packed" with optimum-quanto itself, and their goldens with its
dequantization in FP32: "saved" and "groups" are folders of QuantizedModelForCausalLM.save_pretrained. Needs numpy, torch,
optimum-quanto and transformers (2.4.6, 2.15.0, 0.2.7 and 5.24.0 made what is checked in).

Usage: make_quanto.py [--out DIR]    (the folder that has "quanto" and "quanto-packed")
"""
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers
from optimum import quanto
from optimum.quanto.tensor.optimizers import MaxOptimizer
from optimum.quanto.tensor.weights.qbits import WeightQBitsTensor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, Goldens, Typed, fnv1a64

LETTERS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def stored(tensor):
    tensor = tensor.detach()
    if tensor.dtype == torch.float8_e4m3fn:
        return Typed(tensor.view(torch.uint8).numpy(), "F8_E4M3")
    return Bf16(tensor.float().numpy()) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def dequantized(weight):
    """FP32 [N, K] by quanto, with its scales and shifts as FP32."""
    scale = weight._scale.float()
    if weight.qtype.bits == 8:
        return type(weight)(weight.qtype, weight.axis, weight.size(), weight.stride(), weight._data, scale, None).dequantize()
    weight = weight if type(weight) is WeightQBitsTensor else weight.weight_qbits_tensor()
    shift = weight._shift.float() if weight._shift.dtype.is_floating_point else weight._shift
    return WeightQBitsTensor(weight.qtype, weight.axis, weight._group_size, weight.size(), weight.stride(), weight._data, scale,
                             shift).dequantize()


def scheme(weight):
    letters, k = LETTERS[weight._scale.dtype], weight.shape[1]
    scale = "" if letters == "fp16" else f"+{letters}"
    if weight.qtype.bits == 8:
        return ("w8cs" if weight.qtype == quanto.qint8 else "e4m3c") + scale
    group = weight._group_size
    block = "c" if group in (None, k) else f"g{group}"
    shift = getattr(weight, "_shift", None)
    zero = "z" if shift is not None and not shift.dtype.is_floating_point else "o" if letters == "fp16" else f"o:{letters}"
    return f"w{weight.qtype.bits}{block}{zero}{scale}"


def add_case(goldens, model, path, weight, bias=None):
    values = np.ascontiguousarray(dequantized(weight).detach().numpy().T)
    packed = weight.qtype.bits < 8
    settings = {"weights": weight.qtype.name, **({"in_features": weight.shape[1]} if packed else {})}
    goldens.case(model, path, scheme(weight), values.astype(np.float16), bias, settings=settings,
                 format="quanto-packed" if packed else "quanto")
    goldens.cases[-1]["fp32_fnv1a64"] = fnv1a64(values.tobytes())


def save(goldens, model, dtype, sizes, types, exclude=()):
    """`types`: of linears, by the end of their paths."""
    folder = goldens.folder / model
    shutil.rmtree(folder, ignore_errors=True)
    config = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=24,
                                      tie_word_embeddings=False, attention_bias=True, **sizes)
    llama = transformers.LlamaForCausalLM(config).to(dtype)
    for end, kind in types.items():
        quanto.quantize(llama, weights=kind, include=f"*{end}", exclude=list(exclude))
    quanto.freeze(llama)
    for name, module in llama.named_modules():
        if isinstance(module, quanto.QLinear):
            if module.bias is not None:
                torch.nn.init.normal_(module.bias)
            add_case(goldens, model, name, module.weight, None if module.bias is None else stored(module.bias))
    quanto.QuantizedModelForCausalLM(llama).save_pretrained(folder)
    for other in ("README.md", "generation_config.json"):
        (folder / other).unlink()


def zero_points(goldens):
    """Shifts that are integers, and settings as diffusers writes them."""
    tensors, cases = {"proj_out.weight": Bf16(np.ones((4, 8)))}, []
    for path, kind, n, k, group in (("a.to_q", quanto.qint4, 17, 64, 32), ("a.to_k", quanto.qint4, 9, 40, None)):
        weight = torch.rand(n, k).to(torch.float16) - 0.25
        scale, shift = MaxOptimizer()(weight, qtype=kind, axis=0, group_size=group, zeropoint=True)
        weight = WeightQBitsTensor.quantize(weight, kind, 0, group, scale, shift, optimized=False)
        weight.save_to_state_dict(tensors, f"{path}.weight.", False)
        tensors[f"{path}.bias"] = torch.randn(n).to(torch.float16)
        cases.append((path, weight, tensors[f"{path}.bias"].numpy()))
    tensors = {name: stored(tensor) if torch.is_tensor(tensor) else tensor for name, tensor in tensors.items()}
    goldens.checkpoint("zero-points", {"quant_method": "quanto", "weights_dtype": "int4", "modules_to_not_convert": ["proj_out"]},
                       tensors)
    for path, weight, bias in cases:
        add_case(goldens, "zero-points", path, weight, bias)


def main():
    goldens = Goldens(__doc__)
    root = goldens.args.out or pathlib.Path(__file__).resolve().parents[1]
    versions = dict(torch=torch.__version__.partition("+")[0], optimum_quanto=quanto.__version__,
                    transformers=transformers.__version__)
    torch.manual_seed(0)

    goldens.args.out = root / "quanto"
    goldens.start(__file__)
    save(goldens, "saved", torch.bfloat16, dict(hidden_size=32, intermediate_size=40),
         {"_proj": quanto.qint8, "lm_head": quanto.qfloat8}, exclude=["*up_proj", "*gate_proj"])
    save(goldens, "floats", torch.float32, dict(hidden_size=32, intermediate_size=40),
         {"mlp.*_proj": quanto.qfloat8, "q_proj": quanto.qint8, "lm_head": quanto.qint4})
    goldens.finish(**versions)

    goldens.args.out, goldens.cases, goldens.format = root / "quanto-packed", [], "quanto"
    goldens.start(__file__)
    save(goldens, "groups", torch.bfloat16, dict(hidden_size=160, intermediate_size=96),
         {"self_attn.*_proj": quanto.qint4, "up_proj": quanto.qint2, "down_proj": quanto.qint4, "lm_head": quanto.qint2})
    save(goldens, "singles", torch.float32, dict(hidden_size=192, intermediate_size=33),
         {"gate_proj": quanto.qint4, "mlp.*_proj": quanto.qint2, "self_attn.*_proj": quanto.qint4, "lm_head": quanto.qint8})
    zero_points(goldens)
    goldens.finish(**versions)


if __name__ == "__main__":
    main()
