#!/usr/bin/env bash
# Soak: minutes of mixed load (products alone and on streams, weights by name and in the request, of experts, gated
# MLPs, blocks of weights, key/value caches, short deadlines, bursts) from clients that are killed at random points. After it, idle again, the
# server must hold at most 2 % and 10 MiB more resident memory than before, exactly the file descriptors, and on a
# GPU exactly the device memory; and it must stop within 5 seconds.
#
#   tests/bench/soak.sh [--minutes 10] [--settle SECONDS] [--device cpu] [--bin DIR] [--out DIR]
#                       [--clients 3] [--awqd_flags "FLAGS"]
#
# "Before" is after a first --settle seconds (60) of the same load: a server that was never used has none of
# its pools. Prints the numbers, one JSON line last; exit code 0 only when all of it holds and no call failed.
set -u -o pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
minutes=10 settle=60 device=cpu bin=$root/bin out='' clients=3 awqd_flags=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --minutes | --settle | --device | --bin | --out | --clients | --awqd_flags)
      [[ $# -ge 2 ]] || { echo "$1: expected a value" >&2; exit 2; }
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    *) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
  esac
done
out=${out:-$(mktemp -d)}
mkdir -p "$out"
export LD_LIBRARY_PATH="$root/lib:${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64"
RANDOM=1 # the same kills each time

server_pid='' failures=0 kills=0 seed=0
declare -A until_of=() # pid of a client -> second at which it is killed
cleanup() {
  local pid
  for pid in "${!until_of[@]}" $server_pid; do kill -9 "$pid" 2>/dev/null; done
  wait 2>/dev/null
}
trap cleanup EXIT

rss_kib() { awk '/^VmRSS:/ { print $2 }' "/proc/$server_pid/status"; }
fds() { find "/proc/$server_pid/fd" -mindepth 1 | wc -l; }
device_mib() {
  [[ $device == cuda:* ]] || { echo 0; return; }
  nvidia-smi -i "${device#cuda:}" --query-gpu=memory.used --format=csv,noheader,nounits
}

start_client() {
  seed=$((seed + 1))
  if ((seed % 4 == 0)); then
    "$bin/awqctl" --address "$address" bench --weight "first/a" --weight "second/a" --mlp "second/m.experts.*" --tokens 1:4,16 \
      --concurrency 64 --duration 600 >>"$out/clients.log" 2>&1 &
  else
    "$bin/awqd_soak_client" "$address" first,second 4 "$seed" >>"$out/clients.log" 2>&1 &
  fi
  until_of[$!]=$((SECONDS + 1 + RANDOM % 8))
}

# Kills the clients whose time has come; counts those that ended by themselves, which none should.
reap() {
  local pid
  for pid in "${!until_of[@]}"; do
    if ! kill -0 "$pid" 2>/dev/null; then
      wait "$pid"
      echo "client $pid ended by itself with exit code $?" | tee -a "$out/clients.log"
      failures=$((failures + 1))
    elif ((SECONDS >= until_of[$pid])); then
      kill -9 "$pid"
      wait "$pid" 2>/dev/null
      kills=$((kills + 1))
    else
      continue
    fi
    unset "until_of[$pid]"
  done
}

# load <seconds>, then nobody.
load() {
  local end=$((SECONDS + $1)) pid
  while ((SECONDS < end)) && kill -0 "$server_pid" 2>/dev/null; do
    while ((${#until_of[@]} < clients)); do start_client; done
    sleep "0.$((RANDOM % 9 + 1))"
    reap
  done
  for pid in "${!until_of[@]}"; do until_of[$pid]=0; done
  reap
}

# Until the descriptors are what they were when nobody was connected, 20 s at most; then a pause, in which
# pools and queues come to rest.
idle() {
  local i
  for ((i = 0; i < 20 && $(fds) > $1; ++i)); do sleep 1; done
  sleep 3
}

for name in first second; do
  shapes=(a=1024x2048 b=2048x1024)
  if [[ $name == second ]]; then
    shapes=(a=384x1536)
    for expert in 0 1 2; do
      shapes+=("m.experts.$expert.gate_proj=384x512" "m.experts.$expert.up_proj=384x512" "m.experts.$expert.down_proj=512x384")
    done
  fi
  python3 "$here/make_checkpoint.py" "$out/models/$name" "${shapes[@]}" || exit 1
done
# CUDA loads a kernel's code when it is first called, 2 MiB of device memory at a time; a number of merged tokens
# that comes for the first time after "before" would look like a leak. So all of it is loaded at the start.
export CUDA_MODULE_LOADING=EAGER
# shellcheck disable=SC2086  # several flags
"$bin/awqd" --device "$device" --address 127.0.0.1:0 --port_file "$out/port" --model_repository "$out/models" \
  $awqd_flags >"$out/server.log" 2>&1 &
server_pid=$!
for ((i = 0; i < 600; ++i)); do
  [[ -s $out/port ]] && break
  kill -0 "$server_pid" 2>/dev/null || break
  sleep 0.1
done
[[ -s $out/port ]] || { tail "$out/server.log" >&2; exit 1; }
address=127.0.0.1:$(cat "$out/port")
"$bin/awqctl" --address "$address" healthcheck --wait 120 >/dev/null || exit 1
sleep 1
fds_unused=$(fds)

load "$settle"
idle "$fds_unused"
rss_before=$(rss_kib) fds_before=$(fds) device_before=$(device_mib) kills_before=$kills
echo "before: resident $rss_before KiB, $fds_before descriptors, device $device_before MiB"
load $((minutes * 60))
idle "$fds_before"
rss_after=$(rss_kib) fds_after=$(fds) device_after=$(device_mib)
echo "after $minutes min, $((kills - kills_before)) kills: resident $rss_after KiB, $fds_after descriptors, device $device_after MiB"

kill -TERM "$server_pid"
stopping=$EPOCHREALTIME stopped=0
wait "$server_pid" || stopped=$?
stop_ms=$(((${EPOCHREALTIME/[.,]/} - ${stopping/[.,]/}) / 1000))
server_pid=''
passed=true
rss_grown=$((rss_after - rss_before))
[[ $rss_after -gt 0 && $((rss_grown * 100)) -le $((rss_before * 2)) && $rss_grown -le 10240 ]] || { echo "FAILED: resident memory"; passed=false; }
[[ $fds_after -eq $fds_before ]] || { echo "FAILED: descriptors"; passed=false; }
[[ $device_after -eq $device_before ]] || { echo "FAILED: device memory"; passed=false; }
[[ $failures -eq 0 ]] || { echo "FAILED: $failures clients met an error, see $out/clients.log"; passed=false; }
[[ $stop_ms -le 5000 ]] || { echo "FAILED: the server took $stop_ms ms to stop"; passed=false; }
[[ $stopped -eq 0 ]] || { echo "FAILED: the server ended with exit code $stopped"; passed=false; }
printf '{"bench": "soak", "minutes": %s, "kills": %d, "rss_before_kib": %d, "rss_after_kib": %d, "fds_before": %d, "fds_after": %d, "device_before_mib": %d, "device_after_mib": %d, "stop_ms": %d, "failures": %d, "passed": %s}\n' \
  "$minutes" "$((kills - kills_before))" "$rss_before" "$rss_after" "$fds_before" "$fds_after" \
  "$device_before" "$device_after" "$stop_ms" "$failures" "$passed"
[[ $passed == true ]]
