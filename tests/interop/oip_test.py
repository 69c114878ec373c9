"""The inference protocol with a client that is not ours, tritonclient, against our own API on the same server."""
import json
import pathlib
import queue
import secrets
import subprocess
import sys
import tempfile
import time
import unittest
from multiprocessing import shared_memory

import ml_dtypes
import numpy
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from server import ROOT, Server, awqctl

MODEL = "all-MiniLM-L6-v2-awq"
WEIGHT = "encoder.layer.0.intermediate.dense"
NAME = f"{MODEL}/{WEIGHT}"
K, N = 384, 1536

# A client that registers a region and waits to be killed: of an address and a key.
KILLED = """
import pathlib, sys, time
import tritonclient.grpc as triton
address, key = sys.argv[1:]
pathlib.Path("/dev/shm", key).write_bytes(bytes(8192))
client = triton.InferenceServerClient(address)
client.register_system_shared_memory("killed", f"/{key}", 4096)
print("registered", flush=True)
time.sleep(60)
"""


def tensor(name, array, datatype=None):
    out = triton.InferInput(name, array.shape, datatype or triton_type(array))
    out.set_data_from_numpy(array)
    return out


def triton_type(array):
    return {"float16": "FP16", "float32": "FP32", "int32": "INT32", "bfloat16": "BF16"}[array.dtype.name]


