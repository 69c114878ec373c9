#!/usr/bin/env bash
# Collects the arm64 packages that a cross build links with in a folder of their own. Nothing on this machine changes and
# no rights are needed: some of these packages (prometheus-cpp-dev, libjemalloc-dev) can't be installed for two
# architectures at once, so `dpkg --add-architecture arm64` alone would take those of this machine away.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"

usage() {
  cat <<'TEXT'
Usage: deploy/arm64_sysroot.sh [FOLDER]

Downloads Debian's arm64 libraries of deploy/packages.txt, with what they need, and unpacks them into FOLDER (default:
build/arm64-sysroot, where preset aarch64 looks for them; elsewhere say -DAWQD_SYSROOT=FOLDER). 45 MB are downloaded and
300 MB unpacked. The package sources of this machine are used; on Ubuntu they must name ports.ubuntu.com for arm64.
TEXT
}
[[ "${1:-}" != --help && "${1:-}" != -h ]] || { usage; exit 0; }
[[ $# -le 1 ]] || { usage >&2; die "expected one folder, got $# arguments"; }
folder="${1:-$ROOT/build/arm64-sysroot}"
[[ ! -e "$folder" ]] || die "$folder is there already; remove it to collect the packages again"
for tool in apt-get dpkg-deb; do
  command -v "$tool" >/dev/null || die "$tool is missing; a sysroot is made of Debian packages"
done

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/archives/partial"
: >"$work/status"
# A machine of apt's own in a folder: arm64 alone, with nothing installed.
cat >"$work/apt.conf" <<CONF
APT::Architecture "arm64";
APT::Architectures { "arm64"; };
APT::Sandbox::User "";
Dir::State::status "$work/status";
Dir::State::lists "$work/lists";
Dir::Cache "$work";
Dir::Cache::archives "$work/archives";
CONF
export APT_CONFIG="$work/apt.conf" DEBIAN_FRONTEND=noninteractive

# Headers and libraries alone; programs are this machine's. Of clang's only fuzzing has use.
mapfile -t packages < <(packages_of build test | grep -E -- '-dev$' | grep -v '^libclang')
say "Collecting in $folder: ${packages[*]}"
apt-get update -qq >/dev/null || die "apt-get update failed; are the sources of this machine reachable?"
# A build on an arm64 machine, and in its image, asks for all of [build]; nothing is installed here.
mapfile -t all < <(packages_of build)
apt-get install -qq --simulate --no-install-recommends "${all[@]}" >"$work/log" 2>&1 || {
  tail -n 20 "$work/log" >&2
  die "section [build] of deploy/packages.txt can't be installed on arm64"
}
apt-get install -y -qq --download-only --no-install-recommends "${packages[@]}" >"$work/log" 2>&1 || {
  tail -n 20 "$work/log" >&2
  die "apt could not collect the arm64 packages"
}
# Unpacked beside the folder and moved, so that half a sysroot is never found.
rm -rf "$folder.new"
mkdir -p "$folder.new"
for package in "$work"/archives/*.deb; do dpkg-deb --extract "$package" "$folder.new"; done
# Links to absolute paths would leave the folder.
find "$folder.new" -type l -lname '/*' | while read -r link; do
  ln -sfn --relative "$folder.new$(readlink "$link")" "$link"
done
# gRPC's CMake files ask for the generators of its packages; those that run are this machine's.
mkdir -p "$folder.new/usr/bin"
for program in protoc /usr/bin/grpc_*_plugin; do
  ln -sf "/usr/bin/${program##*/}" "$folder.new/usr/bin/"
done
# An installation would choose an OpenBLAS by alternatives.
libraries="$folder.new/usr/lib/aarch64-linux-gnu"
for name in libopenblas.so libopenblas.so.0; do ln -s "openblas-pthread/$name" "$libraries/$name"; done
mv "$folder.new" "$folder"
say "$folder: $(du -sm "$folder" | cut -f 1) MB of $(find "$work/archives" -name '*.deb' | wc -l) packages"
