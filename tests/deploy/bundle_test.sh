#!/usr/bin/env bash
# The bundle runs from a folder that it was moved to, with an empty environment, on its own libraries.
# usage: bundle_test.sh <build directory>
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"

cmake --build "$1" --target bundle
work="$(mktemp -d)"
server_pid=""
trap '[[ -z "$server_pid" ]] || kill "$server_pid" 2>/dev/null; rm -rf "$work"' EXIT
mkdir "$work/moved here"
tar xzf "$ROOT"/out/awqd-*-linux-"$(uname -m)".tar.gz -C "$work/moved here" --strip-components=1
home="$work/moved here"

for file in README.md LICENSE NOTICE licenses lib bin/awqd bin/awqctl; do
  [[ -e "$home/$file" ]] || die "the bundle lacks $file"
done
links="$(grep -oE '\]\([^):#]+' "$home/README.md" | cut -c3- | sort -u)"
grep -q '\.svg$' <<<"$links" || die "expected README.md to show drawings, got the links: $links"
while read -r file; do
  [[ -e "$home/$file" ]] || die "the bundle lacks $file, which its README.md links to"
done <<<"$links"
for name in awqd awqctl; do
  resolved="$(env -i /usr/bin/ldd "$home/bin/$name")"
  grep -q 'not found' <<<"$resolved" && die "$name lacks libraries: $resolved"
  # Only the C library may come from the machine.
  outside="$(awk '$2 == "=>" { print $1, $3, $4 }' <<<"$resolved" | grep -vF "$home" |
    grep -vE '^lib(c|m|dl|rt|pthread|resolv|mvec)\.so' || true)"
  [[ -z "$outside" ]] || die "$name takes these from the machine: $outside"
  env -i "$home/bin/$name" --help >/dev/null || die "$name does not run"
done
grep -qE 'cuda|cublas|ld-linux' <<<"$(ls "$home/lib")" && die "the bundle carries what belongs to the machine"

# Everything from here runs without the environment of this machine.
for name in awqd awqctl; do
  printf '#!/bin/sh\nexec env -i "%s/bin/%s" "$@"\n' "$home" "$name" >"$work/$name"
  chmod +x "$work/$name"
done
start_server "$work" "$home/models" "$work/server.log" --device=cpu || die "the bundled server does not start"
"$work/awqctl" --address "$address" models
weight=encoder.layer.0.attention.self.query
"$work/awqctl" --address "$address" matmul all-MiniLM-L6-v2-awq "$weight" --random 4
stop_server || die "the bundled server did not stop cleanly"
server_pid=""
size="$(stat -c %s "$ROOT"/out/awqd-*-linux-"$(uname -m)".tar.gz)"
((size <= 60 * 1024 * 1024)) || die "the tarball has $size bytes, more than 60 MiB"
say "bundle test: ok, $((size / 1024 / 1024)) MiB"
