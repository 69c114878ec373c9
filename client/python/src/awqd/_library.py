"""libawqd: products in this process, on the caller's stream. kernels/library/awqd.h describes the functions."""
from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from awqd import _errors

_ABI_VERSION = 1
_DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "int8": 4, "int32": 5}
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "silu": 3, "gelu_tanh": 4}  # those without constants
QUANTIZATIONS = {"none": 0, "int8_per_token": 1, "int8_static": 2, "fp8_per_token": 3, "fp8_per_block_128": 4,
                 "fp8_static": 5}
_POINTER = ctypes.c_void_p


class HostTensor(NamedTuple):
    """A dense tensor in host memory; dtype as safetensors spells it."""

    dtype: str
    shape: Sequence[int]
    address: int
    bytes: int


class _Structure(ctypes.Structure):
    """Begins with its size."""

    def __init__(self, **members: Any) -> None:
        super().__init__(size=ctypes.sizeof(type(self)), **members)


class _Info(_Structure):
    _fields_ = [("size", ctypes.c_size_t), ("k", ctypes.c_int64), ("n", ctypes.c_int64), ("bytes", ctypes.c_int64),
                ("format", ctypes.c_char_p), ("scheme", ctypes.c_char_p), ("has_bias", ctypes.c_int32),
                ("transforms_input", ctypes.c_int32)]


class _Part(_Structure):
    _fields_ = [("size", ctypes.c_size_t), ("k", ctypes.c_int64), ("n", ctypes.c_int64), ("row_begin", ctypes.c_int64),
                ("col_begin", ctypes.c_int64)]


class _Tensor(ctypes.Structure):
    _fields_ = [("suffix", ctypes.c_char_p), ("dtype", ctypes.c_char_p), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("rank", ctypes.c_size_t), ("data", _POINTER), ("bytes", ctypes.c_size_t)]


class _Setting(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_char_p)]


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


class _GroupedMlpArgs(_Structure):
    _fields_ = [("size", ctypes.c_size_t), ("gate", _POINTER), ("up", _POINTER), ("down", _POINTER), ("m", ctypes.c_int64),
                ("top_k", ctypes.c_int64), ("x", _POINTER), ("y", _POINTER), ("expert_ids", _POINTER),
                ("router_weights", _POINTER), ("x_dtype", ctypes.c_int32), ("y_dtype", ctypes.c_int32),
                ("activation", ctypes.c_int32), ("limit", ctypes.c_float), ("alpha", ctypes.c_float), ("beta", ctypes.c_float),
                ("linear_beta", ctypes.c_float), ("quantization", ctypes.c_int32)]


class _MaskedMatmulArgs(_Structure):
    _fields_ = [("size", ctypes.c_size_t), ("max_rows", ctypes.c_int64), ("expected_rows", ctypes.c_int64), ("x", _POINTER),
                ("y", _POINTER), ("counts", _POINTER), ("x_dtype", ctypes.c_int32), ("y_dtype", ctypes.c_int32),
                ("activation", ctypes.c_int32), ("quantization", ctypes.c_int32)]


class _DequantizeArgs(_Structure):
    _fields_ = [("size", ctypes.c_size_t), ("row", ctypes.c_int64), ("rows", ctypes.c_int64), ("col", ctypes.c_int64),
                ("cols", ctypes.c_int64), ("out", _POINTER), ("dtype", ctypes.c_int32)]


class _Workspace(ctypes.Structure):
    _fields_ = [("data", _POINTER), ("bytes", ctypes.c_int64)]


