"""Shared by the scripts beside this file: writing a checkpoint's files and the goldens of its weights.

Independent of the C++ code. Needs numpy; output is the same bytes on every run, but for the last bits of the float64
products, which depend on the BLAS.
"""
import argparse
import json
import pathlib
import shutil
import struct

import numpy as np

TOKENS = 5  # rows of every golden product


class Bf16:
    """Numbers rounded to BF16, nearest even; numpy has no such type."""

    def __init__(self, values):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
        self.bits = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype("<u2")
        self.shape = self.bits.shape

    def wide(self):
        return (self.bits.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def tobytes(self):
        return self.bits.tobytes()


class Typed:
    """Elements of a type that numpy has not, as integers of its bits."""

    def __init__(self, bits, dtype):
        self.bits, self.dtype, self.shape = np.ascontiguousarray(bits), dtype, bits.shape

    def tobytes(self):
        return self.bits.tobytes()


def e4m3_values():
    """The values of the 256 codes of F8_E4M3, in FP32."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    magnitude[(bits & 127) == 127] = np.nan
    return np.copysign(magnitude, 0.5 - (bits >> 7)).astype(np.float32)


E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

DTYPES = {np.dtype("<f2"): "F16", np.dtype("<f4"): "F32", np.dtype("i1"): "I8", np.dtype("u1"): "U8",
          np.dtype("<i2"): "I16", np.dtype("<i4"): "I32", np.dtype("<i8"): "I64"}


def sylvester(size):
    """The Hadamard matrix of that size, 1 and -1."""
    out = np.ones((1, 1))
    while len(out) < size:
        out = np.block([[out, out], [out, -out]])
    return out


def wide(values):
    """FP32, exactly."""
    return values.wide() if isinstance(values, Bf16) else values.astype(np.float32)


def fnv1a64(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_safetensors(path, tensors, metadata=None):
    header, data = {"__metadata__": metadata} if metadata else {}, b""
    for name, array in sorted(tensors.items()):
        dtype = "BF16" if isinstance(array, Bf16) else array.dtype if isinstance(array, Typed) else DTYPES[array.dtype]
        raw = array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def dequantise(codes, zero, scales, group):
    """FP16 W[K, N]: (code - zero) * scale in FP32, then one more rounding. Codes and zeros are integers, `zero` one
    number or [groups, N]; scales [groups, N], row k using group k // group."""
    rows = np.arange(codes.shape[0]) // group
    zeros = zero[rows] if isinstance(zero, np.ndarray) else np.int64(zero)
    integers = (codes.astype(np.int64) - zeros).astype(np.float32)
    return (integers * wide(scales)[rows]).astype(np.float32).astype(np.float16)


class Goldens:
    """Collects checkpoints and cases; `finish` writes cases.json."""

    def __init__(self, about):
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--out", type=pathlib.Path, help="folder to write into (default: the script's)")
        self.args = parser.parse_args()
        self.folder = None
        self.cases = []
        self.format = None  # of the checkpoints, where it is not the folder's name

    def start(self, script):
        self.folder = self.args.out or pathlib.Path(script).resolve().parent
        shutil.rmtree(self.folder / "goldens", ignore_errors=True)
        (self.folder / "goldens").mkdir(parents=True)

    def checkpoint(self, model, quantization, tensors, metadata=None):
        folder = self.folder / model
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_json(folder / "config.json", {"model_type": "golden", "quantization_config": quantization})
        write_safetensors(folder / "model.safetensors", tensors, metadata)

    def case(self, model, path, description, weight, bias=None, integers=None, factor=None, settings=None,
             format=None, transform=None, values=None):
        """`weight`: FP16 [K, N], what must come out. `integers` [K, N]: the same, of a weight that INT8 activations
        multiply too. `factor` FP32 [K]: what activations are multiplied by first. `transform` [size, size]: what blocks of
        them are multiplied by after that, and `values` FP32 [K, N] the weight that its product is of, where that is not
        `weight`. `settings`: of the weight in a request, where those of its checkpoint do not say it. `format`: its own,
        where it is not that of the folder."""
        k, n = weight.shape
        random = np.random.default_rng(k * 10007 + n)
        x = random.standard_normal((TOKENS, k)).astype(np.float16)
        name = f"{model}.{path}"

        def transformed(rows):
            out = rows.astype(np.float64) * (1 if factor is None else factor.astype(np.float64))
            return out if transform is None else (out.reshape(len(rows), -1, len(transform)) @ transform).reshape(out.shape)

        exact = (weight if values is None else values).astype(np.float64)
        product = transformed(x) @ exact
        if bias is not None:
            product = product + wide(bias).astype(np.float64)
        case = {"model": model, "weight": path, "k": k, "n": n, "description": description,
                "dequantized_fnv1a64": fnv1a64(weight.tobytes()), "activations": f"{name}.activations.npy",
                "matmul": f"{name}.matmul.npy"}
        if settings is not None:
            case["settings"] = settings
        if format is not None:
            case["format"] = format
        if not self.cases:  # one in full, to look at and to compare element by element
            case["dequantized"] = f"{name}.dequantized.npy"
            self.npy(case["dequantized"], weight)
        if factor is not None:
            case["factor"] = f"{name}.factor.npy"
            self.npy(case["factor"], factor.astype("<f4"))
        if transform is not None:
            case["hadamard_size"], case["whole"] = len(transform), f"{name}.whole.npy"
            self.npy(case["whole"], (transformed(np.eye(k)) @ exact).astype("<f4"))
        if integers is not None:
            tokens = random.integers(-128, 128, (TOKENS, k)).astype("i1")
            case["int8_activations"] = f"{name}.int8_activations.npy"
            case["int8_matmul"] = f"{name}.int8_matmul.npy"
            self.npy(case["int8_activations"], tokens)
            self.npy(case["int8_matmul"], (tokens.astype(np.int64) @ integers.astype(np.int64)).astype("<i4"))
        self.npy(case["activations"], x)
        self.npy(case["matmul"], product.astype("<f8"))
        self.cases.append(case)

    def npy(self, name, array):
        with (self.folder / "goldens" / name).open("wb") as file:
            np.lib.format.write_array(file, np.ascontiguousarray(array), version=(1, 0))

    def finish(self, **source):
        write_json(self.folder / "goldens" / "cases.json", {
            **({"format": self.format} if self.format else {}),
            "about": "matmul = activations (FP16) @ dequantized (FP16 [K, N]) + the weight's bias, in float64; "
                     "dequantized_fnv1a64 is FNV-1a of the row-major FP16 bytes",
            "source": {"numpy": np.__version__, **source}, "cases": self.cases})
