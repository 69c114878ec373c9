"""How the client connects: address, TLS, token, and what gRPC is told of limits, keepalive, balancing and retries."""
from __future__ import annotations

import ipaddress
import json
import os
import pathlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

import grpc

from awqd._errors import InvalidArgument

PathOrBytes = Union[str, "os.PathLike[str]", bytes]
Token = Union[str, Callable[[], str]]

DEFAULT_ADDRESS = "127.0.0.1:8001"
# Variables of the environment that stand for arguments that are not given, as awqctl has them; the first that is set.
ENVIRONMENT = {
    "address": ("AWQCTL_ADDRESS", "AWQD_ADDRESS"),
    "ca": ("AWQCTL_TLS_CA", "AWQD_TLS_CA"),
    "cert": ("AWQCTL_TLS_CERT", "AWQD_CLIENT_CERT"),
    "key": ("AWQCTL_TLS_KEY", "AWQD_CLIENT_KEY"),
    "token_file": ("AWQCTL_TOKEN_FILE", "AWQD_TOKEN_FILE"),
}
# Calls that may be repeated: they change nothing.
_REPEATABLE = [
    {"service": "awqd.v1.QuantizedInference"},
    {"service": "awqd.v1.ServerInfo"},
    {"service": "awqd.v1.ModelRepository", "method": "ListModels"},
    {"service": "awqd.v1.ModelRepository", "method": "GetModel"},
    {"service": "grpc.health.v1.Health", "method": "Check"},
]


@dataclass(frozen=True)
class Settings:
    """What Client takes; see there."""

    address: str
    tls: bool
    ca: PathOrBytes | None
    cert: PathOrBytes | None
    key: PathOrBytes | None
    server_name: str
    token: Token | None
    attempts: int
    max_receive_bytes: int


def from_environment(argument: str) -> str | None:
    """What the environment says of an argument; None where it says nothing."""
    return next(filter(None, map(os.environ.get, ENVIRONMENT[argument])), None)


def _read(path: str | os.PathLike[str], field: str) -> bytes:
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{field}: got {os.fspath(path)!r}, expected a file that can be read: {error.strerror}",
                              field=field) from None


def clean_token(token: str, field: str = "token") -> str:
    """Without the blanks and line ends around it. Errors do not say what it is."""
    token = token.strip()
    if not token or not all("!" <= character <= "~" for character in token):
        raise InvalidArgument(f"{field}: expected one token, as awqctl token prints it", field=field)
    return token


class TokenFile:
    """The token in a file, read again when the file changes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._token = ""
        self()

    def __call__(self) -> str:
        try:
            status = os.stat(self._path)
            seen: tuple[int, ...] = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            seen = ()  # reading it says why
        if not seen or seen != self._seen:
            self._token = clean_token(_read(self._path, "token_file").decode("latin-1"), "token_file")
            self._seen = seen
        return self._token


def settings_of(address: str | None, tls: bool | None, ca: PathOrBytes | None, cert: PathOrBytes | None, key: PathOrBytes | None,
                server_name: str, token: Token | None, token_file: str | os.PathLike[str] | None, attempts: int,
                max_receive_bytes: int) -> Settings:
    """Settings of a client's arguments, with what the environment says of those that are not given."""
    if address is None:
        address = (from_environment("address") or DEFAULT_ADDRESS).split(",")[0].strip()
    if tls is not False and not address.startswith(("unix:", "unix-abstract:")):
        ca = from_environment("ca") if ca is None else ca
        if cert is None and key is None:
            cert, key = from_environment("cert"), from_environment("key")
    if tls is None:
        tls = ca is not None or cert is not None or bool(server_name)
    if token is not None and token_file is not None:
        raise InvalidArgument("token, token_file: got both, expected one of them", field="token")
    if token is None:
        path = from_environment("token_file") if token_file is None else token_file
        token = None if path is None else TokenFile(path)
    elif isinstance(token, str):
        token = clean_token(token)
    settings = Settings(address, tls, ca, cert, key, server_name, token, attempts, max_receive_bytes)
    check(settings)
    credentials(settings)  # says now what is wrong with its files
    return settings


def service_config(attempts: int, balanced: bool) -> str:
    """Balances over all addresses of a target, by health where there are several, and repeats what is safe to repeat.

    Only UNAVAILABLE is repeated: the server did not take the call, stops, or the connection broke. Queues that are
    full are for the caller to wait for.
    """
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin" if balanced else "pick_first": {}}]}
    if balanced:
        config["healthCheckConfig"] = {"serviceName": ""}
    if attempts > 1:
        config["methodConfig"] = [{"name": _REPEATABLE, "retryPolicy": {
            "maxAttempts": attempts, "initialBackoff": "0.1s", "maxBackoff": "2s", "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"]}}]
        # A server that refuses everything is soon left alone.
        config["retryThrottling"] = {"maxTokens": 100, "tokenRatio": 0.5}
    return json.dumps(config)


