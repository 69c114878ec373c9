"""Rings: calls of a server on this machine through shared memory, without messages; proto/awqd/ring/layout.h has the layout."""
from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import platform
import queue
import socket
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Union

from awqd import _device, _errors
from awqd._arrays import Spec
from awqd.v1 import tensor_pb2 as tensors

METHODS = {"QuantizedMatmul": 1, "GroupedQuantizedMatmul": 2, "GatedMlp": 3}

_MAGIC, _VERSION = 0x71776172, 1
_FRAME = struct.Struct("<IIQ")
_OPEN, _PREPARE, _RELEASE, _OK, _SHARE, _UNSHARE = 1, 2, 3, 4, 6, 7
_PREPARED = struct.Struct("<qqqqqqIIII")
_CHAIN, _STEP = 4, struct.Struct("<IHH")
_HEADER = struct.Struct("<IIIIQQQ")
_CLOSED, _TAIL, _SUBMISSIONS, _SLOTS_AT = 68, 128, 1024, 4096
_REQUEST = struct.Struct("<QIIqqqqqq56xq")
_ANSWER_AT = 256
_ANSWER = struct.Struct("<IQqqqqqiIqII")  # behind the state
_TEXT_AT = _ANSWER_AT + 80
_SLOT_BYTES = 1024
_ANSWERED, _WAITING, _POLLING = 1, 2, 3

_SLOTS = 16
_PAYLOAD_BYTES = 32 << 20
_ALIGNMENT = 64
_MOST_PREPARED = 512
_LOOK_S = 0.02  # how often a sleeping call looks whether the server still lives
_GRACE_S = 0.1  # how much longer than its deadline a call waits: the server answers late ones itself
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def available() -> bool:
    """Whether this system has what a ring needs."""
    return _FUTEX != 0 and hasattr(socket, "recv_fds")


