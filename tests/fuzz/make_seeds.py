#!/usr/bin/env python3
"""Writes the seeds of fuzz_formats, in the spelling that its comments describe: the golden linears under tests/data, and
small AutoAWQ ones, whose goldens are too large for it.

Usage: make_seeds.py
"""
import json
import pathlib
import struct

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
OUT = pathlib.Path(__file__).resolve().parent / "corpus" / "fuzz_formats"

# As the table has them: AllFormats(), Format::settings, Format::suffixes.
FORMATS = {
    "awq": (["bits", "group_size", "version", "zero_point"], ["qweight", "qzeros", "scales", "bias"]),
    "int-quantized": (["group_size", "num_bits", "strategy", "symmetric"],
                      ["weight", "weight_scale", "weight_zero_point", "bias"]),
    "plain": (["bits", "group_size", "symmetric", "zero"], ["codes", "zeros", "scales", "bias"]),
    "fastertransformer": (["bits", "group_size"], ["weight", "weight_scale", "bias"]),
    "gemlite": (["bits", "group_size", "in_features", "out_features", "scale_mode"],
                ["qweight", "scales", "zeros", "bias"]),
}
DTYPES = ["I32", "F16", "BF16", "F32", "U8", "I8"]
WORDS = ["true", "false", "channel", "group", "tensor", "gemm", "", "x", "multiply",
         "fp8", "fp8_pb_wo", "mxfp8", "nvfp4", "w4a16_awq"]
DATA_BYTES = 64  # of each tensor that an input holds


def setting(value):
    if value is None:
        return bytes([0])
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, str):
        return bytes([0xC0 + WORDS.index(value)])
    return bytes([0x40, value & 0xFF])


def tensor(value):
    if value is None:
        return bytes([0x80])
    dtype, shape, data = value
    return bytes([DTYPES.index(dtype) | len(shape) << 4, *shape]) + data[:DATA_BYTES]


def write(name, kind, settings, tensors):
    names, suffixes = FORMATS[kind]
    out = bytes([list(FORMATS).index(kind)])
    out += b"".join(setting(settings.get(key)) for key in names)
    out += b"".join(tensor(tensors.get(suffix)) for suffix in suffixes)
    (OUT / name).write_bytes(out)


def linears(folder):
    """(path, tensors by suffix) of a checkpoint."""
    blob = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", blob)
    found = {}
    for name, info in json.loads(blob[8:8 + length]).items():
        path, _, suffix = name.rpartition(".")
        begin, end = info["data_offsets"]
        found.setdefault(path, {})[suffix] = (info["dtype"], info["shape"], blob[8 + length + begin:8 + length + end])
    return found


def settings_of(folder, weight_dtype):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = config.get("config_groups")
    return config if groups is None else groups["group_1" if weight_dtype == "w4" else "group_0"]["weights"]


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    for old in OUT.iterdir():
        old.unlink()
    for kind in list(FORMATS)[1:]:
        cases = json.loads((DATA / kind / "goldens" / "cases.json").read_text())["cases"]
        for case in cases:
            folder = DATA / kind / case["model"]
            write(f"{kind}-{case['model']}-{case['weight']}", kind, settings_of(folder, case["description"][:2]),
                  linears(folder)[case["weight"]])
    awq = {"qweight": ("I32", [16, 2], bytes(range(64))), "qzeros": ("I32", [2, 2], bytes(range(16))),
           "scales": ("F16", [2, 16], b"\x00\x2c" * 32)}
    write("awq", "awq", {"bits": 4, "group_size": 8}, awq)
    write("awq-bias", "awq", {"version": "gemm"}, {**awq, "bias": ("F32", [16], bytes(64))})
    write("awq-bf16", "awq", {"group_size": 8}, {**awq, "scales": ("BF16", [2, 16], b"\x00\x3c" * 32)})


if __name__ == "__main__":
    main()
