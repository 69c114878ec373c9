"""Attacks awqd as somebody would who can write its repository, one attack after the other, and prints what a bystander and
the server's memory suffered.

    tests/attack/run.sh build/cpu file_attack_test.py             # short: what the test run does
    tests/attack/run.sh build/cpu file_attack_test.py --all       # full size, several minutes

siege.py says what is checked.
"""
import file_attacks
import siege
from siege import Case

CASES = [
    Case(file_attacks.many_links, short=0.02, short_s=1),
    Case(file_attacks.stop_during_load, short=0.1, short_s=1, held=True, options=("--drain_timeout_s=1",)),
    Case(file_attacks.large_index, short=0.3, held=True, options=("--drain_timeout_s=1",), bound_mib=400, stop_s=2.5),
    Case(file_attacks.costly_expressions, held=True, options=("--drain_timeout_s=1",), bound_mib=400, stop_s=2.5),
    Case(file_attacks.slow_expressions, short=0.3, short_s=6, held=True, options=("--drain_timeout_s=1",), bound_mib=400, stop_s=2.5),
    Case(file_attacks.writes_in_place, short_s=1.5),
    Case(file_attacks.folder_flips, short_s=1),
    Case(file_attacks.files_replaced, short_s=1),
    Case(file_attacks.sparse_weight, short_s=0.5, options=("--device_memory_limit=1GiB",), bound_mib=200),
    Case(file_attacks.failing_loads, short_s=1, log_bytes=400 << 10),
    Case(file_attacks.control_characters, short_s=0.5, options=("--log_level=debug",), log_bytes=64 << 20),
]


if __name__ == "__main__":
    siege.main(CASES)
