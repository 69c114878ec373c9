"""Linears of vLLM by libawqd: kernels that vLLM may choose for a quantised layer.

The package awqd-torch names register() as a plugin of vLLM, which calls it when it starts. A kernel packs the tensors that
vLLM loaded, of whichever quantiser, and gives their memory back.
"""
from __future__ import annotations

import functools
import hashlib
import warnings
from typing import Any

import torch
from vllm.model_executor.kernels.linear import MPLinearKernel, register_linear_kernel
from vllm.model_executor.kernels.linear.mxfp4 import MxFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm import FP8ScaledMMLinearKernel, Int8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum, current_platform

from awqd import _library, torch as _torch
from awqd._errors import Error

__all__ = ["AwqdFp8LinearKernel", "AwqdInt8LinearKernel", "AwqdLinearKernel", "AwqdMxfp4LinearKernel", "AwqdNvfp4LinearKernel",
           "register"]

Answer = tuple[bool, str | None]  # whether a kernel can do it; else why not
_LEAST_CAPABILITY = 80


def _number(layer: torch.nn.Module) -> int | None:
    """An operator's number that is the same in another process, because vLLM keeps compiled graphs on disk."""
    prefix = getattr(layer, "prefix", "")
    if not prefix:
        return None
    number = int.from_bytes(hashlib.sha256(prefix.encode()).digest()[:7], "big")
    while number in _torch._Bound._all:  # of another model in this process
        number += 1
    return number


