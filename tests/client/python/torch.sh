#!/usr/bin/env bash
# Builds the Python packages awqd and awqd-torch, installs them beside PyTorch, transformers and vLLM, and runs the tests of
# awqd.torch. The virtual environment takes 7 GB. Status 77 is a skip; the last line says why.
# usage: torch.sh <build directory> [pytest argument]...
set -euo pipefail
[[ -n "${AWQD_TEST_LONG:-}" ]] || { echo "it takes minutes (tests/run.sh --long)"; exit 77; }
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$here/../../.." build="$1" venv="$1/torch-venv"
shift
# shellcheck source=tests/venv.sh
source "$root/tests/venv.sh"

free_gib=$(($(df --output=avail -k "$build" | tail -n 1) >> 20))
[[ -d "$venv" ]] || ((free_gib >= 16)) || { echo "$free_gib GiB free, PyTorch and vLLM need 16 to be installed"; exit 77; }
make_venv "$venv" "$here/requirements-torch.txt"
# Without what its engine needs: kernels for GPUs, of several GB.
"$venv/bin/pip" install -q --disable-pip-version-check --timeout 20 --retries 1 --no-deps vllm==0.33.0 >&2 ||
  { echo "the Python package index cannot be reached"; exit 77; }
install_client "$venv" "$root"
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
cp -r "$root/client/python/awqd-torch" "$copy/awqd-torch"
LIBAWQD="$build/kernels/library/libawqd.so" "$venv/bin/python" -m build --wheel --no-isolation --outdir "$copy/dist" \
  "$copy/awqd-torch" >"$copy/build.log" 2>&1 || { cat "$copy/build.log"; exit 1; }
"$venv/bin/pip" install -q --disable-pip-version-check --no-deps --force-reinstall "$copy"/dist/*.whl >&2
cd "$here"
AWQD_BUILD="$build" PATH="$venv/bin:$PATH" VLLM_LOGGING_LEVEL=WARNING \
  "$venv/bin/python" -m pytest -q -p no:cacheprovider torch_test.py generate_test.py vllm_test.py "$@"
