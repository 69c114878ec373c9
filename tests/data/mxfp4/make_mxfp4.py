#!/usr/bin/env python3
"""Makes checkpoints of the format "mxfp4", as gpt-oss has it, and their goldens, from the format's definition. Needs numpy
(2.4.6 made what is checked in).

Usage: make_mxfp4.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, E2M1_VALUES, Goldens

CONFIG = {"quant_method": "mxfp4",
          "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}


def make(random, n, k, lead=()):
    """blocks [..., N, K/32, 16], scales [..., N, K/32] and the weight [..., K, N]."""
    codes = random.integers(0, 16, (*lead, n, k)).astype("u1")
    scales = random.integers(117, 125, (*lead, n, k // 32)).astype("u1")
    blocks = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(*lead, n, k // 32, 16)
    powers = np.ldexp(np.float32(1), scales.astype(np.int64) - 127)
    weight = E2M1_VALUES[codes] * np.repeat(powers, 32, axis=-1)
    return blocks, scales, np.swapaxes(weight.astype(np.float16), -1, -2)


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    random = np.random.default_rng(20)

    # All experts in one tensor with one more dimension, beside dense tensors.
    parent = "model.layers.0.mlp.experts"
    tensors = {"model.layers.0.mlp.router.weight": Bf16(random.standard_normal((3, 64))),
               "model.layers.0.self_attn.q_proj.weight": Bf16(random.standard_normal((16, 64))),
               "model.layers.0.self_attn.q_proj.bias": Bf16(random.standard_normal(16)),
               "model.layers.0.self_attn.sinks": Bf16(random.standard_normal(4))}
    cases = []
    for projection, n, k in (("gate_up_proj", 40, 64), ("down_proj", 64, 32)):
        blocks, scales, weight = make(random, n, k, (3,))
        bias = random.standard_normal((3, n))
        tensors[f"{parent}.{projection}_blocks"], tensors[f"{parent}.{projection}_scales"] = blocks, scales
        tensors[f"{parent}.{projection}_bias"] = Bf16(bias)
        description = "e2m1g32+e8m0" if k > 32 else "e2m1c+e8m0"
        for expert in (0, 2):
            cases.append((f"{parent}.{expert}.{projection}", description, np.ascontiguousarray(weight[expert]),
                          Bf16(bias[expert])))
    goldens.checkpoint("experts", CONFIG, tensors)
    for case in cases:
        goldens.case("experts", *case)

    # A single linear without bias, whose N fills no byte.
    blocks, scales, weight = make(random, 21, 160)
    goldens.checkpoint("linear", CONFIG, {"layer_blocks": blocks, "layer_scales": scales})
    goldens.case("linear", "layer", "e2m1g32+e8m0", np.ascontiguousarray(weight))
    goldens.finish()


if __name__ == "__main__":
    main()
