#!/usr/bin/env python3
"""Makes checkpoints of compressed-tensors' format "pack-quantized" and their goldens, from the format's definition. Needs
numpy (2.4.6 made what is checked in).

Where the package compressed-tensors can be imported, ct_tensors.py compares: 0.17.1 with the padded words, the order and
what has no padding, 0.20.0 with the dense words.

Usage: make_pack_quantized.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from ct_tensors import Checkpoint, group_config, report
from golden import Goldens

FORMAT = "pack-quantized"


def half(values):
    return values.astype("<f2")


def single(values):
    return values.astype("<f4")


def every_width(goldens, model, padded, version):
    """Widths of 1 to 8 bits, with and without zero points, each a group of linears of its own."""
    made, groups = Checkpoint(goldens, model, FORMAT), []
    for bits in range(1, 9):
        for symmetric in (True, False):
            path = f"layers.{bits}.{'up' if symmetric else 'down'}_proj"
            zero = "s" if symmetric else "z"
            weights = made.integers(path, f"w{bits}g32{zero}+bf16", 40, 64, bits, "group", 32, symmetric, padded=padded)
            groups.append(group_config([f"re:layers[.]{bits}[.]{'up' if symmetric else 'down'}"], weights))
    # Twelve words in either way: the version tells.
    groups.append(group_config(["layers.9.up_proj"],
                               made.integers("layers.9.up_proj", "w5cs+bf16", 24, 72, 5, "channel", padded=padded)))
    made.write(groups, version=version)


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)

    # As llm-compressor writes W4A16, and what else there is of 4 and 8 bits.
    w4 = Checkpoint(goldens, "w4", FORMAT)
    groups = [group_config(["Linear"], w4.integers("model.layers.0.mlp.up_proj", "w4g32s+bf16", 33, 96, 4, "group", 32))]
    groups += [group_config([path], w4.integers(path, *rest, **more)) for path, *rest, more in [
        ("model.layers.0.q_proj", "w4g64z", 24, 128, 4, "group", 64, False, half, dict(bias=True)),
        ("model.layers.0.k_proj", "w4cz+fp32", 24, 50, 4, "channel", None, False, single, {}),
        ("model.layers.0.v_proj", "w8cs", 20, 45, 8, "channel", None, True, half, dict(bias=True)),
        ("model.layers.0.o_proj", "w4ts+fp32", 16, 40, 4, "tensor", None, True, single, {}),
        ("model.layers.1.o_proj", "w4tz+bf16", 16, 40, 4, "tensor", None, False, {}),
        ("model.layers.1.k_proj", "w4g32z+bf16", 16, 80, 4, "group", 32, False, dict(bytes_zero=True)),
    ]]
    w4.write(groups, kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True})

    every_width(goldens, "padded", True, "0.17.1")
    every_width(goldens, "dense", False, "0.20.0")

    act = Checkpoint(goldens, "actorder", FORMAT)
    groups = [group_config(["Linear"], act.integers("layers.0.up_proj", "w4g32s+bf16", 24, 128, 4, "group", 32, act=True)),
              group_config(["re:.*down"], act.integers("layers.0.down_proj", "w3g16z", 24, 64, 3, "group", 16, False, half,
                                                       True, act=True, bias=True))]
    act.write(groups, version="0.17.1")

    experts = Checkpoint(goldens, "experts", FORMAT)
    path = "model.layers.0.mlp.experts"
    groups = [group_config([r"re:.*up_proj"], experts.integers(path + ".up_proj", "w4g32s+bf16", 24, 64, 4, "group", 32,
                                                               experts=3)),
              group_config([r"re:.*down_proj"], experts.integers(path + ".down_proj", "w3g32z+bf16", 40, 64, 3, "group", 32,
                                                                 False, experts=2))]
    experts.write(groups)

    # A format for each group: this one is the first.
    mixed = Checkpoint(goldens, "mixed", FORMAT)
    tokens = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    groups = [
        group_config(["Linear"], mixed.integers("layers.0.up_proj", "w4g32s+bf16", 24, 64, 4, "group", 32), format=FORMAT),
        group_config(["re:.*q_proj"], mixed.fp8("layers.0.q_proj", "e4m3c+fp32", 24, 40, "channel", form="float-quantized"),
                     format="float-quantized", input_activations=tokens),
        group_config(["re:.*down_proj"], mixed.nvfp4("layers.0.down_proj", "e2m1g16+e4m3*t", 24, 64,
                                                     form="nvfp4-pack-quantized"), format="nvfp4-pack-quantized"),
        group_config(["layers.0.o_proj"], mixed.mxfp4("layers.0.o_proj", "e2m1g32+e8m0", 16, 64, form="mxfp4-pack-quantized"),
                     format="mxfp4-pack-quantized")]
    mixed.write(groups, form="mixed-precision")
    # Transforms of inputs: of all of K, of blocks, and a projection that a target leaves out.
    rotated = Checkpoint(goldens, "transforms", FORMAT)
    groups = [group_config(["Linear"], rotated.integers("model.layers.0.mlp.down_proj", "w4g32s+bf16", 24, 128, 4, "group", 32,
                                                        bias=True))]
    rotated.transform("model.layers.0.mlp.down_proj", "R4")
    for path in ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"):
        rotated.integers(path, "w4g32s+bf16", 16, 96, 4, "group", 32)
        if path.endswith("q_proj"):
            rotated.transform(path, "v", 32)

    def applied(location, targets, inverse, ignore=()):
        return {"targets": targets, "location": location, "inverse": inverse, "ignore": list(ignore)}

    def scheme(targets, ignore, size):
        return {"type": "hadamard", "apply": [applied("input", targets, False, ignore),
                                              applied("weight_input", targets, True, ignore)],
                "randomize": False, "requires_grad": False, "head_dim": size, "precision": "torch.float32"}

    rotated.write(groups, transform_config={"config_groups": {
        "R1": {"type": "random-hadamard", "apply": [applied("weight_input", ["re:.*q_proj$"], True)], "randomize": False,
               "requires_grad": False, "head_dim": None, "precision": "torch.float32"},
        "R4": scheme(["re:.*down_proj$"], [], None),
        "v": scheme(["re:.*self_attn.*"], ["re:.*o_proj$"], 32)}})
    goldens.finish()
    report()


if __name__ == "__main__":
    main()
