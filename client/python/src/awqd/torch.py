"""Quantised linears in PyTorch models, computed by a server or in this process.

    import awqd.torch

    model = awqd.torch.from_pretrained("/models/my-model-awq")                       # in this process, by libawqd
    model = awqd.torch.from_pretrained("/models/my-model-awq", "127.0.0.1:8001")     # by a server
    awqd.torch.replace(my_own_model, "unix:/run/awqd.sock", ring=True)               # any module; through a ring
    awqd.torch.replace(my_own_model, "lease:/run/awqd-lend.sock")                    # in this process, by a server's weights

Operators are torch.ops.awqd.matmul, gated_mlp and experts: torch.compile takes them as they are. They have no gradient.
"""
from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import itertools
import os
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import library

from awqd import _library
from awqd._client import Client
from awqd._errors import FailedPrecondition, InvalidArgument, NotFound, Unimplemented

__all__ = ["Leased", "Local", "QuantLinear", "QuantMlp", "QuantMoe", "Remote", "Replaced", "Source", "from_pretrained",
           "replace"]

Shape = tuple[int, int]  # (in features, out features)


class Source(Protocol):
    """Whoever multiplies by quantised weights. x is contiguous, [m, K], FP16, BF16 or FP32; y is like it."""

    def linears(self) -> Mapping[str, Shape]:
        """The paths of its linears, "model.layers.0.mlp.up_proj"."""

    def matmul(self, linear: str, x: torch.Tensor) -> torch.Tensor:
        """x W + bias."""

    def gated_mlp(self, gate: str, up: str, down: str, activation: str, x: torch.Tensor) -> torch.Tensor:
        """down(activation(gate(x)) * up(x))."""

    def experts(self, gate: str, up: str, down: str, activation: str, x: torch.Tensor, expert_ids: torch.Tensor,
                router_weights: torch.Tensor) -> torch.Tensor:
        """The gated MLPs of the experts of each token, summed by their weights. gate and so on have "*" for the expert."""


