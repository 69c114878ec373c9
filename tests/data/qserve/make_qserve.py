#!/usr/bin/env python3
"""Makes checkpoints as QServe (OmniServe) writes them, W4A8 per group and per channel, and their goldens.

The order of qweight is derived from what the product's kernel reads: lane l of a warp loads 16 bytes, and byte i of its
register r goes to the column l // 4 and the rows 4 * (l % 4) + i of an m16n8k32 product.

Needs numpy (2.4.6 made what is checked in). Where OmniServe's w4a8_linear.py (commit 02b2925) can be imported
(PYTHONPATH=<its folder>, with torch), it has to make the same tensors of the same weights.

Usage: make_qserve.py [--out DIR]
"""
import pathlib
import sys
import types

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Goldens


def pack_codes(codes):
    """[K, N] -> I8 [N, K/2]."""
    k, n = codes.shape
    out = []
    for column in range(0, n, 32):
        for row in range(0, k, 32):
            tile = codes[row:row + 32, column:column + 32]
            for lane in range(32):
                for register in range(4):  # columns from 0 and 8 on, rows from 0 on; then rows from 16 on
                    rows = 16 * (register // 2) + 4 * (lane % 4) + np.arange(4)
                    first = 8 * (register % 2) + lane // 4
                    out.append(tile[rows, first] | tile[rows, first + 16] << 4)
    return np.concatenate(out).astype("u1").view("i1").reshape(n, k // 2)


def pack_groups(values):
    """I8 [groups, N]: a lane loads the four bytes of its columns 0, 8, 16 and 24."""
    out = np.empty(values.shape, "i1")
    for column in range(0, values.shape[1], 32):
        for i in range(32):
            out[:, column + i] = values[:, column + 8 * (i % 4) + i // 4].astype("u1").view("i1")
    return out


class Groups:
    """Integers q * s2 - z, all of INT8. `scaled`: z is a multiple of s2."""

    def __init__(self, name, *, k, n, group, scaled, bias=False, group_size=None):
        random = np.random.default_rng(k + n + group)
        groups = k // group
        self.name, self.k, self.n, self.group, self.scaled = name, k, n, group, scaled
        self.scales = random.integers(1, 18, (groups, n))
        self.scales[0, :4] = [1, 17, 16, 17]
        codes = random.integers(0, 16, (k, n))
        if scaled:  # 17 times 0 to 15 is INT8 for no zero point
            codes = np.minimum(codes, np.where(self.scales == 17, 14, 15)[np.arange(k) // group])
        # Zeros for which the integers stay in QServe's range.
        low, high = np.zeros((groups, n), int), np.zeros((groups, n), int)
        for j in range(groups):
            rows = codes[j * group:(j + 1) * group]
            low[j], high[j] = rows.max(0) * self.scales[j] - 127, rows.min(0) * self.scales[j] + 128
        if scaled:
            least, most = -(-np.maximum(low, 0) // self.scales), np.minimum(high // self.scales, 15)
            self.points = random.integers(least, most + 1)
            zeros = self.points * self.scales
        else:
            zeros = random.integers(np.maximum(low, 0), np.minimum(high, 255) + 1)
            assert (zeros % self.scales != 0).any()
        self.codes, self.zeros = codes, zeros
        self.s1 = random.uniform(1e-4, 2e-3, n).astype("<f2")
        self.bias = random.standard_normal(n).astype("<f2") if bias else None
        self.tensors = {f"{name}.qweight": pack_codes(codes), f"{name}.s1_scales": self.s1,
                        f"{name}.s2_scales": pack_groups(self.scales), f"{name}.s2_zeros": pack_groups(-zeros)}
        if bias:
            self.tensors[f"{name}.bias"] = self.bias

    def description(self):
        return f"w4{'c' if self.group == self.k else f'g{self.group}'}{'z' if self.scaled else 'o'}+int8*c"

    def integers(self):
        rows = np.arange(self.k) // self.group
        out = self.codes * self.scales[rows] - self.zeros[rows]
        assert out.min() >= -128 and out.max() <= 127
        return out

    def values(self):
        return (self.integers().astype(np.float32) * self.s1.astype(np.float32)).astype(np.float16)


class Channels:
    """q * s - z, z any number of FP16."""

    def __init__(self, name, *, k, n, bias=False):
        random = np.random.default_rng(k * 5 + n)
        self.name, self.k, self.n, self.group = name, k, n, -1
        self.codes = random.integers(0, 16, (k, n))
        self.points = random.integers(0, 16, n)
        self.s1 = random.uniform(5e-3, 5e-2, n).astype("<f2")
        self.szeros = (self.points.astype(np.float16) * self.s1).astype("<f2")
        self.bias = random.standard_normal(n).astype("<f2") if bias else None
        self.tensors = {f"{name}.qweight": pack_codes(self.codes), f"{name}.s1_scales": self.s1,
                        f"{name}.s1_szeros": self.szeros}
        if bias:
            self.tensors[f"{name}.bias"] = self.bias

    def description(self):
        return "w4co"

    def values(self):
        product = self.codes.astype(np.float32) * self.s1.astype(np.float32)
        return (product - self.szeros.astype(np.float32)).astype(np.float16)


def check(linear):
    """Against OmniServe: its tensors of these weights."""
    try:
        import torch
        torch.cuda.current_device = lambda: "cpu"  # what its classes ask for when they are defined
        for name in ("qgemm_w4a8_per_chn", "qgemm_w4a8_per_group"):
            sys.modules.setdefault(f"omniserve_backend.{name}", types.ModuleType(name))
        sys.modules.setdefault("omniserve_backend", types.ModuleType("omniserve_backend"))
        import w4a8_linear
    except ImportError:
        return "not compared"
    if isinstance(linear, Groups) and not linear.scaled:
        return "not comparable"  # it has whole zero points only
    torch.Tensor.cuda = lambda self: self

    def tensor(array):
        return torch.tensor(np.ascontiguousarray(array))

    points = linear.points.T.astype("i1")
    if isinstance(linear, Groups):
        weight, s2 = linear.integers() * linear.s1.astype(np.float32), tensor(linear.scales.T.astype("i1"))
    else:
        weight, s2 = (linear.codes - linear.points) * linear.s1.astype(np.float32), None
    dense = torch.nn.Linear(linear.k, linear.n, bias=linear.bias is not None).half()
    dense.weight.data = tensor(weight.T.astype(np.float16))
    packed = w4a8_linear.W4A8OF16LinearDynamicInputScale.from_linear(
        dense, 4, linear.group, s1_scale=tensor(linear.s1), s2_scale=s2, zeros=tensor(points))
    for suffix in ("qweight", "s1_scales", "s1_szeros", "s2_scales", "s2_zeros"):
        if f"{linear.name}.{suffix}" in linear.tensors:
            assert np.array_equal(getattr(packed, suffix).numpy(), linear.tensors[f"{linear.name}.{suffix}"]), suffix
    return "as OmniServe"


def make(goldens, model, settings, linears):
    tensors = {"norm.weight": np.ones(linears[0].k, "<f2")}
    for linear in linears:
        tensors.update(linear.tensors)
    goldens.checkpoint(model, settings, tensors)
    for linear in linears:
        print(model, linear.name, check(linear))
        goldens.case(model, linear.name, linear.description(), linear.values(), linear.bias,
                     settings={"bits": 4, **({"group_size": settings["group_size"]} if "group_size" in settings else {})})


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    make(goldens, "g128", {"quant_method": "qserve", "w_bit": 4, "group_size": 128},
         [Groups("layers.0.up", k=256, n=64, group=128, scaled=True, bias=True),
          Groups("layers.0.down", k=128, n=32, group=128, scaled=True)])
    make(goldens, "g32-zeros", {"quant_method": "qoq", "wbits": 4, "group_size": 32},
         [Groups("layer", k=96, n=64, group=32, scaled=False)])
    make(goldens, "channels", {"quant_method": "qserve", "bits": 4, "group_size": -1},
         [Channels("layer", k=160, n=96, bias=True), Channels("small", k=32, n=32)])
    make(goldens, "unsaid", {"quant_method": "qserve", "bits": 4},
         [Channels("channels", k=64, n=32), Groups("groups", k=192, n=32, group=64, scaled=True)])
    goldens.finish()


if __name__ == "__main__":
    main()
