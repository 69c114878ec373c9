"""How the client connects: TLS, tokens, retries, limits; against a small server of grpcio that the test can bend."""
import asyncio
import contextlib
import json
import socket
import subprocess
import threading
from concurrent import futures

import grpc
import numpy as np
import pytest

import awqd
from awqd import _channel
from awqd.v1 import inference_pb2, tensor_pb2

METHOD = "/awqd.v1.QuantizedInference/QuantizedMatmul"


class Fake(grpc.GenericRpcHandler):
    """Answers a product with its activations. `failures`: codes to fail the next calls with."""

    def __init__(self):
        self.failures = []
        self.calls = []
        self.broken = None
        self.lock = threading.Lock()

    def service(self, details):
        def unary(request, context):
            with self.lock:
                self.calls.append((details.method, dict(context.invocation_metadata()), context.time_remaining()))
                code = self.failures.pop(0) if self.failures else None
            if code is not None:
                context.abort(code, "as the test says")
            if self.broken is not None:
                return self.broken
            parsed = inference_pb2.QuantizedMatmulRequest.FromString(request)
            return inference_pb2.QuantizedMatmulResponse(output=parsed.activations).SerializeToString()

        def stream(request, context):
            unary(request, context)
            chunk = inference_pb2.DequantizeChunk(total_rows=4, total_columns=2)
            chunk.output.CopyFrom(tensor_pb2.Tensor(dtype="FP16", shape=[2, 2], raw=bytes(8)))
            yield chunk.SerializeToString()

        if details.method.endswith("Stream"):
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