class Remote:
    """The weights of a model of a server. Tensors of GPUs travel through host memory."""

    def __init__(self, client: Client, name: str | None = None) -> None:
        self._client = client
        if name is None:
            models = [model.name for model in client.list_models()]
            if len(models) != 1:
                raise InvalidArgument(f"name: got none, expected one of {', '.join(models) or 'the models, but there is none'}",
                                      field="name")
            name = models[0]
        self._name = name

    def linears(self) -> Mapping[str, Shape]:
        return {weight.path: (weight.k, weight.n) for weight in self._client.get_model(self._name).weights}

    def matmul(self, linear: str, x: torch.Tensor) -> torch.Tensor:
        return self._client.matmul(self._name, linear, x.cpu()).to(x.device)

    def gated_mlp(self, gate: str, up: str, down: str, activation: str, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._client.mlp(self._name, "", x.cpu(), gate=gate, up=up, down=down,
                                           activation_function=activation)  # type: ignore[arg-type]
        return y.to(x.device)

    def experts(self, gate: str, up: str, down: str, activation: str, x: torch.Tensor, expert_ids: torch.Tensor,
                router_weights: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._client.mlp(self._name, "", x.cpu(), gate=gate, up=up, down=down, expert_ids=expert_ids.cpu(),
                                           router_weights=router_weights.float().cpu(),
                                           activation_function=activation)  # type: ignore[arg-type]
        return y.to(x.device)


class Local:
    """The weights of a model's folder, in this process, on the GPU or the CPU of `device`; without a folder those of pack().

    Products run on PyTorch's current stream and can be captured in a CUDA graph, after a first run on that stream.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, device: str | torch.device = "cpu") -> None:
        self.place = torch.device(device)
        if self.place.type == "cuda" and self.place.index is None:
            self.place = torch.device("cuda", torch.cuda.current_device())
        self._device, self._workspaces = _opened(str(self.place))
        self._weights: dict[str, _library.Weight] = {}
        self._stacks: dict[str, _library.Stack] = {}
        if folder is not None:
            checkpoint = _library.Checkpoint(os.fspath(folder))
            self._weights = {linear: self._device.load(checkpoint, linear) for linear in checkpoint.linears}

    def pack(self, linear: str, format: str, tensors: Mapping[str, torch.Tensor], **settings: object) -> None:
        """Adds a linear, or replaces it, of tensors and settings as one of awqd's formats names them."""
        host = {suffix: tensor.detach().cpu().contiguous() for suffix, tensor in tensors.items()}
        self._weights[linear] = self._device.pack(
            format, {suffix: _library.HostTensor(_SAFETENSORS.get(_name(tensor.dtype), _name(tensor.dtype)), tensor.shape,
                                                 tensor.data_ptr(), tensor.nbytes) for suffix, tensor in host.items()},
            {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()})

    def linears(self) -> Mapping[str, Shape]:
        return {linear: (weight.k, weight.n) for linear, weight in self._weights.items()}

    def matmul(self, linear: str, x: torch.Tensor, quantization: str = "none", scale: torch.Tensor | None = None) -> torch.Tensor:
        """x W + bias. quantization: of x, "int8_per_token" and so on (awqd.h); scale: FP32, of "int8_static" and "fp8_static"."""
        weight = self._weights[linear]
        y = self._result(x, weight.n)
        name = _name(x.dtype)
        scales = None if scale is None else scale.expand(len(x)).contiguous()
        return self._run(_library.matmul(weight, len(x), x.data_ptr(), name, y.data_ptr(), name, quantization,
                                         None if scales is None else scales.data_ptr()), y)

    def dequantize(self, linear: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W, [K, N], in a floating dtype."""
        weight = self._weights[linear]
        w = torch.empty(weight.k, weight.n, dtype=dtype, device=self.place)
        return self._run(_library.dequantize(weight, w.data_ptr(), _name(dtype)), w)

    def gated_mlp(self, gate: str, up: str, down: str, activation: str, x: torch.Tensor) -> torch.Tensor:
        y = self._result(x, self._weights[down].n)
        name = _name(x.dtype)
        return self._run(_library.gated_mlp(self._weights[gate], self._weights[up], self._weights[down], activation, len(x),
                                            x.data_ptr(), name, y.data_ptr(), name), y)

    def experts(self, gate: str, up: str, down: str, activation: str, x: torch.Tensor, expert_ids: torch.Tensor,
                router_weights: torch.Tensor) -> torch.Tensor:
        if expert_ids.shape != router_weights.shape or len(expert_ids) != len(x):
            raise InvalidArgument(f"expert_ids: got {list(expert_ids.shape)}, expected {list(router_weights.shape)}, as the "
                                  f"router's weights, for {len(x)} tokens", field="expert_ids")
        of_gate, of_up, of_down = (self._stack(path) for path in (gate, up, down))
        y = self._result(x, of_down.n)
        name = _name(x.dtype)
        ids = expert_ids.to(x.device, torch.int32).contiguous()
        weights = router_weights.to(x.device, torch.float32).contiguous()
        return self._run(_library.grouped_mlp(of_gate, of_up, of_down, activation, len(x), ids.shape[1], x.data_ptr(), name, y.data_ptr(),
                                              name, ids.data_ptr(), weights.data_ptr()), y)

    def masked(self, experts: str, x: torch.Tensor, counts: torch.Tensor, out: torch.Tensor | None = None,
               quantization: str = "none", expected_rows: int = 0) -> torch.Tensor:
        """x[e, i] W + bias of each expert e of "model.layers.0.mlp.experts.*.up_proj" for the first counts[e] of its rows.

        x: [experts, max_rows, K]. counts: int32 [experts], beside x; a CUDA graph can be replayed with others. out:
        [experts, max_rows, N] of x's dtype, whose other rows stay as they are; new memory without one. expected_rows: of an
        expert, which the choice of a kernel counts on; 0: max_rows.
        """
        stack = self._stack(experts)
        if x.device != self.place or x.dim() != 3 or len(x) != stack.experts or x.shape[2] != stack.k:
            raise InvalidArgument(f"x: got {list(x.shape)} on {x.device}, expected [{stack.experts}, max_rows, {stack.k}] on "
                                  f"{self.place}", field="x")
        y = x.new_empty(len(x), x.shape[1], stack.n) if out is None else out
        for field, tensor, shape, dtype in (("counts", counts, (len(x),), torch.int32),
                                            ("out", y, (len(x), x.shape[1], stack.n), x.dtype)):
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device != x.device or not tensor.is_contiguous():
                raise InvalidArgument(f"{field}: got {list(tensor.shape)} of {tensor.dtype} on {tensor.device}, expected dense "
                                      f"{list(shape)} of {dtype} on {x.device}", field=field)
        x = x.contiguous()
        name = _name(x.dtype)
        return self._run(_library.masked_matmul(stack, x.shape[1], expected_rows, x.data_ptr(), name, y.data_ptr(), name,
                                                counts.data_ptr(), quantization), y)

    def _stack(self, path: str) -> _library.Stack:
        """The experts of "model.layers.0.mlp.experts.*.up_proj"."""
        if path not in self._stacks:
            pattern = re.compile(re.escape(path).replace(r"\*", r"(\d+)"))
            experts = {int(match[1]): weight for linear, weight in self._weights.items()
                       if pattern.groups == 1 and (match := pattern.fullmatch(linear))}
            if not experts or max(experts) != len(experts) - 1:
                raise NotFound(f"{path}: got {len(experts)} experts up to number {max(experts, default=0)}, expected all from 0")
            self._stacks[path] = _library.Stack([experts[number] for number in range(len(experts))])
        return self._stacks[path]

    def _result(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        if x.device != self.place:
            raise InvalidArgument(f"x: got a tensor on {x.device}, expected one on {self.place}", field="x")
        return x.new_empty(len(x), columns)

    def _run(self, product: Any, y: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.current_stream(self.place).cuda_stream if self.place.type == "cuda" else None
        kept = self._workspaces.setdefault(threading.get_ident() if stream is None else stream, [])

        def allocate(needed: int) -> int:
            if not kept or kept[-1].numel() < needed + 255:
                if stream is not None and torch.cuda.is_current_stream_capturing():
                    # Its zeros would be written by the graph alone.
                    raise FailedPrecondition("a larger workspace is needed while a graph captures", hint="run it once before")
                kept.append(torch.zeros(max(2 * needed, 1 << 20) + 255, dtype=torch.uint8, device=self.place))
            address: int = kept[-1].data_ptr()
            return -(-address // 256) * 256

        self._device.run(product, allocate, stream)
        return y


class Leased(Local):
    """The weights of a model of a server on this machine, in its memory, by which this process computes as Local does.

    path: of the server's --lend. name: the model; none where it serves one. token: of an identity with the role attach.
    check: whether every byte is compared with the server's digests; InvalidArgument names a weight that differs.
    """

    def __init__(self, path: str | os.PathLike[str], name: str | None = None, device: str | torch.device = "cpu",
                 token: str | None = None, check: bool = False) -> None:
        super().__init__(device=device)
        lease = _library.Lease(self._device, os.fspath(path), name or "", token, check)
        self._weights = {linear: self._device.take(lease, linear) for linear in lease.linears}


@functools.lru_cache(maxsize=None)
def _opened(place: str) -> tuple[_library.Device, dict[int, list[torch.Tensor]]]:
    """One of each place, as a CPU's has threads; and its workspaces, which serve any weight.

    They are by stream, on a CPU by thread. One that became too small stays, because a graph may have captured it.
    """
    return _library.Device(place), {}


_SAFETENSORS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "int8": "I8", "uint8": "U8", "int32": "I32",
                "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Bound:
    """What an operator's number stands for, as long as a module holds it."""

    _all: weakref.WeakValueDictionary[int, _Bound] = weakref.WeakValueDictionary()
    _numbers = itertools.count()

    def __init__(self, call: Callable[..., torch.Tensor], columns: int, *names: str, number: int | None = None) -> None:
        self._call, self.columns, self.names = call, columns, names
        self.number = next(self._numbers) if number is None else number
        self._all[self.number] = self

    @classmethod
    def of(cls, number: int) -> _Bound:
        return cls._all[number]

    def run(self, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        rows = (tensor.reshape(-1, tensor.shape[-1]).contiguous() for tensor in (x, *routing))
        return self._call(*self.names, *rows).reshape(*x.shape[:-1], self.columns)


def _product(x: torch.Tensor, number: int) -> torch.Tensor:
    return _Bound.of(number).run(x)


def _experts(x: torch.Tensor, expert_ids: torch.Tensor, router_weights: torch.Tensor, number: int) -> torch.Tensor:
    return _Bound.of(number).run(x, expert_ids, router_weights)


def _shaped(x: torch.Tensor, number: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], _Bound.of(number).columns)


def _shaped_experts(x: torch.Tensor, expert_ids: torch.Tensor, router_weights: torch.Tensor, number: int) -> torch.Tensor:
    return _shaped(x, number)


for _operator, _body, _fake in (("matmul", _product, _shaped), ("gated_mlp", _product, _shaped),
                                ("experts", _experts, _shaped_experts)):
    # Annotations of this file are text, of which PyTorch makes no schema.
    _more = "Tensor expert_ids, Tensor router_weights, " if _operator == "experts" else ""
    library.custom_op(f"awqd::{_operator}", _body, mutates_args=(),
                      schema=f"(Tensor x, {_more}int number) -> Tensor").register_fake(_fake)


class QuantLinear(torch.nn.Module):
    """y = x W + bias by a linear of the source."""

    def __init__(self, source: Source, linear: str, shape: Shape | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = shape or source.linears()[linear]
        self._bound = _Bound(source.matmul, self.out_features, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.awqd.matmul(x, self._bound.number)
        return y

    def extra_repr(self) -> str:
        return f"{self._bound.names[0]!r}, in_features={self.in_features}, out_features={self.out_features}"


class QuantMlp(torch.nn.Module):
    """down(activation(gate(x)) * up(x)) by three linears of the source, in one call."""

    def __init__(self, source: Source, gate: str, up: str, down: str, activation: str = "silu") -> None:
        super().__init__()
        if activation not in _library.ACTIVATIONS:
            raise InvalidArgument(f"activation: got {activation!r}, expected one of {', '.join(_library.ACTIVATIONS)}",
                                  field="activation")
        self.in_features, self.out_features = source.linears()[gate][0], source.linears()[down][1]
        self._bound = _Bound(source.gated_mlp, self.out_features, gate, up, down, activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.awqd.gated_mlp(x, self._bound.number)
        return y

    def extra_repr(self) -> str:
        return ", ".join(repr(argument) for argument in self._bound.names)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class QuantMoe(torch.nn.Module):
    """The experts of a mixture: `path` is what the three stacks have in common, "model.layers.0.mlp.experts.*".

    projections: how gate, up and down are called behind it.
    """

    def __init__(self, source: Source, path: str, features: int, activation: str = "silu",
                 projections: tuple[str, str, str] = _PROJECTIONS) -> None:
        super().__init__()
        self._bound = _Bound(source.experts, features, *(f"{path}.{name}" for name in projections), activation)

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, router_weights: torch.Tensor) -> torch.Tensor:
        """x [..., K]; expert_ids, router_weights [..., top_k] of the router."""
        y: torch.Tensor = torch.ops.awqd.experts(x, expert_ids, router_weights, self._bound.number)
        return y

    def extra_repr(self) -> str:
        return ", ".join(repr(argument) for argument in self._bound.names)


@dataclasses.dataclass
class Replaced:
    """What replace() did, by the paths of modules."""

    linears: list[str]
    mlps: list[str]  # gated MLPs that are one call now; their linears are not among `linears`
    experts: list[str]  # modules of a mixture's experts, one call each
    not_in_model: list[str]  # linears of the source that belong to no module


def replace(model: torch.nn.Module, source: Source | Client | str | os.PathLike[str], *, name: str | None = None,
            ring: bool = False, device: str | torch.device | None = None, fuse: bool = True) -> Replaced:
    """Has a model's linears computed from the quantised weights of a source that have their paths.

    source: a model's folder or file (GGUF, ComfyUI), or "lease:PATH" of a server's --lend: in this process, by libawqd; the
    address of a server, or a Client; or a Source.
    name: the model of the server; none where it serves one.
    ring: of an address: through the server's ring.
    device: of a folder or a lease: where the weights are; the model's own by default.
    fuse: gated MLPs (children gate_proj, up_proj, down_proj) become one call, where a trial gives what their own code gives.

    Modules with all experts of a mixture in the parameters gate_up_proj and down_proj, as transformers 5 has them, become
    one call too, where a trial of their own code gives down(activation(gate) * up), weighted and summed.

    The dense weights of these linears are dropped. InvalidArgument where no linear of the source belongs to the model, or
    one has another shape.
    """
    source = open_source(source, name, ring, device if device is not None else _device_of(model))
    linears = source.linears()
    paths = {path: linear for path, linear in _matches(model, linears)}
    mixtures = dict(_match_mixtures(model, linears))
    if not paths and not mixtures:
        raise InvalidArgument(f"source: got linears as {next(iter(linears), 'none')!r}, expected paths of the model's own",
                              field="source")
    modules = dict(model.named_modules())
    for path, linear in paths.items():
        shape = (modules[path].in_features, modules[path].out_features)
        if shape != linears[linear]:
            raise InvalidArgument(f"{path}: got {list(linears[linear])}, expected {list(shape)} (in and out features)",
                                  field="source")
    dtype = next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), torch.float32)
    for path, mixture in mixtures.items():
        mixture.check(path, modules[path])
    for path, linear in paths.items():
        _set(model, path, QuantLinear(source, linear, linears[linear]))
    for path, mixture in mixtures.items():
        _set(model, path, QuantMoe(source, f"{mixture.path}.*", mixture.down[1], mixture.activation, mixture.projections))
    mlps = [path for path in modules if fuse and _fuse(model, path, source, paths, dtype)]
    inside = tuple(f"{path}." for path in mlps)
    of_mixtures = {linear for mixture in mixtures.values() for linear in mixture.linears()}
    return Replaced([path for path in paths if not path.startswith(inside)] if inside else list(paths), mlps, list(mixtures),
                    sorted(set(linears) - set(paths.values()) - of_mixtures))


def from_pretrained(folder: str | os.PathLike[str], source: Source | Client | str | os.PathLike[str] | None = None, *,
                    name: str | None = None, ring: bool = False, device: str | torch.device = "cpu",
                    model_class: Any = None, **options: Any) -> Any:
    """A model of transformers from a quantised folder: its linears are the source's, the rest is loaded.

    source, name, ring: as in replace(); without a source the folder itself.
    device: of the model, and of the weights of a folder.
    model_class: transformers.AutoModelForCausalLM by default.
    options: of its from_pretrained; dtype and so on.

    Unimplemented for a folder with linears that are no modules of the model.
    """
    import transformers
    from awqd.transformers import AwqdConfig
    if device != "cpu":
        options.setdefault("device_map", str(device))
    return (model_class or transformers.AutoModelForCausalLM).from_pretrained(
        folder, quantization_config=AwqdConfig(source, name=name, ring=ring), **options)


def open_source(source: Source | Client | str | os.PathLike[str], name: str | None, ring: bool,
                device: str | torch.device) -> Source:
    """What one argument of replace() stands for."""
    if isinstance(source, (str, os.PathLike)):
        if os.path.exists(source):
            return Local(source, device)
        if os.fspath(source).startswith("lease:"):
            return Leased(os.fspath(source).removeprefix("lease:"), name, device)
        source = Client(os.fspath(source), ring=ring)
    return Remote(source, name) if isinstance(source, Client) else source


def _device_of(model: torch.nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
    if len(devices) > 1:
        raise InvalidArgument(f"device: got a model on {', '.join(sorted(map(str, devices)))}, expected one device", field="device")
    return devices.pop() if devices else torch.device("cpu")


def _matches(model: torch.nn.Module, linears: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Each linear of the model whose path the source has: the same, or one that ends with the other."""
    for path, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if (linear := _alike(path, linears)) is not None:
            yield path, linear


def _alike(path: str, names: Collection[str]) -> str | None:
    """The one that is the same, or of which one ends with the other."""
    alike = [path] if path in names else [name for name in names if name.endswith(f".{path}") or path.endswith(f".{name}")]
    return alike[0] if len(alike) == 1 else None


def path_in_model(linear: str) -> str:
    """As transformers calls what a checkpoint of Mixtral calls otherwise."""
    return linear.replace(".block_sparse_moe.", ".mlp.")


@dataclasses.dataclass
class _Mixture:
    """The experts of a source that are one module of a model."""

    path: str  # "model.layers.0.mlp.experts"
    projections: tuple[str, str, str]
    count: int
    up: Shape  # of each expert, as gate's
    down: Shape
    activation: str = ""

    def linears(self) -> Iterator[str]:
        return (f"{self.path}.{number}.{name}" for number in range(self.count) for name in self.projections)

    def check(self, path: str, module: torch.nn.Module) -> None:
        (k, middle), (_, n) = self.up, self.down
        for name, got in (("gate_up_proj", [self.count, 2 * middle, k]), ("down_proj", [self.count, n, middle])):
            if (expected := list(getattr(module, name).shape)) != got:
                raise InvalidArgument(f"{path}.{name}: got {got}, expected {expected} (experts, out and in features)",
                                      field="source")


def _mixtures(linears: Mapping[str, Shape]) -> Iterator[_Mixture]:
    """Those that are whole and alike, by linears as "model.layers.0.mlp.experts.7.up_proj"."""
    experts: dict[str, int] = {}
    for linear in linears:
        if match := re.fullmatch(r"((?:.+\.)?experts)\.(\d+)\.\w+", linear):
            experts[match[1]] = max(experts.get(match[1], 0), int(match[2]) + 1)
    for path, count in experts.items():
        for projections in (_PROJECTIONS, ("w1", "w3", "w2")):
            gate, up, down = ({linears.get(f"{path}.{number}.{name}") for number in range(count)} for name in projections)
            if len(gate) == len(down) == 1 and gate == up and (up_shape := up.pop()) and (down_shape := down.pop()):
                yield _Mixture(path, projections, count, up_shape, down_shape)


def _match_mixtures(model: torch.nn.Module, linears: Mapping[str, Shape]) -> Iterator[tuple[str, _Mixture]]:
    """Each module of a mixture's experts whose path the source has, and which computes what QuantMoe does."""
    mixtures = {path_in_model(mixture.path): mixture for mixture in _mixtures(linears)}
    trials: dict[Any, bool] = {}
    for path, module in model.named_modules():
        parameters = dict(module.named_parameters())
        if set(parameters) != {"gate_up_proj", "down_proj"} or any(one.dim() != 3 for one in parameters.values()):
            continue
        alike, activation = _alike(path, mixtures), _activation_of(module)
        if alike is None or activation is None:
            continue
        key = (type(module), activation, parameters["gate_up_proj"].shape)
        if key not in trials:
            trials[key] = _sums_gated_mlps(module, activation)
        if trials[key]:
            yield path, dataclasses.replace(mixtures[alike], activation=activation)


def _sums_gated_mlps(module: Any, activation: str) -> bool:
    """Whether a module of experts computes what QuantMoe does: a trial of its own code with small weights of the trial's own,
    as the module's may have no memory yet."""
    experts, _, k = module.gate_up_proj.shape
    middle, tokens, top_k = 8, 3, min(2, experts)
    # A model that is being loaded is made with another default device, and with its own dtype as the default.
    numbers = functools.partial(torch.randn, generator=torch.Generator("cpu").manual_seed(1), device="cpu", dtype=torch.float32)
    # Gate and up are large enough to be changed by any usual limit.
    gate_up, down = numbers(experts, 2 * middle, k) * 16 / k ** 0.5, numbers(experts, k, middle)
    x, weights, ids = numbers(tokens, k), numbers(tokens, top_k), numbers(tokens, experts).topk(top_k).indices
    trial = copy.copy(module)
    trial.__dict__["_parameters"] = {"gate_up_proj": torch.nn.Parameter(gate_up), "down_proj": torch.nn.Parameter(down)}
    rows = torch.einsum("tjok,tk->tjo", gate_up[ids], x)
    inner = _FUNCTIONS[activation](rows[..., :middle]) * rows[..., middle:]
    expected = torch.einsum("tjom,tjm,tj->to", down[ids], inner, weights)
    try:
        with torch.no_grad():
            # Not by the kernels that transformers may choose, which are for larger shapes.
            got = inspect.unwrap(type(module).forward)(trial, x, ids, weights)
    except Exception:  # it takes other arguments
        return False
    return isinstance(got, torch.Tensor) and got.shape == expected.shape and torch.allclose(
        got, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def _set(model: torch.nn.Module, path: str, module: torch.nn.Module) -> None:
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


# By the names of classes of torch.nn and of transformers.activations.
_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
                "PytorchGELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh", "ReLU": "relu"}
_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu, "relu": torch.relu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh")}


def _activation_of(module: torch.nn.Module) -> str | None:
    named = (_ACTIVATIONS.get(type(child).__name__) for child in module.children())
    return next((name for name in named if name is not None), None)


def _fuse(model: torch.nn.Module, path: str, source: Source, paths: Mapping[str, str], dtype: torch.dtype) -> bool:
    """Makes a gated MLP one call. Only where a trial with one token gives what the module's own code gives."""
    gate, up, down = (paths.get(f"{path}.{child}".removeprefix(".")) for child in ("gate_proj", "up_proj", "down_proj"))
    if gate is None or up is None or down is None:
        return False
    module = model.get_submodule(path)
    activation = _activation_of(module)
    if activation is None:
        return False
    fused = QuantMlp(source, gate, up, down, activation)
    place = source.place if isinstance(source, Local) else torch.device("cpu")
    x = torch.linspace(-1, 1, fused.in_features, dtype=torch.float32, device=place).to(dtype)[None]
    with torch.no_grad():
        expected, got = module(x), fused(x)
    if not isinstance(expected, torch.Tensor) or expected.shape != got.shape:
        return False
    if not torch.allclose(expected.float(), got.float(), rtol=2e-2, atol=2e-2 * float(expected.float().abs().max())):
        return False
    _set(model, path, fused)
    return True
