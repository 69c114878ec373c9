"""KServe's Python client over the inference protocol."""
import asyncio
import unittest

import grpc
import numpy
from kserve import InferenceGRPCClient, InferInput, InferRequest

from server import Server

NAME = "all-MiniLM-L6-v2-awq/encoder.layer.0.intermediate.dense"
K, N = 384, 1536


def request(x, datatype, binary, name=NAME):
    tensor = InferInput("x", list(x.shape), datatype)
    tensor.set_data_from_numpy(x, binary_data=binary)
    return InferRequest(name, [tensor], request_id="me")


class KServe(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Server())

    def with_client(self, body):
        async def run():
            client = InferenceGRPCClient(self.server.address, retries=2)
            try:
                return await body(client)
            finally:
                await client.close()
        return asyncio.run(run())

    def infer(self, *arguments):
        async def body(client):
            return await client.infer(request(*arguments))
        return self.with_client(body)

    def test_ready(self):
        async def body(client):
            return [await client.is_server_live(), await client.is_server_ready(), await client.is_model_ready(NAME),
                    await client.is_model_ready("nothing")]
        self.assertEqual(self.with_client(body), [True, True, True, False])

    def test_raw_and_typed_give_the_same(self):
        x = numpy.random.default_rng(3).standard_normal((3, K)).astype(numpy.float32)
        raw, typed = self.infer(x, "FP32", True), self.infer(x, "FP32", False)
        self.assertEqual((raw.id, typed.id), ("me", "me"))
        y = raw.outputs[0].as_numpy()
        self.assertEqual((y.shape, y.dtype), ((3, N), numpy.float32))
        numpy.testing.assert_array_equal(y.view("<u4"), typed.outputs[0].as_numpy().view("<u4"))

    def test_fp16(self):
        x = numpy.random.default_rng(4).standard_normal((2, K)).astype(numpy.float16)
        half = self.infer(x, "FP16", True).outputs[0]
        self.assertEqual((half.name, half.datatype), ("y", "FP16"))
        full = self.infer(x.astype(numpy.float32), "FP32", True).outputs[0].as_numpy()
        error = numpy.linalg.norm(half.as_numpy() - full) / numpy.linalg.norm(full)
        self.assertLess(error, 1e-3)

    def test_errors(self):
        with self.assertRaises(grpc.aio.AioRpcError) as caught:
            self.infer(numpy.zeros((1, K + 1), numpy.float16), "FP16", True)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("inputs[x].shape", caught.exception.details())


if __name__ == "__main__":
    unittest.main()
