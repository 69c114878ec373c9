#!/usr/bin/env python3
"""Makes GGUF files and their goldens, from the definition of the container and of its blocks. Needs numpy (2.4.6 made what
is checked in). Where the package gguf can be imported, its reader must find the same tensors in the files, and its
dequantisation must give the same FP32 bits (0.19.0 does).

Usage: make_gguf.py [--out DIR]
"""
import pathlib
import struct
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import E2M1_VALUES, Goldens, fnv1a64

try:
    import gguf
except ImportError:
    gguf = None

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q4_K": 12, "Q5_K": 13,
           "Q6_K": 14, "IQ4_NL": 20, "BF16": 30, "MXFP4": 39}


def halves(random, rows, low=0.001, high=0.03, sign=True):
    """[rows, 1] FP16, of both signs."""
    values = random.uniform(low, high, (rows, 1))
    return (values * np.where(random.integers(0, 2, values.shape) & sign, -1, 1)).astype("<f2")


def raw(array):
    return np.ascontiguousarray(array).view("u1").reshape(len(array), -1)


def nibbles(codes):
    """32 codes of 4 bits a row: the first 16 low, the others high."""
    return (codes[:, :16] | codes[:, 16:] << 4).astype("u1")


def fifth_bits(codes):
    return np.packbits((codes >> 4 & 1).astype("u1"), axis=1, bitorder="little")


def block32(bits, minimum):
    def make(random, rows):
        codes = random.integers(0, 1 << bits, (rows, 32))
        d, m = halves(random, rows), halves(random, rows, 0.01, 0.5)
        parts = [raw(d)] + [raw(m)] * minimum + [fifth_bits(codes)] * (bits == 5)
        stored = nibbles(codes & 15) if bits < 8 else (codes - 128).astype("i1").view("u1")
        scale, integers = d.astype(np.float32), codes.astype(np.float32)
        values = scale * integers + m.astype(np.float32) if minimum else scale * (integers - np.float32(1 << bits - 1))
        return np.concatenate([*parts, stored], axis=1), values
    return make


def six_bits(scales, minima):
    """12 bytes of eight integers of 6 bits and eight more."""
    low = np.concatenate([scales[:, :4] | (scales[:, 4:] >> 4) << 6, minima[:, :4] | (minima[:, 4:] >> 4) << 6], axis=1)
    return np.concatenate([low, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4], axis=1).astype("u1")


def super_block(bits):
    def make(random, rows):
        codes = random.integers(0, 1 << bits, (rows, 8, 32))
        scales, minima = random.integers(0, 64, (2, rows, 8))
        d, dmin = halves(random, rows, 1e-5, 1e-3), halves(random, rows, 1e-4, 1e-2)
        low = codes & 15
        stored = (low[:, 0::2] | low[:, 1::2] << 4).reshape(rows, 128).astype("u1")
        fifth = sum((codes[:, r] >> 4 & 1) << r for r in range(8)).astype("u1")
        parts = [raw(d), raw(dmin), six_bits(scales, minima)] + [fifth] * (bits == 5) + [stored]
        scale = (d.astype(np.float32) * scales.astype(np.float32))[:, :, None]
        zero = (dmin.astype(np.float32) * minima.astype(np.float32))[:, :, None]
        return np.concatenate(parts, axis=1), (scale * codes.astype(np.float32) - zero).reshape(rows, 256)
    return make


def q6_k(random, rows):
    codes = random.integers(0, 64, (rows, 2, 4, 32))  # half, run, code
    scales, d = random.integers(-128, 128, (rows, 16)), halves(random, rows, 1e-6, 1e-4)
    low, high = codes & 15, codes >> 4
    lows = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    highs = sum(high[:, :, r] << 2 * r for r in range(4))
    stored = np.concatenate([lows.reshape(rows, 128), highs.reshape(rows, 64), scales.astype("i1").view("u1")],
                            axis=1).astype("u1")
    scale = (d.astype(np.float32) * scales.astype(np.float32))[:, :, None]
    values = scale * (codes.reshape(rows, 16, 16) - 32).astype(np.float32)
    return np.concatenate([stored, raw(d)], axis=1), values.reshape(rows, 256)


def mxfp4(random, rows):
    codes = random.integers(0, 16, (rows, 32))
    exponents = random.integers(117, 125, (rows, 1)).astype("u1")
    values = E2M1_VALUES[codes] * np.ldexp(np.float32(1), exponents.astype(np.int64) - 127).astype(np.float32)
    return np.concatenate([exponents, nibbles(codes)], axis=1), values + np.float32(0)  # no zero has a sign


BLOCKS = {"Q4_0": (32, block32(4, False)), "Q4_1": (32, block32(4, True)), "Q5_0": (32, block32(5, False)),
          "Q5_1": (32, block32(5, True)), "Q8_0": (32, block32(8, False)), "Q4_K": (256, super_block(4)),
          "Q5_K": (256, super_block(5)), "Q6_K": (256, q6_k), "MXFP4": (32, mxfp4)}


