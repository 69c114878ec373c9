#!/usr/bin/env python3
"""Measures how fast awqd loads a folder of the shape of Llama 3 8B: load.py --build DIR [--device cuda:0] [--formats awq,gptq,...]

Makes the folder of random weights (--layers 32: 3.6 GB of 4 bits, 7 GB of FP8; embeddings and head in FP16, which are not
read and are holes), has awqd load it some times from the page cache, and removes it. Needs numpy. Prints, for each load:

  GB/s       bytes of the quantised linears, which is what a load reads, by the time that the client waits
  GB/CPU s   the same by the server's user and system time: other programs take no part of it
  host MB    the peak of the server's resident memory less what it had before, less the weights on a CPU: pages of the
             files are no part of it, as they are read and not mapped

Ends with 1 when the best load of a format is below --least_gb_s, or host memory above --most_host_mb.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy

HIDDEN, MIDDLE, KEYS, WORDS, GROUP = 4096, 14336, 1024, 128256, 128
SHAPES = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (HIDDEN, KEYS), "self_attn.v_proj": (HIDDEN, KEYS),
          "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (HIDDEN, MIDDLE), "mlp.up_proj": (HIDDEN, MIDDLE),
          "mlp.down_proj": (MIDDLE, HIDDEN)}
SHARD_LAYERS = 2
CONFIGS = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False,
             "checkpoint_format": "gptq"},
    "pack-quantized": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                                           "group_size": GROUP}}}},
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]},
}
SIZES = {"I32": 4, "I64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
SCALES = ("F16", "BF16", "F32")


def linear(kind, path, k, n):
    """(name, dtype, shape) of the tensors of one linear."""
    if kind == "pack-quantized":
        yield f"{path}.weight_packed", "I32", [n, k // 8]
        yield f"{path}.weight_scale", "BF16", [n, k // GROUP]
        yield f"{path}.weight_shape", "I64", [2]
        return
    if kind == "fp8":
        yield f"{path}.weight", "F8_E4M3", [n, k]
        yield f"{path}.weight_scale_inv", "F32", [n // GROUP, k // GROUP]
        return
    words = [k, n // 8] if kind == "awq" else [k // 8, n]
    yield f"{path}.qweight", "I32", words
    yield f"{path}.qzeros", "I32", [k // GROUP, n // 8]
    yield f"{path}.scales", "F16", [k // GROUP, n]
    if kind == "gptq":
        yield f"{path}.g_idx", "I32", [k]


def shards(kind, layers):
    """The tensors of each file."""
    for first in range(0, layers, SHARD_LAYERS):
        yield [tensor for layer in range(first, min(layers, first + SHARD_LAYERS)) for name, (k, n) in SHAPES.items()
               for tensor in linear(kind, f"model.layers.{layer}.{name}", k, n)]
    yield [("model.embed_tokens.weight", "F16", [WORDS, HIDDEN]), ("lm_head.weight", "F16", [WORDS, HIDDEN])]


def content(name, dtype, shape, block):
    """A tensor; random ones are cut from a block at some place."""
    count = int(numpy.prod(shape))
    if name.endswith(".g_idx"):
        return numpy.arange(count, dtype=numpy.int32) // GROUP
    if name.endswith(".weight_shape"):
        k, n = SHAPES[".".join(name.split(".")[3:-1])]
        return numpy.array([n, k], numpy.int64)
    some = numpy.resize(block[: 1 << 20], count) if dtype in SCALES else None
    if dtype == "F16":  # numbers from 0.0039 to 0.0117, as scales of language models are
        return (some % 0x600 + 0x1C00).astype(numpy.uint16)
    if dtype == "BF16":  # the same
        return (some % 0xC0 + 0x3B80).astype(numpy.uint16)
    if dtype == "F32":
        return (some / 2**23 + 0.0039).astype(numpy.float32)
    start = sum(name.encode()) * 4096
    return block[start: start + count * SIZES[dtype] // 2]


def make(folder, kind, layers):
    """Returns the bytes of the quantised linears."""
    block = numpy.random.default_rng(1).integers(0, 1 << 16, HIDDEN * MIDDLE // 4 + (64 << 20), dtype=numpy.uint16)

    def write(number, tensors):
        header, end = {}, 0
        for name, dtype, shape in tensors:
            begin, end = end, end + int(numpy.prod(shape)) * SIZES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / f"model-{number:05}.safetensors", "wb", buffering=0) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors:
                if ".layers." in tensor[0]:
                    file.write(content(*tensor, block).data)
            file.truncate(8 + len(text) + end)
        return end if ".layers." in tensors[0][0] else 0

    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = [pool.submit(write, number, tensors) for number, tensors in enumerate(shards(kind, layers))]
        quantised = sum(job.result() for job in jobs)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": CONFIGS[kind]}))
    return quantised


def read_all(folder):
    """Into the page cache."""
    room = bytearray(16 << 20)
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(room):
                pass


class Server:
    """awqd with nothing loaded."""

    def __init__(self, build, repository, device, flags):
        self.bin = build / "bin"
        self.on_host = device.startswith("cpu")
        self.folder = tempfile.TemporaryDirectory(prefix="awqd-load-")
        self.address = f"unix:{self.folder.name}/socket"
        with open(f"{self.folder.name}/log", "wb") as log:
            self.process = subprocess.Popen(
                [self.bin / "awqd", f"--address={self.address}", f"--model_repository={repository}",
                 f"--device={device}", "--keep_going", *flags], stdout=log, stderr=log)
        self.awqctl("healthcheck", "--wait", "60")

    def awqctl(self, *arguments):
        done = subprocess.run([self.bin / "awqctl", "--address", self.address, *arguments], capture_output=True,
                              text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stderr + pathlib.Path(self.folder.name, "log").read_text(errors="replace"))
        return done.stdout

    def cpu_seconds(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self, which):
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{which}:\s+(\d+) kB", text)[1]) * 1024

    def load(self, name):
        """(seconds, CPU seconds, bytes of the weights, bytes of host memory beside them)"""
        pathlib.Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # the peak begins anew
        before, cpu, start = self.memory("VmRSS"), self.cpu_seconds(), time.monotonic()
        answer = json.loads(self.awqctl("load", name, "--json"))
        seconds, cpu = time.monotonic() - start, self.cpu_seconds() - cpu
        weights = int(answer["model"]["device_bytes"])
        host = self.memory("VmHWM") - before - (weights if self.on_host else 0)
        self.awqctl("unload", name)
        return seconds, cpu, weights, host

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self.folder.cleanup()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True, help="a build folder, with bin/awqd and bin/awqctl")
    parser.add_argument("--folder", type=pathlib.Path, help="where the model is made; the system's temporary folder if none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--formats", default=",".join(CONFIGS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least_gb_s", type=float, default=1.2)
    parser.add_argument("--most_host_mb", type=float, default=1000)
    parser.add_argument("flags", nargs="*", help="flags of awqd, behind --")
    args = parser.parse_args()
    met = True
    for kind in args.formats.split(","):
        repository = pathlib.Path(tempfile.mkdtemp(prefix="awqd-load-", dir=args.folder))
        server = None
        try:
            server = Server(args.build, repository, args.device, args.flags)  # of nothing yet
            (repository / kind).mkdir()
            read = make(repository / kind, kind, args.layers)
            best, peak = 0.0, 0
            for _ in range(args.rounds):
                read_all(repository / kind)
                seconds, cpu, weights, host = server.load(kind)
                best, peak = max(best, read / seconds / 1e9), max(peak, host)
                print(f"{kind}: {read / 1e9:.2f} GB read, {weights / 1e9:.2f} GB of weights: {seconds:.2f} s, "
                      f"{read / seconds / 1e9:.2f} GB/s; {cpu:.2f} CPU s, {read / max(cpu, 0.01) / 1e9:.2f} GB/CPU s; "
                      f"host {host / 1e6:.0f} MB", flush=True)
            met = met and best >= args.least_gb_s and peak / 1e6 <= args.most_host_mb
        finally:
            if server is not None:
                server.stop()
            shutil.rmtree(repository)
    print("met" if met else "missed")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
