"""Arrays to the bytes of tensors and back: NumPy, and PyTorch and ml_dtypes where they are installed."""
from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Union

import numpy as np
from numpy.typing import NDArray

from awqd._errors import InvalidArgument
from awqd.v1 import tensor_pb2 as tensors

if TYPE_CHECKING:
    import torch

# What a call takes; it answers in kind.
Array = TypeVar("Array", NDArray[Any], "torch.Tensor")
AnyArray = Union[NDArray[Any], "torch.Tensor"]
# An array, or numbers in lists that are nested as deep.
Numbers = Union[AnyArray, Sequence[float], Sequence[Sequence[float]], Sequence[Sequence[Sequence[float]]]]
# "fp16", "bf16", "fp32", "int8", "uint8", "int32", "fp8_e4m3", or a dtype of NumPy, ml_dtypes or PyTorch.
DTypeLike = Union[str, "np.dtype[Any]", type[object], "torch.dtype"]

_NAMES = {
    "fp16": tensors.FP16, "float16": tensors.FP16, "half": tensors.FP16,
    "bf16": tensors.BF16, "bfloat16": tensors.BF16,
    "fp32": tensors.FP32, "float32": tensors.FP32,
    "int8": tensors.INT8, "uint8": tensors.UINT8, "int32": tensors.INT32,
    "fp8_e4m3": tensors.FP8_E4M3, "float8_e4m3fn": tensors.FP8_E4M3,
}
_NUMPY: dict[int, str] = {
    tensors.FP16: "<f2", tensors.FP32: "<f4", tensors.INT8: "i1", tensors.UINT8: "u1", tensors.INT32: "<i4",
}
ITEMSIZE: dict[int, int] = {
    tensors.FP16: 2, tensors.BF16: 2, tensors.FP32: 4, tensors.INT8: 1, tensors.UINT8: 1, tensors.INT32: 4,
    tensors.FP8_E4M3: 1,
}
# Activations that have been rounded, whose scales are those of tokens or of their blocks.
OF_8_BITS = (tensors.INT8, tensors.FP8_E4M3)


class Spec(NamedTuple):
    """A tensor as it travels: `data` is row-major and little-endian."""

    dtype: Any  # the API's number
    shape: tuple[int, ...]
    data: memoryview


def dtype_of(value: DTypeLike, field: str) -> Any:
    """The API's number of a dtype, however it is spelled."""
    hashable: Any = value  # which type checkers do not know of every dtype
    return _dtype_of(hashable, field)


@functools.lru_cache(maxsize=256)
def _dtype_of(value: Any, field: str) -> Any:
    name = value if isinstance(value, str) else str(value).removeprefix("torch.")
    if name.lower() not in _NAMES:
        try:
            name = np.dtype(value).name
        except TypeError:
            pass
    number = _NAMES.get(name.lower())
    if number is None:
        hint = {"float64": 'convert it: x.astype("float32")', "int64": 'convert it: x.astype("int32")'}.get(name, "")
        raise InvalidArgument(f"{field}: got {name}, expected fp16, bf16, fp32, int8, uint8, int32 or fp8_e4m3",
                              field=field,
                              hint=hint)
    return number


def numpy_dtype(number: int, field: str) -> np.dtype[Any]:
    """The NumPy dtype of the API's number. BF16 needs ml_dtypes; no result is FP8_E4M3."""
    if number == tensors.FP8_E4M3:
        raise InvalidArgument(f"{field}: got fp8_e4m3, expected a type of results", field=field)
    if number != tensors.BF16:
        return np.dtype(_NUMPY[number])
    try:
        import ml_dtypes
    except ImportError:
        raise InvalidArgument(f"{field}: NumPy has no BF16", field=field,
                              hint="pip install ml_dtypes, or ask for fp32, which holds it exactly") from None
    bf16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bf16


def is_torch(array: object) -> bool:
    """Without importing PyTorch: a tensor is there only where its package is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_torch_dtype(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.dtype)


def _bytes(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def spec_of(array: Any, field: str) -> Spec:
    """The bytes of an array, without a copy where it is contiguous and in host memory."""
    if is_torch(array):
        import torch
        number = dtype_of(array.dtype, f"{field}.dtype")
        array = array.detach().cpu().contiguous()
        shape = tuple(array.shape)
        same_size = {tensors.BF16: torch.int16, tensors.FP8_E4M3: torch.uint8}.get(number)
        array = (array if same_size is None else array.view(same_size)).numpy()
    elif isinstance(array, np.ndarray):
        number = dtype_of(array.dtype, f"{field}.dtype")
        shape = array.shape
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
    else:
        raise InvalidArgument(f"{field}: got {type(array).__name__}, expected a NumPy array or a PyTorch tensor",
                              field=field)
    return Spec(number, shape, _bytes(np.ascontiguousarray(array)))


def numbers(values: Any, field: str, kinds: str = "iuf") -> Any:
    """Arrays as they are; lists of numbers of these kinds of NumPy's as an array: FP32, or integers if only those may be."""
    if not isinstance(values, (list, tuple)):
        return values
    floating = "f" in kinds
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in kinds:
        raise InvalidArgument(f"{field}: got a list of something else, expected {'numbers' if floating else 'integers'}, "
                              "in lists of equal lengths", field=field)
    return array.astype(np.float32) if floating else array


def ids_of(ids: Any, field: str) -> Spec:
    """The INT32 numbers of experts, from integers of any size or lists of them."""
    ids = numbers(ids, field, "iu")
    integers = ids.detach().cpu().numpy() if is_torch(ids) and not ids.is_floating_point() else ids
    if not isinstance(integers, np.ndarray) or integers.dtype.kind not in "iu" or integers.dtype == np.int32:
        return spec_of(ids, field)
    if integers.size and not -2**31 <= int(integers.min()) <= int(integers.max()) < 2**31:
        raise InvalidArgument(f"{field}: got numbers from {integers.min()} to {integers.max()}, expected INT32", field=field)
    return spec_of(integers.astype(np.int32), field)


def array_of(number: Any, shape: tuple[int, ...], data: Any, torch_wanted: bool, field: str) -> Any:
    """A new array with a copy of `data`, of NumPy or PyTorch."""
    if torch_wanted:
        import torch
        dtype = {tensors.FP16: torch.float16, tensors.BF16: torch.bfloat16, tensors.FP32: torch.float32,
                 tensors.INT8: torch.int8, tensors.UINT8: torch.uint8, tensors.INT32: torch.int32}[number]
        tensor = torch.empty(shape, dtype=dtype)
        bytes_of(tensor)[:] = data
        return tensor
    result = np.empty(shape, numpy_dtype(number, field))
    bytes_of(result)[:] = data
    return result


def bytes_of(array: Any) -> memoryview:
    """The memory of a contiguous array, to write to. Raises where there is none to write to."""
    if is_torch(array):
        import torch
        if array.device.type != "cpu" or not array.is_contiguous():
            raise InvalidArgument("out: got a tensor elsewhere or in pieces, expected a contiguous one on the CPU", field="out")
        return _bytes(array.detach().reshape(-1).view(torch.uint8).numpy())
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.flags.writeable:
        raise InvalidArgument("out: expected a contiguous array that can be written", field="out")
    return _bytes(array)
