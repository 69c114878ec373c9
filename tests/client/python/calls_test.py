"""Every call of both clients against the server, compared with the goldens."""
import asyncio
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import awqd
from conftest import ROOT
from server import Server

DATA = ROOT / "tests" / "data"
AWQ = DATA / "awq" / "goldens"
MODEL = "all-MiniLM-L6-v2-awq"
QUERY = "encoder.layer.0.attention.self.query"
CASES = json.loads((AWQ / "cases.json").read_text())["cases"]
MOE = DATA / "experts" / "goldens"


def error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def shared_objects():
    return {path.name for path in pathlib.Path("/dev/shm").glob("awqd-interop-*")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["weight"])
def test_matmul_equals_the_golden(client, case):
    x = np.load(AWQ / case["activations"])
    execution = awqd.Execution()
    y = client.matmul(case["model"], case["weight"], x, execution=execution)
    assert y.dtype == np.float16 and y.flags.writeable
    assert error(y, np.load(AWQ / case["matmul"])) < 1e-3
    assert execution.kernel.startswith("cpu/") and execution.batch_tokens >= len(x)


def test_leading_dimensions_and_empty_arrays(client):
    x = np.ones((2, 0, 3, 384), np.float16)
    assert client.matmul(MODEL, QUERY, x).shape == (2, 0, 3, 384)
    assert client.matmul(MODEL, QUERY, np.ones(384, np.float32)).shape == (384,)


def test_arrays_that_are_not_contiguous_or_not_little_endian(client):
    x = np.load(AWQ / "activations_384.npy").astype(np.float32)
    expected = client.matmul(MODEL, QUERY, x)
    np.testing.assert_array_equal(client.matmul(MODEL, QUERY, np.asfortranarray(x)), expected)
    np.testing.assert_array_equal(client.matmul(MODEL, QUERY, x.astype(">f4")), expected)


def test_bf16_and_options(client):
    x = np.load(AWQ / "activations_384.npy")
    plain = client.matmul(MODEL, QUERY, x, output_dtype="fp32")
    bf16 = client.matmul(MODEL, QUERY, x.astype(ml_dtypes.bfloat16))
    assert bf16.dtype == ml_dtypes.bfloat16
    assert error(bf16, plain) < 1e-2
    bias = np.full(384, 2, np.float32)
    zero = np.zeros(384, np.float32)
    without = client.matmul(MODEL, QUERY, x, output_dtype="fp32", bias=zero)
    moved = client.matmul(MODEL, QUERY, x, output_dtype="fp32", bias=bias, activation_function="relu", path="dequantize")
    assert error(moved, np.maximum(without + 2, 0)) < 1e-3
    rounded = client.matmul(MODEL, QUERY, x, output_dtype="fp32", activation_quantization="per_token")
    assert 0 < error(rounded, plain) < 3e-2
    for how in ("fp8_per_token", "fp8_per_block_128"):
        assert 5e-3 < error(client.matmul(MODEL, QUERY, x, output_dtype="fp32", activation_quantization=how), plain) < 6e-2
    with pytest.raises(awqd.InvalidArgument, match="declares none"):
        client.matmul(MODEL, QUERY, x, activation_quantization="fp8_as_declared")


def test_weight_in_the_request(client):
    weight = awqd.packed_weight("plain", {"codes": np.array([[129, 130, 131], [127, 126, 125]], np.uint8),
                                          "scales": np.array([[0.5, 0.25, 2]], np.float32)},
                                {"bits": 8, "symmetric": True})
    expected = np.array([[0.5, 0.5, 6], [-0.5, -0.5, -6]], np.float32)
    np.testing.assert_array_equal(client.dequantize(None, weight, dtype="fp32"), expected)
    np.testing.assert_array_equal(client.matmul(None, weight, np.array([[3, 1]], np.float32)), [[1, 1, 12]])


def test_dequantize_is_bit_exact(client):
    case = next(case for case in CASES if "dequantized" in case)
    expected = np.load(AWQ / case["dequantized"])
    seen = []
    w = client.dequantize(case["model"], case["weight"], progress=lambda done, total: seen.append((done, total)))
    assert w.dtype == np.float16 and w.tobytes() == expected.tobytes()
    assert seen[-1] == (384, 384) and seen == sorted(seen)
    block = client.dequantize(case["model"], case["weight"], rows=slice(3, 131), columns=(5, 77), dtype=np.float32)
    assert block.dtype == np.float32
    np.testing.assert_array_equal(block.astype(np.float16), expected[3:131, 5:77])


