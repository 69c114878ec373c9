#!/usr/bin/env python3
"""Soak of leases: processes that borrow a server's weights, multiply, compare bits with the RPC's and are killed.

  lease_soak.py [--minutes 20] [--settle 60] [--device cpu] [--bin DIR] [--out DIR] [--borrowers 8]

Borrowers are killed (SIGKILL) at random. One in ten is given a manifest of another version or of other layouts, which it
must refuse; one in ten a manifest or descriptors that lie; one in ten faults by itself: it stores into the lent memory, or
on a GPU reads where no memory is. Meanwhile the server answers products by RPC, and its model, of two contents in turns,
is reloaded and unloaded; in the first half the server is also stopped and killed, and started again. Then, nobody being
there, resident memory, lent memory, descriptors and device memory are compared with those before the second half.
Prints the figures, one JSON line last. The exit code is 0 when no bits were wrong, nobody met an error that is none of
MESSAGES, nobody died but those who should, and memory is back. Needs nothing but Python 3.
"""
import argparse
import array
import collections
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
LINEARS = {"a": (1024, 2048), "b": (2048, 1024), "c": (2048, 4096)}
TOKENS = (1, 7, 64)  # of awqd_lease_client
MESSAGES = {  # code of a refusal: what it may say to whom
    "borrow": {
        5: r'model "m": (not loaded|no such model is loaded)',
        14: r"connect: (Connection refused|No such file or directory)|it closed the connection|send: Broken pipe|"
            r'no answer: Connection reset by peer|model "m": (the server is )?still loading',
    },
    "skew": {9: r"got awqd \S+ \(manifest \d+, layouts [0-9a-f]{16}\), expected \S+ \(manifest \d+, layouts [0-9a-f]{16}\)"},
    "doubt": {3: r".", 8: r".", 9: r".", 12: r"."},
}
ANSWER = struct.Struct("<IIIIq")  # LeaseAnswer of kernels/lending/manifest.h
REQUEST = struct.Struct("<II32sII")
HEADER = struct.Struct("<II32sQ")  # of a manifest: magic, version, awqd's version, layouts


def expected(role, code, message):
    return any(code in by_code and re.search(by_code[code], message)
               for by_code in (MESSAGES.get(role, {}), MESSAGES["borrow"]))


class Tamperer:
    """Stands between borrowers and the lender, and changes what it answers."""

    def __init__(self, path, lender, change):
        self.lender, self.change = lender, change
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(path)
        self.listening.listen(16)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            threading.Thread(target=self.serve, args=(self.listening.accept()[0],), daemon=True).start()

    def serve(self, borrower):
        descriptors = []
        with borrower, socket.socket(socket.AF_UNIX) as lender:
            try:
                lender.connect(self.lender)
                lender.sendall(borrower.recv(1 << 14))
                bytes_, descriptors, _, _ = socket.recv_fds(lender, 1 << 14, 4)
                if len(descriptors) == 2:
                    bytes_ = self.tamper(bytes_, descriptors)
                socket.send_fds(borrower, [bytes_], descriptors)
            except OSError:
                return  # one of them has gone
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            try:
                borrower.recv(1)  # until it lets go
            except OSError:
                pass

    def tamper(self, bytes_, descriptors):
        fields = list(ANSWER.unpack_from(bytes_))
        manifest = bytearray(os.pread(descriptors[0], fields[4], 0))
        self.change(fields, manifest, descriptors)
        changed = os.memfd_create("manifest")
        os.write(changed, manifest)
        os.close(descriptors[0])
        descriptors[0] = changed
        return ANSWER.pack(*fields) + bytes_[ANSWER.size:]


def skew(fields, manifest, _):
    magic, version, awqd, layouts = HEADER.unpack_from(manifest)
    version, awqd, layouts = random.choice([(version, b"0.0.9", layouts), (version, awqd, layouts ^ 1),
                                            (version + 1, awqd, layouts)])
    HEADER.pack_into(manifest, 0, magic, version, awqd, layouts)


def lie(fields, manifest, descriptors):
    kind = random.randrange(6)
    if kind < 3:
        for _ in range(kind + 1):
            manifest[random.randrange(len(manifest))] ^= 1 << random.randrange(8)
    elif kind == 3:
        del manifest[random.randrange(len(manifest)):]
        fields[4] = len(manifest)
    elif kind == 4:
        fields[4] = random.choice([-1, 1 << 28, 1 << 50])
    else:
        os.close(descriptors[1])
        descriptors[1] = random.choice([lambda: os.dup(descriptors[0]), lambda: os.open("/dev/zero", os.O_RDONLY)])()


