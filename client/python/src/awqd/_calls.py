"""What each call sends and makes of the answer, without sending anything itself.

A method of Calls is a generator: it yields an Rpc, is sent the answer's bytes or thrown its error, and returns the
result. So the blocking and the asyncio client, which differ in how they send, share all of it.
"""
from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, Union

import numpy as np
from numpy.typing import NDArray

from awqd import _arrays, _descriptors, _errors, _shared_memory, _stream, _wire
from awqd._arrays import AnyArray, Array, DTypeLike, Numbers, Spec
from awqd._progress import Bar, Progress
from awqd.v1 import inference_pb2 as inference
from awqd.v1 import model_repository_pb2 as repository
from awqd.v1 import server_info_pb2 as info
from awqd.v1 import tensor_pb2 as tensors

T = TypeVar("T")
Path = Literal["auto", "fused", "dequantize"]
ActivationFunction = Literal["none", "relu", "gelu", "silu"]
ActivationQuantization = Literal["per_token", "static", "as_declared", "floating"]
# None: the client's own. math.inf: no deadline.
Timeout = Union[float, None]
Rows = Union[tuple[int, int], "slice[int | None, int | None, int | None]"]

_INFERENCE = "/awqd.v1.QuantizedInference/"
_REPOSITORY = "/awqd.v1.ModelRepository/"
# Smaller calls are faster as messages: see README.md.
SHARED_MEMORY_BYTES = 256 << 10


@dataclass(frozen=True)
class Rpc:
    """A call to make. Of a stream, each message goes to `sink` and the answer is empty.

    weight: "MODEL/PATH" of what it needs, by which load balancers can send it to the server that holds it.
    """

    method: str
    request: bytes
    timeout: float | None
    sink: Callable[[bytes], None] | None = None
    weight: str = ""


Steps = Generator[Rpc, bytes, T]


@dataclass(frozen=True, repr=False, eq=False)
class KvCodes(Generic[Array]):
    """codes: UINT8 [tokens, heads, ceil(head_dim / 2)]; scales, zeros: [tokens, heads]. Unpacks into these three."""

    codes: Array
    scales: Array
    zeros: Array

    def __iter__(self) -> Iterator[Array]:
        return iter((self.codes, self.scales, self.zeros))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value.dtype} {list(value.shape)}" for name, value in vars(self).items())
        return f"KvCodes({fields})"


class _Deadline:
    """Of a call that may take more than one exchange."""

    def __init__(self, timeout: float) -> None:
        _errors.check_timeout(timeout)
        self._end = time.monotonic() + timeout

    def left(self) -> float | None:
        return None if math.isinf(self._end) else max(0.0, self._end - time.monotonic())


@functools.lru_cache(maxsize=256)
def _enum(enum: Any, value: str | None, field: str, prefix: str = "") -> Any:
    name = prefix + str(value).upper()
    if name not in enum.keys():
        names = ", ".join(key.removeprefix(prefix).lower() for key in enum.keys() if key.startswith(prefix))
        raise _errors.InvalidArgument(f"{field}: got {value!r}, expected one of {names}", field=field)
    return enum.Value(name)


def _range(value: Rows | None, field: str) -> Any:
    if value is None:
        return None
    if isinstance(value, slice):
        if value.step not in (None, 1):
            raise _errors.InvalidArgument(f"{field}: got a step of {value.step}, expected 1", field=field)
        value = (value.start or 0, value.stop or 0)
    return inference.Range(begin=value[0], end=value[1])


def route(model: str | None, weight: Any) -> str:
    """What metadata can say of a weight; "" where it cannot."""
    route = f"{model}/{weight}" if model and isinstance(weight, str) else ""
    return route if route.isascii() and route.isprintable() and len(route) <= 512 else ""


def _source(request: Any, model: str | None, weight: Any, field: str = "weight") -> None:
    """Sets which weight: a name of a model, or a message that holds one."""
    if isinstance(weight, str):
        if not model:
            raise _errors.InvalidArgument("model: got none, expected a model's name", field=f"{field}.model")
        request.weight.model = model
        request.weight.weight = weight
    else:
        request.packed.CopyFrom(weight)


