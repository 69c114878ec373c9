#!/usr/bin/env bash
# Builds every fuzz target and runs each for a while, from its seeds. Fails on a crash, a leak or a hang.
set -euo pipefail

if [[ $# -ne 1 || ! "$1" =~ ^[1-9][0-9]*$ ]]; then
  echo "Usage: tests/fuzz/run.sh SECONDS   (how long each target runs)" >&2
  exit 2
fi
seconds="$1"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
build="${AWQD_FUZZ_BUILD:-$root/build/fuzz}"
targets=(fuzz_safetensors fuzz_quant_config fuzz_formats fuzz_matmul_wire fuzz_gguf)

if ! command -v clang++ >/dev/null; then
  echo "skipped: clang++ is not installed (apt-get install clang)"
  exit 77
fi
(cd "$root" && cmake --preset fuzz -B "$build" >/dev/null)
cmake --build "$build" --target awqd_fuzz_targets

# fuzz <target>: its statistics, or the end of its log.
fuzz() {
  local target="$1" found="$build/corpus/$1" # beside the build: the checked-in seeds stay as they are
  mkdir -p "$found"
  (cd "$build" && "tests/fuzz/$target" "$found" "$root/tests/fuzz/corpus/$target" -max_total_time="$seconds" \
    -timeout=10 -rss_limit_mb=2048 -max_len=16384 -print_final_stats=1 -verbosity=0 >"$target.log" 2>&1) ||
    { tail -n 60 "$build/$target.log" && echo "$target: failed, the input lies in $build" && return 1; }
  echo "== $target, $seconds s"
  grep -E 'number_of_executed_units|average_exec_per_sec' "$build/$target.log"
}

# One a core at a time: a target runs on one thread.
running=() failed=0
for target in "${targets[@]}"; do
  fuzz "$target" &
  running+=($!)
  if ((${#running[@]} >= $(nproc))); then
    wait "${running[0]}" || failed=1
    running=("${running[@]:1}")
  fi
done
for pid in "${running[@]}"; do wait "$pid" || failed=1; done
((failed == 0)) || exit 1
echo "fuzz: ok"