def test_dequantize_into_an_array(client, tmp_path, capsys):
    out = np.memmap(tmp_path / "w", np.float16, "w+", shape=(384, 384))
    execution = awqd.Execution()
    assert client.dequantize(MODEL, QUERY, out=out, progress=True, execution=execution) is out
    assert "dequantize" in execution.kernel
    assert "encoder.layer.0" in capsys.readouterr().err
    np.testing.assert_array_equal(out, client.dequantize(MODEL, QUERY))
    with pytest.raises(awqd.InvalidArgument, match=r"out: got the shape \[384, 3\], expected \[384, 384\]"):
        client.dequantize(MODEL, QUERY, out=np.empty((384, 3), np.float16))
    with pytest.raises(awqd.InvalidArgument, match="contiguous"):
        client.dequantize(MODEL, QUERY, out=np.empty((384, 768), np.float16)[:, ::2])


def test_experts(client):
    x, ids, router = (np.load(MOE / f"{name}.npy") for name in ("x", "ids", "router"))
    weights = client.get_model("moe")
    stack = next(stack.path for stack in weights.stacks if stack.path.endswith("gate_proj"))
    rows = client.grouped_matmul("moe", stack, x, ids, activation_function="silu", output_dtype="fp32")
    assert error(rows, np.load(MOE / "grouped.npy")) < 1e-3
    summed = client.grouped_matmul("moe", stack, x, ids, router_weights=router, activation_function="silu", output_dtype="fp32")
    assert error(summed, np.load(MOE / "grouped_summed.npy")) < 1e-3
    path = stack.removesuffix(".gate_proj")
    assert error(client.mlp("moe", path, x, expert_ids=ids, output_dtype="fp32"), np.load(MOE / "mlp.npy")) < 1e-3
    y = client.mlp("moe", path, x, expert_ids=ids, router_weights=router, output_dtype="fp32")
    assert error(y, np.load(MOE / "mlp_summed.npy")) < 1e-3
    dense = next(w.path for w in weights.weights if w.path.endswith("gate_proj") and "experts" not in w.path)
    y = client.mlp("moe", dense.removesuffix(".gate_proj"), x, output_dtype="fp32")
    assert error(y, np.load(MOE / "dense_mlp.npy")) < 1e-3


def test_e4m3_of_experts(client):
    x, ids = np.load(MOE / "x.npy"), np.load(MOE / "ids.npy")
    stack = next(stack.path for stack in client.get_model("moe").stacks if stack.path.endswith("gate_proj"))
    scales = np.abs(x.astype(np.float32)).max(-1) / np.float32(448)
    codes = (x.astype(np.float32) / scales[..., None]).astype(ml_dtypes.float8_e4m3fn)
    for call, path in ((client.grouped_matmul, stack), (client.mlp, stack.removesuffix(".gate_proj"))):
        rounded = call("moe", path, x, expert_ids=ids, activation_quantization="fp8_per_token", output_dtype="fp32")
        middle = {"activation_quantization": "fp8_per_token"} if call == client.mlp else {}
        sent = call("moe", path, codes, expert_ids=ids, activation_scales=scales, output_dtype="fp32", **middle)
        np.testing.assert_array_equal(sent, rounded)
        assert call("moe", path, codes, expert_ids=ids, activation_scales=scales).dtype == np.float16
        with pytest.raises(awqd.InvalidArgument, match="activation_scales: got nothing, expected the scales of FP8_E4M3"):
            call("moe", path, codes, expert_ids=ids)


BLOCKS = MOE.parent / "blocks_goldens"
BLOCK_CASES = json.loads((BLOCKS / "cases.json").read_text())["cases"]