@dataclass(eq=False)
class Prepared:
    """A call that was prepared, and the bytes that one token of it takes. users: calls that need the number."""

    number: int
    y_bytes: int
    y_columns: int
    y_dtype: int
    steps: tuple[Prepared, ...] = ()  # of a chain, whose y are theirs, one behind the other
    users: int = 0


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call. router: router weights, or the logits of a router.

    places: where x and y begin in the regions that the call was prepared with, instead of x.
    """

    x: Spec | None
    ids: Spec | None = None
    router: Spec | None = None
    scales: Spec | None = None
    places: tuple[int, int] | None = None

    def aligned(self) -> int:
        """Bytes that they take in the payload."""
        return sum(_aligned(each.data.nbytes) for each in (self.x, self.ids, self.router, self.scales) if each is not None)


@dataclass(frozen=True)
class Step:
    """A step of a chain. template: makes its request, from the columns and the dtype of the results it takes.

    x, router: the number of the step whose result it takes, from 1; 0: it takes the chain's.
    """

    method: str
    x: int
    router: int
    template: Callable[[tuple[int, int] | None, tuple[int, int] | None], bytes]


# What a call is prepared by: a method and the request without tensors, or what tells a chain from others.
Key = tuple[str, Union[bytes, tuple[Any, ...]]]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _failed(code: int, message: str) -> _errors.Error:
    """The error that the server told, with the field that it begins with."""
    error = _errors.from_status(code, message, ())
    name = message.partition(": got")[0]
    if all(part.isidentifier() for part in name.split(".")):
        error.field = name
    return error


class Ring:
    """A ring of this process. Thread-safe: each call has a slot, and an equal part of the payload."""

    _payload_at: int

    def __init__(self, path: str, authorization: str, timeout: float | None) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._lock = threading.Lock()  # of the memory's tail, and of what is prepared
        self._order = threading.Lock()  # what is stored before it is taken is seen before what is stored after
        self._socket_lock = threading.Lock()
        self._prepared: OrderedDict[Key, Prepared] = OrderedDict()
        self._owner = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(path)
            body = struct.pack("<IIQ", _VERSION, _SLOTS, _PAYLOAD_BYTES) + authorization.encode()
            self._socket.sendall(_FRAME.pack(_OPEN, len(body), 0) + body)
            head, fds, _, _ = socket.recv_fds(self._socket, _FRAME.size, 3)
        except OSError as error:
            self._socket.close()
            raise _errors.Unavailable(f"ring {path}: {error}") from None
        kind, size, value = _FRAME.unpack(head + self._receive(_FRAME.size - len(head)))
        if kind != _OK:
            message = self._receive(size).decode(errors="replace")
            self._socket.close()
            raise _failed(value, message)
        self._event = fds[1]
        self._events = socket.socket(fileno=fds[2])
        self._events.setblocking(False)
        self._map = mmap.mmap(fds[0], value)
        os.close(fds[0])
        magic, version, slots, slot_bytes, _, self._payload_at, payload_bytes = _HEADER.unpack_from(self._map)
        if (magic, version, slots, slot_bytes) != (_MAGIC, _VERSION, _SLOTS, _SLOT_BYTES):
            raise _errors.Internal(f"ring {path}: the memory is not as this client knows it")
        self._part: int = payload_bytes // _SLOTS // _ALIGNMENT * _ALIGNMENT
        self._states = [ctypes.c_uint32.from_buffer(self._map, self._slot_at(i) + _ANSWER_AT) for i in range(_SLOTS)]
        self._tail = ctypes.c_uint32.from_buffer(self._map, _TAIL)
        self._closed = ctypes.c_uint32.from_buffer(self._map, _CLOSED)
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        for slot in range(_SLOTS):
            self._free.put(slot)
        self._abandoned: set[int] = set()  # nobody waits for them any more; the server may still write to their parts
        self._dead = False

    def close(self) -> None:
        """Ends the ring, and what is in flight in it."""
        self._socket.close()
        self._events.close()

    def __del__(self) -> None:
        event = getattr(self, "_event", -1)
        if event >= 0:
            os.close(event)

    def usable(self) -> bool:
        """Whether it was opened by this process, not by its parent, and the server has not closed it."""
        return self._owner == os.getpid() and self._closed.value == 0 and not self._dead

    @staticmethod
    def _slot_at(slot: int) -> int:
        return _SLOTS_AT + slot * _SLOT_BYTES

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            if not more:
                raise _errors.Unavailable("the server has closed the ring")
            data += more
        return data

    def _exchange(self, kind: int, value: int, body: bytes, descriptors: Sequence[int] = ()) -> tuple[int, bytes]:
        """Sends a frame, with descriptors, and receives its answer. The caller has _socket_lock."""
        frame = _FRAME.pack(kind, len(body), value) + body
        try:
            self._socket.sendall(frame[socket.send_fds(self._socket, [frame], descriptors):])
            answer, size, value = _FRAME.unpack(self._receive(_FRAME.size))
            data = self._receive(size)
        except (OSError, _errors.Unavailable) as error:
            self._dead = True
            raise _errors.Unavailable(f"the server has closed the ring: {error}") from None
        if answer != _OK:
            raise _failed(value, data.decode(errors="replace"))
        return value, data

    def find(self, key: Key) -> Prepared | None:
        """The call that was prepared by this key, if it was. Its number stays until it was given to done()."""
        with self._lock:
            known = self._prepared.get(key)
            if known is not None:
                self._prepared.move_to_end(key)
                known.users += 1
            return known

    def done(self, prepared: Prepared) -> None:
        with self._lock:
            prepared.users -= 1

    def prepare(self, key: Key, steps: Sequence[Step] = ()) -> None:
        """Prepares the call of a request without its tensors, or a chain, for find()."""
        with self._socket_lock:
            if key in self._prepared:
                return
            prepared = self._make_chain(steps) if steps else self._make(METHODS[key[0]], key[1])
            with self._lock:
                idle = [each for each, call in self._prepared.items() if call.users == 0]
                numbers = [self._prepared.pop(each).number for each in idle[:max(0, len(self._prepared) + 1 - _MOST_PREPARED)]]
                self._prepared[key] = prepared
            for number in numbers:
                self._exchange(_RELEASE, number, b"")

    def _make(self, method: int, body: Any) -> Prepared:
        number, data = self._exchange(_PREPARE, method, body)
        _, y_bytes, _, _, _, y_columns, y_dtype, _, _, _ = _PREPARED.unpack(data)
        return Prepared(number, y_bytes, y_columns, y_dtype)

    def _make_chain(self, steps: Sequence[Step]) -> Prepared:
        """A chain, whose steps need no number of their own then."""
        made: list[Prepared] = []

        def look(of: int) -> tuple[int, int] | None:
            return (made[of - 1].y_columns, made[of - 1].y_dtype) if of else None

        try:
            for number, step in enumerate(steps):
                try:
                    made.append(self._make(METHODS[step.method], step.template(look(step.x), look(step.router))))
                except _errors.Error as error:
                    error.field = f"steps[{number}]" + (f".{error.field}" if error.field else "")
                    raise
            chain = self._make(_CHAIN, b"".join(_STEP.pack(call.number, step.x, step.router) for call, step in zip(made, steps)))
        finally:
            for call in made:
                if not self._dead:
                    self._exchange(_RELEASE, call.number, b"")
        chain.steps = tuple(made)
        return chain

    def share(self, request: bytes, descriptor: _device.Descriptor) -> None:
        """Shares memory of a GPU, by its descriptor, until unshare() or the end of the ring. request: a ShareMemoryRequest."""
        with self._socket_lock:
            self._exchange(_SHARE, 0, request, [descriptor.number])

    def unshare(self, region: str) -> None:
        """Ends it, unless it has ended with the ring. Calls in flight go on."""
        with self._socket_lock:
            if self.usable():
                with contextlib.suppress(_errors.Unavailable, _errors.NotFound):
                    self._exchange(_UNSHARE, 0, region.encode())

    def run(self, prepared: Prepared, tokens: int, inputs: Inputs, timeout: float | None) -> Any:
        """The bytes of y, and the Execution. None where the tensors are too large for a part of the payload."""
        end = None if timeout is None else time.monotonic() + timeout
        if not self._fits(prepared, tokens, inputs):
            return None
        with self._lock:
            for slot in [slot for slot in self._abandoned if self._states[slot].value == _ANSWERED]:
                self._abandoned.remove(slot)
                self._free.put(slot)
        try:
            slot = self._free.get(timeout=timeout)
        except queue.Empty:
            raise _errors.DeadlineExceeded("every slot of the ring was in use") from None
        y_at = self._submit(slot, prepared, tokens, inputs, end, _WAITING)  # so the server wakes this thread
        try:
            self._wait(slot, None if end is None else end + _GRACE_S)
        except BaseException:
            with self._lock:
                self._abandoned.add(slot)
            raise
        answer = self._read(slot, y_at, prepared.y_bytes * tokens)
        self._free.put(slot)
        return self._checked(answer)

    def _fits(self, prepared: Prepared, tokens: int, inputs: Inputs) -> bool:
        y_bytes = 0 if inputs.places else _aligned(prepared.y_bytes * tokens)
        return inputs.aligned() + y_bytes <= self._part

    def _submit(self, slot: int, prepared: Prepared, tokens: int, inputs: Inputs, end: float | None, state: int) -> int | None:
        """Puts a call into a slot. Returns where its y will be in the payload, if it will be there."""
        at = self._part * slot
        offsets = []
        for each in (inputs.x, inputs.ids, inputs.router, inputs.scales):
            offsets.append(at)
            if each is not None:
                start = self._payload_at + at
                self._map[start:start + each.data.nbytes] = each.data
                at += _aligned(each.data.nbytes)
        deadline = 0 if end is None else int(end * 1e9)  # of CLOCK_MONOTONIC, as time.monotonic is
        x_at, y_at = inputs.places or (offsets[0], at)
        _REQUEST.pack_into(self._map, self._slot_at(slot), slot, prepared.number, 0, tokens, deadline, x_at, y_at, *offsets[1:])
        self._states[slot].value = state
        with self._lock:  # taking it orders what was written before against the tail
            tail = self._tail.value
            struct.pack_into("<I", self._map, _SUBMISSIONS + 4 * (tail % _SLOTS), slot)
            self._order.acquire()
            self._order.release()
            self._tail.value = tail + 1
        os.write(self._event, b"\1\0\0\0\0\0\0\0")
        return None if inputs.places else at

    def _read(self, slot: int, y_at: int | None, y_size: int) -> tuple[tuple[Any, ...], str, bytes, int]:
        """What is in a slot that was answered, and the bytes of y where they are in the payload."""
        base = self._slot_at(slot)
        answer = _ANSWER.unpack_from(self._map, base + _ANSWER_AT + 4)
        words = self._map[base + _TEXT_AT:base + _TEXT_AT + answer[-1]].decode(errors="replace")
        start = self._payload_at + (y_at or 0)
        return answer, words, b"" if y_at is None else self._map[start:start + y_size], y_size

    @staticmethod
    def _checked(read: tuple[tuple[Any, ...], str, bytes, int]) -> tuple[bytes, Any]:
        answer, words, y, y_size = read
        status, _, _, _, queue_us, compute_us, batch_tokens, batch_requests, path, y_bytes, kernel, _ = answer
        if status != 0:
            raise _failed(status, words)
        if y_bytes != y_size:
            raise _errors.DataLoss(f"output: got {y_bytes} bytes, expected {y_size}", field="output")
        return y, tensors.Execution(path=path, kernel=words[:kernel], device=words[kernel:], batch_tokens=batch_tokens,
                                    batch_requests=batch_requests, queue_us=queue_us, compute_us=compute_us)

    def _wait(self, slot: int, end: float | None) -> None:
        state = self._states[slot]
        while state.value != _ANSWERED:
            left = _LOOK_S if end is None else min(_LOOK_S, end - time.monotonic())
            if left <= 0:
                raise _errors.DeadlineExceeded("the server did not answer in time")
            timeout = _Timespec(0, int(left * 1e9))
            self._libc.syscall(_FUTEX, ctypes.byref(state), 0, _WAITING, ctypes.byref(timeout), None, 0)
            if state.value != _ANSWERED and self._closed.value != 0:
                raise _errors.Unavailable("the server has closed the ring")
            if state.value != _ANSWERED and self._gone():
                self._dead = True
                raise _errors.Unavailable("the server has gone")

    def _gone(self) -> bool:
        """Whether the server has ended. No event comes for calls that sleep."""
        try:
            return self._events.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


class LoopRing(Ring):
    """A ring of an event loop, whose calls are coroutines: the loop polls the socket of events, and no thread waits."""

    _loop: asyncio.AbstractEventLoop | None = None  # polls the socket from the first call on

    def __init__(self, path: str, authorization: str, timeout: float | None) -> None:
        super().__init__(path, authorization, timeout)
        self._idle = list(range(_SLOTS))
        self._wanted: deque[asyncio.Future[int]] = deque()  # by calls without a slot
        self._pending: dict[int, asyncio.Future[None]] = {}  # by slot

    def close(self) -> None:
        self._end(lambda: _errors.Cancelled("the call was in flight", hint="the client was closed meanwhile"))
        super().close()

    async def run(self, prepared: Prepared, tokens: int, inputs: Inputs, timeout: float | None) -> Any:
        end = None if timeout is None else time.monotonic() + timeout
        if not self._fits(prepared, tokens, inputs):
            return None
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._events, self._poll)
        slot = self._idle.pop() if self._idle else await self._wait_for_slot(end)
        y_at = self._submit(slot, prepared, tokens, inputs, end, _POLLING)
        try:
            if self._states[slot].value != _ANSWERED:
                self._pending[slot] = self._loop.create_future()
                await self._expire(self._pending[slot], None if end is None else end + _GRACE_S,
                                   "the server did not answer in time")
        except BaseException:
            if self._states[slot].value == _ANSWERED:
                self._release(slot)
            else:
                self._abandoned.add(slot)
            raise
        finally:
            self._pending.pop(slot, None)
        answer = self._read(slot, y_at, prepared.y_bytes * tokens)
        self._release(slot)
        return self._checked(answer)

    async def _expire(self, future: asyncio.Future[Any], end: float | None, message: str) -> Any:
        """The result of a future; DeadlineExceeded if it has none at the end."""
        def expire() -> None:
            if not future.done():
                future.set_exception(_errors.DeadlineExceeded(message))

        assert self._loop is not None
        if not self.usable():
            raise _errors.Unavailable("the server has closed the ring")
        timer = None if end is None else self._loop.call_later(max(0.0, end - time.monotonic()), expire)
        try:
            return await future
        finally:
            if timer is not None:
                timer.cancel()

    async def _wait_for_slot(self, end: float | None) -> int:
        assert self._loop is not None
        future: asyncio.Future[int] = self._loop.create_future()
        self._wanted.append(future)
        try:
            slot: int = await self._expire(future, end, "every slot of the ring was in use")
            return slot
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(future.result())  # the task was cancelled just after it had got one
            raise

    def _release(self, slot: int) -> None:
        while self._wanted:
            future = self._wanted.popleft()
            if not future.done():
                return future.set_result(slot)
        self._idle.append(slot)

    def _poll(self) -> None:
        """Called by the loop when there are events: bytes for answers, and their end for the ring's."""
        try:
            gone = not self._events.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            gone = True
        for slot, future in self._pending.items():
            if self._states[slot].value == _ANSWERED and not future.done():
                future.set_result(None)
        for slot in [slot for slot in self._abandoned if self._states[slot].value == _ANSWERED]:
            self._abandoned.remove(slot)
            self._release(slot)
        if gone:
            self._dead = True
            self._end(lambda: _errors.Unavailable("the server has closed the ring"))

    def _end(self, error: Callable[[], _errors.Error]) -> None:
        """Ends what waits."""
        if self._loop is not None and self._events.fileno() >= 0:
            self._loop.remove_reader(self._events)
        self._events.close()
        waiting: list[asyncio.Future[Any]] = [*self._pending.values(), *self._wanted]
        for future in waiting:
            if not future.done():
                future.set_exception(error())
