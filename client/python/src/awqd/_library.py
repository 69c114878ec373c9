"""libawqd: products in this process, on the caller's stream. kernels/library/awqd.h describes the functions."""
from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
from collections.abc import Callable
from typing import Any

from awqd import _errors

_ABI_VERSION = 1
_DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "int8": 4, "int32": 5}
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3, "gelu_tanh": 4}  # those without constants
_POINTER = ctypes.c_void_p


class _Structure(ctypes.Structure):
    """Begins with its size."""

    def __init__(self, **members: Any) -> None:
        super().__init__(size=ctypes.sizeof(type(self)), **members)


class _Info(_Structure):
    _fields_ = [("size", ctypes.c_size_t), ("k", ctypes.c_int64), ("n", ctypes.c_int64), ("bytes", ctypes.c_int64),
                ("format", ctypes.c_char_p), ("scheme", ctypes.c_char_p), ("has_bias", ctypes.c_int32),
                ("transforms_input", ctypes.c_int32)]


class _MatmulArgs(_Structure):
    _fields_ = [("size", ctypes.c_size_t), ("m", ctypes.c_int64), ("x", _POINTER), ("y", _POINTER),
                ("x_dtype", ctypes.c_int32), ("y_dtype", ctypes.c_int32), ("bias", _POINTER),
                ("activation", ctypes.c_int32), ("quantization", ctypes.c_int32), ("scales", _POINTER),
                ("path", ctypes.c_int32)]


class _GatedMlpArgs(_Structure):
    _fields_ = [("size", ctypes.c_size_t), ("gate", _POINTER), ("up", _POINTER), ("down", _POINTER), ("m", ctypes.c_int64),
                ("x", _POINTER), ("y", _POINTER), ("x_dtype", ctypes.c_int32), ("y_dtype", ctypes.c_int32),
                ("activation", ctypes.c_int32), ("path", ctypes.c_int32), ("limit", ctypes.c_float),
                ("alpha", ctypes.c_float), ("beta", ctypes.c_float), ("linear_beta", ctypes.c_float)]


class _Workspace(ctypes.Structure):
    _fields_ = [("data", _POINTER), ("bytes", ctypes.c_int64)]


_FUNCTIONS: dict[str, list[Any]] = {
    "awqd_device_open": [ctypes.c_char_p, _POINTER, ctypes.POINTER(_POINTER)],
    "awqd_checkpoint_open": [ctypes.c_char_p, ctypes.POINTER(_POINTER)],
    "awqd_weight_load": [_POINTER, _POINTER, ctypes.c_char_p, ctypes.POINTER(_POINTER)],
    "awqd_weight_describe": [_POINTER, ctypes.POINTER(_Info)],
    "awqd_workspace_init": [_POINTER, _Workspace, _POINTER],
    "awqd_matmul_workspace": [_POINTER, ctypes.POINTER(_MatmulArgs), ctypes.POINTER(ctypes.c_int64)],
    "awqd_matmul": [_POINTER, ctypes.POINTER(_MatmulArgs), _Workspace, _POINTER],
    "awqd_gated_mlp_workspace": [ctypes.POINTER(_GatedMlpArgs), ctypes.POINTER(ctypes.c_int64)],
    "awqd_gated_mlp": [ctypes.POINTER(_GatedMlpArgs), _Workspace, _POINTER],
}


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    path = os.environ.get("LIBAWQD") or ctypes.util.find_library("awqd") or "libawqd.so.1"
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise _errors.FailedPrecondition(f"libawqd: {error}", hint="install awqd-library, or set LIBAWQD to its path") from None
    library.awqd_error_message.restype = ctypes.c_char_p
    library.awqd_checkpoint_linear.restype = ctypes.c_char_p
    library.awqd_checkpoint_linear.argtypes = [_POINTER, ctypes.c_size_t]
    library.awqd_checkpoint_linears.restype = ctypes.c_size_t
    for name in ("awqd_checkpoint_linears", "awqd_device_close", "awqd_checkpoint_close", "awqd_weight_free"):
        getattr(library, name).argtypes = [_POINTER]
    for name, arguments in _FUNCTIONS.items():
        getattr(library, name).argtypes = arguments
    if library.awqd_abi_version() != _ABI_VERSION:
        raise _errors.FailedPrecondition(f"{path}: got version {library.awqd_abi_version()} of the ABI, expected {_ABI_VERSION}")
    return library


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_library(), name)(*arguments)
    if code:
        raise _errors.from_status(code, _library().awqd_error_message().decode(), ())


