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

PathOrBytes = Union[str, "os.PathLike[str]", bytes]
Token = Union[str, Callable[[], str]]

DEFAULT_ADDRESS = "127.0.0.1:8001"
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
    """Raises ValueError for settings that cannot work."""
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*:.+|.+:[0-9]{1,5}", settings.address) or settings.address.startswith("/"):
        raise ValueError(f"address: got {settings.address!r}, expected host:port, unix:/path or a gRPC target")
    if (settings.cert is None) != (settings.key is None):
        raise ValueError("cert, key: got one of them, expected both or neither")
    if not settings.tls and (settings.ca is not None or settings.cert is not None or settings.server_name):
        raise ValueError("tls: got False beside ca, cert, key or server_name, which mean TLS")
    if not settings.tls and settings.token is not None and not is_local(settings.address):
        raise ValueError(f"token: got one for {settings.address} without TLS, where others could read it; "
                         "expected tls=True or ca=...")
    if not 1 <= settings.attempts <= 5:
        raise ValueError(f"attempts: got {settings.attempts}, expected 1 (no retries) to 5")
    if not 1 <= settings.max_receive_bytes < 2**31:
        raise ValueError(f"max_receive_bytes: got {settings.max_receive_bytes}, expected 1 to 2147483647")


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


def _pem(value: PathOrBytes | None) -> bytes | None:
    return value if value is None or isinstance(value, bytes) else pathlib.Path(value).read_bytes()


def credentials(settings: Settings) -> grpc.ChannelCredentials | None:
    """None for plaintext."""
    if not settings.tls:
        return None
    return grpc.ssl_channel_credentials(_pem(settings.ca), _pem(settings.key), _pem(settings.cert))


def metadata(settings: Settings) -> tuple[tuple[str, str], ...]:
    """What goes with every call."""
    if settings.token is None:
        return ()
    token = settings.token if isinstance(settings.token, str) else settings.token()
    return (("authorization", f"Bearer {token}"),)
