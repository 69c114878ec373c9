"""Products of one weight on one stream: what is sent, and answers put into order, without sending anything itself."""
from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeVar, Union

from awqd import _arrays, _errors, _wire
from awqd.v1 import inference_pb2 as inference

METHOD = "/awqd.v1.QuantizedInference/QuantizedMatmulStream"
T = TypeVar("T")


def window(kind: Callable[[int], T], in_flight: int) -> T:
    """A semaphore of `kind` for so many products."""
    if in_flight < 1:
        raise _errors.InvalidArgument(f"in_flight: got {in_flight}, expected 1 or more", field="in_flight")
    return kind(in_flight)


def seconds(timeout: float) -> float | None:
    """As gRPC has it."""
    _errors.check_timeout(timeout)
    return None if math.isinf(timeout) else timeout


def checked(result: Any, return_exceptions: bool) -> Any:
    """A result of Products.ready(), raised if it is an error and those are not wanted as results."""
    if isinstance(result, _errors.Error) and not return_exceptions:
        raise result
    return result


async def each(items: Union[Iterable[T], AsyncIterable[T]]) -> AsyncIterator[T]:
    """The items of either kind."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


class Products:
    """The server answers in the order in which products end; ready() gives them in the order of the requests.

    request, parts: of all of them, without activations.
    """

    def __init__(self, request: inference.QuantizedMatmulRequest, parts: list[_wire.Part]) -> None:
        self._request = request
        self._parts = parts
        self._as_torch: dict[int, bool] = {}  # of those that were sent and not yet answered, by number
        self._results: dict[int, Any] = {}
        self._sent = self._given = 0

    def request(self, x: Any) -> bytes:
        """The message of the next product."""
        number = self._sent
        spec = _arrays.spec_of(x, f"xs[{number}]")
        self._request.request_id = str(number)
        message = b"".join([self._request.SerializeToString(), *self._parts, *_wire.tensor_field(3, spec)])
        _wire.check_size(message)
        self._as_torch[number] = _arrays.is_torch(x)
        self._sent += 1
        return message

    def answer(self, data: bytes) -> None:
        """Keeps an answer until it is its turn."""
        head, raw = _wire.split(data, 1)
        response = _wire.parse(inference.QuantizedMatmulResponse, head)
        number = int(response.request_id) if response.request_id.isdecimal() else -1
        if number not in self._as_torch:
            raise _errors.DataLoss(f"request_id: got {response.request_id!r}, expected that of a request in flight",
                                   field="request_id")
        as_torch = self._as_torch.pop(number)
        if response.HasField("error"):
            failed = response.error
            self._results[number] = _errors.from_status(failed.code, f"xs[{number}]: {failed.message}", failed.details)
        else:
            self._results[number] = _wire.array(response.output, raw, as_torch, "output")

    def ready(self) -> Iterator[Any]:
        """The results whose turn it is: arrays, and errors of those that failed."""
        while self._given in self._results:
            self._given += 1
            yield self._results.pop(self._given - 1)

    def finish(self) -> None:
        """Call when the stream has ended. DataLoss unless all that was sent is answered."""
        if self._as_torch:
            raise _errors.DataLoss(f"output: got {self._sent - len(self._as_torch)} answers, expected {self._sent}",
                                   field="output")