@pytest.mark.parametrize("case", BLOCK_CASES)
def test_blocks_of_transformers(client, case):
    def load(name):
        return np.load(BLOCKS / f"{name}.npy")

    given = BLOCK_CASES[case]
    call = {f"activation_{name}": value for name, value in given.get("activation", {}).items()}
    if given.get("biases"):
        call.update({name: load(name) for name in ("gate_bias", "up_bias", "down_bias")})
    if "router" in given:
        router = {**given["router"], "scoring": given["router"]["scoring"].lower()}
        router["correction_bias"] = load("correction_bias") if router.get("correction_bias") else None
        call["router"] = awqd.Router(load("logits"), **router)
    if given.get("shared_expert"):
        call["shared_expert"] = "mlp.shared_experts"
    if given.get("shared_expert_gate"):
        call["shared_expert_gate"] = load("shared_expert_gate").tolist()
    path = "mlp.shared_experts" if given.get("dense") else "mlp.experts.*"
    y = client.mlp("blocks", path, load("x"), activation_function=given["activation_function"].lower(), output_dtype="fp32",
                   **call)
    assert error(y, load(case)) < 1e-3


def test_a_router_is_checked(client):
    x, logits = np.load(BLOCKS / "x.npy"), np.load(BLOCKS / "logits.npy")
    stack = "mlp.experts.*.up_proj"
    assert client.grouped_matmul("blocks", stack, x, router=awqd.Router(logits.tolist(), 2)).shape == (len(x), 96)
    with pytest.raises(awqd.InvalidArgument, match="router.top_k: got 9, expected 1 to 8"):
        client.grouped_matmul("blocks", stack, x, router=awqd.Router(logits, 9))
    with pytest.raises(awqd.InvalidArgument, match="router.scoring: got 'hash', expected one of softmax"):
        client.grouped_matmul("blocks", stack, x, router=awqd.Router(logits, 2, scoring="hash"))
    with pytest.raises(awqd.InvalidArgument, match="expert_ids: got nothing, expected .*, or a router"):
        client.grouped_matmul("blocks", stack, x)


def test_experts_as_int64_and_as_lists(client):
    x, ids, router = (np.load(MOE / f"{name}.npy") for name in ("x", "ids", "router"))
    stack = next(stack.path for stack in client.get_model("moe").stacks if stack.path.endswith("gate_proj"))
    for kind in (lambda a: a.astype(np.int64), lambda a: a.astype(np.uint8), lambda a: a.tolist()):
        rows = client.grouped_matmul("moe", stack, x, kind(ids), activation_function="silu", output_dtype="fp32")
        assert error(rows, np.load(MOE / "grouped.npy")) < 1e-3
    path = stack.removesuffix(".gate_proj")
    rows = client.mlp("moe", path, x, expert_ids=ids.tolist(), output_dtype="fp32")
    assert error(rows, np.load(MOE / "mlp.npy")) < 1e-3
    y = client.mlp("moe", path, x, expert_ids=ids.astype(np.int64), router_weights=router.tolist(), output_dtype="fp32")
    assert error(y, np.load(MOE / "mlp_summed.npy")) < 1e-3
    bias = client.matmul(MODEL, QUERY, np.zeros((1, 384), np.float32), bias=[2] * 384)
    np.testing.assert_array_equal(bias, np.full((1, 384), 2, np.float32))
    for wrong, message in (([[2**40, 1]], "expected INT32"), ([[0.5, 1]], "expected integers"), ([[1], [2, 3]], "lists of equal lengths"),
                           (np.full((1, 2), 2**31), "from 2147483648 to 2147483648, expected INT32"),
                           (np.ones((1, 2), np.float64), "got float64"), ("ab", "got str")):
        with pytest.raises(awqd.InvalidArgument, match=message) as raised:
            client.grouped_matmul("moe", stack, x[:1], wrong)
        assert raised.value.field.startswith("expert_ids")


def test_reprs_are_short(client):
    model = client.get_model(MODEL)
    assert repr(model).startswith("GetModelResponse(model=ModelSummary(name='all-MiniLM-L6-v2-awq', state=READY, ")
    assert f"weights=<{len(model.weights)}>" in repr(model)
    for message in (model, model.weights[0], client.server_info(), *client.list_models()):
        assert len(repr(message)) <= 300 and "\n" not in repr(message)
    block = np.ones((5, 3, 8), np.float16)
    assert repr(client.quantize_kv(block)) == "KvCodes(codes=uint8 [5, 3, 4], scales=float16 [5, 3], zeros=float16 [5, 3])"
    assert repr(client) == f"Client({client.address!r})"
    weight = awqd.packed_weight("plain", {"codes": np.ones((64, 64), np.uint8)}, {"bits": 8})
    assert repr(weight) == "PackedWeight(format='plain', tensors=<1>, settings=<1>)"
    with awqd.Client(client.address, token="secret") as with_token:
        assert "secret" not in repr(with_token)


