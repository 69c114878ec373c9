#!/usr/bin/env bash
# The systemd unit starts the program and the settings that were installed with it, and keeps its hardening: its exposure by
# systemd-analyze stays at 1.7 of 10.
# usage: unit_test.sh <source directory> <build directory>
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# expect_start <folder of the unit> <command>
expect_start() {
  local start
  start="$(sed -n 's/^ExecStart=//p' "$1/lib/systemd/system/awqd.service")"
  [[ "$start" == "$2" ]] || { echo "the unit starts \"$start\", expected \"$2\""; exit 1; }
}
cmake --install "$2" --prefix "$work/opt" --component server >/dev/null
expect_start "$work/opt" "$work/opt/bin/awqd --config $work/opt/etc/awqd/awqd.toml"
"$work/opt/bin/awqd" --config "$work/opt/etc/awqd/awqd.toml" --print_config >/dev/null
DESTDIR="$work/package" cmake --install "$2" --prefix /usr --component server >/dev/null
expect_start "$work/package/usr" "/usr/bin/awqd --config /etc/awqd/awqd.toml"

command -v systemd-analyze >/dev/null || { echo "systemd-analyze is not installed"; exit 77; }
systemd-analyze security --help | grep -q -- --offline || { echo "systemd-analyze cannot judge a file"; exit 77; }
systemd-analyze security --offline=true --threshold=17 --no-pager "$1/deploy/awqd.service" | tail -n 1
