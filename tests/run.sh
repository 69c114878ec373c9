#!/usr/bin/env bash
# Installs what is missing, builds everything and runs every test.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"

usage() {
  cat <<'TEXT'
Usage: tests/run.sh [options]

Installs missing packages with apt (as root or through sudo), builds everything and runs the whole suite. CUDA code
is compiled where nvcc is found, and its tests run where a GPU answers; elsewhere they are listed as skipped.

  --preset NAME        cuda (default where nvcc is found), cpu, asan, tsan or aarch64: a cross build, which installs the
                       cross compiler and qemu-user, collects the arm64 libraries (45 MB) and runs a reduced list under
                       emulation; one skip where these packages can't be had
  --filter REGEX       only the ctest entries whose name matches; no fuzzing
  --exclude-label RE   leave out ctest entries with such a label, for example slow
  --fuzz SECONDS       how long fuzz_formats runs (default 30), and each other fuzz target a third of it
  --no-fuzz            leave fuzzing out
  --daemons            also install nginx, HAProxy and Slurm, whose packages start them; their tests are skipped without
  --long               also run what takes minutes by itself: PyTorch, transformers and vLLM (7 GB of disk), the packages in
                       a clean root, a build of the client alone,
                       a build with gRPC 1.83 (most of an hour), a server without memory; they are skipped without.
                       A million mixed calls instead of 20,000
  --docker             also build and run the container image, with both gRPCs (several minutes each; needs the apt mirror)
  --help               this text

The last line is "N passed, N failed, N skipped"; the exit status is 0 when nothing failed. Logs and the list of
every case are in build/<preset>/results/.
TEXT
}

preset="" filter="" exclude="" fuzz_seconds=30 docker=0 daemons=0
while [[ $# -gt 0 ]]; do
  case "$1" in
    --preset) preset="${2:?--preset needs a name}"; shift ;;
    --filter) filter="${2:?--filter needs a pattern}"; fuzz_seconds=0; shift ;;
    --exclude-label) exclude="${2:?--exclude-label needs a pattern}"; shift ;;
    --fuzz) fuzz_seconds="${2:?--fuzz needs seconds}"; shift ;;
    --no-fuzz) fuzz_seconds=0 ;;
    --daemons) daemons=1 ;;
    --long) export AWQD_TEST_LONG=1 ;;
    --docker) docker=1 ;;
    --help | -h) usage; exit 0 ;;
    *) usage >&2; die "unknown option $1" ;;
  esac
  shift
done

sections=(build test)
((daemons)) && sections+=(daemons)
((docker)) && sections+=(docker)
install_packages "${sections[@]}"

nvcc="$(find_nvcc || true)"
[[ -n "$nvcc" ]] && native=cuda || native=cpu
preset="${preset:-$native}"
[[ -n "$nvcc" ]] && export CUDACXX="$nvcc"
results="$ROOT/build/$preset/results"

# have_aarch64: installs and collects what a cross build needs; fails where it can't be had.
have_aarch64() {
  (install_packages aarch64) || return 1
  [[ -d "$ROOT/build/arm64-sysroot" ]] || "$ROOT/deploy/arm64_sysroot.sh"
}

if [[ "$preset" == aarch64 ]] && ! have_aarch64; then
  say "skipped: aarch64: no cross compiler, no qemu-user or no arm64 libraries; the lines above say why"
  say "0 passed, 0 failed, 1 skipped"
  exit 0
fi

# configure_here <preset>: CUDA code for the GPUs of this machine. Where there is none, for a Hopper, and awqd_older_gpus
# compiles some for older ones, with little optimisation, as nothing runs it. Several files at a time, as what is shipped is
# compiled.
configure_here() {
  local options=(-DAWQD_UNITY=ON) fast=OFF architectures
  architectures="$(gpu_architectures)" || { architectures=90a-real fast=ON; }
  [[ "$1" == cuda ]] && options+=("-DAWQD_CUDA_ARCHITECTURES=$architectures" "-DAWQD_CUDA_FAST_COMPILE=$fast")
  configure "$1" "${options[@]}"
}

say "Configuring and building preset $preset with $(build_jobs) jobs"
if [[ "$preset" == aarch64 ]]; then
  # This machine's server and clients too: what they answer and ask is compared.
  configure_here "$native"
  build "$native" awqd awqctl formats_e2e_test
fi
configure_here "$preset"
[[ "$preset" == aarch64 ]] && target=emulated_tests || target=all
build "$preset" "$target"

rm -rf "$results"
mkdir -p "$results/gtest"
say "Running the tests"
ctest_args=(--test-dir "$ROOT/build/$preset" --output-on-failure --no-tests=error -j "$(nproc)"
  --output-junit "$results/ctest.xml")
[[ -n "$filter" ]] && ctest_args+=(-R "$filter")
[[ -n "$exclude" ]] && ctest_args+=(-LE "$exclude")
[[ "$preset" == aarch64 ]] && ctest_args+=(-L emulated)
export AWQD_TEST_NATIVE="$ROOT/build/$native"
ctest_status=0
# A log then shows what failed, not what passed before it.
GTEST_BRIEF=1 GTEST_OUTPUT="xml:$results/gtest/" ctest "${ctest_args[@]}" || ctest_status=$?

# part <name> <command>...: a part outside ctest. Status 77 is a skip whose last line of output is the reason.
part() {
  local name="$1" log="$results/$1.log" status=0
  shift
  say "Running $name"
  "$@" >"$log" 2>&1 || status=$?
  printf '%s\t%s\t%s\n' "$name" "$status" "$log" >>"$results/parts.tsv"
  [[ $status -eq 0 || $status -eq 77 ]] || tail -n 60 "$log"
}

touch "$results/parts.tsv"
if [[ "$preset" == cpu || "$preset" == cuda ]]; then
  ((fuzz_seconds > 0)) && part fuzz "$ROOT/tests/fuzz/run.sh" "$fuzz_seconds"
  ((docker)) && part docker "$ROOT/tests/docker/run.sh"
  ((docker)) && part docker_newer "$ROOT/tests/docker/run.sh" newer
fi

python3 "$ROOT/tests/summarize.py" "$results" "$ctest_status"
