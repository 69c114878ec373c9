#!/usr/bin/env bash
# Runs one test of this folder in a virtual environment with requirements.txt. Status 77 is a skip; the last line
# says why.
# usage: run.sh <build directory> <test.py> [argument of unittest]...
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
build="$1" test="$2" venv="$1/deploy-venv"
shift 2
# shellcheck source=tests/venv.sh
source "$here/../venv.sh"

make_venv "$venv" "$here/requirements.txt"
install_client "$venv" "$here/../.."
AWQD_BUILD="$build" PATH="$venv/bin:$PATH" exec "$venv/bin/python" "$here/$test" "$@"
