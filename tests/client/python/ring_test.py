"""Calls by rings: the bits of messages, the same errors, and servers that have none, stop or start again."""
import asyncio
import math
import signal
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import awqd
from awqd import _calls, _ring
from conftest import ROOT
from golden import write_safetensors
from server import Server

AWQ = ROOT / "tests" / "data" / "awq" / "goldens"
MOE = ROOT / "tests" / "data" / "experts" / "goldens"
BLOCKS = MOE.parent / "blocks_goldens"
MODEL = "all-MiniLM-L6-v2-awq"
QUERY = "encoder.layer.0.attention.self.query"
X = np.load(AWQ / "activations_384.npy")


@pytest.fixture(scope="module")
def ring_server(tmp_path_factory):
    path = tmp_path_factory.mktemp("ring") / "ring.sock"
    experts = ROOT / "tests/data/experts"
    rng = np.random.default_rng(3)
    gate = path.parent / "gate"  # the router of "blocks": logits of 8 experts
    gate.mkdir()
    (gate / "config.json").write_text((experts / "blocks" / "config.json").read_text())
    write_safetensors(gate / "model.safetensors", {
        "gate.qweight": rng.integers(-2**31, 2**31, (64, 1)).astype("<i4"),
        "gate.qzeros": rng.integers(-2**31, 2**31, (2, 1)).astype("<i4"),
        "gate.scales": (rng.random((2, 8)) / 16).astype("<f2")})
    models = (f"--model={name}={folder}" for name, folder in (("moe", experts / "moe"), ("blocks", experts / "blocks"), ("gate", gate)))
    with Server(f"--ring_path={path}", *models) as running:
        running.ring_path = str(path)
        yield running


@pytest.fixture
def messages(ring_server):
    with awqd.Client(ring_server.address) as made:
        yield made


@pytest.fixture
def ring(ring_server, monkeypatch):
    """A client whose products may be no messages."""
    monkeypatch.setattr(_calls.Calls, "_inference", lambda *unused: pytest.fail("it was a message"))
    with awqd.Client(f"unix:{ring_server.socket}", ring=True) as made:
        yield made


def both(monkeypatch, ring_server, call):
    """The result by a ring, and the one by messages. By the ring of an event loop it is the same."""
    with awqd.Client(ring_server.address) as made:
        expected = call(made)
    with monkeypatch.context() as patch:
        patch.setattr(_calls.Calls, "_inference", lambda *unused: pytest.fail("it was a message"))
        with awqd.Client(ring_server.address, ring=ring_server.ring_path) as made:
            got = call(made)

        async def awaited():
            async with awqd.AsyncClient(ring_server.address, ring=ring_server.ring_path) as made:
                return await call(made)

        for each, same in zip(*([each] if isinstance(each, np.ndarray) else each for each in (got, asyncio.run(awaited())))):
            np.testing.assert_array_equal(each, same)
    return got, expected


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_products_have_the_bits_of_messages(monkeypatch, ring_server, dtype):
    x = X.astype(dtype)
    for shaped in (x, x[0], x.reshape(2, -1, 384)[:, :3], np.ones((2, 0, 384), dtype), np.asfortranarray(x)):
        got, expected = both(monkeypatch, ring_server, lambda client, x=shaped: client.matmul(MODEL, QUERY, x, path="fused"))
        assert got.dtype == expected.dtype and got.flags.writeable
        np.testing.assert_array_equal(got, expected)


def test_options_and_execution(monkeypatch, ring_server):
    execution = awqd.Execution()
    got, expected = both(monkeypatch, ring_server, lambda client: client.matmul(
        MODEL, QUERY, X, output_dtype="fp32", bias=np.full(384, 2, np.float32), activation_function="relu", path="dequantize",
        priority=3, execution=execution))
    np.testing.assert_array_equal(got, expected)
    assert execution.path == 2 and execution.device == "cpu" and execution.batch_tokens == len(X)


