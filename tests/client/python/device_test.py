"""Arrays in memory of GPUs: what is sent for them, with a driver that plays the GPU's part."""
import ctypes
import gc

import numpy as np
import pytest

import awqd
from awqd import _device, _ring
from awqd.v1 import inference_pb2 as inference
from awqd.v1 import tensor_pb2 as tensors


class OnGpu:
    """An array of NumPy that says it is in memory of a GPU."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()

    @property
    def pointer(self):
        return self.array.ctypes.data


class FakeDriver:
    """Allocations begin 512 bytes before what is exported, on GPU 3."""

    def __init__(self):
        self.recorded, self.waited, self.destroyed = [], [], []
        self.events = 6

    def export(self, pointer, size):
        return _device.Exported(3, "0000:1B:00.0", 512, b"m" * 64, None)

    def make_event(self, gpu):
        assert gpu == 3
        self.events += 1
        return self.events, bytes([self.events]) * 64

    def record(self, gpu, event, stream):
        self.recorded.append((gpu, event, stream))

    def wait(self, gpu, event, stream):
        self.waited.append((gpu, event, stream))

    def destroy(self, event):
        self.destroyed.append(event)


class Call:
    cancelled = False

    def cancel(self):
        self.cancelled = True


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(_device, "driver", lambda: fake)
    return fake


@pytest.fixture
def calls(client):
    return client._calls


def register(calls, array, **options):
    steps = calls.register(array, **options)
    rpc = next(steps)
    call = Call()
    with pytest.raises(StopIteration) as stop:
        steps.send(call)
    return rpc, call, stop.value.value


def test_a_region_is_told_once(calls, driver):
    rpc, call, region = register(calls, OnGpu(np.zeros((4, 384), np.float16)))
    assert rpc.kind == "unary_stream" and rpc.method.endswith("/ShareMemory")
    request = inference.ShareMemoryRequest.FromString(rpc.request)
    assert request == inference.ShareMemoryRequest(
        region=region.name, device="0000:1B:00.0", cuda_ipc_memory=b"m" * 64, offset=512, size=4 * 384 * 2,
        ready_event=b"\7" * 64)
    region.close()
    assert call.cancelled and driver.destroyed == [7]
    region.close()
    assert driver.destroyed == [7]


def test_products_name_regions(calls, driver):
    x, y = OnGpu(np.zeros((8, 384), np.float16)), OnGpu(np.zeros((8, 1536), np.float32))
    _, _, in_region = register(calls, x)
    _, _, out_region = register(calls, y)
    part, out = OnGpu(x.array[2:4]), OnGpu(y.array[4:6])
    execution = awqd.Execution()
    steps = calls.matmul("m", "w", part, out=out, execution=execution)
    request = inference.QuantizedMatmulRequest.FromString(next(steps).request)
    assert request.activations == tensors.Tensor(dtype=tensors.FP16, shape=[2, 384], shared_memory=tensors.SharedMemory(
        region=in_region.name, offset=2 * 384 * 2, size=2 * 384 * 2))
    assert request.output_shared_memory == tensors.SharedMemory(
        region=out_region.name, offset=4 * 1536 * 4, size=2 * 1536 * 4)
    assert request.output_dtype == tensors.FP32 and driver.recorded == [(3, 7, 0)]
    answer = inference.QuantizedMatmulResponse(
        output=tensors.Tensor(dtype=tensors.FP32, shape=[2, 1536], shared_memory=request.output_shared_memory),
        execution=tensors.Execution(kernel="k"))
    with pytest.raises(StopIteration) as stop:
        steps.send(answer.SerializeToString())
    assert stop.value.value is out and execution.kernel == "k"


def answered(request, columns, **tensor):
    output = tensors.Tensor(dtype=tensors.FP32, shape=[*request.activations.shape[:-1], columns], **tensor)
    return inference.QuantizedMatmulResponse(output=output).SerializeToString()


def test_the_stream_waits_where_answers_are_early(calls, driver):
    y = OnGpu(np.zeros((8, 1536), np.float32))
    rpc, _, region = register(calls, y, early_answers=True)
    request = inference.ShareMemoryRequest.FromString(rpc.request)
    assert request.early_answers and (request.ready_event, request.finished_event) == (b"\7" * 64, b"\x08" * 64)
    x, out = np.zeros((2, 384), np.float16), OnGpu(y.array[4:6])
    steps = calls.matmul("m", "w", x, out=out)
    request = inference.QuantizedMatmulRequest.FromString(next(steps).request)
    assert (driver.recorded, driver.waited) == ([(3, 7, 0)], [])  # what still reads y is waited for
    with pytest.raises(awqd.FailedPrecondition, match="another call writes to"):
        next(calls.matmul("m", "w", x, out=y))
    with pytest.raises(StopIteration):
        steps.send(answered(request, 1536))
    assert driver.waited == [(3, 8, 0)]
    for error in (awqd.NotFound("no"), awqd.DeadlineExceeded("late")):
        steps = calls.matmul("m", "w", x, out=out)
        next(steps)
        with pytest.raises(type(error)):
            steps.throw(error)
    assert driver.waited == [(3, 8, 0)]
    with pytest.raises(awqd.FailedPrecondition, match="one call at a time") as raised:  # the late one may still write
        next(calls.matmul("m", "w", x, out=out))
    assert "close() the region" in raised.value.hint
    region.close()
    assert sorted(driver.destroyed) == [7, 8]


def test_what_cannot_work_is_said_before_anything_is_sent(calls, driver):
    x = OnGpu(np.zeros((2, 384), np.float16))
    with pytest.raises(awqd.InvalidArgument, match="activations: got an array of a GPU that the server may not access") as raised:
        next(calls.matmul("m", "w", x))
    assert "client.register" in raised.value.hint
    with pytest.raises(awqd.InvalidArgument, match="array: got one on the CPU"):
        next(calls.register(x.array))
    with pytest.raises(awqd.InvalidArgument, match="out: got an array on the CPU"):
        next(calls.matmul("m", "w", x.array, out=x.array))
    with pytest.raises(awqd.InvalidArgument, match="in pieces"):
        next(calls.register(OnGpu(np.zeros((4, 384), np.float16)[:, ::2])))
    with pytest.raises(awqd.InvalidArgument, match="a type of DLPack"):
        next(calls.register(OnGpu(np.zeros(4, np.float64))))
    _, _, region = register(calls, x)
    region.close()
    with pytest.raises(awqd.InvalidArgument, match="a registered one"):
        next(calls.matmul("m", "w", x))


def test_a_wrong_shape_of_out_is_told(calls, driver):
    y = OnGpu(np.zeros((2, 1537), np.float16))
    register(calls, y)
    steps = calls.matmul("m", "w", np.zeros((2, 384), np.float16), out=y)
    next(steps)
    answer = inference.QuantizedMatmulResponse(output=tensors.Tensor(dtype=tensors.FP16, shape=[2, 1536]))
    with pytest.raises(awqd.InvalidArgument, match=r"out: got the shape \[2, 1537\], expected \[2, 1536\]"):
        steps.send(answer.SerializeToString())


def test_regions_end_with_the_client(server, driver):
    with awqd.Client(server.address) as made:
        _, call, region = register(made._calls, OnGpu(np.zeros(4, np.float16)))
    assert call.cancelled and "closed" in repr(region)


def test_the_memory_of_an_array_is_described_as_it_is():
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    what = _device.describe(OnGpu(array[1:]), "x")
    assert (what.shape, what.pointer, what.nbytes) == ((2, 4), array.ctypes.data + 16, 32)
    assert ctypes.cast(what.pointer, ctypes.POINTER(ctypes.c_int32))[0] == 4
    gc.collect()
    assert array[1, 0] == 4


def test_a_server_without_gpus_says_so(client, driver):
    with pytest.raises(awqd.Unimplemented, match="--cuda_shared_memory"):
        client.register(OnGpu(np.zeros(4, np.float16)))


def test_a_ring_is_given_offsets(calls, driver, monkeypatch):
    class FakeRing:
        ran = []

        def usable(self):
            return True

        def find(self, key):
            self.key = key
            return _ring.Prepared(5, 1536 * 2, 1536, tensors.FP16)

        def done(self, prepared):
            pass

        def run(self, prepared, tokens, inputs, timeout):
            self.ran.append((prepared.number, tokens, inputs.x, inputs.places))
            return b"", awqd.Execution(kernel="k")

    ring = FakeRing()
    monkeypatch.setattr(calls, "_ring_path", "ring.sock")
    monkeypatch.setattr(calls, "_ring", ring)
    x, y = OnGpu(np.zeros((8, 384), np.float16)), OnGpu(np.zeros((8, 1536), np.float16))
    _, _, in_region = register(calls, x)
    _, _, out_region = register(calls, y)
    out = OnGpu(y.array[4:6])
    steps = calls.matmul("m", "w", OnGpu(x.array[2:4]), out=out)
    result = next(steps).run()
    with pytest.raises(StopIteration) as stop:
        steps.send(result)
    assert stop.value.value is out
    assert ring.ran == [(5, 2, None, (2 * 384 * 2, 4 * 1536 * 2))]
    template = inference.QuantizedMatmulRequest.FromString(ring.key[1])
    assert template.activations.shared_memory == tensors.SharedMemory(region=in_region.name)
    assert template.output_shared_memory == tensors.SharedMemory(region=out_region.name)
    assert list(template.activations.shape) == [384] and template.output_dtype == tensors.FP16
    with pytest.raises(awqd.InvalidArgument, match=r"out: got the shape \[1, 1536\], expected \[2, 1536\]"):
        next(calls.matmul("m", "w", OnGpu(x.array[2:4]), out=OnGpu(y.array[:1])))
