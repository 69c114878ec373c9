"""The attacks. Each runs in a process of its own, opens what it wants, holds it until it is told that it is over, and
returns what it did in words. `scale` is 1 for what has once broken the server, less for a short run."""
import concurrent.futures
import os
import resource
import time
import urllib.request

import hpack

import messages
import peer
from target import write_model

WEIGHTS, NEXT_PAGE = 2, 6  # fields of a page of GetModel
UNHEEDED = peer.PREFACE + peer.settings()  # a client that will never acknowledge the server's SETTINGS


def _stream(number):
    return 2 * number + 1


def _flood(ground, connection, of_stream, count, together=64):
    """Sends what `of_stream` makes of the numbers 0 to count - 1, until it is over; how many were sent."""
    for first in range(0, count, together):
        numbers = range(first, min(first + together, count))
        if ground.over.is_set() or not connection.send(b"".join(map(of_stream, numbers)), patience_s=2):
            return first
    return count


def _hammer(ground, flood_once):
    """Repeats a flood on fresh connections until it is over; (connections, things sent)."""
    connections = sent = 0
    while not ground.over.is_set():
        connections += 1
        sent += flood_once()
    return connections, sent


def descriptors(ground):
    """More connections than the server may open files, again and again."""
    files = len(os.listdir(f"/proc/{ground.pid}/fd")) + 10
    _, most = resource.prlimit(ground.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(ground.pid, resource.RLIMIT_NOFILE, (files, most))
    opened = 0
    while not ground.over.is_set():
        peers = []
        for _ in range(70):
            try:
                peers.append(peer.Raw(ground.port))
            except OSError:  # refused, which is right
                continue
        opened += len(peers)
        time.sleep(0.05)
        for one in peers:
            one.close()
    return f"{opened} connections, 70 at a time, 10 descriptors"


def silence(ground):
    """Connections that never finish their first words."""
    peers = [peer.Raw(ground.port, hello) for _ in range(ground.some(1000)) for hello in (b"", peer.PREFACE)][:1000]
    ground.hold()
    return f"{len(peers)} connections without SETTINGS"


def unread_answers(ground):
    """Clients with a window of 0 ask for 4 MiB answers."""
    body = messages.framed(messages.dequantize("wide"))
    block = peer.header_block(peer.DEQUANTIZE)
    peers = [peer.Raw(ground.port, peer.PREFACE + peer.settings(initial_window=0)) for _ in range(5)]
    for one in peers:
        _flood(ground, one, lambda number: peer.frame(peer.HEADERS, peer.END_HEADERS, _stream(number), block) +
               peer.frame(peer.DATA, peer.END_STREAM, _stream(number), body), 64)
    ground.hold()
    return "5 clients with window 0 ask for 64 x 4 MiB each"


def watches(ground):
    """Open Watch streams on one connection that never acknowledges SETTINGS."""
    block, count = peer.header_block(peer.WATCH), ground.some(50_000)
    one = peer.Raw(ground.port, UNHEEDED)
    sent = _flood(ground, one, lambda number: peer.frame(peer.HEADERS, peer.END_HEADERS, _stream(number), block) +
                  peer.frame(peer.DATA, peer.END_STREAM, _stream(number), messages.framed(b"")), count)
    ground.hold()
    return f"{sent} of {count} Watch streams"


def long_headers(ground):
    """6 MB headers, each of a few bytes: one long value from HPACK's table, again and again."""
    encoder, bomb = hpack.Encoder(), ("x-long", "v" * 3900)
    count = ground.some(2000)
    first = encoder.encode(peer.call_headers(peer.HEALTH) + [bomb])
    again = encoder.encode(peer.call_headers(peer.HEALTH) + [bomb] * 1500)

    def once():
        one = peer.Raw(ground.port, UNHEEDED + peer.frame(peer.HEADERS, peer.END_HEADERS, 1, first))
        sent = _flood(ground, one, lambda number: peer.frame(peer.HEADERS, peer.END_HEADERS, _stream(number + 1), again), count)
        one.close()
        return sent
    connections, sent = _hammer(ground, once)
    return f"{sent} headers of 6 MB in {len(again)} bytes, {connections} connections"


def rapid_reset(ground):
    """Streams that are reset as soon as they are opened."""
    block, count = peer.header_block(peer.MATMUL), ground.some(200_000)
    one = peer.Raw(ground.port)
    sent = _flood(ground, one, lambda number: peer.frame(peer.HEADERS, peer.END_HEADERS, _stream(number), block) +
                  peer.frame(peer.RST_STREAM, 0, _stream(number), b"\0\0\0\x08"), count)
    ground.hold()
    return f"{sent} of {count} streams opened and reset"


def unread_refusals(ground):
    """Bad requests whose answers are never read."""
    block, count = peer.header_block(peer.MATMUL), ground.some(100_000)
    bad = messages.framed(b"\xff\xff")
    one = peer.Raw(ground.port, UNHEEDED)
    sent = _flood(ground, one, lambda number: peer.frame(peer.HEADERS, peer.END_HEADERS, _stream(number), block) +
                  peer.frame(peer.DATA, peer.END_STREAM, _stream(number), bad), count)
    ground.hold()
    return f"{sent} of {count} bad requests unread"


def _calls(ground, path, message):
    """One call after the other of the same bytes; how many were answered, and with what status."""
    answers, statuses, caller = 0, set(), None
    while not ground.over.is_set():
        try:
            caller = caller or peer.Caller(ground.port)
            statuses.add(caller.call(path, message).status)
            answers += 1
        except OSError:
            caller = None
    return answers, "/".join(sorted(map(str, statuses)))


def packed_varints(ground):
    """A shape of 60 million dimensions."""
    size = ground.some(60_000_000)
    answers, statuses = _calls(ground, peer.MATMUL, messages.matmul_of_long_shape(size))
    return f"{answers} shapes of {size >> 20} MiB; status {statuses}"


def int_values(ground):
    """Inline weights of integers in one byte each, which take eight once they are parsed."""
    size = 7_500_000
    answers, statuses = _calls(ground, peer.MATMUL, messages.matmul_of_int_values(size))
    return f"{answers} weights of {size} integers; status {statuses}"


def _byte_by_byte(ground, peers):
    """Messages in DATA frames of one byte each, as many at a time as gRPC lets a stream send at first, on `peers`
    connections at a time; then new ones, once the server has read all of these."""
    block = peer.header_block(peer.MATMUL)
    tiny = peer.frame(peer.DATA, 0, 1, b"x") * 4096

    def once():
        together = [peer.Raw(ground.port) for _ in range(peers)]
        for one in together:
            one.send(peer.frame(peer.HEADERS, peer.END_HEADERS, 1, block) +
                     peer.frame(peer.DATA, 0, 1, messages.framed(b"", claimed=2 << 20)))
        sent = sum(4096 for _ in range(15) for one in together if one.send(tiny, patience_s=5))
        for one in together:
            one.ask_whether_read(limit_s=10)
            one.close()
        return sent
    connections, sent = _hammer(ground, once)
    return f"{sent} frames of one byte, {connections} connections, {peers} at a time"


def byte_by_byte(ground):
    """One such peer."""
    return _byte_by_byte(ground, 1)


def byte_by_byte_four(ground):
    """More such peers than the server has threads for."""
    return _byte_by_byte(ground, 4)


def silent_reflection(ground):
    """Reflection streams that ask for nothing."""
    block = peer.header_block(peer.REFLECTION)
    one = peer.Raw(ground.port)
    one.send(b"".join(peer.frame(peer.HEADERS, peer.END_HEADERS, _stream(number), block) for number in range(60)))
    ground.hold()
    return "60 silent reflection streams"


def uploads(ground):
    """Uploads that are begun and never finished."""
    block, size = peer.header_block(peer.MATMUL), 16_000
    peers = [peer.Raw(ground.port) for _ in range(ground.some(40))]
    for one in peers:
        for number in range(4):
            one.send(peer.frame(peer.HEADERS, peer.END_HEADERS, _stream(number), block) +
                     peer.frame(peer.DATA, 0, _stream(number), messages.framed(b"x" * size, claimed=60 << 20)))
    ground.hold()
    return f"{4 * len(peers)} uploads of 60 MiB begun"


def invented_names(ground):
    """Models that are not there, each under another name."""
    caller, count = peer.Caller(ground.port), 0
    while not ground.over.is_set():
        count += 1
        caller.call(peer.LOAD, messages.named(f"no-such-model-{count:0200d}"))
    return f"{count} loads of invented names"


def _load_many(ground, weights):
    """A model "many" of as many linears as that."""
    write_model(ground.models / "many", [
        (f"model.layers.{i:06d}.{suffix}", dtype, shape, bytes(size)) for i in range(weights)
        for suffix, dtype, shape, size in (("qweight", "I32", [64, 1], 256), ("qzeros", "I32", [1, 1], 4), ("scales", "F16", [1, 8], 16))])
    answer = peer.Caller(ground.port, timeout_s=120).call(peer.LOAD, messages.named("many"))
    assert answer.status == "0", f"the load: got status {answer.status}, {answer.message}"


def _unload_many(ground):
    assert peer.Caller(ground.port, timeout_s=30).call(peer.UNLOAD, messages.named("many")).status == "0"


def inline_rows(ground):
    """Inline weights of one row, which are padded to 128: some that would become 2 GB, some as large as they may."""
    sizes, statuses = (ground.some(10_000_000) // 8 * 8, 960_000), set()

    def ask(size):
        answers, seen = _calls(ground, peer.MATMUL, messages.matmul_of_one_row(size))
        statuses.add(seen)
        return answers
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = sum(pool.map(ask, sizes * 4))
    return f"{answers} inline weights [1, {sizes[0]}] and [1, {sizes[1]}], 8 at a time; status {'/'.join(sorted(statuses))}"


def unread_lists(ground):
    """Peers with a window of 0 ask for pages of a model of many weights, for the index and for lists, and read nothing."""
    weights, rounds = ground.some(60_000), 0
    _load_many(ground, weights)
    asked = [(peer.header_block(path), messages.framed(message)) for path, message in (
        (peer.GET, messages.page("many", b"")), (peer.INDEX, b""), (peer.LIST, b""))]
    peers = [peer.Raw(ground.port, peer.PREFACE + peer.settings(initial_window=0)) for _ in range(20)]
    while not ground.over.is_set() and rounds < 128:
        for one in peers:
            block, body = asked[rounds % len(asked)]
            one.send(b"".join(peer.frame(peer.HEADERS, peer.END_HEADERS, _stream(number), block) +
                              peer.frame(peer.DATA, peer.END_STREAM, _stream(number), body) for number in (2 * rounds, 2 * rounds + 1)))
        rounds += 1
        time.sleep(0.02)
    ground.hold()
    for one in peers:
        one.close()
    _unload_many(ground)
    return f"{2 * rounds * len(peers)} lists and pages of {weights} weights unread"


def absent_weights(ground):
    """Calls that name weights which a model of many does not have."""
    weights, block = ground.some(60_000), peer.header_block(peer.MATMUL)
    _load_many(ground, weights)
    body = messages.framed(messages.matmul_of_absent("many", "model.layers.000001.upp"))

    def once():
        together, sent = [peer.Raw(ground.port) for _ in range(4)], 0
        for turn in range(50):
            for one in together:
                numbers = range(16 * turn, 16 * turn + 16)
                one.send(b"".join(peer.frame(peer.HEADERS, peer.END_HEADERS, _stream(number), block) +
                                  peer.frame(peer.DATA, peer.END_STREAM, _stream(number), body) for number in numbers))
                sent += len(numbers)
            for one in together:
                one.drop(quiet_s=0.01)
            if ground.over.is_set():
                break
        for one in together:
            one.close()
        return sent
    connections, sent = _hammer(ground, once)
    _unload_many(ground)
    return f"{sent} calls of absent weights among {weights}, {4 * connections} connections"


def many_weights(ground):
    """A model of as many linears as that, and peers who ask for all pages of it again and again."""
    weights, pages, ended = ground.some(100_000), [0], []
    _load_many(ground, weights)

    def ask():
        caller = peer.Caller(ground.port, timeout_s=60)
        while not ended or not ground.over.is_set():
            token, seen = b"", 0
            while token is not None and not (ended and ground.over.is_set()):
                page = caller.call(peer.GET, messages.page("many", token))
                assert page.status == "0", f"a page: got status {page.status}, {page.message}"
                seen += sum(number == WEIGHTS for number, _ in messages.fields_of(page.body))
                token = messages.field_of(page.body, NEXT_PAGE)
                pages[0] += 1
            if token is None:
                ended.append(seen)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: ask(), range(4)))
    assert set(ended) == {weights}, f"got {set(ended)} weights in all pages, expected {weights}"
    _unload_many(ground)
    return f"{pages[0]} pages of {weights} weights, 4 at a time"


