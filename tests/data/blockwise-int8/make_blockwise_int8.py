#!/usr/bin/env python3
"""Makes checkpoints of the format "blockwise-int8", which SGLang reads, and their goldens, from the format's definition.
Needs numpy (2.4.6 made what is checked in).

Usage: make_blockwise_int8.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, Goldens, wide


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    for model, block, linears in [
            ("blocks", (128, 128), [("model.layers.0.mlp.up_proj", "w8b128x128s+fp32", 136, 144, None),
                                    ("model.layers.0.mlp.down_proj", "w8b0x128s+fp32", 132, 40, None),
                                    ("model.layers.0.self_attn.q_proj", "w8ts+fp32", 24, 40, 24)]),
            ("small", (16, 32), [("layer", "w8b32x16s+bf16", 40, 72, 40)])]:
        random = np.random.default_rng(sum(map(ord, model)))
        tensors, cases = {"lm_head.weight": Bf16(random.standard_normal((8, 16)))}, []
        for path, description, n, k, bias in linears:
            codes = random.integers(-128, 128, (n, k)).astype("i1")
            stored = random.uniform(1e-3, 2e-2, (-(-n // block[0]), -(-k // block[1]))).astype("<f4")
            if "bf16" in description:
                stored = Bf16(stored)
            rows, columns = np.indices((n, k))
            weight = codes.astype(np.float32) * wide(stored)[rows // block[0], columns // block[1]]
            tensors |= {f"{path}.weight": codes, f"{path}.weight_scale_inv": stored}
            if bias:
                tensors[f"{path}.bias"] = Bf16(random.standard_normal(bias))
            cases.append((path, description, np.ascontiguousarray(weight.astype(np.float16).T), tensors.get(f"{path}.bias")))
        goldens.checkpoint(model, {"quant_method": "blockwise_int8", "activation_scheme": "dynamic",
                                   "weight_block_size": list(block), "ignored_layers": ["lm_head"]}, tensors)
        for case in cases:
            goldens.case(model, *case)
    goldens.finish()


if __name__ == "__main__":
    main()