def is_balanced(address: str) -> bool:
    """Whether the target may have several addresses: then round robin and health checks make sense."""
    return address.startswith(("dns:", "xds:")) or (address.startswith(("ipv4:", "ipv6:")) and "," in address)


def is_local(address: str) -> bool:
    """Whether the target is on this machine, as far as its name tells."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = re.sub(r"^(dns:///|dns:|ipv4:|ipv6:)", "", address)
    if "," in host:
        return False
    host = host.rsplit(":", 1)[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check(settings: Settings) -> None:
    """Raises InvalidArgument, a ValueError, for settings that cannot work."""
    if re.match(r"(?!dns|ipv4|ipv6|unix|unix-abstract|xds)[a-z][a-z0-9+.-]*://", settings.address):
        raise InvalidArgument(f"address: got {settings.address!r}, expected host:port without {settings.address.split('//')[0]}//",
                              field="address", hint="tls=True or ca=... ask for TLS")
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*:.+|.+:[0-9]{1,5}", settings.address) or settings.address.startswith("/"):
        raise InvalidArgument(f"address: got {settings.address!r}, expected host:port, unix:/path or a gRPC target",
                              field="address")
    if (settings.cert is None) != (settings.key is None):
        raise InvalidArgument("cert, key: got one of them, expected both or neither", field="cert")
    if not settings.tls and (settings.ca is not None or settings.cert is not None or settings.server_name):
        raise InvalidArgument("tls: got False beside ca, cert, key or server_name, which mean TLS", field="tls")
    if not settings.tls and settings.token is not None and not is_local(settings.address):
        raise InvalidArgument(f"token: got one for {settings.address} without TLS, where others could read it; "
                              "expected tls=True or ca=...", field="token")
    if not 1 <= settings.attempts <= 5:
        raise InvalidArgument(f"attempts: got {settings.attempts}, expected 1 (no retries) to 5", field="attempts")
    if not 1 <= settings.max_receive_bytes < 2**31:
        raise InvalidArgument(f"max_receive_bytes: got {settings.max_receive_bytes}, expected 1 to 2147483647",
                              field="max_receive_bytes")


def options(settings: Settings) -> list[tuple[str, Any]]:
    """The channel's arguments."""
    result: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", settings.max_receive_bytes),
        ("grpc.max_send_message_length", -1),  # the server states its own limit, with a better message
        # Finds a dead peer under a call without a deadline. Servers refuse pings more often than every five minutes
        # unless told otherwise, so idle connections send none.
        ("grpc.keepalive_time_ms", 5 * 60 * 1000),
        ("grpc.keepalive_timeout_ms", 20 * 1000),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Another client's failure must not delay this one's next attempt.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 1 if settings.attempts > 1 else 0),
        # gRPC repeats only what it still holds, and would let go of a call of more than 256 KiB.
        ("grpc.per_rpc_retry_buffer_size", 2**31 - 1),
        ("grpc.service_config", service_config(settings.attempts, is_balanced(settings.address))),
    ]
    if is_local(settings.address):
        result.append(("grpc.enable_http_proxy", 0))
    if settings.server_name:
        result.append(("grpc.ssl_target_name_override", settings.server_name))
    return result


def _pem(value: PathOrBytes | None, field: str, label: bytes) -> bytes | None:
    data = value if value is None or isinstance(value, bytes) else _read(value, field)
    if data is not None and label + b"-----" not in data:  # gRPC's own complaint names no file
        got = "bytes" if isinstance(value, bytes) else repr(os.fspath(value or ""))
        raise InvalidArgument(f"{field}: got {got}, expected PEM with a {label.decode().lower()}", field=field)
    return data


def credentials(settings: Settings) -> grpc.ChannelCredentials | None:
    """None for plaintext."""
    if not settings.tls:
        return None
    return grpc.ssl_channel_credentials(_pem(settings.ca, "ca", b"CERTIFICATE"), _pem(settings.key, "key", b"PRIVATE KEY"),
                                        _pem(settings.cert, "cert", b"CERTIFICATE"))


def metadata(settings: Settings) -> tuple[tuple[str, str], ...]:
    """What goes with every call."""
    if settings.token is None:
        return ()
    token = settings.token if isinstance(settings.token, str) else clean_token(settings.token())
    return (("authorization", f"Bearer {token}"),)
