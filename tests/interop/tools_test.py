"""Model folders that awqctl's quantize and convert write, read by the safetensors package and decoded here with numpy, or by
mlx; GGUF files are written and decoded by the package gguf, and those of awqctl read by it."""
import json
import pathlib
import struct
import tempfile
import unittest

import gguf
import mlx.core
import numpy
from safetensors.numpy import load_file, save_file

from server import awqctl

K, N, GROUP = 128, 48, 32
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column of each nibble of AutoAWQ's words


def nibbles(words):
    """[..., W] words -> [..., 8 W] codes, the low nibble first."""
    shifts = numpy.arange(0, 32, 4, dtype=numpy.uint32)
    return ((words.view(numpy.uint32)[..., None] >> shifts) & 15).reshape(*words.shape[:-1], -1)


def columns(words):
    """AutoAWQ's words -> codes in the order of columns."""
    codes = nibbles(words).reshape(*words.shape, 8)
    out = numpy.empty_like(codes)
    out[..., ORDER] = codes
    return out.reshape(*words.shape[:-1], -1)


def decoded(codes, zeros, scales):
    """Codes [K, N], zeros and scales [groups, N] -> FP32 [K, N]."""
    zeros, scales = (numpy.repeat(part.astype(numpy.float32), GROUP, axis=0) for part in (zeros, scales))
    return (codes.astype(numpy.float32) - zeros) * scales


def awq(t):
    return decoded(columns(t["qweight"]), columns(t["qzeros"]), t["scales"])