class Weight:
    """Blocks of random codes and scales, and their values FP32."""

    def __init__(self, random, kind, n, k, lead=()):
        self.kind, self.shape = kind, (*lead, n, k)
        codes, make = BLOCKS[kind]
        rows, values = make(random, int(np.prod(self.shape)) // codes)
        self.bytes, self.values = rows.reshape(*lead, n, -1), values.reshape(self.shape)
        if gguf is not None:
            theirs = gguf.quants.dequantize(self.bytes, gguf.GGMLQuantizationType[kind])
            assert np.array_equal(theirs.view(np.uint32), self.values.view(np.uint32)), kind


class Raw:
    def __init__(self, kind, shape, data):
        self.kind, self.shape, self.bytes = kind, shape, np.frombuffer(data, "u1")


def floats(array):
    return Raw("F32", array.shape, array.astype("<f4").tobytes())


def text(value):
    raw_text = value.encode()
    return struct.pack("<Q", len(raw_text)) + raw_text


def write(path, metadata, tensors, version=3, alignment=32):
    """metadata: key -> (type, bytes of the value). Tensors in the order of the dictionary."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, (kind, value) in metadata.items():
        out += text(key) + struct.pack("<I", kind) + value
    data = b""
    for name, tensor in tensors.items():
        out += text(name) + struct.pack(f"<I{len(tensor.shape)}QIQ", len(tensor.shape), *tensor.shape[::-1],
                                        NUMBERS[tensor.kind], len(data))
        data += tensor.bytes.tobytes()
        data += bytes(-len(data) % alignment)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(out + bytes(-len(out) % alignment) + data)
    if gguf is not None:
        found = gguf.GGUFReader(path).tensors
        assert [tensor.name for tensor in found] == list(tensors)
        for mine, theirs in zip(tensors.values(), found):
            assert theirs.tensor_type.name == mine.kind and tuple(theirs.shape) == mine.shape[::-1]
            assert theirs.data.tobytes() == mine.bytes.tobytes()


def strings(values):
    return 9, struct.pack("<IQ", 8, len(values)) + b"".join(text(value) for value in values)


METADATA = {"general.architecture": (8, text("llama")), "general.name": (8, text("golden")),
            "llama.block_count": (4, struct.pack("<I", 1)), "llama.rope.freq_base": (6, struct.pack("<f", 1e4)),
            "tokenizer.ggml.tokens": strings(["a", "", "\u00e9"]),
            "tokenizer.ggml.scores": (9, struct.pack("<IQ3f", 6, 3, 0, 1, 2)), "general.flag": (7, b"\x01")}


def main():
    goldens = Goldens(__doc__)
    goldens.start(__file__)
    folder = goldens.folder
    random = np.random.default_rng(30)

    def case(model, path, weight, description, bias=None, expert=None):
        values, rows = (weight.values, weight.bytes) if expert is None else (weight.values[expert], weight.bytes[expert])
        goldens.case(model, path, description, np.ascontiguousarray(values.T.astype(np.float16)), bias,
                     settings={"type": weight.kind.lower()})
        goldens.cases[-1]["fp32_fnv1a64"] = fnv1a64(np.ascontiguousarray(values.T).tobytes())
        # The tensors of a request: U8 [N, bytes of a row].
        for suffix, tensor in (("weight", rows), ("bias", bias)):
            if tensor is not None:
                goldens.npy(f"{model}.{path}.{suffix}.npy", tensor)

    # A folder with one file: blocks of 32, beside dense tensors and an unsupported type. N fills no byte.
    shapes = {"Q4_0": (24, 64), "Q4_1": (21, 96), "Q5_0": (16, 64), "Q5_1": (13, 160), "Q8_0": (24, 32), "MXFP4": (21, 96)}
    described = {"Q4_0": "w4g32s", "Q4_1": "w4g32o", "Q5_0": "w5g32s", "Q5_1": "w5g32o", "Q8_0": "w8cs",
                 "MXFP4": "e2m1g32+e8m0"}
    weights = {kind: Weight(random, kind, *shape) for kind, shape in shapes.items()}
    bias = random.standard_normal(21).astype(np.float32)
    tensors = {"token_embd.weight": Raw("F16", (4, 64), bytes(512)), "blk.0.attn_norm.weight": floats(np.ones(64))}
    tensors |= {f"blk.0.{kind.lower()}.weight": weight for kind, weight in weights.items()}
    tensors |= {"blk.0.q4_1.bias": floats(bias), "blk.0.ffn_up.weight": Raw("IQ4_NL", (2, 32), bytes(36)),
                "rope_freqs.weight": Raw("BF16", (3,), bytes(6))}
    write(folder / "blocks" / "model.gguf", METADATA, tensors)
    for kind, weight in weights.items():
        case("blocks", f"blk.0.{kind.lower()}", weight, described[kind], bias if kind == "Q4_1" else None)

    # A single file, version 2, with another alignment: super-blocks of 256.
    described = {"Q4_K": "w4g32o:fp32+fp32", "Q5_K": "w5g32o:fp32+fp32", "Q6_K": "w6g16s+fp32"}
    weights = {kind: Weight(random, kind, n, k) for kind, n, k in (("Q4_K", 21, 512), ("Q5_K", 16, 256), ("Q6_K", 13, 256))}
    write(folder / "super-blocks.gguf", {"general.alignment": (4, struct.pack("<I", 64)), **METADATA},
          {f"{kind.lower()}.weight": weight for kind, weight in weights.items()}, version=2, alignment=64)
    for kind, weight in weights.items():
        case("super-blocks.gguf", kind.lower(), weight, described[kind])

    # All experts of a projection in one tensor of three dimensions.
    experts = Weight(random, "MXFP4", 40, 64, (3,))
    biases = random.standard_normal((3, 40)).astype(np.float32)
    write(folder / "experts" / "experts.gguf", METADATA,
          {"blk.0.ffn_up_exps.weight": experts, "blk.0.ffn_up_exps.bias": floats(biases)})
    for expert in (0, 2):
        case("experts", f"blk.0.ffn_up_exps.experts.{expert}", experts, "e2m1g32+e8m0", biases[expert], expert)
    goldens.finish()


if __name__ == "__main__":
    main()
