#!/usr/bin/env python3
"""Times generation by a model of transformers whose linears come from awqd, beside its dense self.

usage: generate.py --build DIR [--model llama-8b] [--device cuda:0] [--ways dense,process,ring,rpc] [--batches 1,8,64]
                   [--tokens 64] [--json FILE]

The model has the shape that --model names and random weights. It is saved dense, quantised by `awqctl quantize` and served.
Each way generates the same tokens from the same prompts; the logits of all ways but dense must have the same bits. Needs
PyTorch, transformers and the Python package awqd.
"""
import argparse
import gc
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import torch
import transformers

SHAPES = {
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "vocab_size": 128256},
    "llama-tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
                   "num_key_value_heads": 4, "vocab_size": 512},
}
PROMPT = 32  # tokens


def make_models(folder, shape, build):
    """The dense folder and the quantised one, in FP16."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SHAPES[shape], dtype="float16", eos_token_id=None, bos_token_id=None)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).half()
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1)
        else:
            parameter.data.normal_(0, 0.02)
    model.save_pretrained(folder / "dense")
    subprocess.run([build / "bin/awqctl", "quantize", folder / "dense", "-o", folder / "awq"], check=True,
                   stdout=subprocess.DEVNULL)
    return folder / "dense", folder / "awq"


class Server:
    """awqd with the quantised folder."""

    def __init__(self, build, folder, device):
        self.ring = str(folder.parent / "ring.sock")
        self.log = open(folder.parent / "awqd.log", "w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [build / "bin/awqd", "--address=127.0.0.1:0", f"--model=llama={folder}", f"--device={device}",
             f"--ring_path={self.ring}"], stdout=self.log, stderr=self.log)

    def __enter__(self):
        while True:
            text = pathlib.Path(self.log.name).read_text(encoding="utf-8", errors="replace")
            found = re.search(r"listening on (127\.0\.0\.1:\d+)", text)
            if found:
                self.address = found.group(1)
                return self
            if self.process.poll() is not None:
                sys.exit(text)
            time.sleep(0.1)

    def __exit__(self, *unused):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self.log.close()


def open_model(way, dense, quantised, server, device):
    if way == "dense":
        model = transformers.LlamaForCausalLM.from_pretrained(dense, dtype=torch.float16)
        return model.to(device)
    import awqd.torch
    if way == "process":
        return awqd.torch.from_pretrained(quantised, device=device, dtype=torch.float16)
    client = awqd.Client(server.address, ring=server.ring if way == "ring" else False, timeout=600)
    return awqd.torch.from_pretrained(quantised, client, name="llama", dtype=torch.float16).to(device)


def measure(model, device, batch, tokens):
    """Seconds to the first token, and tokens a second of the rest."""
    prompt = torch.arange(batch * PROMPT).reshape(batch, PROMPT).to(device) % model.config.vocab_size

    def run(count):
        begin = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, pad_token_id=0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    run(2)
    first = min(run(1) for _ in range(3))
    return first, batch * (tokens - 1) / (run(tokens) - first)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--model", choices=SHAPES, default="llama-8b")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ways", default="dense,process,ring,rpc")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    build, device = options.build.resolve(), torch.device(options.device)
    os.environ.setdefault("LIBAWQD", str(build / "kernels/library/libawqd.so"))

    rows, logits = [], None
    with tempfile.TemporaryDirectory() as work:
        dense, quantised = make_models(pathlib.Path(work), options.model, build)
        with Server(build, quantised, options.device) as server, torch.no_grad():
            for way in options.ways.split(","):
                model = open_model(way, dense, quantised, server, device).eval()
                if way != "dense":
                    got = model(torch.arange(PROMPT, device=device)[None]).logits.cpu()
                    if logits is not None and not torch.equal(got, logits):
                        sys.exit(f"{way}: the logits have other bits than those of the ways before")
                    logits = got
                for batch in map(int, options.batches.split(",")):
                    first, rate = measure(model, device, batch, options.tokens)
                    rows.append({"way": way, "batch": batch, "first_token_ms": 1e3 * first, "tokens_per_s": rate})
                    print(f"{way:8} batch {batch:3}  first token {1e3 * first:8.1f} ms  {rate:9.1f} tokens/s", flush=True)
                del model
                gc.collect()
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
