#!/usr/bin/env python3
"""Makes checkpoints as AutoGPTQ and GPTQModel write them, of every checkpoint_format and width, and their goldens.

Needs numpy (2.4.6 made what is checked in). Where GPTQModel can be imported (7.7.0 was), its packer has to make the same
tensors of the same weights, and its module the same values of them.

Usage: make_gptq.py [--out DIR]
"""
import pathlib
import sys
import types

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, Goldens, write_json
from gptq_tensors import pack_dense, pack_planes, pack_zeros, values_of


class Linear:
    """Random codes, zeros and scales, and their tensors."""

    def __init__(self, name, *, k, n, bits, group=32, version="gptq", sym=False, act=False, g_idx=True, bf16=False,
                 bias=False):
        random = np.random.default_rng(bits * 1000 + k + n + len(name))
        self.name, self.k, self.n, self.bits, self.version, self.sym, self.act = name, k, n, bits, version, sym, act
        self.group, self.said = (k, -1) if group == -1 else (group, group)
        groups = -(-k // self.group)
        self.codes = random.integers(0, 1 << bits, (k, n))
        self.zeros = np.full((groups, n), 1 << (bits - 1)) if sym else random.integers(0, 1 << bits, (groups, n))
        scales = random.uniform(0.01, 0.1, (groups, n))
        self.scales = Bf16(scales) if bf16 else scales.astype("<f2")
        self.group_of = np.arange(k) // self.group
        if act:
            self.group_of = random.permutation(self.group_of)
        pack = pack_planes if version == "gptq_p" else pack_dense
        self.bias = random.standard_normal(n).astype("<f2") if bias else None
        self.tensors = {f"{name}.qweight": pack(self.codes, bits),
                        f"{name}.qzeros": pack_zeros(self.zeros, bits, pack, version == "gptq"),
                        f"{name}.scales": self.scales}
        if g_idx:
            self.tensors[f"{name}.g_idx"] = self.group_of.astype("<i4")
        if bias:
            self.tensors[f"{name}.bias"] = self.bias

    def description(self):
        group = "c" if self.group >= self.k else f"g{self.group}"
        return f"w{self.bits}{group}{'s' if self.sym else 'z'}{'+bf16' if isinstance(self.scales, Bf16) else ''}"

    def values(self):
        return values_of(self.codes, self.zeros, self.scales, self.group_of)

    def settings(self):
        return {"bits": self.bits, "group_size": self.said, "sym": self.sym, "desc_act": self.act,
                "checkpoint_format": self.version}


def check(linear):
    """Against GPTQModel: its tensors of these weights, its values of these tensors."""
    try:
        import torch
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear
        from gptqmodel.utils import model as convert
    except ImportError:
        return None
    if isinstance(linear.scales, Bf16):
        return False  # numpy cannot hand them over

    def module():
        return TorchLinear(bits=linear.bits, group_size=linear.said, desc_act=linear.act, sym=linear.sym,
                           in_features=linear.k, out_features=linear.n, bias=linear.bias is not None,
                           pack_dtype=torch.int32, format=linear.version, register_buffers=True)

    if linear.k % 32 == 0 and linear.n % 32 == 0:  # what its packer takes
        # FP32 numbers that round to the codes exactly.
        integers = linear.codes - linear.zeros[linear.group_of]
        dense = torch.nn.Linear(linear.k, linear.n, bias=False)
        dense.weight.data = torch.tensor((integers * linear.scales.astype(np.float32)[linear.group_of]).T.copy())
        packed = module()
        packed.pack_block(dense, torch.tensor(linear.scales.astype(np.float32).T.copy()),
                          torch.tensor(linear.zeros.T.astype(np.float32)), torch.tensor(linear.group_of.astype(np.int32)))
        packed.qzero_format(format=2)
        if linear.version == "gptq":
            convert.convert_gptq_v2_to_v1_format_module(packed, types.SimpleNamespace(bits=None, pack_dtype=None))
        for suffix in ("qweight", "qzeros"):
            assert np.array_equal(getattr(packed, suffix).numpy(), linear.tensors[f"{linear.name}.{suffix}"]), suffix

    loaded = module()
    for suffix in ("qweight", "qzeros", "scales"):
        getattr(loaded, suffix).data.copy_(torch.tensor(linear.tensors[f"{linear.name}.{suffix}"]))
    loaded.g_idx.data.copy_(torch.tensor(linear.group_of))
    if linear.version == "gptq":
        convert.convert_gptq_v1_to_v2_format_module(loaded, bits=linear.bits, pack_dtype=torch.int32)
    loaded.post_init()
    assert np.array_equal(loaded.dequantize_weight().to(torch.float16).numpy(), linear.values())
    return True


def make(goldens, model, linears, *, side_file=False, dynamic=None, **more):
    """The first linear's settings are the checkpoint's."""
    first = linears[0].settings()
    if side_file:
        del first["checkpoint_format"]
    config = {**first, **more}
    if dynamic:
        config["dynamic"] = dynamic
    tensors = {"norm.weight": np.ones(linears[0].k, "<f2")}
    for linear in linears:
        tensors.update(linear.tensors)
    goldens.checkpoint(model, {"quant_method": "gptq", **config}, tensors)
    if side_file:
        write_json(goldens.folder / model / "config.json", {"model_type": "golden"})
        write_json(goldens.folder / model / "quantize_config.json", config)
    for linear in linears:
        print(model, linear.name, {None: "not compared", False: "not comparable", True: "as GPTQModel"}[check(linear)])
        goldens.case(model, linear.name, linear.description(), linear.values(), linear.bias,
                     settings=linear.settings())


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    make(goldens, "v1", [Linear("layer", k=64, n=32, bits=4, bias=True)])
    make(goldens, "v1-side-file", [Linear("layer", k=64, n=32, bits=4, sym=True, g_idx=False)], side_file=True,
         damp_percent=0.01, static_groups=False, true_sequential=True, model_name_or_path=None)
    make(goldens, "v1-w2", [Linear("layer", k=80, n=24, bits=2), Linear("small", k=16, n=8, bits=2)])
    make(goldens, "v1-w3", [Linear("layer", k=96, n=64, bits=3), Linear("act", k=64, n=32, bits=3, act=True)],
         dynamic={"act": {"desc_act": True}})
    make(goldens, "v1-w8-columns", [Linear("layer", k=64, n=32, bits=8, group=-1, sym=True, act=True)], lm_head=True)
    make(goldens, "v2-act", [Linear("layer", k=80, n=40, bits=4, version="gptq_v2", act=True, bf16=True, bias=True),
                             Linear("even", k=128, n=32, bits=4, version="gptq_v2", act=True)], format="gptq_v2",
         pack_dtype="int32")
    planes = [Linear(f"layers.{bits}.up", k=64, n=32, bits=bits, version="gptq_p", group=16 if bits == 6 else 32,
                     sym=bits == 7, act=bits == 3) for bits in (5, 3, 4, 6, 7, 2, 8)]
    # The first of two matching entries counts.
    make(goldens, "planes", planes, format="gptq_p", pack_dtype="int32", dynamic={
        "-:.*router$": {}, "+:layers\\.3\\.": {"bits": 3, "desc_act": True}, "layers\\.4\\.up": {"bits": 4},
        "+:layers\\.6": {"bits": 6, "group_size": 16}, "+:layers\\.7": {"bits": 7, "sym": True},
        "+:.*\\.(8|3)\\.": {"bits": 8}, "+:layers\\.2": {"bits": 2}})
    goldens.finish()


if __name__ == "__main__":
    main()
