#!/usr/bin/env bash
# Runs a command in a root of Debian 13 that has gRPC 1.83, in /src/awqd, a copy of this checkout. The root is made by
# debootstrap on the first run and kept: a second run builds what has changed. Status 77: that is impossible here, and the last
# line says why.
# usage: in_root.sh ROOT COMMAND...
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"
impossible() { say "$*"; exit 77; }
root="$1"
shift
for tool in debootstrap chroot unshare; do
  command -v "$tool" >/dev/null || impossible "$tool is not installed"
done
[[ $EUID -eq 0 ]] || impossible "debootstrap and chroot need root"
unshare --mount true 2>/dev/null || impossible "mount namespaces are not allowed here"

mkdir -p "$root"
root="$(cd "$root" && pwd)"
if [[ ! -e "$root/etc/os-release" ]]; then
  # A mirror of Debian has all its releases.
  mirror="${DEBIAN_MIRROR:-$(apt_mirror "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)")}"
  [[ -n "$mirror" ]] || impossible "apt names no mirror here; DEBIAN_MIRROR can"
  debootstrap --variant=minbase --include=ca-certificates trixie "$root" "$mirror" >"$root.log" 2>&1 ||
    { rm -rf "$root"; impossible "debootstrap could not fetch Debian 13 from the mirror (log: $root.log)"; }
fi
# Packages inside come the same way as outside.
cp -r /etc/apt/apt.conf.d "$root/etc/apt/"
cp -L /etc/resolv.conf "$root/etc/" 2>/dev/null || true
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" 2>/dev/null || true
# Files that are as they were keep their times.
while IFS= read -r -d '' file; do
  [[ -f "$ROOT/$file" ]] || continue
  cmp -s "$ROOT/$file" "$root/src/awqd/$file" || install -D "$ROOT/$file" "$root/src/awqd/$file" -m "$(stat -Lc %a "$ROOT/$file")"
done < <(git -C "$ROOT" ls-files -z)

# A compiler cache out here is none in there; where one is installed there, use_ccache finds it.
unset CMAKE_CXX_COMPILER_LAUNCHER CMAKE_CUDA_COMPILER_LAUNCHER "${!CCACHE_@}"
# shellcheck disable=SC2016  # expanded by the inner shells
exec unshare --mount --propagation=private sh -c '
  root="$1"; shift
  mount --rbind /dev "$root/dev" && mount -t proc proc "$root/proc" && mount -t tmpfs tmpfs "$root/dev/shm" || exit
  exec chroot "$root" /bin/bash -euo pipefail -c "
    ROOT=/src/awqd; cd \$ROOT; source deploy/lib.sh
    deploy/newer_grpc/prepare.sh && install_packages build
    exec \"\$@\"" bash "$@"' sh "$root" "$@"