def test_cache_of_keys_and_values(client):
    block = np.random.default_rng(1).standard_normal((5, 3, 7)).astype(np.float16)
    kv = client.quantize_kv(block)
    assert (kv.codes.shape, kv.codes.dtype, kv.scales.shape) == ((5, 3, 4), np.uint8, (5, 3))
    back = client.dequantize_kv(kv.codes, kv.scales, kv.zeros, head_dim=7, output_dtype="fp32")
    assert np.all(np.abs(back - block) <= kv.scales[..., None].astype(np.float32) * 0.51)
    scale, zero = np.array([0.5], np.float16), np.array([7], np.float16)
    given = client.quantize_kv(block, scales=scale, zeros=zero)
    assert given.scales is scale
    codes, scales, zeros = given
    assert codes is given.codes and (scales, zeros) == (scale, zero)
    low = given.codes & 15
    np.testing.assert_array_equal(low, np.clip(np.rint(block[..., ::2].astype(np.float32) / 0.5 + 7), 0, 15).astype(np.uint8))


def test_models_and_server(client):
    assert {model.name for model in client.list_models()} == {MODEL, "blocks", "moe"}
    assert any(weight.path == QUERY and (weight.k, weight.n) == (384, 384) for weight in client.get_model(MODEL).weights)
    client.unload_model("moe")
    with pytest.raises(awqd.NotFound):
        client.get_model("moe")
    assert client.load_model("moe").model.weights > 0
    info = client.server_info()
    assert info.version and "awq" in info.formats and info.limits.shared_memory_prefix == "awqd-interop-"
    assert client.is_serving() and client.is_serving("awqd.v1.QuantizedInference")


def test_all_weights_can_be_required(tmp_path):
    path = "gap.experts.2.up_proj"
    folder = shutil.copytree(DATA / "experts" / "moe", tmp_path / "part")
    checkpoint = folder / "model.safetensors"
    # The weight's codes and scales stay, beside a tensor that its format does not know.
    checkpoint.write_bytes(checkpoint.read_bytes().replace(f"{path}.qzeros".encode(), f"{path}.qzeroz".encode()))
    with Server(f"--model=part={folder}") as server, awqd.Client(server.address, wait_for_server=True) as client:
        assert [weight.path for weight in client.load_model("part").unserved] == [path]
        with pytest.raises(awqd.InvalidArgument, match="all weights are required"):
            client.load_model("part", require_all_weights=True)
        assert not client.load_model(MODEL, require_all_weights=True).unserved


def test_large_products_lie_in_shared_memory(server):
    x = np.random.default_rng(2).standard_normal((1500, 384)).astype(np.float32)
    before = shared_objects()
    with awqd.Client(server.address, shared_memory=False) as plain, awqd.Client(server.address) as client:
        expected = plain.matmul(MODEL, QUERY, x)
        first = client.matmul(MODEL, QUERY, x)  # learns how wide the answer is
        assert shared_objects() == before
        shared = client.matmul(MODEL, QUERY, x)
        assert len(shared_objects() - before) == 1
        again = client.matmul(MODEL, QUERY, x * 0)
        assert len(shared_objects() - before) == 1, "the object is used again"
        for y in (first, shared):
            assert error(y, expected) < 1e-5
        assert np.ptp(again, axis=0).max() == 0, "the bias alone"
        x_of_another_width = np.ones((1500, 3), np.float32)
        with pytest.raises(awqd.InvalidArgument) as raised:
            client.matmul(MODEL, QUERY, x_of_another_width)
        assert raised.value.field.startswith("activations")
        assert shared_objects() == before, "after a failed call the object goes"
    with awqd.Client(f"unix:{server.socket}") as client:
        for _ in range(2):
            assert error(client.matmul(MODEL, QUERY, x), expected) < 1e-5
        assert len(shared_objects() - before) == 1
    assert shared_objects() == before, "close() removes them"


