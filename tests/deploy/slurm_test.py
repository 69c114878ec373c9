"""A fleet as a job of a Slurm of its own, with one node: servers are listed when they are ready, one is killed, the job ends.

Needs root, slurmctld, slurmd, munged and the package munge's programs; skipped by name without.
"""
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import awqd

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ["AWQD_BUILD"]) / "bin"
MODEL = "all-MiniLM-L6-v2-awq"
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=30
NodeName={host} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def wait_for(condition, what, seconds=60):
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, f"{what() if callable(what) else what} within {seconds} s"
        time.sleep(0.05)


def stopped(log):
    """How many servers have ended in the orderly way."""
    return len(re.findall(r"\bstopped\b", log.read_text()))


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


class Slurm(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
        if missing:
            raise unittest.SkipTest(f"{missing[0]} is not installed")
        if os.geteuid() != 0:
            raise unittest.SkipTest("Slurm's daemons need root")
        cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory(prefix="awqd-slurm-")))
        cls.folder.chmod(0o755)
        for name in ("state", "spool"):
            (cls.folder / name).mkdir()
        key = cls.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        cls.daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={cls.folder}/munge.socket",
                   f"--pid-file={cls.folder}/munge.pid", f"--log-file={cls.folder}/munge.log", f"--seed-file={cls.folder}/munge.seed")
        wait_for((cls.folder / "munge.socket").exists, "munge's socket")
        configuration = cls.folder / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(host=socket.gethostname().split(".")[0], controller=free_port(), node=free_port(),
                                                      folder=cls.folder, cpus=os.cpu_count()))
        os.environ["SLURM_CONF"] = str(configuration)
        cls.daemon("slurmctld", "-D")
        cls.daemon("slurmd", "-D")

        def idle():
            done = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, check=False)
            return done.stdout.strip() == "idle"

        wait_for(idle, lambda: "an idle node: " + (cls.folder / "slurmctld.log").read_text() + (cls.folder / "slurmd.log").read_text())

    @classmethod
    def daemon(cls, *command):
        with open(cls.folder / f"{command[0]}.log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)

        def stop():
            process.terminate()
            process.wait(30)

        cls.addClassCleanup(stop)

    def test_fleet(self):
        (self.folder / "placement").write_text("--load_model=moe\n--load_model=all-MiniLM-L6-v2-awq\n--load_model=all-MiniLM-L6-v2-awq\n")
        shutil.copytree(ROOT / "tests/data/experts/moe", self.folder / "models/moe")
        shutil.copytree(ROOT / "tests/data/awq" / MODEL, self.folder / "models" / MODEL)
        # An mv that waits while a file exists.
        tools, hold, held = (self.folder / name for name in ("tools", "hold", "held"))
        tools.mkdir()
        (tools / "mv").write_text(f'#!/bin/sh\n[ -e {hold} ] && touch {held}\nwhile [ -e {hold} ]; do sleep 0.05; done\nexec {shutil.which("mv")} "$@"\n')
        (tools / "mv").chmod(0o755)
        flags = [f"--model_repository={self.folder}/models", "--device=cpu", "--cpu_threads=1", "--drain_delay_ms=1000"]
        done = subprocess.run(
            ["sbatch", "--parsable", "--ntasks=3", "--overcommit", f"--chdir={self.folder}",
             f"--export=ALL,PATH={tools}:{os.environ['PATH']},FLEET_BIN={BIN},FLEET_PLACEMENT={self.folder}/placement", ROOT / "deploy/slurm/awqd.sbatch", *flags],
            capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        job = done.stdout.strip()
        self.addCleanup(self.end, job)
        endpoints, target = (self.folder / f"awqd-{job}.{suffix}" for suffix in ("endpoints", "target"))
        log = self.folder / f"awqd-{job}.log"

        def listed(count):
            return lambda: endpoints.exists() and len(endpoints.read_text().split()) == count

        def said():
            return f"servers; log: {log.read_text() if log.exists() else 'none'}"

        wait_for(listed(3), said)
        holders = 0
        for address in endpoints.read_text().split():
            with awqd.Client(address) as client:
                self.assertTrue(client.is_serving())
                holders += any(model.name == MODEL and model.weights for model in client.list_models())
        self.assertEqual(holders, 2, log.read_text())
        self.assertRegex(target.read_text(), r"^ipv4:[0-9.]+:\d+,[0-9.]+:\d+,[0-9.]+:\d+$")

        # One of them fails: it leaves the list, the others stay.
        port = endpoints.read_text().split()[0].rsplit(":", 1)[1]
        found = subprocess.run(["pgrep", "-f", f"{BIN}/awqd .*{self.folder}"], capture_output=True, text=True, check=True)
        victim = next(int(pid) for pid in found.stdout.split() if self.listens(int(pid), int(port)))
        os.kill(victim, signal.SIGKILL)
        wait_for(listed(2), said)

        # The job's end signals every process, including those that are writing the lists: they must finish.
        hold.touch()
        wait_for(held.exists, "a list that is being written")
        subprocess.run(["scancel", "--quiet", job], check=True)
        wait_for(lambda: stopped(log) == 2, said)
        hold.unlink()
        self.end(job)
        self.assertFalse(endpoints.exists() and endpoints.read_text(), log.read_text())
        self.assertEqual(stopped(log), 2, log.read_text())

    @staticmethod
    def end(job):
        """Ends the job, and waits until the last of its servers has."""
        subprocess.run(["scancel", "--quiet", job], check=True)

        def gone():
            return not subprocess.run(["squeue", "-h", "-j", job], capture_output=True, text=True, check=False).stdout.strip()

        wait_for(gone, "the job ends")

    @staticmethod
    def listens(pid, port):
        sockets = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        lines = [line for table in ("tcp", "tcp6") for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        for line in lines:
            fields = line.split()
            if int(fields[1].split(":")[1], 16) == port and fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                return True
        return False


if __name__ == "__main__":
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    result = unittest.main(exit=False).result
    if result.skipped and result.wasSuccessful():
        print(result.skipped[0][1])
        sys.exit(77)
    sys.exit(not result.wasSuccessful())
