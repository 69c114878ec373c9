#!/usr/bin/env bash
# The client alone is configured and built: no server, no OpenBLAS, no CUDA. Status 77 is a skip; the last line says why.
# usage: client_test.sh <build directory> <source directory>
set -euo pipefail
ROOT="$(cd "$2" && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"
[[ -n "${AWQD_TEST_LONG:-}" ]] || { say "it takes minutes (tests/run.sh --long)"; exit 77; }
use_ccache
build="$1/client-only" # kept, so that a second run builds what has changed
mkdir -p "$build"
# Neither is searched for: a machine without them configures in the same way.
cmake -S "$ROOT" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DAWQD_CLIENT_ONLY=ON \
  -DCMAKE_DISABLE_FIND_PACKAGE_BLAS=ON -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON \
  -DCMAKE_DISABLE_FIND_PACKAGE_tomlplusplus=ON \
  -DCMAKE_CUDA_COMPILER=NOTFOUND >"$build/configure.log" 2>&1 ||
  { tail -n 30 "$build/configure.log"; die "the client alone cannot be configured"; }
cmake --build "$build" -j "$(build_jobs)" >"$build/build.log" 2>&1 ||
  { tail -n 30 "$build/build.log"; die "the client alone cannot be built"; }
version="$(sed -n 's/^project(awqd VERSION \([0-9.]*\).*/\1/p' "$ROOT/CMakeLists.txt")"
[[ "$("$build/bin/awqctl" --version)" == "awqctl $version" ]] || die "awqctl does not run"
[[ ! -e "$build/bin/awqd" ]] || die "the server was built too"
needs="$(ldd "$build/bin/awqctl")"
if grep -qE 'blas|cuda' <<<"$needs"; then die "awqctl needs OpenBLAS or CUDA: $needs"; fi
say "client test: ok"
