"""Memory of the driver's own (VMM), shared by a ring with a server that has a CPU pass for a GPU, through a fake of the driver."""
import asyncio
import ctypes
import os
import pathlib

import numpy as np
import pytest

import awqd
from awqd import _device, _ring
from device_test import OnGpu
from ring_test import MODEL, QUERY, X
from server import Server

BUILD = pathlib.Path(os.environ["AWQD_BUILD"])
UP = QUERY.replace("attention.self.query", "intermediate.dense")


@pytest.fixture(scope="module")
def cuda():
    """The fake, which is libcuda.so.1 from now on."""
    library = ctypes.CDLL(str(BUILD / "tests/testing/libawqd_fake_cuda.so"))
    _device.driver.cache_clear()
    yield library
    _device.driver.cache_clear()


@pytest.fixture(scope="module")
def gpu_server(tmp_path_factory, cuda):
    path = tmp_path_factory.mktemp("ring") / "ring.sock"
    with Server(f"--ring_path={path}", "--cuda_shared_memory", program=BUILD / "tests/client/python/awqd_fake_gpu") as running:
        running.ring_path = str(path)
        yield running


@pytest.fixture
def client(gpu_server):
    with awqd.Client(gpu_server.address, ring=gpu_server.ring_path) as made:
        yield made


