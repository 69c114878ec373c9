"""awqctl's .safetensors and .npy files, read by the safetensors and numpy packages, equal the goldens."""
import json
import pathlib
import tempfile
import unittest

import numpy
from safetensors.numpy import load_file

from server import DATA, Server, awqctl

GOLDENS = DATA / "goldens"


class Files(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.address = cls.enterClassContext(Server()).address
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.cases = json.loads((GOLDENS / "cases.json").read_text())["cases"]

    def dequantize(self, case, suffix, *options):
        path = self.folder / f"{case['weight']}{suffix}"
        awqctl("--address", self.address, "dequantize", case["model"], case["weight"], "-o", path, *options)
        return path

    def test_dequantized_weight_is_bit_exact_in_both_formats(self):
        stored = [case for case in self.cases if "dequantized" in case]
        self.assertTrue(stored)
        for case in stored:
            expected = numpy.load(GOLDENS / case["dequantized"])
            from_npy = numpy.load(self.dequantize(case, ".npy"))
            tensors = load_file(self.dequantize(case, ".safetensors"))
            self.assertEqual(list(tensors), [case["weight"]])
            for actual in (from_npy, tensors[case["weight"]]):
                self.assertEqual((actual.dtype, actual.shape), (numpy.float16, expected.shape))
                self.assertEqual(actual.tobytes(), expected.tobytes())

    def test_blocks_and_fp32(self):
        case = next(case for case in self.cases if "dequantized" in case)
        expected = numpy.load(GOLDENS / case["dequantized"])
        block = numpy.load(self.dequantize(case, ".block.npy", "--rows", "3:131", "--columns", "5:77"))
        numpy.testing.assert_array_equal(block, expected[3:131, 5:77])
        wide = load_file(self.dequantize(case, ".wide.safetensors", "--dtype", "fp32"))[case["weight"]]
        self.assertEqual(wide.dtype, numpy.float32)
        numpy.testing.assert_array_equal(wide.astype(numpy.float16), expected)

    def test_products(self):
        for case in self.cases:
            output = self.folder / "y.npy"
            awqctl("--address", self.address, "matmul", case["model"], case["weight"], GOLDENS / case["activations"], "-o", output)
            actual, expected = numpy.load(output).astype(numpy.float64), numpy.load(GOLDENS / case["matmul"])
            self.assertEqual(actual.shape, expected.shape)
            error = numpy.linalg.norm(actual - expected) / numpy.linalg.norm(expected)
            self.assertLess(error, 1e-3, case["weight"])


if __name__ == "__main__":
    unittest.main()