class _Packed:
    """What the kernels have in common."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        if current_platform.is_cpu():
            return True, None
        if not current_platform.is_cuda():
            return False, "requires an NVIDIA GPU or a CPU"
        if compute_capability is None:
            capability = current_platform.get_device_capability()
            compute_capability = 0 if capability is None else capability.to_int()
        return compute_capability >= _LEAST_CAPABILITY, f"requires compute capability {_LEAST_CAPABILITY}"

    def pack(self, layer: torch.nn.Module, format: str, tensors: dict[str, torch.Tensor], drop: tuple[str, ...],
             quantization: str = "none", scale: torch.Tensor | None = None, **settings: object) -> None:
        """Gives the layer a weight of libawqd in place of the parameters `drop`."""
        place = getattr(layer, drop[0]).device
        local = _torch.Local(device=place)
        local.pack("", format, tensors, **settings)
        layer.awqd = None  # what was packed before, whose number this takes
        layer.awqd = _torch._Bound(functools.partial(local.matmul, quantization=quantization, scale=scale),
                                 local.linears()[""][1], "", number=_number(layer))
        for name in drop:
            replace_parameter(layer, name, torch.empty(0, device=place))

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None,
                      **unused: Any) -> torch.Tensor:
        y: torch.Tensor = torch.ops.awqd.matmul(x, layer.awqd.number)
        return y if bias is None else y + bias


def _by_output(parameter: Any) -> torch.Tensor:
    """[out features, in features]; of codes, zeros and scales alike."""
    data: torch.Tensor = parameter.data
    return data if parameter.output_dim == 0 else data.t()


class AwqdLinearKernel(_Packed, MPLinearKernel):
    """Integers of 2 to 8 bits in groups: what vLLM makes of AWQ, GPTQ, compressed-tensors and others."""

    @classmethod
    def get_min_capability(cls) -> int:
        return _LEAST_CAPABILITY

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        supported, reason = cls.is_supported()
        if not supported:
            return False, reason
        bits = c.weight_type.size_bits
        if not c.weight_type.is_integer() or c.weight_type.is_signed() or not 2 <= bits <= 8:
            return False, f"weight type {c.weight_type}, expected unsigned integers of 2 to 8 bits"
        if c.weight_type.bias != (0 if c.zero_points else 1 << (bits - 1)):
            return False, f"weight type {c.weight_type} with zero_points {c.zero_points}"
        if c.act_type not in (torch.float16, torch.bfloat16, torch.float32):
            return False, f"activations {c.act_type}, expected floating ones of 16 or 32 bits"
        if c.group_size > 0 and c.partition_weight_shape[0] % c.group_size:
            return False, f"group size {c.group_size}, expected a divisor of {c.partition_weight_shape[0]}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        codes, scales, zeros = self._get_weight_params(layer)
        k, n = self.config.partition_weight_shape
        tensors = {"weight_packed": _by_output(codes), "weight_scale": _by_output(scales), "weight_shape": torch.tensor([n, k])}
        drop: tuple[str, ...] = (self.w_q_name, self.w_s_name)
        if zeros is not None:
            drop = (*drop, self.w_zp_name)
            if self.config.zero_points:
                tensors["weight_zero_point"] = _by_output(zeros)
        groups = {"group_size": self.config.group_size} if self.config.group_size > 0 else {}
        self.pack(layer, "pack-quantized", tensors, drop, num_bits=self.config.weight_type.size_bits,
                  symmetric=not self.config.zero_points, strategy="group" if groups else "channel", **groups)


class AwqdInt8LinearKernel(_Packed, Int8ScaledMMLinearKernel):
    """INT8 weights by out-feature, INT8 activations by token or static: exact sums."""

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        return c.input_symmetric, "requires symmetric activations"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        codes, scales, scale, *_ = self._get_layer_params(layer)
        if not self.config.is_channelwise:
            scales = convert_to_channelwise(scales, layer.logical_widths)
        static = self.config.is_static_input_scheme
        self.pack(layer, "int-quantized", {"weight": codes, "weight_scale": scales}, tuple(self.layer_param_names[:2]),
                  "int8_static" if static else "int8_per_token", scale.data.max().float() if static else None,
                  strategy="channel")


class AwqdFp8LinearKernel(_Packed, FP8ScaledMMLinearKernel):
    """E4M3 weights with a scale for all or by out-feature, E4M3 activations by token or static."""

    @classmethod
    def can_implement(cls, c: Any) -> Answer:
        weights, activations = c.weight_quant_key.scale.group_shape, c.activation_quant_key.scale
        if not (weights.is_per_tensor() or weights.is_per_channel()):
            return False, "requires a scale of the weight, or one of each out-feature"
        if not (activations.group_shape.is_per_tensor() if activations.static else activations.group_shape.is_per_token()):
            return False, "requires activations with a static scale, or one of each token"
        return c.weight_quant_key.dtype == torch.float8_e4m3fn, "requires E4M3"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        codes, scales, scale, _ = self._get_layer_params(layer)  # [K, N]
        static = self.config.activation_quant_key.scale.static
        self.pack(layer, "float-quantized", {"weight": codes.data.t(), "weight_scale": scales},
                  tuple(self.layer_param_names[:2]), "fp8_static" if static else "fp8_per_token",
                  scale.data.max().float() if static else None, strategy="tensor" if scales.numel() == 1 else "channel")

    def apply_scaled_mm(self, **unused: Any) -> torch.Tensor:
        raise NotImplementedError("apply_weights quantises and multiplies")


class AwqdMxfp4LinearKernel(_Packed, MxFp4LinearKernel):
    """MXFP4 weights; activations stay as they are."""

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.pack(layer, "mxfp4-pack-quantized", {"weight_packed": layer.weight, "weight_scale": layer.weight_scale},
                  ("weight", "weight_scale"))


class AwqdNvfp4LinearKernel(_Packed, NvFp4LinearKernel):
    """NVFP4 weights; activations stay as they are."""

    @classmethod
    def can_implement(cls, config: Any) -> Answer:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.pack(layer, "modelopt", {"weight": layer.weight, "weight_scale": layer.weight_scale,
                                      "weight_scale_2": layer.weight_global_scale}, ("weight", "weight_scale"),
                  quant_algo="NVFP4")


_KERNELS = {"mp": AwqdLinearKernel, "int8": AwqdInt8LinearKernel, "fp8": AwqdFp8LinearKernel, "mxfp4": AwqdMxfp4LinearKernel,
            "nvfp4": AwqdNvfp4LinearKernel}


@functools.lru_cache(maxsize=None)  # vLLM may load its plugins twice
def register() -> None:
    """Adds the kernels to those of vLLM, on GPUs and CPUs. They come after its own: VLLM_DISABLED_KERNELS names these."""
    try:
        _library._library()
    except Error as error:
        warnings.warn(f"awqd: {error}; vLLM goes without", stacklevel=2)
        return
    for kind, kernel in _KERNELS.items():
        for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
            register_linear_kernel(kernel, platform, kind)
