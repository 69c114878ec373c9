#!/usr/bin/env bash
# Builds every fuzz target and runs each for a while, from its seeds. Fails on a crash, a leak or a hang.
# fuzz_formats, which has the most to find, runs for SECONDS, the others for a third of that; targets that are named
# run for all of it.
set -euo pipefail

if [[ $# -lt 1 || ! "$1" =~ ^[1-9][0-9]*$ ]]; then
  echo "Usage: tests/fuzz/run.sh SECONDS [TARGET...]" >&2
  exit 2
fi
seconds="$1"
shift
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
build="${AWQD_FUZZ_BUILD:-$root/build/fuzz}"
targets=(fuzz_formats fuzz_safetensors fuzz_quant_config fuzz_matmul_wire fuzz_gguf fuzz_names fuzz_config_file
  fuzz_security_files fuzz_metrics_http fuzz_ring)
short=$(((seconds + 2) / 3))
if (($# > 0)); then
  targets=("$@") short="$seconds"
fi

if ! command -v clang++ >/dev/null; then
  echo "skipped: clang++ is not installed (apt-get install clang)"
  exit 77
fi
(cd "$root" && cmake --preset fuzz -B "$build" >/dev/null)
cmake --build "$build" --target awqd_fuzz_targets

# fuzz <target>: prints its statistics.
fuzz() {
  local target="$1" time="$short" found="$build/corpus/$1" # beside the build: the checked-in seeds stay as they are
  [[ "$target" == fuzz_formats ]] && time="$seconds"
  mkdir -p "$found"
  (cd "$build" && "tests/fuzz/$target" "$found" "$root/tests/fuzz/corpus/$target" -max_total_time="$time" \
    -timeout=10 -rss_limit_mb=2048 -max_len=16384 -print_final_stats=1 -verbosity=0 >"$target.log" 2>&1) || return 1
  echo "== $target, $time s"
  grep -E 'number_of_executed_units|average_exec_per_sec' "$build/$target.log"
}

# One a core at a time: a target runs on one thread.
pids=() failed=()
for i in "${!targets[@]}"; do
  ((i < $(nproc))) || wait -n || true
  fuzz "${targets[i]}" &
  pids+=($!)
done
for i in "${!targets[@]}"; do wait "${pids[i]}" || failed+=("${targets[i]}"); done
# Last, because a log is read from its end.
for target in "${failed[@]}"; do
  tail -n 60 "$build/$target.log"
  echo "$target: failed, the input lies in $build"
done
((${#failed[@]} == 0)) || exit 1
echo "fuzz: ok"
