#!/usr/bin/env python3
"""Makes checkpoints of every version of AWQ's tensors, and GPTQ's in Marlin's order, and their goldens: the folders
awq-gemm (format awq), awq-gemv, awq-gemv-fast, awq-marlin and gptq-marlin.

Needs numpy (2.4.6 made what is checked in). Each writer that is found, with torch, has to make the same tensors of the
same weights; none has to be imported as a whole: AutoAWQ 0.2.9 (awq/modules/linear), GPTQModel 7.7.0
(quantization/awq/utils/packing_utils.py), AutoGPTQ 0.7.1 (qlinear_marlin.py), and llm-awq's qmodule.py (PYTHONPATH).

Usage: make_awq_versions.py [--out DIR]
"""
import importlib.util
import pathlib
import sys
import types

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from awq_tensors import pack_fast, pack_gemm, pack_marlin, pad, padded_groups, permute_marlin, words_of
from golden import Bf16, Goldens, wide


class Linear:
    """Random codes, zero points and scales. `zeros`: "qzeros", "scaled_zeros", "real" (a scaled_zeros that is no zero
    point's), "middle" (every zero point is that) or "none" (the same without a tensor)."""

    def __init__(self, name, version, *, k, n, group, bits=4, bf16=False, bias=False, zeros="qzeros"):
        random = np.random.default_rng(bits * 1000 + k + n + len(name))
        self.name, self.version, self.k, self.n, self.bits, self.kind = name, version, k, n, bits, zeros
        self.group, self.said = (k, -1) if group == -1 else (group, group)
        groups = k // self.group
        middle = 1 << (bits - 1)
        self.codes = random.integers(0, 1 << bits, (k, n))
        self.zeros = random.integers(0, 1 << bits, (groups, n)) if zeros not in ("middle", "none") else np.full((groups, n), middle)
        scales = random.uniform(0.01, 0.1, (groups, n))
        self.scales = Bf16(scales) if bf16 else scales.astype("<f2")
        self.bias = random.standard_normal(n).astype("<f2") if bias else None
        self.scaled = -(self.zeros * wide(self.scales))
        if zeros == "real":
            self.scaled = self.scaled - random.uniform(-0.4, 0.4, (groups, n)) * wide(self.scales)
        self.scaled = Bf16(self.scaled) if bf16 else self.scaled.astype("<f2")
        parts = getattr(self, version)()
        if bias:
            parts["bias"] = self.bias
        self.tensors = {f"{name}.{suffix}": array for suffix, array in parts.items()}

    def gemm(self):
        out = {"qweight": pack_gemm(self.codes, self.bits), "scales": self.scales}
        if self.kind != "none":
            out["qzeros"] = pack_gemm(self.zeros, self.bits)
        return out

    def gemv(self):
        groups = padded_groups(self.k // self.group, self.group)
        scales = pad(self.scales, groups)
        if isinstance(scales, Bf16):
            turned = Bf16(np.zeros((self.n, groups)))
            turned.bits = np.ascontiguousarray(scales.bits.T)
        else:
            turned = np.ascontiguousarray(scales.T)
        out = {"qweight": words_of(np.ascontiguousarray(self.codes.T)), "scales": turned}
        if self.kind != "none":
            out["qzeros"] = words_of(np.ascontiguousarray(pad(self.zeros, groups).T))
        return out

    def gemv_fast(self, name="qzeros"):
        groups = padded_groups(self.k // self.group, self.group)
        return {"qweight": pack_fast(self.codes), "scales": pad(self.scales, groups), name: pad(self.scaled, groups)}

    def llm_awq(self):
        return self.gemv_fast("scaled_zeros")

    def marlin(self):
        return {"qweight": pack_marlin(self.codes), "scales": permute_marlin(self.scales)}

    def gptq_marlin(self):
        return {"B": pack_marlin(self.codes), "s": permute_marlin(self.scales)}

    def description(self):
        group = "c" if self.group == self.k else f"g{self.group}"
        zero = {"middle": "s", "none": "s", "real": "o:bf16" if isinstance(self.scales, Bf16) else "o"}.get(self.kind, "z")
        return f"w{self.bits}{group}{zero}{'+bf16' if isinstance(self.scales, Bf16) else ''}"

    def values(self):
        rows = np.arange(self.k) // self.group
        scales = wide(self.scales)[rows]
        if self.kind == "real":
            product = (self.codes.astype(np.float32) * scales).astype(np.float32)
            return (product + wide(self.scaled)[rows]).astype(np.float32).astype(np.float16)
        return ((self.codes - self.zeros[rows]).astype(np.float32) * scales).astype(np.float16)

    def settings(self):
        out = {"bits": self.bits, "group_size": self.said}
        if self.version != "gptq_marlin":
            out["zero_point"] = self.kind not in ("middle", "none")
        return out


# --- The writers ---

def load(package, path, **stubs):
    """A module of an installed package by its file, without importing the package. None where it is not there."""
    spec = importlib.util.find_spec(package)
    if spec is None or importlib.util.find_spec("torch") is None:
        return None
    folder = pathlib.Path(spec.submodule_search_locations[0])
    stubs = {name.replace("__", "."): module for name, module in stubs.items()}
    sys.modules.update(stubs)
    spec = importlib.util.spec_from_file_location(f"{package}_{path.stem}", folder / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in stubs:
        del sys.modules[name]
    return module


def empty(**members):
    out = types.ModuleType("stub")
    for name, value in members.items():
        setattr(out, name, value)
    return out


def autoawq(file):
    nothing = empty(try_import=lambda name: (None, ""))
    return load("awq", pathlib.Path("modules/linear") / file, awq=empty(), awq__utils=empty(), awq__utils__module=nothing)


def tensor(values):
    import torch
    if isinstance(values, Bf16):
        return torch.tensor(values.bits.astype(np.int16)).view(torch.bfloat16)
    return torch.tensor(np.ascontiguousarray(values))


def same(packed, linear, suffixes):
    import torch
    for suffix in suffixes:
        got, want = getattr(packed, suffix), linear.tensors[f"{linear.name}.{suffix}"]
        got = got.view(torch.int16).numpy() if got.dtype == torch.bfloat16 else got.numpy()
        want = want.bits.view(np.int16) if isinstance(want, Bf16) else want
        assert np.array_equal(got, want), (linear.name, suffix)


def dense(linear):
    """Numbers that round to the codes: FP32, or FP16 where a module needs it."""
    import torch
    rows = np.arange(linear.k) // linear.group
    out = torch.nn.Linear(linear.k, linear.n, bias=linear.bias is not None)
    out.weight.data = torch.tensor(((linear.codes - linear.zeros[rows]) * wide(linear.scales)[rows]).T.copy())
    return out


def turned(values):
    return tensor(values).T.contiguous()


def check_gemm(linear):
    packer = load("gptqmodel", pathlib.Path("quantization/awq/utils/packing_utils.py"))
    if packer is None:
        return None
    qweight, qzeros = packer.pack_awq(tensor(linear.codes), tensor(linear.zeros), linear.bits)
    same(empty(qweight=qweight, qzeros=qzeros), linear, ["qweight"] if linear.kind == "none" else ["qweight", "qzeros"])
    return "as GPTQModel"


def check_gemv(linear):
    module = autoawq("gemv.py")
    if module is None:
        return None
    if linear.said == -1 or isinstance(linear.scales, Bf16):
        return "not comparable"  # it takes neither
    packed = module.WQLinear_GEMV.from_linear(dense(linear), 4, linear.group, scales=turned(linear.scales),
                                              zeros=turned(linear.zeros))
    same(packed, linear, ["qweight", "scales"] + ([] if linear.kind == "none" else ["qzeros"]))
    return "as AutoAWQ"


def check_gemv_fast(linear):
    module = autoawq("gemv_fast.py")
    if module is None:
        return None
    if linear.kind == "real" or linear.said == -1:
        return "not comparable"
    packed = module.WQLinear_GEMVFast.from_linear(dense(linear), 4, linear.group, scales=turned(linear.scales),
                                                  zeros=turned(linear.zeros))
    same(packed, linear, ["qweight", "scales", "qzeros"])
    return "as AutoAWQ"


def check_llm_awq(linear):
    try:
        import torch
        sys.modules["awq_inference_engine"] = empty()
        import qmodule
    except ImportError:
        return None
    if linear.kind == "real":
        return "not comparable"
    packed = qmodule.WQLinear.from_linear(dense(linear).to(torch.float32), 4, linear.group,
                                          scales=turned(linear.scales), zeros=turned(linear.zeros))
    same(packed, linear, ["qweight", "scales", "scaled_zeros"])
    return "as llm-awq"


def check_marlin(linear):
    module = autoawq("marlin.py")
    if module is None:
        return None
    if isinstance(linear.scales, Bf16):
        return "not comparable"
    packed = module.WQLinear_Marlin.from_linear(dense(linear), 4, linear.group, scales=turned(linear.scales))
    same(packed, linear, ["qweight", "scales"])
    return "as AutoAWQ"


def check_gptq_marlin(linear):
    module = load("auto_gptq", pathlib.Path("nn_modules/qlinear/qlinear_marlin.py"))
    if module is None:
        return None
    if linear.k % 128 != 0 or linear.n % 256 != 0 or isinstance(linear.scales, Bf16):
        return "not comparable"
    import torch
    torch.cuda.get_device_capability = lambda: (8, 0)
    packed = module.QuantLinear(4, linear.group, linear.k, linear.n, linear.bias is not None)
    packed.pack(dense(linear).half(), turned(linear.scales))
    same(packed, linear, ["B", "s"])
    return "as AutoGPTQ"


def make(goldens, model, settings, linears, *, form):
    tensors = {"norm.weight": np.ones(linears[0].k, "<f2")}
    for linear in linears:
        tensors.update(linear.tensors)
    goldens.checkpoint(model, settings, tensors)
    for linear in linears:
        print(form, model, linear.name, globals()[f"check_{linear.version}"](linear) or "not compared")
        goldens.case(model, linear.name, linear.description(), linear.values(), linear.bias, settings=linear.settings())


def awq(goldens, form, model, version, linears, **more):
    make(goldens, model, {"quant_method": "awq", **linears[0].settings(), "version": version, **more}, linears, form=form)


def gemm(goldens):
    for bits in (2, 3, 5, 6, 7, 8):
        awq(goldens, "awq", f"w{bits}", "gemm", [
            Linear("layer", "gemm", k=64, n=40 if bits % 2 else 48, group=32, bits=bits, bf16=bits in (3, 8), bias=bits == 2)])
    awq(goldens, "awq", "w4-bf16", "GEMM", [Linear("layer", "gemm", k=64, n=24, group=-1, bf16=True)])
    awq(goldens, "awq", "symmetric", "gemm", [Linear("layer", "gemm", k=64, n=24, group=16, zeros="none", bias=True),
                                              Linear("zeros", "gemm", k=32, n=16, group=16, zeros="middle")],
        modules_to_not_convert=["lm_head"])
    awq(goldens, "awq", "gptqmodel", "gemm", [Linear("layer", "gemm", k=64, n=32, group=32, bits=8, zeros="middle")],
        format="gemm", checkpoint_format="gemm", sym=True, desc_act=False, pack_dtype="int32",
        meta={"quantizer": ["gptqmodel:7.7.0"]})


def main():
    goldens = Goldens(__doc__)
    root = goldens.args.out or pathlib.Path(__file__).resolve().parent

    def folder(name):
        if goldens.cases:
            goldens.finish()
        goldens.cases, goldens.args.out = [], root / name
        goldens.format = "awq" if name == "awq-gemm" else None
        goldens.start(__file__)

    folder("awq-gemm")
    gemm(goldens)
    folder("awq-gemv")
    awq(goldens, "awq-gemv", "groups", "gemv", [Linear("layers.0.up", "gemv", k=256, n=24, group=64, bias=True),
                                                Linear("layers.0.down", "gemv", k=1280, n=8, group=64)])
    awq(goldens, "awq-gemv", "large", "GEMV", [Linear("layer", "gemv", k=384, n=16, group=128)])
    awq(goldens, "awq-gemv", "small", "gemv", [Linear("layer", "gemv", k=96, n=40, group=32, zeros="none")])
    awq(goldens, "awq-gemv", "columns", "gemv", [Linear("layer", "gemv", k=64, n=16, group=-1, bf16=True)], format="gemv")
    folder("awq-gemv-fast")
    awq(goldens, "awq-gemv-fast", "autoawq", "gemv_fast", [Linear("layers.0.up", "gemv_fast", k=256, n=16, group=128, bias=True),
                                                           Linear("layers.0.down", "gemv_fast", k=1152, n=8, group=128)])
    awq(goldens, "awq-gemv-fast", "middle", "gemv_fast", [Linear("layer", "gemv_fast", k=128, n=24, group=64, zeros="middle")])
    awq(goldens, "awq-gemv-fast", "llm-awq", "llm-awq", [Linear("layer", "llm_awq", k=192, n=16, group=64, bf16=True)])
    awq(goldens, "awq-gemv-fast", "real-zeros", "gemm", [Linear("layer", "llm_awq", k=128, n=32, group=64, zeros="real"),
                                                         Linear("wide", "llm_awq", k=64, n=32, group=64, zeros="real", bf16=True)],
        backend="llm-awq")
    folder("awq-marlin")
    awq(goldens, "awq-marlin", "groups", "marlin", [Linear("layer", "marlin", k=128, n=128, group=64, zeros="none", bias=True)])
    awq(goldens, "awq-marlin", "columns", "Marlin", [Linear("layer", "marlin", k=48, n=64, group=48, zeros="none")])
    folder("gptq-marlin")
    make(goldens, "marlin", {"quant_method": "marlin", "group_size": 32},
         [Linear("layer", "gptq_marlin", k=64, n=128, group=32, zeros="none")], form="gptq-marlin")
    gptq = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    make(goldens, "autogptq", {"quant_method": "gptq", **gptq, "checkpoint_format": "marlin"},
         [Linear("layer", "gptq_marlin", k=256, n=256, group=128, zeros="none", bias=True),
          Linear("one", "gptq_marlin", k=128, n=256, group=128, zeros="none")], form="gptq-marlin")
    make(goldens, "flag", {"quant_method": "gptq", **gptq, "group_size": -1, "is_marlin_format": True},
         [Linear("layer", "gptq_marlin", k=64, n=64, group=-1, zeros="none", bf16=True)], form="gptq-marlin")
    goldens.finish()


if __name__ == "__main__":
    main()
