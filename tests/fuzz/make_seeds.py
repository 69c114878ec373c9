#!/usr/bin/env python3
"""Writes the seeds of fuzz_formats, in the spelling that its comments describe: golden linears under tests/data, and small
AutoAWQ ones, whose goldens are too large for it. The seeds of fuzz_gguf are the golden files, and one that breaks off.
fuzz_quant_config has what golden checkpoints say of their quantisation, golden-*, beside texts written by hand, which stay.
The seeds of fuzz_names, fuzz_config_file, fuzz_security_files and fuzz_metrics_http are in small_seeds.py.

Usage: make_seeds.py
"""
import json
import pathlib
import re
import shutil
import struct

import small_seeds

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
OUT = pathlib.Path(__file__).resolve().parent / "corpus" / "fuzz_formats"

# The settings and suffixes of the formats with seeds: Format::settings, Format::suffixes.
AWQ = ["bits", "group_size", "version", "zero_point"]
GPTQ = ["qweight", "qzeros", "scales", "g_idx", "bias"]
FORMATS = {
    "awq": (AWQ, ["qweight", "qzeros", "scales", "bias"]),
    "int-quantized": (["activations", "group_size", "hadamard_size", "num_bits", "strategy", "symmetric"],
                      ["weight", "weight_scale", "weight_zero_point", "bias", "input_scale", "input_zero_point"]),
    "plain": (["bits", "group_size", "symmetric", "zero"], ["codes", "zeros", "scales", "bias"]),
    "fastertransformer": (["bits", "group_size"], ["weight", "weight_scale", "bias"]),
    "gemlite": (["bits", "group_size", "in_features", "out_features", "scale_mode"],
                ["qweight", "scales", "zeros", "bias"]),
    "pack-quantized": (["activations", "actorder", "group_size", "hadamard_size", "num_bits", "packing", "strategy", "symmetric"],
                       ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "bias",
                        "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point"]),
    "float-quantized": (["activations", "block_k", "block_n", "group_size", "hadamard_size", "strategy"],
                        ["weight", "weight_scale", "weight_zero_point", "bias", "input_scale", "input_zero_point",
                         "output_scale", "output_zero_point"]),
    "nvfp4-pack-quantized": (["group_size", "hadamard_size"],
                             ["weight_packed", "weight_scale", "weight_global_scale", "bias", "input_global_scale",
                              "input_scale", "output_scale", "output_zero_point"]),
    "mxfp4-pack-quantized": (["group_size", "hadamard_size"],
                             ["weight_packed", "weight_scale", "bias", "input_global_scale", "input_scale", "output_scale",
                              "output_zero_point"]),
    "qserve": (["bits", "group_size"], ["qweight", "s1_scales", "s1_szeros", "s2_scales", "s2_zeros", "bias"]),
    "awq-gemv": (AWQ, ["qweight", "qzeros", "scales", "bias"]),
    "awq-gemv-fast": (AWQ, ["qweight", "scales", "qzeros", "scaled_zeros", "bias"]),
    "awq-marlin": (AWQ, ["qweight", "scales", "qzeros", "bias"]),
    "gptq-marlin": (["bits", "desc_act", "group_size", "sym"], ["B", "s", "bias"]),
    "fp8": (["activations", "block_k", "block_n"],
            ["weight", "weight_scale_inv", "weight_scale", "scale", "input_scale", "activation_scale", "bias"]),
    "modelopt": (["quant_algo", "group_size"], ["weight", "weight_scale", "weight_scale_2", "pre_quant_scale", "input_scale",
                                                 "bias"]),
    "bitsandbytes-int8": ([], ["weight", "SCB", "weight_format", "bias"]),
    "hqq": (["nbits", "group_size", "axis"],
            ["W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "bias"]),
    "quark": (["dtype", "group_size", "input_prescale", "input_rotation", "pack_method", "qscheme", "scale_format",
               "symmetric"],
              ["weight", "weight_scale", "weight_zero_point", "bias", "input_rotation", "input_prescale"]),
    "fp-quant": (["forward_dtype"],
                 ["qweight", "scales", "weight_global_scale", "forward_hadamard_matrix", "bias", "act_global_scale",
                  "backward_hadamard_matrix"]),
    "exl3": ([], ["trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "bias"]),
    "mlx": (["mode", "bits", "group_size", "global_scale"], ["weight", "scales", "biases", "global_scale", "bias"]),
    "comfy": (["format", "scaled", "convrot", "convrot_groupsize", "group_size"],
              ["weight", "weight_scale", "weight_scale_2", "scale_weight", "weight_s_rel", "weight_s_channel",
               "weight_codebook", "weight_zeros", "pre_quant_scale", "comfy_quant", "bias"]),
    "gptq": (["bits", "checkpoint_format", "desc_act", "group_size", "sym"], GPTQ),
    "auto-round": (["bits", "group_size", "packing_format", "sym"], GPTQ),
    "blockwise-int8": (["block_k", "block_n"], ["weight", "weight_scale_inv", "bias"]),
    "torchao": (["activations", "elem_dtype", "is_swizzled_scales", "target_dtype", "tensor_type"],
                ["_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_per_tensor_scale", "_weight_act_pre_scale",
                 "bias", "_weight_scale_and_zero"]),
    "quanto": (["weights"], ["weight._data", "weight._scale", "bias"]),
    "quanto-packed": (["in_features", "weights"], ["weight._data._data", "weight._scale", "weight._shift", "bias"]),
}
# Words of settings under other names that mean the same, or nothing that a request has to say.
SAME = {"qint8": "int8", "qint4": "int4", "qint2": "int2", "qfloat8_e4m3fn": "float8", "float4_e2m1fn_x2": None}
# Types of requests, which inputs have, for those of files.
STANDS_FOR = {"F8_E4M3": "U8", "F8_E8M0": "U8", "I64": "I32", "U32": "I32"}
DTYPES = ["I32", "F16", "BF16", "F32", "U8", "I8", "F64", "I16"]
WORDS = ["true", "false", "channel", "group", "tensor", "gemm", "", "x", "multiply",
         "fp8", "fp8_pb_wo", "mxfp8", "nvfp4", "w4a16_awq", "block", "dense", "padded", "weight", "gemv", "gemv_fast",
         "marlin", "q4_1", "q5_k", "q6_k", "mxfp4", "gptq", "gptq_v2", "gptq_p", "auto_round", "auto_round:auto_gptq",
         "auto_round:auto_awq", "auto_round:gptqmodel", "fp8_per_channel_per_token", "nvfp4_awq", "fp4", "fp8_e4m3",
         "int8", "int4", "uint4", "q1_0", "q2_k", "q3_k", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0",
         "affine", "q2_0", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "float8_e4m3fn",
         "int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8", "awq_w4a16", "int8tensor",
         "intxunpackedtoint8tensor", "float8tensor", "int4tensor", "mxtensor", "nvfp4tensor", "float8", "int2",
         "dynamic", "static", "fp8_dynamic", "fp8_blocks", "fp8_static"]
DATA_BYTES = 64  # of each tensor that an input holds


def table():
    """Names of all formats in the order of AllFormats(): the first byte of an input is a place in it."""
    folder = pathlib.Path(__file__).resolve().parents[2] / "kernels" / "formats"
    names = {}
    for source in sorted(folder.rglob("*.cc")):
        names.update(re.findall(r'const Format (k\w+) = \{\s*\.name = "([^"]+)"', source.read_text()))
    return [names[constant] for constant in re.findall(r"&(k\w+Format)\b", (folder / "formats.cc").read_text())]


ORDER = table()


def setting(value):
    if value is None:
        return bytes([0])
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, str):
        return bytes([0xA0 + WORDS.index(value.lower())])
    return bytes([0x40, value & 0xFF])


def tensor(value):
    if value is None:
        return bytes([0x80])
    dtype, shape, data = value
    if dtype == "I64":
        data = b"".join(data[i:i + 4] for i in range(0, len(data), 8))
    dtype = STANDS_FOR.get(dtype, dtype)
    return bytes([DTYPES.index(dtype) | len(shape) << 4, *shape]) + data[:DATA_BYTES]


def write(name, kind, settings, tensors, metadata=None):
    names, suffixes = FORMATS[kind]
    settings = {key: SAME.get(value, value) if isinstance(value, str) else value for key, value in settings.items()}
    out = bytes([ORDER.index(kind)])
    out += b"".join(setting(settings.get(key)) for key in names)
    out += b"".join(tensor(tensors.get(suffix)) for suffix in suffixes)
    if metadata:
        out += bytes([2]) + metadata.encode()
    (OUT / name).write_bytes(out)


def says(settings):
    """Whether an input can say these settings: few widths are words."""
    return settings.get("target_dtype") in (None, "int2", "int4", "int8")


def linears(folder, suffixes):
    """(path, tensors by suffix) of a checkpoint."""
    blob = (folder if folder.is_file() else folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", blob)
    found = {}
    for name, info in json.loads(blob[8:8 + length]).items():
        if name == "__metadata__":
            continue
        path, _, suffix = name.rpartition(".")
        for longer in suffixes:
            if "." in longer and name.endswith("." + longer):
                path, suffix = name[:-len(longer) - 1], longer
        begin, end = info["data_offsets"]
        found.setdefault(path, {})[suffix] = (info["dtype"], info["shape"], blob[8 + length + begin:8 + length + end])
    return found


def fits(tensors):
    """Whether an input can say their dimensions, a byte each."""
    return all(max(shape, default=0) < 256 for _, shape, _ in tensors.values())


def settings_of(folder, weight_dtype):
    config = json.loads((folder / "config.json").read_text()).get("quantization_config")
    if config is None:
        config = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    if config.get("weight_block_size"):
        block_n, block_k = config["weight_block_size"]
        return {"block_n": block_n, "block_k": block_k}
    if "quant_algo" in config:
        return {"quant_algo": config["quant_algo"].lower(), "group_size": config.get("group_size")}
    groups = config.get("config_groups")
    return config if groups is None else groups["group_1" if weight_dtype == "w4" else "group_0"]["weights"]


def write_gguf_seeds():
    out = OUT.parent / "fuzz_gguf"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for path in sorted((DATA / "gguf").rglob("*.gguf")):
        shutil.copyfile(path, out / path.stem)
    (out / "cut").write_bytes((DATA / "gguf" / "super-blocks.gguf").read_bytes()[:-64])


def write_quant_config_seeds():
    """The quantisation settings of every golden checkpoint, from config.json or the side file; each text once."""
    out = OUT.parent / "fuzz_quant_config"
    for old in out.glob("golden-*"):
        old.unlink()
    written = set()
    for path in sorted([*DATA.rglob("config.json"), *DATA.rglob("quantize_config.json"), *DATA.rglob("hf_quant_config.json")]):
        config = json.loads(path.read_text())
        if path.name == "config.json":
            config = {key: value for key, value in config.items() if key in ("quantization", "quantization_config")}
        text = json.dumps(config, separators=(",", ":"))
        if not config or text in written:
            continue
        written.add(text)
        (out / "-".join(("golden", *path.parent.relative_to(DATA).parts))).write_text(text)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    for old in OUT.iterdir():
        old.unlink()
    for kind in list(FORMATS)[1:]:
        cases = json.loads((DATA / kind / "goldens" / "cases.json").read_text())["cases"]
        for case in cases:
            folder = DATA / kind / case["model"]
            found = linears(folder, FORMATS[kind][1])
            if case["weight"] not in found or case.get("format", kind) != kind:  # a slice, or of another format
                continue
            if not fits(found[case["weight"]]):
                continue
            settings = case.get("settings") or settings_of(folder, case["description"][:2])
            if settings.get("quant_algo") == "mixed_precision" or not says(settings):
                continue
            write(f"{kind}-{case['model']}-{case['weight']}", kind, settings, found[case["weight"]])
    awq = {"qweight": ("I32", [16, 2], bytes(range(64))), "qzeros": ("I32", [2, 2], bytes(range(16))),
           "scales": ("F16", [2, 16], b"\x00\x2c" * 32)}
    write("awq", "awq", {"bits": 4, "group_size": 8}, awq)
    write("awq-bias", "awq", {"version": "gemm"}, {**awq, "bias": ("F32", [16], bytes(64))})
    write("awq-bf16", "awq", {"group_size": 8}, {**awq, "scales": ("BF16", [2, 16], b"\x00\x3c" * 32)})
    four = [1, 1, 1, 1, 1, -1, 1, -1, 1, 1, -1, -1, 1, -1, -1, 1]
    write("quark-rotated", "quark", {"dtype": "int8"},
          {"weight": ("I8", [2, 4], bytes(range(8))), "weight_scale": ("BF16", [], b"\x80\x3f"),
           "input_rotation": ("I8", [4, 4], struct.pack("16b", *four)), "input_prescale": ("BF16", [4], b"\x80\x3f" * 4)})
    write("fp-quant", "fp-quant", {"forward_dtype": "mxfp4"},
          {"qweight": ("U8", [1, 32], bytes(range(32))), "scales": ("U8", [1, 2], b"\x7f\x80"),
           "weight_global_scale": ("BF16", [1], b"\x40\x40"),
           "forward_hadamard_matrix": ("F32", [4, 4], struct.pack("<16f", *(value / 2 for value in four)))})
    write("torchao-metadata", "torchao", {},
          {"_weight_qdata": ("I8", [2, 4], bytes(range(8))), "_weight_scale": ("F32", [2, 1], struct.pack("<2f", 1, 2))},
          '{"_type":"Int8Tensor","_data":{"block_size":[1,4],"act_quant_kwargs":{"_data":{"granularity":{"_type":"PerRow"}}}}}')
    write_gguf_seeds()
    write_quant_config_seeds()
    small_seeds.write_all(OUT.parent, DATA.parents[1])


if __name__ == "__main__":
    main()
