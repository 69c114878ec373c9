#!/usr/bin/env bash
# Makes a release from a tag: Debian packages, the relocatable folder, the container image, an SBOM and checksums of all.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"

usage() {
  cat <<'TEXT'
Usage: deploy/release.sh [--check] [--image BASE] [--out DIR] TAG
       deploy/release.sh --pack BUILD [--image BASE] [--out DIR]

TAG is v and the version that CMakeLists.txt has at that tag, CHANGELOG.md has a section of, and everything else that
carries a version agrees with. What lies around in this checkout is not part of it: the tag is built from a clone.

  --check       only look whether the tag may be released
  --pack BUILD  pack what the build folder BUILD of this checkout holds, without a tag, to try what follows a build
  --image BASE  what the image is made on; none leaves it out, as --pack does by itself. Default with CUDA the runtime base
                of the Dockerfile, without debian:12-slim. docker or buildah makes it; without both the release says so
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

# image_base <build> <checkout>: what the image of such a build is made on.
image_base() {
  if grep -q '^AWQD_CUDA:BOOL=ON' "$1/CMakeCache.txt"; then
    sed -n 's/^ARG RUNTIME=//p' "$2/Dockerfile"
  else
    say debian:12-slim
  fi
}

# make_image <checkout> <folder> <base> <version> <archive>: the Dockerfile's runtime stage on a base, with the folder of this
# release in place of a build of its own. Says why where no tool is there.
make_image() {
  local context log name="awqd:$4" archive="$5"
  context="$(mktemp -d)" log="$(mktemp)"
  cp -r "$2" "$context/awqd"
  # shellcheck disable=SC2016  # the Dockerfile's dollar sign
  { say "FROM $3"; sed '1,/^FROM \${RUNTIME}/d; s|^COPY --from=build /opt/awqd|COPY awqd|' "$1/Dockerfile"; } >"$context/Dockerfile"
  if docker info >/dev/null 2>&1; then
    docker build -q -t "$name" "$context" >"$log" 2>&1 && docker save "$name" >"${archive%.gz}" 2>>"$log"
  elif command -v buildah >/dev/null; then
    buildah build -q --format docker -t "$name" "$context" >"$log" 2>&1 &&
      buildah push -q "$name" "docker-archive:${archive%.gz}:$name" >>"$log" 2>&1
  else
    say "no image: neither buildah nor docker with a running engine is here"
    rm -rf "$context" "$log"
    return
  fi || { tail -n 20 "$log" >&2; rm -rf "$context" "$log"; die "the image cannot be made on $3"; }
  gzip -n "${archive%.gz}"
  rm -rf "$context" "$log"
}

# pack <build> <checkout> <out> <base of the image, or none>: of a build that is done.
pack() {
  local build="$1" source="$2" out="$3" base="$4" version name
  version="$(version_of "$source")"
  name="awqd-$version-linux-$(uname -m)"
  cmake --build "$build" --target awqd awqctl awqd_client awqd_shared bundle >"$build/release.log" 2>&1 ||
    { tail -n 20 "$build/release.log" >&2; die "the build fails (full log: $build/release.log)"; }
  rm -rf "$out"
  mkdir -p "$out"
  (cd "$build" && cpack -B "$out" >"$build/release.log" 2>&1) ||
    { tail -n 20 "$build/release.log" >&2; die "cpack fails (full log: $build/release.log)"; }
  rm -rf "$out/_CPack_Packages"
  cp "$source/out/$name.tar.gz" "$out/"
  [[ "$base" == none ]] || make_image "$source" "$source/out/$name" "$base" "$version" "$out/awqd-$version-image.tar.gz"
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

check=0 pack="" out="$ROOT/out/release" tag="" image=""
while [[ $# -gt 0 ]]; do
  case "$1" in
    --check) check=1 ;;
    --pack) pack="$(cd "${2:?--pack needs a build folder}" && pwd)"; shift ;;
    --image) image="${2:?--image needs the name of a base, or none}"; shift ;;
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
  pack "$pack" "$ROOT" "$out" "${image:-none}"
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
pack "$ROOT/build/release" "$ROOT" "$out" "${image:-$(image_base "$ROOT/build/release" "$ROOT")}"
report "$out"
