#!/usr/bin/env bash
# Every shell script of the project passes shellcheck.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
command -v shellcheck >/dev/null || { echo "shellcheck is not installed"; exit 77; }
mapfile -t scripts < <(find .ci deploy tests -name '*.sh' -o -name '*.sbatch' -o -path .ci/run | sort)
((${#scripts[@]} >= 5)) || { echo "only ${#scripts[@]} scripts found"; exit 1; }
shellcheck -x "${scripts[@]}"
echo "${#scripts[@]} scripts"
