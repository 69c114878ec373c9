#!/usr/bin/env bash
# Runs one test of this folder in a virtual environment with requirements.txt. Status 77 is a skip; the last line
# says why.
# usage: run.sh <build directory> <test.py>
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
build="$1" test="$2" venv="$1/interop-venv"

command -v python3 >/dev/null || { echo "python3 is not installed"; exit 77; }
mkdir -p "$build"
exec 9>"$build/interop-venv.lock"
flock 9
if ! cmp -s "$here/requirements.txt" "$venv/installed.txt"; then
  rm -rf "$venv"
  python3 -m venv "$venv" >/dev/null || { echo "python3 cannot make virtual environments here"; exit 77; }
  "$venv/bin/pip" install -q --disable-pip-version-check --timeout 20 --retries 1 -r "$here/requirements.txt" >&2 ||
    { echo "the Python package index cannot be reached"; exit 77; }
  cp "$here/requirements.txt" "$venv/installed.txt"
fi
flock -u 9
exec 9>&-
AWQD_BUILD="$build" PATH="$venv/bin:$PATH" exec "$venv/bin/python" "$here/$test"
