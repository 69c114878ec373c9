#!/usr/bin/env bash
# Cross-builds the kernels for aarch64 and runs them under qemu-user: what is below them, then both bodies of the CPU
# against the oracle, a few shapes of each kernel row. Status 77 is a skip; the last line says why.
# usage: aarch64_test.sh <source directory>
set -euo pipefail
ROOT="$(cd "$1" && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"
skip() { say "$*"; exit 77; }
[[ -n "${AWQD_TEST_LONG:-}" ]] || skip "it takes minutes (tests/run.sh --long)"
command -v aarch64-linux-gnu-g++ >/dev/null || skip "aarch64-linux-gnu-g++ is not installed (package g++-aarch64-linux-gnu)"
qemu="$(command -v qemu-aarch64 || command -v qemu-aarch64-static)" || skip "qemu-aarch64 is not installed (package qemu-user)"
sysroot="$ROOT/build/arm64-sysroot"
if [[ -d "$sysroot" ]]; then
  emulator=("$qemu" -cpu max -L "$sysroot")
elif [[ -e /usr/lib/aarch64-linux-gnu/libgrpc++.so ]]; then
  emulator=("$qemu" -cpu max)
else
  skip "no arm64 packages: deploy/arm64_sysroot.sh collects them"
fi

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
configure aarch64
bin="$ROOT/build/aarch64"

# run <test> <filter> [<variable>=<value>...]: some of its cases; that there are any is part of the test.
run() {
  local test="$1" filter="$2"
  shift 2
  env -u GTEST_OUTPUT AWQD_TEST_DEVICE=cpu "$@" "${emulator[@]}" "$(find "$bin/tests" -name "$test" -type f)" \
    --gtest_filter="$filter" >"$work/log" 2>&1 || { tail -n 60 "$work/log"; die "$test $* fails"; }
  grep -qE '\[  PASSED  \] [1-9][0-9]* test' "$work/log" || die "$test $*: no case of $filter ran"
  say "$test $*: $(sed -n 's/^\[  PASSED  \] //p' "$work/log")"
}

# Small shapes with ragged edges, of several widths of codes, and one longer than a piece of K. A case takes 0.1 to 3 s.
shapes='*/cpu_*_k200_n71_*:*/cpu_*_k128_n24_*:*/cpu_*_k300_n40_*:*/cpu_*_k256_n24*:*/cpu_*_k200_n43_w3g128r:*/cpu_*_k4200_n40_*'
build aarch64 kernels_ground_test kernels_cpu_test kv4_test conformance_test
run kernels_ground_test '*'
run kernels_cpu_test 'Isa.*:CpuDevice.*:ThreadPool.*:CpuRows.*'
for isa in portable neon; do
  run conformance_test "$shapes-*/cpu_reference_*" AWQD_CPU_ISA="$isa"
  run kv4_test '*' AWQD_CPU_ISA="$isa"
done
say "aarch64 test: ok after $SECONDS s"
