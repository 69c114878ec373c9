#!/usr/bin/env python3
"""Makes checkpoints of the format "exl3" and their goldens, from the format's definition. Needs numpy (2.4.6 made what is
checked in).

The package decodes on GPUs alone. Entries and the order of tiles are those of the headers of exllamav3 1.4.1
(exllamav3_ext/quant/exl3_dq.cuh, codebook.cuh), which were compiled and compared with these for all bits and codebooks.

Usage: make_exl3.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import Bf16, Goldens, sylvester

MULTIPLIERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
SCALE = np.float32(128**-0.5)


def entries(codebook):
    """FP16 of each state."""
    x = np.arange(65536, dtype=np.uint32) * np.uint32(MULTIPLIERS.get(codebook, 89226354))
    if codebook == "mul1":
        halves = (0x6400 + x.view("u1").reshape(-1, 4).sum(axis=1)).astype("<u2").view("<f2")
        factor, bias = np.array([0x1EEE, 0xC931], "<u2").view("<f2").astype(np.float64)
        return (halves.astype(np.float64) * factor + bias).astype(np.float16)  # float64 is exact
    if codebook == "3inst":
        x += np.uint32(64248484)
    pairs = ((x & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view("<f2").reshape(-1, 2)
    return pairs[:, 0] + pairs[:, 1]


def order():
    """The place of each code in a tile, row-major: four rows of a column and of the column eight further for each lane."""
    return np.array([(2 * (lane % 4) + row) * 16 + lane // 4 + column
                     for lane in range(32) for column in (0, 8) for row in (0, 1, 8, 9)])


def decode(trellis, bits, codebook):
    """FP16 [K, N] of I16 [K / 16, N / 16, 16 * bits]."""
    rows, columns = trellis.shape[:2]
    words = trellis.reshape(rows * columns, -1).view("<u4").astype(">u4")
    ring = np.unpackbits(words.view("u1").reshape(rows * columns, -1), axis=1)
    at = ((np.arange(256) + 1) * bits)[:, None] + np.arange(-16, 0)
    states = ring[:, at % (256 * bits)] @ (1 << np.arange(15, -1, -1))
    tiles = np.empty((rows * columns, 256), np.float16)
    tiles[:, order()] = entries(codebook)[states]
    return tiles.reshape(rows, columns, 16, 16).swapaxes(1, 2).reshape(rows * 16, columns * 16)


def transform_columns(weight):
    """Butterflies over 128 columns in FP32, distance 1 first, then the scale."""
    out = weight.astype(np.float32)
    for apart in (1, 2, 4, 8, 16, 32, 64):
        pairs = out.reshape(len(out), -1, 2, apart)
        out = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(out.shape)
    return out * SCALE


class Checkpoint:
    def __init__(self, goldens, model, codebook):
        self.goldens, self.model, self.codebook = goldens, model, codebook
        self.random = np.random.default_rng(sum(map(ord, model)))
        self.tensors, self.cases = {"model.norm.weight": Bf16(self.random.standard_normal(128))}, []

    def linear(self, path, bits, k, n, bias=False, packed_signs=False):
        trellis = self.random.integers(-2**15, 2**15, (k // 16, n // 16, 16 * bits)).astype("<i2")
        tensors = {"trellis": trellis}
        sides = []
        for name, count, size in (("su", k, 1), ("sv", n, 0.02)):
            side = (self.random.uniform(0.5, 1.5, count) * size).astype(np.float16)
            side[self.random.integers(0, 2, count) == 1] *= -1
            if packed_signs:
                side = np.copysign(np.float16(1), side)
                tensors[name] = np.packbits(side < 0, bitorder="little").view("<i2")
            else:
                tensors[f"{name}h"] = side
            sides.append(side.astype(np.float32))
        if self.codebook in MULTIPLIERS:
            tensors[self.codebook] = np.array(MULTIPLIERS[self.codebook], np.uint32).view("<i4")
        if bias:
            tensors["bias"] = self.random.standard_normal(n).astype(np.float16)
        self.tensors.update({f"{path}.{name}": tensor for name, tensor in tensors.items()})
        values = transform_columns(decode(trellis, bits, self.codebook)) * sides[1]
        self.cases.append(dict(path=path, description=f"trellis{bits}{self.codebook.removeprefix('3inst')}*c",
                               weight=values.astype(np.float16), values=values, bias=tensors.get("bias"), factor=sides[0],
                               transform=sylvester(128) * np.float64(SCALE)))

    def write(self):
        self.goldens.checkpoint(self.model, {
            "quant_method": "exl3", "version": "1.4.1", "bits": 3.0, "head_bits": 6, "calibration": {"rows": 128, "cols": 2048},
            "out_scales": "auto", "codebook": self.codebook}, self.tensors)
        for case in self.cases:
            self.goldens.case(self.model, **case)


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    first = Checkpoint(goldens, "3inst", "3inst")
    first.linear("model.layers.0.self_attn.q_proj", 3, 128, 128)
    first.linear("model.layers.0.self_attn.v_proj", 1, 128, 256, bias=True)
    first.linear("model.layers.0.self_attn.o_proj", 2, 256, 128, packed_signs=True)
    first.write()
    mcg = Checkpoint(goldens, "mcg", "mcg")
    for expert in range(2):
        mcg.linear(f"model.layers.0.mlp.experts.{expert}.up_proj", 4, 128, 128)
    mcg.linear("model.layers.0.mlp.shared_expert.up_proj", 5, 128, 128)
    mcg.linear("lm_head", 6, 128, 128)
    mcg.write()
    mul1 = Checkpoint(goldens, "mul1", "mul1")
    mul1.linear("model.layers.0.mlp.gate_proj", 7, 128, 128)
    mul1.linear("model.layers.0.mlp.down_proj", 8, 128, 128)
    mul1.write()
    goldens.finish()


if __name__ == "__main__":
    main()
