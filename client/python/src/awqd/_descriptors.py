"""Makes message classes from the descriptions that the build left in descriptors.binpb.

They live in a pool of their own, so they clash neither with other packages that bring google.rpc, nor with stubs that
somebody made of the same files. It works with protobuf 4 to 7.
"""
from __future__ import annotations

import importlib.resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper


def _load() -> descriptor_pool.DescriptorPool:
    data = importlib.resources.files("awqd").joinpath("descriptors.binpb").read_bytes()
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _load()


_SHOWN = 300  # characters of a message's repr


def _show(field: Any, value: Any) -> str:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if field.enum_type is not None and isinstance(value, int):
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else str(known.name)
    return repr(value) if isinstance(value, str) or not hasattr(value, "__len__") else f"<{len(value)}>"


def _represent(self: Any) -> str:
    """One line, "WeightInfo(path='a', k=384, plan=<2>)", where str() has every field on many."""
    fields = ", ".join(f"{field.name}={_show(field, value)}" for field, value in self.ListFields())
    text = f"{self.DESCRIPTOR.name}({fields})"
    return text if len(text) <= _SHOWN else text[:_SHOWN - 4] + "...)"


def message(full_name: str) -> Any:
    """The class of a message, for example "google.rpc.Status"."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(full_name))


def define(proto: str, namespace: dict[str, Any]) -> None:
    """Puts the messages, enums and values of one .proto file into a module's namespace."""
    file = _POOL.FindFileByName(proto)
    namespace["DESCRIPTOR"] = file
    for name, descriptor in file.message_types_by_name.items():
        namespace[name] = message_factory.GetMessageClass(descriptor)
        namespace[name].__repr__ = _represent
    for name, enum in file.enum_types_by_name.items():
        namespace[name] = enum_type_wrapper.EnumTypeWrapper(enum)
        for value in enum.values:
            namespace[value.name] = value.number
