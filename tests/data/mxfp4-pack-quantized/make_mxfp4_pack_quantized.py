#!/usr/bin/env python3
"""Makes a checkpoint of compressed-tensors' format "mxfp4-pack-quantized" and its goldens, from the format's definition.
Needs numpy (2.4.6 made what is checked in). ct_tensors.py says what is compared with the library where it can be imported.

Usage: make_mxfp4_pack_quantized.py [--out DIR]
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ct_tensors import Checkpoint, group_config, report
from golden import Goldens


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    made = Checkpoint(goldens, "mxfp4", "mxfp4-pack-quantized")
    weights = made.mxfp4("layers.0.up_proj", "e2m1g32+e8m0", 24, 64)
    made.mxfp4("layers.0.down_proj", "e2m1g32+e8m0", 33, 96, bias=True)
    made.write([group_config(["Linear"], weights)])
    goldens.finish()
    report()


if __name__ == "__main__":
    main()