class Server:
    def __init__(self, args, out):
        self.args, self.out = args, out
        self.lend = str(out / "lend.sock")
        self.log = open(out / "server.log", "ab")
        self.process = self.load = None

    def start(self):
        port = self.out / "port"
        port.unlink(missing_ok=True)
        # CUDA loads a kernel's code when it is first called: the first of a kind would look like a leak.
        self.process = subprocess.Popen(
            [self.args.bin / "awqd", "--device", self.args.device, "--address", "127.0.0.1:0", "--port_file", port,
             "--model_repository", self.out / "models", "--lend", self.lend],
            stdout=self.log, stderr=self.log, env={**os.environ, "CUDA_MODULE_LOADING": "EAGER"})
        while not (port.exists() and port.read_text().strip()):
            if self.process.poll() is not None:
                sys.exit(f"awqd ended with {self.process.returncode}, see {self.out}/server.log")
            time.sleep(0.02)
        self.address = f"127.0.0.1:{port.read_text().strip()}"
        self.ctl("healthcheck", "--wait", "120")
        self.start_load()

    def ctl(self, *words):
        done = subprocess.run([self.args.bin / "awqctl", "--address", self.address, *map(str, words)],
                              capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"awqctl {' '.join(map(str, words))}: {done.stderr or done.stdout}")
        return done.stdout

    def start_load(self):
        self.load = subprocess.Popen(
            [self.args.bin / "awqctl", "--address", self.address, "bench", "--weight", "steady/a", "--tokens", "1:4,16",
             "--concurrency", "2", "--duration", "86400"], stdout=self.log, stderr=self.log)

    def end_load(self):
        ended = self.load.poll()
        self.load.kill()
        self.load.wait()
        return ended

    def stop(self, how):
        """Returns whether it ended as it should."""
        lively = self.end_load() is None
        self.process.send_signal(how)
        return self.process.wait(60) == (0 if how == signal.SIGTERM else -how) and lively

    def status(self, field):
        text = pathlib.Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(rf"^{field}:\s*(\d+)", text, re.M)[1])

    def descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def lent_kib(self):
        """Of memory that it has to lend, mapped or open."""
        files = {}
        for name in os.listdir(f"/proc/{self.process.pid}/fd"):
            path = f"/proc/{self.process.pid}/fd/{name}"
            if "awqd-weights" in os.readlink(path):
                files[os.stat(path).st_ino] = os.stat(path).st_blocks // 2
        mapped = pathlib.Path(f"/proc/{self.process.pid}/maps").read_text(encoding="utf-8").count("awqd-weights")
        return sum(files.values()), mapped


