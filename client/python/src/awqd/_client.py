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

from awqd import _channel, _errors, _ring, _shared_memory, _stream
from awqd._arrays import Array, DTypeLike, Numbers
from awqd._calls import ActivationFunction, ActivationQuantization, Calls, Path, Rpc, Steps, Wait, route
from awqd.v1 import tensor_pb2 as tensors

P = ParamSpec("P")
T = TypeVar("T")


_CLOSED = "the client was closed meanwhile"


class _Connection:
    """One channel, made when it is needed first: an asyncio one belongs to the event loop that runs then."""

    def __init__(self) -> None:
        self.channel: Any = None
        self.methods: dict[str, Any] = {}
        self.in_flight = 0


class _Base:
    """A client of one server, or of several behind one name.

    address: "host:port", "unix:/path", or a gRPC target: "dns:///name:port" and "ipv4:A:P,B:P" are balanced over all
        addresses, by their health. Default: 127.0.0.1:8001.
    timeout: seconds of a call that says none; math.inf: no deadline.
    tls: True for the system's authorities; implied by ca, cert and server_name.
    ca, cert, key: PEM files or bytes: whom to trust, and the client's own certificate.
    server_name: the name in the server's certificate, where it is not the address's.
    token: bearer token, or a function that returns the one of the day. Only over TLS, or to this machine.
    token_file: a file with the token instead, read again when it changes.
    attempts: how often a call that changes nothing is sent, in all, while the server is UNAVAILABLE: 1 to 5.
    wait_for_server: calls wait, within their timeout, for a server that is not there yet.
    shared_memory: tensors to and from a server on this machine lie in shared memory, where the server offers it and
        the call is large enough to be faster so. False: never.
    ring: matmul, grouped_matmul, mlp and chain with named weights go through a ring, without messages, as far as their
        tensors fit there; True: where the server says that its --ring_path is; or that path.
    max_receive_bytes: longer answers are refused. Streams have no such limit.
    connections: at most so many, each made when all before it have a call in flight. Large messages share one badly.

    address, ca, cert, key and token_file that are not given come from the environment, as those of awqctl:
    AWQCTL_ADDRESS (the first of a list), AWQCTL_TLS_CA, AWQCTL_TLS_CERT, AWQCTL_TLS_KEY, AWQCTL_TOKEN_FILE.

    InvalidArgument, a ValueError, for settings that cannot work.
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
        token_file: str | os.PathLike[str] | None = None,
        attempts: int = 4,
        wait_for_server: bool = False,
        shared_memory: bool = True,
        ring: bool | str = False,
        max_receive_bytes: int = 1 << 30,
        connections: int = 4,
    ) -> None:
        _errors.check_timeout(timeout)
        if timeout == 0:
            raise _errors.InvalidArgument("timeout: got 0, expected more than 0", field="timeout")
        self._settings = _channel.settings_of(address, tls, ca, cert, key, server_name, token, token_file, attempts,
                                              max_receive_bytes)
        self._wait = wait_for_server
        shared_memory = shared_memory and _channel.is_local(self._settings.address)
        if shared_memory:
            _shared_memory.remove_on_signal()
        if ring and not (_ring.available() and _channel.is_local(self._settings.address)):
            raise _errors.InvalidArgument(f"ring: got one for {self._settings.address!r}, expected a server on this machine, "
                                          "on Linux", field="ring")
        settings = self._settings
        self._calls = Calls(timeout, shared_memory, ring, self._make_ring,
                            lambda: "".join(dict(_channel.metadata(settings)).values()))
        if connections < 1:
            raise _errors.InvalidArgument(f"connections: got {connections}, expected 1 or more", field="connections")
        self._connections = [_Connection() for _ in range(connections)]
        self._lock = threading.Lock()
        self._closed = False
        self._answered = False  # a server has, one time at least

    def __repr__(self) -> str:
        about = [repr(self.address), *(["tls"] if self._settings.tls else []), *(["closed"] if self._closed else [])]
        return f"{type(self).__name__}({', '.join(about)})"

    _make_ring = _ring.Ring

    def _make_channel(self, credentials: grpc.ChannelCredentials | None) -> Any:
        raise NotImplementedError

    @property
    def address(self) -> str:
        """The server's address."""
        return self._settings.address

    def _check(self) -> None:
        """Raises what forbids another call."""
        if self._closed:
            raise _errors.closed()

    @contextlib.contextmanager
    def _method(self, name: str, kind: str) -> Iterator[Any]:
        """The method, unary_unary, unary_stream or stream_stream, on the connection with the fewest calls in flight, which is one more for as long."""
        with self._lock:
            self._check()
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
        except (ValueError, grpc.aio.UsageError) as error:
            if self._closed and "closed" in str(error):  # by another thread or task, just before
                raise _errors.closed() from None
            raise
        except asyncio.CancelledError:
            # Closing an asyncio channel cancels what waits for it, as if its task was cancelled. Python 3.10 cannot tell.
            cancelling = getattr(asyncio.current_task(), "cancelling", lambda: 1)
            if self._closed and not cancelling():
                raise _errors.Cancelled("the call was in flight", hint=_CLOSED) from None
            raise
        finally:
            with self._lock:
                connection.in_flight -= 1

    def _error(self, error: grpc.RpcError) -> _errors.Error:
        result = _errors.from_rpc(error, self.address, self._settings.tls)
        if isinstance(result, _errors.Cancelled) and self._closed:
            result.hint = _CLOSED
        if isinstance(result, _errors.DeadlineExceeded) and not self._answered:
            result.hint = f"{self.address} has not answered yet: is that the server, and ready? Or give the call a longer timeout"
        self._answered |= not isinstance(result, (_errors.DeadlineExceeded, _errors.Unavailable, _errors.Cancelled))
        return result

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
        with self._lock:
            self._closed = True
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
            with _errors.of_arguments():
                rpc = next(steps)
            while True:
                try:
                    answer = rpc.run() if isinstance(rpc, Wait) else self._send(rpc)
                except grpc.RpcError as error:
                    rpc = steps.throw(self._error(error))
                except BaseException as error:
                    rpc = steps.throw(error)
                else:
                    self._answered = True
                    rpc = steps.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _send(self, rpc: Rpc) -> Any:
        with self._method(rpc.method, rpc.kind) as method:
            stream = method(rpc.request, **self._options(rpc.timeout, rpc.weight))
            if rpc.holds:
                next(stream)
                return stream
            if rpc.sink is None:
                return stream
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
        bias: Numbers | None = None,
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
        seconds = _stream.seconds(timeout)
        with _errors.of_arguments():
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
                call = method(requests(), **self._options(seconds, route(model, weight)))
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
                    raise self._error(error) from None
                finally:
                    over.set()
                    window.release()
                    call.cancel()  # does nothing to a stream that has ended

        return results()

    register = _blocking(Calls.register)
    matmul = _blocking(Calls.matmul)
    grouped_matmul = _blocking(Calls.grouped_matmul)
    mlp = _blocking(Calls.mlp)
    chain = _blocking(Calls.chain)
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

    _make_ring = _ring.LoopRing

    def _make_channel(self, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        options = _channel.options(self._settings)
        if credentials is None:
            return grpc.aio.insecure_channel(self.address, options)
        return grpc.aio.secure_channel(self.address, credentials, options)

    _loop: asyncio.AbstractEventLoop | None = None  # of the first call: gRPC's connections belong to it

    def _check(self) -> None:
        super()._check()
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise _errors.FailedPrecondition("the client was used in another event loop before",
                                             hint="make an AsyncClient in each, for example within asyncio.run()")

    async def close(self) -> None:
        """Ends the connections, and what is in flight on them."""
        if self._closed:
            return
        self._check()
        self._closed = True
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
            with _errors.of_arguments():
                rpc = next(steps)
            while True:
                try:
                    answer = await (self._wait_for(rpc) if isinstance(rpc, Wait) else self._send(rpc))
                except grpc.RpcError as error:
                    rpc = steps.throw(self._error(error))
                except BaseException as error:
                    rpc = steps.throw(error)
                else:
                    self._answered = True
                    rpc = steps.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def _wait_for(self, wait: Wait) -> Any:
        self._check()
        if wait.in_thread:
            return await asyncio.get_running_loop().run_in_executor(None, wait.run)
        return await wait.run()

    async def _send(self, rpc: Rpc) -> Any:
        with self._method(rpc.method, rpc.kind) as method:
            stream = method(rpc.request, **self._options(rpc.timeout, rpc.weight))
            if rpc.holds:
                await stream.read()
                return stream
            if rpc.sink is None:
                return await stream
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
        bias: Numbers | None = None,
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
        seconds = _stream.seconds(timeout)
        with _errors.of_arguments():
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
            call = method(requests(), **self._options(seconds, route(model, weight)))
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
                raise self._error(error) from None
            finally:
                call.cancel()

    register = _awaitable(Calls.register)
    matmul = _awaitable(Calls.matmul)
    grouped_matmul = _awaitable(Calls.grouped_matmul)
    mlp = _awaitable(Calls.mlp)
    chain = _awaitable(Calls.chain)
    dequantize = _awaitable(Calls.dequantize)
    quantize_kv = _awaitable(Calls.quantize_kv)
    dequantize_kv = _awaitable(Calls.dequantize_kv)
    list_models = _awaitable(Calls.list_models)
    get_model = _awaitable(Calls.get_model)
    load_model = _awaitable(Calls.load_model)
    unload_model = _awaitable(Calls.unload_model)
    server_info = _awaitable(Calls.server_info)
    is_serving = _awaitable(Calls.is_serving)
