#!/usr/bin/env bash
# Makes a release from a tag: Debian packages, the relocatable folder, an SBOM and checksums of all of them.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"

usage() {
  cat <<'TEXT'
Usage: deploy/release.sh [--check] [--out DIR] TAG
       deploy/release.sh --pack BUILD [--out DIR]

TAG is v and the version that CMakeLists.txt has at that tag, CHANGELOG.md has a section of, and everything else that
carries a version agrees with. What lies around in this checkout is not part of it: the tag is built from a clone.

  --check       only look whether the tag may be released
  --pack BUILD  pack what the build folder BUILD of this checkout holds, without a tag, to try what follows a build
  --out DIR     where the files go; default out/release. They replace what is there
TEXT
}

# version_of <checkout>: what CMakeLists.txt says.
version_of() {
  sed -n 's/^project(awqd VERSION \([0-9.]*\).*/\1/p' "$1/CMakeLists.txt"
}

# check_versions <checkout>: all that carry the version agree with CMakeLists.txt, or the first that does not is named.
check_versions() {
  local version
  version="$(version_of "$1")"
  [[ -n "$version" ]] || die "CMakeLists.txt: got no version"
  while IFS='|' read -r file pattern; do
    local found
    found="$(sed -nE "s/$pattern/\\1/p" "$1/$file" | head -n 1)"
    [[ "$found" == "$version" ]] || die "$file: got version \"$found\", expected $version as in CMakeLists.txt"
  done <<'PLACES'
CHANGELOG.md|^## ([0-9.]+).*$
client/python/pyproject.toml|^version = "(.*)"$
client/python/src/awqd/__init__.py|^__version__ = "(.*)"$
deploy/kubernetes/awqd/Chart.yaml|^version: (.*)$
deploy/kubernetes/awqd/Chart.yaml|^appVersion: (.*)$
deploy/kubernetes/manifests/cpu.yaml|^ *app.kubernetes.io\/version: "(.*)"$
PLACES
}

# check_tag <checkout> <tag>: the checkout is what the tag says it is, and is meant to be released.
check_tag() {
  local version
  version="$(version_of "$1")"
  [[ "$2" == "v$version" ]] || die "tag $2: CMakeLists.txt has version $version there, expected the tag v$version"
  check_versions "$1"
  grep -qE "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" "$1/CHANGELOG.md" ||
    die "tag $2: CHANGELOG.md has no heading \"## $version (YYYY-MM-DD)\": it is not released yet"
}

# pack <build> <checkout> <out>: of a build that is done.
pack() {
  local build="$1" source="$2" out="$3" version name
  version="$(version_of "$source")"
  name="awqd-$version-linux-x86_64"
  cmake --build "$build" --target awqd awqctl awqd_client bundle >"$build/release.log" 2>&1 ||
    { tail -n 20 "$build/release.log" >&2; die "the build fails (full log: $build/release.log)"; }
  rm -rf "$out"
  mkdir -p "$out"
  (cd "$build" && cpack -B "$out" >"$build/release.log" 2>&1) ||
    { tail -n 20 "$build/release.log" >&2; die "cpack fails (full log: $build/release.log)"; }
  rm -rf "$out/_CPack_Packages"
  cp "$source/out/$name.tar.gz" "$out/"
  (
    cd "$out"
    python3 "$source/deploy/sbom.py" --version "$version" --libraries "$source/out/$name/lib" \
      --packages "$source/deploy/packages.txt" -o "awqd-$version.spdx.json" -- *.deb *.tar.gz
    sha256sum -- * >SHA256SUMS
  )
}

# report <folder>: what it holds.
report() {
  say "$1:"
  find "$1" -type f -printf '  %P\n' | sort
}

check=0 pack="" out="$ROOT/out/release" tag=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    --check) check=1 ;;
    --pack) pack="$(cd "${2:?--pack needs a build folder}" && pwd)"; shift ;;
    --out) out="${2:?--out needs a folder}"; shift ;;
    --help | -h) usage; exit 0 ;;
    -*) usage >&2; die "unknown option $1" ;;
    *) [[ -z "$tag" ]] || die "got the tags $tag and $1, expected one"; tag="$1" ;;
  esac
  shift
done
mkdir -p "$(dirname "$out")"
out="$(cd "$(dirname "$out")" && pwd)/$(basename "$out")"
if [[ -n "$pack" ]]; then
  [[ -z "$tag" ]] || die "got --pack and the tag $tag, expected one of them"
  check_versions "$ROOT"
  pack "$pack" "$ROOT" "$out"
  report "$out"
  exit
fi
[[ -n "$tag" ]] || { usage >&2; die "got no tag"; }
git -C "$ROOT" rev-parse -q --verify "refs/tags/$tag^{commit}" >/dev/null || die "tag $tag: there is none"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
git -c advice.detachedHead=false clone -q --shared --branch "$tag" "$ROOT" "$work/awqd"
check_tag "$work/awqd" "$tag"
((check)) && { say "tag $tag may be released"; exit; }

SOURCE_DATE_EPOCH="$(git -C "$work/awqd" log -1 --format=%ct)"
export SOURCE_DATE_EPOCH
install_packages build
ROOT="$work/awqd" # what lib.sh builds
configure release
build release awqd awqctl awqd_client
if command -v help2man >/dev/null; then build release man; fi
pack "$ROOT/build/release" "$ROOT" "$out"
report "$out"
