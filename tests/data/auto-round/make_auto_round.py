#!/usr/bin/env python3
"""Makes checkpoints as AutoRound writes them under its own name, in every packing_format of integers, and their goldens.

Needs numpy (2.4.6 made what is checked in). Where AutoRound can be imported (auto-round 0.16.1 was), its packers have to
make the same tensors of the same weights.

Usage: make_auto_round.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Goldens
from gptq_tensors import pack_dense, pack_zeros, values_of

GPTQ, TRUE, GPTQMODEL, AWQ = "auto_round:auto_gptq", "auto_round", "auto_round:gptqmodel", "auto_round:auto_awq"


def pack_awq(codes):
    """[rows, N] -> I32 [rows, N/8]: column 0 2 4 6 1 3 5 7 [i] in nibble i."""
    nibbles = codes.reshape(len(codes), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].astype(np.uint32)
    words = np.zeros(nibbles.shape[:2], np.uint32)
    for i in range(8):
        words |= nibbles[:, :, i] << np.uint32(4 * i)
    return words.view("<i4")


class Linear:
    """Random codes, zeros and scales, and their tensors."""

    def __init__(self, name, *, k, n, bits, packing, group=32, sym=False, bias=False):
        random = np.random.default_rng(bits * 1000 + k + n + len(name))
        self.name, self.k, self.n, self.bits, self.packing, self.sym = name, k, n, bits, packing, sym
        self.group, self.said = (k, -1) if group == -1 else (group, group)
        groups = -(-k // self.group)
        self.codes = random.integers(0, 1 << bits, (k, n))
        # Zero points of 0 cannot be represented where 1 is subtracted: AutoRound changes them to 1.
        self.zeros = np.full((groups, n), 1 << (bits - 1)) if sym else random.integers(
            1 if packing == GPTQ else 0, 1 << bits, (groups, n))
        self.scales = random.uniform(0.01, 0.1, (groups, n)).astype("<f2")
        self.group_of = np.arange(k) // self.group
        self.bias = random.standard_normal(n).astype("<f2") if bias else None
        if packing == AWQ:
            qweight, qzeros = pack_awq(self.codes), pack_awq(self.zeros)
        else:
            qweight = pack_dense(self.codes, bits)
            qzeros = pack_zeros(self.zeros, bits, pack_dense, packing == GPTQ)
        self.tensors = {f"{name}.qweight": qweight, f"{name}.qzeros": qzeros, f"{name}.scales": self.scales}
        if packing == GPTQMODEL:
            self.tensors[f"{name}.g_idx"] = self.group_of.astype("<i4")
        if bias:
            self.tensors[f"{name}.bias"] = self.bias

    def description(self):
        kind = "s" if self.sym and self.packing != AWQ else "z"
        return f"w{self.bits}{'c' if self.group >= self.k else f'g{self.group}'}{kind}"

    def values(self):
        return values_of(self.codes, self.zeros, self.scales, self.group_of)

    def settings(self):
        return {"bits": self.bits, "group_size": self.said, "sym": self.sym, "packing_format": self.packing}


def check(linear):
    """Against AutoRound's packers of these weights."""
    try:
        import torch
        from auto_round.export.export_to_autoround.export import dynamic_import_quant_linear_for_packing
    except ImportError:
        return None
    quantised = dynamic_import_quant_linear_for_packing(linear.packing, linear.bits, linear.group, linear.sym)
    dense = torch.nn.Linear(linear.k, linear.n, bias=False)
    integers = linear.codes - linear.zeros[linear.group_of]
    dense.weight.data = torch.tensor((integers * linear.scales.astype(np.float32)[linear.group_of]).T.copy())
    scales, zeros = linear.scales.astype(np.float32).T.copy(), linear.zeros.T.astype(np.float32)
    if linear.packing == AWQ:
        packed = quantised.from_linear(dense, linear.bits, linear.said, scales=torch.tensor(scales.T.copy()),
                                       zeros=torch.tensor(zeros.T.copy()), device="cpu")
    else:
        packed = quantised(linear.bits, linear.said, linear.k, linear.n, bias=False)
        packed.device = "cpu"
        packed.pack(dense, torch.tensor(scales), torch.tensor(zeros), None, device="cpu")
    for name, tensor in linear.tensors.items():
        suffix = name.rsplit(".", 1)[1]
        if suffix != "bias":
            assert np.array_equal(getattr(packed, suffix).numpy(), tensor), name
    return True


def make(goldens, model, linears, **more):
    """The first linear's settings are the checkpoint's."""
    tensors = {"norm.weight": np.ones(linears[0].k, "<f2")}
    for linear in linears:
        tensors.update(linear.tensors)
    goldens.checkpoint(model, {
        "quant_method": "auto-round", "autoround_version": "0.16.1", "data_type": "int", "iters": 200,
        "block_name_to_quantize": "model.layers", **linears[0].settings(), **more}, tensors)
    for linear in linears:
        print(model, linear.name, {None: "not compared", True: "as AutoRound"}[check(linear)])
        goldens.case(model, linear.name, linear.description(), linear.values(), linear.bias,
                     settings=linear.settings())


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    make(goldens, "gptq", [Linear("model.layers.0.up", k=64, n=32, bits=4, packing=GPTQ, sym=True, bias=True),
                           Linear("model.layers.1.up", k=64, n=32, bits=8, packing=GPTQ, sym=True),
                           Linear("model.layers.1.down", k=96, n=32, bits=2, packing=GPTQ, group=16),
                           Linear("lm_head", k=64, n=64, bits=3, packing=GPTQ, group=-1)],
         extra_config={"model.layers.0.gate": {"bits": 16, "data_type": "float"}, "model.layers.1.up": {"bits": 8},
                       ".*1\\.down.*": {"bits": 2, "group_size": 16, "sym": False}, ".*layers.*down.*": {"bits": 5},
                       "lm_head": {"bits": 3, "group_size": -1, "sym": False, "data_type": "int", "act_bits": 16,
                                   "act_group_size": None}})
    make(goldens, "true-zeros", [Linear(f"model.layers.{bits}.up", k=64, n=32, bits=bits, packing=TRUE)
                                 for bits in (2, 3, 4, 5, 6, 7, 8)],
         extra_config={f"model.layers.{bits}.up": {"bits": bits} for bits in (3, 4, 5, 6, 7, 8)})
    make(goldens, "gptqmodel", [Linear("model.layers.0.up", k=96, n=32, bits=4, packing=GPTQMODEL, group=64, sym=True)])
    make(goldens, "awq", [Linear("model.layers.0.up", k=64, n=40, bits=4, packing=AWQ, sym=True, bias=True)])
    goldens.finish()


if __name__ == "__main__":
    main()
