#!/usr/bin/env bash
# Builds the Python package as a user would, installs it in a virtual environment and runs its tests there. Status 77 is
# a skip; the last line says why.
# usage: run.sh <build directory> [pytest argument]...
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
package="$here/../../../client/python"
build="$1" venv="$1/python-venv"
shift

command -v python3 >/dev/null || { echo "python3 is not installed"; exit 77; }
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "the tests need Python 3.11 or newer"; exit 77; }
mkdir -p "$build"
exec 9>"$build/python-venv.lock"
flock 9
if ! cmp -s <(cat "$here/requirements.txt" "${BASH_SOURCE[0]}") "$venv/installed.txt"; then
  rm -rf "$venv"
  python3 -m venv "$venv" >/dev/null || { echo "python3 cannot make virtual environments here"; exit 77; }
  pip=("$venv/bin/pip" install -q --disable-pip-version-check --timeout 20 --retries 1)
  "${pip[@]}" -r "$here/requirements.txt" >&2 || { echo "the Python package index cannot be reached"; exit 77; }
  for version in 4.25.8 5.29.6 6.33.6 7.36.2; do
    "${pip[@]}" --no-deps --target "$venv/protobuf/$version" "protobuf==$version" >&2 ||
      { echo "the Python package index cannot be reached"; exit 77; }
  done
  cat "$here/requirements.txt" "${BASH_SOURCE[0]}" >"$venv/installed.txt"
fi
# From a copy, so that nothing is left in the sources. First an sdist, and of that a wheel.
source="$(mktemp -d)"
trap 'rm -rf "$source"' EXIT
cp -r "$package" "$source/python"
rm -rf "$source/python/"{proto,build,dist} "$source/python/src/awqd/v1/"*_pb2.py*
cp -r "$package/../../proto" "$source/python/proto"
"$venv/bin/python" -m build -q --no-isolation --outdir "$source/dist" "$source/python" >&2
"$venv/bin/pip" install -q --disable-pip-version-check --no-deps --force-reinstall "$source"/dist/*.whl >&2
flock -u 9
exec 9>&-
cd "$here"
AWQD_BUILD="$build" PATH="$venv/bin:$PATH" "$venv/bin/python" -m pytest -q -p no:cacheprovider "$@"
