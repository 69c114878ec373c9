#!/usr/bin/env python3
"""A fleet of awqd on Ray: one actor a server, which starts it with its part of the models and watches it.

Usage: fleet.py fleet.yaml [--address RAY]      Ctrl-C or SIGTERM drains all and ends

Ray picks the nodes; a server that fails, or whose node does, is started again wherever there is room. No request passes
through Python: clients call the servers, whose addresses are in fleet.target (one target, for gRPC's round robin) and
fleet.map (a line "MODEL SERVER..." for each model, for load balancers).
"""
import argparse
import ctypes
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import grpc
import ray
import yaml

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from placement import model_bytes, place  # noqa: E402

CHECK_SECONDS = 1.0
LOST_SECONDS = 5.0  # without an answer an actor counts as gone


def _die_with_the_actor():
    """In the child: SIGKILL when the actor's process ends, so that no server outlives its raylet."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Server:
    """The actor: one awqd."""

    def __init__(self, command, models):
        folder = tempfile.mkdtemp(prefix="awqd-ray-")
        port_file = pathlib.Path(folder, "port")
        self._process = subprocess.Popen(
            [*command, "--address=0.0.0.0:0", f"--port_file={port_file}", *(f"--load_model={model}" for model in models)],
            preexec_fn=_die_with_the_actor)
        while not (port_file.exists() and port_file.read_text().strip()):
            if self._process.poll() is not None:
                raise RuntimeError(f"awqd ended with status {self._process.returncode}; its log says why")
            time.sleep(0.05)
        self._port = int(port_file.read_text())
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self._port}")

    def ready(self):
        """The server's address while its health says SERVING, "" while it does not. Raises once it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"awqd ended with status {self._process.returncode}")
        check = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            serving = check(b"", timeout=2) == b"\x08\x01"
        except grpc.RpcError:
            serving = False
        return f"{ray.util.get_node_ip_address()}:{self._port}" if serving else ""

    def drain(self):
        """Lets the server's calls end, and waits for it."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait()


class Fleet:
    """Starts the servers and keeps as many."""

    def __init__(self, config):
        self._config = config
        models = {name: (model.get("bytes") or model_bytes(config["repository"], name), model.get("replicas", 1))
                  for name, model in config["models"].items()}
        self._models = place(models, config["servers"])
        self._command = [config["awqd"], f"--model_repository={config['repository']}", *config.get("flags", [])]
        self._output = pathlib.Path(config.get("output", "."))
        self._actors = [None] * config["servers"]
        self._addresses = [""] * config["servers"]
        self._asked = [None] * config["servers"]
        self._since = [0.0] * config["servers"]

    def step(self):
        """Looks at every server once, and starts what is missing. True while all are ready."""
        for index, actor in enumerate(self._actors):
            if actor is None:
                self._start(index)
        for index in range(len(self._actors)):
            self._look(index)
        self._publish()
        return all(self._addresses)

    def drain(self):
        """Lets every server end its calls."""
        ray.wait([actor.drain.remote() for actor in self._actors if actor is not None],
                 num_returns=sum(actor is not None for actor in self._actors), timeout=120)
        self._addresses = [""] * len(self._addresses)
        self._publish()

    def _start(self, index):
        remote = ray.remote(**self._config.get("resources", {"num_cpus": 1}))(Server)
        self._actors[index] = remote.options(scheduling_strategy="SPREAD", max_concurrency=2).remote(self._command, self._models[index])
        self._asked[index] = None

    def _look(self, index):
        if self._asked[index] is None:
            self._asked[index] = self._actors[index].ready.remote()
            self._since[index] = time.monotonic()
        done, _ = ray.wait([self._asked[index]], timeout=0.2)
        if not done:
            # One that was ready and says nothing is gone; one that never was still loads, or waits for room.
            if self._addresses[index] and time.monotonic() - self._since[index] > LOST_SECONDS:
                self._lose(index, "no answer")
            return
        try:
            self._addresses[index] = ray.get(done[0])
            self._asked[index] = None
        except ray.exceptions.RayError as error:
            self._lose(index, str(error).strip().splitlines()[-1])

    def _lose(self, index, why):
        print(f"server {index}: {why}; starting another", file=sys.stderr, flush=True)
        try:
            ray.kill(self._actors[index])
        except ray.exceptions.RayError:
            pass  # it is gone already
        self._actors[index], self._addresses[index] = None, ""

    def _publish(self):
        ready = [address for address in self._addresses if address]
        holders = {}
        for address, models in zip(self._addresses, self._models):
            for model in models if address else ():
                holders.setdefault(model, []).append(address)
        self._write("fleet.target", "ipv4:" + ",".join(ready) if ready else "")
        self._write("fleet.map", "".join(f"{model} {' '.join(found)}\n" for model, found in sorted(holders.items())))

    def _write(self, name, text):
        new = self._output / f"{name}.new"
        new.write_text(text)
        new.rename(self._output / name)  # readers never see half of it


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("--address", help="of the cluster; default: where Ray finds one, or a new one of this machine")
    arguments = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *unused: stop.set())
    here = str(pathlib.Path(__file__).resolve().parent)
    ray.init(address=arguments.address, log_to_driver=True, runtime_env={"env_vars": {"PYTHONPATH": here}})
    fleet = Fleet(yaml.safe_load(arguments.config.read_text()))
    while not stop.wait(CHECK_SECONDS):
        fleet.step()
    fleet.drain()


if __name__ == "__main__":
    main()
