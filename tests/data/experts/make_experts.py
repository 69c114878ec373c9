#!/usr/bin/env python3
"""Makes a checkpoint with a mixture of experts and a dense gated MLP, and the goldens of GroupedQuantizedMatmul and
GatedMlp. AutoAWQ "gemm" tensors, packed here once more. gate_proj and up_proj are one tensor for each expert,
down_proj is one for all of them. Needs numpy (2.4.6 made what is checked in).

Usage: make_experts.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Goldens, dequantise, write_json

EXPERTS, K, I, N, GROUP = 5, 64, 96, 72, 32
TOKENS, TOP_K = 11, 3
PACK_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word holds this column of its eight


def pack(codes):
    """[.., N] codes of 4 bits -> int32 [.., N / 8]."""
    eights = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
    words = np.zeros(eights.shape[:-1], np.uint32)
    for nibble, column in enumerate(PACK_ORDER):
        words |= eights[..., column] << np.uint32(4 * nibble)
    return words.view("<i4")


def linear(random, k, n):
    """Tensors by suffix, and the FP16 weight that they stand for."""
    codes = random.integers(0, 16, (k, n)).astype("u1")
    zeros = random.integers(0, 16, (k // GROUP, n)).astype(np.int64)
    scales = random.uniform(0.01, 0.04, (k // GROUP, n)).astype("<f2")
    return ({"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales},
            dequantise(codes, zeros, scales, GROUP).astype(np.float64))


def silu(x):
    return x / (1 + np.exp(-x))


def gated(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    random = np.random.default_rng(2024)
    tensors, weights = {}, {}
    for name, k, n in [("gate_proj", K, I), ("up_proj", K, I), ("down_proj", I, N)]:
        made = [linear(random, k, n) for _ in range(EXPERTS)]
        weights[name] = [weight for _, weight in made]
        for e, (parts, _) in enumerate(made):
            for suffix, tensor in parts.items():
                if name == "down_proj":
                    tensors[f"moe.experts.{name}.{suffix}"] = np.stack([other[suffix] for other, _ in made])
                else:
                    tensors[f"moe.experts.{e}.{name}.{suffix}"] = tensor
        parts, weights[f"dense.{name}"] = linear(random, k, n)
        tensors.update({f"mlp.{name}.{suffix}": tensor for suffix, tensor in parts.items()})
    # The experts of another layer: one is missing, and two differ.
    for e in (0, 2):
        tensors.update({f"gap.experts.{e}.up_proj.{s}": t for s, t in linear(random, K, I)[0].items()})
    for e, n in ((0, 64), (1, 72)):
        tensors.update({f"odd.experts.{e}.up_proj.{s}": t for s, t in linear(random, K, n)[0].items()})
    goldens.checkpoint("moe", {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
                               "version": "gemm"}, tensors)

    x = random.standard_normal((TOKENS, K)).astype("<f2")
    ids = np.stack([random.permutation(EXPERTS - 1)[:TOP_K] for _ in range(TOKENS)]).astype("<i4")  # the last has none
    router = random.uniform(0, 1, (TOKENS, TOP_K)).astype("<f4")
    wide, routed = x.astype(np.float64), router.astype(np.float64)
    rows = np.array([[silu(wide[t] @ weights["gate_proj"][e]) for e in ids[t]] for t in range(TOKENS)])
    mlps = np.array([[gated(wide[t], *(weights[p][e] for p in ("gate_proj", "up_proj", "down_proj"))) for e in ids[t]]
                     for t in range(TOKENS)])
    dense = gated(wide, *(weights[f"dense.{p}"] for p in ("gate_proj", "up_proj", "down_proj")))
    for name, array in [("x", x), ("ids", ids), ("router", router), ("grouped", rows),
                        ("grouped_summed", np.einsum("tj,tjn->tn", routed, rows)), ("mlp", mlps),
                        ("mlp_summed", np.einsum("tj,tjn->tn", routed, mlps)), ("dense_mlp", dense)]:
        goldens.npy(f"{name}.npy", array)
    write_json(goldens.folder / "goldens" / "cases.json", {
        "about": "x FP16 [tokens, K], ids [tokens, top_k], router weights FP32; in float64: grouped = silu(x @ gate_proj "
                 "of each expert), mlp = GatedMlp with SILU of each expert, *_summed by the router's weights, dense_mlp "
                 "of the layer without experts",
        "source": {"numpy": np.__version__}, "experts": EXPERTS})


if __name__ == "__main__":
    main()
