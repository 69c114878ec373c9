"""Three servers behind nginx, HAProxy, Envoy and gRPC's own round robin: under load one is killed and one drained. And by weight,
behind HAProxy and Envoy. And JSON over HTTP, by Envoy.

The configurations are those of deploy/loadbalancer with other addresses. A proxy that is not installed is skipped by name.
"""
import base64
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import grpc
import numpy as np

import awqd

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGURATIONS = ROOT / "deploy" / "loadbalancer"
AWQD = pathlib.Path(os.environ["AWQD_BUILD"]) / "bin" / "awqd"
MODEL, WEIGHT = "all-MiniLM-L6-v2-awq", "encoder.layer.0.attention.self.query"
COPIES = 8  # of the model under names of their own, for tests that want more weights
CALLERS = 4
DRAIN_DELAY_S = 1.5  # longer than health checks are apart
SETTLE_S = 3  # until a proxy that asks every second knows who is there


def wait_for(condition, what, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} within {seconds} s"
        time.sleep(0.02)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def accepts(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


class Awqd:
    """A server on a port of its choosing."""

    def __init__(self, folder, name):
        self.log = folder / f"{name}.log"
        port_file = folder / f"{name}.port"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [AWQD, "--address=127.0.0.1:0", f"--port_file={port_file}", f"--model_repository={ROOT / 'tests/data/awq'}",
                 "--device=cpu", "--cpu_threads=1", "--access_log=all", f"--drain_delay_ms={int(1000 * DRAIN_DELAY_S)}",
                 *(f"--model=copy{number}={ROOT / 'tests/data/awq' / MODEL}" for number in range(COPIES))], stdout=log, stderr=log)
        wait_for(lambda: port_file.exists() and port_file.read_text().strip(), f"{name}: a port")
        self.port = int(port_file.read_text())
        self.address = f"127.0.0.1:{self.port}"

    def wait_until_ready(self):
        with awqd.Client(self.address, wait_for_server=True) as client:
            wait_for(client.is_serving, f"{self.address}: health")

    def calls_of(self, model, weight):
        """How many calls of a weight its log tells of."""
        return self.log.read_text().count(f" model={model} weight={weight} ")

    def stop(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Load:
    """Callers that each send their next product when they have the answer to the last."""

    def __init__(self, client, expected):
        self.client, self.expected = client, expected
        self.x = np.ones((2, 384), np.float16)
        self.stop = threading.Event()
        self.done = 0
        self.failed = []
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.run) for _ in range(CALLERS)]
        for thread in self.threads:
            thread.start()

    def run(self):
        while not self.stop.is_set():
            try:
                same = np.allclose(self.client.matmul(MODEL, WEIGHT, self.x, timeout=20), self.expected, atol=1e-2)
                error = None if same else "another result"
            except awqd.Error as raised:
                error = raised
            with self.lock:
                self.done += 1
                if error is not None:
                    self.failed.append((time.monotonic(), error))

    def more(self, count):
        """Waits for so many calls from now on."""
        target = self.done + count
        wait_for(lambda: self.done >= target, f"{count} more calls")

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()


