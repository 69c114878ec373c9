"""Drives the server over reflection with grpcurl and buf curl: no .proto file at hand, JSON as a person types it."""
import json
import re
import secrets
import shutil
import subprocess
import unittest
from multiprocessing import shared_memory

import numpy

from server import DATA, ROOT, Server, awqctl

# Two rows of eight codes each, 0 to 7 once AutoAWQ's nibble order is undone; zero points 0, scales 1.
PACKED = """{
  "qweight": {"dtype": "INT32", "shape": [2, 1], "ints": {"values": [1966171168, 1966171168]}},
  "qzeros": {"dtype": "INT32", "shape": [1, 1], "ints": {"values": [0]}},
  "scales": {"dtype": "FP16", "shape": [1, 8], "floats": {"values": [1, 1, 1, 1, 1, 1, 1, 1]}}
}"""


class Reflection(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Server())
        cls.address = cls.server.address
        models = json.loads(awqctl("--address", cls.address, "--json", "models"))["models"]
        cls.model = next(model["name"] for model in models if model["state"] == "READY")
        weights = json.loads(awqctl("--address", cls.address, "--json", "models", cls.model))["weights"]
        cls.weight = weights[0]["path"]
        cls.k, cls.n = int(weights[0]["k"]), int(weights[0]["n"])

    def grpcurl(self, *arguments, ok=True):
        done = subprocess.run(["grpcurl", "-plaintext", *arguments], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode == 0, ok, done.stdout + done.stderr)
        return done.stdout if ok else done.stderr

    def call(self, method, request):
        return json.loads(self.grpcurl("-d", request, self.address, method))

    def test_lists_every_service(self):
        services = self.grpcurl(self.address, "list").split()
        for service in ("awqd.v1.QuantizedInference", "awqd.v1.ModelRepository", "awqd.v1.ServerInfo",
                        "grpc.health.v1.Health", "inference.GRPCInferenceService"):
            self.assertIn(service, services)

    def test_describes_services_and_messages(self):
        inference = self.grpcurl(self.address, "describe", "awqd.v1.QuantizedInference")
        for method in ("QuantizedMatmul", "QuantizedMatmulStream", "Dequantize", "DequantizeStream"):
            self.assertRegex(inference, rf"rpc {method} ")
        self.assertIn("Check", self.grpcurl(self.address, "describe", "grpc.health.v1.Health"))
        self.assertIn("qweight", self.grpcurl(self.address, "describe", "awqd.v1.PackedWeight"))

    def test_health(self):
        self.assertEqual(self.call("grpc.health.v1.Health/Check", "{}"), {"status": "SERVING"})

    def test_unix_socket(self):
        answer = self.grpcurl("-unix", self.server.socket, "grpc.health.v1.Health/Check")
        self.assertEqual(json.loads(answer), {"status": "SERVING"})

    def test_matmul_typed_by_hand(self):
        answer = self.call("awqd.v1.QuantizedInference/QuantizedMatmul", """{
            "packed": %s,
            "activations": {"dtype": "FP32", "shape": [1, 2], "floats": {"values": [1, 2]}}
        }""" % PACKED)
        self.assertEqual(answer["output"]["shape"], ["1", "8"])
        self.assertEqual(answer["output"]["floats"]["values"], [0, 3, 6, 9, 12, 15, 18, 21])

    def test_dequantize_typed_by_hand(self):
        answer = self.call("awqd.v1.QuantizedInference/Dequantize",
                           '{"packed": %s, "rows": {"begin": 1, "end": 2}, "output_encoding": "VALUES"}' % PACKED)
        self.assertEqual(answer["output"]["shape"], ["1", "8"])
        self.assertEqual(answer["output"]["floats"]["values"], list(range(8)))

    def test_plain_weight_with_an_activation_function(self):
        answer = self.call("awqd.v1.QuantizedInference/QuantizedMatmul", """{
            "packed": {"format": "plain", "settings": {"bits": "8", "symmetric": "true"}, "tensors": {
                "codes": {"dtype": "UINT8", "shape": [2, 3], "ints": {"values": [129, 130, 131, 127, 126, 125]}},
                "scales": {"dtype": "FP32", "shape": [1, 3], "floats": {"values": [0.5, 0.25, 2]}},
                "bias": {"dtype": "FP32", "shape": [3], "floats": {"values": [0, 0, -1]}}}},
            "activations": {"dtype": "FP32", "shape": [2, 2], "floats": {"values": [3, 1, 1, 3]}},
            "activation_function": "RELU"
        }""")
        # (code - 128) * scale is [[0.5, 0.5, 6], [-0.5, -0.5, -6]].
        self.assertEqual(answer["output"]["floats"]["values"], [1, 1, 11, 0, 0, 0])

    def test_model_weight(self):
        name = {"model": self.model, "weight": self.weight}
        block = self.call("awqd.v1.QuantizedInference/Dequantize", json.dumps(
            {"weight": name, "columns": {"begin": 0, "end": 8}, "output_dtype": "FP32", "output_encoding": "VALUES"}))
        weight = numpy.array(block["output"]["floats"]["values"], dtype=numpy.float64).reshape(self.k, 8)
        x = numpy.linspace(-1, 1, self.k)
        answer = self.call("awqd.v1.QuantizedInference/QuantizedMatmul", json.dumps(
            {"weight": name, "request_id": "by-hand", "bias": {"dtype": "FP32", "shape": [self.n], "floats": {"values": [0] * self.n}},
             "activations": {"dtype": "FP32", "shape": [1, self.k], "floats": {"values": x.tolist()}}}))
        self.assertEqual(answer["request_id"], "by-hand")
        self.assertRegex(answer["execution"]["kernel"], r"^cpu/")
        y = numpy.array(answer["output"]["floats"]["values"])[:8]
        expected = x @ weight
        self.assertLess(numpy.linalg.norm(y - expected), 1e-3 * numpy.linalg.norm(expected))

    def test_shared_memory_of_python(self):
        memory = shared_memory.SharedMemory("awqd-interop-" + secrets.token_hex(16), create=True, size=8 + 32)
        try:
            numpy.ndarray(2, numpy.float32, memory.buf)[:] = [1, 2]
            answer = self.call("awqd.v1.QuantizedInference/QuantizedMatmul", json.dumps(
                {"packed": json.loads(PACKED), "activations": {
                    "dtype": "FP32", "shape": [1, 2], "shared_memory": {"name": memory.name, "offset": 0, "size": 8}},
                 "output_shared_memory": {"name": memory.name, "offset": 8, "size": 32}}))
            self.assertEqual(answer["output"], {"dtype": "FP32", "shape": ["1", "8"], "shared_memory": {
                "name": memory.name, "offset": "8", "size": "32"}})
            self.assertEqual(bytes(memory.buf[8:]), numpy.arange(0, 24, 3, numpy.float32).tobytes())
        finally:
            memory.close()
            memory.unlink()

    def test_errors_are_readable(self):
        error = self.grpcurl("-d", '{"weight": {"model": "absent", "weight": "x"}}', self.address,
                             "awqd.v1.QuantizedInference/Dequantize", ok=False)
        self.assertIn("NotFound", error)
        self.assertIn("absent", error)

    def test_buf_curl(self):
        done = subprocess.run(
            ["buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data",
             '{"packed": %s, "activations": {"dtype": "FP16", "shape": [2], "floats": {"values": [1, 2]}}}' % PACKED,
             f"http://{self.address}/awqd.v1.QuantizedInference/QuantizedMatmul"],
            capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        output = json.loads(done.stdout)["output"]
        self.assertEqual((output["shape"], output["floats"]["values"]), (["8"], [0, 3, 6, 9, 12, 15, 18, 21]))

    def test_readme_calls_work(self):
        """Every grpcurl line of the READMEs, as it stands there but for the port."""
        documents = "\n".join((ROOT / name).read_text() for name in ("README.md", "client/README.md"))
        blocks = re.findall(r"^    (grpcurl .*?)(?=^\S|^$)", documents, re.MULTILINE | re.DOTALL)
        calls = [block for block in blocks if "127.0.0.1:8001" in block]
        self.assertGreaterEqual(len(calls), 3)
        for text in calls:
            script = text.replace("127.0.0.1:8001", self.address)
            done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual(done.returncode, 0, script + done.stderr)


class Protos(unittest.TestCase):

    def test_buf_lint(self):
        done = subprocess.run(["buf", "lint"], cwd=ROOT / "proto", capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))

    def test_tools_are_the_pinned_ones(self):
        self.assertIn("interop-venv", shutil.which("grpcurl"))
        self.assertTrue(DATA.is_dir())


if __name__ == "__main__":
    unittest.main()
