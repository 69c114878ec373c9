"""Memory of GPUs that a server on this machine reads and writes: exported by CUDA IPC or as descriptors, by the driver alone."""
from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from awqd import _arrays, _errors
from awqd.v1 import inference_pb2 as inference
from awqd.v1 import tensor_pb2 as tensors

_CUDA = 2  # kDLCUDA
_KINDS = {(0, 8): "int8", (0, 32): "int32", (1, 8): "uint8", (2, 16): "float16", (2, 32): "float32", (4, 16): "bfloat16"}
_EVENT_FLAGS = 2 | 4  # no timing, interprocess
_ORDINAL, _MAPPING_SIZE, _MAPPING_BASE = 9, 18, 19  # attributes of a pointer
_FILE_DESCRIPTOR = 1  # a kind of handle
_UNSHARED = ("CUDA shares memory of cudaMalloc (PyTorch without expandable_segments), and by the ring memory of cuMemCreate that "
             "was made for file descriptors; none of cudaMallocAsync")


class DeviceArray(NamedTuple):
    """A contiguous array in memory of a GPU."""

    dtype: Any  # the API's number
    shape: tuple[int, ...]
    pointer: int
    stream: int  # that of the work that makes or reads it; 0: the default one

    @property
    def spec(self) -> _arrays.Spec:
        """Without its bytes."""
        return _arrays.Spec(self.dtype, self.shape, memoryview(b""))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _arrays.ITEMSIZE[self.dtype]


class _DlTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


def is_on_device(array: Any) -> bool:
    """Whether it is an array in memory of a GPU, of PyTorch or with __dlpack__."""
    if _arrays.is_torch(array):
        on_gpu: bool = array.is_cuda
        return on_gpu
    device = getattr(array, "__dlpack_device__", None)
    return device is not None and device()[0] == _CUDA


def describe(array: Any, field: str) -> DeviceArray:
    """InvalidArgument unless it is contiguous and of a dtype that travels."""
    if _arrays.is_torch(array):
        import torch
        if not array.is_contiguous():
            raise _errors.InvalidArgument(f"{field}: got a tensor in pieces, expected a contiguous one", field=field)
        stream = torch.cuda.current_stream(array.device).cuda_stream
        return DeviceArray(_arrays.dtype_of(array.dtype, f"{field}.dtype"), tuple(array.shape), array.data_ptr(), stream)
    capsule = array.__dlpack__(stream=-1)  # whoever makes the call waits, on the GPU
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = ctypes.cast(get(capsule, b"dltensor"), ctypes.POINTER(_DlTensor)).contents
    shape = tuple(tensor.shape[:tensor.ndim])
    name = _KINDS.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if name is None:
        raise _errors.InvalidArgument(f"{field}.dtype: got a type of DLPack {tensor.code}/{tensor.bits}, expected fp16, bf16, "
                                      "fp32, int8, uint8 or int32", field=field)
    steps = [math.prod(shape[i + 1:]) for i in range(len(shape))]
    if tensor.strides and any(size > 1 and stride != step
                              for size, stride, step in zip(shape, tensor.strides[:tensor.ndim], steps)):
        raise _errors.InvalidArgument(f"{field}: got an array in pieces, expected a contiguous one", field=field)
    interface = getattr(array, "__cuda_array_interface__", {})
    return DeviceArray(_arrays.dtype_of(name, field), shape, (tensor.data or 0) + tensor.byte_offset,
                       interface.get("stream") or 0)


def describe_out(array: Any) -> DeviceArray:
    if not is_on_device(array):
        raise _errors.InvalidArgument("out: got an array on the CPU, expected one in memory of a GPU", field="out")
    return describe(array, "out")


class Descriptor:
    """A file descriptor, closed when nothing uses this any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class Exported(NamedTuple):
    """How another process maps memory of a GPU: by a handle of CUDA IPC, or by a descriptor of the driver's own memory (VMM)."""

    gpu: int  # its number in this process
    bus_id: str
    offset: int  # of the array in the allocation
    handle: bytes  # empty: there is a descriptor
    descriptor: Descriptor | None