TERMINATED = """
import os, signal, sys, time
import awqd, numpy as np
client = awqd.Client(sys.argv[1])
for _ in range(2):
    client.matmul(sys.argv[2], sys.argv[3], np.ones((1500, 384), np.float32))
if os.fork() == 0:
    os.kill(os.getpid(), signal.SIGTERM)  # the objects of a process that forked are its own
os.wait()
print(*(f"/dev/shm/{name}" for name in client._calls._pool._names), flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_leave_no_objects(server, number):
    process = subprocess.Popen([sys.executable, "-c", TERMINATED, server.address, MODEL, QUERY], stdout=subprocess.PIPE, text=True)
    paths = process.stdout.readline().split()
    assert len(paths) == 1 and os.path.exists(paths[0])
    process.send_signal(number)
    assert process.wait(20) == -number, "its parent sees what ended it"
    assert not os.path.exists(paths[0])


def test_handlers_of_others_stay(server):
    mine = lambda number, frame: None
    old = signal.signal(signal.SIGTERM, mine)
    try:
        with awqd.Client(server.address):
            assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, old)


def test_shared_memory_that_the_server_cannot_use_gives_way_to_messages(server, monkeypatch):
    x = np.ones((1500, 384), np.float32)
    with awqd.Client(server.address) as client:
        expected = client.matmul(MODEL, QUERY, x)
        monkeypatch.setattr("awqd._shared_memory._DIRECTORY", os.path.realpath(os.environ.get("TMPDIR", "/tmp")))
        np.testing.assert_allclose(client.matmul(MODEL, QUERY, x), expected, rtol=1e-5)
        assert client._calls._share is False
        np.testing.assert_allclose(client.matmul(MODEL, QUERY, x), expected, rtol=1e-5)


def test_errors_name_field_and_hint(client):
    with pytest.raises(awqd.InvalidArgument) as raised:
        client.matmul(MODEL, QUERY, np.ones((2, 3), np.float16))
    assert (raised.value.code, raised.value.field) == ("INVALID_ARGUMENT", "activations.shape")
    assert "384" in raised.value.message and isinstance(raised.value, ValueError)
    with pytest.raises(awqd.NotFound, match="list_models") as missing:
        client.matmul("absent", "x", np.ones((1, 1), np.float16))
    assert "absent" in missing.value.message and isinstance(missing.value, LookupError)
    with pytest.raises(awqd.InvalidArgument, match="float64.*astype") as wide:
        client.matmul(MODEL, QUERY, np.ones((1, 384)))
    assert wide.value.field == "activations.dtype"
    with pytest.raises(awqd.InvalidArgument, match="path: got 'fast', expected one of auto, fused, dequantize"):
        client.matmul(MODEL, QUERY, np.ones(384, np.float32), path="fast")
    with pytest.raises(awqd.InvalidArgument, match="list, expected a NumPy array"):
        client.matmul(MODEL, QUERY, [1.0])
    # Refused where the server foresees it.
    with pytest.raises((awqd.DeadlineExceeded, awqd.ResourceExhausted), match="(?i)deadline"):
        client.matmul(MODEL, QUERY, np.ones((4096, 384), np.float16), timeout=1e-5)


def test_asyncio(server):
    x = np.load(AWQ / "activations_384.npy")
    expected = np.load(AWQ / f"{QUERY}.matmul.npy")

    async def run():
        async with awqd.AsyncClient(server.address) as client:
            ys = await asyncio.gather(*(client.matmul(MODEL, QUERY, x) for _ in range(20)))
            w = await client.dequantize(MODEL, QUERY)
            with pytest.raises(awqd.NotFound):
                await client.get_model("absent")
            big = np.ones((1500, 384), np.float32)
            pair = [await client.matmul(MODEL, QUERY, big) for _ in range(2)]
            task = asyncio.create_task(client.matmul(MODEL, QUERY, np.ones((9000, 384), np.float32)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return ys, w, pair, await client.is_serving()

    before = shared_objects()
    ys, w, pair, serving = asyncio.run(run())
    assert serving and w.shape == (384, 384)
    assert all(error(y, expected) < 1e-3 for y in ys)
    np.testing.assert_allclose(*pair, rtol=1e-5)
    assert shared_objects() == before
