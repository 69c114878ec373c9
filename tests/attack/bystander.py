"""Somebody who only wants answers while others attack: one product and one question for health after the other, on one
connection, from a process of its own."""
import collections
import multiprocessing
import time

import messages
import peer
from target import IN_FEATURES

PAUSE_S = 0.003
OUTPUT = 1  # the tensor in the answer; the other fields are of how and when


class Report:
    """Seconds that each answered call took, and what became of the others."""

    def __init__(self):
        self.seconds = {peer.MATMUL: [], peer.HEALTH: []}
        self.wrong = 0  # an answer with OK and other bytes than the first had
        self.refused = collections.Counter()  # by gRPC's status
        self.lost = 0  # no answer in time, or a connection that ended

    def p99_ms(self, path):
        seconds = sorted(self.seconds[path])
        return 1000 * seconds[len(seconds) * 99 // 100] if seconds else float("inf")


def _work(port, over, pipe):
    report, caller, expected = Report(), None, None
    calls = ((peer.MATMUL, messages.matmul("m", 1, IN_FEATURES)), (peer.HEALTH, b""))
    while not over.is_set():
        for path, message in calls:
            start = time.monotonic()
            try:
                caller = caller or peer.Caller(port)
                answer = caller.call(path, message)
            except OSError:
                report.lost += 1
                caller = None
                continue
            if answer.status != "0":
                report.refused[answer.status] += 1
                continue
            report.seconds[path].append(time.monotonic() - start)
            if path == peer.MATMUL:
                output = messages.field_of(answer.body, OUTPUT)
                expected = expected or output
                report.wrong += output is None or output != expected
        time.sleep(PAUSE_S)
    pipe.send(report)


class Bystander:
    """Calls from its start to `end`."""

    def __init__(self, port):
        self.over = multiprocessing.Event()
        self.pipe, theirs = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.Process(target=_work, args=(port, self.over, theirs), daemon=True)
        self.process.start()

    def end(self):
        self.over.set()
        assert self.pipe.poll(30), "the bystander has hung"
        report = self.pipe.recv()
        self.process.join()
        return report
