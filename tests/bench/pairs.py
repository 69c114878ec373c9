#!/usr/bin/env python3
"""Compares the costs of two variants, in pairs on the CPU: pairs.py --build DIR protocols|watched [--rounds 15]

protocols  ModelInfer of the Open Inference Protocol beside QuantizedMatmul, FP16, requests of 16 KiB and of 1 MiB, 1, 4 and
           16 callers; the least that is allowed is 95 % of the throughput
watched    a server with metrics that are scraped, traces and the access log, each as they are by default, beside one with
           none of them, one token of 768 bytes and of 16 KiB; the least is 97 %

The two run in turn, A B B A ..., and each pair gives a ratio of throughput; what counts is the median of the ratios. The
generator shares the machine. Beside it stands the server's processor time for a request, which other programs disturb less.
Standard library only. Ends with 1 when a median is below the least.
"""
import argparse
import json
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
MODEL = "pairs"
# K x N; N is small, so that the product takes little beside the message.
WIDE, SMALL = "8192x8", "384x384"


class Server:
    """awqd, until it is stopped."""

    def __init__(self, binaries, folder, name, flags, device="cpu"):
        self.bin, self.log = binaries, folder / f"{name}.log"
        self.address, self.ring, self.port = f"unix:{folder}/{name}", f"{folder}/{name}.ring", folder / f"{name}.port"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([self.bin / "awqd", f"--address={self.address},127.0.0.1:0", f"--port_file={self.port}",
                                             f"--ring_path={self.ring}", f"--model_repository={folder / 'models'}",
                                             f"--device={device}", *flags], stdout=log, stderr=log)
        self.awqctl("healthcheck", "--wait", "60")

    def awqctl(self, *arguments):
        done = subprocess.run([self.bin / "awqctl", "--address", self.address, *map(str, arguments)], capture_output=True,
                              text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stderr + self.log.read_text(errors="replace"))
        return done.stdout

    def tcp(self):
        """Its other address."""
        return f"127.0.0.1:{self.port.read_text().split()[0]}"

    def cpu_us(self):
        """User and system time so far."""
        # Linux's number for the processor time of a process, as clock_getcpuclockid(3) makes it: /proc has hundredths of a second.
        return time.clock_gettime((~self.process.pid << 3) | 2) * 1e6

    def load(self, requests, flags):
        """Requests a second, and microseconds of the server's processor time for each."""
        before = self.cpu_us()
        point = json.loads(self.awqctl("bench", "--json", "--requests", requests, "--warmup", 0, *flags))["points"][0]
        if point["errors"] or point["malformed"]:
            sys.exit(f"requests failed: {point['errors']}, {point['malformed']} malformed")
        return point["requests_per_s"], (self.cpu_us() - before) / requests

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


class Scraper(threading.Thread):
    """Asks for metrics every few seconds, as Prometheus does."""

    def __init__(self, port, interval=5):
        super().__init__(daemon=True)
        self.url, self.interval, self.ended, self.scrapes = f"http://127.0.0.1:{port}/metrics", interval, threading.Event(), 0

    def run(self):
        while not self.ended.wait(self.interval):
            with urllib.request.urlopen(self.url, timeout=10) as answer:
                assert b"awqd_batch_tokens" in answer.read()
            self.scrapes += 1


def compare(title, rounds, least, one, other):
    """Prints a row of the table, of what Server.load gives. Whether the throughputs' ratio is at least `least`."""
    pairs = []
    for turn in range(rounds):
        # The order alternates, so that a machine that slows down favours neither.
        if turn % 2 == 0:
            a, b = one(), other()
        else:
            b = other()
            a = one()
        pairs.append((a, b))
    ratio = statistics.median(a[0] / b[0] for a, b in pairs)
    rates = [statistics.median(side[0] for side in sides) for sides in zip(*pairs)]
    times = [statistics.median(side[1] for side in sides) for sides in zip(*pairs)]
    print(f"| {title} | {rates[0]:,.0f} | {rates[1]:,.0f} | {100 * ratio:.1f} % | {times[0]:.1f} us | {times[1]:.1f} us |",
          flush=True)
    return ratio >= least


def requests_of(weight, tokens, callers):
    return ["--weight", f"{MODEL}/{weight}", "--tokens", tokens, "--concurrency", callers]


def protocols(binaries, folder, args):
    server = Server(binaries, folder, "server", ["--log_level=warning"])
    print("| request | ModelInfer, requests/s | QuantizedMatmul | ratio | processor time | QuantizedMatmul's |\n|---|---|---|---|---|---|")
    met = True
    for size, tokens, requests in (("16 KiB", 1, 4000), ("1 MiB", 64, 400)):
        for callers in (1, 4, 16):
            flags = requests_of(WIDE, tokens, callers)
            met &= compare(f"{size}, {callers} callers", args.rounds, 0.95,
                           lambda: server.load(requests, [*flags, "--protocol", "oip"]), lambda: server.load(requests, flags))
    server.stop()
    return met


def port_of_metrics(log):
    for _ in range(200):
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("{") and json.loads(line).get("message") == "metrics":
                return json.loads(line)["port"]
        time.sleep(0.05)
    sys.exit(log.read_text(errors="replace"))


def watched(binaries, folder, args):
    plain = Server(binaries, folder, "plain", ["--access_log=off"])
    seen = Server(binaries, folder, "seen", ["--metrics_address=127.0.0.1:0", "--log_format=json",
                                          f"--trace_file={folder / 'traces'}"])
    scraper = Scraper(port_of_metrics(seen.log))
    scraper.start()
    print("| request | watched, requests/s | not | ratio | processor time | not watched |\n|---|---|---|---|---|---|")
    met = True
    requests = 4000
    for title, weight in (("768 bytes", SMALL), ("16 KiB", WIDE)):
        for callers in (1, 16):
            flags = requests_of(weight, 1, callers)
            met &= compare(f"{title}, {callers} callers", args.rounds, 0.97,
                           lambda: seen.load(requests, flags), lambda: plain.load(requests, flags))
    scraper.ended.set()
    scraper.join()
    if scraper.scrapes == 0:
        sys.exit("nobody scraped: more rounds are needed")
    plain.stop()
    seen.stop()
    return met


def main():
    modes = {"protocols": protocols, "watched": watched}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=modes)
    parser.add_argument("--build", type=pathlib.Path, required=True, help="a build folder, with bin/awqd and bin/awqctl")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="awqd-") as name:
        folder = pathlib.Path(name)
        subprocess.run([sys.executable, HERE / "make_checkpoint.py", folder / "models" / MODEL,
                        *(f"{shape}={shape}" for shape in (WIDE, SMALL))], check=True)
        met = modes[args.what](args.build / "bin", folder, args)
    print("met" if met else "missed")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
