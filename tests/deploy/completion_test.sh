#!/usr/bin/env bash
# bash completion knows the flags, commands and values of the programs, and the names of a server's models and weights.
# usage: completion_test.sh <build directory> <source directory>
set -euo pipefail
ROOT="$(cd "$2" && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"
PATH="$1/bin:$PATH"
# A shell that is not completing has nothing to set.
compopt() { :; }
# shellcheck source=/dev/null
for program in awqd awqctl; do source "$ROOT/deploy/completion/$program.bash"; done

# expect <words of the line, the last one to be completed> <expected completion>...
expect() {
  local line="$1" offered
  shift
  read -ra COMP_WORDS <<<"$line"
  [[ "$line" == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  COMPREPLY=()
  "_${COMP_WORDS[0]}"
  offered="${COMPREPLY[*]}"
  [[ "$offered" == "$*" ]] || die "'$line': got '$offered', expected '$*'"
}

expect "awqd --model_rep" --model_repository
expect "awqd --no_keep" --no_keep_going
expect "awqd --hel" --help
expect "awqctl quant" quantize-kv quantize
expect "awqctl help heal" healthcheck
expect "awqctl --tok" --token_file
expect "awqctl --tls_ca ca.pem --address h:1 heal" healthcheck
expect "awqctl --address h:1 bench --arriv" --arrivals
expect "awqctl bench --addr" --address
expect "awqctl status --arriv"
expect "awqctl matmul m w --random 1 --path " auto fused dequantize
expect "awqctl matmul m w --output_dtype b" bf16
expect "awqctl convert m -o n --to g" gptq gemlite gguf
expect "awqctl token a --roles inf" infer
expect "awqctl token a --roles infer,re" infer,read
expect "awqctl bench --weight m/w --seed "

work="$(mktemp -d)"
address="unix:$work/awqd.sock"
awqd --model_repository="$ROOT/tests/data/awq" --address="$address" --device=cpu --cpu_threads=1 >"$work/log" 2>&1 &
server=$!
trap 'kill "$server"; wait "$server"; rm -rf "$work"' EXIT
awqctl --address "$address" healthcheck --wait 30 >/dev/null || die "$(cat "$work/log")"
expect "awqctl --address $address models " all-MiniLM-L6-v2-awq
expect "awqctl --address $address matmul all-MiniLM-L6-v2-awq encoder.layer.1" \
  encoder.layer.1.attention.output.dense encoder.layer.1.attention.self.query
say "completion test: ok"
