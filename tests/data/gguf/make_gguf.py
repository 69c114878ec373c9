#!/usr/bin/env python3
"""Makes GGUF files and their goldens, from the definition of the container and of its blocks. Needs numpy (2.4.6 made what
is checked in). Where the package gguf can be imported, its reader must find the same tensors in the files, and its
dequantisation must give the same FP32 bits (0.19.0 does; it has none for Q1_0 and Q2_0). Its quantizer must write the same
blocks of TQ1_0 and TQ2_0 of their values; of the other types here it has none, or one that chooses among scales. The values
of vector codes (IQ1, IQ2, IQ3) are the package's own: without it they are not made.

Usage: make_gguf.py [--out DIR]
"""
import pathlib
import struct
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from golden import E2M1_VALUES, Goldens, e4m3_values, fnv1a64

try:
    import gguf
except ImportError:
    gguf = None

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
           "Q5_K": 13, "Q6_K": 14, "Q8_1": 9, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ3_XXS": 18, "IQ1_S": 19, "IQ4_NL": 20, "IQ3_S": 21,
           "IQ2_S": 22, "IQ4_XS": 23, "IQ1_M": 29, "BF16": 30, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40, "Q1_0": 41,
           "Q2_0": 42, "Q2_0_G128": 42}
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


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


def pairs(codes):
    """[rows, 2, 4, 32] codes of 2 bits: a byte has one of each of four runs."""
    return sum(codes[:, :, r] << 2 * r for r in range(4)).reshape(len(codes), 64).astype("u1")


def q2_k(random, rows):
    codes = random.integers(0, 4, (rows, 2, 4, 32))
    scales, minima = random.integers(0, 16, (2, rows, 16))
    d, dmin = halves(random, rows, 1e-4, 1e-2), halves(random, rows, 1e-4, 1e-2)
    stored = np.concatenate([(scales | minima << 4).astype("u1"), pairs(codes), raw(d), raw(dmin)], axis=1)
    scale = (d.astype(np.float32) * scales.astype(np.float32))[:, :, None]
    zero = (dmin.astype(np.float32) * minima.astype(np.float32))[:, :, None]
    return stored, (scale * codes.reshape(rows, 16, 16).astype(np.float32) - zero).reshape(rows, 256)


def q3_k(random, rows):
    codes = random.integers(0, 8, (rows, 2, 4, 32))
    scales, d = random.integers(-32, 32, (rows, 16)), halves(random, rows, 1e-5, 1e-3)
    upper = sum(codes.reshape(rows, 8, 32)[:, r] >> 2 << r for r in range(8))
    packed = np.concatenate([(scales[:, :8] & 15) | (scales[:, 8:] & 15) << 4,
                             sum((scales[:, 4 * j:4 * j + 4] + 32 >> 4) << 2 * j for j in range(4))], axis=1)
    stored = np.concatenate([upper.astype("u1"), pairs(codes & 3), packed.astype("u1"), raw(d)], axis=1)
    scale = (d.astype(np.float32) * scales.astype(np.float32))[:, :, None]
    return stored, (scale * (codes.reshape(rows, 16, 16) - 4).astype(np.float32)).reshape(rows, 256)


def iq4_nl(random, rows):
    codes, d = random.integers(0, 16, (rows, 32)), halves(random, rows, 1e-5, 1e-3)
    return np.concatenate([raw(d), nibbles(codes)], axis=1), d.astype(np.float32) * IQ4_VALUES[codes]


def iq4_xs(random, rows):
    codes = random.integers(0, 16, (rows, 8, 32))
    scales, d = random.integers(-32, 32, (rows, 8)), halves(random, rows, 1e-6, 1e-4)
    upper = sum((scales[:, g] + 32 >> 4) << 2 * g for g in range(8)).astype("<u2")[:, None]
    lower = ((scales[:, 0::2] & 15) | (scales[:, 1::2] & 15) << 4).astype("u1")
    stored = np.concatenate([raw(d), raw(upper), lower, nibbles(codes.reshape(-1, 32)).reshape(rows, 128)], axis=1)
    scale = (d.astype(np.float32) * scales.astype(np.float32))[:, :, None]
    return stored, (scale * IQ4_VALUES[codes]).reshape(rows, 256)


