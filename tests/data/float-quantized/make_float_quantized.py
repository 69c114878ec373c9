#!/usr/bin/env python3
"""Makes checkpoints of compressed-tensors' format "float-quantized" and their goldens, from the format's definition. Needs
numpy (2.4.6 made what is checked in). ct_tensors.py says what is compared with the library where it can be imported.

Usage: make_float_quantized.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ct_tensors import Checkpoint, group_config, report
from golden import Bf16, Goldens

FORMAT = "float-quantized"
TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)

    # As llm-compressor writes FP8_DYNAMIC.
    channel = Checkpoint(goldens, "channel", FORMAT)
    weights = channel.fp8("layers.0.up_proj", "e4m3c+bf16", 24, 40, "channel", Bf16)
    channel.fp8("layers.0.down_proj", "e4m3c+fp32", 33, 48, "channel", bias=True)
    channel.write([group_config(["Linear"], weights, input_activations=TOKENS)])

    # FP8: everything is static.
    tensor = Checkpoint(goldens, "tensor", FORMAT)
    static = {"input_scale": np.array([0.25], "<f4"), "output_scale": np.array([0.5], "<f4")}
    weights = tensor.fp8("layer", "e4m3t+fp32", 24, 40, "tensor", bias=True, besides=static)
    tensor.write([group_config(["Linear"], weights, input_activations={**TOKENS, "strategy": "tensor", "dynamic": False})],
                 kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True})

    # FP8_BLOCK, cut on both sides, and blocks that are no squares.
    block = Checkpoint(goldens, "block", FORMAT)
    groups = [group_config(["Linear"], block.fp8("layers.0.up_proj", "e4m3b128x128+fp32", 130, 136, "block", block=[128, 128])),
              group_config(["re:.*down"], block.fp8("layers.0.down_proj", "e4m3b32x16+bf16", 40, 72, "block", Bf16,
                                                    block=[16, 32]))]
    block.write(groups)

    groups = Checkpoint(goldens, "naive", FORMAT)
    weights = groups.fp8("layer", "e4m3g32+fp32", 24, 96, "group", group=32, stored="naive-quantized")
    groups.write([group_config(["Linear"], weights)], form="naive-quantized")

    powers = Checkpoint(goldens, "mxfp8", FORMAT)
    weights = powers.fp8("layer", "e4m3g32+e8m0", 24, 96, "group", group=32, bias=True, stored="mxfp8-quantized")
    powers.write([group_config(["Linear"], weights)], form="mxfp8-quantized")
    goldens.finish()
    report()


if __name__ == "__main__":
    main()
