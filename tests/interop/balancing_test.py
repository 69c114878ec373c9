"""gRPC's own balancing policy weighted_round_robin over two servers, with the reports of --orca."""
import json
import pathlib
import re
import threading
import time
import unittest
import urllib.request

import grpc
import numpy
from tritonclient.grpc import service_pb2

from server import Server

INFER = "/inference.GRPCInferenceService/ModelInfer"
REPORTS = "xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
K = 384


def options(out_of_band):
    policy = {"enableOobLoadReport": out_of_band, "oobReportingPeriod": "1s", "blackoutPeriod": "0s", "weightUpdatePeriod": "0.1s"}
    return [("grpc.service_config", json.dumps({"loadBalancingConfig": [{"weighted_round_robin": policy}]}))]


def request(tokens=1):
    out = service_pb2.ModelInferRequest(model_name="all-MiniLM-L6-v2-awq/encoder.layer.0.intermediate.dense")
    out.inputs.add(name="x", datatype="FP16", shape=[tokens, K])
    out.raw_input_contents.append(numpy.ones((tokens, K), numpy.float16).tobytes())
    return out


class Balanced(Server):
    """Counts the calls of each method that came to it."""

    def __init__(self):
        super().__init__("--orca", "--metrics_address=127.0.0.1:0")

    def started(self, method):
        log = pathlib.Path(self.log.name).read_text(errors="replace")
        port = re.search(r"metrics.* port=(\d+)", log)[1]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.search(rf'grpc_server_call_started_total{{grpc_method="{re.escape(method)}"}} (\d+)', text)
        return int(found[1]) if found else 0


class Balancing(unittest.TestCase):

    def setUp(self):
        self.servers = [self.enterContext(Balanced()) for _ in range(2)]

    def channel(self, out_of_band):
        target = "ipv4:" + ",".join(server.address for server in self.servers)
        return self.calls(grpc.insecure_channel(target, options=options(out_of_band)))

    def only(self, server):
        return self.calls(grpc.insecure_channel(server.address))

    def calls(self, channel):
        self.addCleanup(channel.close)
        return channel.unary_unary(INFER, request_serializer=service_pb2.ModelInferRequest.SerializeToString,
                                   response_deserializer=service_pb2.ModelInferResponse.FromString)

    def wait(self, condition):
        end = time.monotonic() + 20
        while not condition():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)

    def test_the_policy_asks_each_server_for_its_reports(self):
        infer = self.channel(True)
        infer(request())
        self.wait(lambda: all(server.started(REPORTS) == 1 for server in self.servers))
        for _ in range(40):
            infer(request())
        self.assertTrue(all(server.started(INFER[1:]) >= 10 for server in self.servers))

    # By the report at each call's end, which gRPC hides from its callers.
    def test_a_server_that_is_busy_is_given_less(self):
        busy, stop, own = self.servers[0], threading.Event(), 0

        def occupy():
            nonlocal own
            infer = self.only(busy)
            while not stop.is_set():
                infer(request(1024))
                own += 1

        thread = threading.Thread(target=occupy)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(stop.set)
        infer, end = self.channel(False), time.monotonic() + 4
        while time.monotonic() < end:
            infer(request())
        stop.set()
        thread.join()
        given = [server.started(INFER[1:]) for server in self.servers]
        given[0] -= own
        self.assertLess(given[0], 0.7 * given[1])


if __name__ == "__main__":
    unittest.main()
