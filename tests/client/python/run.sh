#!/usr/bin/env bash
# Builds the Python package as a user would, installs it in a virtual environment and runs its tests there. Status 77 is
# a skip; the last line says why.
# usage: run.sh <build directory> [pytest argument]...
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
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
install_client "$venv" "$here/../../.."
cd "$here"
AWQD_BUILD="$build" PATH="$venv/bin:$PATH" exec "$venv/bin/python" -m pytest -q -p no:cacheprovider "$@"