def odd_calls(ground):
    """Calls that are right for HTTP/2 and wrong for gRPC: no message, a time limit of 11,000 years, unknown methods."""
    block = [peer.header_block(peer.MATMUL, grpc_timeout="99999999H"), peer.header_block("/no.such/Method"),
             peer.header_block(peer.HEALTH, content_length="-1"), peer.header_block(peer.WATCH, grpc_encoding="gzip")]

    def once():
        one = peer.Raw(ground.port)
        sent = _flood(ground, one, lambda number: peer.frame(peer.HEADERS, peer.END_HEADERS | peer.END_STREAM, _stream(number),
                                                             block[number % len(block)]), 200)
        one.drop(quiet_s=0.02)
        one.close()
        return sent
    connections, sent = _hammer(ground, once)
    return f"{sent} odd calls, {connections} connections"


CROWD = 1000  # connections


def _call_frames(path, message):
    block = peer.header_block(path)
    if message is None:
        return lambda number: peer.frame(peer.HEADERS, peer.END_HEADERS | peer.END_STREAM, _stream(number), block)
    return lambda number: (peer.frame(peer.HEADERS, peer.END_HEADERS, _stream(number), block) +
                           peer.frame(peer.DATA, peer.END_STREAM, _stream(number), messages.framed(message)))