def allocate(cuda, shape, dtype=np.float16, pieces=1):
    """An array of zeros in `pieces` of memory that follow each other."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    size = ctypes.c_size_t(-(-nbytes // pieces // 4096) * 4096)
    address = ctypes.c_uint64()
    cuda.cuMemAddressReserve(ctypes.byref(address), ctypes.c_size_t(size.value * pieces), ctypes.c_size_t(0), ctypes.c_uint64(0),
                             ctypes.c_ulonglong(0))
    for i in range(pieces):
        handle = ctypes.c_uint64()
        assert cuda.cuMemCreate(ctypes.byref(handle), size, None, ctypes.c_ulonglong(0)) == 0
        assert cuda.cuMemMap(ctypes.c_uint64(address.value + i * size.value), size, ctypes.c_size_t(0), handle,
                             ctypes.c_ulonglong(0)) == 0
        cuda.cuMemRelease(handle)
    return OnGpu(np.frombuffer((ctypes.c_char * nbytes).from_address(address.value), dtype).reshape(shape))


def part(array, begin, end):
    return OnGpu(array.array[begin:end])


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_products_have_the_bits_of_messages(gpu_server, client, cuda):
    with awqd.Client(gpu_server.address) as plain:
        expected = plain.matmul(MODEL, UP, X)
    x, y = allocate(cuda, (16, 384)), allocate(cuda, (24, 1536))
    tokens = len(X)
    x.array[3:3 + tokens] = X
    execution = awqd.Execution()
    with client.register(x), client.register(part(y, 2, 24)):
        for i in range(3):
            out = part(y, 3 + i, 3 + i + tokens)
            assert client.matmul(MODEL, UP, part(x, 3, 3 + tokens), out=out, execution=execution) is out
            np.testing.assert_array_equal(out.array, expected)
            assert not y.array[:3 + i].any() and not y.array[3 + i + tokens:].any() and execution.batch_tokens == tokens
            out.array[:] = 0
        # By messages, whose request_id rules the ring out; and with one of both there.
        out = part(y, 4, 4 + tokens)
        client.matmul(MODEL, UP, part(x, 3, 3 + tokens), out=out, request_id="named")
        np.testing.assert_array_equal(out.array, expected)
        np.testing.assert_array_equal(client.matmul(MODEL, UP, part(x, 3, 3 + tokens)), expected)
        out.array[:] = 0
        client.matmul(MODEL, UP, X, out=out)
        np.testing.assert_array_equal(out.array, expected)
    with pytest.raises(awqd.InvalidArgument, match="a registered one"):
        client.matmul(MODEL, UP, part(x, 3, 3 + tokens))


def test_regions_end_at_the_server(client, cuda):
    region = client.register(allocate(cuda, (4, 384)))
    ring = client._calls._ring
    assert "bytes on cpu" in repr(region) and "closed" not in repr(region)
    region.close()
    assert "closed" in repr(region)
    with pytest.raises(awqd.NotFound, match="expected one that this ring shares"):
        ring._exchange(_ring._UNSHARE, 0, region.name.encode())
    ring.unshare(region.name)  # has ended
    others = [client.register(allocate(cuda, (4, 384))) for _ in range(3)]
    client.close()
    assert all("closed" in repr(each) for each in others)


def test_early_answers(gpu_server, client, cuda):
    with awqd.Client(gpu_server.address) as plain:
        expected = plain.matmul(MODEL, QUERY, X)
    tokens = len(X)
    x, y = allocate(cuda, X.shape), allocate(cuda, (2 * tokens, 384))
    x.array[:] = X
    records, waits = cuda.fakeRecords(), cuda.fakeWaits()
    with client.register(x), client.register(y, early_answers=True):
        for i in range(20):
            out = part(y, i % tokens, i % tokens + tokens)
            options = {"request_id": "named"} if i % 2 else {}  # which is a message
            assert client.matmul(MODEL, QUERY, x, out=out, **options) is out
            np.testing.assert_array_equal(out.array, expected)
            assert (cuda.fakeRecords() - records, cuda.fakeWaits() - waits) == (i + 1, i + 1)
            y.array[:] = 0
        with pytest.raises(awqd.InvalidArgument, match="out: got the shape"):
            client.matmul(MODEL, QUERY, x, out=part(y, 0, 1))
        with pytest.raises(awqd.NotFound):
            client.matmul(MODEL, "no.such.weight", x, out=part(y, 0, tokens))
        client.matmul(MODEL, QUERY, X, out=part(y, 0, tokens))  # from the host; it goes on after errors
        np.testing.assert_array_equal(y.array[:tokens], expected)
        assert cuda.fakeWaits() - waits == 21


def test_awaited(gpu_server, cuda):
    x, ys = allocate(cuda, X.shape), [allocate(cuda, (len(X), 384)) for _ in range(12)]
    x.array[:] = X

    async def body():
        async with awqd.AsyncClient(gpu_server.address, ring=gpu_server.ring_path) as client:
            await client.register(x)
            regions = await asyncio.gather(*(client.register(y, early_answers=i % 2 == 0) for i, y in enumerate(ys)))
            for _ in range(3):
                await asyncio.gather(*(client.matmul(MODEL, QUERY, x, out=y) for y in ys))
            regions[1].close()
            return await client.matmul(MODEL, QUERY, X)

    expected = asyncio.run(body())
    for y in ys:
        np.testing.assert_array_equal(y.array, expected)


def test_memory_that_cannot_be_shared(gpu_server, client, cuda):
    x = allocate(cuda, (8, 1024), pieces=2)
    client.register(part(x, 0, 4)).close()
    files = open_files()
    with pytest.raises(awqd.InvalidArgument, match="goes on after the 8192 bytes of its piece") as raised:
        client.register(x)
    assert "expandable_segments" in raised.value.hint
    with pytest.raises(awqd.FailedPrecondition, match="cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE") as raised:
        client.register(OnGpu(np.zeros(4, np.float16)))
    assert "cudaMallocAsync" in raised.value.hint
    with awqd.Client(gpu_server.address) as plain, pytest.raises(awqd.FailedPrecondition, match="by a ring alone") as raised:
        plain.register(part(x, 0, 4))
    assert "ring=True" in raised.value.hint
    del raised
    with client.register(part(x, 0, 4)), client.register(part(x, 4, 8)):
        assert open_files() == files  # descriptors went with their requests, or their regions


def test_a_server_without_gpus_says_so_by_its_ring(cuda, tmp_path):
    with Server(f"--ring_path={tmp_path / 'ring.sock'}") as running, awqd.Client(f"unix:{running.socket}", ring=True) as client:
        with pytest.raises(awqd.Unimplemented, match="--cuda_shared_memory"):
            client.register(allocate(cuda, (4, 384)))
        assert client.matmul(MODEL, QUERY, X).shape == X.shape


def test_a_server_that_is_gone_has_no_regions(cuda, tmp_path):
    path, address = tmp_path / "ring.sock", f"unix:{tmp_path / 'awqd.sock'}"
    program = BUILD / "tests/client/python/awqd_fake_gpu"
    x = allocate(cuda, X.shape)
    x.array[:] = X
    with awqd.Client(address, ring=str(path)) as client:
        with Server(f"--ring_path={path}", f"--address={address}", "--cuda_shared_memory", program=program):
            region = client.register(x)
            assert client.matmul(MODEL, QUERY, x).shape == X.shape
        with Server(f"--ring_path={path}", f"--address={address}", "--cuda_shared_memory", program=program):
            with pytest.raises(awqd.InvalidArgument, match="activations.shared_memory.region"):
                client.matmul(MODEL, QUERY, x)
            region.close()
            with client.register(x):
                np.testing.assert_array_equal(client.matmul(MODEL, QUERY, x), client.matmul(MODEL, QUERY, X))
