#!/usr/bin/env bash
# The installed files are enough to build client/examples and the example of libawqd elsewhere, with CMake and with
# pkg-config, and all have one version.
# usage: install_test.sh <build directory> <source directory>
set -euo pipefail
ROOT="$(cd "$2" && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"
build="$1"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

cmake --build "$build" --target awqd_client awqctl awqd_shared >/dev/null
for component in client dev library; do
  cmake --install "$build" --prefix "$work/usr" --component "$component" >/dev/null
done
version="$(sed -n 's/^project(awqd VERSION \([0-9.]*\).*/\1/p' "$ROOT/CMakeLists.txt")"
[[ "$("$work/usr/bin/awqctl" --version)" == "awqctl $version" ]] || die "awqctl has another version than $version"

mkdir "$work/elsewhere"
cp "$ROOT/client/examples/matmul.cc" "$ROOT/kernels/library/example.c" "$work/elsewhere/"
cat >"$work/elsewhere/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.25)
project(elsewhere LANGUAGES C CXX)
find_package(awqd REQUIRED)
message(STATUS "awqd is ${awqd_VERSION}")
add_executable(example matmul.cc)
target_link_libraries(example PRIVATE awqd::client)
find_package(libawqd REQUIRED)
message(STATUS "libawqd is ${libawqd_VERSION}")
add_executable(product example.c)
target_link_libraries(product PRIVATE awqd::library)
CMAKE
cmake -S "$work/elsewhere" -B "$work/elsewhere/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/usr" >"$work/log" ||
  { cat "$work/log"; die "find_package(awqd) does not work"; }
grep -q "awqd is $version" "$work/log" || die "find_package(awqd) tells another version than $version"
grep -q "libawqd is $version" "$work/log" || die "find_package(libawqd) tells another version than $version"
cmake --build "$work/elsewhere/build" >"$work/log" || { cat "$work/log"; die "the examples do not build with CMake"; }
model="$ROOT/tests/data/awq/all-MiniLM-L6-v2-awq" weight=encoder.layer.0.output.dense
said="$("$work/elsewhere/build/product" "$model" "$weight")" || die "the example of libawqd fails"
[[ "$said" == "$weight: awq [1536, 384], w4g128z"*"y[0] = "* ]] || die "the example of libawqd prints: $said"
# Without a server it reports an error.
said="$("$work/elsewhere/build/example" 127.0.0.1:1 m w 2>&1)" && die "the example calls a server that is not there"
[[ "$said" == UNAVAILABLE* ]] || die "expected UNAVAILABLE of the example, got: $said"

if command -v pkg-config >/dev/null; then
  triplet="$(uname -m)-linux-gnu"
  export PKG_CONFIG_PATH="$work/usr/lib/$triplet/pkgconfig:$work/usr/lib/pkgconfig"
  [[ "$(pkg-config --modversion awqd)" == "$version" ]] || die "awqd.pc has another version than $version"
  read -ra flags < <(pkg-config --cflags --libs awqd)
  # Uses the object that CMake made: this tests the named libraries, not the compiler again.
  object="$(find "$work/elsewhere/build" -name 'matmul.cc.o')"
  c++ "$object" "${flags[@]}" -o "$work/example" || die "the example does not link with pkg-config"
  read -ra flags < <(pkg-config --cflags --libs libawqd)
  cc "$ROOT/kernels/library/example.c" "${flags[@]}" -o "$work/product" || die "the example of libawqd does not link"
fi
say "install test: ok"
