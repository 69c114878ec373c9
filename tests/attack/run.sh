#!/usr/bin/env bash
# Runs a script of this folder in a virtual environment with requirements.txt. Status 77 is a skip; the last line says
# why.
# usage: run.sh <build directory> <script.py> [its options]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
build="$(cd "$1" && pwd)" script="$2"
shift 2
# shellcheck source=tests/venv.sh
source "$here/../venv.sh"

make_venv "$build/attack-venv" "$here/requirements.txt"
AWQD_BUILD="$build" PYTHONDONTWRITEBYTECODE=1 exec "$build/attack-venv/bin/python" "$here/$script" "$@"
