"""Starts the server under test on the demo checkpoint, on a port of its choosing, and stops it again."""
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ["AWQD_BUILD"]) / "bin"
DATA = ROOT / "tests" / "data" / "awq"


def awqctl(*arguments):
    """Runs awqctl and returns its standard output."""
    done = subprocess.run([BIN / "awqctl", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Server:
    """A running awqd; `address` is host:port, `socket` the path of its Unix domain socket. Takes more options for it.

    program: another one with its flags.
    """

    def __init__(self, *options, device="cpu", program=BIN / "awqd"):
        self.options = (f"--device={device}", *options)
        self.program = program

    def __enter__(self):
        self.log = tempfile.NamedTemporaryFile("w+", prefix="awqd-", suffix=".log")
        self.folder = tempfile.TemporaryDirectory(prefix="awqd-")
        self.socket = f"{self.folder.name}/awqd.sock"
        self.process = subprocess.Popen(
            [self.program, f"--address=127.0.0.1:0,unix:{self.socket}", f"--model_repository={DATA}",
             "--shared_memory_prefix=awqd-interop-", *self.options],
            stdout=self.log, stderr=self.log)
        try:
            self.address = self._address()
            awqctl("--address", self.address, "healthcheck", "--wait", "60")
        except BaseException:
            self.process.kill()
            raise
        return self

    def _address(self):
        for _ in range(600):
            text = pathlib.Path(self.log.name).read_text(errors="replace")
            found = re.search(r"listening on (127\.0\.0\.1:\d+)", text)
            if found:
                return found.group(1)
            assert self.process.poll() is None, text
            time.sleep(0.05)
        raise AssertionError("the server named no port within 30 s:\n" + text)

    def __exit__(self, *unused):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0, pathlib.Path(self.log.name).read_text(errors="replace")
        assert not pathlib.Path(self.socket).exists(), "the socket is still there"
        self.folder.cleanup()
        self.log.close()
