"""Models of transformers from a quantised folder: what is quantised stays with a source, the rest is loaded."""
from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin


@register_quantization_config("awqd")
class _Config(QuantizationConfigMixin):
    """What from_pretrained of transformers is given in place of the folder's own quantization_config."""

    quant_method: Any = "awqd"

    def __init__(self, replace: Callable[[torch.nn.Module], list[str]] | None = None) -> None:
        self.replace = replace

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method}


@register_quantizer("awqd")
class _Quantizer(HfQuantizer):
    """Replaces linears before weights are loaded, so that no dense weight of theirs is made."""

    def _process_model_before_weight_loading(self, model: Any, **unused: Any) -> None:
        config: Any = self.quantization_config
        linears = config.replace(model)
        ignored = "|".join(map(re.escape, linears))
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()),
                                                    rf"(^|\.)({ignored})\."}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def from_pretrained(folder: str | os.PathLike[str], replace: Callable[[torch.nn.Module], list[str]], model_class: Any,
                    options: dict[str, Any]) -> Any:
    """`replace` gets the model, whose weights are not there yet, and returns the paths of the linears in the folder."""
    config = options.pop("config", None) or transformers.AutoConfig.from_pretrained(folder)
    for each in (config, config.get_text_config()):
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    model_class = model_class or transformers.AutoModelForCausalLM
    return model_class.from_pretrained(folder, config=config, quantization_config=_Config(replace), **options)
