#!/usr/bin/env python3
"""Products of activations that compressed-tensors rounds to FP8, with weights of format "float-quantized" and
"pack-quantized".

For each of `cases` in cases.json: `x` FP32 [tokens, K], the tensors of the weight, `product` float64 [tokens, N] of what
compressed_tensors.quantization's fake_quantize makes of x, and of the decoded weight. Codes of E4M3 are PyTorch's own.

For each of `mlps`: `product` of a mixture of two experts and a shared one, whose activations and middles are rounded so. The
tensors that they share are called mlp.*; the shared expert is the last of each.

Needs torch, compressed-tensors and numpy (2.15.0, 0.20.1 and 2.4.6 made what is checked in).

Usage: make_fp8_activations.py [--out DIR]
"""
import argparse
import json
import pathlib

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams

TOKENS, K, N = 6, 320, 24


def rounded(x, args, given=None):
    """What the package multiplies by: x, rounded and back."""
    if given is not None:
        scale = torch.tensor([given])
    elif args.strategy == "group":
        ragged = x.shape[-1]
        x = torch.nn.functional.pad(x, (0, -ragged % args.group_size))
        blocks = x.reshape(len(x), -1, args.group_size)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
        return fake_quantize(x, scale.float(), torch.zeros_like(scale), args)[:, :ragged]
    else:
        scale, _ = calculate_qparams(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), args)
    return fake_quantize(x, scale.float(), torch.zeros_like(scale), args)


def tokens(generator, k):
    """They are of very different sizes."""
    sizes = torch.tensor([1, 1e-3, 200, 0.5, 3, 20.0])[:, None]
    return torch.randn(TOKENS, k, generator=generator) * sizes


def e4m3(weight, scale):
    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


class Mixture:
    """Experts 0 and 1, of which each token has both, and a shared one."""

    K, I, N = 136, 132, 24

    def __init__(self, generator):
        shapes = {"gate": (self.I, self.K), "up": (self.I, self.K), "down": (self.N, self.I)}
        weights = {name: torch.randn(3, *shape, generator=generator) / 4 for name, shape in shapes.items()}
        self.scales = {name: weight.abs().amax((1, 2)) / 448 for name, weight in weights.items()}
        self.codes = {name: e4m3(weight, self.scales[name][:, None, None]) for name, weight in weights.items()}
        self.x = torch.randn(TOKENS, self.K, generator=generator)
        self.router = torch.rand(TOKENS, 2, generator=generator)
        # Static scales differ from expert to expert, and those of gate and up in one.
        self.given = {"gate": torch.tensor([0.009, 0.011, 0.01]), "up": torch.tensor([0.009, 0.012, 0.01]),
                      "down": torch.tensor([0.05, 0.02, 0.03])}

    def product(self, args, static):
        def linear(x, name, e):
            x = rounded(x, args, self.given[name][e].item() if static else None)
            return x.double() @ (self.codes[name][e].double() * self.scales[name][e].double()).T

        def expert(e):
            gate, up = linear(self.x, "gate", e), linear(self.x, "up", e)
            return linear((torch.nn.functional.silu(gate) * up).float(), "down", e)

        return sum(expert(e) * self.router[:, e:e + 1].double() for e in (0, 1)) + expert(2)


class Writer:
    def __init__(self, folder):
        self.folder, self.cases, self.mlps = folder, [], []

    def mlp(self, name, quantization, activations, mixture, args, static=False):
        self.write(name, {"product": mixture.product(args, static)})
        self.mlps.append({"name": name, "quantization": quantization, "activations": activations})

    def case(self, name, quantization, settings, tensors, weight, x, args, given=None):
        """`weight`: float64 [N, K]."""
        y = rounded(x, args, given).double() @ weight.double().T
        self.write(name, {**tensors, "x": x, "product": y})
        self.cases.append({"name": name, "quantization": quantization, "settings": settings, "tensors": sorted(tensors),
                           "scale": given})

    def write(self, name, parts):
        for part, tensor in parts.items():
            codes = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            with (self.folder / f"{name}.{part}.npy").open("wb") as file:
                np.lib.format.write_array(file, np.ascontiguousarray(codes.numpy()), version=(1, 0))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    folder = parser.parse_args().out
    generator = torch.Generator().manual_seed(50)
    writer = Writer(folder)
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}

    weight = torch.randn(N, K, generator=generator)
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = e4m3(weight, scale)
    writer.case("channel", "FP8_PER_TOKEN", {"strategy": "channel", "activations": "fp8_dynamic"},
                {"weight": codes, "weight_scale": scale}, codes.double() * scale.double(), tokens(generator, K),
                QuantizationArgs(**fp8, strategy="token", dynamic=True))

    one = (weight.abs().amax() / 448).reshape(1)
    codes = e4m3(weight, one)
    writer.case("tensor", "FP8_STATIC",
                {"strategy": "tensor", "activations": "fp8_static"},
                {"weight": codes, "weight_scale": one, "input_scale": torch.tensor([0.03])},
                codes.double() * one.double(), tokens(generator, K), QuantizationArgs(**fp8, strategy="tensor"), 0.03)

    wide = torch.randn(N, 384, generator=generator)
    blocks = wide.reshape(N, 3, 128).abs().amax((0, 2)).reshape(1, 3) / 448
    spread = blocks.repeat_interleave(128, 1)
    codes = e4m3(wide, spread)
    writer.case("block", "FP8_PER_BLOCK_128",
                {"strategy": "block", "block_n": "128", "block_k": "128", "activations": "fp8_blocks"},
                {"weight": codes, "weight_scale": blocks}, codes.double() * spread.double(), tokens(generator, 384),
                QuantizationArgs(**fp8, strategy="group", group_size=128, dynamic=True))

    mixture = Mixture(generator)
    for projection in ("gate", "up", "down"):
        writer.write(f"mlp.{projection}", {"weight": mixture.codes[projection], "weight_scale": mixture.scales[projection],
                                           "input_scale": mixture.given[projection]})
    writer.write("mlp", {"x": mixture.x, "router": mixture.router})
    writer.mlp("mlp.token", "FP8_PER_TOKEN", "fp8_dynamic", mixture, QuantizationArgs(**fp8, strategy="token", dynamic=True))
    writer.mlp("mlp.static", "FP8_STATIC", "fp8_static", mixture, QuantizationArgs(**fp8, strategy="tensor"), True)
    writer.mlp("mlp.block", "FP8_PER_BLOCK_128", "fp8_blocks", mixture,
               QuantizationArgs(**fp8, strategy="group", group_size=128, dynamic=True))
    (folder / "cases.json").write_text(json.dumps({"cases": writer.cases, "mlps": writer.mlps}, indent=1) + "\n")


if __name__ == "__main__":
    main()
