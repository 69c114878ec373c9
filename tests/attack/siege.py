"""Shared by the attack scripts: runs each attack on a server of its own, beside a bystander, and prints a row of a table.

Always checked: no answer that the bystander got is wrong, it is answered during the attack and by a new connection
afterwards, the server lives, keeps within its bounds of memory and log and ends by SIGTERM with status 0, and the attack
itself found nothing wrong. With --bars also that the bystander's p99 is below 250 ms for products and 50 ms for health,
and that no event held the call loop for 20 ms, which a machine with other load need not reach.
"""
import argparse
import multiprocessing
import time

import messages
import peer
from bystander import Bystander
from target import IN_FEATURES, Target

MIB = 1 << 20
BAR_MS = {peer.MATMUL: 250, peer.HEALTH: 50}
BAR_HOLD_S = 0.02
BOUND_MIB = 1500
BACK_MIB = 30  # of where it began, half a minute after an attack


class Ground:
    """Where an attack takes place."""

    def __init__(self, target, over, scale):
        self.port, self.pid, self.models = target.port, target.process.pid, target.models
        self.socket_file, self.metrics_port = target.socket_file, target.metrics_port
        self.log_path, self.over, self.scale = target.log_path, over, scale

    def some(self, number):
        return max(1, int(number * self.scale))

    def hold(self):
        self.over.wait(600)


class Case:
    """An attack, how much of it a short run does and for how long, how long all of it takes, whether it still holds what it
    opened when the server is stopped, and its own bounds, `stop_s` from SIGTERM to the end."""

    def __init__(self, attack, short=1.0, options=(), held=False, short_s=1.5, full_s=15, bound_mib=BOUND_MIB, back_mib=BACK_MIB,
                 log_bytes=1 << 20, stop_s=20):
        self.attack, self.short, self.short_s, self.options, self.held = attack, short, short_s, options, held
        self.full_s = full_s
        self.bound_mib, self.back_mib, self.log_bytes = bound_mib, back_mib, log_bytes
        self.stop_s = stop_s
        self.name = attack.__name__


def _attack(case, ground, pipe):
    """Sends what it did in words, and what it found that must not be."""
    try:
        pipe.send((case.attack(ground), ""))
    except AssertionError as found:
        pipe.send(("", f"{case.name}: {found}"))


def peak_until(target, seconds):
    """The most resident bytes that were seen meanwhile."""
    peak, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        peak = max(peak, target.rss())
        time.sleep(0.02)
    return peak


def new_client_is_served(port, limit_s=15):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            if peer.Caller(port).call(peer.MATMUL, messages.matmul("m", 1, IN_FEATURES)).status == "0":
                return True
        except OSError:
            pass
        time.sleep(0.1)
    return False


def unanswered(report):
    """How many calls were lost, and how many refused, by status."""
    refused = [f"{count} with status {status}" for status, count in sorted(report.refused.items())]
    return ", ".join([f"{report.lost} lost"] * (report.lost > 0) + refused) or "0"


def run(case, options):
    """One attack. (the row of the table, what was not as it must be)."""
    scale, seconds, rest_s = (1.0, case.full_s, 30) if options.all else (case.short, case.short_s, 0)
    with Target(*case.options) as target:
        new_client_is_served(target.port)
        time.sleep(0.3)
        before = target.rss()
        over, (ours, theirs) = multiprocessing.Event(), multiprocessing.Pipe(duplex=False)
        ground = Ground(target, over, scale)
        attacker = multiprocessing.Process(target=_attack, args=(case, ground, theirs), daemon=True)
        bystander = Bystander(target.port)
        time.sleep(0.2)
        attacker.start()
        peak = peak_until(target, seconds)
        lived = target.process.poll() is None
        report = bystander.end()
        # The end comes while the attacker still holds what it opened.
        if not case.held:
            over.set()
            assert ours.poll(180), f"{case.name}: the attacker has hung"
        served = new_client_is_served(target.port)
        end = time.monotonic() + rest_s
        after = target.rss()
        while not case.held and after > before + case.back_mib * MIB and time.monotonic() < end:
            time.sleep(0.1)
            after = target.rss()
        hold_s = target.longest_hold_s()
        status, took = target.stop()
        over.set()
        assert ours.poll(180), f"{case.name}: the attacker has hung"
        did, found = ours.recv()
        attacker.join(10)
        text = target.text()
    calls = sum(map(len, report.seconds.values()))
    row = [case.name, did, f"{calls}", f"{report.p99_ms(peer.MATMUL):.0f}", f"{report.p99_ms(peer.HEALTH):.0f}",
           unanswered(report), f"{before // MIB}", f"{peak // MIB}", f"{after // MIB}",
           f"{1000 * hold_s:.0f}", f"{took:.1f}"]
    wrong = [found] if found else []
    def must(holds, what):
        if not holds:
            wrong.append(f"{case.name}: {what}")
    must(lived and status == 0, f"got exit status {status}, expected 0 after SIGTERM; its log ends\n{text[-2000:]}")
    must(report.wrong == 0, f"{report.wrong} answers had other bytes than the first one")
    must(calls > 0, "the bystander got no answer at all")
    must(served, "a new client is not served afterwards")
    must(peak < case.bound_mib * MIB, f"got {peak // MIB} MiB at most, expected less than {case.bound_mib}")
    must(len(text) < case.log_bytes, f"got {len(text)} characters of log, expected less than {case.log_bytes}")
    must(took < case.stop_s, f"got {took:.1f} s from SIGTERM to the end, expected less than {case.stop_s}")
    if options.all:
        must(case.held or after < before + case.back_mib * MIB,
             f"got {after // MIB} MiB {rest_s} s later, expected {before // MIB} and at most {case.back_mib} more")
    if options.bars:
        must(report.lost == 0 and not report.refused, f"the bystander lost {report.lost} calls, {dict(report.refused)} refused")
        for path, bar in BAR_MS.items():
            must(report.p99_ms(path) < bar, f"{path}: got p99 {report.p99_ms(path):.0f} ms, expected less than {bar}")
        must(hold_s < BAR_HOLD_S, f"the loop was held for {1000 * hold_s:.0f} ms, expected less than {1000 * BAR_HOLD_S:.0f}")
    return row, wrong


def main(cases):
    """The command line of a script with these attacks."""
    parser = argparse.ArgumentParser(description="Attacks awqd over loopback and prints what others suffered.")
    parser.add_argument("--all", action="store_true", help="full size, 15 s an attack, and memory must come back")
    parser.add_argument("--bars", action="store_true", help="also fail where the bystander waits too long")
    parser.add_argument("--only", action="append", choices=[case.name for case in cases], help="this attack; may be repeated")
    options = parser.parse_args()
    multiprocessing.set_start_method("fork")
    print("| attack | what it did | bystander's answers | p99 product, ms | p99 health, ms | not answered | RSS before, MiB "
          "| at most | after | longest hold, ms | end, s | all, s |\n|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    wrong = []
    for case in cases:
        if options.only and case.name not in options.only:
            continue
        start = time.monotonic()
        row, found = run(case, options)
        row.append(f"{time.monotonic() - start:.1f}")
        print("| " + " | ".join(row) + " |", flush=True)
        wrong += found
    assert not wrong, "\n".join(wrong)

