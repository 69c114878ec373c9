"""A peer that speaks HTTP/2 as it likes: calls that are right, by h2, and frames by hand, for what h2 would not send."""
import socket
import struct
import time

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import hpack

MATMUL = "/awqd.v1.QuantizedInference/QuantizedMatmul"
DEQUANTIZE = "/awqd.v1.QuantizedInference/Dequantize"
HEALTH = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
LOAD = "/awqd.v1.ModelRepository/LoadModel"
GET = "/awqd.v1.ModelRepository/GetModel"
UNLOAD = "/awqd.v1.ModelRepository/UnloadModel"
LIST = "/awqd.v1.ModelRepository/ListModels"
INDEX = "/inference.GRPCInferenceService/RepositoryIndex"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
ACKNOWLEDGES = 1
END_STREAM, END_HEADERS = 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(**values):
    """A SETTINGS frame: initial_window of a stream."""
    window = values.get("initial_window")
    return frame(SETTINGS, 0, 0, b"" if window is None else struct.pack(">HI", 4, window))


def call_headers(path, **more):
    return [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"), ("te", "trailers"),
            ("content-type", "application/grpc"), *((name.replace("_", "-"), value) for name, value in more.items())]


def header_block(path, **more):
    """The headers of a call so that they are right at any time on any connection: nothing in them is indexed."""
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*header) for header in call_headers(path, **more)])


class Raw:
    """A connection over which bytes are sent; nothing that comes back is answered, and nothing is read unless asked."""

    def __init__(self, port, hello=PREFACE + settings(), source="127.0.0.1", path=None):
        """To a port from an address of this machine, or to a socket file."""
        if path is None:
            self.socket = socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(source, 0))
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(str(path))
        self.open = True
        self.send(hello)

    def send(self, data, patience_s=1.0):
        """Whether all of it went: not when the server closed, or took nothing for `patience_s`."""
        view = memoryview(data)
        self.socket.settimeout(patience_s)
        while view and self.open:
            try:
                view = view[self.socket.send(view):]
            except TimeoutError:
                return False
            except OSError:
                self.open = False
        return self.open

    def drop(self, quiet_s=0.0):
        """Reads and forgets what there is, until nothing came for `quiet_s`; how many bytes."""
        self.socket.settimeout(max(quiet_s, 1e-6))
        total = 0
        while self.open:
            try:
                data = self.socket.recv(1 << 20)
            except (TimeoutError, BlockingIOError):
                return total
            except OSError:
                data = b""
            self.open = bool(data)
            total += len(data)
        return total

    def ask_whether_read(self, limit_s):
        """Waits until the server has read all that was sent: it then acknowledges a PING. Whether it did."""
        question = b"read it?"
        self.send(frame(PING, 0, 0, question))
        self.socket.settimeout(limit_s)
        wanted, seen = frame(PING, ACKNOWLEDGES, 0, question), b""
        while self.open and wanted not in seen:
            try:
                data = self.socket.recv(1 << 16)
            except OSError:
                return False
            self.open = bool(data)
            seen = seen[-len(wanted):] + data
        return self.open

    def is_closed(self):
        """Whether the server has closed it; what else came is forgotten."""
        self.socket.setblocking(False)
        try:
            while self.open:
                self.open = bool(self.socket.recv(1 << 16))
        except BlockingIOError:
            pass
        except OSError:
            self.open = False
        return not self.open

    def close(self):
        self.socket.close()


class Answer:
    """The result of a call. `status` is gRPC's number as text; None without one."""

    def __init__(self):
        self.status, self.body, self.message = None, b"", ""


class Caller:
    """One right call after the other, by h2. Raises OSError where there is no answer within `timeout_s`."""

    def __init__(self, port, timeout_s=10):
        self.timeout_s = timeout_s
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()

    def flush(self):
        self.socket.sendall(self.h2.data_to_send())

    def call(self, path, message):
        stream, answer = self.h2.get_next_available_stream_id(), Answer()
        self.h2.send_headers(stream, call_headers(path))
        end = time.monotonic() + self.timeout_s
        body = memoryview(b"\0" + struct.pack(">I", len(message)) + message)
        ended = False
        while True:
            while body and (room := min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)) > 0:
                self.h2.send_data(stream, bytes(body[:room]), end_stream=len(body) <= room)
                body = body[room:]
            self.flush()
            if ended:
                return answer
            self.socket.settimeout(max(end - time.monotonic(), 1e-3))
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the server closed")
            try:
                events = self.h2.receive_data(data)
            except h2.exceptions.ProtocolError as error:  # also whatever comes after the goodbye
                raise ConnectionResetError(str(error)) from error
            ended = self._take(events, stream, answer)

    def _take(self, events, stream, answer):
        ended = False
        for event in events:
            if isinstance(event, h2.events.ConnectionTerminated):
                raise ConnectionResetError("the server said goodbye")
            if getattr(event, "stream_id", None) != stream:
                continue
            if isinstance(event, h2.events.DataReceived):
                answer.body += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, stream)
            if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                headers = dict(event.headers)
                answer.status = headers.get("grpc-status", answer.status)
                answer.message = headers.get("grpc-message", answer.message)
            ended |= isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset))
        return ended

    def close(self):
        self.socket.close()
