# shellcheck shell=bash
# A virtual environment with pinned packages, created on the first run, for tests that need other projects' tools.

# make_venv <folder> <requirements.txt>: makes it unless it is there with just these. Ends the script with status 77, a
# skip, and the reason as the last line where that is impossible here. Two at a time wait for one another.
make_venv() {
  local venv="$1" requirements="$2" lock
  command -v python3 >/dev/null || { echo "python3 is not installed"; exit 77; }
  mkdir -p "$(dirname "$venv")"
  exec {lock}>"$venv.lock"
  flock "$lock"
  if ! cmp -s "$requirements" "$venv/installed.txt"; then
    rm -rf "$venv"
    python3 -m venv "$venv" >/dev/null || { echo "python3 cannot make virtual environments here"; exit 77; }
    "$venv/bin/pip" install -q --disable-pip-version-check --timeout 20 --retries 1 -r "$requirements" >&2 ||
      { echo "the Python package index cannot be reached"; exit 77; }
    cp "$requirements" "$venv/installed.txt"
  fi
  exec {lock}>&-
}

# install_client <venv> <root of the sources>: builds the Python package as a user would, an sdist and of that a wheel, and
# installs it, unless it is there as the sources have it. From a copy, so that nothing is left in the sources.
install_client() {
  local venv="$1" root="$2" copy stamp
  stamp="$(cd "$root" && find proto client/python -type f ! -path '*/__pycache__/*' ! -path '*/build/*' -print0 |
    sort -z | xargs -0 sha256sum | sha256sum)"
  [[ "$(cat "$venv/client.txt" 2>/dev/null)" != "$stamp" ]] || return 0
  copy="$(mktemp -d)"
  cp -r "$root/client/python" "$copy/python"
  rm -rf "$copy/python/"{proto,build,dist} "$copy/python/src/awqd/v1/"*_pb2.py*
  cp -r "$root/proto" "$copy/python/proto"
  "$venv/bin/python" -m build --no-isolation --outdir "$copy/dist" "$copy/python" >"$copy/build.log" 2>&1 ||
    { cat "$copy/build.log"; return 1; }
  "$venv/bin/pip" install -q --disable-pip-version-check --no-deps --force-reinstall "$copy"/dist/*.whl >&2
  printf '%s\n' "$stamp" >"$venv/client.txt"
  rm -rf "$copy"
}