class Balancing(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="awqd-lb-")))
        tls = cls.folder / "tls"
        tls.mkdir()
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                        "-keyout", "tls.key", "-out", "tls.crt", "-subj", "/CN=awqd.test",
                        "-addext", "subjectAltName=DNS:awqd.test"], cwd=tls, check=True, capture_output=True)
        (tls / "server.pem").write_text((tls / "tls.crt").read_text() + (tls / "tls.key").read_text())

    def setUp(self):
        self.servers = []
        for number in range(3):
            self.servers.append(Awqd(self.folder, f"{self._testMethodName}-{number}"))
            self.addCleanup(self.servers[-1].stop)
        for server in self.servers:
            server.wait_until_ready()

    def configuration(self, name):
        """deploy/loadbalancer/NAME with this test's addresses and paths; its path and its port."""
        port = free_port()
        text = (CONFIGURATIONS / name).read_text()
        replacements = [(r"\b8443\b", str(port)), (r"/etc/awqd/tls", str(self.folder / "tls")), (r"/run/nginx\.pid", str(self.folder / "nginx.pid")),
                        (r"/var/log/nginx/error\.log", "stderr"), (r"\b9901\b", str(free_port())), (r"\b8080\b", str(port)),
                        (r"/etc/awqd/awqd\.pb", str(self.folder / "awqd.pb")),
                        (r"\b127\.0\.0\.1, port_value: 8001\b", f"127.0.0.1, port_value: {self.servers[0].port}")]
        for number, server in enumerate(self.servers, 1):
            replacements.append((rf"\bawqd-{number}:8001\b", server.address))
            replacements.append((rf"\baddress: awqd-{number}, port_value: 8001", f"address: 127.0.0.1, port_value: {server.port}"))
        for pattern, value in replacements:
            text = re.sub(pattern, value, text)
        self.assertNotRegex(text, r"awqd-[123]:8001|\b8443\b|\b8080\b|\b8001\b")
        path = self.folder / f"{self._testMethodName}-{name}"
        path.write_text(text)
        return path, port

    def proxy(self, port, command):
        log = open(self.folder / f"{self._testMethodName}.log", "w+")
        self.addCleanup(log.close)
        process = subprocess.Popen(command, stdout=log, stderr=log)

        def stop():
            process.terminate()
            process.wait(20)

        def up():
            self.assertIsNone(process.poll(), pathlib.Path(log.name).read_text())
            return accepts(port)

        self.addCleanup(stop)
        wait_for(up, f"{command[0]} listens")
        return awqd.Client(f"127.0.0.1:{port}", ca=self.folder / "tls" / "tls.crt", server_name="awqd.test")

    def kill_one_and_drain_another(self, client):
        killed, drained, last = self.servers
        expected = client.matmul(MODEL, WEIGHT, np.ones((2, 384), np.float16))
        load = Load(client, expected)
        self.addCleanup(load.end)
        load.more(300)
        kill_time = time.monotonic()
        killed.process.kill()
        load.more(300)
        drained.process.send_signal(signal.SIGTERM)
        self.assertEqual(drained.process.wait(30), 0, drained.log.read_text())
        load.more(300)
        load.end()
        # A proxy cannot repeat a call that the killed server had begun to answer.
        lost = [error for when, error in load.failed if not (when - kill_time < 2 and getattr(error, "code", "") in ("INTERNAL", "UNKNOWN"))]
        self.assertEqual([str(error) for error in lost], [])
        self.assertLessEqual(len(load.failed), CALLERS)
        with awqd.Client(last.address) as direct:
            self.assertTrue(direct.is_serving())

    def what_a_proxy_lets_through(self, client):
        big = np.ones((8192, 384), np.float16)
        self.assertEqual(client.matmul(MODEL, WEIGHT, big).shape, (8192, 384))
        self.assertEqual(client.dequantize(MODEL, WEIGHT).shape, (384, 384))
        with self.assertRaises(awqd.NotFound) as raised:
            client.get_model("absent")
        self.assertIn("absent", raised.exception.message)
        credentials = grpc.ssl_channel_credentials((self.folder / "tls" / "tls.crt").read_bytes())
        options = [("grpc.ssl_target_name_override", "awqd.test"), ("grpc.max_metadata_size", 1 << 20)]
        with grpc.secure_channel(client.address, credentials, options) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            self.assertEqual(check(b"", metadata=[("x-large", "x" * 2000)], timeout=5), b"\x08\x01")
            with self.assertRaises(grpc.RpcError):
                check(b"", metadata=[(f"x-large-{number}", "x" * 3000) for number in range(3)], timeout=5)

    def run_proxy(self, name, program, command):
        if shutil.which(program) is None:
            self.skipTest(f"{program} is not installed")
        path, port = self.configuration(name)
        with self.proxy(port, command(path)) as client:
            self.what_a_proxy_lets_through(client)
            self.kill_one_and_drain_another(client)

    def home_of(self, client, key):
        """The number of the one server that three calls of a weight reach."""
        alive = [server for server in self.servers if server.process.poll() is None]
        before = [server.calls_of(*key) for server in alive]
        for _ in range(3):
            client.dequantize(*key, rows=slice(0, 1))

        def reached():
            return [server.calls_of(*key) - count for server, count in zip(alive, before)]

        wait_for(lambda: sum(reached()) == 3, f"{key}: three lines in logs")
        self.assertEqual(sorted(reached())[:-1], [0] * (len(alive) - 1), f"calls of {key} on servers {reached()}")
        return self.servers.index(alive[reached().index(3)])

    def by_weight(self, name, program, command, changes, others_may_move):
        """Weights spread over the servers, each with a home; of a server that is killed they move, and so many others at most."""
        if shutil.which(program) is None:
            self.skipTest(f"{program} is not installed")
        path, port = self.configuration(name)
        text = path.read_text()
        for pattern, value in changes:
            text, count = re.subn(pattern, value, text, flags=re.MULTILINE)
            self.assertEqual(count, 1, pattern)
        path.write_text(text)
        with self.proxy(port, command(path)) as client:
            time.sleep(SETTLE_S)
            weights = [weight.path for weight in client.get_model(MODEL).weights]
            keys = [(f"copy{number}", weight) for number in range(COPIES) for weight in weights]
            homes = {key: self.home_of(client, key) for key in keys}
            counts = [list(homes.values()).count(number) for number in range(3)]
            self.assertEqual(len(keys), 48)
            self.assertGreaterEqual(min(counts), 4, f"weights of each server: {counts}")
            self.servers[0].process.kill()
            self.servers[0].process.wait()
            time.sleep(SETTLE_S)
            now = {key: self.home_of(client, key) for key in keys}
            self.assertLessEqual(sum(homes[key] != 0 and now[key] != homes[key] for key in keys), others_may_move)
            moved = {now[key] for key in keys if homes[key] == 0}
            self.assertEqual(moved, {1, 2}, "what the killed server had is shared out")
            print(f"{program}: {counts} weights of each server, {counts[0]} moved")

    def test_haproxy_by_weight(self):
        self.by_weight("haproxy.cfg", "haproxy", lambda path: ["haproxy", "-db", "-f", str(path)],
                       [(r"^  balance roundrobin\n", ""), (r"^  #   (balance hdr.*)$", r"  \1"), (r"^  #   (hash-type consistent)$", r"  \1")], 0)

    def test_envoy_by_weight(self):
        self.by_weight("envoy.yaml", "envoy",
                       lambda path: ["envoy", "-c", str(path), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"],
                       [("lb_policy: ROUND_ROBIN", "lb_policy: MAGLEV")], 4)

    def test_nginx(self):
        self.run_proxy("nginx.conf", "nginx", lambda path: ["nginx", "-c", str(path), "-p", str(self.folder), "-e", "stderr", "-g", "daemon off;"])

    def test_haproxy(self):
        self.run_proxy("haproxy.cfg", "haproxy", lambda path: ["haproxy", "-db", "-f", str(path)])

    def test_envoy(self):
        self.run_proxy("envoy.yaml", "envoy", lambda path: ["envoy", "-c", str(path), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"])

    def test_envoy_http(self):
        """The commands of http.yaml and of the README, and errors in JSON."""
        for program in ("envoy", "curl", "protoc"):
            if shutil.which(program) is None:
                self.skipTest(f"{program} is not installed")
        path, port = self.configuration("http.yaml")
        make_descriptors = re.search(r"^#   (protoc .*)$", path.read_text(), re.MULTILINE)[1]
        subprocess.run(make_descriptors, shell=True, cwd=ROOT, check=True)
        readme = (ROOT / "README.md").read_text()
        commands = re.findall(r"^    (?:curl .*(?:\n      .*)*)", readme, re.MULTILINE)
        self.assertEqual(len(commands), 2, commands)

        def answer(command):
            run = subprocess.run(["bash", "-c", command.replace("curl ", "curl --silent --max-time 20 ").replace(":8080", f":{port}")],
                                 capture_output=True, text=True, check=True)
            return json.loads(run.stdout)

        with self.proxy(port, ["envoy", "-c", str(path), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"]):
            models = answer(commands[0])["models"]
            self.assertIn({MODEL: "READY"}, [{model["name"]: model["state"]} for model in models])
            output = answer(commands[1])["output"]
            self.assertEqual((output["dtype"], output["shape"]), ("FP16", ["1", "384"]))
            with awqd.Client(self.servers[0].address) as client:
                expected = client.matmul(MODEL, WEIGHT, np.ones((1, 384), np.float16))
            self.assertEqual(base64.b64decode(output["raw"]), expected.tobytes())
            refused = answer(commands[1].replace("[1, 384]", "[1, 383]"))
            self.assertEqual(refused["code"], grpc.StatusCode.INVALID_ARGUMENT.value[0])
            self.assertEqual(refused["details"][0]["field_violations"][0]["field"], "activations.raw")
            status = subprocess.run(["curl", "-s", "-o", os.devnull, "-w", "%{http_code}", f"http://127.0.0.1:{port}/awqd.v1.ModelRepository/Bogus",
                                     "-d", "{}"], capture_output=True, text=True, check=True)
            self.assertEqual(status.stdout, "404")
            # The same port takes gRPC.
            with awqd.Client(f"127.0.0.1:{port}") as client:
                self.assertEqual(client.get_model(MODEL).model.name, MODEL)

    def test_round_robin(self):
        target = "ipv4:" + ",".join(server.address for server in self.servers)
        with awqd.Client(target) as client:
            self.kill_one_and_drain_another(client)


if __name__ == "__main__":
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    result = unittest.main(exit=False).result
    if result.skipped and result.wasSuccessful():
        print(result.skipped[0][1])
        sys.exit(77)
    sys.exit(not result.wasSuccessful())
