#!/usr/bin/env python3
"""Times greedy generation by a model of transformers whose linears come from awqd, beside the dense model and others.

usage: generate.py --bin DIR [--model llama|qwen3-moe] [--tiny] [--layers N] [--device cuda:0] [--batches 1 8 64]
                   [--tokens 64] [--ways torch humming rpc ring lease] [--processes 3] [--models DIR] [--out FILE] [--svg FILE]
                   [--eager]

The model has the shapes of Llama 3 8B or Qwen3 30B-A3B and seeded random weights. `awqctl quantize` quantises it (AWQ, 4 bits,
groups of 128), into --models for the next run too, and a server lends it. Then each way generates in a process of its own:

torch      dense FP16 weights, those that the server decodes
humming    the package humming-kernels, on a GPU, without experts
rpc, ring  the server: messages over a UNIX socket; its ring, and messages for what a ring does not take
lease      this process by libawqd, with the server's weights

On a GPU the norms and rotary embeddings of every way are compiled, and each step of a way that waits for no host is a CUDA
graph (`graph`; not rpc, ring and dense experts): otherwise Python's launches are what is measured. --eager leaves both out.

Logits of rpc, ring and lease must have the same bits in the first and the last step, or the script ends with 1. `difference`
is the largest of the first step's logits to torch's, `same` the share of tokens that are torch's. Memory is without what a
process shares: on a CPU it is resident memory; on a GPU what the device has less than before, so nothing else may run there.
A way that fails is left out and said at the end, with status 1.
--processes starts so many that lease the model; `beyond` is memory beyond that of a process whose linears are zeros.

stdout gets tables, --out JSON lines, --svg bars of tokens a second. DIR has awqd and awqctl; libawqd is there, where a build
or an installation has it, in LIBAWQD or in awqd-torch. Needs PyTorch, transformers and the Python package awqd.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import html
import importlib.util
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import torch
import transformers

import gpu_report
import pairs
import random_model

Row = dict[str, Any]
Step = tuple[Any, torch.Tensor]  # logits [batch, words] and the tokens chosen by them [batch, 1]

WAYS = {"torch": "#888", "humming": "#36c", "rpc": "#c44", "ring": "#e80", "lease": "#0b6"}  # and their colours
SAME = ("rpc", "ring", "lease")
PROMPT = 32  # tokens
# Of the tables: a heading, a row's key and how its value is written.
TIMES = {"batch": ("batch", ""), "graph": ("graph", ""), "first token, ms": ("first_token_ms", ".1f"),
         "tokens/s": ("tokens_per_s", ".1f"),
         "memory, MiB": ("memory_mib", ".0f")}
TO_TORCH = {"difference": ("difference", ".2g"), "same": ("same", ".2f")}


@dataclasses.dataclass
class Job:
    """What a process generates with."""

    way: str  # "none": quantised linears without weights
    config: Any
    folder: pathlib.Path  # of the quantised model
    address: str
    ring: str
    lend: str
    device: str
    batches: Sequence[int]
    tokens: int
    eager: bool

    def graphed(self) -> bool:
        waits = self.way in ("rpc", "ring") or (self.way == "torch" and hasattr(self.config, "num_experts"))
        return not self.eager and not waits


def say(text: str, begin: float = time.monotonic()) -> None:
    """Progress, with the seconds since this process began."""
    print(f"{time.monotonic() - begin:7.1f} s  {text}", file=sys.stderr, flush=True)


class Nothing:
    """A source without weights: products are zeros."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        self.shapes = shapes

    def linears(self) -> Mapping[str, tuple[int, int]]:
        return self.shapes

    def matmul(self, linear: str, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(len(x), self.shapes[linear][1])

    def gated_mlp(self, gate: str, up: str, down: str, activation: str, x: torch.Tensor) -> torch.Tensor:
        return self.matmul(down, x)

    def experts(self, gate: str, up: str, down: str, activation: str, x: torch.Tensor, expert_ids: torch.Tensor,
                router_weights: torch.Tensor) -> torch.Tensor:
        return self.matmul(down.replace("*", "0"), x)


class Humming(Nothing):
    """Linears by the package humming, from the same codes."""

    def __init__(self, shapes: Mapping[str, tuple[int, int]], job: Job) -> None:
        from humming.layer import HummingLayer
        super().__init__(shapes)
        files, self.device = random_model.reader(job.folder), torch.device(job.device)
        self.layers, self.tuning = {}, {}
        for linear, (k, n) in shapes.items():
            layer = HummingLayer(shape_n=n, shape_k=k, torch_dtype=torch.float16, weight_config={
                "quant_method": "awq", "bits": 4, "group_size": random_model.GROUP, "zero_point": True}).to(self.device)
            layer.load_from_tensors({suffix: files[f"{linear}.{suffix}"].get_tensor(f"{linear}.{suffix}")
                                     for suffix in ("qweight", "qzeros", "scales")})
            layer.transform()
            self.layers[linear] = layer
        self.tune({rows * batch for batch in job.batches for rows in (1, PROMPT)} | {1})

    def tune(self, counts: set[int]) -> None:
        """Compiles the default kernels of these numbers of rows, of all shapes at once."""
        from humming.kernel.humming import HummingKernel
        from humming.ops.launcher import init_humming_launcher
        from humming.tune import get_heuristics_config
        init_humming_launcher()
        some: dict[str, Any] = {}
        for linear, layer in self.layers.items():
            text = layer.humming_config.to_str()
            if text not in some:
                some[text] = [interval for interval in get_heuristics_config(layer.humming_config, device=self.device)
                              if any(interval[0] < count <= interval[1] for count in counts)]
            self.tuning[linear] = json.dumps(some[text])
        kernels = [{**json.loads(text), **json.loads(json.dumps(interval[2]))} for text, found in some.items()
                   for interval in found]
        left_out = ("num_sms", "sublayer_name")
        HummingKernel.compile_many([(HummingKernel, {name: value for name, value in kernel.items() if name not in left_out})
                                    for kernel in kernels], self.device.index or 0)
        say(f"humming: {len(kernels)} kernels are compiled")

    def matmul(self, linear: str, x: torch.Tensor) -> torch.Tensor:
        # replace() tries a gated MLP on the CPU
        y: torch.Tensor = self.layers[linear](inputs=x.to(self.device), tuning_config=self.tuning[linear])
        return y.to(x.device)

    def gated_mlp(self, gate: str, up: str, down: str, activation: str, x: torch.Tensor) -> torch.Tensor:
        return self.matmul(down, torch.nn.functional.silu(self.matmul(gate, x)) * self.matmul(up, x))


def open_dense(job: Job) -> Any:
    """A model with the weights that the server decodes, and the others of its folder."""
    import awqd.torch
    with torch.device(job.device):
        model = transformers.AutoModelForCausalLM.from_config(job.config, dtype=torch.float16)
    parameters, files = dict(model.named_parameters()), random_model.reader(job.folder)
    for name in files.keys() & parameters.keys():
        parameters[name].copy_(files[name].get_tensor(name))
    leased = awqd.torch.Leased(job.lend, pairs.MODEL, job.device)
    for linear in leased.linears():
        expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj", linear)
        if not expert:
            place = parameters[f"{linear}.weight"]
        elif expert[3] == "down":
            place = parameters[f"{expert[1]}.down_proj"][int(expert[2])]
        else:
            place = parameters[f"{expert[1]}.gate_up_proj"][int(expert[2])].chunk(2)[expert[3] == "up"]
        place.copy_(leased.dequantize(linear, torch.float16).T)
    return model


def open_model(job: Job) -> Any:
    import awqd.torch
    if job.way == "torch":
        return open_dense(job)
    client = awqd.Client(job.address, ring=job.ring if job.way == "ring" else False, timeout=600)
    source: Any = client
    if job.way == "lease":
        source = awqd.torch.Leased(job.lend, pairs.MODEL, job.device)
    elif job.way in ("humming", "none"):
        shapes = {weight.path: (weight.k, weight.n) for weight in client.get_model(pairs.MODEL).weights}
        source = Nothing(shapes) if job.way == "none" else Humming(shapes, job)
    # Without device_map, for which transformers wants the package accelerate.
    return awqd.torch.from_pretrained(job.folder, source, name=pairs.MODEL, dtype=torch.float16).to(job.device)


def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, scaling: float | None = None,
           **unused: object) -> tuple[torch.Tensor, None]:
    """Causal attention of whole prompts and of single tokens. That of transformers (5.17) makes a mask while a graph is recorded
    and not otherwise, so that another kernel runs."""
    y = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1, scale=scaling,
                                                         enable_gqa=True)
    return y.transpose(1, 2).contiguous(), None


