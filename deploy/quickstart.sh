#!/usr/bin/env bash
# From a fresh clone to a served checkpoint: installs, builds, starts the server, calls it, checks the answers.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"

usage() {
  cat <<'TEXT'
Usage: deploy/quickstart.sh [--serve] [--port PORT] [--device DEVICE]

Installs missing packages with apt (as root or through sudo), builds awqd and awqctl (with CUDA for the GPU that is
present, when nvcc is found), serves the demo checkpoint, makes a Dequantize and a QuantizedMatmul call and checks
both against stored results. Ends with "quickstart: ok", or says what failed and exits non-zero.

  --serve          leave the server running in the foreground afterwards and print calls to try
  --port PORT      of 127.0.0.1 to listen on; default 8001 with --serve, else a free one
  --device DEVICE  auto (default), cpu or cuda:N
TEXT
}

serve=0 device=auto port=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    --serve) serve=1 ;;
    --port) port="${2:?--port needs a number}"; shift ;;
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

if ((serve)); then port="${port:-8001}"; fi
[[ "${port:-0}" =~ ^[0-9]+$ ]] || failed "--port: got \"$port\", expected a number"
# Before the build, which takes minutes.
if ((${port:-0} > 0)) && port_taken "$port"; then
  failed "port $port is taken: something listens on 127.0.0.1:$port; stop it, or choose another with --port"
fi

readonly DATA="$ROOT/tests/data/awq" MODEL=all-MiniLM-L6-v2-awq WEIGHT=encoder.layer.0.attention.self.query
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

start_server "$BIN" "$DATA" "$work/server.log" --device="$device" || failed "the server did not become healthy"

ctl() { "$BIN/awqctl" --address "$address" "$@"; }

# Both answers against stored expectations: every bit of the weight, and the product to one part in a thousand of a
# float64 product.
golden="$DATA/goldens"
dequantized="$(ctl dequantize "$MODEL" "$WEIGHT" -o "$work/w.npy" --quiet)" || failed "the Dequantize call did not succeed"
weight_check="$(ctl compare "$work/w.npy" "$golden/$WEIGHT.dequantized.npy" --bit_exact)" ||
  failed "the dequantised weight differs from the stored one: $weight_check"
multiplied="$(ctl matmul "$MODEL" "$WEIGHT" "$golden/activations_384.npy" -o "$work/y.npy")" ||
  failed "the QuantizedMatmul call did not succeed"
product_check="$(ctl compare "$work/y.npy" "$golden/$WEIGHT.matmul.npy" --max_relative_error 1e-3)" ||
  failed "the product differs from the stored one: $product_check"

cat <<TEXT

$(ctl status | sed -n '1,4p')
weight            $MODEL $WEIGHT
Dequantize        ${dequantized#*: }
  against stored  $weight_check
QuantizedMatmul   $(head -n 1 <<<"$multiplied")
  against stored  $product_check

TEXT

if ((serve)); then
  cat <<TEXT
Serving on $address until Ctrl-C. Calls to try:
  $BIN/awqctl --address $address models $MODEL
  grpcurl -plaintext $address list
  grpcurl -plaintext -d '{"name": "$MODEL"}' $address awqd.v1.ModelRepository/GetModel
  grpcurl -plaintext -d '{"weight": {"model": "$MODEL", "weight": "$WEIGHT"}, "rows": {"begin": 0, "end": 1},
    "output_encoding": "VALUES"}' $address awqd.v1.QuantizedInference/Dequantize
quickstart: ok
TEXT
  status=0
  wait "$server_pid" || status=$?
  server_pid=""
  ((status == 0)) || failed "the server ended with status $status"
  exit 0
fi
stop_server || failed "the server did not stop cleanly"
server_pid=""
say "quickstart: ok"
