#!/usr/bin/env bash
# quickstart.sh --serve reports that its port is in use before it installs or builds anything.
# usage: quickstart_test.sh <source directory>
set -euo pipefail
command -v python3 >/dev/null || { echo "python3 is not installed"; exit 77; }
work="$(mktemp -d)"
python3 - "$work/port" <<'PY' &
import os, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(listener.getsockname()[1]))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(60)
PY
holder=$!
trap 'kill "$holder" 2>/dev/null || true; rm -rf "$work"' EXIT
for _ in $(seq 100); do [[ -e "$work/port" ]] && break; sleep 0.05; done
port="$(cat "$work/port")"

expect() {
  local text="$1" said
  shift
  said="$("$@" 2>&1)" && { echo "succeeded: $*"; exit 1; }
  [[ "$said" == *"$text"* ]] || { echo "expected '$text', got '$said'"; exit 1; }
}
expect "port $port is taken" timeout 20 "$1/deploy/quickstart.sh" --serve --port "$port"
expect '--port: got "http", expected a number' timeout 20 "$1/deploy/quickstart.sh" --port http
echo "quickstart test: ok"
