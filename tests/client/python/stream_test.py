"""matmul_stream of both clients against the server."""
import asyncio
import threading

import numpy as np
import pytest

import awqd
from calls_test import MODEL, QUERY


def inputs(count):
    generator = np.random.default_rng(1)
    return [generator.standard_normal((1 + i % 5, 384)).astype(np.float16) for i in range(count)]


def expected(client, xs, **options):
    return [client.matmul(MODEL, QUERY, x, **options) for x in xs]


def test_gives_what_single_calls_give_in_order(client):
    xs = inputs(40)
    ys = list(client.matmul_stream(MODEL, QUERY, xs, output_dtype="fp32"))
    assert len(ys) == len(xs)
    for y, want in zip(ys, expected(client, xs, output_dtype="fp32")):
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)  # batches differ, and with them the order of sums


def test_takes_no_more_than_are_in_flight(client):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield np.ones((1, 384), np.float16)

    results = client.matmul_stream(MODEL, QUERY, endless(), in_flight=3)
    for _ in range(5):
        next(results)
    assert 5 <= len(taken) <= 5 + 3 + 1
    before = threading.active_count()
    results.close()
    assert threading.active_count() <= before


def test_nothing_in_nothing_out(client):
    assert list(client.matmul_stream(MODEL, QUERY, [])) == []


def test_a_product_that_fails_is_raised_or_given_in_its_place(client):
    good = np.ones((1, 384), np.float16)
    xs = [good, np.ones((1, 7), np.float16), good]
    results = client.matmul_stream(MODEL, QUERY, xs)
    assert next(results).shape == (1, 384)
    with pytest.raises(awqd.InvalidArgument, match=r"xs\[1\]: activations"):
        next(results)
    first, failed, last = client.matmul_stream(MODEL, QUERY, xs, return_exceptions=True)
    assert isinstance(failed, awqd.InvalidArgument) and failed.field == "activations.shape"
    np.testing.assert_array_equal(first, last)


def test_what_xs_raises_comes_out(client):
    def broken():
        yield np.ones((1, 384), np.float16)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        list(client.matmul_stream(MODEL, QUERY, broken()))
    with pytest.raises(awqd.InvalidArgument, match=r"xs\[0\]"):
        list(client.matmul_stream(MODEL, QUERY, [np.ones((1, 384), np.complex64)]))
    with pytest.raises(awqd.InvalidArgument, match="in_flight: got 0"):
        client.matmul_stream(MODEL, QUERY, [], in_flight=0)


def test_the_time_of_all_is_bounded(client):
    def slow():
        yield np.ones((1, 384), np.float16)
        threading.Event().wait(3)

    with pytest.raises(awqd.DeadlineExceeded):
        list(client.matmul_stream(MODEL, QUERY, slow(), timeout=0.5))


def test_asyncio(server, client):
    xs = inputs(20)

    async def arrays():
        for x in xs:
            await asyncio.sleep(0)
            yield x

    async def run():
        async with awqd.AsyncClient(server.address) as many:
            plain = [y async for y in many.matmul_stream(MODEL, QUERY, xs, output_dtype="fp32", in_flight=4)]
            from_async = [y async for y in many.matmul_stream(MODEL, QUERY, arrays(), output_dtype="fp32")]
            with pytest.raises(awqd.NotFound):
                [y async for y in many.matmul_stream(MODEL, "absent", xs[:1])]
            with pytest.raises(awqd.InvalidArgument, match=r"xs\[0\]"):
                [y async for y in many.matmul_stream(MODEL, QUERY, [np.ones((1, 384), np.complex64)])]
            return plain, from_async

    plain, from_async = asyncio.run(run())
    for results in (plain, from_async):
        for y, want in zip(results, expected(client, xs, output_dtype="fp32"), strict=True):
            np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
