"""The server under attack: awqd with its default flags on a model of random weights, and what it takes of the machine."""
import json
import os
import pathlib
import random
import re
import signal
import struct
import subprocess
import tempfile
import time
import urllib.request

BIN = pathlib.Path(os.environ["AWQD_BUILD"]) / "bin"
IN_FEATURES, OUT_FEATURES, GROUP = 256, 64, 64


def safetensors(tensors):
    """A file of (name, dtype, shape, bytes)."""
    header, at = {}, 0
    for name, dtype, shape, raw in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(raw for *_, raw in tensors)


def linear(in_features, out_features, seed=7):
    """The tensors of "layer", of random codes, as the format awq has them."""
    noise, groups = random.Random(seed), in_features // GROUP
    return [("layer.qweight", "I32", [in_features, out_features // 8], noise.randbytes(in_features * out_features // 2)),
            ("layer.qzeros", "I32", [groups, out_features // 8], noise.randbytes(groups * out_features // 2)),
            ("layer.scales", "F16", [groups, out_features], struct.pack("<H", 0x2000) * (groups * out_features))]


CONFIG = json.dumps({"quantization_config": {
    "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}})


def write_model(folder, tensors):
    """A checkpoint of the format awq."""
    folder.mkdir()
    (folder / "config.json").write_text(CONFIG)
    (folder / "model.safetensors").write_bytes(safetensors(tensors))


class Target:
    """A running awqd: `port`, `socket_file`, `metrics_port`; models "m", small, and "wide", 1 MiB of codes that become 4 MiB."""

    def __init__(self, *options):
        self.options = options

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="awqd-attack-")
        self.models = pathlib.Path(self.folder.name) / "models"
        self.models.mkdir()
        write_model(self.models / "m", linear(IN_FEATURES, OUT_FEATURES))
        write_model(self.models / "wide", linear(2048, 1024))
        self.socket_file = pathlib.Path(self.folder.name) / "socket"
        self.log_path, self.ready = pathlib.Path(self.folder.name) / "log", False
        self.log = self.log_path.open("wb")
        self.process = subprocess.Popen(
            [BIN / "awqd", "--address=127.0.0.1:0", f"--address=unix:{self.socket_file}", "--metrics_address=127.0.0.1:0", f"--model_repository={self.models}", "--device=cpu", *self.options],
            stdout=self.log, stderr=self.log)
        try:
            self.port = self._port()
        except BaseException:
            self.process.kill()
            raise
        return self

    def _port(self):
        for _ in range(1200):
            text = self.text()
            found = re.search(r"listening on 127\.0\.0\.1:(\d+)", text)
            metrics = re.search(r"metrics address=\S+ port=(\d+)", text)
            if found and metrics and "ready" in text:
                self.metrics_port = int(metrics.group(1))
                return int(found.group(1))
            assert self.process.poll() is None, text
            time.sleep(0.05)
        raise AssertionError("the server was not ready within 60 s:\n" + text)

    def text(self):
        return self.log_path.read_text(errors="replace")

    def rss(self):
        """Resident bytes now; 0 once it has ended."""
        try:
            status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return 0
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        return int(found.group(1)) * 1024 if found else 0

    def longest_hold_s(self):
        """Processor seconds that one event has kept a thread of the call loop from all others, in the last minute."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as page:
            text = page.read().decode()
        return float(re.search(r'awqd_loop_longest_hold_seconds\{clock="processor"\} (\S+)', text).group(1))

    def open_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self, limit_s=60):
        """SIGTERM. (exit status, seconds until then); the status is None where it took longer than the limit."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        return status, time.monotonic() - start

    def __exit__(self, *unused):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()
        self.folder.cleanup()
