#!/usr/bin/env bash
# The systemd unit keeps its hardening: its exposure by systemd-analyze stays at 1.7 of 10.
# usage: unit_test.sh <source directory>
set -euo pipefail
command -v systemd-analyze >/dev/null || { echo "systemd-analyze is not installed"; exit 77; }
systemd-analyze security --help | grep -q -- --offline || { echo "systemd-analyze cannot judge a file"; exit 77; }
systemd-analyze security --offline=true --threshold=17 --no-pager "$1/deploy/awqd.service" | tail -n 1
