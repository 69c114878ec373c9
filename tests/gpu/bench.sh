#!/usr/bin/env bash
# The GPU bench campaign: every row over the layer shapes of Llama-3 8B and 70B, with the floors and
# cuBLASLt of the same run. About four minutes of GPU time; narrow it with the flags.
#
#   tests/gpu/bench.sh [--quick] [--shapes 4096x4096,...] [--m 1,16,...] [--rows substring,...]
#                      [--device cuda:0] [--bin DIR] [--out FILE]
#
# The table goes to standard output, JSON lines to FILE (default: bench.jsonl).
set -u -o pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
shapes=4096x4096,4096x6144,4096x14336,4096x28672,14336x4096,8192x8192,8192x28672
m=1,2,4,8,16,32,64,128,256,512,1024,2048,4096
# The fast rows; sm80/plain_* serve odd schemes and take milliseconds.
rows=qmatmul,dequantize_w4,dense/
device=cuda:0
bin=$root/bin
out=bench.jsonl

while [[ $# -gt 0 ]]; do
  case $1 in
    --quick) shapes=4096x4096,4096x28672,14336x4096; m=1,16,64,256,1024; shift ;;
    --shapes | --m | --rows | --device | --bin | --out)
      [[ $# -ge 2 ]] || { echo "$1: expected a value" >&2; exit 2; }
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2 ;;
  esac
done

export LD_LIBRARY_PATH="$root/lib:${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64"
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw --format=csv,noheader || exit 1
"$bin/awqd_bench" "--device=$device" "--shapes=$shapes" "--m=$m" "--rows=$rows" |
  tee >(grep '^{' >"$out") | grep -v '^{'
