"""Attacks awqd as hostile peers would, one attack after the other, each on a server of its own with default flags, and
prints what a bystander and the server's memory suffered.

    tests/attack/run.sh build/cpu attack_test.py             # short, a minute: what the test run does
    tests/attack/run.sh build/cpu attack_test.py --all       # full size, several minutes
    tests/attack/run.sh build/cpu attack_test.py --all --only rapid_reset --bars

siege.py says what is checked.
"""
import attacks
import siege
from siege import Case

CASES = [
    Case(attacks.descriptors),
    Case(attacks.silence, short=0.2, held=True),
    Case(attacks.unread_answers),
    Case(attacks.watches, short=0.2),
    Case(attacks.long_headers, short=0.05),
    Case(attacks.rapid_reset, short=0.1),
    Case(attacks.unread_refusals, short=0.1),
    Case(attacks.packed_varints, short=0.2),
    Case(attacks.int_values),
    Case(attacks.byte_by_byte),
    Case(attacks.byte_by_byte_four),
    Case(attacks.silent_reflection),
    Case(attacks.uploads, options=("--drain_timeout_s=1",), held=True, stop_s=2.5),
    Case(attacks.invented_names),
    Case(attacks.inline_rows, short=0.5),
    Case(attacks.unread_lists, short=0.05, full_s=45),  # a load of 20 s first
    Case(attacks.absent_weights, short=0.05, full_s=45),
    Case(attacks.many_weights, short=0.03),
    Case(attacks.odd_calls),
    Case(attacks.crowd, short=0.2),
    Case(attacks.crowd_nearby, short=0.2),
    Case(attacks.crowd_acknowledged, short=0.2, options=("--drain_timeout_s=1",), held=True, stop_s=2),
    Case(attacks.crowd_of_odd_calls, short=0.2),
    Case(attacks.crowd_of_peers, short=0.2, options=("--drain_timeout_s=1",), held=True, stop_s=2),
    Case(attacks.crowd_of_socket_file, short=0.2),
    Case(attacks.slow_http),
    Case(attacks.slow_http_of_many),
]


if __name__ == "__main__":
    siege.main(CASES)