def test_experts_and_mlps(monkeypatch, ring_server, messages):
    x, ids, router = (np.load(MOE / f"{name}.npy") for name in ("x", "ids", "router"))
    stack = next(stack.path for stack in messages.get_model("moe").stacks if stack.path.endswith("gate_proj"))
    path = stack.removesuffix(".gate_proj")
    for options in ({}, {"router_weights": router}):
        got, expected = both(monkeypatch, ring_server,
                             lambda client, options=options: client.grouped_matmul("moe", stack, x, ids, **options))
        np.testing.assert_array_equal(got, expected)
        got, expected = both(monkeypatch, ring_server,
                             lambda client, options=options: client.mlp("moe", path, x, expert_ids=ids.tolist(), **options))
        np.testing.assert_array_equal(got, expected)


def test_logits_in_place_of_ids(monkeypatch, ring_server):
    x, logits, bias = (np.load(BLOCKS / f"{name}.npy") for name in ("x", "logits", "correction_bias"))
    for router in (awqd.Router(logits, 2), awqd.Router(logits.astype(np.float16), 3, scoring="sigmoid", correction_bias=bias,
                                                       norm_topk_prob=True, routed_scaling_factor=2.5)):
        got, expected = both(monkeypatch, ring_server, lambda client, router=router: client.grouped_matmul(
            "blocks", "mlp.experts.*.up_proj", x, router=router))
        np.testing.assert_array_equal(got, expected)
        got, expected = both(monkeypatch, ring_server, lambda client, router=router: client.mlp(
            "blocks", "mlp.experts.*", x, router=router, shared_expert="mlp.shared_experts"))
        np.testing.assert_array_equal(got, expected)


def test_scales_of_tokens(monkeypatch, ring_server):
    rng = np.random.default_rng(1)
    x = rng.integers(-127, 128, (6, 384)).astype(np.int8)
    for tokens, scales in ((x, rng.random(6, np.float32) + 0.1), (x.reshape(2, 3, 384), np.full((2, 3), 0.5, np.float32)),
                           (x, np.array([0.25], np.float32)), (x[0], [0.125]), (x[:0], np.ones(0, np.float32))):
        got, expected = both(monkeypatch, ring_server, lambda client, tokens=tokens, scales=scales: client.matmul(
            MODEL, QUERY, tokens, activation_scales=scales, output_dtype="fp32"))
        np.testing.assert_array_equal(got, expected)
    got, expected = both(monkeypatch, ring_server, lambda client: client.matmul(
        MODEL, QUERY, X, activation_quantization="static", activation_scales=[0.05]))
    np.testing.assert_array_equal(got, expected)


