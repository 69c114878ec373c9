#!/usr/bin/env bash
# The Debian packages are installed into a root that has nothing but Debian's smallest system, run there, and leave
# nothing when they are purged. Status 77 is a skip; the last line says why.
# usage: clean_root_test.sh <build directory> <source directory>
set -euo pipefail
ROOT="$(cd "$2" && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"
skip() { echo "$*"; exit 77; }
[[ -n "${AWQD_TEST_LONG:-}" ]] || skip "it takes minutes (tests/run.sh --long)"
for tool in debootstrap dpkg-shlibdeps apt-get chroot unshare; do
  command -v "$tool" >/dev/null || skip "$tool is not installed"
done
[[ $EUID -eq 0 ]] || skip "debootstrap and chroot need root"
unshare --mount true 2>/dev/null || skip "mount namespaces are not allowed here"

work="$(mktemp -d)"
root="$work/root"
trap 'rm -rf "$work"' EXIT
cmake --build "$1" --target awqd awqctl awqd_client awqd_shared >/dev/null
(cd "$1" && cpack -B "$work/out" >"$work/log" 2>&1) || { cat "$work/log"; die "cpack fails"; }

codename="$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)"
# shellcheck disable=SC2016  # the dollar signs are apt's
mirror="$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(SITE)' 'Created-By: Packages' |
  awk -v want="$codename" '$1 == want && $2 == "main" { print $3; exit }')"
[[ -n "$mirror" ]] || skip "apt names no mirror of $codename"
debootstrap --variant=minbase --include=ca-certificates "$codename" "$root" "$mirror" >"$work/log" 2>&1 ||
  skip "debootstrap could not fetch $codename from the mirror: $(tail -n 1 "$work/log")"
# Packages inside come from the same sources as outside.
cp -r /etc/apt/apt.conf.d /etc/apt/sources.list.d "$root/etc/apt/"
mkdir "$root/debs"
cp "$work"/out/*.deb "$root/debs/"

# inside <command>...: runs in the root, with nothing of this environment.
inside() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive chroot "$root" "$@"; }
# owned: every file except those of apt and dpkg themselves.
owned() {
  (cd "$root" && find . -xdev ! -path './var/*' ! -path './debs*' ! -path './tmp/*' ! -path './proc/*' ! -path './sys/*' \
    ! -path './dev/*' ! -name 'ld.so.cache' ! -type d | sort)
}
inside apt-get update -qq >"$work/log" 2>&1 || skip "apt cannot reach its mirror from the clean root"
mapfile -t packages < <(cd "$root/debs" && for file in *.deb; do dpkg-deb -f "$file" Package; done)
[[ "${#packages[@]}" == 4 ]] || die "got ${#packages[*]} packages, expected server, library, client and dev"

# Dependencies come first, so that the root is compared with and without the packages alone.
depends="$(for file in "$root"/debs/*.deb; do dpkg-deb -f "$file" Depends; done | tr ',' '\n' |
  sed -E 's/\(.*//; s/\|.*//; s/ //g' | sort -u)"
mapfile -t depends <<<"$depends"
inside apt-get install -y -qq --no-install-recommends "${depends[@]}" >"$work/log" 2>&1 ||
  { tail -n 20 "$work/log"; die "what the packages depend on cannot be installed"; }
owned >"$work/before"
inside sh -c 'apt-get install -y -qq --no-install-recommends /debs/*.deb' >"$work/log" 2>&1 ||
  { tail -n 20 "$work/log"; die "the packages cannot be installed in a clean root"; }
version="$(sed -n 's/^project(awqd VERSION \([0-9.]*\).*/\1/p' "$ROOT/CMakeLists.txt")"
for program in awqd awqctl; do
  [[ "$(inside "$program" --version)" == "$program $version" ]] || die "$program does not run in a clean root"
done
inside awqd --config /etc/awqd/awqd.toml --print_config >/dev/null || die "the settings that are installed are wrong"
[[ -f "$root/usr/lib/systemd/system/awqd.service" || -f "$root/lib/systemd/system/awqd.service" ]] ||
  die "the unit is not where systemd looks"
inside dpkg -V "${packages[@]}" || die "dpkg finds files that differ from the packages"

echo '# mine' >>"$root/etc/awqd/awqd.toml"
inside apt-get remove -y -qq "${packages[@]}" >"$work/log" 2>&1 || { cat "$work/log"; die "they cannot be removed"; }
grep -q '^# mine$' "$root/etc/awqd/awqd.toml" || die "an operator's settings are gone with the package"
[[ ! -e "$root/usr/bin/awqd" ]] || die "awqd is still there"
inside dpkg --purge "${packages[@]}" >"$work/log" 2>&1 || { cat "$work/log"; die "they cannot be purged"; }
owned >"$work/after"
diff "$work/before" "$work/after" || die "something is left, or missing, when the packages are purged"
say "clean root test: ok"
