#!/usr/bin/env bash
# bash completion knows the flags and commands of the programs.
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
say "completion test: ok"
