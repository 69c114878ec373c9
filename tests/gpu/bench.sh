#!/usr/bin/env bash
# The GPU bench campaign: what a server would run for the layer shapes of Llama-3 8B and 70B, with the
# floors and cuBLASLt of the same run, then the same with --batch_invariant. About two minutes of GPU
# time; narrow it with the flags.
#
#   tests/gpu/bench.sh [--quick | --sweep | --in_turn | --tiles] [--shapes 4096x4096,...] [--m 1,16,...]
#                      [--rows substring,...] [--x fp16|bf16] [--library] [--device cuda:0] [--bin DIR] [--out FILE]
#
# JSON lines go to FILE (default: bench.jsonl), tables to FILE.md and the plot to FILE.svg. With --rows
# every row of those names runs, whether a server would choose it or not. --library: libawqd beside the rows. --sweep: the product alone, at
# counts of tokens on both sides of every tile's edge and between. --in_turn: the layers of each
# model (or --shapes) one after the other, without and with --batch_invariant, to standard output alone.
# --tiles: every tile that the choice finds within a quarter of the fastest, beside what it expected, to
# FILE and standard output: what kernels/cuda/sm90a/tile_list.h is fitted to. 4300 cases; narrow it.
set -u -o pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
shapes=4096x4096,4096x6144,4096x28672,14336x4096,8192x8192,8192x10240,8192x57344,28672x8192
m=1,2,4,8,16,32,64,128,256,512,1024,2048,4096
rows=
sweep=0
in_turn=0
tiles=0
served=--served
x=fp16
device=cuda:0
bin=$root/bin
out=bench.jsonl

while [[ $# -gt 0 ]]; do
  case $1 in
    --quick) shapes=4096x4096,4096x28672,14336x4096; m=1,16,64,256,1024; shift ;;
    --sweep)
      sweep=1
      m=1,2,4,8,9,12,16,17,24,25,32,33,40,41,48,49,56,57,64,65,72,73,80,81,88,89,96,97,104,105,112,113,120,121
      m+=,128,129,136,144,145,152,160,161,176,177,192,193,208,209,224,225,240,241,256,257,272,273,288,304,320
      m+=,321,352,353,384,385,408,409,448,449,480,512,513,544,545,576,577,608,609,640,641,704,768,896,1024
      m+=,1025,1152,1280,1536,1792,2048,2049,2304,2560,3072,3584,4096
      shift
      ;;
    --library) served=--library; shift ;;
    --in_turn)
      in_turn=1
      shapes="4096x6144,4096x4096,4096x28672,14336x4096 8192x10240,8192x8192,8192x57344,28672x8192"
      m=1,16,24,32,64,96,128,256
      shift
      ;;
    --tiles)
      tiles=1
      m=17,24,32,40,48,56,64,72,80,96,104,112,128,144,160,176,192,208,224,256,288,320,384,448,512,640,704,768,1024
      shift
      ;;
    --shapes | --m | --rows | --x | --device | --bin | --out)
      [[ $# -ge 2 ]] || { echo "$1: expected a value" >&2; exit 2; }
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    *) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
  esac
done

export LD_LIBRARY_PATH="$root/lib:${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw --format=csv,noheader || exit 1
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)

# bench [flag...]: its table to standard output, everything to FILE.log.
bench() { "$bin/awqd_bench" "--device=$device" "--shapes=$shapes" "--x=$x" "$@" | tee -a "$out.log" | grep -v '^{'; }

: >"$out.log"
if ((in_turn)); then
  read -ra models <<<"$shapes"
  for shapes in "${models[@]}"; do
    bench --in_turn "--m=$m" || exit 1
    bench --in_turn "--m=$m" --batch_invariant || exit 1
  done
  exit 0
fi
if ((tiles)); then
  bench --tiles "--m=$m" || exit 1
  bench --tiles "--m=$m" --batch_invariant || exit 1
  grep '^{' "$out.log" >"$out"
  exit 0
fi
if [[ -n $rows ]]; then
  bench "--m=$m" "--rows=$rows" || exit 1
elif ((sweep)); then
  bench "$served" "--m=$m" --rows=qmatmul || exit 1
else
  bench "$served" "--m=$m" --rows=qmatmul,dequantize || exit 1
  bench --served "--m=$m" --rows=qmatmul --floors=none --batch_invariant || exit 1
  many=$(tr ',' '\n' <<<"$m" | awk '$1 >= 256' | paste -sd,)
  if [[ -n $many ]]; then bench --served "--m=$many" --rows=dense/ || exit 1; fi
fi
grep '^{' "$out.log" >"$out"
command -v python3 >/dev/null || { echo "no tables and no plot: python3 is not installed" >&2; exit 0; }
python3 "$root/tests/bench/gpu_report.py" "$out" --svg "$out.svg" --title "$gpu, $(date +%F), ${x^^}" >"$out.md"
