#!/usr/bin/env bash
# Makes out/awqd-VERSION-linux-x86_64-grpc1.83.tar.gz: the relocatable folder with gRPC 1.83, for glibc 2.41 and newer.
# usage: folder.sh [ROOT]     (where the root of Debian 13 lies; default build/newer-grpc/root)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
root="${1:-$ROOT/build/newer-grpc/root}"
"$ROOT/deploy/newer_grpc/in_root.sh" "$root" bash -euo pipefail -c '
  ROOT=/src/awqd; source deploy/lib.sh
  configure cpu
  build cpu bundle'
version="$(sed -n 's/^project(awqd VERSION \([0-9.]*\).*/\1/p' "$ROOT/CMakeLists.txt")"
name="awqd-$version-linux-x86_64"
mkdir -p "$ROOT/out"
cp "$root/src/awqd/out/$name.tar.gz" "$ROOT/out/$name-grpc1.83.tar.gz"
echo "out/$name-grpc1.83.tar.gz"
