#!/usr/bin/env bash
# Runs one test of this folder in a virtual environment with requirements.txt, or with requirements-NAME.txt. Status 77 is a
# skip; the last line says why.
# usage: run.sh <build directory> <test.py> [NAME]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
build="$1" test="$2" suffix="${3:+-$3}"
venv="$build/interop-venv$suffix"
# shellcheck source=tests/venv.sh
source "$here/../venv.sh"

needed="$(sed -n 's/.*Needs glibc \([0-9.]*\) or newer.*/\1/p' "$here/requirements$suffix.txt")"
found="$(getconf GNU_LIBC_VERSION)"
printf '%s\n' "${needed:-0}" "${found#glibc }" | sort -CV ||
  { echo "$found is here, and requirements$suffix.txt needs $needed or newer"; exit 77; }
make_venv "$venv" "$here/requirements$suffix.txt"
AWQD_BUILD="$build" PATH="$venv/bin:$PATH" exec "$venv/bin/python" "$here/$test"