def compile_between(model: Any) -> None:
    """Has PyTorch compile what lies between linears and attention: a kernel each instead of ten."""
    torch._dynamo.config.recompile_limit = 64
    code = sys.modules[type(model).__module__]
    code.apply_rotary_pos_emb = torch.compile(code.apply_rotary_pos_emb)  # type: ignore[attr-defined]
    for kind in {type(module) for module in model.modules() if type(module).__name__.endswith("RMSNorm")}:
        kind.forward = torch.compile(kind.forward)


def steps(model: Any, prompt: torch.Tensor) -> Iterator[Step]:
    """Greedy generation behind a prompt [batch, tokens]."""
    ids, cache = prompt, None
    while True:
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        yield logits, ids


class Graphs:
    """The same steps, each a CUDA graph of its own, as attention and the cache grow with every step."""

    def __init__(self, model: Any, prompt: torch.Tensor, tokens: int) -> None:
        self.graphs: list[tuple[torch.cuda.CUDAGraph, Step]] = []
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            timed(steps(model, prompt), 3)  # what is compiled or allocated at a first call cannot be recorded
        recorded = steps(model, prompt)
        for number in range(tokens):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                logits, ids = next(recorded)
            # Those that timed() keeps, of two tokens too.
            self.graphs.append((graph, (logits if number in (0, 1, tokens - 1) else None, ids)))

    def __iter__(self) -> Iterator[Step]:
        for graph, step in self.graphs:
            graph.replay()
            yield step


