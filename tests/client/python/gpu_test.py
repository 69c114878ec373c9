"""Tensors of PyTorch in memory of a GPU, of both kinds, with early answers; on a GPU machine, by tests/gpu/run.sh."""
import os
import threading

import numpy as np
import pytest

import awqd
from ring_test import MODEL, QUERY, X
from server import Server

DEVICE = os.environ.get("AWQD_TEST_DEVICE", "")
if not DEVICE.startswith("cuda:"):
    pytest.skip("needs AWQD_TEST_DEVICE with a GPU", allow_module_level=True)
torch = pytest.importorskip("torch", reason="needs PyTorch")
UP = QUERY.replace("attention.self.query", "intermediate.dense")
KINDS = {"cudaMalloc": "expandable_segments:False", "cuMemCreate": "expandable_segments:True"}


@pytest.fixture(scope="module")
def gpu_server(tmp_path_factory):
    path = tmp_path_factory.mktemp("ring") / "ring.sock"
    with Server(f"--ring_path={path}", "--cuda_shared_memory", "--batch_invariant", device=DEVICE) as running:
        running.ring_path = str(path)
        yield running


@pytest.fixture
def client(gpu_server):
    with awqd.Client(gpu_server.address, ring=gpu_server.ring_path) as made:
        yield made


@pytest.fixture(params=KINDS)
def empty(request):
    """Allocates FP16 in memory of one kind."""
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings(KINDS[request.param])
    yield lambda *shape: torch.empty(shape, dtype=torch.float16, device=DEVICE)
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")


@pytest.mark.parametrize("early_answers", [False, True])
def test_products_have_the_bits_of_messages(client, empty, early_answers):
    expected = torch.from_numpy(client.matmul(MODEL, UP, X)).to(DEVICE)
    x, y = empty(64, 384), empty(64, 1536)
    x[8:8 + len(X)] = torch.from_numpy(X)
    with client.register(x), client.register(y, early_answers=early_answers):
        for options in ({}, {"request_id": "named"}):  # the second is a message
            for i in range(50):
                y.fill_(torch.nan)
                client.matmul(MODEL, UP, x[8:8 + len(X)], out=y[i % 8:i % 8 + len(X)], **options)
                assert torch.equal(y[i % 8:i % 8 + len(X)], expected), i
                assert y[i % 8 + len(X):].isnan().all()


@pytest.mark.parametrize("early_answers", [False, True])
def test_streams_are_waited_for_on_both_sides(client, empty, early_answers):
    """x is written, and y read, by long work that is queued when the calls are made."""
    expected = torch.from_numpy(client.matmul(MODEL, UP, X)).to(DEVICE)
    own, x, y, busy = torch.from_numpy(X).to(DEVICE), empty(*X.shape), empty(len(X), 1536), torch.ones(4096, 4096, device=DEVICE)
    stream = torch.cuda.Stream(DEVICE)
    with client.register(x), client.register(y, early_answers=early_answers), torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(DEVICE))
        kept = []
        for i in range(20):
            x.zero_()
            for _ in range(10):
                busy @ busy
            x.copy_(own)
            client.matmul(MODEL, UP, x if i % 2 else X, out=y)
            for _ in range(10):
                busy @ busy
            kept.append(y.clone())
        stream.synchronize()
    for i, got in enumerate(kept):
        assert torch.equal(got, expected), i


def test_threads_with_early_answers(client, empty):
    expected = torch.from_numpy(client.matmul(MODEL, QUERY, X)).to(DEVICE)
    wrong = []

    def call():
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            x, y = empty(*X.shape), empty(len(X), 384)
            x.copy_(torch.from_numpy(X))
            with client.register(x), client.register(y, early_answers=True):
                for _ in range(200):
                    y.fill_(torch.nan)
                    client.matmul(MODEL, QUERY, x, out=y)
                    wrong.extend([1] * (not torch.equal(y, expected)))

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_pieces(client):
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings(KINDS["cuMemCreate"])
    try:
        with pytest.raises(awqd.InvalidArgument, match="goes on after the"):
            client.register(torch.empty(32 << 20, dtype=torch.float16, device=DEVICE))
    finally:
        torch.cuda.memory._set_allocator_settings(KINDS["cudaMalloc"])


def test_a_client_without_a_ring(gpu_server):
    y = torch.zeros(len(X), 384, dtype=torch.float16, device=DEVICE)
    with awqd.Client(gpu_server.address) as client, client.register(y, early_answers=True):
        client.matmul(MODEL, QUERY, X, out=y)
        np.testing.assert_array_equal(y.cpu().numpy(), client.matmul(MODEL, QUERY, X))