def device_mib(device):
    if not device.startswith("cuda:"):
        return 0
    return int(subprocess.run(["nvidia-smi", "-i", device[5:], "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True, check=True).stdout)


class Soak:
    def __init__(self, args):
        self.args = args
        self.out = pathlib.Path(args.out or tempfile.mkdtemp())
        self.out.mkdir(parents=True, exist_ok=True)
        self.counts = collections.Counter()
        self.refusals = collections.Counter()
        self.faults = []  # of the soak: what must not be
        self.borrowers = {}  # process: (role, its output, when it is killed)
        self.started = 0
        self.server = Server(args, self.out)

    # --- The model and what it answers ---

    def prepare(self):
        shapes = [f"{name}={k}x{n}" for name, (k, n) in LINEARS.items()]
        for folder in ("contents/a", "contents/b", "models/m", "models/steady"):
            subprocess.run([sys.executable, HERE / "make_checkpoint.py", self.out / folder, *shapes], check=True)
        (self.out / "bits").mkdir()
        self.put("a")
        self.server.start()
        for content in "ab":
            self.put(content)
            self.server.ctl("load", "m")
            for name, (k, n) in LINEARS.items():
                for tokens in TOKENS:
                    # 0x3c00 to 0x3cff: near 1 in FP16.
                    x = array.array("H", (0x3C00 + i * 31 % 256 for i in range(tokens * k))).tobytes()
                    (self.out / "bits" / f"x.{tokens}.{k}").write_bytes(x)
                    head = f"{{'descr': '<f2', 'fortran_order': False, 'shape': ({tokens}, {k}), }}"
                    head += " " * (-(len(head) + 11) % 64) + "\n"
                    file = self.out / "x.npy"
                    file.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + x)
                    self.server.ctl("matmul", "m", name, file, "-o", self.out / "y.npy", "--path", "fused")
                    y = (self.out / "y.npy").read_bytes()[-tokens * n * 2:]
                    (self.out / "bits" / f"y.{content}.{name}.{tokens}").write_bytes(y)

    def put(self, content):
        """Gives the model's folder this content, at once."""
        new = self.out / "new.safetensors"
        shutil.copyfile(self.out / "contents" / content / "model.safetensors", new)
        os.replace(new, self.out / "models/m/model.safetensors")

    # --- Borrowers ---

    def start_borrower(self):
        self.started += 1
        role = random.choices(["borrow", "skew", "doubt", "fault"], [7, 1, 1, 1])[0]
        path = {"skew": self.out / "skew.sock", "doubt": self.out / "lies.sock"}.get(role, self.server.lend)
        output = self.out / f"borrower.{self.started}"
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [self.args.bin / "awqd_lease_client", self.args.device, path, "m", self.out / "bits", str(self.started),
                 "doubt" if role == "skew" else role], stdout=file, stderr=subprocess.STDOUT)
        self.borrowers[process] = role, output, time.monotonic() + random.uniform(0.3, self.args.life)

    def reap(self, all_of_them=False):
        for process, (role, output, until) in list(self.borrowers.items()):
            if process.poll() is None:
                if not all_of_them and time.monotonic() < until:
                    continue
                process.kill()
                process.wait()
                self.counts["borrowers killed"] += 1
            elif role == "fault" and process.returncode in (-signal.SIGSEGV, 8):
                self.counts["borrowers that faulted"] += 1
            else:
                self.faults.append(f"{role} borrower {output.name} ended by itself: {process.returncode}")
            del self.borrowers[process]
            self.read(role, output)

    def read(self, role, output):
        text = output.read_text(encoding="utf-8", errors="replace")
        for line in text[:text.rfind("\n") + 1].splitlines():  # a kill may have cut the last one
            word, _, rest = line.partition(" ")
            if word == "lease" and role != "skew":
                self.counts["leases, by lies" if role == "doubt" else "leases"] += 1
                self.counts["products, by lies" if role == "doubt" else "products compared"] += int(rest.split()[1])
            elif word == "refused" and expected(role, int(rest.split()[0]), rest):
                self.refusals[self.kind(role, rest)] += 1
            elif line != "faulted" or role != "fault":
                self.faults.append(f"{role} borrower {output.name}: {line}")
        output.unlink()

    @staticmethod
    def kind(role, rest):
        """A refusal without what differs between refusals of one kind."""
        code, _, message = rest.partition(" ")
        message = re.sub(r'^lender at "[^"]*": ', "", message)
        if role == "doubt" and int(code) in MESSAGES["doubt"]:
            words = re.sub(r'^weight "[^"]*"', "weight", message).split(": ")
            return f"{code} lie: " + ": ".join(words[:2 if words[0] == "weight" else 1])[:60]
        return f"{code} {'skew: ' if role == 'skew' else ''}{re.sub('[0-9a-f]{16}|[0-9]+', 'N', message)}"

    # --- Events of the server ---

    def act(self, event):
        self.put(random.choice("ab"))
        if event in ("reload", "unload"):
            if event == "unload":
                self.server.ctl("unload", "m")
                self.wait(random.uniform(0, 1))
            self.server.ctl("load", "m")
        else:
            how = signal.SIGTERM if event == "drain" else signal.SIGKILL
            if not self.server.stop(how):
                self.faults.append(f"the server, or the load on it, did not end as it should after {how.name}")
            self.wait(random.uniform(0, 1))
            self.server.start()
        self.counts[f"server: {event}"] += 1

    def wait(self, seconds):
        """While borrowers come and go."""
        until = time.monotonic() + seconds
        while True:
            self.reap()
            while len(self.borrowers) < self.args.borrowers:
                self.start_borrower()
            if time.monotonic() >= until:
                return
            time.sleep(0.02)

    def run(self, seconds, events):
        """All of the events in any order, again and again, and at least once."""
        until = time.monotonic() + seconds
        deck = list(events)
        while time.monotonic() < until or deck:
            if not deck:
                deck = random.sample(events, len(events))
            self.act(deck.pop())
            self.wait(random.uniform(0, 2))
            if self.server.process.poll() is not None:
                sys.exit(f"awqd ended with {self.server.process.returncode}, see {self.out}/server.log")
            if self.server.load.poll() is not None:
                self.faults.append(f"the load ended by itself: {self.server.load.returncode}")
                self.server.start_load()

    def measure(self):
        """What the server has when nobody is there."""
        self.reap(all_of_them=True)
        self.server.ctl("load", "m")
        # An idle server returns its free memory after work of 100 ms, which a load of a small model is not.
        time.sleep(2)
        self.server.end_load()
        rest = collections.deque(maxlen=40)
        for _ in range(300):
            time.sleep(0.1)
            rest.append((self.server.descriptors(), self.server.status("VmRSS")))
            if len(rest) == rest.maxlen and len(set(rest)) == 1:
                break
        lent, mapped = self.server.lent_kib()
        out = {"resident_kib": self.server.status("VmRSS"), "lent_kib": lent, "lent_mappings": mapped,
               "descriptors": self.server.descriptors(), "device_mib": device_mib(self.args.device)}
        print(out, flush=True)
        self.server.start_load()
        return out

    def soak(self):
        """What the server had before the second half, and at the end."""
        self.prepare()
        for name, change in (("skew", skew), ("lies", lie)):
            Tamperer(str(self.out / f"{name}.sock"), self.server.lend, change)
        code, text = old_borrower(self.server.lend)
        if code != 9 or not re.search(r"protocol: got 7, expected \d+ of awqd \d", text):
            self.faults.append(f"a borrower of another protocol: {code} {text}")
        half = max(self.args.minutes * 60 - self.args.settle, 0) / 2
        self.run(half, ["reload", "kill", "unload", "drain", "unload", "reload"])
        self.run(self.args.settle, ["reload", "unload"])
        before = self.measure()
        self.run(half, ["reload", "unload"])
        after = self.measure()
        if not self.server.stop(signal.SIGTERM):
            self.faults.append("the server did not end as it should")
        return before, after

    def end(self):
        """Leaves no process behind."""
        for process in (*self.borrowers, self.server.load, self.server.process):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def old_borrower(path):
    """The answer to a request of another protocol."""
    with socket.socket(socket.AF_UNIX) as lender:
        lender.connect(path)
        lender.sendall(REQUEST.pack(0x6C717761, 7, b"cpu", 0, 0))
        answer = lender.recv(1 << 14)
    return ANSWER.unpack_from(answer)[2], answer[ANSWER.size:].decode()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--settle", type=float, default=60, help="seconds of load before memory is measured first")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bin", type=pathlib.Path, default=HERE.parents[1] / "bin")
    parser.add_argument("--out", help="a new folder; default: a temporary one")
    parser.add_argument("--borrowers", type=int, default=8)
    parser.add_argument("--life", type=float, default=8, help="seconds until a borrower is killed, at most")
    parser.add_argument("--grown", type=float, default=1.02,
                        help="resident and device memory after / before, at most; pools fill for a minute")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    random.seed(args.seed)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of those that fault
    device_unused = device_mib(args.device)
    soak = Soak(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    try:
        before, after = soak.soak()
    finally:
        soak.end()
    time.sleep(1)
    device_after = device_mib(args.device)

    for name in ("resident_kib", "device_mib"):
        if after[name] > before[name] * args.grown:
            soak.faults.append(f"{name}: got {after[name]}, expected {before[name]} and at most {args.grown} times that")
    for name in ("lent_kib", "lent_mappings", "descriptors"):
        if after[name] > before[name]:
            soak.faults.append(f"{name}: got {after[name]}, expected {before[name]}")
    if device_after > device_unused * args.grown + 2:
        soak.faults.append(f"device memory without a server: got {device_after} MiB, expected {device_unused}")
    for name in ("leases", "products compared", "borrowers killed"):
        if not soak.counts[name]:
            soak.faults.append(f"no {name}")
    for text, count in soak.refusals.most_common():
        print(f"{count:7} refused: {text}")
    for text in soak.faults[:50]:
        print(f"FAILED: {text}")
    print(json.dumps({
        "bench": "lease_soak", "minutes": args.minutes, "device": args.device, "borrowers": args.borrowers,
        **{re.sub(r"\W+", "_", name): count for name, count in sorted(soak.counts.items())},
        "refusals": sum(soak.refusals.values()), "before": before, "after": after, "device_mib": [device_unused, device_after],
        "failures": len(soak.faults), "passed": not soak.faults}))
    if soak.faults:
        return 1
    if not args.out:
        shutil.rmtree(soak.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