def test_e4m3_of_experts(monkeypatch, ring_server):
    x, logits = (np.load(BLOCKS / f"{name}.npy") for name in ("x", "logits"))
    ids, k = np.argsort(-logits, axis=-1)[..., :2], x.shape[-1]
    codes = x.astype(ml_dtypes.float8_e4m3fn)
    of_tokens = np.random.default_rng(2).random(x.shape[:-1], np.float32) + 0.1
    of_blocks = np.repeat(of_tokens[..., None], (k + 127) // 128, -1)
    for call, path in (("grouped_matmul", "mlp.experts.*.up_proj"), ("mlp", "mlp.experts.*")):
        for scales in (of_tokens, of_blocks, [0.25]):
            got, expected = both(monkeypatch, ring_server, lambda client, call=call, path=path, scales=scales: getattr(client, call)(
                "blocks", path, codes, expert_ids=ids, activation_scales=scales))
            np.testing.assert_array_equal(got, expected)
        given = {"down_activation_scales": [0.5]} if call == "mlp" else {}
        of_experts = np.full(logits.shape[-1], 0.05, np.float32)
        got, expected = both(monkeypatch, ring_server, lambda client, call=call, path=path, given=given: getattr(client, call)(
            "blocks", path, x, expert_ids=ids, activation_quantization="fp8_static", activation_scales=of_experts, **given))
        np.testing.assert_array_equal(got, expected)


def test_scales_are_checked(ring_server):
    x = np.ones((2, 384), np.int8)
    with awqd.Client(ring_server.address, ring=ring_server.ring_path) as client:
        for scales, text in (([1.0, 0.0], "0 at element 1, expected positive"), ([1.0, math.inf], "inf at element 1"),
                             ([1.0, 1.0, 1.0], "activation_scales.shape")):
            with pytest.raises(awqd.InvalidArgument, match=text):
                client.matmul(MODEL, QUERY, x, activation_scales=np.array(scales, np.float32))


def test_chains(monkeypatch, ring_server):
    layer = QUERY.removesuffix("attention.self.query")
    steps = [awqd.Step("matmul", MODEL, layer + "intermediate.dense", activation_function="gelu"),
             awqd.Step("matmul", MODEL, layer + "output.dense", x=1, output_dtype="fp32"),
             awqd.Step("matmul", MODEL, QUERY)]
    execution = awqd.Execution()
    for x in (X, X[0], X.reshape(2, -1, 384)[:, :3], X[:0]):
        got, expected = both(monkeypatch, ring_server, lambda client, x=x: client.chain(steps, x, execution=execution))
        assert [each.shape for each in got] == [(*x.shape[:-1], columns) for columns in (1536, 384, 384)]
        for each, other in zip(got, expected):
            assert each.dtype == other.dtype
            np.testing.assert_array_equal(each, other)
    assert execution.kernel.count(",") == 2
    with awqd.Client(ring_server.address) as client:
        middle = client.matmul(MODEL, layer + "intermediate.dense", X, activation_function="gelu")
        y = client.matmul(MODEL, layer + "output.dense", middle, output_dtype="fp32")
        np.testing.assert_array_equal(client.chain(steps, X)[1], y)


def test_chains_of_experts(monkeypatch, ring_server):
    x, logits = (np.load(BLOCKS / f"{name}.npy") for name in ("x", "logits"))
    steps = [awqd.Step("grouped_matmul", "blocks", "mlp.experts.*.up_proj"),
             awqd.Step("mlp", "blocks", "mlp.experts.*"), awqd.Step("mlp", "blocks", "mlp.shared_experts", x=2)]
    ids = np.argsort(-logits, axis=-1)[..., :2]
    for options in ({"expert_ids": ids}, {"expert_ids": ids, "router_weights": np.ones(ids.shape, np.float32)},
                    {"router": awqd.Router(logits, 2)}):
        wanted = steps if "router_weights" in options or "router" in options else steps[:2]
        got, expected = both(monkeypatch, ring_server,
                             lambda client, wanted=wanted, options=options: client.chain(wanted, x, **options))
        for each, other in zip(got, expected):
            np.testing.assert_array_equal(each, other)


def test_logits_that_are_the_result_of_a_step(monkeypatch, ring_server):
    x = np.load(BLOCKS / "x.npy")
    steps = [awqd.Step("matmul", "gate", "gate", output_dtype="fp32"), awqd.Step("mlp", "blocks", "mlp.experts.*")]
    (logits, y), expected = both(monkeypatch, ring_server, lambda client: client.chain(steps, x, router=awqd.Router(1, 2)))
    np.testing.assert_array_equal(y, expected[1])
    with awqd.Client(ring_server.address) as client:
        np.testing.assert_array_equal(y, client.mlp("blocks", "mlp.experts.*", x, router=awqd.Router(logits, 2)))
    with awqd.Client(ring_server.address, ring=ring_server.ring_path) as client:
        with pytest.raises(awqd.InvalidArgument, match=r"steps\[0\].router.logits: got 1, expected 0 or an earlier step"):
            client.chain(steps[1:], x, router=awqd.Router(1, 2))


def test_chains_that_cannot_be(ring_server):
    with awqd.Client(ring_server.address, ring=ring_server.ring_path) as client:
        for steps, text in (([], "steps: got 0"), ([awqd.Step("matmul", MODEL, QUERY, x=1)], r"steps\[0\].x: got 1"),
                            ([awqd.Step("matmul", MODEL, QUERY, timeout=1)], r"steps\[0\].timeout"),
                            ([awqd.Step("dequantize", MODEL, QUERY)], r"steps\[0\]: got Step")):
            with pytest.raises(awqd.InvalidArgument, match=text):
                client.chain(steps, X)
        with pytest.raises(awqd.NotFound):
            client.chain([awqd.Step("matmul", MODEL, "no.such.weight")], X)
        with pytest.raises(awqd.InvalidArgument):
            client.chain([awqd.Step("matmul", MODEL, QUERY)], X[:, :100])
        for _ in range(600):  # steps that failed left no number behind
            with pytest.raises(awqd.NotFound):
                client.chain([awqd.Step("matmul", MODEL, QUERY), awqd.Step("matmul", MODEL, "none")], X)
        assert client.chain([awqd.Step("matmul", MODEL, QUERY)], X)[0].shape == X.shape


def test_tensors_of_torch(ring):
    torch = pytest.importorskip("torch")
    y = ring.matmul(MODEL, QUERY, torch.from_numpy(X))
    assert isinstance(y, torch.Tensor)
    np.testing.assert_array_equal(y.numpy(), ring.matmul(MODEL, QUERY, X))


def test_errors_are_those_of_messages(ring):
    with pytest.raises(awqd.NotFound):
        ring.matmul(MODEL, "no.such.weight", X)
    with pytest.raises(awqd.InvalidArgument) as caught:
        ring.matmul(MODEL, QUERY, X[:, :100])
    assert caught.value.field == "activations.shape"
    with pytest.raises(awqd.DeadlineExceeded):
        ring.matmul(MODEL, QUERY, X, timeout=0)
    assert ring.matmul(MODEL, QUERY, X, timeout=math.inf).shape == X.shape


def test_what_does_not_fit_is_a_message(ring_server):
    x = np.ones((4000, 384), np.float16)
    with awqd.Client(ring_server.address, ring=ring_server.ring_path) as client:
        assert client.matmul(MODEL, QUERY, x).shape == x.shape
        assert client.matmul(MODEL, QUERY, X, request_id="named").shape == X.shape


def test_threads_share_a_ring(ring):
    expected = ring.matmul(MODEL, QUERY, X[:1])
    wrong = []

    def call():
        for _ in range(50):
            if not np.array_equal(ring.matmul(MODEL, QUERY, X[:1]), expected):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(24)]  # more than it has slots
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_more_kinds_of_calls_than_are_kept(ring_server, monkeypatch):
    monkeypatch.setattr(_ring, "_MOST_PREPARED", 3)
    with awqd.Client(ring_server.address, ring=ring_server.ring_path) as client:
        for _ in range(2):
            for value in range(6):
                y = client.matmul(MODEL, QUERY, X[:1], bias=np.full(384, value, np.float32), output_dtype="fp32")
                base = client.matmul(MODEL, QUERY, X[:1], bias=np.zeros(384, np.float32), output_dtype="fp32")
                np.testing.assert_allclose(y, base + value, rtol=1e-5, atol=1e-5)


