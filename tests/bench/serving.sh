#!/usr/bin/env bash
# The serving bench: awqd beside an empty echo of the same bytes through the same gRPC and, where Python has
# grpc and torch, beside the service that one would otherwise write. Each bar is measured in turns (A B A B ...)
# and judged by medians. Everything runs on this machine; the generator shares its cores.
#
#   tests/bench/serving.sh [--device cpu] [--bars one,callers32,...] [--rounds 5] [--seconds 3]
#                          [--bin DIR] [--out DIR] [--python python3] [--peer_site_packages DIR]
#
# Bars: on the CPU one, callers32, overload; on a GPU one, callers256, overload, large, peer. Any may be asked for by name.
# Prints a table and one JSON line for each bar (also in OUT/serving.jsonl); exit code 0 when every bar
# that could be measured was met.
set -u -o pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
device=cpu bars='' rounds=5 seconds=3 bin=$root/bin out='' python=python3 peer_site_packages=''
while [[ $# -gt 0 ]]; do
  case $1 in
    --device | --bars | --rounds | --seconds | --bin | --out | --python | --peer_site_packages)
      [[ $# -ge 2 ]] || { echo "$1: expected a value" >&2; exit 2; }
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    *) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
  esac
done
out=${out:-$(mktemp -d)}
mkdir -p "$out"
rm -f "$out"/*.json "$out"/*.port
export LD_LIBRARY_PATH="$root/lib:${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64"
ulimit -n 65536 2>/dev/null || true

# A weight is named after its shape.
if [[ $device == cpu ]]; then
  bars=${bars:-one,callers32,overload} main=384x1536 narrow=384x1536 shapes=(384x1536)
else
  bars=${bars:-one,callers256,overload,large,peer} main=4096x4096 narrow=4096x14336
  shapes=(384x1536 4096x4096 4096x14336 4096x28672)
fi
limits=(--max_receive_message_bytes=256MiB --max_send_message_bytes=256MiB)

pids=()
cleanup() {
  local pid
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null; done
  wait 2>/dev/null
}
trap cleanup EXIT

# start <name> <command...>: in the background, its log in OUT; waits until it has written its port and serves.
declare -A address_of=()
start() {
  local name=$1 pid i
  shift
  "$@" >"$out/$name.log" 2>&1 &
  pid=$!
  for ((i = 0; i < 1200; ++i)); do
    [[ -s $out/$name.port ]] && break
    if ! kill -0 "$pid" 2>/dev/null; then
      tail -n 5 "$out/$name.log" >&2
      return 1
    fi
    sleep 0.1
  done
  pids+=("$pid")
  address_of[$name]=127.0.0.1:$(cat "$out/$name.port")
  "$bin/awqctl" --address "${address_of[$name]}" healthcheck --wait 120 >/dev/null
}

start_awqd() {
  local name=$1
  shift
  start "$name" "$bin/awqd" --device "$device" --model_repository "$out/models" --address 127.0.0.1:0 \
    --port_file "$out/$name.port" "${limits[@]}" "$@" || { echo "awqd does not start" >&2; exit 1; }
}

# bench <bar> <server> <round> <argument...>: one measurement into OUT.
bench() {
  local bar=$1 server=$2 round=$3
  shift 3
  "$bin/awqctl" --address "${address_of[$server]}" bench --duration "$seconds" --warmup 1 \
    --json_file "$out/$bar.$server.$round.json" "$@" >"$out/$bar.$server.$round.txt" ||
    { echo "$bar against $server failed" >&2; return 1; }
}

# in_turns <bar> <servers> <argument...>: every round the other way round.
in_turns() {
  local bar=$1 round server servers
  read -ra servers <<<"$2"
  shift 2
  echo "measuring $bar: ${servers[*]}, $rounds rounds" >&2
  for ((round = 1; round <= rounds; ++round)); do
    for server in "${servers[@]}"; do bench "$bar" "$server" "$round" "$@"; done
    mapfile -t servers < <(printf '%s\n' "${servers[@]}" | tac)
  done
}

start_peer() {
  local extra=()
  [[ -n $peer_site_packages ]] && extra=(--site_packages "$peer_site_packages")
  start peer "$python" "$here/peer/server.py" --model "$out/models/bench" --descriptors "$bin/awqd.protoset" \
    --device "$device" --port_file "$out/peer.port" "${extra[@]}" || return 1
  # It must compute the same before it is raced.
  local server
  for server in awqd peer; do
    "$bin/awqctl" --address "${address_of[$server]}" matmul bench "w$main" --random 3 -o "$out/$server.npy" \
      >/dev/null || return 1
  done
  "$bin/awqctl" compare "$out/awqd.npy" "$out/peer.npy" --max_relative_error 5e-3
}

bar_one() { in_turns one "awqd echo" --weight "bench/w$main" --concurrency 1 --channels 1; }
bar_callers32() { in_turns callers32 "awqd echo" --weight bench/w384x1536 --concurrency 32; }
bar_callers256() {
  in_turns callers256 "awqd echo" --weight "bench/w$main" --concurrency 256 --channels 16 --health
}
bar_large() {
  in_turns large "awqd echo" --weight bench/w4096x28672 --tokens 2048 --concurrency 1 --channels 1
}
bar_peer() {
  if ! start_peer; then
    echo "peer: skipped, it does not run here (above, and peer/requirements.txt)" >&2
    return
  fi
  in_turns peer "awqd peer" --weight "bench/w$main" --concurrency 256 --channels 16
}
# More than the server can do, with default flags and a deadline of five times what a lone request takes.
bar_overload() {
  local load=(--weight "bench/w$narrow" --tokens 64 --channels 16) percent round deadline rate
  echo "measuring overload, $rounds rounds" >&2
  for ((round = 1; round <= rounds; ++round)); do
    bench alone awqd "$round" "${load[@]}" --concurrency 1 || return
    bench peak awqd "$round" "${load[@]}" --concurrency 32 || return
    deadline=$(point alone "$round" 'p["latency"]["p50_us"] * 5 / 1000')
    for percent in 125 150 300 1000; do
      rate=$(point peak "$round" "p['requests_per_s'] * $percent / 100")
      bench "overload$percent" awqd "$round" "${load[@]}" --max_in_flight 8192 --health --rate "$rate" --deadline_ms "$deadline"
    done
  done
}

# point <bar> <round> <expression>: of p, what was measured of awqd.
point() {
  "$python" -c 'import json, sys; p = json.load(open(sys.argv[1]))["points"][0]; print(eval(sys.argv[2]))' \
    "$out/$1.awqd.$2.json" "$3"
}

weights=() echoed=()
for shape in "${shapes[@]}"; do
  weights+=("w$shape=$shape")
  echoed+=(--weight "w$shape=$shape")
done
rm -rf "$out/models"
"$python" "$here/make_checkpoint.py" "$out/models/bench" "${weights[@]}" || exit 1
start_awqd awqd
start echo "$bin/awqd_echo" --address 127.0.0.1:0 --port_file "$out/echo.port" "${echoed[@]}" -- "${limits[@]}" || exit 1
for bar in ${bars//,/ }; do
  declare -F "bar_$bar" >/dev/null || { echo "--bars: got $bar" >&2; exit 2; }
  "bar_$bar"
done
"$python" "$here/serving_report.py" "$out" "$bars" "$device"
