"""The fleet on Ray: where models go, and three servers on a cluster of five raylets on this machine, one of which is killed
under load while another server is drained."""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import numpy as np

import awqd

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy" / "ray"))
from placement import model_bytes, place  # noqa: E402

BIN = pathlib.Path(os.environ["AWQD_BUILD"]) / "bin"
MODEL, WEIGHT = "all-MiniLM-L6-v2-awq", "encoder.layer.0.attention.self.query"


class Placement(unittest.TestCase):

    def test_large_models_first_each_on_as_many_servers_as_replicas(self):
        placed = place({"a": (10, 1), "b": (6, 1), "c": (5, 2), "d": (1, 3)}, 3)
        self.assertEqual(placed, [["a", "d"], ["b", "c", "d"], ["c", "d"]])

    def test_no_server_has_more_than_the_mean_and_one_model(self):
        random = np.random.default_rng(0)
        for _ in range(200):
            servers = int(random.integers(1, 6))
            models = {str(i): (int(random.integers(1, 100)), int(random.integers(1, servers + 1))) for i in range(servers + 3)}
            placed = place(models, servers)
            held = [sum(models[name][0] for name in names) for names in placed]
            for name, (_, replicas) in models.items():
                self.assertEqual(sum(name in names for names in placed), replicas)
            self.assertLessEqual(max(held), sum(held) / servers + max(size for size, _ in models.values()))

    def test_what_cannot_be(self):
        with self.assertRaisesRegex(ValueError, r"models\.a\.replicas: got 3, expected 1 to 2"):
            place({"a": (1, 3)}, 2)
        with self.assertRaisesRegex(ValueError, "servers: got 2, expected at most 1"):
            place({"a": (1, 1)}, 2)
        with self.assertRaisesRegex(ValueError, "no .safetensors"):
            model_bytes(ROOT, "proto")
        self.assertGreater(model_bytes(ROOT / "tests/data/awq", MODEL), 100000)


class OnRay(unittest.TestCase):

    def test_fleet_heals(self):
        import ray
        from ray.cluster_utils import Cluster

        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory(prefix="awqd-ray-test-")))
        cluster = Cluster()
        self.addCleanup(cluster.shutdown)
        quiet = {"object_store_memory": 80 << 20, "include_dashboard": False}
        cluster.add_node(num_cpus=0, **quiet)
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(4)]
        ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT / "deploy" / "ray")}})
        self.addCleanup(ray.shutdown)
        from fleet import Fleet

        fleet = Fleet({"servers": 3, "resources": {"num_cpus": 1}, "awqd": str(BIN / "awqd"), "repository": str(ROOT / "tests/data/awq"),
                       "flags": ["--device=cpu", "--cpu_threads=1", "--drain_delay_ms=1000"], "models": {MODEL: {"replicas": 3}},
                       "output": str(folder)})

        def until_whole(seconds):
            begin = time.monotonic()
            while not fleet.step():
                self.assertLess(time.monotonic() - begin, seconds, "the fleet is not whole")
                time.sleep(0.1)
            return time.monotonic() - begin

        until_whole(60)
        target = (folder / "fleet.target").read_text()
        self.assertRegex(target, r"^ipv4:[\d.]+:\d+,[\d.]+:\d+,[\d.]+:\d+$")
        self.assertEqual((folder / "fleet.map").read_text().split()[1:], target.removeprefix("ipv4:").split(","))

        failed, done, stop = [], [0], threading.Event()
        x = np.ones((2, 384), np.float16)

        def load(client):
            while not stop.is_set():
                try:
                    client.matmul(MODEL, WEIGHT, x, timeout=20)
                except awqd.Error as error:
                    failed.append(error)
                done[0] += 1

        with awqd.Client(target) as client:
            callers = [threading.Thread(target=load, args=(client,)) for _ in range(3)]
            for caller in callers:
                caller.start()
            # A node goes away and takes its server along.
            lost = self.node_with_a_server(nodes)
            cluster.remove_node(lost, allow_graceful=False)
            fleet.step()
            deadline = time.monotonic() + 30
            while (folder / "fleet.target").read_text() == target:
                self.assertLess(time.monotonic(), deadline, "the loss was not noticed")
                fleet.step()
            healed = until_whole(30)
            # Another server is told to exit.
            before = done[0]
            nodes.remove(lost)
            os.kill(self.servers()[0], signal.SIGTERM)
            while done[0] < before + 200:
                fleet.step()
            until_whole(30)
            stop.set()
            for caller in callers:
                caller.join()
        self.assertEqual([str(error) for error in failed if error.code not in ("INTERNAL", "UNKNOWN")], [])
        self.assertLessEqual(len(failed), 3)
        print(f"whole again {healed:.1f} s after the loss was noticed; {done[0]} calls")
        with awqd.Client((folder / "fleet.target").read_text(), wait_for_server=True) as client:
            self.assertEqual(client.matmul(MODEL, WEIGHT, x).shape, (2, 384))
        fleet.drain()
        self.assertEqual((folder / "fleet.target").read_text(), "")
        self.assertEqual(self.servers(), [])

    @staticmethod
    def servers():
        """Processes of servers that this test's actors started."""
        found = subprocess.run(["pgrep", "-f", f"^{BIN}/awqd .*--port_file=/tmp/awqd-ray-"], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    @classmethod
    def node_with_a_server(cls, nodes):
        """A node whose raylet started the worker of an actor that started a server."""

        def parent(pid):
            return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])

        raylets = {parent(parent(pid)) for pid in cls.servers()}
        return next(node for node in nodes if any(found.process.pid in raylets for found in node.all_processes["raylet"]))


if __name__ == "__main__":
    unittest.main()