def run_async(ring_server, body, **options):
    async def whole():
        async with awqd.AsyncClient(ring_server.address, ring=ring_server.ring_path, **options) as client:
            return await body(client)
    return asyncio.run(whole())


def test_many_awaited_calls(ring_server):
    async def body(client):
        expected = [await client.matmul(MODEL, QUERY, X[i:i + 1]) for i in range(4)]
        for _ in range(5):  # more than it has slots
            got = await asyncio.gather(*(client.matmul(MODEL, QUERY, X[i % 4:i % 4 + 1]) for i in range(100)))
            for i, y in enumerate(got):
                np.testing.assert_array_equal(y, expected[i % 4])

    run_async(ring_server, body)


def test_the_loop_goes_on_while_calls_are_awaited(ring_server):
    x = np.ones((1200, 384), np.float16)  # fits a part of the payload

    async def body(client):
        expected = await client.matmul(MODEL, QUERY, x)
        server = ring_server.process
        server.send_signal(signal.SIGSTOP)  # so no call can be answered
        try:
            calls = [asyncio.create_task(client.matmul(MODEL, QUERY, x, timeout=30)) for _ in range(40)]
            for _ in range(200):
                await asyncio.sleep(0)
            assert not any(call.done() for call in calls)
        finally:
            server.send_signal(signal.SIGCONT)
        for call in calls:
            np.testing.assert_array_equal(await call, expected)

    run_async(ring_server, body)