def gptq(t):
    ones = numpy.uint32(0x11111111)
    zeros = nibbles((t["qzeros"].view(numpy.uint32) + ones).view(numpy.int32))
    numpy.testing.assert_array_equal(t["g_idx"], numpy.arange(len(t["g_idx"])) // GROUP)
    return decoded(nibbles(t["qweight"].T.copy()).T, zeros, t["scales"])


def compressed_tensors(t):
    assert t["weight_shape"].tolist() == [N, K]
    zeros = nibbles(t["weight_zero_point"].T.copy())
    return decoded(nibbles(t["weight_packed"]).T, zeros, t["weight_scale"].T)


DECODE = {"awq": awq, "gptq": gptq, "compressed-tensors": compressed_tensors}


class Tools(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        dense = cls.folder / "dense"
        dense.mkdir()
        random = numpy.random.default_rng(1)
        cls.weight = random.normal(0, 0.02, (N, K)).astype(numpy.float16)
        cls.bias = random.normal(0, 1, N).astype(numpy.float16)
        save_file({"a.up.weight": cls.weight, "a.up.bias": cls.bias, "norm.weight": numpy.ones(3, numpy.float16)},
                  dense / "model.safetensors")
        (dense / "config.json").write_text('{"model_type": "test"}')
        cls.quantised = cls.folder / "quantised"
        awqctl("quantize", dense, "-o", cls.quantised, "--group_size", GROUP, "--to", "gptq")

    def linear(self, folder):
        tensors = load_file(folder / "model.safetensors")
        numpy.testing.assert_array_equal(tensors["norm.weight"], numpy.ones(3, numpy.float16))
        return {name.removeprefix("a.up."): tensor for name, tensor in tensors.items() if name.startswith("a.up.")}

    def test_every_format_has_the_same_weight(self):
        dense = self.folder / "fp32"
        awqctl("convert", self.quantised, "-o", dense, "--to", "dense", "--dtype", "fp32", "--verify")
        expected = self.linear(dense)["weight"]
        self.assertEqual((expected.dtype, expected.shape), (numpy.float32, (N, K)))
        error = numpy.linalg.norm(expected - self.weight) / numpy.linalg.norm(self.weight)
        self.assertLess(error, 0.12)
        for name, decode in DECODE.items():
            folder = self.folder / name
            awqctl("convert", self.quantised, "-o", folder, "--to", name, "--verify")
            tensors = self.linear(folder)
            numpy.testing.assert_array_equal(decode(tensors), expected.T, name)
            self.assertEqual(tensors["bias"].tobytes(), self.bias.tobytes())
            told = json.loads((folder / "verified.json").read_text())
            self.assertEqual((told["linears"], told["elements_bit_for_bit"]), (1, K * N))

    def test_tensors_are_aligned(self):
        with open(self.quantised / "model.safetensors", "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length))
        self.assertEqual(length % 8, 0)
        self.assertEqual(header.pop("__metadata__"), {"format": "pt"})
        sizes = {"I32": 4, "F16": 2}
        for name, tensor in header.items():
            self.assertEqual(tensor["data_offsets"][0] % sizes[tensor["dtype"]], 0, name)


class Gguf(unittest.TestCase):

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.file = self.folder / "model.gguf"
        self.random = numpy.random.default_rng(2)
        self.weight = self.random.normal(0, 0.02, (N, 2 * K)).astype(numpy.float32)
        self.norm = self.random.normal(1, 0.1, K).astype(numpy.float32)

    def write(self, *types):
        """A file with a linear of each type; FP32 [N, K] by path, as the package decodes them."""
        writer = gguf.GGUFWriter(self.file, "llama")
        writer.add_block_count(1)
        writer.add_token_list(["a", "b"])
        writer.add_tensor("blk.0.attn_norm.weight", self.norm)
        expected = {}
        for name in types:
            kind = gguf.GGMLQuantizationType[name]
            try:
                blocks = gguf.quants.quantize(self.weight, kind)
            except NotImplementedError:  # any with finite scales
                codes, size = gguf.GGML_QUANT_SIZES[kind]
                blocks = self.random.integers(0, 64, (N, 2 * K // codes * size), numpy.uint8)
            writer.add_tensor(f"blk.0.{name.lower()}.weight", blocks, raw_dtype=kind)
            expected[f"blk.0.{name.lower()}"] = gguf.quants.dequantize(blocks, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return expected

    def converted(self, *options):
        """The output of convert, and the tensors that it wrote."""
        out = self.folder / "out"
        told = json.loads(awqctl("--json", "convert", self.file, "-o", out, "--verify", *options))
        tensors = load_file(out / "model.safetensors")
        numpy.testing.assert_array_equal(tensors["blk.0.attn_norm.weight"], self.norm)
        config = json.loads((out / "config.json").read_text())
        self.assertEqual((config["model_type"], config["num_hidden_layers"]), ("llama", 1))
        return told, tensors

    def test_dense_has_the_elements_of_the_package(self):
        expected = self.write("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
                              "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S",
                              "IQ1_M")
        told, tensors = self.converted("--to", "dense", "--dtype", "fp32")
        self.assertTrue(any("tokenizer.ggml.tokens" in text for text in told["left_out"]), told["left_out"])
        for path, weight in expected.items():
            got = tensors[path + ".weight"]
            # Bits; a zero of the package may have either sign.
            numpy.testing.assert_array_equal((got + 0.0).view(numpy.uint32), (weight + 0.0).view(numpy.uint32), path)

    def test_gptq_of_four_bits(self):
        expected = self.write("Q4_0")["blk.0.q4_0"]
        _, tensors = self.converted("--to", "gptq")
        linear = {name.removeprefix("blk.0.q4_0."): tensor for name, tensor in tensors.items()}
        numpy.testing.assert_array_equal(gptq(linear), expected.T)


class Written(unittest.TestCase):
    """What awqctl writes for llama.cpp and MLX."""

    HEADS = {"q": 4, "k": 2}

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        random = numpy.random.default_rng(3)
        self.weights = {}
        for name, rows in (("q", 64), ("k", 32), ("v", 32)):
            weight = random.normal(0, 0.02, (rows, K)).astype(numpy.float32)
            self.weights[f"model.layers.0.self_attn.{name}_proj.weight"] = weight
        (self.folder / "dense").mkdir()
        norm = {"model.norm.weight": numpy.ones(K, numpy.float32)}
        save_file(self.weights | norm, self.folder / "dense/model.safetensors")
        config = {"model_type": "llama", "hidden_size": K, "num_hidden_layers": 1, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": K, "max_position_embeddings": 64,
                  "vocab_size": 10, "rms_norm_eps": 1e-5}
        (self.folder / "dense/config.json").write_text(json.dumps(config))

    def test_gguf_has_the_bits_of_the_package(self):
        for dtype in ("fp16", "bf16", "fp32", "q8_0", "q4_0"):
            out = self.folder / f"{dtype}.gguf"
            awqctl("convert", self.folder / "dense", "-o", out, "--to", "gguf", "--dtype", dtype, "--verify")
            reader = gguf.GGUFReader(out)
            self.assertEqual(reader.fields["general.architecture"].contents(), "llama")
            self.assertEqual(reader.fields["llama.attention.head_count_kv"].contents(), 2)
            tensors = {tensor.name: tensor for tensor in reader.tensors}
            self.assertEqual(tensors["output_norm.weight"].tensor_type, gguf.GGMLQuantizationType.F32)
            for name, weight in self.weights.items():
                letter = name[len("model.layers.0.self_attn.")]
                if letter in self.HEADS:  # as llama.cpp's conversion has them
                    halves = weight.reshape(self.HEADS[letter], 2, -1, K)
                    weight = halves.swapaxes(1, 2).reshape(weight.shape)
                tensor = tensors[f"blk.0.attn_{letter}.weight"]
                kind = {"fp16": "F16", "bf16": "BF16", "fp32": "F32"}.get(dtype, dtype.upper())
                self.assertEqual(tensor.tensor_type.name, kind)
                expected = gguf.quants.quantize(weight, tensor.tensor_type)
                self.assertEqual(tensor.data.tobytes(), expected.tobytes(), (dtype, name))

    def test_mlx_has_the_elements(self):
        for bits in (2, 3, 4, 5, 6, 8):
            out, dense = self.folder / f"mlx{bits}", self.folder / f"dense{bits}"
            awqctl("quantize", self.folder / "dense", "-o", out, "--to", "mlx", "--bits", bits)
            awqctl("convert", out, "-o", dense, "--to", "dense", "--dtype", "fp32")
            settings = json.loads((out / "config.json").read_text())["quantization"]
            tensors, expected = mlx.core.load(str(out / "model.safetensors")), load_file(dense / "model.safetensors")
            for name, weight in self.weights.items():
                path = name.removesuffix(".weight")
                scales, biases = (tensors[f"{path}.{part}"].astype(mlx.core.float32) for part in ("scales", "biases"))
                got = mlx.core.dequantize(tensors[name], scales, biases, settings["group_size"], settings["bits"])
                numpy.testing.assert_array_equal(numpy.array(got), expected[name], f"{bits} {name}")
                error = numpy.linalg.norm(expected[name] - weight) / numpy.linalg.norm(weight)
                self.assertLess(error, 2 * 2**-bits)


if __name__ == "__main__":
    unittest.main()