def timed(run: Iterable[Step], tokens: int) -> tuple[list[float], list[torch.Tensor], torch.Tensor]:
    """Seconds to the first token and to the last, the logits of both steps, and the tokens [batch, tokens]."""
    begin, times, kept, chosen = time.perf_counter(), [], [], []
    for number, (logits, ids) in zip(range(tokens), run):
        chosen.append(ids)
        if number in (0, tokens - 1):
            kept.append(logits.cpu())  # waits for the device
            times.append(time.perf_counter() - begin)
    return times, kept, torch.cat(chosen, 1).cpu()


def work(pipe: Any, job: Job) -> None:
    """The process of a way: sends a row for each batch, and goes on when it is told to."""
    transformers.utils.logging.disable_progress_bar()
    on_gpu = job.device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(job.device)
    with torch.no_grad():
        model = open_model(job).eval()
        transformers.AttentionInterface.register("causal", attend)
        model.set_attn_implementation("causal")
        say(f"{job.way}: the model is open")
        if on_gpu and not job.eager:
            compile_between(model)
        for batch in job.batches:
            prompt = torch.arange(batch * PROMPT, device=job.device).reshape(batch, PROMPT) % job.config.vocab_size
            again = functools.partial(steps, model, prompt)
            graphs = on_gpu and job.graphed()
            if graphs:
                again = functools.partial(iter, Graphs(model, prompt, job.tokens))
            timed(again(), 2)
            firsts = [timed(again(), 1)[0][0] for _ in range(2)]
            times, logits, chosen = timed(again(), job.tokens)
            pipe.send({"way": job.way, "batch": batch, "graph": "yes" if graphs else "no",
                       "first_token_ms": 1e3 * min(*firsts, times[0]),
                       "tokens_per_s": batch * (job.tokens - 1) / (times[1] - times[0]),
                       "logits": [step.numpy() for step in logits], "tokens": chosen.numpy()})
            pipe.recv()
            del again
            if on_gpu:
                torch.cuda.empty_cache()


