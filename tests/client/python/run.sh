#!/usr/bin/env bash
# Builds the Python package as a user would, installs it in a virtual environment and runs its tests there. Status 77 is
# a skip; the last line says why.
# usage: run.sh <build directory> [pytest argument]...
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
package="$here/../../../client/python"
build="$1" venv="$1/python-venv"
shift
# shellcheck source=tests/venv.sh
source "$here/../../venv.sh"

make_venv "$venv" "$here/requirements.txt"
for version in 4.25.8 5.29.6 6.33.6 7.36.2; do
  [[ -d "$venv/protobuf/$version/google" ]] ||
    "$venv/bin/pip" install -q --disable-pip-version-check --timeout 20 --retries 1 --no-deps \
      --target "$venv/protobuf/$version" "protobuf==$version" >&2 ||
    { echo "the Python package index cannot be reached"; exit 77; }
done
# From a copy, so that nothing is left in the sources. First an sdist, and of that a wheel.
source="$(mktemp -d)"
trap 'rm -rf "$source"' EXIT
cp -r "$package" "$source/python"
rm -rf "$source/python/"{proto,build,dist} "$source/python/src/awqd/v1/"*_pb2.py*
cp -r "$package/../../proto" "$source/python/proto"
"$venv/bin/python" -m build --no-isolation --outdir "$source/dist" "$source/python" >"$source/build.log" 2>&1 ||
  { cat "$source/build.log"; exit 1; }
"$venv/bin/pip" install -q --disable-pip-version-check --no-deps --force-reinstall "$source"/dist/*.whl >&2
cd "$here"
AWQD_BUILD="$build" PATH="$venv/bin:$PATH" "$venv/bin/python" -m pytest -q -p no:cacheprovider "$@"
