"""Models of transformers with random weights, quantised by awqctl: config_of(), make(), and reader() of a folder's tensors."""
from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from safetensors import safe_open

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


def parameters_of(config: Any, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Seeded random tensors, by their names in the model."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        value = torch.empty(parameter.shape, dtype=torch.float16, device=device)
        if parameter.dim() == 1:
            value.fill_(1)
        else:
            value.normal_(0, 0.02, generator=torch.Generator(device).manual_seed(seed))
        yield name, value


def in_checkpoint(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a parameter, by their names in a checkpoint: experts one by one."""
    if value.dim() < 3:
        yield name, value
        return
    path, _, projection = name.rpartition(".")
    parts = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
    for number, expert in enumerate(value):
        yield from ((f"{path}.{number}.{one}.weight", part) for one, part in zip(parts, expert.chunk(len(parts))))


def write_shard(path: pathlib.Path, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A safetensors file, written without a copy and without Python's lock, so that threads write at the same time."""
    tensors = [named for name, value in parameters for named in in_checkpoint(name, value.cpu())]
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, value in tensors:
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": "F16", "shape": list(value.shape), "data_offsets": [begin, end]}  # type: ignore[dict-item]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, value in tensors:
            file.write(value.reshape(-1).numpy().data)


def make(binaries: pathlib.Path, config: Any, folder: pathlib.Path, device: str, say: Callable[[str], None] = print) -> None:
    """The quantised folder, unless it is there.

    awqctl quantises each layer by itself, so many at a time as there are cores, and no more of the dense model is written
    at a time. device: where numbers are drawn; others draw other ones.
    """
    if folder.exists():
        return
    made, cores = folder.with_name(f"{folder.name}-making"), os.cpu_count() or 1
    shutil.rmtree(made, ignore_errors=True)  # of a run that was ended
    made.mkdir(parents=True)

    def layer(number: int, parameters: Sequence[tuple[str, torch.Tensor]], room: threading.Semaphore) -> dict[str, Any]:
        """Adds its file; the configuration."""
        try:
            dense, quantised, file = made / f"dense-{number}", made / f"quantised-{number}", f"model-{number:05}.safetensors"
            dense.mkdir()
            write_shard(dense / file, parameters)
            config.save_pretrained(dense)
            subprocess.run([binaries / "awqctl", "quantize", dense, "-o", quantised, "--to", "awq", "--group_size", str(GROUP),
                            "-q"], check=True, stdout=subprocess.DEVNULL)
            shutil.rmtree(dense)
            (quantised / file).rename(made / file)
            settings: dict[str, Any] = json.loads((quantised / "config.json").read_text())
            shutil.rmtree(quantised)
            return settings
        finally:
            room.release()

    room, jobs = threading.Semaphore(cores), []
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        parts = itertools.groupby(parameters_of(config, device), key=lambda named: named[0].split(".")[:3])
        for number, (place, named) in enumerate(parts):
            if place[:2] == ["model", "layers"]:
                room.acquire()
                jobs.append(pool.submit(layer, number, list(named), room))
            else:  # the embedding, the head and the last norm stay dense
                write_shard(made / f"model-{number:05}.safetensors", named)
        every = [job.result() for job in jobs]
    settings = every[0]
    dense = {path for each in every for path in each["quantization_config"].get("modules_to_not_convert") or ()}
    settings["quantization_config"]["modules_to_not_convert"] = sorted(dense | {"lm_head"})
    (made / "config.json").write_text(json.dumps(settings))
    places = {name: path.name for path in sorted(made.glob("*.safetensors")) for name in reader(path)}
    (made / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    made.rename(folder)
    say(f"{folder.name} is quantised")


def reader(path: pathlib.Path) -> Mapping[str, Any]:
    """The open file of each tensor of a safetensors file or folder."""
    files: list[Any] = [safe_open(one, "pt") for one in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])]
    return {name: file for file in files for name in file.keys()}