class Oip(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Server(
            f"--model=moe={ROOT}/tests/data/experts/moe", f"--model=blocks={ROOT}/tests/data/experts/blocks",
            "--model_control=any"))
        cls.client = cls.enterClassContext(triton.InferenceServerClient(cls.server.address))
        cls.random = numpy.random.default_rng(7)

    def x(self, tokens, dtype=numpy.float16):
        return self.random.standard_normal((tokens, K)).astype(dtype)

    def weight(self, name=NAME, **parameters):
        return self.client.infer(f"{name}:dequantize", [], parameters={"output_dtype": "FP32", **parameters}).as_numpy("w")

    def bias(self):
        """The bias of the weight, in FP32: the product of zeros."""
        return self.client.infer(NAME, [tensor("x", numpy.zeros((1, K), numpy.float32))]).as_numpy("y").astype(numpy.float64)

    def refused(self, code, message, *arguments, **more):
        with self.assertRaises(InferenceServerException) as caught:
            self.client.infer(*arguments, **more)
        self.assertEqual(caught.exception.status(), f"StatusCode.{code}")
        self.assertIn(message, caught.exception.message())

    def assert_product(self, y, x, w):
        expected = x.astype(numpy.float64) @ w.astype(numpy.float64) + self.bias()
        self.assertEqual(y.shape, expected.shape)
        # The limit of every product (tests/testing/matchers.h).
        error = numpy.linalg.norm(y.astype(numpy.float64) - expected) / numpy.linalg.norm(expected)
        self.assertLess(error, 1e-3)

    def test_the_server_and_its_models_are_ready(self):
        self.assertTrue(self.client.is_server_live())
        self.assertTrue(self.client.is_server_ready())
        self.assertTrue(self.client.is_model_ready(NAME))
        version = self.client.get_model_metadata(NAME).versions[0]
        self.assertTrue(self.client.is_model_ready(NAME, version))
        self.assertFalse(self.client.is_model_ready(NAME, f"{version}1"))
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

    def test_a_stream_answers_in_order_and_survives_errors(self):
        answers = queue.Queue()
        sent = [self.x(1 + i % 5) for i in range(20)]
        self.client.start_stream(callback=lambda result, error: answers.put((result, error)))
        for i, x in enumerate(sent):
            self.client.async_stream_infer(f"{MODEL}/nothing" if i == 7 else NAME, [tensor("x", x)], request_id=str(i))
        w = self.weight()
        for i, x in enumerate(sent):
            result, error = answers.get(timeout=30)
            if i == 7:
                self.assertIn("NOT_FOUND: ", error.message())
                continue
            self.assertIsNone(error)
            self.assertEqual(result.get_response().id, str(i))
            self.assert_product(result.as_numpy("y"), x, w)
        self.client.stop_stream()

    def test_experts(self):
        stack = "moe.experts.*.up_proj"
        config = self.client.get_model_config(f"moe/{stack}").config
        k, n = (int(config.parameters[name].string_value) for name in ("k", "n"))
        self.assertEqual([(i.name, list(i.dims)) for i in config.input], [("x", [k]), ("ids", [-1])])
        self.assertEqual(config.parameters["optional_inputs"].string_value, "router_weights,router_logits,correction_bias,activation_scales")
        x = self.random.standard_normal((3, k)).astype(numpy.float32)
        ids = numpy.array([[0, 1], [1, 0], [1, 1]], numpy.int32)
        rows = self.client.infer(f"moe/{stack}", [tensor("x", x), tensor("ids", ids)]).as_numpy("y")
        self.assertEqual(rows.shape, (3, 2, n))
        weights = [self.weight(f"moe/{stack}".replace("*", str(expert))) for expert in (0, 1)]
        bias = [self.client.infer(f"moe/{stack}".replace("*", str(expert)), [tensor("x", numpy.zeros((1, k), numpy.float32))])
                .as_numpy("y")[0] for expert in (0, 1)]
        expected = numpy.array([[x[t] @ weights[e] + bias[e] for e in ids[t]] for t in range(3)])
        self.assertLess(numpy.linalg.norm(rows - expected) / numpy.linalg.norm(expected), 1e-3)
        router = self.random.random((3, 2)).astype(numpy.float32)
        summed = self.client.infer(f"moe/{stack}", [tensor("router_weights", router), tensor("x", x), tensor("ids", ids)])
        numpy.testing.assert_allclose(summed.as_numpy("y"), (router[..., None] * rows).sum(1), rtol=1e-4, atol=1e-5)
        self.refused("INVALID_ARGUMENT", "inputs[ids]: got 99 at [0, 0]", f"moe/{stack}",
                     [tensor("x", x), tensor("ids", numpy.full((3, 2), 99, numpy.int32))])

    def test_a_gated_mlp(self):
        parts = {name: self.weight(f"moe/mlp.{name}_proj").astype(numpy.float64) for name in ("gate", "up", "down")}
        x = self.random.standard_normal((4, parts["gate"].shape[0])).astype(numpy.float32)
        zeros = {name: self.client.infer(f"moe/mlp.{name}_proj", [tensor("x", numpy.zeros((1, part.shape[0]), numpy.float32))])
                 .as_numpy("y")[0] for name, part in parts.items()}
        gate = x @ parts["gate"] + zeros["gate"]
        expected = (gate / (1 + numpy.exp(-gate)) * (x @ parts["up"] + zeros["up"])) @ parts["down"] + zeros["down"]
        y = self.client.infer("moe/mlp:gated_mlp", [tensor("x", x)], parameters={"activation_function": "SILU"}).as_numpy("y")
        self.assertLess(numpy.linalg.norm(y - expected) / numpy.linalg.norm(expected), 1e-3)
        self.refused("INVALID_ARGUMENT", "parameters[activation_function]: got NONE", "moe/mlp:gated_mlp", [tensor("x", x)])

    def test_blocks_of_transformers(self):
        goldens = ROOT / "tests/data/experts/blocks_goldens"
        names = {"biases": ["gate_bias", "up_bias", "down_bias"], "shared_expert_gate": ["shared_expert_gate"]}
        for case, given in json.loads((goldens / "cases.json").read_text())["cases"].items():
            parameters = {"activation_function": given["activation_function"], "output_dtype": "FP32",
                          **{f"activation_{name}": value for name, value in given.get("activation", {}).items()}}
            inputs = ["x"] + [name for key, of in names.items() if given.get(key) for name in of]
            if "router" in given:
                router = dict(given["router"])
                inputs += ["logits"] + ["correction_bias"] * router.pop("correction_bias", False)
                parameters.update(router)
            if given.get("shared_expert"):
                parameters["shared_expert"] = "mlp.shared_experts"
            path = "mlp.shared_experts" if given.get("dense") else "mlp.experts.*"
            tensors = [tensor(name.replace("logits", "router_logits"), numpy.load(goldens / f"{name}.npy")) for name in inputs]
            with self.subTest(case):
                y = self.client.infer(f"blocks/{path}:gated_mlp", tensors, parameters=parameters).as_numpy("y")
                expected = numpy.load(goldens / f"{case}.npy")
                self.assertLess(numpy.linalg.norm(y - expected) / numpy.linalg.norm(expected), 1e-3)
        x, logits = (tensor(name, numpy.load(goldens / f"{file}.npy")) for name, file in (("x", "x"), ("router_logits", "logits")))
        self.refused("INVALID_ARGUMENT", "parameters[top_k]: got 0, expected 1 to 8", "blocks/mlp.experts.*.up_proj", [x, logits])

    def test_tensors_in_shared_memory(self):
        # As Triton's examples begin, those without CUDA too.
        self.client.unregister_system_shared_memory()
        self.client.unregister_cuda_shared_memory()
        self.assertEqual(len(self.client.get_cuda_shared_memory_status().regions), 0)
        x = self.x(3)
        y = self.client.infer(NAME, [tensor("x", x)]).as_numpy("y")
        key = f"awqd-interop-{secrets.token_hex(8)}"
        memory = shared_memory.SharedMemory(key, create=True, size=65536)
        self.addCleanup(memory.unlink)
        self.addCleanup(memory.close)
        memory.buf[:x.nbytes] = x.tobytes()
        self.client.register_system_shared_memory("region", f"/{key}", 65536)
        self.assertEqual(self.client.get_system_shared_memory_status().regions["region"].byte_size, 65536)
        shared = triton.InferInput("x", x.shape, "FP16")
        shared.set_shared_memory("region", x.nbytes)
        output = triton.InferRequestedOutput("y")
        output.set_shared_memory("region", y.nbytes, 8192)
        answer = self.client.infer(NAME, [shared], outputs=[output])
        self.assertEqual(list(answer.get_output("y").shape), list(y.shape))
        self.assertEqual(bytes(memory.buf[8192:8192 + y.nbytes]), y.tobytes())
        self.client.unregister_system_shared_memory("region")
        self.refused("INVALID_ARGUMENT", "inputs[x].parameters[shared_memory_region]", NAME, [shared])

    def test_a_killed_client_is_followed_by_the_next(self):
        key = f"awqd-interop-{secrets.token_hex(8)}"
        path = pathlib.Path("/dev/shm", key)
        client = subprocess.Popen([sys.executable, "-c", KILLED, self.server.address, key], stdout=subprocess.PIPE)
        self.addCleanup(path.unlink, missing_ok=True)
        self.assertEqual(client.stdout.readline(), b"registered\n")
        client.kill()
        client.wait()
        client.stdout.close()
        self.client.register_system_shared_memory("killed", f"/{key}", 4096)  # as it did
        path.unlink()
        self.assertNotIn("killed", self.client.get_system_shared_memory_status().regions)
        path.write_bytes(bytes(8192))
        self.client.register_system_shared_memory("killed", f"/{key}", 8192)
        self.client.unregister_system_shared_memory("killed")

    def test_repository_and_statistics(self):
        names = {model.name: model.state for model in self.client.get_model_repository_index().models}
        for name in (MODEL, NAME, "moe/moe.experts.*.up_proj", "moe/moe.experts.*:gated_mlp"):
            self.assertEqual(names[name], "READY")
        before = self.client.get_inference_statistics(NAME).model_stats[0]
        self.client.infer(NAME, [tensor("x", self.x(3))])
        after = self.client.get_inference_statistics(NAME).model_stats[0]
        self.assertEqual(after.inference_count - before.inference_count, 3)
        self.assertEqual(after.inference_stats.success.count - before.inference_stats.success.count, 1)
        version = int(self.client.get_model_metadata(NAME).versions[0])
        self.client.unload_model(MODEL)
        self.assertFalse(self.client.is_model_ready(NAME))
        self.client.load_model(MODEL)
        self.assertTrue(self.client.is_model_ready(NAME, str(version + 1)))

    def statistics(self):
        return self.client.get_inference_statistics(NAME).model_stats[0]

    def test_durations_are_those_of_the_requests(self):
        before = self.statistics()
        sent = time.monotonic_ns()
        for tokens in (3, 3, 70):
            self.client.infer(NAME, [tensor("x", self.x(tokens))])
        took = time.monotonic_ns() - sent
        # Answers are counted shortly after they were given.
        while (after := self.statistics()).inference_stats.compute_output.count < before.inference_stats.compute_output.count + 3:
            self.assertLess(time.monotonic_ns() - sent, 30e9)
        parts = 0
        for name in ("queue", "compute_input", "compute_infer", "compute_output"):
            old, new = (getattr(counts.inference_stats, name) for counts in (before, after))
            self.assertEqual(new.count - old.count, 3, name)
            parts += new.ns - old.ns
        success = after.inference_stats.success.ns - before.inference_stats.success.ns
        self.assertLess(after.inference_stats.compute_infer.ns - before.inference_stats.compute_infer.ns, success)
        self.assertLess(success, took)
        self.assertLess(0, parts)
        self.assertEqual(after.execution_count - before.execution_count, 3)
        self.assertEqual(after.inference_count - before.inference_count, 76)
        sizes = {batches.batch_size: batches.compute_infer.count for batches in before.batch_stats}
        grown = {batches.batch_size: batches.compute_infer.count - sizes.get(batches.batch_size, 0)
                 for batches in after.batch_stats}
        self.assertEqual({size: count for size, count in grown.items() if count > 0}, {3: 2, 128: 1})

    def test_the_configuration_has_the_shapes_of_one_token(self):
        """As perf_analyzer reads it: each input of the configuration is in the metadata, whose shape begins with the tokens."""
        config, metadata = self.client.get_model_config(NAME).config, self.client.get_model_metadata(NAME)
        self.assertGreater(config.max_batch_size, 0)
        for ours, theirs in ((config.input, metadata.inputs), (config.output, metadata.outputs)):
            self.assertEqual({t.name: [-1, *t.dims] for t in ours}, {t.name: list(t.shape) for t in theirs})
        self.assertEqual(config.parameters["optional_inputs"].string_value, "bias,activation_scales")
        self.assertEqual(self.client.get_model_config(f"{NAME}:dequantize").config.max_batch_size, 0)

    def test_settings_are_told_and_not_changed(self):
        self.assertEqual(list(self.client.get_trace_settings().settings["trace_level"].value), ["OFF"])
        self.assertTrue(self.client.get_log_settings().settings["log_error"].bool_param)
        with self.assertRaises(InferenceServerException) as caught:
            self.client.update_log_settings({"log_info": False})
        self.assertIn("settings[log_info]", caught.exception.message())

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
        self.refused("NOT_FOUND", "version", NAME, [tensor("x", x)], model_version="99")
        self.refused("INVALID_ARGUMENT", "inputs[0].name", NAME, [tensor("z", x)])
        self.refused("INVALID_ARGUMENT", "inputs[x].shape", NAME, [tensor("x", x[:, 1:].copy())])
        self.refused("INVALID_ARGUMENT", "outputs[0].name", NAME, [tensor("x", x)], outputs=[triton.InferRequestedOutput("z")])
        self.refused("INVALID_ARGUMENT", "parameters[sequence_", NAME, [tensor("x", x)], sequence_id=3)


if __name__ == "__main__":
    unittest.main()
