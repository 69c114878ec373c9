#!/usr/bin/env bash
# The server of a cross build under emulation, with each body of the CPU, asked by clients of this machine. awqctl compares
# its answers with those of this machine's server, to the bit: portable and NEON bodies add in one order, on every machine.
# formats_e2e_test then asks it for every format. Status 77 is a skip; the last line says why.
# usage: server_test.sh <build directory> <emulator> [<option>...]
# AWQD_TEST_NATIVE names a build directory with this machine's awqd, awqctl and formats_e2e_test; without, build/cuda or
# build/cpu.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"
skip() { say "$*"; exit 77; }
cross="$1/bin"
shift
[[ $# -gt 0 ]] || skip "qemu-aarch64 is not installed (package qemu-user)"
emulator=("$@")
native=""
for build in "${AWQD_TEST_NATIVE:-$ROOT/build/cuda}" "$ROOT/build/cpu"; do
  formats="$build/tests/e2e/formats_e2e_test"
  if [[ -x "$build/bin/awqd" && -x "$build/bin/awqctl" && -x "$formats" ]]; then native="$build/bin"; break; fi
done
[[ -n "$native" ]] || skip "this machine's awqd, awqctl and formats_e2e_test are not built (preset cpu or cuda)"

readonly DATA="$ROOT/tests/data/awq" MODEL=all-MiniLM-L6-v2-awq WEIGHT=encoder.layer.0.attention.self.query
work="$(mktemp -d)"
server_pid=""
trap '[[ -z "$server_pid" ]] || kill "$server_pid" 2>/dev/null; rm -rf "$work"' EXIT
cd "$work"
# A folder as start_server wants it: the emulated server, and this machine's awqctl.
mkdir emulated
ln -s "$native/awqctl" emulated/awqctl
{ printf '#!/bin/sh\nexec'; printf ' "%s"' "${emulator[@]}" "$cross/awqd"; printf ' "$@"\n'; } >emulated/awqd
chmod +x emulated/awqd

# serve <folder with awqd and awqctl> <body>: starts that server and checks that it computes with that body.
serve() {
  AWQD_CPU_ISA="$2" start_server "$1" "$DATA" "$work/log" --device=cpu || die "the server with bodies $2 does not start"
  "$native/awqctl" --address "$address" --json status >status.json || die "GetServerInfo fails"
  [[ "$(sed -nE 's/^ *"isa": "(.*)",?$/\1/p' status.json)" == "$2" ]] ||
    die "expected the bodies $2, got: $(cat status.json)"
}

# stop: sends SIGTERM, after which the server exits with status 0 and logs it.
stop() {
  local status=0
  stop_server || status=$?
  server_pid=""
  [[ $status -eq 0 ]] || { cat log; die "the server ended with status $status on SIGTERM"; }
  grep -q ' stopped$' log || { cat log; die "the server's log does not say that it stopped"; }
}

# ask <folder> [<emulator>...] <awqctl>: what is compared, into files of that folder.
ask() {
  local folder="$1" tokens
  shift
  mkdir "$folder"
  "$@" --address "$address" models >"$folder/models" || die "$folder: ListModels fails"
  "$@" --address "$address" models "$MODEL" >"$folder/weights" || die "$folder: GetModel fails"
  "$@" --address "$address" dequantize "$MODEL" "$WEIGHT" -o "$folder/w.npy" --quiet || die "$folder: Dequantize fails"
  for tokens in 1 64; do
    "$@" --address "$address" matmul "$MODEL" "$WEIGHT" --random "$tokens" --path fused --output_dtype fp32 -o "$folder/y$tokens.npy" \
      >"$folder/matmul$tokens" || die "$folder: QuantizedMatmul of $tokens tokens fails"
  done
}

# same <folder> <folder>: the answers in both, to the bit.
same() {
  local name said
  grep -q "^$MODEL  *READY" "$1/models" || die "$1: $MODEL is not ready: $(cat "$1/models")"
  cmp "$1/models" "$2/models" || die "$1 lists other models than $2"
  for name in w y1 y64; do
    said="$("$native/awqctl" compare "$1/$name.npy" "$2/$name.npy" --bit_exact)" || die "$1, $name: $said"
  done
  say "$1: the answers of $2"
}

# every_format <body> <filter of GoogleTest>: a server that the test starts, with goldens of every format.
every_format() {
  env -u GTEST_OUTPUT AWQD_TEST_BIN="$work/emulated" AWQD_CPU_ISA="$1" "$formats" --gtest_brief=1 --gtest_filter="$2" \
    >formats.log 2>&1 || { tail -n 60 formats.log; die "formats_e2e_test fails with bodies $1"; }
  grep -qE '\[  PASSED  \] [1-9][0-9]* test' formats.log || die "no case of $2 ran"
  say "$1, formats_e2e_test: $(sed -n 's/^\[  PASSED  \] //p' formats.log)"
}

# The body that this machine would choose may round differently.
serve "$native" portable
ask native "$native/awqctl"
stop
for isa in portable neon; do
  serve emulated "$isa"
  ask "$isa" "$native/awqctl"
  same "$isa" native
  if [[ "$isa" == neon ]]; then
    # The client too, on both sides of the same server.
    ask awqctl "${emulator[@]}" "$cross/awqctl"
    same awqctl native
  fi
  stop
done
every_format portable 'All/GoldenTest.FromACheckpointsFolder/*'
every_format neon '*'
say "aarch64 server test: ok after $SECONDS s"
