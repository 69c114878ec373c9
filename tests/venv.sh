# shellcheck shell=bash
# A virtual environment with pinned packages, made on the first run, for tests that need tools that are not ours.

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