class Driver:
    """The calls of the CUDA driver that sharing memory takes. Contexts are primary ones, as those of the CUDA runtime."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._lock = threading.Lock()
        self._contexts: dict[int, ctypes.c_void_p] = {}  # by GPU; kept, as the runtime keeps them

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(error, ctypes.byref(text))
            raise _errors.FailedPrecondition(f"{name}: {(text.value or b'').decode() or error}")

    def _attribute(self, kind: int, value: Any, pointer: int) -> int:
        self._call("cuPointerGetAttribute", ctypes.byref(value), kind, ctypes.c_uint64(pointer))
        return int(value.value)

    @contextmanager
    def _current(self, gpu: int) -> Iterator[None]:
        """Makes the GPU's context current."""
        ignored = ctypes.c_void_p()
        with self._lock:
            if gpu not in self._contexts:
                context = ctypes.c_void_p()
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
                self._contexts[gpu] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[gpu])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ignored))

    def export(self, pointer: int, size: int) -> Exported:
        """FailedPrecondition for memory that CUDA does not share; InvalidArgument for memory in several pieces."""
        gpu, bus = self._attribute(_ORDINAL, ctypes.c_int(), pointer), ctypes.create_string_buffer(32)
        with self._current(gpu):
            self._call("cuDeviceGetPCIBusId", bus, 32, gpu)
            bus_id = bus.value.decode()
            base, ignored, handle = ctypes.c_uint64(), ctypes.c_size_t(), (ctypes.c_char * 64)()
            try:
                self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(ignored), ctypes.c_uint64(pointer))
                self._call("cuIpcGetMemHandle", handle, base)
            except _errors.FailedPrecondition as error:
                try:
                    descriptor, offset = self._export_descriptor(pointer, size)
                except _errors.FailedPrecondition:
                    error.hint = _UNSHARED
                    raise error from None
                return Exported(gpu, bus_id, offset, b"", descriptor)
            return Exported(gpu, bus_id, pointer - base.value, handle.raw, None)

    def _export_descriptor(self, pointer: int, size: int) -> tuple[Descriptor, int]:
        """A descriptor of the allocation that is mapped there, and the pointer's offset in it."""
        base = self._attribute(_MAPPING_BASE, ctypes.c_uint64(), pointer)
        piece = self._attribute(_MAPPING_SIZE, ctypes.c_size_t(), pointer)
        if pointer + size > base + piece:
            raise _errors.InvalidArgument(
                f"array: got memory that goes on after the {piece} bytes of its piece, expected it in one piece", field="array",
                hint="PyTorch with expandable_segments maps pieces of 2 and 20 MiB: register smaller arrays, or allocate this one "
                     "without")
        handle, descriptor = ctypes.c_uint64(), ctypes.c_int(-1)
        self._call("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        try:
            self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _FILE_DESCRIPTOR, ctypes.c_ulonglong(0))
        finally:
            self._library.cuMemRelease(handle)
        return Descriptor(descriptor.value), pointer - base

    def make_event(self, gpu: int) -> tuple[int, bytes]:
        """An event of the GPU, and its handle."""
        event, handle = ctypes.c_void_p(), (ctypes.c_char * 64)()
        with self._current(gpu):
            self._call("cuEventCreate", ctypes.byref(event), _EVENT_FLAGS)
            self._call("cuIpcGetEventHandle", handle, event)
        return event.value or 0, handle.raw

    def record(self, gpu: int, event: int, stream: int) -> None:
        """Another process that waits for the event waits for the work that the stream has now."""
        with self._current(gpu):
            self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait(self, gpu: int, event: int, stream: int) -> None:
        """What the stream gets from now on waits for what the event has recorded."""
        with self._current(gpu):
            self._call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)

    def destroy(self, event: int) -> None:
        self._library.cuEventDestroy_v2(ctypes.c_void_p(event))


@functools.lru_cache(maxsize=1)
def driver() -> Driver:
    return Driver()