def tq1_0(random, rows):
    codes, d = random.integers(0, 3, (rows, 256)), halves(random, rows, sign=False)

    def digits(part, count):
        """Bytes with `count` codes each, the first of the highest value."""
        value = sum(code * 3**(4 - i) for i, code in enumerate(np.split(part, count, axis=1)))
        return ((value * 256 + 242) // 243).astype("u1")

    stored = [digits(codes[:, :160], 5), digits(codes[:, 160:240], 5), digits(codes[:, 240:], 4), raw(d)]
    return np.concatenate(stored, axis=1), d.astype(np.float32) * (codes - 1).astype(np.float32)


def tq2_0(random, rows):
    codes, d = random.integers(0, 3, (rows, 2, 4, 32)), halves(random, rows, sign=False)
    values = d.astype(np.float32) * (codes.reshape(rows, 256) - 1).astype(np.float32)
    return np.concatenate([pairs(codes), raw(d)], axis=1), values


def nvfp4(random, rows):
    codes, scales = random.integers(0, 16, (rows, 4, 16)), random.integers(0x10, 0x50, (rows, 4))
    scales[0, 1], scales[1, 2] = 0x7f, scales[1, 2] | 0x80  # the NaN is zero, the sign has no effect
    stored = (codes[:, :, :8] | codes[:, :, 8:] << 4).reshape(rows, 32)
    scale = np.where(scales == 0x7f, 0, e4m3_values()[scales & 0x7f]).astype(np.float32)[:, :, None]
    values = E2M1_VALUES[np.where(codes == 8, 0, codes)] * scale  # the zero of a code has no sign
    return np.concatenate([scales, stored], axis=1).astype("u1"), values.reshape(rows, 64)


def q1_0(random, rows):
    codes, d = random.integers(0, 2, (rows, 128)), halves(random, rows)
    stored = np.packbits(codes.astype("u1"), axis=1, bitorder="little")
    return np.concatenate([raw(d), stored], axis=1), d.astype(np.float32) * (2 * codes - 1).astype(np.float32)


def q2_0(block):
    def make(random, rows):
        codes, d = random.integers(0, 4, (rows, block // 4, 4)), halves(random, rows)
        stored = sum(codes[:, :, i] << 2 * i for i in range(4)).astype("u1")
        return np.concatenate([raw(d), stored], axis=1), d.astype(np.float32) * (codes.reshape(rows, block) - 1).astype(np.float32)
    return make


def vectors(kind, size):
    """Any bits are codes; only d must not be large."""
    def make(random, rows):
        blocks, d = random.integers(0, 256, (rows, size)).astype("u1"), halves(random, rows, 1e-5, 1e-3)
        if kind == "IQ1_M":
            bits = d.view("<u2").astype(int)[:, 0]
            for i in range(4):
                blocks[:, 49 + 2 * i] = blocks[:, 49 + 2 * i] & 15 | (bits >> 4 * i & 15) << 4
        else:
            blocks[:, :2] = raw(d)
        return blocks, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    return make


VECTORS = {"IQ2_XXS": 66, "IQ2_XS": 74, "IQ2_S": 82, "IQ3_XXS": 98, "IQ3_S": 110, "IQ1_S": 50, "IQ1_M": 56}
BLOCKS = {"Q4_0": (32, block32(4, False)), "Q4_1": (32, block32(4, True)), "Q5_0": (32, block32(5, False)),
          "Q5_1": (32, block32(5, True)), "Q8_0": (32, block32(8, False)), "Q2_K": (256, q2_k), "Q3_K": (256, q3_k),
          "Q4_K": (256, super_block(4)), "Q5_K": (256, super_block(5)), "Q6_K": (256, q6_k), "IQ4_NL": (32, iq4_nl),
          "IQ4_XS": (256, iq4_xs), "TQ1_0": (256, tq1_0), "TQ2_0": (256, tq2_0), "MXFP4": (32, mxfp4),
          "NVFP4": (64, nvfp4), "Q1_0": (128, q1_0), "Q2_0": (64, q2_0(64)), "Q2_0_G128": (128, q2_0(128)),
          **{kind: (256, vectors(kind, size)) for kind, size in VECTORS.items()}}


class Weight:
    """Blocks of random codes and scales, and their values FP32."""

    def __init__(self, random, kind, n, k, lead=()):
        self.kind, self.shape = kind, (*lead, n, k)
        codes, make = BLOCKS[kind]
        rows, values = make(random, int(np.prod(self.shape)) // codes)
        self.bytes, self.values = rows.reshape(*lead, n, -1), values.reshape(self.shape)
        if gguf is None or kind in ("Q1_0", "Q2_0", "Q2_0_G128", *VECTORS):
            return
        theirs = gguf.quants.dequantize(self.bytes, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(theirs.view(np.uint32), self.values.view(np.uint32)), kind
        if kind.startswith("TQ"):
            theirs = gguf.quants.quantize(self.values, gguf.GGMLQuantizationType[kind])
            assert np.array_equal(theirs, self.bytes), kind


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
    if gguf is not None and not any(tensor.kind.startswith("Q2_0") for tensor in tensors.values()):
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

    def case(model, path, weight, description, bias=None, expert=None, scale=None):
        values, rows = (weight.values, weight.bytes) if expert is None else (weight.values[expert], weight.bytes[expert])
        if scale is not None:
            values = values * scale
        goldens.case(model, path, description, np.ascontiguousarray(values.T.astype(np.float16)), bias,
                     settings={"type": weight.kind.lower()})
        goldens.cases[-1]["fp32_fnv1a64"] = fnv1a64(np.ascontiguousarray(values.T).tobytes())
        # The tensors of a request: U8 [N, bytes of a row].
        for suffix, tensor in (("weight", rows), ("scale", scale), ("bias", bias)):
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
    tensors |= {"blk.0.q4_1.bias": floats(bias), "blk.0.ffn_up.weight": Raw("Q8_1", (2, 256), bytes(640)),
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

    # A model in two parts. The types are those of its linears and stacks.
    random = np.random.default_rng(31)
    described = {"Q2_K": "w2g16o:fp32+fp32", "Q3_K": "w3g16s+fp32", "IQ4_NL": "t4g32", "IQ4_XS": "t4g32+fp32",
                 "TQ1_0": "w2g256m1", "TQ2_0": "w2g256m1", "NVFP4": "e2m1g16+e4m3", "Q1_0": "w1g128r+fp32"}
    shapes = {"Q2_K": (21, 512), "Q3_K": (13, 256), "IQ4_NL": (24, 96), "IQ4_XS": (16, 512), "TQ1_0": (21, 512),
              "TQ2_0": (13, 512), "NVFP4": (24, 192), "Q1_0": (21, 256)}
    weights = {f"blk.0.{kind.lower()}": Weight(random, kind, *shape) for kind, shape in shapes.items()}
    stacks = {f"blk.0.ffn_{part}_exps": Weight(random, kind, n, k, (2,))
              for part, kind, n, k in (("gate", "IQ4_NL", 16, 64), ("up", "Q3_K", 16, 256), ("down", "NVFP4", 13, 64))}
    named = [(f"{path}.weight", weight) for path, weight in [*weights.items(), *stacks.items()]]
    for part, tensors in enumerate((named[:5], named[5:])):
        split = {"split.no": (2, struct.pack("<H", part)), "split.count": (2, struct.pack("<H", 2)),
                 "split.tensors.count": (5, struct.pack("<i", len(named)))}
        write(folder / "parts" / f"tiny-{part + 1:05}-of-00002.gguf", {**(METADATA if part == 0 else {}), **split},
              dict(tensors))
    for path, weight in weights.items():
        case("parts", path, weight, described[weight.kind])
    for path, weight in stacks.items():
        case("parts", f"{path}.experts.1", weight, described[weight.kind], expert=1)

    # Vector codes: a type each, two of them with a scale of the whole weight, and stacks. Another file has Q2_0, whose number
    # two writers use for blocks of 64 and of 128: the places of tensors tell.
    random = np.random.default_rng(32)
    if gguf is None:
        raise SystemExit("the vector codes need the package gguf")
    shapes = {"IQ2_XXS": (8, 512), "IQ2_XS": (5, 256), "IQ2_S": (5, 512), "IQ3_XXS": (4, 768), "IQ3_S": (8, 512),
              "IQ1_S": (13, 512), "IQ1_M": (5, 1024)}
    weights = {f"blk.0.{kind.lower()}": Weight(random, kind, *shape) for kind, shape in shapes.items()}
    scales = {"blk.0.iq3_s": np.array([0.75], np.float32), "blk.0.iq1_m": np.array([-1.7], np.float32)}
    stacks = {f"blk.0.ffn_{part}_exps": Weight(random, kind, n, k, (3,))
              for part, kind, n, k in (("gate", "IQ2_XXS", 8, 256), ("up", "IQ1_S", 8, 256), ("down", "IQ3_XXS", 5, 512))}
    write(folder / "vectors" / "vectors.gguf", METADATA,
          {f"{path}.weight": weight for path, weight in [*weights.items(), *stacks.items()]}
          | {f"{path}.scale": floats(scale) for path, scale in scales.items()})
    for path, weight in weights.items():
        case("vectors", path, weight, weight.kind.lower() + ("*t" if path in scales else ""), scale=scales.get(path))
    for path, weight in stacks.items():
        case("vectors", f"{path}.experts.2", weight, weight.kind.lower(), expert=2)
    for kind, name, described in (("Q2_0", "narrow", "w2g64m1"), ("Q2_0_G128", "wide", "w2g128m1")):
        weights = {path: Weight(random, kind, *shape) for path, shape in (("a", (21, 256)), ("b", (40, 512)))}
        write(folder / f"{name}.gguf", METADATA, {f"{path}.weight": weight for path, weight in weights.items()})
        for path, weight in weights.items():
            case(f"{name}.gguf", path, weight, described)
    goldens.finish()


if __name__ == "__main__":
    main()
