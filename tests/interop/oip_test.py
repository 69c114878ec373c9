"""The inference protocol with a client that is not ours, tritonclient, against our own API on the same server."""
import pathlib
import queue
import tempfile
import unittest

import ml_dtypes
import numpy
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from server import Server, awqctl

MODEL = "all-MiniLM-L6-v2-awq"
WEIGHT = "encoder.layer.0.intermediate.dense"
NAME = f"{MODEL}/{WEIGHT}"
K, N = 384, 1536


def tensor(name, array, datatype=None):
    out = triton.InferInput(name, array.shape, datatype or triton_type(array))
    out.set_data_from_numpy(array)
    return out


def triton_type(array):
    return {"float16": "FP16", "float32": "FP32", "int32": "INT32", "bfloat16": "BF16"}[array.dtype.name]


class Oip(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Server())
        cls.client = cls.enterClassContext(triton.InferenceServerClient(cls.server.address))
        cls.random = numpy.random.default_rng(7)

    def x(self, tokens, dtype=numpy.float16):
        return self.random.standard_normal((tokens, K)).astype(dtype)

    def weight(self, name=NAME, **parameters):
        return self.client.infer(f"{name}:dequantize", [], parameters={"output_dtype": "FP32", **parameters}).as_numpy("w")

    def bias(self):
        """Of the weight, in FP32: the product of zeros."""
        return self.client.infer(NAME, [tensor("x", numpy.zeros((1, K), numpy.float32))]).as_numpy("y").astype(numpy.float64)

    def refused(self, code, message, *arguments, **more):
        with self.assertRaises(InferenceServerException) as caught:
            self.client.infer(*arguments, **more)
        self.assertEqual(caught.exception.status(), f"StatusCode.{code}")
        self.assertIn(message, caught.exception.message())

    def assert_product(self, y, x, w):
        expected = x.astype(numpy.float64) @ w.astype(numpy.float64) + self.bias()
        self.assertEqual(y.shape, expected.shape)
        # The limit that every product is held to (tests/testing/matchers.h).
        error = numpy.linalg.norm(y.astype(numpy.float64) - expected) / numpy.linalg.norm(expected)
        self.assertLess(error, 1e-3)

    def test_the_server_and_its_models_are_ready(self):
        self.assertTrue(self.client.is_server_live())
        self.assertTrue(self.client.is_server_ready())
        self.assertTrue(self.client.is_model_ready(NAME))
        self.assertTrue(self.client.is_model_ready(NAME, "1"))
        self.assertFalse(self.client.is_model_ready(NAME, "2"))
        self.assertFalse(self.client.is_model_ready(f"{MODEL}/nothing"))

    def test_metadata(self):
        self.assertEqual(self.client.get_server_metadata().name, "awqd")
        metadata = self.client.get_model_metadata(NAME)
        self.assertEqual([(i.name, i.datatype, list(i.shape)) for i in metadata.inputs], [("x", "FP16", [-1, K])])
        self.assertEqual([(o.name, o.datatype, list(o.shape)) for o in metadata.outputs], [("y", "FP16", [-1, N])])

    def test_infer_is_the_product_of_the_weight(self):
        w = self.weight()
        for tokens in (1, 5, 300):
            x = self.x(tokens)
            answer = self.client.infer(NAME, [tensor("x", x)], request_id=f"of {tokens}",
                                       outputs=[triton.InferRequestedOutput("y")])
            self.assertEqual(answer.get_response().id, f"of {tokens}")
            self.assert_product(answer.as_numpy("y"), x, w)

    def test_a_product_is_that_of_our_own_api(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        x = self.x(5)
        numpy.save(folder / "x.npy", x)
        awqctl("--address", self.server.address, "matmul", MODEL, WEIGHT, folder / "x.npy", "-o", folder / "y.npy")
        y = self.client.infer(NAME, [tensor("x", x)]).as_numpy("y")
        numpy.testing.assert_array_equal(y.view("<u2"), numpy.load(folder / "y.npy").view("<u2"))

    def test_the_weight_is_that_of_our_own_api(self):
        path = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "w.npy"
        awqctl("--address", self.server.address, "dequantize", MODEL, WEIGHT, "--dtype", "fp32", "-o", path)
        numpy.testing.assert_array_equal(self.weight().view("<u4"), numpy.load(path).view("<u4"))
        part = self.weight(row_begin=3, row_end=5, column_begin=8, column_end=11)
        numpy.testing.assert_array_equal(part, self.weight()[3:5, 8:11])

    def test_fp32_and_bf16(self):
        x = self.x(2, numpy.float32)
        y = self.client.infer(NAME, [tensor("x", x)]).as_numpy("y")
        self.assertEqual(y.dtype, numpy.float32)
        self.assert_product(y, x, self.weight())
        half = x.astype(ml_dtypes.bfloat16)
        answer = self.client.infer(NAME, [tensor("x", half)], parameters={"output_dtype": "FP32"}).as_numpy("y")
        self.assertEqual(answer.dtype, numpy.float32)
        self.assertEqual(self.client.infer(NAME, [tensor("x", half)]).get_response().outputs[0].datatype, "BF16")

    def test_asynchronous_requests(self):
        answers = queue.Queue()
        sent = {f"{i}": self.x(1 + i % 3) for i in range(32)}
        for name, x in sent.items():
            self.client.async_infer(NAME, [tensor("x", x)], request_id=name,
                                    callback=lambda result, error: answers.put((result, error)))
        w = self.weight()
        for _ in range(len(sent)):
            result, error = answers.get(timeout=30)
            self.assertIsNone(error)
            self.assert_product(result.as_numpy("y"), sent.pop(result.get_response().id), w)

    def test_priority_and_timeout(self):
        x = self.x(1)
        answer = self.client.infer(NAME, [tensor("x", x)], priority=1, timeout=10_000_000, parameters={"execution": True})
        self.assertEqual(answer.get_response().parameters["path"].string_param, "FUSED")
        self.refused("INVALID_ARGUMENT", "parameters[priority]: got 10", NAME, [tensor("x", x)], priority=10)
        self.refused("DEADLINE_EXCEEDED", "", NAME, [tensor("x", x)], timeout=1)

    def test_a_cancelled_request_ends(self):
        ended = queue.Queue()
        call = self.client.async_infer(NAME, [tensor("x", self.x(2000))], callback=lambda result, error: ended.put(error))
        call.cancel()
        error = ended.get(timeout=30)
        if error is not None:  # it may have been faster
            self.assertEqual(error.status(), "StatusCode.CANCELLED")
        self.assertTrue(self.client.is_server_ready())

    def test_errors_name_the_field(self):
        x = self.x(2)
        self.refused("NOT_FOUND", "nothing", f"{MODEL}/nothing", [tensor("x", x)])
        self.refused("NOT_FOUND", "version", NAME, [tensor("x", x)], model_version="2")
        self.refused("INVALID_ARGUMENT", "inputs[0].name", NAME, [tensor("z", x)])
        self.refused("INVALID_ARGUMENT", "inputs[x].shape", NAME, [tensor("x", x[:, 1:].copy())])
        self.refused("INVALID_ARGUMENT", "outputs[0].name", NAME, [tensor("x", x)], outputs=[triton.InferRequestedOutput("z")])
        self.refused("INVALID_ARGUMENT", "parameters[sequence_", NAME, [tensor("x", x)], sequence_id=3)


if __name__ == "__main__":
    unittest.main()