class Worker:
    """A process that generates, and what memory it takes."""

    def __init__(self, job: Job) -> None:
        self.way, self.device, self.before = job.way, torch.device(job.device), 0.0
        context = multiprocessing.get_context("forkserver")  # imports once what takes seconds
        context.set_forkserver_preload(["torch", type(job.config).__module__.replace("configuration_", "modeling_")])
        self.pipe, self.other = context.Pipe()
        self.process = context.Process(target=work, args=(self.other, job))

    def __enter__(self) -> Worker:
        if self.device.type == "cuda":
            self.before = self.memory_mib()
        self.process.start()
        self.other.close()
        return self

    def __exit__(self, kind: Any, *unused: object) -> None:
        if kind is not None:
            self.process.kill()
        self.process.join()

    def memory_mib(self) -> float:
        """Beside what it shares."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return float(total - free) / 2**20 - self.before
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        kib = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", status, re.MULTILINE)}
        return (kib["VmRSS"] - kib["RssShmem"]) / 1024

    def row(self) -> Row:
        """The next one, after which the process waits for a message."""
        try:
            row: Row = self.pipe.recv()
        except EOFError:
            sys.exit(f"{self.way}: the process ended")  # and has said why
        row["memory_mib"] = self.memory_mib()
        for place, logits in zip(("first", "last"), row["logits"]):
            row[f"{place}_sha256"] = hashlib.sha256(logits.tobytes()).hexdigest()
        return row


def compare(row: Row, others: Sequence[Row]) -> None:
    """Adds the distance to torch. Ends where bits differ that must not."""
    for other in others:
        if row["batch"] != other["batch"]:
            continue
        for key in ("first_sha256", "last_sha256"):
            if row["way"] in SAME and other["way"] in SAME and row[key] != other[key]:
                sys.exit(f"batch {row['batch']}: logits of the {key[:-7]} step: {row['way']} has other bits than {other['way']}")
        if other["way"] == "torch":
            row["difference"] = float(abs(row["logits"][0].astype("f4") - other["logits"][0].astype("f4")).max())
            row["same"] = float((row["tokens"] == other["tokens"]).mean())


def lease_by_several(job: Job, count: int) -> Iterator[Row]:
    """Rows of processes that hold the same copy at once."""
    few = dataclasses.replace(job, way="none", batches=job.batches[:1])
    with Worker(few) as alone:
        without = alone.row()["memory_mib"]
        alone.pipe.send(None)
    with contextlib.ExitStack() as stack:
        workers = []
        for number in range(1, count + 1):
            workers.append(stack.enter_context(Worker(dataclasses.replace(few, way="lease"))))
            row = workers[-1].row()
            yield {**row, "process": number, "beyond_mib": row["memory_mib"] - without}
        for each in workers:
            each.pipe.send(None)


def bars(rows: Sequence[Row], title: str) -> str:
    """Tokens a second as SVG; each batch has its own scale. A star: without CUDA graphs, where others have them."""
    some = len({row["graph"] for row in rows}) > 1
    out, y = [f'<text x="14" y="22" font-size="14" font-weight="bold">{html.escape(title)}: tokens a second</text>'], 34
    for batch, group in itertools.groupby(sorted(rows, key=lambda row: int(row["batch"])), lambda row: int(row["batch"])):
        rates = {row["way"] + "*" * (some and row["graph"] == "no"): float(row["tokens_per_s"]) for row in group}
        out.append(f'<text x="14" y="{y + 14}" font-weight="bold">batch {batch}</text>')
        for way, rate in rates.items():
            y, width = y + 18, 400 * rate / max(rates.values())
            out.append(f'<text x="80" y="{y + 14}" text-anchor="end">{way}</text><rect x="88" y="{y + 2}" width="{width:.1f}" '
                       f'height="14" fill="{WAYS[way.rstrip("*")]}"/><text x="{94 + width:.1f}" y="{y + 14}">'
                       f'{rate:,.1f}</text>')
        y += 26
    if some:
        out.append(f'<text x="14" y="{y + 6}">* without CUDA graphs</text>')
        y += 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 580 {y}" width="580" height="{y}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="12">', f'<rect width="580" height="{y}" fill="white"/>', *out, "</svg>\n"])


def table(rows: Sequence[Row], columns: Mapping[str, tuple[str, str]]) -> str:
    return str(gpu_report.table(list(columns), [
        [format(row[key], how) if key in row else "" for key, how in columns.values()] for row in rows]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--model", choices=random_model.SHAPES, default="llama")
    parser.add_argument("--tiny", action="store_true", help="the same family with 2 layers of 256")
    parser.add_argument("--layers", type=int, help="instead of as many as the model has")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence, at least 2")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="neither compile nor record anything")
    for name in ("--models", "--out", "--svg"):
        parser.add_argument(name, type=pathlib.Path)
    options = parser.parse_args()
    if options.tokens < 2:
        parser.error(f"--tokens: got {options.tokens}, expected 2 or more")
    return options


def missing(way: str, options: argparse.Namespace) -> str | None:
    """Why a way cannot be measured."""
    if way == "humming" and not (options.device.startswith("cuda") and importlib.util.find_spec("humming")):
        return "not here"
    return "has no experts" if way == "humming" and options.model == "qwen3-moe" else None


def write(row: Row, name: str, job: Job, file: TextIO | None) -> None:
    say(f"{row['way']}, batch {row['batch']}: first token {row['first_token_ms']:.1f} ms, {row['tokens_per_s']:.1f} tokens/s")
    if file is not None:
        kept = {key: value for key, value in row.items() if key not in ("logits", "tokens")}
        print(json.dumps({"model": name, "device": job.device, **kept}), file=file, flush=True)


def measure(job: Job, options: argparse.Namespace, name: str, file: TextIO | None) -> tuple[list[Row], list[Row], list[str]]:
    """A row for each way and batch; one for each process that leases; and what failed."""
    rows: list[Row] = []
    leases: list[Row] = []
    failed: list[str] = []

    @contextlib.contextmanager
    def attempt() -> Iterator[None]:
        try:
            yield
        except SystemExit as reason:
            failed.append(str(reason))
            say(f"FAILED: {reason}")

    for way in options.ways:
        if reason := missing(way, options):
            print(f"{way}: {reason}", file=sys.stderr)
            continue
        with attempt(), Worker(dataclasses.replace(job, way=way)) as process:
            for _ in job.batches:
                rows.append(process.row())
                with attempt():
                    compare(rows[-1], rows)
                write(rows[-1], name, job, file)
                process.pipe.send(None)
    with attempt():
        for row in lease_by_several(job, options.processes) if options.processes else ():
            leases.append(row)
            with attempt():
                compare(row, rows)
            write(row, name, job, file)
    return rows, leases, failed


def main() -> None:
    options = parse()
    # Without it, importing transformers may begin a use of the GPU, which a forked process cannot go on with.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    binaries = options.bin.resolve()
    for place in ("libawqd.so.1", "../lib/libawqd.so.1", "../kernels/library/libawqd.so.1"):
        if (binaries / place).exists():
            os.environ.setdefault("LIBAWQD", str((binaries / place).resolve()))
    config = random_model.config_of(options.model, options.tiny, options.layers)
    name = f"{options.model}{'-tiny' if options.tiny else ''}-{config.num_hidden_layers}"
    with tempfile.TemporaryDirectory(prefix="awqd-") as made, contextlib.ExitStack() as stack:
        file = stack.enter_context(options.out.open("w", encoding="utf-8")) if options.out else None
        work_folder = pathlib.Path(made)
        folder, lend = (options.models or work_folder).resolve() / name, f"{made}/lend.sock"
        random_model.make(binaries, config, folder, options.device, say)
        (work_folder / "models").mkdir()
        flags = [f"--lend={lend}", f"--model={pairs.MODEL}={folder}"]
        server = pairs.Server(binaries, work_folder, "server", flags, options.device)
        say("the server is ready")
        try:
            job = Job("", config, folder, server.address, server.ring, lend, options.device, options.batches, options.tokens,
                      options.eager)
            rows, leases, failed = measure(job, options, name, file)
        finally:
            server.stop()
        if failed:
            print(server.log.read_text(errors="replace")[-4000:], file=sys.stderr)
    rows.sort(key=lambda row: list(WAYS).index(row["way"]))
    print(table(rows, {"way": ("way", ""), **TIMES, **TO_TORCH}))
    if leases:
        print(table(leases, {"process": ("process", ""), **TIMES, "beyond, MiB": ("beyond_mib", ".1f")}))
    if options.svg:
        options.svg.write_text(bars(rows, name), encoding="utf-8")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