def test_awaited_calls_that_are_cancelled_or_late(ring_server):
    async def body(client):
        expected = await client.matmul(MODEL, QUERY, X)
        for _ in range(50):
            tasks = [asyncio.create_task(client.matmul(MODEL, QUERY, X)) for _ in range(40)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            for i, y in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
                if i % 2 == 0:
                    assert isinstance(y, asyncio.CancelledError) or np.array_equal(y, expected)
                else:
                    np.testing.assert_array_equal(y, expected)
        with pytest.raises(awqd.DeadlineExceeded):
            await client.matmul(MODEL, QUERY, X, timeout=0)
        late = await asyncio.gather(*(client.matmul(MODEL, QUERY, X, timeout=1e-4) for _ in range(60)), return_exceptions=True)
        for y in late:  # or it was refused, because it would come too late
            assert isinstance(y, (awqd.DeadlineExceeded, awqd.ResourceExhausted, np.ndarray)), y
        np.testing.assert_array_equal(await client.matmul(MODEL, QUERY, X), expected)

    run_async(ring_server, body)


def test_a_client_closed_while_calls_are_awaited(ring_server):
    async def body(client):
        await client.matmul(MODEL, QUERY, X)
        tasks = [asyncio.create_task(client.matmul(MODEL, QUERY, X)) for _ in range(40)]
        await asyncio.sleep(0)
        await client.close()
        for y in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(y, (np.ndarray, awqd.Error)), y
        with pytest.raises(awqd.Error, match="closed"):
            await client.matmul(MODEL, QUERY, X)

    run_async(ring_server, body)


def test_a_server_that_starts_again_while_calls_are_awaited(tmp_path):
    path, address = tmp_path / "ring.sock", f"unix:{tmp_path / 'awqd.sock'}"

    async def body():
        async with awqd.AsyncClient(address, ring=str(path), attempts=1) as client:
            for kill in (False, True, False):
                server = Server(f"--ring_path={path}", f"--address={address}").__enter__()
                try:
                    expected = await client.matmul(MODEL, QUERY, X)
                    tasks = [asyncio.create_task(client.matmul(MODEL, QUERY, X)) for _ in range(60)]
                    await asyncio.sleep(0.001)
                    server.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
                    for y in await asyncio.gather(*tasks, return_exceptions=True):
                        assert isinstance(y, awqd.Unavailable) or np.array_equal(y, expected), y
                finally:
                    server.process.wait(30)
                with pytest.raises(awqd.Unavailable):
                    await client.matmul(MODEL, QUERY, X)

    asyncio.run(body())


def test_a_call_that_takes_longer_than_a_look(ring_server, monkeypatch):
    """A look whether the server lives waits for nothing, and holds up no other thread."""
    monkeypatch.setattr(_ring, "_LOOK_S", 1e-5)
    x = np.ones((1200, 384), np.float16)
    with awqd.Client(ring_server.address, ring=ring_server.ring_path) as client:
        expected = client.matmul(MODEL, QUERY, x)
        begin = time.monotonic()
        for _ in range(20):
            np.testing.assert_array_equal(client.matmul(MODEL, QUERY, x, timeout=30), expected)
        assert time.monotonic() - begin < 25


def test_a_server_without_rings(server):
    with awqd.Client(server.address, ring=True) as client, pytest.raises(awqd.FailedPrecondition, match="ring_path"):
        client.matmul(MODEL, QUERY, X)
    with awqd.Client(server.address, ring="/nowhere") as client, pytest.raises(awqd.Unavailable, match="/nowhere"):
        client.matmul(MODEL, QUERY, X)


def test_settings_that_cannot_work():
    for client in (awqd.Client, awqd.AsyncClient):
        with pytest.raises(awqd.InvalidArgument, match="ring: got one for 'example.org:8001', expected a server on this machine"):
            client("example.org:8001", ring=True)


def test_a_server_that_starts_again(tmp_path):
    path, address = tmp_path / "ring.sock", f"unix:{tmp_path / 'awqd.sock'}"
    with awqd.Client(address, ring=str(path)) as client:
        for _ in range(2):
            with Server(f"--ring_path={path}", f"--address={address}"):
                assert client.matmul(MODEL, QUERY, X).shape == X.shape
            with pytest.raises(awqd.Unavailable):
                client.matmul(MODEL, QUERY, X)


def test_a_server_that_is_killed(tmp_path):
    path, address = tmp_path / "ring.sock", f"unix:{tmp_path / 'awqd.sock'}"
    options = (f"--ring_path={path}", f"--address={address}")
    with awqd.Client(address, ring=str(path), attempts=1) as client:
        with pytest.raises(AssertionError), Server(*options) as running:  # it does not end well
            assert client.matmul(MODEL, QUERY, X).shape == X.shape
            running.process.kill()
            running.process.wait()
            with pytest.raises(awqd.Unavailable):
                client.matmul(MODEL, QUERY, X)
        with Server(*options):
            assert client.matmul(MODEL, QUERY, X).shape == X.shape