def _crowd(ground, kinds, places, acknowledged=False):
    """Connections that all say at once what they may not say together, from each of `places` in turn, and read nothing of
    the answers; those that the server closes are opened anew, until it is over. Calls of `kinds` in turn."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    calls = 256 if acknowledged else 512
    hello = peer.PREFACE + peer.settings(initial_window=0) + (peer.frame(peer.SETTINGS, peer.ACKNOWLEDGES, 0) if acknowledged else b"")
    bursts = [b"".join(map(_call_frames(*kind), range(calls))) for kind in kinds]
    crowd, opened, sent = [None] * ground.some(CROWD), 0, 0
    while not ground.over.is_set():
        fresh = []
        for number, one in enumerate(crowd):
            if one is not None and not one.is_closed():
                continue
            try:
                if one is not None:
                    one.close()
                crowd[number] = peer.Raw(ground.port, hello, **places[number % len(places)])
                fresh.append(number)
            except OSError:
                crowd[number] = None
            if ground.over.is_set():
                break
        for number in fresh:
            crowd[number].socket.setblocking(True)
            sent += calls * crowd[number].send(bursts[number % len(bursts)], patience_s=0.2)
        opened += len(fresh)
        ground.over.wait(0.05)
    return f"{opened} connections, {len(crowd)} at a time, {calls} unread calls on each: {sent} calls"


CHECK = (peer.HEALTH, b"")
ELSEWHERE = [{"source": "127.0.0.2"}]


def crowd(ground):
    """One peer that never acknowledges SETTINGS and checks health."""
    return _crowd(ground, [CHECK], ELSEWHERE)


def crowd_nearby(ground):
    """The same from the bystander's own address."""
    return _crowd(ground, [CHECK], [{}])