_FUNCTIONS: dict[str, list[Any]] = {
    "awqd_device_open": [ctypes.c_char_p, _POINTER, ctypes.POINTER(_POINTER)],
    "awqd_checkpoint_open": [ctypes.c_char_p, ctypes.POINTER(_POINTER)],
    "awqd_weight_load": [_POINTER, _POINTER, ctypes.c_char_p, ctypes.POINTER(_POINTER)],
    "awqd_lease_open": [_POINTER, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_POINTER)],
    "awqd_lease_check": [_POINTER],
    "awqd_lease_part": [_POINTER, ctypes.c_char_p, ctypes.POINTER(_Part)],
    "awqd_lease_weight": [_POINTER, ctypes.c_char_p, ctypes.POINTER(_POINTER)],
    "awqd_weight_pack": [_POINTER, ctypes.c_char_p, _POINTER, ctypes.c_size_t, _POINTER, ctypes.c_size_t,
                         ctypes.POINTER(_POINTER)],
    "awqd_weight_describe": [_POINTER, ctypes.POINTER(_Info)],
    "awqd_workspace_init": [_POINTER, _Workspace, _POINTER],
    "awqd_matmul_workspace": [_POINTER, ctypes.POINTER(_MatmulArgs), ctypes.POINTER(ctypes.c_int64)],
    "awqd_matmul": [_POINTER, ctypes.POINTER(_MatmulArgs), _Workspace, _POINTER],
    "awqd_gated_mlp_workspace": [ctypes.POINTER(_GatedMlpArgs), ctypes.POINTER(ctypes.c_int64)],
    "awqd_gated_mlp": [ctypes.POINTER(_GatedMlpArgs), _Workspace, _POINTER],
    "awqd_stack_make": [ctypes.POINTER(_POINTER), ctypes.c_size_t, ctypes.POINTER(_POINTER)],
    "awqd_masked_matmul_workspace": [_POINTER, ctypes.POINTER(_MaskedMatmulArgs), ctypes.POINTER(ctypes.c_int64)],
    "awqd_masked_matmul": [_POINTER, ctypes.POINTER(_MaskedMatmulArgs), _Workspace, _POINTER],
    "awqd_grouped_mlp_workspace": [ctypes.POINTER(_GroupedMlpArgs), ctypes.POINTER(ctypes.c_int64)],
    "awqd_grouped_mlp": [ctypes.POINTER(_GroupedMlpArgs), _Workspace, _POINTER],
    "awqd_dequantize_workspace": [_POINTER, ctypes.POINTER(_DequantizeArgs), ctypes.POINTER(ctypes.c_int64)],
    "awqd_dequantize": [_POINTER, ctypes.POINTER(_DequantizeArgs), _Workspace, _POINTER],
}


def _packaged() -> str | None:
    """The one in the package awqd-torch."""
    package = importlib.util.find_spec("awqd_torch")
    return None if package is None or package.origin is None else str(pathlib.Path(package.origin).with_name("libawqd.so.1"))


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    path = os.environ.get("LIBAWQD") or _packaged() or ctypes.util.find_library("awqd") or "libawqd.so.1"
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise _errors.FailedPrecondition(f"libawqd: {error}", hint="install awqd-torch or awqd-library, or set LIBAWQD to its path") from None
    library.awqd_error_message.restype = ctypes.c_char_p
    for kind in ("checkpoint", "lease"):
        getattr(library, f"awqd_{kind}_linear").restype = ctypes.c_char_p
        getattr(library, f"awqd_{kind}_linear").argtypes = [_POINTER, ctypes.c_size_t]
        getattr(library, f"awqd_{kind}_linears").restype = ctypes.c_size_t
        getattr(library, f"awqd_{kind}_linears").argtypes = [_POINTER]
    for name in ("awqd_device_close", "awqd_checkpoint_close", "awqd_lease_close", "awqd_weight_free", "awqd_stack_free"):
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


class Stack(_Owned):
    """All experts of one projection."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        pointers = (_POINTER * len(weights))(*(weight.pointer for weight in weights))
        super().__init__("awqd_stack_free", _open("awqd_stack_make", pointers, len(weights)))
        self.k, self.n, self.experts = weights[0].k, weights[0].n, len(weights)


class Checkpoint(_Owned):
    """A model's folder: which linears it has."""

    def __init__(self, path: str) -> None:
        super().__init__("awqd_checkpoint_close", _open("awqd_checkpoint_open", os.fsencode(path)))
        self.linears = _linears("checkpoint", self.pointer)


class Lease(_Owned):
    """The weights that a server lends."""

    def __init__(self, device: Device, path: str, model: str, token: str | None, check: bool = False) -> None:
        shown = None if token is None else token.encode()
        super().__init__("awqd_lease_close", _open("awqd_lease_open", device.pointer, os.fsencode(path), model.encode(), shown))
        if check:
            _call("awqd_lease_check", self.pointer)
        self.linears = _linears("lease", self.pointer)


def _linears(kind: str, pointer: Any) -> list[str]:
    count = getattr(_library(), f"awqd_{kind}_linears")(pointer)
    return [getattr(_library(), f"awqd_{kind}_linear")(pointer, i).decode() for i in range(count)]


