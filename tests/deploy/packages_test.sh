#!/usr/bin/env bash
# The Debian packages hold what they should, where it belongs, in the version of the build, and their programs run.
# usage: packages_test.sh <build directory> <source directory>
set -euo pipefail
ROOT="$(cd "$2" && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"
command -v dpkg-shlibdeps >/dev/null || { echo "dpkg-dev is not installed"; exit 77; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

cmake --build "$1" --target awqd awqctl awqd_client awqd_shared >/dev/null
(cd "$1" && cpack -B "$work/out" >"$work/log" 2>&1) || { cat "$work/log"; die "cpack fails"; }
version="$(sed -n 's/^project(awqd VERSION \([0-9.]*\).*/\1/p' "$ROOT/CMakeLists.txt")"
for package in awqd-server awqd-library awqd-client libawqd-dev; do
  file="$(find "$work/out" -maxdepth 1 -name "${package}_*.deb")"
  [[ "$(dpkg-deb -f "$file" Version)" == "$version" ]] || die "$package has another version than $version"
  dpkg-deb -x "$file" "$work/root"
done
[[ "$(dpkg-deb -f "$(find "$work/out" -maxdepth 1 -name 'awqd-server_*.deb')" Depends)" == *libgrpc++* ]] ||
  die "awqd-server depends on no gRPC"
for file in etc/awqd/awqd.toml usr/lib/systemd/system/awqd.service usr/bin/awqd usr/bin/awqctl \
  usr/share/bash-completion/completions/awqctl usr/lib/libawqd_client.a usr/include/awqd/client/awqd_client.h usr/lib/libawqd.so.1 usr/include/awqd.h; do
  [[ -e "$work/root/$file" ]] || die "the packages lack $file"
done
[[ ! -e "$work/root/usr/etc" ]] || die "settings lie in /usr/etc"
for program in awqd awqctl; do
  [[ "$("$work/root/usr/bin/$program" --version)" == "$program $version" ]] || die "$program has another version"
done
"$work/root/usr/bin/awqd" --config "$work/root/etc/awqd/awqd.toml" --print_config >/dev/null
say "packages test: ok"
