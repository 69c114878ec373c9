"""Errors of calls: one class for each status code, with the field at fault and what to do about it."""
from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import grpc

from awqd import _descriptors


class Error(Exception):
    """A call failed.

    code: the status code's name, for example "INVALID_ARGUMENT".
    message: what the server said, unchanged: the field, what was got and what was expected.
    field: path of the field at fault, for example "activations.shape"; "" when there is none.
    hint: what to do about it; "" when there is nothing to add.
    """

    code: str = "UNKNOWN"
    hint: str = ""

    def __init__(self, message: str, *, field: str = "", hint: str | None = None) -> None:
        self.message = message
        self.field = field
        if hint is not None:
            self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" + (f" ({self.hint})" if self.hint else "")


class InvalidArgument(Error, ValueError):
    """A field, shape, dtype or size that cannot be."""
    code = "INVALID_ARGUMENT"


class NotFound(Error, LookupError):
    """No such model or weight."""
    code = "NOT_FOUND"
    hint = "list_models() names the models, get_model(name) the weights of one"


class AlreadyExists(Error):
    """A load of that model is in progress."""
    code = "ALREADY_EXISTS"
    hint = "wait for the other load to end"


class FailedPrecondition(Error):
    """The state of the device forbids it."""
    code = "FAILED_PRECONDITION"


class ResourceExhausted(Error):
    """A queue, a bound on bytes or the device's memory is full, or a message is over its limit."""
    code = "RESOURCE_EXHAUSTED"
    hint = "full: repeat after a pause; over a limit: send fewer tokens at a time"


class Unimplemented(Error, NotImplementedError):
    """The server has no such kernel or method."""
    code = "UNIMPLEMENTED"
    hint = "server_info() tells the version and the kernels of the server"


class Unavailable(Error, ConnectionError):
    """The server cannot be reached, is still loading or stops."""
    code = "UNAVAILABLE"
    hint = "is the address right and the server ready? Client(wait_for_server=True) waits for one that starts"


class DeadlineExceeded(Error, TimeoutError):
    """The answer did not come in time."""
    code = "DEADLINE_EXCEEDED"
    hint = "give the call a longer timeout"


class Cancelled(Error):
    """The call was cancelled, here or by a server that stops."""
    code = "CANCELLED"


class Unauthenticated(Error):
    """No token, or a wrong one."""
    code = "UNAUTHENTICATED"
    hint = "Client(token=...) sends a bearer token"


class PermissionDenied(Error, PermissionError):
    """The caller may not do this."""
    code = "PERMISSION_DENIED"


class Internal(Error):
    """A fault of the device or the server; its log says more under the error id of the message."""
    code = "INTERNAL"


class DataLoss(Error):
    """An answer that cannot be right: rows are missing, or sizes do not fit."""
    code = "DATA_LOSS"


_BY_CODE = {
    kind.code: kind
    for kind in (InvalidArgument, NotFound, AlreadyExists, FailedPrecondition, ResourceExhausted, Unimplemented,
                 Unavailable, DeadlineExceeded, Cancelled, Unauthenticated, PermissionDenied, Internal, DataLoss)
}


_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


def _field(details: Any) -> str:
    """The first field that google.rpc.BadRequest names in google.rpc.Status.details."""
    try:
        for detail in details:
            if detail.type_url.endswith("/google.rpc.BadRequest"):
                request = _descriptors.message("google.rpc.BadRequest").FromString(detail.value)
                for violation in request.field_violations:
                    return str(violation.field)
    except Exception:  # details that do not parse are not worth losing the message for
        return ""
    return ""


def _details(metadata: Any) -> Any:
    """What the trailers of a call say beside its code and message."""
    for key, value in metadata or ():
        if key == "grpc-status-details-bin":
            try:
                return _descriptors.message("google.rpc.Status").FromString(value).details
            except Exception:  # as in _field
                return ()
    return ()


def _make(code: str, message: str, field: str) -> Error:
    kind = _BY_CODE.get(code)
    if kind is not None:
        return kind(message, field=field)
    result = Error(message, field=field)
    result.code = code
    return result


# What gRPC says where a connection fails, and what to do about it; the first that fits.
_CONNECTING = (
    (("resolving", "DNS resolution failed", "lookup failed"), "no such host: is the name in the address right?"),
    (("http1.x", "Expected SETTINGS frame"),
     "no gRPC there; the server's --metrics_address speaks HTTP: take a port of its --address"),
    (("WRONG_VERSION_NUMBER", "TSI_PROTOCOL_FAILURE): SSL_ERROR_SYSCALL"),
     "does the server speak TLS? If not, leave out tls, ca, cert, key and server_name"),
    (("CERTIFICATE_VERIFY_FAILED",), "ca=... has to name the authority of the server's certificate"),
    (("Hostname Verification", "not in peer certificate"), "server_name=... says which name the server's certificate has"),
    (("refused", "No such file"), "nobody listens there: does the server run, and is the port right? "
                                  "Client(wait_for_server=True) waits for one that starts"),
)


def _connection_hint(message: str, tls: bool) -> str | None:
    for signs, hint in _CONNECTING:
        if any(sign in message for sign in signs):
            return hint
    if "failed to connect" in message and any(sign in message for sign in ("Socket closed", "reset", "closing", "End of TCP stream")):
        return ("does the server want a certificate of this client, cert=... and key=...?" if tls else
                "does the server speak TLS (ca=... or tls=True)?")
    return None


def from_rpc(error: grpc.RpcError, address: str, tls: bool) -> Error:
    """The error of a call that gRPC reports."""
    call: Any = error
    code = call.code().name
    message = call.details() or "no message"
    hint = None
    if code == Unavailable.code:
        hint = _connection_hint(message, tls)
        message = f"{address}: {message}"
    result = _make(code, message, _field(_details(call.trailing_metadata())))
    if hint is not None:
        result.hint = hint
    return result


def closed() -> Error:
    """The error of a call after close()."""
    return FailedPrecondition("the client is closed", hint="make another, or call within its with block")


@contextlib.contextmanager
def of_arguments() -> Iterator[None]:
    """Makes InvalidArgument of what Protocol Buffers say of values that no message can hold."""
    try:
        yield
    except Error:
        raise
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"an argument of the call: {error}") from error


def check_timeout(timeout: float) -> None:
    """InvalidArgument unless these are seconds that a call may take."""
    if not isinstance(timeout, (int, float)) or math.isnan(timeout) or timeout < 0:
        raise InvalidArgument(f"timeout: got {timeout!r}, expected seconds, 0 or more", field="timeout",
                              hint="math.inf: no deadline")


def from_status(code: int, message: str, details: Any) -> Error:
    """The error of one request of a stream: a google.rpc.Code, and google.rpc.Status.details."""
    return _make(_NAMES.get(code, "UNKNOWN"), message, _field(details))