def packed_weight(format: str, tensors_by_name: Mapping[str, AnyArray],
                  settings: Mapping[str, object] | None = None) -> tensors.PackedWeight:
    """A weight that travels in the request, in place of a model's.

    format: a checkpoint format, one of server_info().formats, for example "plain" or "gptq".
    tensors_by_name: what that format has for one linear, for example codes UINT8 [K, N] and scales [groups, N].
    settings: for example {"bits": 4, "symmetric": True}.
    """
    weight = tensors.PackedWeight(format=format)
    for name, array in tensors_by_name.items():
        spec = _arrays.spec_of(array, f"tensors.{name}")
        weight.tensors[name].CopyFrom(
            tensors.Tensor(dtype=spec.dtype, shape=spec.shape, raw=bytes(spec.data)))
    for name, value in (settings or {}).items():
        weight.settings[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return weight


class Calls:
    """The calls of one client, and what it has learned of its server."""

    def __init__(self, timeout: float, shared_memory: bool) -> None:
        self._timeout = timeout
        self._share = shared_memory and _shared_memory.available()
        self._pool: _shared_memory.Pool | None = None
        # Columns and dtype of answers that were seen, by what was asked: a shared answer needs room made beforehand.
        self._seen: dict[tuple[object, ...], tuple[int, int]] = {}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._share = False

    def _deadline(self, timeout: Timeout) -> _Deadline:
        return _Deadline(self._timeout if timeout is None else timeout)

    # Products.

    def matmul(
        self,
        model: str | None,
        weight: str | tensors.PackedWeight,
        x: Array,
        *,
        bias: Numbers | None = None,
        output_dtype: DTypeLike | None = None,
        activation_function: ActivationFunction = "none",
        activation_quantization: ActivationQuantization | None = None,
        activation_scales: Numbers | None = None,
        path: Path = "auto",
        priority: int = 0,
        request_id: str = "",
        timeout: Timeout = None,
        execution: tensors.Execution | None = None,
    ) -> Steps[Array]:
        """y = activation_function(x @ W + bias), computed from the quantised weight.

        model, weight: names as list_models() and get_model() have them; or None and a packed_weight().
        x: FP16, BF16 or FP32 [..., K]; INT8 [..., K] for a weight of integers, or with activation_scales.
        bias: [N], instead of the weight's own.
        output_dtype: x's by default; INT32 of INT8, FP16 of INT8 with activation_scales.
        activation_quantization: has the server round x to INT8 first, by a scale of each token, by
            activation_scales (one element), or as the checkpoint says; "floating": it does not, whatever its
            own default (--int8_activations).
        activation_scales: FP32, positive: one for each token, or one element for all.
        path: "fused" or "dequantize" overrides the server's choice.
        priority: larger is served first.
        timeout: seconds; None: the client's; math.inf: no deadline.
        execution: is filled with what ran: kernel, batch, microseconds in the queue and on the device.

        Returns y [..., N], of NumPy or PyTorch as x is.
        """
        request, parts = self._matmul(model, weight, bias, output_dtype, activation_function, activation_quantization,
                                      activation_scales, path, priority, request_id)
        key = (model, weight) if isinstance(weight, str) else None
        product = _Product("QuantizedMatmul", request, parts, inference.QuantizedMatmulResponse, key)
        y: Array = yield from self._product(product, x, (), timeout, execution)
        return y

    def matmul_stream(
        self,
        model: str | None,
        weight: str | tensors.PackedWeight,
        *,
        bias: Numbers | None = None,
        output_dtype: DTypeLike | None = None,
        activation_function: ActivationFunction = "none",
        activation_quantization: ActivationQuantization | None = None,
        path: Path = "auto",
        priority: int = 0,
    ) -> _stream.Products:
        """What a stream of products sends and makes of the answers; see Client.matmul_stream."""
        return _stream.Products(*self._matmul(model, weight, bias, output_dtype, activation_function,
                                              activation_quantization, None, path, priority, ""))

    def grouped_matmul(
        self,
        model: str | None,
        stack: str | inference.PackedStack,
        x: Array,
        expert_ids: Numbers,
        *,
        router_weights: Numbers | None = None,
        bias: Numbers | None = None,
        output_dtype: DTypeLike | None = None,
        activation_function: ActivationFunction = "none",
        path: Path = "auto",
        priority: int = 0,
        request_id: str = "",
        timeout: Timeout = None,
        execution: tensors.Execution | None = None,
    ) -> Steps[Array]:
        """Products of a mixture of experts: each token with the weights of the experts chosen for it.

        stack: "model.layers.0.mlp.experts.*.up_proj", with "*" for the number of the expert; or a PackedStack.
        x: FP16, BF16 or FP32 [..., K].
        expert_ids: integers [..., top_k], from 0, leading dimensions as x has them; an array or nested lists.
        router_weights: [..., top_k]; the results of a token are then summed by them.
        bias: [experts, N], instead of the experts' own.
        Others: as in matmul.

        Returns [..., N] with router_weights, otherwise [..., top_k, N].
        """
        request = inference.GroupedQuantizedMatmulRequest()
        _source(request, model, stack)
        ids = _arrays.ids_of(expert_ids, "expert_ids")
        parts = _wire.tensor_field(4, ids)
        parts += self._optional((12, router_weights, "router_weights"), (13, bias, "bias"))
        _set_product(request, output_dtype, activation_function, path, priority, request_id)
        key = (model, stack) if isinstance(stack, str) else None
        product = _Product("GroupedQuantizedMatmul", request, parts, inference.GroupedQuantizedMatmulResponse, key)
        choices = () if router_weights is not None else ids.shape[-1:]
        y: Array = yield from self._product(product, x, choices, timeout, execution)
        return y

    def mlp(
        self,
        model: str | None,
        path_of_mlp: str | inference.PackedGatedMlp,
        x: Array,
        *,
        expert_ids: Numbers | None = None,
        router_weights: Numbers | None = None,
        gate: str = "",
        up: str = "",
        down: str = "",
        output_dtype: DTypeLike | None = None,
        activation_function: ActivationFunction = "silu",
        path: Path = "auto",
        priority: int = 0,
        request_id: str = "",
        timeout: Timeout = None,
        execution: tensors.Execution | None = None,
    ) -> Steps[Array]:
        """y = down(activation_function(gate(x)) * up(x)) in one call, dense or of experts.

        path_of_mlp: what the three projections have in common, "model.layers.0.mlp" or
            "model.layers.0.mlp.experts.*"; or a PackedGatedMlp.
        gate, up, down: whole paths of projections that are not called gate_proj, up_proj and down_proj.
        x: FP16, BF16 or FP32 [..., K].
        expert_ids, router_weights: as in grouped_matmul, for stacks of experts.
        Others: as in matmul.

        Returns [..., N]; with experts and without router_weights [..., top_k, N].
        """
        request = inference.GatedMlpRequest()
        if isinstance(path_of_mlp, str):
            request.mlp.CopyFrom(inference.GatedMlpRef(model=model or "", path=path_of_mlp, gate=gate, up=up, down=down))
        else:
            request.packed.CopyFrom(path_of_mlp)
        ids = None if expert_ids is None else _arrays.ids_of(expert_ids, "expert_ids")
        parts = [] if ids is None else _wire.tensor_field(4, ids)
        parts += self._optional((12, router_weights, "router_weights"))
        _set_product(request, output_dtype, activation_function, path, priority, request_id)
        key = (model, path_of_mlp, gate, up, down) if isinstance(path_of_mlp, str) else None
        product = _Product("GatedMlp", request, parts, inference.GatedMlpResponse, key)
        choices = () if ids is None or router_weights is not None else ids.shape[-1:]
        y: Array = yield from self._product(product, x, choices, timeout, execution)
        return y

    # Weights.

    def dequantize(
        self,
        model: str | None,
        weight: str | tensors.PackedWeight,
        *,
        dtype: DTypeLike = "fp16",
        rows: Rows | None = None,
        columns: Rows | None = None,
        out: AnyArray | None = None,
        progress: Progress = False,
        request_id: str = "",
        timeout: Timeout = None,
        execution: tensors.Execution | None = None,
    ) -> Steps[NDArray[Any]]:
        """The weight W [K, N], or a block of it, as a dense array, of any size.

        dtype: FP16, BF16 or FP32; a dtype of PyTorch gives a tensor.
        rows, columns: (begin, end) or a slice, within K and N; end = 0 is the end.
        out: a contiguous array to fill instead of a new one, for example a numpy.memmap; its dtype is what is asked for.
        progress: True for a bar, or a function that is called with (rows so far, rows in all).
        timeout: seconds for all of it; None: the client's.

        Returns [rows, columns]. Each element is one rounding of (code - zero) * scale.
        """
        wanted = _arrays.dtype_of(dtype if out is None else out.dtype, "dtype")
        request = inference.DequantizeRequest(output_dtype=wanted, rows=_range(rows, "rows"),
                                              columns=_range(columns, "columns"), request_id=request_id)
        _source(request, model, weight)
        torch_wanted = _arrays.is_torch_dtype(dtype)
        if out is None and not torch_wanted:
            _arrays.numpy_dtype(wanted, "dtype")  # says so before anything is sent, if there is none
        bar = Bar(progress, weight if isinstance(weight, str) else "dequantize")
        filler = _Filler(out, wanted, torch_wanted, bar)
        try:
            yield Rpc(_INFERENCE + "DequantizeStream", request.SerializeToString(), self._deadline(timeout).left(), filler.add,
                      route(model, weight))
        finally:
            bar.close()
        weights: NDArray[Any] = filler.finish(execution)
        return weights

    # The cache.

    def quantize_kv(
        self,
        block: Array,
        *,
        scales: Numbers | None = None,
        zeros: Numbers | None = None,
        scale_dtype: DTypeLike | None = None,
        priority: int = 0,
        request_id: str = "",
        timeout: Timeout = None,
        execution: tensors.Execution | None = None,
    ) -> Steps[KvCodes[Array]]:
        """4-bit codes of keys or values of a cache.

        block: FP16, BF16 or FP32 [tokens, heads, head_dim].
        scales, zeros: FP16 or FP32, [1] or [heads]; without them each head of each token gets its own.
        scale_dtype: FP16 (default) or FP32, of scales and zeros that the server makes.

        Returns codes UINT8 [tokens, heads, ceil(head_dim / 2)], element 2i in the low half of byte i, and scales and
        zeros [tokens, heads], or those that were given.
        """
        request = inference.QuantizeKvRequest(priority=priority, request_id=request_id)
        request.output_encoding = tensors.RAW
        if scale_dtype is not None:
            request.scale_dtype = _arrays.dtype_of(scale_dtype, "scale_dtype")
        parts = _wire.tensor_field(1, _arrays.spec_of(block, "block"))
        parts += self._optional((3, scales, "scales"), (4, zeros, "zeros"))
        answer = yield self._inference("QuantizeKv", request, parts, self._deadline(timeout))
        response = _wire.parse(inference.QuantizeKvResponse, answer)
        if execution is not None:
            execution.CopyFrom(response.execution)
        as_torch = _arrays.is_torch(block)
        codes = _wire.array(response.codes, None, as_torch, "codes")
        if scales is not None:
            return KvCodes(codes, _arrays.numbers(scales, "scales"), _arrays.numbers(zeros, "zeros"))
        return KvCodes(codes, _wire.array(response.scales, None, as_torch, "scales"), _wire.array(response.zeros, None, as_torch, "zeros"))

    def dequantize_kv(
        self,
        codes: Array,
        scales: Numbers,
        zeros: Numbers,
        *,
        head_dim: int = 0,
        output_dtype: DTypeLike = "fp16",
        form: Literal["exact", "fma"] = "exact",
        priority: int = 0,
        request_id: str = "",
        timeout: Timeout = None,
        execution: tensors.Execution | None = None,
    ) -> Steps[Array]:
        """The elements of 4-bit codes of a cache.

        codes: UINT8 [tokens, heads, ceil(head_dim / 2)]; scales, zeros: [tokens, heads], [heads] or [1].
        head_dim: elements of a head; 0: twice the last dimension of codes.
        form: "exact", or "fma" for the bits of QServe.

        Returns [tokens, heads, head_dim].
        """
        request = inference.DequantizeKvRequest(head_dim=head_dim, priority=priority, request_id=request_id)
        request.output_encoding = tensors.RAW
        request.output_dtype = _arrays.dtype_of(output_dtype, "output_dtype")
        request.form = _enum(inference.KvForm, form, "form")
        parts = _wire.tensor_field(1, _arrays.spec_of(codes, "codes"))
        parts += self._optional((3, scales, "scales"), (4, zeros, "zeros"))
        answer = yield self._inference("DequantizeKv", request, parts, self._deadline(timeout))
        head, payload = _wire.split(answer, 1)
        response = _wire.parse(inference.DequantizeKvResponse, head)
        if execution is not None:
            execution.CopyFrom(response.execution)
        result: Array = _wire.array(response.output, payload, _arrays.is_torch(codes), "output")
        return result

    # Models and the server.

    def list_models(self, *, timeout: Timeout = None) -> Steps[Sequence[repository.ModelSummary]]:
        """Every model of the repository, loaded or not."""
        answer = yield self._rpc(_REPOSITORY + "ListModels", repository.ListModelsRequest(), timeout)
        return list(_wire.parse(repository.ListModelsResponse, answer).models)

    def get_model(self, name: str, *, timeout: Timeout = None) -> Steps[repository.GetModelResponse]:
        """One loaded model: its weights with path, k, n, scheme and kernels, and its stacks of experts."""
        deadline = self._deadline(timeout)
        model = repository.GetModelResponse()
        while True:
            request = repository.GetModelRequest(name=name, page_token=model.next_page_token)
            try:
                answer = yield Rpc(_REPOSITORY + "GetModel", request.SerializeToString(), deadline.left())
            except _errors.Error as error:
                if error.code != "ABORTED" or not model.next_page_token:
                    raise
                model = repository.GetModelResponse()  # it was loaded anew meanwhile
                continue
            page: repository.GetModelResponse = _wire.parse(repository.GetModelResponse, answer)
            model.MergeFrom(page)
            model.next_page_token = page.next_page_token
            if not page.next_page_token:
                return model

    def load_model(
        self, name: str, *, require_all_weights: bool = False, timeout: Timeout = None
    ) -> Steps[repository.LoadModelResponse]:
        """Loads a model, or swaps a loaded one for what its folder holds now. Large ones need a long timeout.

        require_all_weights: the load fails where a quantised weight cannot be read. Otherwise the server serves the others,
        unless it requires all itself; `unserved` of the answer has the missing ones with their reasons.
        """
        request = repository.LoadModelRequest(name=name, require_all_weights=require_all_weights)
        answer = yield self._rpc(_REPOSITORY + "LoadModel", request, timeout)
        loaded: repository.LoadModelResponse = _wire.parse(repository.LoadModelResponse, answer)
        return loaded

    def unload_model(self, name: str, *, timeout: Timeout = None) -> Steps[None]:
        """Requests in flight finish; the memory is freed after the last one."""
        yield self._rpc(_REPOSITORY + "UnloadModel", repository.UnloadModelRequest(name=name), timeout)

    def server_info(self, *, timeout: Timeout = None) -> Steps[info.GetServerInfoResponse]:
        """Version, devices, kernels, limits, formats."""
        answer = yield self._rpc("/awqd.v1.ServerInfo/GetServerInfo", info.GetServerInfoRequest(), timeout)
        server: info.GetServerInfoResponse = _wire.parse(info.GetServerInfoResponse, answer)
        return server

    def is_serving(self, service: str = "", *, timeout: Timeout = None) -> Steps[bool]:
        """Whether the server, or one service such as "awqd.v1.QuantizedInference", is ready."""
        request = _descriptors.message("grpc.health.v1.HealthCheckRequest")(service=service)
        answer = yield self._rpc("/grpc.health.v1.Health/Check", request, timeout)
        response = _wire.parse(_descriptors.message("grpc.health.v1.HealthCheckResponse"), answer)
        return bool(response.status == 1)

    # What they share.

    def _rpc(self, method: str, request: Any, timeout: Timeout) -> Rpc:
        return Rpc(method, request.SerializeToString(), self._deadline(timeout).left())

    def _inference(self, method: str, request: Any, parts: list[_wire.Part], deadline: _Deadline, weight: str = "") -> Rpc:
        data = b"".join([request.SerializeToString(), *parts])
        _wire.check_size(data)
        return Rpc(_INFERENCE + method, data, deadline.left(), weight=weight)

    @staticmethod
    def _optional(*fields: tuple[int, Any, str]) -> list[_wire.Part]:
        parts: list[_wire.Part] = []
        for number, array, name in fields:
            if array is not None:
                parts += _wire.tensor_field(number, _arrays.spec_of(_arrays.numbers(array, name), name))
        return parts

    def _matmul(self, model: str | None, weight: str | tensors.PackedWeight, bias: Numbers | None,
                output_dtype: DTypeLike | None, activation_function: ActivationFunction,
                activation_quantization: str | None, activation_scales: Numbers | None, path: Path,
                priority: int, request_id: str) -> tuple[inference.QuantizedMatmulRequest, list[_wire.Part]]:
        """The request without its activations: what is left to Protocol Buffers, and the other tensors."""
        request = inference.QuantizedMatmulRequest()
        _source(request, model, weight)
        if activation_quantization is not None:
            prefix = "ACTIVATIONS_" if activation_quantization in ("as_sent", "floating") else "INT8_"
            request.activation_quantization = _enum(tensors.ActivationQuantization, activation_quantization,
                                                    "activation_quantization", prefix)
        parts = self._optional((4, bias, "bias"), (13, activation_scales, "activation_scales"))
        _set_product(request, output_dtype, activation_function, path, priority, request_id)
        return request, parts

    def _product(self, product: _Product, x: Array, choices: tuple[int, ...], timeout: Timeout,
                 execution: tensors.Execution | None) -> Steps[Array]:
        """Sends a product, through shared memory where that is possible. Field 3 is the activations of all of them."""
        deadline = self._deadline(timeout)
        spec = _arrays.spec_of(x, "activations")
        as_torch = _arrays.is_torch(x)
        key = None if product.key is None else (product.method, product.key, spec.dtype, product.request.output_dtype)
        memory = yield from self._memory(spec, key, choices, deadline)
        if memory is not None:
            shared = yield from self._shared_product(product, memory, spec, key, deadline)
            if shared is not None:
                response, payload = shared
                result: Array = _wire.array(response.output, payload, as_torch, "output")
                payload.release()
                assert self._pool is not None
                self._pool.release(memory)
                if execution is not None:
                    execution.CopyFrom(response.execution)
                return result
        answer = yield self._inference(product.method, product.request, product.parts + _wire.tensor_field(3, spec), deadline,
                                       product.route)
        head, raw = _wire.split(answer, 1)
        response = _wire.parse(product.response, head)
        if execution is not None:
            execution.CopyFrom(response.execution)
        if key is not None and response.output.shape:
            self._seen[key] = (response.output.shape[-1], response.output.dtype)
        result = _wire.array(response.output, raw, as_torch, "output")
        return result

    def _memory(self, spec: Spec, key: tuple[object, ...] | None, choices: tuple[int, ...],
                deadline: _Deadline) -> Steps[_shared_memory.Memory | None]:
        """Room for the activations and the answer; None where a message does better or has to do."""
        if not self._share or key is None or key not in self._seen:
            return None
        columns, dtype = self._seen[key]
        output = math.prod(spec.shape[:-1] + choices) * columns * _arrays.ITEMSIZE[dtype]
        if spec.data.nbytes + output < SHARED_MEMORY_BYTES:
            return None
        if self._pool is None:
            try:
                answer = yield Rpc("/awqd.v1.ServerInfo/GetServerInfo", b"", deadline.left())
                prefix = _wire.parse(info.GetServerInfoResponse, answer).limits.shared_memory_prefix
            except (_errors.PermissionDenied, _errors.Unimplemented):
                prefix = ""  # who may not look may still call
            if not prefix:
                self._share = False
                return None
            if self._pool is None:
                self._pool = _shared_memory.Pool(prefix)
        try:
            return self._pool.acquire(spec.data.nbytes + output)
        except (OSError, ValueError):
            return None

    def _shared_product(self, product: _Product, memory: _shared_memory.Memory, spec: Spec, key: Any,
                        deadline: _Deadline) -> Steps[tuple[Any, memoryview] | None]:
        """The response and where its bytes are; None when the server cannot use the memory after all."""
        assert self._pool is not None
        size = spec.data.nbytes
        memory.map[:size] = spec.data
        request = type(product.request)()
        request.CopyFrom(product.request)
        request.activations.CopyFrom(tensors.Tensor(
            dtype=spec.dtype, shape=spec.shape, shared_memory=memory.range(0, size)))
        request.output_shared_memory.CopyFrom(memory.range(size, len(memory.map) - size))
        try:
            answer = yield self._inference(product.method, request, product.parts, deadline, product.route)
            response = _wire.parse(product.response, answer)
            place = response.output.shared_memory
            if place.name != memory.name or not size <= place.offset <= place.offset + place.size <= len(memory.map):
                raise _errors.DataLoss("output: lies outside the memory that was offered", field="output")
        except (_errors.InvalidArgument, _errors.ResourceExhausted, _errors.Unimplemented) as error:
            self._pool.discard(memory)
            if "shared_memory" not in error.message:
                raise
            if error.field.startswith("output_shared_memory"):
                self._seen.pop(key, None)  # the weight was swapped for a wider one, or this
            if not isinstance(error, _errors.ResourceExhausted):
                self._share = error.field.startswith("output_shared_memory") and self._share
            return None
        except BaseException:
            self._pool.discard(memory)
            raise
        return response, memoryview(memory.map)[place.offset:place.offset + place.size]


@dataclass(frozen=True)
class _Product:
    """A product without its activations. key: which weights, if they have a name."""

    method: str
    request: Any
    parts: list[_wire.Part]
    response: Any
    key: tuple[Any, ...] | None

    @property
    def route(self) -> str:
        return "" if self.key is None else route(self.key[0], self.key[1])


def _set_product(request: Any, output_dtype: DTypeLike | None, activation_function: str, path: str, priority: int,
                 request_id: str) -> None:
    """The fields that requests for products share."""
    if output_dtype is not None:
        request.output_dtype = _arrays.dtype_of(output_dtype, "output_dtype")
    request.activation_function = _enum(tensors.ActivationFunction, activation_function, "activation_function")
    request.path = _enum(tensors.Path, path, "path")
    request.priority = priority
    request.request_id = request_id
    request.output_encoding = tensors.RAW


class _Filler:
    """Puts the chunks of a weight into an array, and sees that none is missing."""

    def __init__(self, out: Any, dtype: int, torch_wanted: bool, bar: Bar) -> None:
        self._out = out
        self._dtype = dtype
        self._torch_wanted = torch_wanted
        self._bar = bar
        self._bytes: memoryview | None = None
        self._done = self._rows = self._columns = 0
        self._execution: Any = None

    def _begin(self, rows: int, columns: int) -> memoryview:
        self._rows, self._columns = rows, columns
        if self._out is None:
            if self._torch_wanted:
                self._out = _arrays.array_of(self._dtype, (0, columns), b"", True, "dtype").new_empty((rows, columns))
            else:
                self._out = np.empty((rows, columns), _arrays.numpy_dtype(self._dtype, "dtype"))
        elif tuple(self._out.shape) != (rows, columns):
            raise _errors.InvalidArgument(f"out: got the shape {list(self._out.shape)}, expected {[rows, columns]}",
                                          field="out")
        return _arrays.bytes_of(self._out)

    def add(self, data: bytes) -> None:
        head, payload = _wire.split(data, 3)
        chunk = _wire.parse(inference.DequantizeChunk, head)
        if self._bytes is None:
            self._bytes = self._begin(chunk.total_rows, chunk.total_columns)
        raw = memoryview(chunk.output.raw) if payload is None else payload
        _wire.check_payload(chunk.output, raw, "output")
        rows = chunk.output.shape[0] if chunk.output.shape else 0
        shape = (rows, self._columns)
        if chunk.output.dtype != self._dtype or tuple(chunk.output.shape) != shape or self._done + rows > self._rows:
            raise _errors.DataLoss(f"chunk: got {list(chunk.output.shape)} after row {self._done} of {self._rows}, "
                                   f"expected rows of {self._columns}", field="output")
        row_bytes = self._columns * _arrays.ITEMSIZE[self._dtype]
        self._bytes[self._done * row_bytes:(self._done + rows) * row_bytes] = raw
        self._done += rows
        self._bar.update(self._done, self._rows, row_bytes)
        if chunk.HasField("execution"):
            self._execution = chunk.execution

    def finish(self, execution: tensors.Execution | None) -> Any:
        if self._bytes is None or self._done != self._rows:
            raise _errors.DataLoss(f"output: got {self._done} rows, expected {self._rows}", field="output")
        if execution is not None and self._execution is not None:
            execution.CopyFrom(self._execution)
        return self._out
