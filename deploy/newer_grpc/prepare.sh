#!/usr/bin/env bash
# Has apt on Debian 13 take gRPC 1.83 and what it needs, by name, version and checksum (packages.txt), from Debian's suites
# experimental and sid, and everything else from Debian 13. For images and roots that are made for awqd; run as root. Status 77:
# the mirror does not have one of them.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=deploy/lib.sh
source "$here/../lib.sh"
mirror="${DEBIAN_MIRROR:-$(apt_mirror trixie)}"
[[ -n "$mirror" ]] || die "apt names no mirror of trixie; DEBIAN_MIRROR can"

codename="$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)"
[[ "$codename" == trixie ]] || die "got Debian's release \"$codename\", expected trixie (13)"
[[ "$(dpkg --print-architecture)" == amd64 ]] || die "got $(dpkg --print-architecture), expected amd64: the checksums are its"

for suite in experimental sid; do
  printf 'deb %s %s main\n' "$mirror" "$suite"
done >/etc/apt/sources.list.d/awqd-newer-grpc.list
{
  # What is not named below never comes from there.
  printf 'Package: *\nPin: release a=experimental\nPin-Priority: -1\n\n'
  printf 'Package: *\nPin: release a=unstable\nPin-Priority: -1\n'
  while read -r package version _; do
    [[ "$package" == \#* ]] || printf '\nPackage: %s\nPin: version %s\nPin-Priority: 990\n' "$package" "$version"
  done <"$here/packages.txt"
} >/etc/apt/preferences.d/awqd-newer-grpc
apt-get update -qq >/dev/null

# apt checks what it downloads against these sums of its lists.
while read -r package version sum; do
  [[ "$package" != \#* ]] || continue
  found="$(apt-cache show "$package=$version" 2>/dev/null | sed -n 's/^SHA256: //p' | head -n 1)"
  [[ -n "$found" ]] ||
    { say "$package $version: the mirror does not have it; Debian's archive of snapshots does (DEBIAN_MIRROR)"; exit 77; }
  [[ "$found" == "$sum" ]] || die "$package $version: got the checksum $found, expected $sum"
done <"$here/packages.txt"
