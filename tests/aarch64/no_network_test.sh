#!/usr/bin/env bash
# If the arm64 packages are not available, tests/run.sh --preset aarch64 is one skip with a reason, and not a failure.
# usage: no_network_test.sh <source directory>
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/root/tests" "$work/bin"
cp -r "$1/deploy" "$work/root/"
cp "$1/tests/run.sh" "$work/root/tests/"
# A machine that has its own packages and reaches no others.
printf '#!/bin/sh\necho installed\n' >"$work/bin/dpkg-query"
printf '#!/bin/sh\necho "no network" >&2\nexit 100\n' >"$work/bin/apt-get"
chmod +x "$work/bin/"*

status=0
PATH="$work/bin:$PATH" "$work/root/tests/run.sh" --preset aarch64 >"$work/said" 2>&1 || status=$?
fail() { cat "$work/said"; echo "error: $*"; exit 1; }
[[ $status -eq 0 ]] || fail "got exit status $status, expected 0"
[[ "$(tail -n 1 "$work/said")" == "0 passed, 0 failed, 1 skipped" ]] || fail "the last line is no tally of one skip"
grep -q '^skipped: aarch64: ' "$work/said" || fail "no line says what was skipped"
grep -q 'apt-get update failed' "$work/said" || fail "no line says why"
echo "aarch64 without a network: ok"