class Region:
    """An array in memory of a GPU that the server may read and write, until close() or the end of the `with`.

    It and its slices may be x and out of matmul, grouped_matmul and mlp. It is kept alive as long.
    """

    def __init__(self, array: Any, what: DeviceArray, early_answers: bool) -> None:
        self.name = uuid.uuid4().hex
        self.array = array
        self._begin, self._end = what.pointer, what.pointer + what.nbytes
        self._driver = driver()
        self._exported = self._driver.export(what.pointer, what.nbytes)
        self._events: list[int] = []
        try:
            self._ready = self._make_event()
            self._finished = self._make_event() if early_answers else None
        except BaseException:
            self._free()
            raise
        self._written = threading.Lock()  # held while a call with an early answer writes to it
        self._stop: Callable[[], object] | None = None  # ends it at the server
        self._forget: Callable[[Region], None] | None = None

    def _make_event(self) -> tuple[int, bytes]:
        made = self._driver.make_event(self._exported.gpu)
        self._events.append(made[0])
        return made

    def _request(self) -> inference.ShareMemoryRequest:
        finished = self._finished or (0, b"")
        return inference.ShareMemoryRequest(
            region=self.name, device=self._exported.bus_id, cuda_ipc_memory=self._exported.handle, offset=self._exported.offset,
            size=self._end - self._begin, ready_event=self._ready[1], finished_event=finished[1],
            early_answers=self._finished is not None)

    def _record(self, array: DeviceArray) -> None:
        """The server waits for the work that makes the array, or reads what was in it."""
        self._driver.record(self._exported.gpu, self._ready[0], array.stream)

    @contextmanager
    def _receive(self, array: DeviceArray) -> Iterator[None]:
        """Around a call that writes to the array: where its answer is early, the array's stream waits for the result."""
        if self._finished is None:
            yield
            return
        # The event is one, and says of the last result alone that it is there.
        if not self._written.acquire(blocking=False):
            raise _errors.FailedPrecondition(
                "out: got a part of an array that another call writes to, expected one call at a time with early_answers",
                hint="register parts by themselves; and after a call that was given up, close() the region and register it again")
        try:
            yield
            self._driver.wait(self._exported.gpu, self._finished[0], array.stream)
        except (_errors.DeadlineExceeded, _errors.Cancelled, _errors.Unavailable):
            raise  # it may still write there
        except _errors.Error:
            self._written.release()
            raise
        self._written.release()

    def _holds(self, array: DeviceArray) -> bool:
        return self._begin <= array.pointer and array.pointer + array.nbytes <= self._end

    def _range(self, array: DeviceArray) -> tensors.SharedMemory:
        return tensors.SharedMemory(region=self.name, offset=array.pointer - self._begin, size=array.nbytes)

    def _free(self) -> None:
        """What it holds here. The server has its own."""
        while self._events:
            self._driver.destroy(self._events.pop())

    def close(self) -> None:
        forget, self._forget = self._forget, None
        if forget is not None and self._stop is not None:
            forget(self)
            self._stop()
            self._free()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Region({self._end - self._begin} bytes on {self._exported.bus_id}{'' if self._forget else ', closed'})"


class Regions:
    """Those of one client. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Region] = []

    def add(self, region: Region, stop: Callable[[], object]) -> None:
        """stop: ends it at the server, which has it now."""
        region._exported = region._exported._replace(descriptor=None)
        region._stop, region._forget = stop, self._remove
        with self._lock:
            self._all.append(region)

    def _remove(self, region: Region) -> None:
        with self._lock:
            if region in self._all:
                self._all.remove(region)

    def find(self, array: DeviceArray, field: str) -> Region:
        with self._lock:
            for region in self._all:
                if region._holds(array):
                    return region
        raise _errors.InvalidArgument(f"{field}: got an array of a GPU that the server may not access, expected a registered one",
                                      field=field, hint="client.register(array) once, and keep it; or bring it to the CPU")

    def close(self) -> None:
        with self._lock:
            regions = list(self._all)
        for region in regions:
            region.close()