def _open(name: str, *arguments: Any) -> Any:
    made = _POINTER()
    _call(name, *arguments, ctypes.byref(made))
    return made


class _Owned:
    """A pointer of the library, and the function that ends it."""

    _end: Any = None  # until there is one

    def __init__(self, end: str, pointer: Any) -> None:
        self.pointer = pointer
        self._end = getattr(_library(), end)

    def __del__(self) -> None:
        if self._end is not None:
            self._end(self.pointer)


class Weight(_Owned):
    """A linear in the device's memory."""

    def __init__(self, device: Device, pointer: Any) -> None:
        super().__init__("awqd_weight_free", pointer)
        self.device = device
        info = _Info()
        _call("awqd_weight_describe", pointer, ctypes.byref(info))
        self.k, self.n, self.bytes = info.k, info.n, info.bytes
        self.scheme = info.scheme.decode()


class Checkpoint(_Owned):
    """A model's folder: which linears it has."""

    def __init__(self, path: str) -> None:
        super().__init__("awqd_checkpoint_close", _open("awqd_checkpoint_open", os.fsencode(path)))
        library = _library()
        count = library.awqd_checkpoint_linears(self.pointer)
        self.linears = [library.awqd_checkpoint_linear(self.pointer, i).decode() for i in range(count)]


class Device(_Owned):
    """`name`: "cpu" or "cuda:N"."""

    def __init__(self, name: str) -> None:
        super().__init__("awqd_device_close", _open("awqd_device_open", name.encode(), None))

    def load(self, checkpoint: Checkpoint, linear: str) -> Weight:
        return Weight(self, _open("awqd_weight_load", self.pointer, checkpoint.pointer, linear.encode()))

    def run(self, product: _Product, allocate: Callable[[int], int], stream: int | None) -> None:
        """Enqueues a product. `allocate` gives the address of so many bytes, which begin with zeros on a GPU and which no
        other stream uses."""
        needed = ctypes.c_int64()
        _call(f"{product.function}_workspace", *product.arguments, ctypes.byref(needed))
        workspace = _Workspace(allocate(needed.value), needed.value)
        _call(product.function, *product.arguments, workspace, stream)


class _Product:
    def __init__(self, function: str, *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments


def matmul(weight: Weight, m: int, x: int, x_dtype: str, y: int, y_dtype: str) -> _Product:
    """y = x W + bias, [m, N] of [m, K]; addresses and names of PyTorch's dtypes."""
    arguments = _MatmulArgs(m=m, x=x, y=y, x_dtype=_DTYPES[x_dtype], y_dtype=_DTYPES[y_dtype])
    return _Product("awqd_matmul", weight.pointer, ctypes.byref(arguments))


def gated_mlp(gate: Weight, up: Weight, down: Weight, activation: str, m: int, x: int, x_dtype: str, y: int,
              y_dtype: str) -> _Product:
    arguments = _GatedMlpArgs(gate=gate.pointer, up=up.pointer, down=down.pointer, m=m, x=x, y=y, x_dtype=_DTYPES[x_dtype],
                              y_dtype=_DTYPES[y_dtype], activation=ACTIVATIONS[activation])
    return _Product("awqd_gated_mlp", ctypes.byref(arguments))