class Device(_Owned):
    """`name`: "cpu" or "cuda:N"."""

    def __init__(self, name: str) -> None:
        super().__init__("awqd_device_close", _open("awqd_device_open", name.encode(), None))

    def load(self, checkpoint: Checkpoint, linear: str) -> Weight:
        return Weight(self, _open("awqd_weight_load", self.pointer, checkpoint.pointer, linear.encode()))

    def take(self, lease: Lease, linear: str) -> Weight:
        """A whole linear."""
        weight = Weight(self, _open("awqd_lease_weight", lease.pointer, linear.encode()))
        part = _Part()
        _call("awqd_lease_part", lease.pointer, linear.encode(), ctypes.byref(part))
        if (weight.k, weight.n) != (part.k, part.n):
            raise _errors.FailedPrecondition(
                f"{linear}: got [{weight.k}, {weight.n}] of the server's --shard, expected all of [{part.k}, {part.n}]")
        return weight

    def pack(self, format: str, tensors: Mapping[str, HostTensor], settings: Mapping[str, str]) -> Weight:
        """A linear of tensors and settings as the format names them."""
        given = (_Setting * len(settings))(*(_Setting(name.encode(), value.encode()) for name, value in settings.items()))
        views = (_Tensor * len(tensors))(*(
            _Tensor(suffix.encode(), tensor.dtype.encode(), (ctypes.c_int64 * len(tensor.shape))(*tensor.shape),
                    len(tensor.shape), tensor.address, tensor.bytes) for suffix, tensor in tensors.items()))
        return Weight(self, _open("awqd_weight_pack", self.pointer, format.encode(), given, len(given), views, len(views)))

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


def matmul(weight: Weight, m: int, x: int, x_dtype: str, y: int, y_dtype: str, quantization: str = "none",
           scales: int | None = None) -> _Product:
    """y = x W + bias, [m, N] of [m, K]; addresses and names of PyTorch's dtypes. scales: FP32 [m], of static quantisations."""
    arguments = _MatmulArgs(m=m, x=x, y=y, x_dtype=_DTYPES[x_dtype], y_dtype=_DTYPES[y_dtype],
                            quantization=QUANTIZATIONS[quantization], scales=scales)
    return _Product("awqd_matmul", weight.pointer, ctypes.byref(arguments))


def dequantize(weight: Weight, out: int, dtype: str) -> _Product:
    """out = W, [K, N]."""
    arguments = _DequantizeArgs(rows=weight.k, cols=weight.n, out=out, dtype=_DTYPES[dtype])
    return _Product("awqd_dequantize", weight.pointer, ctypes.byref(arguments))


def gated_mlp(gate: Weight, up: Weight, down: Weight, activation: str, m: int, x: int, x_dtype: str, y: int,
              y_dtype: str) -> _Product:
    arguments = _GatedMlpArgs(gate=gate.pointer, up=up.pointer, down=down.pointer, m=m, x=x, y=y, x_dtype=_DTYPES[x_dtype],
                              y_dtype=_DTYPES[y_dtype], activation=ACTIVATIONS[activation])
    return _Product("awqd_gated_mlp", ctypes.byref(arguments))


def grouped_mlp(gate: Stack, up: Stack, down: Stack, activation: str, m: int, top_k: int, x: int, x_dtype: str, y: int,
                y_dtype: str, expert_ids: int, router_weights: int, quantization: str = "none") -> _Product:
    """The gated MLPs of each token's experts, summed: expert_ids int32, router_weights FP32, both [m, top_k].

    quantization: of x and of what enters down: "none", "fp8_per_token" or "fp8_per_block_128".
    """
    arguments = _GroupedMlpArgs(gate=gate.pointer, up=up.pointer, down=down.pointer, m=m, top_k=top_k, x=x, y=y,
                                expert_ids=expert_ids, router_weights=router_weights, x_dtype=_DTYPES[x_dtype],
                                y_dtype=_DTYPES[y_dtype], activation=ACTIVATIONS[activation],
                                quantization=QUANTIZATIONS[quantization])
    return _Product("awqd_grouped_mlp", ctypes.byref(arguments))


def masked_matmul(stack: Stack, max_rows: int, expected_rows: int, x: int, x_dtype: str, y: int, y_dtype: str, counts: int,
                  quantization: str) -> _Product:
    """The first counts[e], int32, of rows [experts, max_rows, K] times the weight of each expert."""
    arguments = _MaskedMatmulArgs(max_rows=max_rows, expected_rows=expected_rows, x=x, y=y, counts=counts,
                                  x_dtype=_DTYPES[x_dtype], y_dtype=_DTYPES[y_dtype],
                                  quantization=QUANTIZATIONS[quantization])
    return _Product("awqd_masked_matmul", stack.pointer, ctypes.byref(arguments))
