#!/usr/bin/env python3
"""Makes checkpoints of the format "fp-quant" and their goldens, from the format's definition. Needs numpy (2.4.6 made what is
checked in).

Where the package fp-quant can be imported (0.3.2), its matrices are compared with these.

Usage: make_fp_quant.py [--out DIR]
"""
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import E2M1_VALUES, Bf16, Goldens, e4m3_values, sylvester, wide

try:
    import torch
    from fp_quant.module.linear import get_gsr_matrix, get_hadamard_matrix
except ImportError:
    torch = None


def columns_of(size, init):
    """The columns of Sylvester's matrix that the columns of the checkpoint's are."""
    if init == "hadamard":
        return np.arange(size)
    changes = (np.diff(sylvester(size), axis=0) != 0).sum(axis=0)
    return np.argsort(changes)


class Checkpoint:
    def __init__(self, goldens, model, dtype, size, init="hadamard", scale=1.0):
        self.goldens, self.model, self.dtype, self.size, self.init = goldens, model, dtype, size, init
        self.random = np.random.default_rng(sum(map(ord, model)))
        self.tensors, self.cases = {"lm_head.weight": Bf16(self.random.standard_normal((8, 16)))}, []
        self.columns = columns_of(size, init)
        self.matrix = Bf16(sylvester(size)[:, self.columns] * size**-0.5)
        self.scale = Bf16(np.array([scale]))
        if torch is not None:
            make = get_gsr_matrix if init == "gsr" else get_hadamard_matrix
            theirs = make(size, torch.bfloat16, torch.device("cpu"))
            assert (theirs.view(torch.uint16).numpy() == self.matrix.bits).all(), (model, "matrix differs")
            print("compared with fp-quant:", model)

    def linear(self, path, description, n, k, bias=False):
        nvfp4 = self.dtype == "nvfp4"
        group = 16 if nvfp4 else 32
        codes = self.random.integers(0, 16, (n, k)).astype("u1")
        low, high = (0x20, 0x60) if nvfp4 else (118, 124)
        scales = self.random.integers(low, high, (n, k // group)).astype("u1")
        numbers = e4m3_values()[scales] if nvfp4 else np.ldexp(np.float32(1), scales.astype(np.int64) - 127)
        outer = np.float32(1) / wide(self.scale)
        values = (E2M1_VALUES[codes] * np.repeat(numbers, group, axis=1)).astype(np.float32) * outer
        tensors = {"qweight": codes[:, ::2] | codes[:, 1::2] << 4, "scales": scales, "weight_global_scale": self.scale,
                   "act_global_scale": self.scale, "forward_hadamard_matrix": self.matrix,
                   "backward_hadamard_matrix": self.matrix}
        if bias:
            tensors["bias"] = Bf16(self.random.standard_normal(n))
        self.tensors.update({f"{path}.{name}": tensor for name, tensor in tensors.items()})
        # Rows of the weight as Sylvester's columns follow one another.
        rows = np.empty_like(values.T)
        rows.reshape(-1, self.size, n)[:, self.columns] = values.T.reshape(-1, self.size, n)
        signs = sylvester(self.size) * wide(self.matrix)[0, 0].astype(np.float64)
        x = self.random.standard_normal((3, k))
        ours = (x.reshape(3, -1, self.size) @ signs).reshape(3, k) @ rows
        theirs = (x.reshape(3, -1, self.size) @ wide(self.matrix).astype(np.float64)).reshape(3, k) @ values.T
        assert np.allclose(ours, theirs, rtol=1e-12), (path, "differs")
        self.cases.append(dict(path=path, description=description, weight=rows.astype(np.float16), bias=tensors.get("bias"),
                               transform=signs, values=rows, settings={"forward_dtype": self.dtype}))

    def write(self, method):
        self.goldens.checkpoint(self.model, {
            "quant_method": "fp_quant", "forward_dtype": self.dtype, "forward_method": method, "backward_dtype": "bf16",
            "store_master_weights": False, "hadamard_group_size": self.size, "pseudoquantization": False,
            "transform_init": self.init, "modules_to_not_convert": ["lm_head"]}, self.tensors)
        for case in self.cases:
            self.goldens.case(self.model, **case)


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    mx = Checkpoint(goldens, "mxfp4", "mxfp4", 32)
    mx.linear("model.layers.0.up_proj", "e2m1g32+e8m0", 24, 96, bias=True)
    mx.write("quest")
    large = Checkpoint(goldens, "mxfp4-absmax", "mxfp4", 128, scale=3.0)
    large.linear("model.layers.0.up_proj", "e2m1g32+e8m0*t", 16, 128)
    large.write("abs_max")
    nv = Checkpoint(goldens, "nvfp4", "nvfp4", 16, scale=10.0)
    nv.linear("model.layers.0.up_proj", "e2m1g16+e4m3*t", 17, 80)
    nv.write("abs_max")
    gsr = Checkpoint(goldens, "gsr", "nvfp4", 64, "gsr", 10.0)
    gsr.linear("model.layers.0.down_proj", "e2m1g16+e4m3*t", 24, 128, bias=True)
    gsr.write("abs_max")
    goldens.finish()


if __name__ == "__main__":
    main()
