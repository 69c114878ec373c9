"""Traces as a collector of OpenTelemetry gets them: read with the message classes of PyPI's opentelemetry-proto."""
import concurrent.futures
import queue
import unittest

import grpc
import numpy as np
import tritonclient.grpc as triton
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from server import Server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WEIGHT = "all-MiniLM-L6-v2-awq/encoder.layer.0.attention.self.query"
METHOD = "/awqd.v1.ServerInfo/GetServerInfo"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that it is sent."""

    def __init__(self):
        self.spans = queue.Queue()

    def Export(self, request, context):
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.put((resource.resource, span))
        return trace_service_pb2.ExportTraceServiceResponse()


class Traces(unittest.TestCase):

    def setUp(self):
        self.collector = Collector()
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self.collector, self.server)
        self.endpoint = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()
        self.addCleanup(self.server.stop, 0)

    def test_a_call_goes_on_with_its_callers_trace(self):
        with Server(f"--otlp_endpoint={self.endpoint}") as awqd, grpc.insecure_channel(awqd.address) as channel:
            _, call = channel.unary_unary(METHOD).with_call(
                b"", metadata=[("traceparent", f"00-{TRACE}-{PARENT}-01")], timeout=30)
            answered = dict(call.initial_metadata())["traceparent"].split("-")
            resource, span = self.collector.spans.get(timeout=30)
            self.assertEqual(span.trace_id.hex(), TRACE)
            self.assertEqual(span.parent_span_id.hex(), PARENT)
            self.assertEqual(answered, ["00", TRACE, span.span_id.hex(), "01"])
            self.assertEqual(span.name, METHOD[1:])
            self.assertEqual(span.kind, span.SPAN_KIND_SERVER)
            self.assertLess(span.start_time_unix_nano, span.end_time_unix_nano)
            attributes = {a.key: a.value for a in span.attributes}
            self.assertEqual(attributes["rpc.method"].string_value, "GetServerInfo")
            self.assertEqual(attributes["rpc.grpc.status_code"].int_value, 0)
            self.assertEqual({a.key: a.value.string_value for a in resource.attributes}["service.name"], "awqd")
            _, step = self.collector.spans.get(timeout=30)
            self.assertEqual(step.parent_span_id, span.span_id)
            self.assertEqual(step.name, "send")
        self.assertTrue(self.collector.spans.empty(), "calls without a traceparent are not traced")

    def test_samples_by_share(self):
        with Server(f"--otlp_endpoint={self.endpoint}", "--trace_sample=1") as awqd, \
                grpc.insecure_channel(awqd.address) as channel:
            for _ in range(3):
                channel.unary_unary(METHOD)(b"", timeout=30)
        names = []
        while not self.collector.spans.empty():
            names.append(self.collector.spans.get()[1].name)
        self.assertEqual(names.count(METHOD[1:]), 3)

    def test_the_calls_of_a_batch_link_to_one_another(self):
        callers = 3
        # The batch runs when it has their tokens; it waits a minute for them.
        with Server(f"--otlp_endpoint={self.endpoint}", f"--max_batch_tokens={callers}",
                    "--max_queue_delay_us=60000000") as awqd, \
                concurrent.futures.ThreadPoolExecutor(callers) as pool:
            client = triton.InferenceServerClient(awqd.address)
            list(pool.map(lambda i: self._infer(client, f"{i + 1:032x}"), range(callers)))
            client.close()
        calls, computes = {}, []
        while not self.collector.spans.empty():
            _, span = self.collector.spans.get()
            if span.name == "compute":
                computes.append(span)
            elif span.name.endswith("ModelInfer"):
                calls[span.span_id] = span.trace_id
        self.assertEqual(len(computes), callers)
        self.assertEqual(len({a.value.int_value for span in computes for a in span.attributes if a.key == "awqd.batch_id"}), 1)
        for span in computes:
            numbers = {a.key: a.value.int_value for a in span.attributes}
            self.assertEqual(numbers["awqd.batch_requests"], callers)
            self.assertEqual(numbers["awqd.batch_tokens"], callers)
            others = {id: trace for id, trace in calls.items() if id != span.parent_span_id}
            self.assertEqual({link.span_id: link.trace_id for link in span.links}, others)

    @staticmethod
    def _infer(client, trace):
        x = triton.InferInput("x", [1, 384], "FP16")
        x.set_data_from_numpy(np.ones((1, 384), np.float16))
        client.infer(WEIGHT, [x], headers={"traceparent": f"00-{trace}-{PARENT}-01"})


if __name__ == "__main__":
    unittest.main()
