#!/usr/bin/env python3
"""Makes a dense model, adapters for it, and what peft's merge_and_unload makes of both. Needs torch 2.15.0, transformers 5.24.0
and peft 0.21.2, which made what is checked in.

Usage: make_lora.py [--out DIR]
"""
import argparse
import json
import pathlib
import shutil

import peft
import torch
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

CASES = {
    "plain": dict(r=4, lora_alpha=8, use_rslora=True, target_modules=["up", "down"], rank_pattern={"net.down": 2},
                  alpha_pattern={"down": 3}, bias="lora_only"),
    "dora": dict(r=3, lora_alpha=6, use_dora=True, target_modules=["up", "down"]),
    "whole": dict(r=4, lora_alpha=8, target_modules=["embed", "conv"], fan_in_fan_out=True, modules_to_save=["head"]),
    "bias": dict(r=4, lora_alpha=8, target_modules=["up"], lora_bias=True),
}


class Net(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(12, 16)
        self.up = torch.nn.Linear(16, 24)
        self.down = torch.nn.Linear(24, 16, bias=False)
        self.conv = Conv1D(20, 16)
        self.head = torch.nn.Linear(20, 12, bias=False)


class Model(torch.nn.Module):

    def __init__(self):
        super().__init__()
        self.net = Net()


def made():
    torch.manual_seed(1)
    model = Model()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    out = parser.parse_args().out
    (out / "base").mkdir(parents=True, exist_ok=True)
    save_file(made().state_dict(), out / "base/model.safetensors")
    (out / "base/config.json").write_text('{"model_type": "test"}\n')
    for name, settings in CASES.items():
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        model = peft.get_peft_model(made(), peft.LoraConfig(**settings))
        torch.manual_seed(2)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.uniform_(-1, 1)
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["target_modules"].sort()  # a set
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
        merged = {path.replace("original_module.", ""): tensor.contiguous()
                  for path, tensor in model.merge_and_unload().state_dict().items()}
        save_file(merged, folder / "merged.golden")


if __name__ == "__main__":
    main()
