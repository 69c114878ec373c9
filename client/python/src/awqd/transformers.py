"""Models of transformers from a quantised folder: what is quantised stays with a source, the rest is loaded.

    from awqd.transformers import AwqdConfig

    model = AutoModelForCausalLM.from_pretrained("/models/my-model-awq", quantization_config=AwqdConfig())
    model = AutoModelForCausalLM.from_pretrained("/models/my-model-awq", quantization_config=AwqdConfig("127.0.0.1:8001"))
"""
from __future__ import annotations

import os
import re
from typing import Any

import torch
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from awqd import torch as _torch
from awqd._client import Client
from awqd._errors import InvalidArgument, Unimplemented

__all__ = ["AwqdConfig"]


@register_quantization_config("awqd")
class AwqdConfig(QuantizationConfigMixin):
    """Takes the place of the folder's own quantization_config, whose quant_method may be any that awqd reads.

    source, name, ring: as in awqd.torch.replace(); without a source the folder itself, by libawqd.
    """

    quant_method: Any = "awqd"

    def __init__(self, source: _torch.Source | Client | str | os.PathLike[str] | None = None, *, name: str | None = None,
                 ring: bool = False) -> None:
        self.source, self.name, self.ring = source, name, ring

    def __deepcopy__(self, memo: dict[int, Any]) -> AwqdConfig:
        return self  # a connection has no copy

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method}


_merge = AutoHfQuantizer.merge_quantization_configs


def _prefer_awqd(quantization_config: Any, quantization_config_from_args: Any) -> Any:
    """transformers wants the class of the folder's quant_method, and has no hook for another reader of it."""
    if isinstance(quantization_config_from_args, AwqdConfig):
        return quantization_config_from_args
    return _merge(quantization_config, quantization_config_from_args)


AutoHfQuantizer.merge_quantization_configs = staticmethod(_prefer_awqd)


@register_quantizer("awqd")
class _Quantizer(HfQuantizer):
    """Replaces linears before weights are loaded, so that no dense weight of theirs is made."""

    def _process_model_before_weight_loading(self, model: Any, device_map: dict[str, Any] | None = None,
                                             checkpoint_files: list[str] | None = None, **unused: Any) -> None:
        config: Any = self.quantization_config
        source = config.source
        if source is None:
            if not checkpoint_files:
                raise InvalidArgument("source: got neither one nor files of a checkpoint", field="source")
            source = os.path.dirname(checkpoint_files[0])
        devices = set((device_map or {"": "cpu"}).values())
        if len(devices) > 1:
            raise InvalidArgument(f"device_map: got {len(devices)} devices, expected one", field="device_map")
        opened = _torch.open_source(source, config.name, config.ring, _device(devices.pop()))
        report = _torch.replace(model, opened)
        if report.not_in_model:
            raise Unimplemented(f"{source}: {len(report.not_in_model)} linears are no modules of {type(model).__name__}, "
                                f"the first is {report.not_in_model[0]}")
        # A pattern for all layers and experts: one for each of 18,432 experts' linears took minutes.
        ignored = "|".join({re.sub(r"\d+", r"\\d+", re.escape(path)) for linear in opened.linears()
                            for path in (linear, _torch.path_in_model(linear))})
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()),
                                                    rf"(^|\.)({ignored})\."}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _device(place: Any) -> torch.device:
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