def crowd_acknowledged(ground):
    """One peer that acknowledges SETTINGS, and heeds them on each connection."""
    return _crowd(ground, [CHECK], ELSEWHERE, acknowledged=True)


def crowd_of_odd_calls(ground):
    """Methods that are not there, streams that stay open, calls without a message."""
    return _crowd(ground, [("/no.such/Method", None), (peer.WATCH, b""), (peer.MATMUL, None)], ELSEWHERE)


def crowd_of_peers(ground):
    """Eight addresses."""
    return _crowd(ground, [CHECK], [{"source": f"127.0.0.{2 + host}"} for host in range(8)])


def crowd_of_socket_file(ground):
    """A port and a socket file."""
    return _crowd(ground, [CHECK], [{"path": ground.socket_file}, *ELSEWHERE])


def _slow_http(ground, clients, addresses):
    """Clients of the metrics port that send a request byte by byte, or nothing, opened anew when they are closed, and probes
    beside them."""
    slow, opened, probes, slowest = [None] * clients, 0, 0, 0.0
    while not ground.over.is_set():
        for number, one in enumerate(slow):
            beginning = (b"GET /livez HTTP/1.1\r\nHost: a\r\nX-Long: ", b"")[number // addresses % 2]
            try:
                if one is None or one.is_closed():
                    slow[number] = peer.Raw(ground.metrics_port, beginning, source=f"127.0.0.{1 + number % addresses}")
                    opened += 1
                elif beginning:
                    one.send(b"x")
            except OSError:
                slow[number] = None
        start = time.monotonic()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ground.metrics_port}/livez", timeout=5) as page:
                assert page.read() == b"ok\n"
        except OSError as error:
            raise AssertionError(f"a probe got no answer: {error}") from error
        probes, slowest = probes + 1, max(slowest, time.monotonic() - start)
    assert slowest < 1, f"got an answer to a probe after {slowest:.1f} s, expected it within 1"
    return f"{opened} slow clients, {clients} at a time, of {addresses} addresses; {probes} probes, at most {1000 * slowest:.0f} ms"


def slow_http(ground):
    return _slow_http(ground, 64, 2)


def slow_http_of_many(ground):
    return _slow_http(ground, 200, 5)
