"""Client and AsyncClient: they send what Calls says, blocking or with asyncio."""
from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import os
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar, Union

import grpc
import grpc.aio

from awqd import _channel, _errors, _stream
from awqd._arrays import AnyArray, Array, DTypeLike
from awqd._calls import ActivationFunction, ActivationQuantization, Calls, Path, Rpc, Steps, route
from awqd.v1 import tensor_pb2 as tensors

P = ParamSpec("P")
T = TypeVar("T")


class _Connection:
    """One channel, made when it is needed first: an asyncio one belongs to the event loop that runs then."""

    def __init__(self) -> None:
        self.channel: Any = None
        self.methods: dict[str, Any] = {}
        self.in_flight = 0


class _Base:
    """A client of one server, or of several behind one name.

    address: "host:port", "unix:/path", or a gRPC target: "dns:///name:port" and "ipv4:A:P,B:P" are balanced over all
        addresses, by their health. Default: AWQD_ADDRESS of the environment (the first), else 127.0.0.1:8001.
    timeout: seconds of a call that says none; math.inf: no deadline.
    tls: True for the system's authorities; implied by ca, cert and server_name.
    ca, cert, key: PEM files or bytes: whom to trust, and the client's own certificate.
    server_name: the name in the server's certificate, where it is not the address's.
    token: bearer token, or a function that returns the one of the day. Only over TLS, or to this machine.
    attempts: how often a call that changes nothing is sent, in all, while the server is UNAVAILABLE: 1 to 5.
    wait_for_server: calls wait, within their timeout, for a server that is not there yet.
    shared_memory: tensors to and from a server on this machine lie in shared memory, where the server offers it and
        the call is large enough to be faster so. False: never.
    max_receive_bytes: longer answers are refused. Streams have no such limit.
    connections: at most so many, each made when all before it have a call in flight. Large messages share one badly.

    ValueError for settings that cannot work.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float = 60.0,
        tls: bool | None = None,
        ca: _channel.PathOrBytes | None = None,
        cert: _channel.PathOrBytes | None = None,
        key: _channel.PathOrBytes | None = None,
        server_name: str = "",
        token: _channel.Token | None = None,
        attempts: int = 4,
        wait_for_server: bool = False,
        shared_memory: bool = True,
        max_receive_bytes: int = 1 << 30,
        connections: int = 4,
    ) -> None:
        if address is None:
            address = os.environ.get("AWQD_ADDRESS", _channel.DEFAULT_ADDRESS).split(",")[0].strip()
        if not timeout > 0:
            raise ValueError(f"timeout: got {timeout}, expected more than 0")
        if tls is None:
            tls = ca is not None or cert is not None or bool(server_name)
        self._settings = _channel.Settings(address, tls, ca, cert, key, server_name, token, attempts, max_receive_bytes)
        _channel.check(self._settings)
        self._wait = wait_for_server
        self._calls = Calls(timeout, shared_memory and _channel.is_local(address))
        if connections < 1:
            raise ValueError(f"connections: got {connections}, expected 1 or more")
        self._connections = [_Connection() for _ in range(connections)]
        self._lock = threading.Lock()

    def _make_channel(self, credentials: grpc.ChannelCredentials | None) -> Any:
        raise NotImplementedError

    @property
    def address(self) -> str:
        """The server's address."""
        return self._settings.address

    @contextlib.contextmanager
    def _method(self, name: str, kind: str) -> Iterator[Any]:
        """The method, unary_unary, unary_stream or stream_stream, on the connection with the fewest calls in flight, which is one more for as long."""
        with self._lock:
            connection = min(self._connections, key=lambda each: each.in_flight)
            connection.in_flight += 1
            if connection.channel is None:
                connection.channel = self._make_channel(_channel.credentials(self._settings))
            method = connection.methods.get(name)
            if method is None:
                method = getattr(connection.channel, kind)(name, request_serializer=None, response_deserializer=None)
                connection.methods[name] = method
        try:
            yield method
        finally:
            with self._lock:
                connection.in_flight -= 1

    def _options(self, timeout: float | None, weight: str) -> dict[str, Any]:
        metadata = _channel.metadata(self._settings) + ((("awqd-weight", weight),) if weight else ())
        return {"timeout": timeout, "metadata": metadata, "wait_for_ready": self._wait}


def _named(method: Callable[..., Any], call: Callable[..., Any]) -> None:
    """Gives a method of a client the name, text and signature of the one in Calls."""
    functools.update_wrapper(call, method)
    signature = inspect.signature(method)
    result = str(signature.return_annotation).removeprefix("Steps[").removesuffix("]")
    call.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]


