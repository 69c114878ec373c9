"""The output of `awqctl convert`, read by the package compressed-tensors, which defines the format.

Not part of the suite, as it needs PyTorch. Run it by hand where the package is installed:

    AWQD_BUILD=build/cpu python tests/interop/packages.py

Every linear is compared with what `convert --to dense --dtype fp32` writes.
"""
import json
import pathlib
import sys
import tempfile
import unittest

import numpy

from server import ROOT, awqctl

try:
    import compressed_tensors
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

DATA = ROOT / "tests" / "data"
# Goldens of formats that hold the contents of each target.
GOLDENS = ["awq/all-MiniLM-L6-v2-awq", "gptq/v1", "gptq/v1-w8-columns", "fastertransformer/int8-groups", "int-quantized/w8-channel",
           "plain/w4-columns", "auto-round/awq", "experts/moe"]


class Packages(unittest.TestCase):

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def tensors(self, folder):
        files = sorted(folder.glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def converted(self):
        """(settings, path, tensors by suffix, FP32 [N, K]) of every linear of every golden."""
        for golden in GOLDENS:
            dense, out = self.folder / "dense" / golden, self.folder / "packed" / golden
            for folder in (dense, out):
                folder.parent.mkdir(parents=True, exist_ok=True)
            awqctl("convert", DATA / golden, "-o", dense, "--to", "dense", "--dtype", "fp32")
            awqctl("convert", DATA / golden, "-o", out, "--to", "compressed-tensors", "--verify")
            settings = json.loads((out / "config.json").read_text())["quantization_config"]
            tensors, expected = self.tensors(out), self.tensors(dense)
            for name in tensors:
                path = name.removesuffix(".weight_packed")
                if path == name:
                    continue
                linear = {key.removeprefix(path + "."): tensor for key, tensor in tensors.items()
                          if key.startswith(path + ".weight_")}
                yield settings, path, linear, expected[path + ".weight"].numpy()

    def test_compressed_tensors(self):
        checked = 0
        for settings, path, linear, expected in self.converted():
            scheme, = QuantizationConfig.model_validate(settings).config_groups.values()
            linear["weight_scale"] = linear["weight_scale"].to(torch.float32)  # it computes in their type
            got = BaseCompressor.get_value_from_registry("pack-quantized").decompress(linear, scheme)["weight"]
            self.assertEqual(got.dtype, torch.float32)
            numpy.testing.assert_array_equal(got.numpy().view("<u4"), expected.view("<u4"), path)
            checked += 1
        self.assertGreater(checked, 30)
        print(f"compressed-tensors {compressed_tensors.__version__}: {checked} linears")


if __name__ == "__main__":
    unittest.main()
