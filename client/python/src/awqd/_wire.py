"""The payload of a tensor, put into a message and found in one without the copies of the generated classes.

The rest of a message is left to Protocol Buffers: a payload is a field like any other, and fields may stand in any
order, so a request is the serialised rest and then the field with the payload.
"""
from __future__ import annotations

import math
from typing import Any, Union

from awqd import _arrays, _errors
from awqd._arrays import Spec
from awqd.v1 import tensor_pb2 as tensors

Part = Union[bytes, memoryview]

_RAW = 3  # Tensor.raw
_LENGTH_DELIMITED = 2


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def tensor_field(number: int, spec: Spec) -> list[Part]:
    """Field `number` of a message, holding a tensor."""
    head = tensors.Tensor(dtype=spec.dtype, shape=spec.shape).SerializeToString()
    head += _varint(_RAW << 3 | _LENGTH_DELIMITED) + _varint(spec.data.nbytes)
    return [_varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(head) + spec.data.nbytes) + head, spec.data]


class _Malformed(Exception):
    pass


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    raise _Malformed


def _find(data: bytes, begin: int, end: int, number: int) -> tuple[int, int, int] | None:
    """(start of the tag, start, end of the contents) of a length-delimited field; None unless it is there once."""
    found = None
    at = begin
    while at < end:
        tag_at = at
        tag, at = _read_varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, at = _read_varint(data, at)
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
        elif kind == _LENGTH_DELIMITED:
            length, at = _read_varint(data, at)
            if tag >> 3 == number:
                if found is not None:
                    return None
                found = (tag_at, at, at + length)
            at += length
        else:
            raise _Malformed
    if at != end:
        raise _Malformed
    return found


def split(data: bytes, number: int) -> tuple[bytes, memoryview | None]:
    """The message without the raw bytes of the tensor in field `number`, and those bytes.

    (data, None) where they are not there once, or where the bytes are no message: the parser then says so.
    """
    try:
        tensor = _find(data, 0, len(data), number)
        raw = _find(data, tensor[1], tensor[2], _RAW) if tensor else None
    except _Malformed:
        return data, None
    if tensor is None or raw is None:
        return data, None
    rest = data[tensor[1]:raw[0]] + data[raw[2]:tensor[2]]
    head = data[:tensor[0]] + _varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(rest)) + rest + data[tensor[2]:]
    return head, memoryview(data)[raw[1]:raw[2]]


def check_size(message: bytes) -> None:
    """InvalidArgument for a request that no message holds."""
    if len(message) >= 2**31:
        raise _errors.InvalidArgument(f"request: got {len(message)} bytes, expected less than 2 GiB", field="request",
                                      hint="send fewer tokens at a time")


def parse(kind: Any, data: bytes) -> Any:
    """The message of class `kind`; DataLoss where `data` is none."""
    try:
        return kind.FromString(data)
    except Exception as error:
        raise _errors.DataLoss(f"the answer is no {kind.DESCRIPTOR.name}: {error}") from None


def check_payload(message: Any, payload: memoryview, field: str) -> None:
    """DataLoss unless `payload` has the bytes of the Tensor's shape and dtype."""
    if message.dtype not in _arrays.ITEMSIZE:
        raise _errors.DataLoss(f"{field}: got dtype {message.dtype}, expected one that this client knows", field=field)
    wanted = math.prod(message.shape) * _arrays.ITEMSIZE[message.dtype]
    if wanted != payload.nbytes:
        raise _errors.DataLoss(f"{field}: got {payload.nbytes} bytes, expected {wanted} for {list(message.shape)}",
                               field=field)


def array(message: Any, payload: Any, torch_wanted: bool, field: str) -> Any:
    """The array of a Tensor whose raw bytes are `payload`, or in it."""
    payload = memoryview(message.raw) if payload is None else payload
    check_payload(message, payload, field)
    return _arrays.array_of(message.dtype, tuple(message.shape), payload, torch_wanted, field)
