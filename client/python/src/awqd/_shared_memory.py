"""Objects of shared memory for tensors that a server on this machine reads and writes in place of messages."""
from __future__ import annotations

import mmap
import os
import secrets
import signal
import threading
import types
import weakref
from dataclasses import dataclass

from awqd.v1 import tensor_pb2 as tensors

_DIRECTORY = "/dev/shm"
_SMALLEST = 1 << 20
_MOST_KEPT = 8


def available() -> bool:
    """Whether this system has them where the server looks."""
    return os.path.isdir(_DIRECTORY) and hasattr(os, "posix_fallocate")


@dataclass(frozen=True)
class Memory:
    """An object and its mapping."""

    name: str
    map: mmap.mmap

    def range(self, offset: int, size: int) -> tensors.SharedMemory:
        """Bytes [offset, offset + size) as requests name them."""
        return tensors.SharedMemory(name=self.name, offset=offset, size=size)


def _remove(names: set[str], owner: int) -> None:
    if os.getpid() != owner:  # a forked process leaves its parent's objects alone
        return
    for name in list(names):  # other threads may go on
        try:
            os.unlink(f"{_DIRECTORY}/{name}")
        except OSError:
            pass
    names.clear()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _end(number: int, frame: types.FrameType | None) -> None:
    """Ends the process as the signal would have, after its objects."""
    for pool in list(_pools):
        pool.close()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def remove_on_signal() -> None:
    """Removes the objects also where SIGTERM or SIGHUP ends the process. Handlers of others stay, and then it is for them to
    exit in order. Python lets only the main thread do this."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


class Pool:
    """Objects that are used again and again, each by one call at a time. Thread-safe. All go with the process."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._free: list[Memory] = []
        self._names: set[str] = set()
        self.close = weakref.finalize(self, _remove, self._names, os.getpid())
        _pools.add(self)

    def acquire(self, size: int) -> Memory:
        """An object of at least `size` bytes. OSError when the system refuses, MemoryError when it is full."""
        with self._lock:
            fitting = [memory for memory in self._free if size <= len(memory.map)]
            if fitting:
                best = min(fitting, key=lambda memory: len(memory.map))
                self._free.remove(best)
                return best
        return self._make(max(_SMALLEST, 1 << (size - 1).bit_length()))

    def release(self, memory: Memory) -> None:
        """Gives an object back, after the server is done with it."""
        with self._lock:
            self._free.append(memory)
            surplus = self._free.pop(0) if len(self._free) > _MOST_KEPT else None
        if surplus is not None:
            self.discard(surplus)

    def discard(self, memory: Memory) -> None:
        """Removes an object that the server may still write to: it keeps what it has open."""
        with self._lock:
            self._names.discard(memory.name)
        try:
            os.unlink(f"{_DIRECTORY}/{memory.name}")
        except OSError:
            pass

    def _make(self, size: int) -> Memory:
        # Its name is all that keeps other clients of the server from it.
        name = self._prefix + secrets.token_hex(16)
        fd = os.open(f"{_DIRECTORY}/{name}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with self._lock:
            self._names.add(name)
        try:
            os.posix_fallocate(fd, 0, size)  # writing to a full file system would end the process
            return Memory(name, mmap.mmap(fd, size))
        except BaseException:
            self.discard(Memory(name, None))  # type: ignore[arg-type]
            raise
        finally:
            os.close(fd)