def _blocking(method: Callable[Concatenate[Calls, P], Steps[T]]) -> Callable[Concatenate[Client, P], T]:
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._calls, *args, **kwargs))

    _named(method, call)
    return call


def _awaitable(
        method: Callable[Concatenate[Calls, P], Steps[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    async def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(method(self._calls, *args, **kwargs))

    _named(method, call)
    return call


class Client(_Base):
    __doc__ = f"""{_Base.__doc__}
    Calls block. Thread-safe: threads may share one client, and should.

        with awqd.Client("127.0.0.1:8001") as client:
            y = client.matmul("my-model", "model.layers.0.mlp.up_proj", x)
    """

    def _make_channel(self, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
        options = _channel.options(self._settings)
        if credentials is None:
            return grpc.insecure_channel(self.address, options)
        return grpc.secure_channel(self.address, credentials, options)

    def close(self) -> None:
        """Ends the connections, and what is in flight on them."""
        for connection in self._connections:
            if connection.channel is not None:
                connection.channel.close()
        self._calls.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _run(self, steps: Steps[T]) -> T:
        try:
            rpc = next(steps)
            while True:
                try:
                    answer = self._send(rpc)
                except grpc.RpcError as error:
                    rpc = steps.throw(_errors.from_rpc(error, self.address))
                except BaseException as error:
                    rpc = steps.throw(error)
                else:
                    rpc = steps.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _send(self, rpc: Rpc) -> bytes:
        with self._method(rpc.method, "unary_unary" if rpc.sink is None else "unary_stream") as method:
            stream = method(rpc.request, **self._options(rpc.timeout, rpc.weight))
            if rpc.sink is None:
                answer: bytes = stream
                return answer
            try:
                for message in stream:
                    rpc.sink(message)
            finally:
                stream.cancel()  # does nothing to a stream that has ended
            return b""

    def matmul_stream(
        self,
        model: str | None,
        weight: str | tensors.PackedWeight,
        xs: Iterable[Array],
        *,
        in_flight: int = 8,
        return_exceptions: bool = False,
        bias: AnyArray | None = None,
        output_dtype: DTypeLike | None = None,
        activation_function: ActivationFunction = "none",
        activation_quantization: ActivationQuantization | None = None,
        path: Path = "auto",
        priority: int = 0,
        timeout: float = math.inf,
    ) -> Iterator[Array]:
        """The products of one weight with many arrays, on one stream: faster than a call for each, from one thread.

        xs: an iterable of arrays, each as x of matmul, taken as results are asked for.
        in_flight: the most products that were sent and whose results were not yet taken.
        return_exceptions: gives the Error of a product that failed in its place, and goes on. Otherwise it is raised.
        timeout: seconds for all of it.
        Others: as in matmul. Tensors are messages, never shared memory.

        Gives y of each x, in their order.
        """
        window = _stream.window(threading.Semaphore, in_flight)
        products = self._calls.matmul_stream(
            model, weight, bias=bias, output_dtype=output_dtype, activation_function=activation_function,
            activation_quantization=activation_quantization, path=path, priority=priority)
        over = threading.Event()
        broken: list[Exception] = []

        def requests() -> Iterator[bytes]:
            """Runs in a thread of gRPC, which would not tell what goes wrong here."""
            try:
                for x in xs:
                    window.acquire()
                    if over.is_set():
                        return
                    yield products.request(x)
            except Exception as error:
                broken.append(error)

        def results() -> Iterator[Array]:
            with self._method(_stream.METHOD, "stream_stream") as method:
                call = method(requests(), **self._options(_stream.seconds(timeout), route(model, weight)))
                try:
                    for message in call:
                        products.answer(message)
                        for result in products.ready():
                            window.release()
                            yield _stream.checked(result, return_exceptions)
                    if broken:
                        raise broken[0]
                    products.finish()
                except grpc.RpcError as error:
                    raise _errors.from_rpc(error, self.address) from None
                finally:
                    over.set()
                    window.release()
                    call.cancel()  # does nothing to a stream that has ended

        return results()

    matmul = _blocking(Calls.matmul)
    grouped_matmul = _blocking(Calls.grouped_matmul)
    mlp = _blocking(Calls.mlp)
    dequantize = _blocking(Calls.dequantize)
    quantize_kv = _blocking(Calls.quantize_kv)
    dequantize_kv = _blocking(Calls.dequantize_kv)
    list_models = _blocking(Calls.list_models)
    get_model = _blocking(Calls.get_model)
    load_model = _blocking(Calls.load_model)
    unload_model = _blocking(Calls.unload_model)
    server_info = _blocking(Calls.server_info)
    is_serving = _blocking(Calls.is_serving)


class AsyncClient(_Base):
    __doc__ = f"""{_Base.__doc__}
    Calls are coroutines of one event loop. Many may be in flight at once.

        async with awqd.AsyncClient("127.0.0.1:8001") as client:
            ys = await asyncio.gather(*(client.matmul("my-model", "model.layers.0.mlp.up_proj", x) for x in xs))
    """

    def _make_channel(self, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        options = _channel.options(self._settings)
        if credentials is None:
            return grpc.aio.insecure_channel(self.address, options)
        return grpc.aio.secure_channel(self.address, credentials, options)

    async def close(self) -> None:
        """Ends the connections, and what is in flight on them."""
        for connection in self._connections:
            if connection.channel is not None:
                await connection.channel.close()
        self._calls.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *unused: object) -> None:
        await self.close()

    async def _run(self, steps: Steps[T]) -> T:
        try:
            rpc = next(steps)
            while True:
                try:
                    answer = await self._send(rpc)
                except grpc.RpcError as error:
                    rpc = steps.throw(_errors.from_rpc(error, self.address))
                except BaseException as error:
                    rpc = steps.throw(error)
                else:
                    rpc = steps.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _send(self, rpc: Rpc) -> bytes:
        with self._method(rpc.method, "unary_unary" if rpc.sink is None else "unary_stream") as method:
            stream = method(rpc.request, **self._options(rpc.timeout, rpc.weight))
            if rpc.sink is None:
                answer: bytes = await stream
                return answer
            try:
                async for message in stream:
                    rpc.sink(message)
            finally:
                stream.cancel()
            return b""

    async def matmul_stream(
        self,
        model: str | None,
        weight: str | tensors.PackedWeight,
        xs: Union[Iterable[Array], AsyncIterable[Array]],
        *,
        in_flight: int = 8,
        return_exceptions: bool = False,
        bias: AnyArray | None = None,
        output_dtype: DTypeLike | None = None,
        activation_function: ActivationFunction = "none",
        activation_quantization: ActivationQuantization | None = None,
        path: Path = "auto",
        priority: int = 0,
        timeout: float = math.inf,
    ) -> AsyncIterator[Array]:
        """The products of one weight with many arrays, on one stream: faster than a call for each, from one thread.

        xs: an iterable, or an asynchronous one, of arrays, each as x of matmul, taken as results are asked for.
        in_flight: the most products that were sent and whose results were not yet taken.
        return_exceptions: gives the Error of a product that failed in its place, and goes on. Otherwise it is raised.
        timeout: seconds for all of it.
        Others: as in matmul. Tensors are messages, never shared memory.

        Gives y of each x, in their order.
        """
        window = _stream.window(asyncio.Semaphore, in_flight)
        products = self._calls.matmul_stream(
            model, weight, bias=bias, output_dtype=output_dtype, activation_function=activation_function,
            activation_quantization=activation_quantization, path=path, priority=priority)
        broken: list[Exception] = []

        async def requests() -> AsyncIterator[bytes]:
            """Runs in a task of gRPC, which would not tell what goes wrong here."""
            try:
                async for x in _stream.each(xs):
                    await window.acquire()
                    yield products.request(x)
            except Exception as error:
                broken.append(error)

        with self._method(_stream.METHOD, "stream_stream") as method:
            call = method(requests(), **self._options(_stream.seconds(timeout), route(model, weight)))
            try:
                async for message in call:
                    products.answer(message)
                    for result in products.ready():
                        window.release()
                        yield _stream.checked(result, return_exceptions)
                if broken:
                    raise broken[0]
                products.finish()
            except grpc.RpcError as error:
                raise _errors.from_rpc(error, self.address) from None
            finally:
                call.cancel()

    matmul = _awaitable(Calls.matmul)
    grouped_matmul = _awaitable(Calls.grouped_matmul)
    mlp = _awaitable(Calls.mlp)
    dequantize = _awaitable(Calls.dequantize)
    quantize_kv = _awaitable(Calls.quantize_kv)
    dequantize_kv = _awaitable(Calls.dequantize_kv)
    list_models = _awaitable(Calls.list_models)
    get_model = _awaitable(Calls.get_model)
    load_model = _awaitable(Calls.load_model)
    unload_model = _awaitable(Calls.unload_model)
    server_info = _awaitable(Calls.server_info)
    is_serving = _awaitable(Calls.is_serving)
