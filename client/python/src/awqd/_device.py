"""Memory of GPUs that a server on this machine reads and writes: exported by CUDA IPC, through the driver alone."""
from __future__ import annotations

import ctypes
import functools
import math
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from awqd import _arrays, _errors
from awqd.v1 import tensor_pb2 as tensors

_CUDA = 2  # kDLCUDA
_KINDS = {(0, 8): "int8", (0, 32): "int32", (1, 8): "uint8", (2, 16): "float16", (2, 32): "float32", (4, 16): "bfloat16"}
_EVENT_FLAGS = 2 | 4  # no timing, interprocess
_ORDINAL, _CONTEXT = 9, 1  # attributes of a pointer


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


class Driver:
    """The calls of the CUDA driver that exporting takes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(error, ctypes.byref(text))
            raise _errors.FailedPrecondition(f"{name}: {(text.value or b'').decode() or error}")

    @contextmanager
    def _context_of(self, pointer: int) -> Iterator[None]:
        """Makes the context of the memory current."""
        context, ignored = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuPointerGetAttribute", ctypes.byref(context), _CONTEXT, ctypes.c_uint64(pointer))
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ignored))

    def export(self, pointer: int) -> tuple[bytes, int, str]:
        """The handle of the allocation, the pointer's offset in it, and the PCI bus id of its GPU."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        ordinal, handle, bus = ctypes.c_int(), (ctypes.c_char * 64)(), ctypes.create_string_buffer(32)
        with self._context_of(pointer):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
            try:
                self._call("cuIpcGetMemHandle", handle, base)
            except _errors.FailedPrecondition as error:
                error.hint = ("CUDA exports memory of cudaMalloc alone: PyTorch without expandable_segments and without "
                              "cudaMallocAsync")
                raise
            self._call("cuPointerGetAttribute", ctypes.byref(ordinal), _ORDINAL, ctypes.c_uint64(pointer))
            self._call("cuDeviceGetPCIBusId", bus, 32, ordinal)
        return handle.raw, pointer - base.value, bus.value.decode()

    def make_event(self, pointer: int) -> tuple[int, bytes]:
        """An event of the GPU that holds the memory, and its handle."""
        event, handle = ctypes.c_void_p(), (ctypes.c_char * 64)()
        with self._context_of(pointer):
            self._call("cuEventCreate", ctypes.byref(event), _EVENT_FLAGS)
            self._call("cuIpcGetEventHandle", handle, event)
        return event.value or 0, handle.raw

    def record(self, event: int, array: DeviceArray) -> None:
        """Another process that waits for the event waits for the work that the array's stream has now."""
        with self._context_of(array.pointer):
            self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(array.stream))

    def destroy(self, event: int) -> None:
        self._library.cuEventDestroy_v2(ctypes.c_void_p(event))


@functools.lru_cache(maxsize=1)
def driver() -> Driver:
    return Driver()


class Region:
    """An array in memory of a GPU that the server may read and write, until close() or the end of the `with`.

    It and its slices may be x and out of matmul, grouped_matmul and mlp. It is kept alive as long.
    """

    def __init__(self, array: Any, what: DeviceArray) -> None:
        self.name = uuid.uuid4().hex
        self.array = array
        self._begin, self._end = what.pointer, what.pointer + what.nbytes
        self._driver = driver()
        self._handle, self._offset, self._bus_id = self._driver.export(what.pointer)
        self._event, self._event_handle = self._driver.make_event(what.pointer)
        self._call: Any = None  # the stream whose end is the region's
        self._forget: Callable[[Region], None] | None = None

    def _request(self) -> dict[str, Any]:
        """The fields of ShareMemoryRequest."""
        return {"region": self.name, "device": self._bus_id, "cuda_ipc_memory": self._handle, "offset": self._offset,
                "size": self._end - self._begin, "ready_event": self._event_handle}

    def _record(self, array: DeviceArray) -> None:
        """The server waits for the work that makes the array."""
        self._driver.record(self._event, array)

    def _holds(self, array: DeviceArray) -> bool:
        return self._begin <= array.pointer and array.pointer + array.nbytes <= self._end

    def _range(self, array: DeviceArray) -> tensors.SharedMemory:
        return tensors.SharedMemory(region=self.name, offset=array.pointer - self._begin, size=array.nbytes)

    def close(self) -> None:
        forget, self._forget = self._forget, None
        if forget is not None:
            forget(self)
            self._call.cancel()
            self._driver.destroy(self._event)

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Region({self._end - self._begin} bytes on {self._bus_id}{'' if self._forget else ', closed'})"


class Regions:
    """Those of one client. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[Region] = []

    def add(self, region: Region, call: Any) -> None:
        region._call, region._forget = call, self._remove
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
