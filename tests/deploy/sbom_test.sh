#!/usr/bin/env bash
# The SBOM of a release is SPDX as its own tools read it, and what dpkg does not know is an error.
# usage: sbom_test.sh <build directory> <source directory>
set -euo pipefail
ROOT="$(cd "$2" && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"
# shellcheck source=tests/venv.sh
source "$ROOT/tests/venv.sh"
command -v dpkg-query >/dev/null || { echo "dpkg is not installed"; exit 77; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# sbom <output>: of one file, which carries the libraries that awqctl takes from gRPC's package and its neighbours.
sbom() {
  "$ROOT/deploy/sbom.py" --version 1.2.3 --libraries "$work/lib" --packages "$ROOT/deploy/packages.txt" \
    -o "$1" "$work/a file.tar.gz"
}
mkdir "$work/lib"
echo content >"$work/a file.tar.gz"
libraries="$(ldd "$1/bin/awqctl" | awk '$1 ~ /^lib(grpc|protobuf|absl)/ { print $1 }')"
[[ -n "$libraries" ]] || die "awqctl needs no library of gRPC"
while read -r library; do touch "$work/lib/$library"; done <<<"$libraries"
SOURCE_DATE_EPOCH=1 sbom "$work/one.spdx.json"
SOURCE_DATE_EPOCH=1 sbom "$work/two.spdx.json"
cmp "$work/one.spdx.json" "$work/two.spdx.json" || die "the same files make different documents"
grep -q '"name": "libgrpc++' "$work/one.spdx.json" || die "the document lacks the package of gRPC"

touch "$work/lib/libnobody-has-this.so.1"
said="$(sbom "$work/bad.spdx.json" 2>&1)" && die "a library of no package is taken"
[[ "$said" == *libnobody-has-this.so.1* ]] || die "expected the library's name, got: $said"
[[ ! -e "$work/bad.spdx.json" ]] || die "a document was written all the same"

make_venv "$1/sbom-venv" "$ROOT/tests/deploy/sbom_requirements.txt"
"$1/sbom-venv/bin/pyspdxtools" --infile "$work/one.spdx.json" >"$work/log" 2>&1 ||
  { cat "$work/log"; die "SPDX's own tools find faults"; }
# They find some where there are some.
sed 's/"SPDX-2.3"/"SPDX-7"/; s/"CC0-1.0"/"none"/' "$work/one.spdx.json" >"$work/wrong.spdx.json"
if "$1/sbom-venv/bin/pyspdxtools" --infile "$work/wrong.spdx.json" >"$work/log" 2>&1; then
  die "SPDX's own tools find nothing wrong with SPDX-7"
fi
say "sbom test: ok"
