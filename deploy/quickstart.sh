#!/usr/bin/env bash
# From a fresh clone to a served checkpoint: installs, builds, starts the server, calls it, checks the answers.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"

usage() {
  cat <<'TEXT'
Usage: deploy/quickstart.sh [--serve] [--device DEVICE]

Installs missing packages with apt (as root or through sudo), builds awqd and awqctl (with CUDA for the GPU that is
present, when nvcc is found), serves the demo checkpoint, makes a Dequantize and a QuantizedMatmul call and checks
both against stored results. Ends with "quickstart: ok", or says what failed and exits non-zero.

  --serve          leave the server running in the foreground afterwards and print calls to try
  --device DEVICE  auto (default), cpu or cuda:N
TEXT
}

serve=0 device=auto
while [[ $# -gt 0 ]]; do
  case "$1" in
    --serve) serve=1 ;;
    --device) device="${2:?--device needs auto, cpu or cuda:N}"; shift ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; die "unknown option $1" ;;
  esac
  shift
done

failed() {
  printf 'quickstart: failed: %s\n' "$*" >&2
  exit 1
}

readonly DATA="$ROOT/tests/data/awq" MODEL=minilm
readonly BIN="$ROOT/build/release/bin"
work="$(mktemp -d)"
server_pid=""
# shellcheck disable=SC2317  # called by the trap
cleanup() {
  local status=$?
  if [[ -n "$server_pid" ]] && kill -0 "$server_pid" 2>/dev/null; then
    kill -TERM "$server_pid"
    wait "$server_pid" || true
  fi
  rm -rf "$work"
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

cuda_options() {
  local nvcc architectures
  if nvcc="$(find_nvcc)" && architectures="$(gpu_architectures)"; then
    say "-DAWQD_CUDA=ON"
    say "-DAWQD_CUDA_ARCHITECTURES=$architectures"
    say "-DCMAKE_CUDA_COMPILER=$nvcc"
  else
    say "-DAWQD_CUDA=OFF"
  fi
}

install_packages build || failed "packages are missing"
mapfile -t options < <(cuda_options)
say "Configuring (${options[*]})"
(configure release "${options[@]}") || failed "the configuration did not succeed"
say "Building awqd and awqctl with $(build_jobs) jobs"
(build release awqd awqctl) || failed "the build did not succeed"
say "Ready to serve after $SECONDS s"

start_server() {
  "$BIN/awqd" --host=127.0.0.1 --port=0 --model_repository="$DATA" --device="$device" >"$work/server.log" 2>&1 &
  server_pid=$!
  address=""
  for _ in $(seq 300); do
    kill -0 "$server_pid" 2>/dev/null || {
      cat "$work/server.log" >&2
      failed "the server ended at its start"
    }
    address="$(sed -n 's/.*listening on \(127\.0\.0\.1:[0-9]*\).*/\1/p' "$work/server.log" | head -n 1)"
    [[ -n "$address" ]] && break
    sleep 0.1
  done
  [[ -n "$address" ]] || failed "the server did not name its port within 30 s"
  "$BIN/awqctl" --address "$address" healthcheck --wait 60 >/dev/null || {
    cat "$work/server.log" >&2
    failed "the server did not become healthy within 60 s"
  }
}
start_server
