#!/usr/bin/env python3
"""Makes a checkpoint of compressed-tensors' format "nvfp4-pack-quantized" and its goldens, from the format's definition.
Needs numpy (2.4.6 made what is checked in). ct_tensors.py says what is compared with the library where it can be imported.

Usage: make_nvfp4_pack_quantized.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ct_tensors import Checkpoint, group_config, report
from golden import Goldens


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    made = Checkpoint(goldens, "nvfp4", "nvfp4-pack-quantized")
    weights = made.nvfp4("layers.0.up_proj", "e2m1g16+e4m3*t", 24, 64,
                         besides={"input_global_scale": np.array([300], "<f4")})
    made.nvfp4("layers.0.down_proj", "e2m1g16+e4m3*t", 33, 80, bias=True)
    local = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
             "dynamic": "local"}
    made.write([group_config(["Linear"], weights, input_activations=local)])
    goldens.finish()
    report()


if __name__ == "__main__":
    main()
