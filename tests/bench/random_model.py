"""Models of transformers with random weights, quantised by awqctl: config_of(), make(), and reader() of a folder's tensors."""
from __future__ import annotations

import itertools
import json
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

GROUP = 128  # rows of K that share a scale
SHAPES: dict[str, tuple[type, dict[str, int], dict[str, int]]] = {  # the configuration, and what --tiny changes
    "llama": (
        transformers.LlamaConfig,
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 14336, "vocab_size": 128256},
        {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512,
         "vocab_size": 512}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
         "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab_size": 151936},
        {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64, "num_experts": 8,
         "num_experts_per_tok": 2, "moe_intermediate_size": 128, "vocab_size": 512}),
}


def config_of(model: str, tiny: bool, layers: int | None) -> Any:
    """layers: instead of as many as the model has."""
    kind, shape, small = SHAPES[model]
    more = {"num_hidden_layers": layers} if layers else {}
    return kind(**{**shape, **(small if tiny else {}), **more}, dtype="float16", tie_word_embeddings=False,
                bos_token_id=None, eos_token_id=None)


def tensors_of(config: Any, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Seeded random tensors, by their names in a checkpoint: experts one by one. Those of a layer come together."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        value = torch.empty(parameter.shape, dtype=torch.float16, device=device)
        if parameter.dim() == 1:
            yield name, value.fill_(1)
            continue
        value.normal_(0, 0.02, generator=torch.Generator(device).manual_seed(seed))
        if parameter.dim() == 2:
            yield name, value
            continue
        path, _, projection = name.rpartition(".")
        parts = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
        for number, expert in enumerate(value):
            yield from ((f"{path}.{number}.{one}.weight", part) for one, part in zip(parts, expert.chunk(len(parts))))


def make(binaries: pathlib.Path, config: Any, folder: pathlib.Path, device: str) -> None:
    """The quantised folder, unless it is there. The dense one is written beside it, a layer at a time, and goes.

    device: where numbers are drawn; others draw other ones.
    """
    if folder.exists():
        return
    dense = folder.with_name(f"{folder.name}-dense")
    shutil.rmtree(dense, ignore_errors=True)  # of a run that was ended
    dense.mkdir(parents=True)
    places: dict[str, str] = {}
    layers = itertools.groupby(tensors_of(config, device), key=lambda named: named[0].split(".")[:3])
    for number, (_, named) in enumerate(layers):
        shard = {name: tensor.cpu().clone() for name, tensor in named}
        save_file(shard, dense / f"model-{number:05}.safetensors", metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, f"model-{number:05}.safetensors"))
    (dense / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config.save_pretrained(dense)
    subprocess.run([binaries / "awqctl", "quantize", dense, "-o", folder, "--to", "awq", "--group_size", str(GROUP), "-q"],
                   check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(dense)


def reader(folder: pathlib.Path) -> Mapping[str, Any]:
    """The open file of each tensor of a safetensors folder."""
    files: list[Any] = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
    return {name: file for file in files for name in file.keys()}