@contextlib.contextmanager
def serving(fake, credentials=None):
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((fake,))
    port = (server.add_insecure_port("127.0.0.1:0") if credentials is None else
            server.add_secure_port("127.0.0.1:0", credentials))
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """ca.pem, server.pem, server.key, client.pem, client.key."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test authority")
    for name in ("server", "client"):
        openssl("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}",
                "-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=DNS:awqd.test",
                "-addext", "basicConstraints=critical,CA:FALSE")
    return folder


def test_tls_with_certificates_of_both_and_a_token(certificates):
    read = lambda name: (certificates / name).read_bytes()
    credentials = grpc.ssl_server_credentials([(read("server.key"), read("server.pem"))], read("ca.pem"), True)
    x = np.ones((1, 4), np.float16)
    fake = Fake()
    tokens = iter(["first", "second"])
    with serving(fake, credentials) as address:
        both = {"ca": certificates / "ca.pem", "cert": certificates / "client.pem", "key": read("client.key"),
                "server_name": "awqd.test"}
        with awqd.Client(address, token=lambda: next(tokens), **both) as client:
            for _ in range(2):
                np.testing.assert_array_equal(client.matmul("m", "w", x), x)
        assert [call[1]["authorization"] for call in fake.calls] == ["Bearer first", "Bearer second"]

        async def with_asyncio():
            async with awqd.AsyncClient(address, token="t", **both) as client:
                return await client.matmul("m", "w", x)

        np.testing.assert_array_equal(asyncio.run(with_asyncio()), x)
        refused = [{"ca": certificates / "ca.pem", "server_name": "awqd.test"},  # no certificate of its own
                   {**both, "server_name": "other.test"}, {**both, "ca": read("client.pem")}]
        for settings in refused:
            with awqd.Client(address, attempts=1, timeout=5, **settings) as client, pytest.raises(awqd.Unavailable):
                client.matmul("m", "w", x)


def test_metadata_names_the_weight_for_load_balancers():
    fake = Fake()
    x = np.ones(4, np.float32)
    with serving(fake) as address, awqd.Client(address) as client:
        client.matmul("m", "a.b", x)
        client.mlp("m", "a", x)
        client.matmul("m", "\u00e4", x)
        client.matmul(None, awqd.packed_weight("plain", {"codes": np.ones((4, 1), np.uint8)}), x)
        with pytest.raises(awqd.DataLoss):
            client.dequantize("m", "w")
    assert [call[1].get("awqd-weight") for call in fake.calls] == ["m/a.b", "m/a", None, None, "m/w"]


def test_a_connection_more_while_all_others_are_busy():
    gate = threading.Barrier(4)
    peers = []

    class Slow(Fake):

        def service(self, details):
            def unary(request, context):
                peers.append(context.peer())
                if details.method == METHOD:
                    gate.wait(20)  # until three calls are here and the test
                return b""

            return grpc.unary_unary_rpc_method_handler(unary)

    x = np.ones(4, np.float32)
    with serving(Slow()) as address, awqd.Client(address, connections=2) as client:
        for _ in range(3):
            client.list_models()
        assert len(set(peers)) == 1
        peers.clear()

        def call():
            try:
                client.matmul("m", "w", x)
            except awqd.Error as error:
                errors.append(error)

        errors = []
        callers = [threading.Thread(target=call) for _ in range(3)]
        for caller in callers:
            caller.start()
        gate.wait(20)
        for caller in callers:
            caller.join()
        assert len(peers) == 3 and len(set(peers)) == 2
        assert [str(error) for error in errors] == ["DATA_LOSS: output: got dtype 0, expected one that this client knows"] * 3
        assert [connection.in_flight for connection in client._connections] == [0, 0]


def test_what_is_repeated():
    fake = Fake()
    big = np.ones((512, 1024), np.float16)  # more than gRPC keeps by default
    unavailable = grpc.StatusCode.UNAVAILABLE
    with serving(fake) as address, awqd.Client(address, shared_memory=False) as client:
        fake.failures = [unavailable] * 3
        np.testing.assert_array_equal(client.matmul("m", "w", big), big)
        assert len(fake.calls) == 4
        fake.failures = [unavailable] * 9
        with pytest.raises(awqd.Unavailable, match=address):
            client.matmul("m", "w", big)
        assert len(fake.calls) == 8
        for code, error in ((grpc.StatusCode.RESOURCE_EXHAUSTED, awqd.ResourceExhausted), (grpc.StatusCode.INTERNAL, awqd.Internal)):
            fake.calls, fake.failures = [], [code]
            with pytest.raises(error):
                client.matmul("m", "w", big)
            assert len(fake.calls) == 1
        fake.calls, fake.failures = [], [unavailable]
        with pytest.raises(awqd.Unavailable):
            client.load_model("m")  # it changes something
        assert len(fake.calls) == 1
        with awqd.Client(address, attempts=1) as once, pytest.raises(awqd.Unavailable):
            fake.failures = [unavailable]
            once.matmul("m", "w", big)


def test_deadlines_and_codes():
    fake = Fake()
    x = np.ones(4, np.float32)
    with serving(fake) as address, awqd.Client(address, timeout=50) as client:
        client.matmul("m", "w", x)
        client.matmul("m", "w", x, timeout=7)
        client.matmul("m", "w", x, timeout=float("inf"))
        remaining = [call[2] for call in fake.calls]
        assert 40 < remaining[0] < 51 and 5 < remaining[1] < 8 and (remaining[2] is None or remaining[2] > 1e6)
        for code in grpc.StatusCode:
            if code is grpc.StatusCode.OK:
                continue
            fake.failures = [code] * 4
            with pytest.raises(awqd.Error) as raised:
                client.matmul("m", "w", x)
            assert raised.value.code == code.name and "as the test says" in raised.value.message


def test_answers_that_cannot_be_right():
    fake = Fake()
    x = np.ones(4, np.float32)
    with serving(fake) as address, awqd.Client(address) as client:
        fake.broken = b"\xff\xff"
        with pytest.raises(awqd.DataLoss):
            client.matmul("m", "w", x)
        fake.broken = inference_pb2.QuantizedMatmulResponse(
            output=tensor_pb2.Tensor(dtype="FP32", shape=[5], raw=bytes(16))).SerializeToString()
        with pytest.raises(awqd.DataLoss, match=r"output: got 16 bytes, expected 20 for \[5\]"):
            client.matmul("m", "w", x)
        fake.broken = None
        with pytest.raises(awqd.DataLoss, match="output: got 2 rows, expected 4"):
            client.dequantize("m", "w")


def test_a_limit_on_answers():
    x = np.ones(4096, np.float32)
    with serving(Fake()) as address, awqd.Client(address, max_receive_bytes=4096) as client:
        with pytest.raises(awqd.ResourceExhausted, match="larger than max"):
            client.matmul("m", "w", x)


@pytest.mark.parametrize("arguments, message", [
    ({"address": "/run/awqd.sock"}, "expected host:port, unix:/path"),
    ({"address": "somewhere"}, "address"),
    ({"address": "http://127.0.0.1:8001"}, "expected host:port without http://"),
    ({"timeout": 0}, "timeout"),
    ({"cert": b"x"}, "cert, key"),
    ({"tls": False, "ca": b"x"}, "tls"),
    ({"address": "example.org:8001", "token": "t"}, "without TLS"),
    ({"attempts": 6}, "attempts"),
    ({"connections": 0}, "connections"),
    ({"max_receive_bytes": 2**31}, "max_receive_bytes"),
])
def test_settings_that_cannot_work(arguments, message):
    for kind in (awqd.Client, awqd.AsyncClient):
        with pytest.raises(ValueError, match=message) as raised:
            kind(**arguments)
        assert isinstance(raised.value, awqd.InvalidArgument)


def test_address_of_the_environment(monkeypatch):
    for variable, address in (("AWQD_ADDRESS", "127.0.0.1:9"), ("AWQCTL_ADDRESS", "127.0.0.1:10")):
        monkeypatch.setenv(variable, f"{address}, unix:/x")
        with awqd.Client() as client:
            assert client.address == address


@pytest.mark.parametrize("address, local, balanced", [
    ("127.0.0.1:1", True, False), ("localhost:1", True, False), ("[::1]:1", True, False), ("unix:/x", True, False),
    ("10.0.0.1:1", False, False), ("example.org:1", False, False), ("dns:///example.org:1", False, True),
    ("ipv4:127.0.0.1:1,127.0.0.1:2", False, True), ("dns:///localhost:1", True, True),
])
def test_what_addresses_mean(address, local, balanced):
    assert (_channel.is_local(address), _channel.is_balanced(address)) == (local, balanced)
    config = json.loads(_channel.service_config(4, balanced))
    assert ("healthCheckConfig" in config) == balanced


def test_why_there_is_no_connection(certificates):
    """Each reason has a hint of its own."""
    read = lambda name: (certificates / name).read_bytes()
    tls = grpc.ssl_server_credentials([(read("server.key"), read("server.pem"))])
    both = grpc.ssl_server_credentials([(read("server.key"), read("server.pem"))], read("ca.pem"), True)
    trusted = {"ca": read("ca.pem"), "server_name": "awqd.test"}
    with serving(Fake()) as plain, serving(Fake(), tls) as secret, serving(Fake(), both) as strict:
        cases = [("no-such-host.invalid:8001", {}, "no such host"),
                 ("127.0.0.1:1", {}, "nobody listens there"),
                 ("unix:/nonexistent/awqd.sock", {}, "nobody listens there"),
                 (plain, {"tls": True}, "does the server speak TLS? If not, leave out tls"),
                 (secret, {}, "does the server speak TLS (ca=... or tls=True)?"),
                 (secret, {"ca": read("client.pem"), "server_name": "awqd.test"}, "ca=... has to name"),
                 (secret, {**trusted, "server_name": "other.test"}, "server_name=... says"),
                 (strict, trusted, "cert=... and key=...")]
        for address, settings, hint in cases:
            with awqd.Client(address, attempts=1, timeout=10, **settings) as client:
                with pytest.raises(awqd.Unavailable) as raised:
                    client.list_models()
                assert hint in raised.value.hint, (raised.value.message, raised.value.hint)
                assert address in raised.value.message
    # Nobody, and a port that takes connections and is silent.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for address in ("127.0.0.1:1", f"127.0.0.1:{silent.getsockname()[1]}"):
            with awqd.Client(address, wait_for_server=True, timeout=0.3) as client:
                with pytest.raises(awqd.DeadlineExceeded, match=f"{address} has not answered yet: is that the server"):
                    client.list_models()
    fake = Fake()
    fake.failures = [None, grpc.StatusCode.DEADLINE_EXCEEDED]
    with serving(fake) as address, awqd.Client(address) as client:
        client.matmul("m", "w", np.ones(4, np.float32))
        with pytest.raises(awqd.DeadlineExceeded, match="longer timeout") as raised:
            client.matmul("m", "w", np.ones(4, np.float32))
        assert "has not answered" not in str(raised.value)


def test_a_port_that_speaks_http():
    import http.server
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as page:
        threading.Thread(target=page.serve_forever, daemon=True).start()
        with awqd.Client(f"127.0.0.1:{page.server_port}", attempts=1, timeout=10) as client:
            with pytest.raises(awqd.Unavailable, match="no gRPC there"):
                client.list_models()
        page.shutdown()


class Waiting(Fake):
    """Keeps calls until it is told to let go."""

    def __init__(self):
        super().__init__()
        self.arrived, self.go = threading.Event(), threading.Event()

    def service(self, details):
        def unary(request, context):
            self.arrived.set()
            self.go.wait(20)
            return b""

        return grpc.unary_unary_rpc_method_handler(unary)


def test_a_client_that_is_closed():
    fake = Waiting()
    with serving(fake) as address:
        client = awqd.Client(address)
        errors = []

        def call():
            try:
                client.list_models()
            except awqd.Error as error:
                errors.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        assert fake.arrived.wait(20)
        client.close()
        caller.join(20)
        assert isinstance(errors[0], awqd.Cancelled) and "closed meanwhile" in errors[0].hint
        for calls in (client.list_models, lambda: list(client.matmul_stream("m", "w", [np.ones(4, np.float32)]))):
            with pytest.raises(awqd.FailedPrecondition, match="the client is closed"):
                calls()
        client.close()

        async def with_asyncio():
            client = awqd.AsyncClient(address)
            fake.arrived.clear()
            call = asyncio.create_task(client.list_models())
            await asyncio.to_thread(fake.arrived.wait, 20)
            await client.close()
            with pytest.raises(awqd.Cancelled, match="closed meanwhile"):
                await call
            with pytest.raises(awqd.FailedPrecondition, match="the client is closed"):
                await client.list_models()
            await client.close()

        asyncio.run(with_asyncio())
        fake.go.set()


def test_a_client_of_another_event_loop():
    with serving(Fake()) as address:
        client = awqd.AsyncClient(address)
        x = np.ones(4, np.float32)
        asyncio.run(client.matmul("m", "w", x))
        with pytest.raises(awqd.FailedPrecondition, match="another event loop.*make an AsyncClient in each"):
            asyncio.run(client.matmul("m", "w", x))


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), float("-inf"), "5"])
def test_timeouts_that_cannot_be(timeout):
    x = np.ones(4, np.float32)
    with awqd.Client("127.0.0.1:1") as client:
        for call in (lambda: client.matmul("m", "w", x, timeout=timeout), lambda: client.list_models(timeout=timeout),
                     lambda: client.matmul_stream("m", "w", [x], timeout=timeout), lambda: awqd.Client(timeout=timeout)):
            with pytest.raises(awqd.InvalidArgument, match="timeout: got") as raised:
                call()
            assert raised.value.field == "timeout"


def test_arguments_that_no_message_holds():
    with awqd.Client("127.0.0.1:1") as client:
        for call in (lambda: client.get_model(7), lambda: client.matmul("m", "w", np.ones(4, np.float32), priority=2**40),
                     lambda: client.get_model("\udc80"), lambda: client.matmul_stream("m", "w", [], priority="high")):
            with pytest.raises(awqd.InvalidArgument, match="an argument of the call"):
                call()


def test_tokens_and_their_files(tmp_path):
    fake = Fake()
    file = tmp_path / "token"
    file.write_bytes(b"first\r\n")
    x = np.ones(4, np.float32)
    with serving(fake) as address:
        for token in ("  t\n", lambda: "t\r\n"):
            with awqd.Client(address, token=token) as client:
                client.matmul("m", "w", x)
        with awqd.Client(address, token_file=file) as client:
            client.matmul("m", "w", x)
            file.write_text("second, longer".replace(", ", "-"))
            client.matmul("m", "w", x)
        assert [call[1]["authorization"] for call in fake.calls] == ["Bearer t", "Bearer t", "Bearer first", "Bearer second-longer"]
    for arguments, field in (({"token": "two words"}, "token"), ({"token": "\n"}, "token"), ({"token_file": tmp_path / "none"}, "token_file"),
                             ({"token_file": tmp_path}, "token_file"), ({"token": "secret", "token_file": file}, "token"),
                             ({"ca": tmp_path / "none"}, "ca"), ({"ca": file}, "ca"), ({"ca": b"x", "tls": True}, "ca")):
        with pytest.raises(awqd.InvalidArgument) as raised:
            awqd.Client("127.0.0.1:1", **arguments)
        assert raised.value.field == field
        assert "secret" not in str(raised.value) and "two words" not in str(raised.value)


@pytest.mark.parametrize("kind", [0, 1], ids=["awqctl's", "older"])
def test_the_environment_stands_for_what_is_not_given(kind, certificates, tmp_path, monkeypatch):
    read = lambda name: (certificates / name).read_bytes()
    credentials = grpc.ssl_server_credentials([(read("server.key"), read("server.pem"))], read("ca.pem"), True)
    (tmp_path / "token").write_text("t\n")
    fake = Fake()
    x = np.ones(4, np.float32)
    values = {"ca": certificates / "ca.pem", "cert": certificates / "client.pem", "key": certificates / "client.key",
              "token_file": tmp_path / "token"}
    with serving(fake, credentials) as address, serving(fake) as plain:
        for argument, value in {**values, "address": f"{address},unix:/x"}.items():
            monkeypatch.setenv(_channel.ENVIRONMENT[argument][kind], str(value))
        with awqd.Client(server_name="awqd.test") as client:
            assert client.address == address
            client.matmul("m", "w", x)
        assert fake.calls.pop()[1]["authorization"] == "Bearer t"
        with awqd.Client(plain, tls=False, token="mine") as client:
            client.matmul("m", "w", x)
        assert fake.calls.pop()[1]["authorization"] == "Bearer mine"
        with awqd.Client("unix:/x") as client:
            assert repr(client) == "Client('unix:/x')", "no TLS there, as awqctl has it"
        with awqd.Client("127.0.0.1:1") as client:
            assert repr(client) == "Client('127.0.0.1:1', tls)"


def test_a_model_of_several_pages():
    """More weights than a page of GetModel has, and a load of the model between two pages."""
    from awqd.v1 import model_repository_pb2 as repository
    asked = []

    class Pages(Fake):

        def service(self, details):
            def unary(request, context):
                token = repository.GetModelRequest.FromString(request).page_token
                asked.append(token)
                if len(asked) == 2:
                    context.abort(grpc.StatusCode.ABORTED, "another load")
                page = repository.GetModelResponse(quant_method="awq", next_page_token="" if token else "2")
                page.model.name = "m"
                page.weights.add(path="b" if token else "a")
                return page.SerializeToString()

            return grpc.unary_unary_rpc_method_handler(unary)

    with serving(Pages()) as address, awqd.Client(address) as client:
        model = client.get_model("m")
    assert asked == ["", "2", "", "2"]
    assert [weight.path for weight in model.weights] == ["a", "b"] and model.next_page_token == ""
