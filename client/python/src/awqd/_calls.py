"""What each call sends and makes of the answer, without sending anything itself.

A method of Calls is a generator: it yields an Rpc or a Wait, is sent the answer or thrown its error, and returns the
result. So the blocking and the asyncio client, which differ in how they send and wait, share all of it.
"""
from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar, Union

import numpy as np
from numpy.typing import NDArray

from awqd import _arrays, _descriptors, _device, _errors, _ring, _shared_memory, _stream, _wire
from awqd._arrays import AnyArray, Array, DTypeLike, Numbers, Spec
from awqd._progress import Bar, Progress
from awqd.v1 import inference_pb2 as inference
from awqd.v1 import model_repository_pb2 as repository
from awqd.v1 import server_info_pb2 as info
from awqd.v1 import tensor_pb2 as tensors

T = TypeVar("T")
Path = Literal["auto", "fused", "dequantize"]
ActivationFunction = Literal["none", "relu", "gelu", "silu", "gelu_tanh", "swiglu_oai", "situ"]
ActivationQuantization = Literal["per_token", "static", "as_declared", "floating", "fp8_per_token", "fp8_per_block_128",
                                 "fp8_static", "fp8_as_declared"]
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

    holds: a stream whose first message says that something lasts as long as it; the answer is the stream.
    weight: "MODEL/PATH" of what it needs, by which load balancers can send it to the server that holds it.
    """

    method: str
    request: bytes
    timeout: float | None
    sink: Callable[[bytes], None] | None = None
    weight: str = ""
    holds: bool = False

    @property
    def kind(self) -> str:
        return "unary_unary" if self.sink is None and not self.holds else "unary_stream"


@dataclass(frozen=True)
class Wait:
    """Something of a ring that takes time. `run` blocks; in an event loop it is a coroutine, or `in_thread` runs it."""

    run: Callable[[], Any]
    in_thread: bool = False


Steps = Generator[Union[Rpc, Wait], Any, T]


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


@dataclass(frozen=True, eq=False)
class Router:
    """Router logits in place of expert_ids and router_weights: the server chooses top_k experts for each token.

    logits: FP16, BF16 or FP32 [..., experts], leading dimensions as x has them; in chain() also the number of the step
        whose result they are, from 1.
    scoring: how scores are made of logits: softmax or sigmoid over all experts, or sqrt(log(1 + exp(logit))).
    correction_bias: [experts], added to scores for the choice, not to weights.
    n_group, topk_group: the experts form so many groups, and are chosen from so many of them.
    norm_topk_prob: the weights of a token are divided by their sum, then multiplied by routed_scaling_factor.
    """

    logits: Numbers | int
    top_k: int
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    correction_bias: Numbers | None = None
    n_group: int = 0
    topk_group: int = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0

    def _message(self) -> Any:
        """All but the logits, which are of each call."""
        out = inference.Router(top_k=self.top_k,
                               scoring=_enum(inference.RouterScoring, self.scoring, "router.scoring"), n_group=self.n_group,
                               topk_group=self.topk_group, norm_topk_prob=self.norm_topk_prob,
                               routed_scaling_factor=self.routed_scaling_factor)
        if self.correction_bias is not None:
            out.correction_bias.CopyFrom(_tensor(self.correction_bias, "router.correction_bias"))
        return out


class Step:
    """A step of chain(): a product like that of the client's method `call`, with its options.

    call: "matmul", "grouped_matmul" or "mlp". model, weight: as of that method.
    x: 0: the step takes x of the chain; i: the result of step i, from 1, an earlier one.
    options: those of the method, but what is of the whole chain.
    """

    def __init__(self, call: Literal["matmul", "grouped_matmul", "mlp"], model: str, weight: str, *, x: int = 0,
                 **options: Any) -> None:
        self.call, self.model, self.weight, self.x, self.options = call, model, weight, x, options

    def __repr__(self) -> str:
        return f"Step({self.call!r}, {self.model!r}, {self.weight!r}, x={self.x})"


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


def _tensor(values: Any, field: str) -> tensors.Tensor:
    spec = _arrays.spec_of(_arrays.numbers(values, field), field)
    return tensors.Tensor(dtype=spec.dtype, shape=spec.shape, raw=bytes(spec.data))


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

    def __init__(self, timeout: float, shared_memory: bool, ring: bool | str, make_ring: type[_ring.Ring],
                 authorization: Callable[[], str]) -> None:
        self._timeout = timeout
        self._ring_path = ring
        self._make_ring = make_ring
        self._authorization = authorization
        self._ring_lock = threading.Lock()
        self._ring: _ring.Ring | None = None
        self._regions = _device.Regions()
        self._share = shared_memory and _shared_memory.available()
        self._pool: _shared_memory.Pool | None = None
        # Columns and dtype of answers that were seen, by what was asked: a shared answer needs room made beforehand.
        self._seen: dict[tuple[object, ...], tuple[int, int]] = {}

    def close(self) -> None:
        self._regions.close()
        if self._pool is not None:
            self._pool.close()
        self._share = False
        with self._ring_lock:
            if self._ring is not None:
                self._ring.close()
            self._ring_path = False

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
        out: Array | None = None,
    ) -> Steps[Array]:
        """y = activation_function(x @ W + bias), computed from the quantised weight.

        model, weight: names as list_models() and get_model() have them; or None and a packed_weight().
        x: FP16, BF16 or FP32 [..., K]; INT8 [..., K] for a weight of integers; with activation_scales INT8 or
            float8_e4m3fn, of PyTorch or ml_dtypes.
        bias: [N], instead of the weight's own.
        output_dtype: x's by default; INT32 of INT8, FP16 of x with activation_scales.
        activation_quantization: has the server round x to INT8 first, or to E4M3 with "fp8_", by a scale of each
            token or block of 128, by activation_scales (one element), or as the checkpoint says; "floating": it
            does not, whatever its own default.
        activation_scales: FP32, positive: one for each token, or one element for all; of float8_e4m3fn also
            [..., ceil(K / 128)], one for each block.
        path: "fused" or "dequantize" overrides the server's choice.
        priority: larger is served first.
        timeout: seconds; None: the client's; math.inf: no deadline.
        execution: is filled with what ran: kernel, batch, microseconds in the queue and on the device.
        out: an array in memory of a GPU, of a register()ed one, that y is written to.

        Returns y [..., N], of NumPy or PyTorch as x is; out, if that is given. x may be in memory of a GPU, too, of a
        register()ed array: the server reads it there, once the work on the current stream is done.
        """
        request, parts = self._matmul(model, weight, bias, output_dtype, activation_function, activation_quantization,
                                      path, priority, request_id)
        key = (model, weight) if isinstance(weight, str) else None
        product = _Product("QuantizedMatmul", request, parts, inference.QuantizedMatmulResponse, key,
                           scales=_scales(activation_scales))
        y: Array = yield from self._product(product, x, (), timeout, execution, out)
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
                                              activation_quantization, path, priority, ""))

    def grouped_matmul(
        self,
        model: str | None,
        stack: str | inference.PackedStack,
        x: Array,
        expert_ids: Numbers | None = None,
        *,
        router_weights: Numbers | None = None,
        router: Router | None = None,
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
        out: Array | None = None,
    ) -> Steps[Array]:
        """Products of a mixture of experts: each token with the weights of the experts chosen for it.

        stack: "model.layers.0.mlp.experts.*.up_proj", with "*" for the number of the expert; or a PackedStack.
        x: FP16, BF16 or FP32 [..., K]; with activation_scales float8_e4m3fn.
        expert_ids: integers [..., top_k], from 0, leading dimensions as x has them; an array or nested lists.
        router_weights: [..., top_k]; the results of a token are then summed by them.
        router: a Router, instead of these two; the results of a token are summed.
        bias: [experts, N], instead of the experts' own.
        activation_quantization: "floating" or one of E4M3. activation_scales: of float8_e4m3fn as in matmul; of
            "fp8_static" one or [experts].
        Others: as in matmul.

        Returns [..., N] with router_weights or router, otherwise [..., top_k, N].
        """
        request = inference.GroupedQuantizedMatmulRequest()
        _source(request, model, stack)
        routing, choices = self._routing(request, expert_ids, router_weights, router)
        parts = self._optional((13, bias, "bias"))
        _set_product(request, output_dtype, activation_function, activation_quantization, path, priority, request_id)
        key = (model, stack) if isinstance(stack, str) else None
        product = _Product("GroupedQuantizedMatmul", request, parts, inference.GroupedQuantizedMatmulResponse, key, *routing,
                           scales=_scales(activation_scales), scales_number=16)
        y: Array = yield from self._product(product, x, choices, timeout, execution, out)
        return y

    def mlp(
        self,
        model: str | None,
        path_of_mlp: str | inference.PackedGatedMlp,
        x: Array,
        *,
        expert_ids: Numbers | None = None,
        router_weights: Numbers | None = None,
        router: Router | None = None,
        gate: str = "",
        up: str = "",
        down: str = "",
        gate_bias: Numbers | None = None,
        up_bias: Numbers | None = None,
        down_bias: Numbers | None = None,
        shared_expert: str = "",
        shared_expert_gate: Numbers | None = None,
        output_dtype: DTypeLike | None = None,
        activation_function: ActivationFunction = "silu",
        activation_limit: float | None = None,
        activation_alpha: float | None = None,
        activation_beta: float | None = None,
        activation_linear_beta: float | None = None,
        activation_quantization: ActivationQuantization | None = None,
        activation_scales: Numbers | None = None,
        down_activation_scales: Numbers | None = None,
        path: Path = "auto",
        priority: int = 0,
        request_id: str = "",
        timeout: Timeout = None,
        execution: tensors.Execution | None = None,
        out: Array | None = None,
    ) -> Steps[Array]:
        """y = down(activation_function(gate(x)) * up(x)) in one call, dense or of experts.

        path_of_mlp: what the three projections have in common, "model.layers.0.mlp" or
            "model.layers.0.mlp.experts.*"; or a PackedGatedMlp.
        gate, up, down: whole paths of projections that are not called gate_proj, up_proj and down_proj.
        x: as in grouped_matmul.
        expert_ids, router_weights, router: as in grouped_matmul, for stacks of experts.
        gate_bias, up_bias, down_bias: instead of the weights' own: of their columns, of experts [experts, columns].
        shared_expert: what the paths of a gated MLP have in common whose result is added to the experts'; with
            shared_expert_gate [K] times sigmoid(x . shared_expert_gate). Of a PackedGatedMlp: its own field.
        activation_limit: gate is clamped to at most this, up on both sides; 7 by default for "swiglu_oai".
        activation_quantization: as in grouped_matmul, of x and of what enters down; of the latter alone where x is
            float8_e4m3fn. activation_scales, down_activation_scales: as there, and then the shared expert's.
        activation_alpha: of "swiglu_oai", 1.702 by default. activation_beta, activation_linear_beta: of "situ", 4 and 25.
        Others: as in matmul.

        Returns [..., N]; with expert_ids and without router_weights [..., top_k, N].
        """
        request = inference.GatedMlpRequest()
        if isinstance(path_of_mlp, str):
            request.mlp.CopyFrom(inference.GatedMlpRef(model=model or "", path=path_of_mlp, gate=gate, up=up, down=down,
                                                       shared_expert=shared_expert))
        else:
            request.packed.CopyFrom(path_of_mlp)
        routing, choices = self._routing(request, expert_ids, router_weights, router)
        parts = self._optional((14, gate_bias, "gate_bias"), (15, up_bias, "up_bias"), (16, down_bias, "down_bias"),
                               (18, shared_expert_gate, "shared_expert_gate"),
                               (21, down_activation_scales, "down_activation_scales"))
        _set_product(request, output_dtype, activation_function, activation_quantization, path, priority, request_id)
        parameters = {"limit": activation_limit, "alpha": activation_alpha, "beta": activation_beta,
                      "linear_beta": activation_linear_beta}
        for name, value in parameters.items():
            if value is not None:
                setattr(request.activation_parameters, name, value)
        key = (model, path_of_mlp, gate, up, down) if isinstance(path_of_mlp, str) else None
        product = _Product("GatedMlp", request, parts, inference.GatedMlpResponse, key, *routing,
                           scales=_scales(activation_scales), scales_number=20)
        y: Array = yield from self._product(product, x, choices, timeout, execution, out)
        return y

    def chain(
        self,
        steps: Sequence[Step],
        x: Array,
        *,
        expert_ids: Numbers | None = None,
        router_weights: Numbers | None = None,
        router: Router | None = None,
        timeout: Timeout = None,
        execution: tensors.Execution | None = None,
    ) -> Steps[list[Array]]:
        """Products whose x are the results of others: through a ring in one call, otherwise in one call each.

        steps: run in order: Step("matmul", "my-model", "model.layers.0.mlp.up_proj", activation_function="relu").
        x: as in matmul; steps with x=0 take it.
        expert_ids, router_weights, router: as in grouped_matmul, for all steps whose weights are stacks of experts.
        Others: as in matmul; execution adds the times up.

        Returns y of each step.
        """
        deadline = self._deadline(timeout)
        if not 1 <= len(steps) <= 32:
            raise _errors.InvalidArgument(f"steps: got {len(steps)}, expected 1 to 32", field="steps")
        logits = router.logits if router is not None and isinstance(router.logits, int) else 0
        if logits and router is not None:
            router = replace(router, logits=np.zeros(0, np.float32))
        routing = {"expert_ids": expert_ids, "router_weights": router_weights, "router": router}
        given = {name: value for name, value in routing.items() if value is not None}
        planned = [_Planned(number, step, given) for number, step in enumerate(steps)]
        for each in planned:
            for field, source in (("x", each.x), ("router.logits", logits if each.product.logits else 0)):
                if not 0 <= source <= each.number or (source and planned[source - 1].choices):
                    raise _errors.InvalidArgument(
                        f"steps[{each.number}].{field}: got {source}, expected 0 or an earlier step from 1 with one row a token",
                        field=f"steps[{each.number}].{field}")
        spec = _arrays.spec_of(x, "activations")
        rows: tuple[int, ...] = spec.shape[:-1]
        as_torch = _arrays.is_torch(x)
        routed: Spec | None = next((each.product.routed for each in planned if each.product.routed is not None), None)
        ids: Spec | None = next((each.product.ids for each in planned if each.product.ids is not None), None)
        scales = [each.product.token_scales(spec) for each in planned if each.x == 0 and each.product.scales is not None]
        alike = all(each == scales[0] for each in scales)  # a ring has one tensor of scales
        if self._ring_path and alike and all(each.product.rings(spec, bool(logits)) for each in planned):
            key = ("Chain", tuple((each.x, logits, each.product.method, each.product.template(spec)) for each in planned))
            inputs = _ring.Inputs(spec, ids, None if logits else routed, scales[0] if scales else None)
            ran = yield from self._run_in_ring(key, [each.step_of_ring(spec, logits) for each in planned], rows, inputs, deadline)
            if ran is not None:
                prepared, y, what_ran = ran
                if execution is not None:
                    execution.CopyFrom(what_ran)
                results: list[Array] = []
                at = 0
                for each, call in zip(planned, prepared.steps):
                    size = call.y_bytes * math.prod(rows)
                    shape: tuple[int, ...] = rows + each.choices + (call.y_columns,)
                    results.append(_arrays.array_of(call.y_dtype, shape, memoryview(y)[at:at + size], as_torch, "output"))
                    at += size
                return results
        return (yield from self._run_steps(planned, x, logits, deadline, execution))

    def _run_steps(self, planned: Sequence[_Planned], x: Array, logits: int, deadline: _Deadline,
                   execution: tensors.Execution | None) -> Steps[list[Array]]:
        """A chain in one call for each step."""
        results: list[Array] = []
        kernels = []
        sums = tensors.Execution()
        for each in planned:
            product = each.product
            if logits and product.logits is not None:
                product = replace(product, logits=_arrays.spec_of(results[logits - 1], "router.logits"))
            left = deadline.left()
            ran = tensors.Execution()
            y = yield from self._product(product, results[each.x - 1] if each.x else x, each.choices,
                                         math.inf if left is None else left, ran, None)
            results.append(y)
            kernels.append(ran.kernel)
            ran.queue_us += sums.queue_us
            ran.compute_us += sums.compute_us
            sums = ran
        if execution is not None:
            sums.kernel = ",".join(kernels)
            execution.CopyFrom(sums)
        return results

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

    def _routing(self, request: Any, expert_ids: Numbers | None, router_weights: Numbers | None,
                 router: Router | None) -> tuple[tuple[Spec | None, Spec | None, Spec | None], tuple[int, ...]]:
        """The ids, the router weights and the logits, and the dimension of the answer for the choices of a token."""
        def numbers(values: Numbers | int | None, field: str) -> Spec | None:
            return None if values is None else _arrays.spec_of(_arrays.numbers(values, field), field)

        if router is not None:
            request.router.CopyFrom(router._message())
        ids = None if expert_ids is None else _arrays.ids_of(expert_ids, "expert_ids")
        weights = numbers(router_weights, "router_weights")
        logits = None if router is None else numbers(router.logits, "router.logits")
        return (ids, weights, logits), () if ids is None or weights is not None else ids.shape[-1:]

    def _matmul(self, model: str | None, weight: str | tensors.PackedWeight, bias: Numbers | None,
                output_dtype: DTypeLike | None, activation_function: ActivationFunction,
                activation_quantization: str | None, path: Path, priority: int,
                request_id: str) -> tuple[inference.QuantizedMatmulRequest, list[_wire.Part]]:
        """The request without its activations: what is left to Protocol Buffers, and the bias."""
        request = inference.QuantizedMatmulRequest()
        _source(request, model, weight)
        parts = self._optional((4, bias, "bias"))
        _set_product(request, output_dtype, activation_function, activation_quantization, path, priority, request_id)
        return request, parts

    def _product(self, product: _Product, x: Array, choices: tuple[int, ...], timeout: Timeout,
                 execution: tensors.Execution | None, out: Array | None) -> Steps[Array]:
        """Sends a product, through shared memory where that is possible. Field 3 is the activations of all of them."""
        deadline = self._deadline(timeout)
        if out is not None or _device.is_on_device(x):
            on_device: Array = yield from self._device_product(product, x, choices, out, deadline, execution)
            return on_device
        spec = _arrays.spec_of(x, "activations")
        as_torch = _arrays.is_torch(x)
        key = None if product.key is None else (product.method, product.key, spec.dtype, product.request.output_dtype)
        rows: tuple[int, ...] = spec.shape[:-1]
        if self._ring_path and product.rings(spec):
            inputs = _ring.Inputs(spec, product.ids, product.routed, product.token_scales(spec))
            ran = yield from self._run_in_ring((product.method, product.template(spec)), (), rows, inputs, deadline)
            if ran is not None:
                prepared, y, what_ran = ran
                if execution is not None:
                    execution.CopyFrom(what_ran)
                shape: tuple[int, ...] = (*rows, *choices, prepared.y_columns)
                by_ring: Array = _arrays.array_of(prepared.y_dtype, shape, y, as_torch, "output")
                return by_ring
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
        answer = yield self._inference(product.method, product.request, product.fields() + _wire.tensor_field(3, spec),
                                       deadline, product.route)
        head, raw = _wire.split(answer, 1)
        response = _wire.parse(product.response, head)
        if execution is not None:
            execution.CopyFrom(response.execution)
        if key is not None and response.output.shape:
            self._seen[key] = (response.output.shape[-1], response.output.dtype)
        result = _wire.array(response.output, raw, as_torch, "output")
        return result

    def register(self, array: AnyArray, *, early_answers: bool = False) -> Steps[_device.Region]:
        """Lets a server on this machine read and write an array in memory of a GPU, without a copy by way of the host.

        array: a CUDA tensor of PyTorch, or any array with __dlpack__ there; contiguous, in memory of cudaMalloc. A client with
            a ring takes memory of cuMemCreate, too, as of PyTorch's expandable_segments, where the array lies in one piece
            of it (of 2 or 20 MiB) that was made for file descriptors.
        early_answers: calls with `out` there return once the GPU has their kernels, and the current stream waits for the
            result. One call at a time writes to such an array.

        Returns a Region, which ends with its close(), its `with` or the client. The server runs with --cuda_shared_memory.
        """
        if not _device.is_on_device(array):
            raise _errors.InvalidArgument("array: got one on the CPU, expected one in memory of a GPU", field="array")
        region = _device.Region(array, _device.describe(array, "array"), early_answers)
        request, descriptor = region._request().SerializeToString(), region._exported.descriptor
        try:
            if descriptor is None:
                call = yield Rpc(_INFERENCE + "ShareMemory", request, None, holds=True)
                self._regions.add(region, call.cancel)
            elif not self._ring_path:
                raise _errors.FailedPrecondition("array: got memory that goes to the server by a ring alone", field="array",
                                                 hint="Client(..., ring=True), and a server with --ring_path")
            else:
                ring = yield from self._open_ring(self._deadline(None))
                yield Wait(functools.partial(ring.share, request, descriptor), in_thread=True)
                self._regions.add(region, functools.partial(ring.unshare, region.name))
        except BaseException:
            region._free()
            raise
        return region

    def _device_product(self, product: _Product, x: Any, choices: tuple[int, ...], out: Any, deadline: _Deadline,
                        execution: tensors.Execution | None) -> Steps[Any]:
        """x, out or both are in memory of a GPU."""
        array = _device.describe(x, "activations") if _device.is_on_device(x) else None
        region = None if array is None else self._regions.find(array, "activations")
        place = None if out is None else _device.describe_out(out)
        out_region = None if place is None else self._regions.find(place, "out")
        request = type(product.request)()
        request.CopyFrom(product.request)
        if place is not None and request.output_dtype == 0:
            request.output_dtype = place.dtype
        product = replace(product, request=request)
        parts = product.fields()
        if array is None:
            parts = parts + _wire.tensor_field(3, _arrays.spec_of(x, "activations"))
        with contextlib.nullcontext() if place is None or out_region is None else out_region._receive(place):
            if array is not None and region is not None:
                region._record(array)
                if place is not None and out_region is not None and self._ring_path and product.rings(array.spec):
                    ran = yield from self._device_in_ring(product, array, region, choices, place, out_region, deadline)
                    if ran is not None:
                        if execution is not None:
                            execution.CopyFrom(ran)
                        return out
                request.activations.CopyFrom(tensors.Tensor(dtype=array.dtype, shape=array.shape, shared_memory=region._range(array)))
            elif place is not None and out_region is not None:
                out_region._record(place)
            if place is not None and out_region is not None:
                request.output_shared_memory.CopyFrom(out_region._range(place))
            answer = yield self._inference(product.method, request, parts, deadline, product.route)
            head, raw = _wire.split(answer, 1)
            response = _wire.parse(product.response, head)
            if execution is not None:
                execution.CopyFrom(response.execution)
            if place is None:
                result = _wire.array(response.output, raw, _arrays.is_torch(x), "output")
                return result.to(x.device) if _arrays.is_torch(x) else result
            _check_out(place, tuple(response.output.shape), response.output.dtype)
            return out

    def _device_in_ring(self, product: _Product, x: _device.DeviceArray, region: _device.Region, choices: tuple[int, ...],
                        out: _device.DeviceArray, out_region: _device.Region, deadline: _Deadline) -> Steps[tensors.Execution | None]:
        """What ran; None where the call has to be a message."""
        named = type(product.request)(activations=tensors.Tensor(shared_memory=tensors.SharedMemory(region=region.name)),
                                      output_shared_memory=tensors.SharedMemory(region=out_region.name))
        key = (product.method, product.template(x.spec) + named.SerializeToString())
        places = (region._range(x).offset, out_region._range(out).offset)
        inputs = _ring.Inputs(None, product.ids, product.routed, product.token_scales(x.spec), places)
        rows = x.shape[:-1]

        def check(prepared: _ring.Prepared) -> None:
            _check_out(out, (*rows, *choices, prepared.y_columns), prepared.y_dtype)

        ran = yield from self._run_in_ring(key, (), rows, inputs, deadline, check)
        return None if ran is None else ran[2]

    def _open_ring(self, deadline: _Deadline) -> Steps[_ring.Ring]:
        """The ring, opened anew where the server has closed it since."""
        path = self._ring_path
        if path is True:
            answer = yield Rpc("/awqd.v1.ServerInfo/GetServerInfo", b"", deadline.left())
            path = _wire.parse(info.GetServerInfoResponse, answer).limits.ring_path
            if not path:
                raise _errors.FailedPrecondition("ring: the server runs without --ring_path", hint="leave out ring=True")
        ring: _ring.Ring = yield Wait(functools.partial(self._connect, path, deadline), in_thread=True)
        return ring

    def _connect(self, path: str | bool, deadline: _Deadline) -> _ring.Ring:
        with self._ring_lock:
            if not self._ring_path:
                raise _errors.closed()
            if self._ring is None or not self._ring.usable():
                self._ring_path = path
                self._ring = self._make_ring(str(path).removeprefix("unix:"), self._authorization(), deadline.left())
            return self._ring

    def _run_in_ring(self, key: _ring.Key, steps: Sequence[_ring.Step], rows: tuple[int, ...], inputs: _ring.Inputs,
                     deadline: _Deadline, check: Callable[[_ring.Prepared], None] | None = None) -> Steps[tuple[_ring.Prepared, bytes, tensors.Execution] | None]:
        """The prepared call, the bytes of y, and what ran; None where the call has to be a message."""
        ring = self._ring
        if ring is None or not ring.usable():
            ring = yield from self._open_ring(deadline)
        prepared = ring.find(key)
        if prepared is None:
            try:
                yield Wait(functools.partial(ring.prepare, key, steps), in_thread=True)
            except (_errors.Unavailable, _errors.ResourceExhausted):
                return None  # a message waits for a model that is loaded on demand, and needs no number
            prepared = ring.find(key)
            if prepared is None:
                return None  # it was dropped at once, for many others
        try:
            if check is not None:
                check(prepared)
            ran = yield Wait(functools.partial(ring.run, prepared, math.prod(rows), inputs, deadline.left()))
        finally:
            ring.done(prepared)
        return None if ran is None else (prepared, *ran)

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
            answer = yield self._inference(product.method, request, product.fields(), deadline, product.route)
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
    ids: Spec | None = None
    weights: Spec | None = None  # router weights
    logits: Spec | None = None
    scales: Spec | None = None
    scales_number: int = 13  # their field

    def fields(self) -> list[_wire.Part]:
        """The other tensors."""
        fields = list(self.parts)
        for number, tensor in ((4, self.ids), (12, self.weights), (self.scales_number, self.scales)):
            fields += [] if tensor is None else _wire.tensor_field(number, tensor)
        if self.logits is not None:  # the parser merges them with the router of the request
            field = b"".join(_wire.tensor_field(1, self.logits))
            fields.append(type(self.request)(router=inference.Router.FromString(field)).SerializeToString())
        return fields

    @property
    def routed(self) -> Spec | None:
        """What a ring calls router: only one is there in a call that is right."""
        return self.weights or self.logits

    def rings(self, x: Spec, logits_follow: bool = False) -> bool:
        """Whether a prepared call can stand for it: one for all with its weight and any tokens, but of no id.

        Where tensors do not fit each other, the server says what is wrong with the message.
        """
        rows, scales = x.shape[:-1], self.scales
        logits = None if logits_follow else self.logits
        fit = all(each is None or each.shape[:-1] == rows for each in (self.ids, self.weights, logits))
        scaled = scales is None or scales.shape in ((), (1,)) or (
            rows in (scales.shape, scales.shape[:-1]) if x.dtype in _arrays.OF_8_BITS else self.method != "QuantizedMatmul")
        return fit and scaled and bool(x.shape) and self.key is not None and not self.request.request_id

    def token_scales(self, x: Spec) -> Spec | None:
        """Scales of each token, which tokens of 8 bits have; those to quantise by are part of the template."""
        if x.dtype not in _arrays.OF_8_BITS:
            return None
        if self.scales is None or self.scales.shape == x.shape[:-1] or len(self.scales.shape) == len(x.shape):
            return self.scales
        return Spec(self.scales.dtype, x.shape[:-1], memoryview(bytes(self.scales.data) * math.prod(x.shape[:-1])))

    def template(self, x: Spec) -> bytes:
        """The request for any number of tokens: its tensors have no contents, but scales of all tokens have."""
        def empty(tensor: Spec) -> tensors.Tensor:
            return tensors.Tensor(dtype=tensor.dtype, shape=tensor.shape[-1:])

        kinds: dict[str, Any] = {"activations": empty(x)}
        if self.ids is not None:
            kinds["expert_ids"] = empty(self.ids)
        if self.weights is not None:
            kinds["router_weights"] = empty(self.weights)
        if self.logits is not None:
            kinds["router"] = inference.Router(logits=empty(self.logits))
        if self.scales is not None:
            of_tokens, shape = x.dtype in _arrays.OF_8_BITS, self.scales.shape or (1,)
            if of_tokens:
                shape = shape[-1:] if len(shape) == len(x.shape) else (1,)
            raw = None if of_tokens else bytes(self.scales.data)
            kinds["activation_scales"] = tensors.Tensor(dtype=self.scales.dtype, shape=shape, raw=raw)
        return b"".join([self.request.SerializeToString(), *self.parts, type(self.request)(**kinds).SerializeToString()])

    @property
    def route(self) -> str:
        return "" if self.key is None else route(self.key[0], self.key[1])


class _Planner(Calls):
    """Makes products and runs none."""

    def __init__(self) -> None:
        super().__init__(math.inf, False, False, _ring.Ring, str)

    def _product(self, product: _Product, x: Any, choices: tuple[int, ...], timeout: Timeout, execution: Any,
                 out: Any) -> Steps[Any]:
        return product, choices
        yield


class _Planned:
    """A step of a chain, with its product. given: what the chain has for steps of experts."""

    product: _Product
    choices: tuple[int, ...]

    def __init__(self, number: int, step: Step, given: Mapping[str, Any]) -> None:
        self.number, self.x = number, step.x
        names = [step.weight, *(str(step.options.get(name, "")) for name in ("gate", "up", "down"))]
        of_chain = {"timeout", "execution", "request_id", "expert_ids", "router_weights", "router"}
        for name in of_chain & step.options.keys():
            raise _errors.InvalidArgument(f"steps[{number}].{name}: got one, expected none: it is of all steps, or of no chain",
                                          field=f"steps[{number}].{name}")
        if step.call not in ("matmul", "grouped_matmul", "mlp") or not isinstance(step.weight, str):
            raise _errors.InvalidArgument(f"steps[{number}]: got {step!r}, expected matmul, grouped_matmul or mlp of a named weight",
                                          field=f"steps[{number}]")
        routing = given if step.call != "matmul" and any("*" in name for name in names) else {}
        try:
            next(getattr(_Planner(), step.call)(step.model, step.weight, None, **step.options, **routing))
        except StopIteration as stop:
            self.product, self.choices = stop.value

    def step_of_ring(self, x: Spec, logits: int) -> _ring.Step:
        product = self.product

        def template(x_of: tuple[int, int] | None, logits_of: tuple[int, int] | None) -> bytes:
            """The template, with the columns and the dtype of earlier results."""
            made = product
            if logits_of is not None:
                made = replace(product, logits=Spec(logits_of[1], (logits_of[0],), memoryview(b"")))
            return made.template(x if x_of is None else Spec(x_of[1], (x_of[0],), memoryview(b"")))

        return _ring.Step(product.method, self.x, logits if product.logits is not None else 0, template)


def _check_out(out: _device.DeviceArray, shape: tuple[int, ...], dtype: int) -> None:
    if (out.shape, out.dtype) != (shape, dtype):
        raise _errors.InvalidArgument(f"out: got the shape {list(out.shape)}, expected {list(shape)}", field="out")


def _scales(given: Numbers | None) -> Spec | None:
    name = "activation_scales"
    return None if given is None else _arrays.spec_of(_arrays.numbers(given, name), name)


def _set_product(request: Any, output_dtype: DTypeLike | None, activation_function: str,
                 activation_quantization: str | None, path: str, priority: int, request_id: str) -> None:
    """The fields that requests for products share."""
    if activation_quantization is not None:
        prefix = ("ACTIVATIONS_" if activation_quantization in ("as_sent", "floating")
                  else "" if activation_quantization.startswith("fp8_") else "INT8_")
        request.activation_quantization = _enum(tensors.ActivationQuantization, activation_quantization,
                                                "activation_quantization", prefix)
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
