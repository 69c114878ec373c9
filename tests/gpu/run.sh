#!/usr/bin/env bash
# Tests on a GPU machine: from the folder of target gpu_bundle (bin/, lib/, tests/), or from a build
# directory's folder of binaries with --bin. Needs the driver; compute-sanitizer for its part.
#
#   tests/gpu/run.sh [--part core,decode,conformance,calls,composition,history,large,sanitizer,e2e,devices,measured] [--device cuda:0]
#                    [--time_box SECONDS] [--requests N] [--bin DIR] [--out DIR]
#
# Every part is named in the summary as passed, failed or skipped with the reason; the exit code is
# 0 only when no part failed and at least one ran.
set -u -o pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
parts=core,decode,conformance,calls,composition,history,large,sanitizer,e2e,devices
device=cuda:0
time_box=1800
requests=10000
bin=$root/bin
out=

usage() { sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

while [[ $# -gt 0 ]]; do
  case $1 in
    --part)
      [[ $# -ge 2 ]] || { echo "$1: expected a value" >&2; exit 2; }
      parts=$2
      shift 2
      ;;
    --device | --time_box | --requests | --bin | --out)
      [[ $# -ge 2 ]] || { echo "$1: expected a value" >&2; exit 2; }
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    -h | --help) usage; exit 0 ;;
    *) echo "got $1" >&2; usage >&2; exit 2 ;;
  esac
done
out=${out:-$(mktemp -d)}
mkdir -p "$out"
models=$out/models

# cuBLASLt is the GPU machine's own; the common places of the toolkit come last.
export LD_LIBRARY_PATH="$root/lib:${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64"
export AWQD_TEST_DEVICE=$device

deadline=$((SECONDS + time_box))
summary=()
failed=0
ran=0
server_pid=

cleanup() { if [[ -n $server_pid ]]; then kill "$server_pid" 2>/dev/null; wait "$server_pid" 2>/dev/null; fi; }
trap cleanup EXIT

left() { local s=$((deadline - SECONDS)); echo $((s > 0 ? s : 0)); }
skip() { summary+=("skipped  $1: $2"); echo "SKIPPED $1: $2"; }

# step <name> <command...>: one line of the summary, a log file, and the tail of the log on failure.
step() {
  local name=$1 begin=$SECONDS rc=0
  shift
  if [[ $(left) -lt 5 ]]; then skip "$name" "the time box of $time_box s is spent"; return 1; fi
  echo "== $name"
  local log=$out/${name//[^A-Za-z0-9]/_}.log
  if declare -F "$1" >/dev/null; then
    "$@" >"$log" 2>&1 || rc=$?  # timeout runs programs only; these call bounded ones
  else
    timeout "$(left)" "$@" >"$log" 2>&1 || rc=$?
  fi
  ran=$((ran + 1))
  # A suite in which every case was skipped has shown nothing.
  local skipped
  skipped=$(grep -c '^\[  SKIPPED \].*ms)$' "$log" || true)
  if [[ $rc -eq 0 ]] && grep -q '^\[==========\]' "$log" && grep -q '^\[  PASSED  \] 0 tests' "$log"; then
    rc=77
  fi
  grep -E '^\[  (PASSED|FAILED|SKIPPED) |requests, |ERROR SUMMARY|RACECHECK SUMMARY' "$log" | sort -u | head -20
  if [[ $rc -eq 0 ]]; then
    summary+=("passed   $name ($((SECONDS - begin)) s, $skipped cases skipped)")
    return 0
  fi
  failed=$((failed + 1))
  case $rc in
    77) summary+=("FAILED   $name: every case was skipped") ;;
    124) summary+=("FAILED   $name: out of time after $((SECONDS - begin)) s") ;;
    *) summary+=("FAILED   $name (exit code $rc)") ;;
  esac
  tail -n 40 "$log"
  return 1
}

have() { [[ -x $bin/$1 ]] || { skip "$1" "not in $bin"; return 1; }; }
run_test() { local name=$1; shift; have "$name" && step "$name" env "$@" "$bin/$name"; }

# The sm90a rows run on compute capability 9.0 alone; a suite that skips every case counts as failed.
is_hopper() {
  local got
  got=$(nvidia-smi -i "${device//cuda:/}" --query-gpu=compute_cap --format=csv,noheader | head -n 1)
  [[ $got == 9.0 ]] || { skip "$1" "got compute capability ${got:-unknown}, expected 9.0"; return 1; }
}

part_core() {
  local name
  for name in cuda_error_test cuda_slabs_test gpu_device_test gpu_dense_test; do run_test "$name" A=; done
  is_hopper gpu_tiles_test && run_test gpu_tiles_test A=
  is_hopper gpu_stream_k_test && run_test gpu_stream_k_test A=
  is_hopper gpu_float8_sums_test && run_test gpu_float8_sums_test A=
}

part_decode() {
  local path found=0
  for path in "$bin"/*dequant*_test "$bin"/*decode*_test "$bin"/*fragment*_test "$bin"/cuda_common*_test; do
    [[ -x $path ]] || continue
    found=1
    run_test "$(basename "$path")" A=
  done
  [[ $found -eq 1 ]] || skip decode "no decode test in $bin"
}

# Every row of GPUs x scheme x shape, in shards because the oracle's double arithmetic on the host takes longest. Rows of CPUs
# run wherever there is one. By MPS, where it starts, kernels of the shards run at the same time; else they wait for each other.
conformance_in_shards() {
  local count=$(($(nproc) / 2)) i rc=0 pids=() logs mps=0
  [[ $count -le 8 ]] || count=8
  logs=$(mktemp -d)
  if [[ -z ${CUDA_MPS_PIPE_DIRECTORY:-} ]] &&
    CUDA_MPS_PIPE_DIRECTORY=$logs CUDA_MPS_LOG_DIRECTORY=$logs nvidia-cuda-mps-control -d 2>/dev/null; then
    export CUDA_MPS_PIPE_DIRECTORY=$logs
    mps=1 count=$(($(nproc) * 3 / 4))
  fi
  [[ $count -ge 1 ]] || count=1
  for ((i = 0; i < count; ++i)); do
    AWQD_TEST_FULL=1 GTEST_TOTAL_SHARDS=$count GTEST_SHARD_INDEX=$i timeout "$(left)" \
      "$bin/conformance_test" --gtest_filter='-*/cpu_*' >"$logs/shard.$i" 2>&1 &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i" || rc=$?; done
  if ((mps)); then
    echo quit | nvidia-cuda-mps-control
    unset CUDA_MPS_PIPE_DIRECTORY
  fi
  cat "$logs"/shard.*
  rm -r "$logs"
  return "$rc"
}
part_conformance() {
  have conformance_test && step conformance_test conformance_in_shards
  # E4M3 of compute capability 8.9, whose instructions Hopper's compiler replaces.
  is_hopper "conformance_test as 8.9" && have conformance_test && step "conformance_test as 8.9" \
    env AWQD_CUDA_ARCH=89 AWQD_TEST_FULL=1 "$bin/conformance_test" --gtest_filter='*Float8*/sm80_qmatmul_float8_*'
  run_test kv4_test AWQD_TEST_DATA="$root/tests/data"
}
# Calls whose goldens are weights of the request, through a server of their own.
part_calls() {
  local name
  for name in blocks_e2e_test experts_e2e_test kv_e2e_test quantized_activations_e2e_test fp8_activations_e2e_test gpu_device_memory_test gpu_lease_test gpu_library_test; do
    run_test "$name" AWQD_TEST_DATA="$root/tests/data" AWQD_TEST_BIN="$bin"
  done
  if python3 -c 'import awqd, ml_dtypes, pytest, torch' 2>/dev/null; then
    have awqd && step "tensors of PyTorch" env AWQD_BUILD="$bin/.." python3 -m pytest -q -p no:cacheprovider "$root/tests/client/python/gpu_test.py"
  else
    skip "tensors of PyTorch" "PyTorch, pytest, ml_dtypes or awqd (client/python) is not installed"
  fi
}
# Random batches of everything that may merge: each answer is what it is alone. AWQD_TEST_COMPOSITION_SECONDS makes them
# longer.
part_composition() {
  run_test composition_test A=
  run_test composition_e2e_test AWQD_TEST_DATA="$root/tests/data" AWQD_TEST_BIN="$bin"
}
# Changes of models under calls: each answer is of a version that was live; and mixed calls, good and bad, that leave
# host and device memory as they found it. AWQD_TEST_HISTORY_SECONDS, AWQD_TEST_MIXED_CALLS and AWQD_TEST_MIXED_CLIENTS
# make them longer.
part_history() {
  run_test history_e2e_test AWQD_TEST_BIN="$bin"
  # Code that is loaded when it is first called would count as growth.
  run_test mixed_e2e_test AWQD_TEST_BIN="$bin" CUDA_MODULE_LOADING=EAGER
  # Callers beside clients that break the rules of rings; AWQD_TEST_RING_SECONDS.
  run_test ring_faults_e2e_test AWQD_TEST_BIN="$bin" CUDA_MODULE_LOADING=EAGER
}
part_large() { run_test conformance_large_test AWQD_TEST_FULL=1; }

part_sanitizer() {
  local tool=compute-sanitizer which cases name
  command -v $tool >/dev/null || tool=/usr/local/cuda/bin/compute-sanitizer
  [[ -x $(command -v $tool) ]] || { skip sanitizer "compute-sanitizer is not installed"; return; }
  # The fault test faults on purpose; freed pools are not leaks; cuBLASLt's own kernels are not ours to race.
  export AWQD_TEST_NO_FAULTS=1
  for which in memcheck racecheck initcheck synccheck; do
    have gpu_dense_test && step "$which gpu_dense_test" $tool --tool $which --error-exitcode 9 \
      "$bin/gpu_dense_test" --gtest_filter='*OneBadRow*'
    cases='*sm90a*_k96_n128_*:*AgreesWith*qmatmul_a16*_k1024_n136_*:*dense_matmul*_k64_n72_*:*sm80*_k256_n128_*'
    cases+=':*AgreesWith*sm80*_k256_n136_w8*:*AgreesWith*sm80*_k256_n136_w2*:*AgreesWith*sm80*_k512_n72_w3*'
    # racecheck counts the barriers of each thread, named ones too, to tell what lies between a store
    # and a load. Where the records along K are no multiple of a block's chains, its consumers pass
    # different numbers of them (H100, 2026-11-24: 59 hazards with three records, none with two or four).
    cases+=':*MatchesTheDefinition*sm80_qmatmul_a8_scaled*_k512_n136_*:*MatchesTheDefinition*sm90a*_k512_n136_*'
    cases+=':*ARowHasTheSameBits*w4g80z'
    [[ $which == racecheck ]] || cases+=':*sm80*_k32_n8_*:*sm80*_k96_n128_*'
    have conformance_test && step "$which conformance_test" $tool --tool $which --error-exitcode 9 \
      "$bin/conformance_test" --gtest_filter="${AWQD_SANITIZER_FILTER:-$cases}"
    # Nor does racecheck follow a warp whose first lane says for all of them, behind a __syncwarp,
    # that a slot of the ring was read: as soon as a ring is passed twice, each copy into it is a
    # hazard. With every lane saying so itself it finds none (H100, 2026-11-22: 100 and 0). Of
    # gpu_stream_k_test the consumers and the finisher pass different numbers of barriers.
    for name in gpu_tiles_test gpu_stream_k_test; do
      [[ $which != racecheck ]] && is_hopper "$which $name" && have $name &&
        step "$which $name" $tool --tool $which --error-exitcode 9 "$bin/$name"
    done
  done
  unset AWQD_TEST_NO_FAULTS
}

# The GPUs of $device, each once: "0,1".
gpus() { tr ',' '\n' <<<"${device//cuda:/}" | sort -un | paste -sd, -; }

# MiB in use on all devices of $device together.
memory_used() {
  nvidia-smi -i "$(gpus)" --query-gpu=memory.used --format=csv,noheader,nounits |
    awk '{ sum += $1 } END { print sum }'
}

# unloaded_memory <address>: a first load on a device sets up what stays there (code of kernels, workspaces), and a model
# may come to another device each time. So one of as many rounds as there are devices, and one more, must end with the
# memory that it began with.
unloaded_memory() {
  local round
  "$bin/awqctl" --address "$1" unload llama-layer || return 1
  for ((round = 0; round <= $(tr ',' '\n' <<<"$device" | wc -l); ++round)); do
    unload_round "$1" && return 0
  done
  return 1
}

unload_round() {
  local before after
  before=$(memory_used)
  "$bin/awqctl" --address "$1" load llama-layer || return 1
  echo "loaded: $(memory_used) MiB, without the model: $before MiB"
  # 108 MiB, less what each device's pool had kept of its last piece of 32 MiB.
  [[ $(memory_used) -gt $((before + 108 - 32 * $(tr ',' '\n' <<<"$device" | wc -l))) ]] ||
    { echo "loading took no device memory"; return 1; }
  "$bin/gpu_e2e" "$1" llama-layer 200 8 || return 1
  "$bin/awqctl" --address "$1" unload llama-layer || return 1
  after=$(memory_used)
  echo "after unload: $after MiB"
  [[ $after -le $before ]]
}

# demo_matches <address>: the demo checkpoint against its goldens, on both paths and bit for bit.
demo_matches() {
  local model=all-MiniLM-L6-v2-awq goldens=$root/tests/data/awq/goldens golden weight input path checked=0
  for golden in "$goldens"/*.matmul.npy; do
    weight=$(basename "$golden" .matmul.npy)
    input=$goldens/activations_384.npy
    [[ $weight == *.output.dense && $weight != *.attention.output.dense ]] && input=$goldens/activations_1536.npy
    for path in fused dequantize; do
      "$bin/awqctl" --address "$1" matmul "$model" "$weight" "$input" --path "$path" -o "$out/y.npy" &&
        "$bin/awqctl" compare "$out/y.npy" "$golden" --max_relative_error 1e-3 || return 1
      checked=$((checked + 1))
    done
  done
  for golden in "$goldens"/*.dequantized.npy; do
    weight=$(basename "$golden" .dequantized.npy)
    "$bin/awqctl" --address "$1" dequantize "$model" "$weight" -o "$out/w.npy" &&
      "$bin/awqctl" compare "$out/w.npy" "$golden" --bit_exact || return 1
    checked=$((checked + 1))
  done
  [[ $checked -ge 3 ]]
}

# formats_match <address>: the golden weights of every other format, on both paths; those of integers
# by INT8 activations too, bit for bit.
formats_match() {
  local x golden format name model weight path checked=0
  for x in "$root"/tests/data/*/goldens/*.activations.npy; do
    golden=${x%.activations.npy}
    name=${golden##*/} format=$(basename "$(dirname "$(dirname "$x")")")
    model=$format.${name%%.*} weight=${name#*.}
    weight=${weight#gguf.}  # of a model that is one file, "super-blocks.gguf"
    [[ $weight != safetensors.* ]] || model+=.safetensors weight=${weight#safetensors.}
    for path in fused dequantize; do
      "$bin/awqctl" --address "$1" matmul "$model" "$weight" "$x" --path "$path" -o "$out/y.npy" &&
        "$bin/awqctl" compare "$out/y.npy" "$golden.matmul.npy" --max_relative_error 1e-3 || return 1
    done
    checked=$((checked + 1))
    [[ -f $golden.int8_activations.npy ]] || continue
    "$bin/awqctl" --address "$1" matmul "$model" "$weight" "$golden.int8_activations.npy" -o "$out/y.npy" &&
      "$bin/awqctl" compare "$out/y.npy" "$golden.int8_matmul.npy" --bit_exact || return 1
  done
  # Models that stay loaded share the pool's pieces with the layer whose memory is counted later.
  for model in "$models"/*.*; do "$bin/awqctl" --address "$1" unload "$(basename "$model")" || return 1; done
  [[ $checked -ge 10 ]]
}

# experts_match <address>: products of experts and gated MLPs, and the 4-bit key/value cache, against goldens.
experts_match() {
  local goldens=$root/tests/data/experts/goldens routing path golden cache
  routing=(--expert_ids "$goldens/ids.npy")
  # matches <golden> <awqctl argument>...
  matches() {
    local golden=$1
    shift
    "$bin/awqctl" --address "$address" "$@" -o "$out/y.npy" &&
      "$bin/awqctl" compare "$out/y.npy" "$goldens/$golden.npy" --max_relative_error 1e-3
  }
  local address=$1 stack='moe.experts.*.gate_proj' router=(--router_weights "$goldens/router.npy")
  for path in fused dequantize; do
    matches grouped matmul experts.moe "$stack" "$goldens/x.npy" "${routing[@]}" --activation_function silu \
      --path $path || return 1
    matches grouped_summed matmul experts.moe "$stack" "$goldens/x.npy" "${routing[@]}" "${router[@]}" \
      --activation_function silu --path $path || return 1
    matches mlp mlp experts.moe 'moe.experts.*' "$goldens/x.npy" "${routing[@]}" --path $path || return 1
    matches mlp_summed mlp experts.moe 'moe.experts.*' "$goldens/x.npy" "${routing[@]}" "${router[@]}" \
      --path $path || return 1
    matches dense_mlp mlp experts.moe mlp "$goldens/x.npy" --path $path || return 1
  done
  for golden in fp16-64 fp32-80; do
    cache=$root/tests/data/kv4/goldens/$golden
    "$bin/awqctl" --address "$address" quantize-kv "$cache/x.npy" -o "$out/kv" || return 1
    # Their shapes differ, both headers are 128 bytes.
    cmp <(tail -c +129 "$out/kv.codes.npy") <(tail -c +129 "$cache/codes.npy") || return 1
  done
}

# start_server <models> [flag...]
start_server() {
  local models=$1
  shift
  rm -f "$out/port"
  "$bin/awqd" --device "$device" --address 127.0.0.1:0 --port_file "$out/port" \
    --model_repository "$models" "$@" >"$out/server.log" 2>&1 &
  server_pid=$!
  local i
  for ((i = 0; i < 600; ++i)); do
    [[ -s $out/port ]] && break
    kill -0 "$server_pid" 2>/dev/null || { tail "$out/server.log"; return 1; }
    sleep 0.1
  done
  [[ -s $out/port ]] || return 1
  for ((i = 0; i < 60; ++i)); do  # it may end because of a model
    "$bin/awqctl" --address "127.0.0.1:$(cat "$out/port")" healthcheck --wait 2 && return 0
    kill -0 "$server_pid" 2>/dev/null || { tail "$out/server.log"; return 1; }
  done
  return 1
}

stop_server() {
  kill -TERM "$server_pid"
  local rc=0
  wait "$server_pid" || rc=$?
  server_pid=
  [[ $rc -eq 0 ]] || { failed=$((failed + 1)); summary+=("FAILED   server stop (exit code $rc)"); tail "$out/server.log"; }
}

# write_models: writes the checkpoints for servers, once.
write_models() {
  local name demo
  for name in awqd awqctl gpu_e2e make_llama_layer; do have "$name" || return 1; done
  [[ ! -d $models/llama-layer ]] || return 0
  mkdir -p "$models"
  step "write the Llama layer" "$bin/make_llama_layer" "$models/llama-layer" || return 1
  for demo in "$root"/models/* "$root"/tests/data/awq/*; do
    [[ -f $demo/config.json && ! -e $models/$(basename "$demo") ]] && cp -r "$demo" "$models/"
  done
  for demo in "$root"/tests/data/*/*/{config.json,*.gguf}; do
    demo=$(dirname "$demo")
    name=$(basename "$(dirname "$demo")").$(basename "$demo")
    [[ $name == awq.* || $name == lora.* || -e $models/$name ]] || cp -r "$demo" "$models/$name"  # two files: parts of one
  done
  for demo in "$root"/tests/data/comfy/*.safetensors; do cp "$demo" "$models/comfy.${demo##*/}"; done
  for demo in "$root"/tests/data/*/*.gguf; do  # a file that is a model by itself
    name=$(basename "$(dirname "$demo")").$(basename "$demo" .gguf)
    mkdir -p "$models/$name" && cp "$demo" "$models/$name/"
  done
  return 0
}

# check_server <label> [flag...]: a server with these flags, from start to stop.
check_server() {
  local label=$1 address
  shift
  if ! start_server "$models" "$@"; then
    failed=$((failed + 1)); summary+=("FAILED   ${label}server start"); tail -n 20 "$out/server.log"
    cleanup
    server_pid=
    return
  fi
  address=127.0.0.1:$(cat "$out/port")
  step "${label}server status" "$bin/awqctl" --address "$address" status
  step "${label}plan of the Llama layer" "$bin/awqctl" --address "$address" models llama-layer
  if [[ -d $models/all-MiniLM-L6-v2-awq ]]; then
    step "${label}demo checkpoint" demo_matches "$address"
  else
    skip "${label}demo checkpoint" "not in the bundle"
  fi
  step "${label}experts, gated MLPs and KV4" experts_match "$address"
  step "${label}golden weights of every format" formats_match "$address"
  step "${label}$requests requests" "$bin/gpu_e2e" "$address" llama-layer "$requests" 16
  step "${label}load" bench_load "$address" && grep callers "$out/${label//[^A-Za-z0-9]/_}load.log"
  step "${label}memory after unload" unloaded_memory "$address"
  stop_server
}

part_e2e() {
  write_models || return
  check_server ""
}

# bench_load <address>: decode steps of many callers, then prefills of some, to compare between runs.
bench_load() {
  local weight=llama-layer/model.layers.0.mlp.down_proj
  "$bin/awqctl" --address "$1" bench --weight $weight --concurrency 256 --duration 5 &&
    "$bin/awqctl" --address "$1" bench --weight $weight --tokens 1024 --concurrency 8 --duration 5
}

# figure <file> <field> [object]: the first number of that name in a JSON file, or in that object of it.
figure() { tr -d '\n ' <"$1" | sed -E "s/.*${3:+\"$3\":\{[^\}]*}\"$2\":([0-9.]+).*/\1/"; }

# write_mixture: a layer of DeepSeek-V3's experts, once.
write_mixture() {
  [[ -d $out/mixtures/mixture ]] || "$bin/make_expert_stack" "$out/mixtures/mixture" 256 7168 2048
}

# ready <what> <start_server argument>...: starts a server, and tells how long that took.
ready() {
  local what=$1 begin
  begin=$(date +%s%N)
  shift
  start_server "$@" || return 1
  summary+=("measured $what: ready after $((($(date +%s%N) - begin) / 1000000)) ms")
}

# measure_replicas <list>: milliseconds from start to ready, and a load that keeps every device's batches full: 64 callers
# of 4 tokens, 64 tokens a batch, so that a device and not the transport is the limit.
measure_replicas() {
  local list
  write_mixture || return 1
  for list in cuda:0 cuda:0 "$1"; do  # the first start is for the page cache
    device=$list
    ready "replicas on $list" "$out/mixtures" --shard replicas --max_batch_tokens 64 || return 1
    "$bin/awqctl" --address "127.0.0.1:$(cat "$out/port")" bench --mlp 'mixture/model.layers.0.mlp.experts.*' --top_k 8 \
      --tokens 4 --concurrency 64 --duration 5 --json_file "$out/bench.json" || return 1
    summary+=("measured replicas on $list: $(figure "$out/bench.json" requests_per_s) requests/s")
    stop_server
  done
}

# expert_bits <file>: what the mixture of measure_spread makes of 16 tokens.
expert_bits() {
  "$bin/awqctl" --address "127.0.0.1:$(cat "$out/port")" mlp mixture 'model.layers.0.mlp.experts.*' --random 16 --top_k 8 \
    --seed 7 -o "$1"
}

# bench_experts <what>: the layer of experts of measure_spread, for one caller.
bench_experts() {
  local tokens
  for tokens in 1 16 64 256; do
    "$bin/awqctl" --address "127.0.0.1:$(cat "$out/port")" bench --mlp 'mixture/model.layers.0.mlp.experts.*' --top_k 8 \
      --tokens $tokens --concurrency 1 --duration 3 --json_file "$out/bench.json" || return 1
    summary+=("measured $1: $tokens tokens, top 8: answered in $(figure "$out/bench.json" p50_us latency) us, computed in \
$(figure "$out/bench.json" mean_us compute)")
  done
}

# measure_spread <list>: the layer of experts, of which no device of the list may hold more than 3/4: it is spread, has
# the bits of one device that may hold all, and is measured.
measure_spread() {
  local mixture=$out/mixtures limit=4600MiB
  write_mixture || return 1
  device=cuda:0
  ready "spread, on $device alone" "$mixture" && expert_bits "$out/one.npy" || return 1
  bench_experts "on $device alone" || return 1
  stop_server
  if start_server "$mixture" --device_memory_limit $limit; then
    echo "one device holds it within $limit: the limit shows nothing"
    return 1
  fi
  wait "$server_pid" 2>/dev/null
  server_pid=
  device=$1
  ready "spread on $1" "$mixture" --shard experts --device_memory_limit $limit && expert_bits "$out/spread.npy" || return 1
  "$bin/awqctl" compare "$out/spread.npy" "$out/one.npy" --bit_exact || return 1
  bench_experts "spread on $1" || return 1
  stop_server
}

# hold_memory <GPU> <MiB to leave>: holds all memory but that of a GPU from another process; its id in $holder.
hold_memory() {
  python3 - "$1" "$2" >"$out/holder" 2>&1 <<'PYTHON' &
import sys, time, torch
device = torch.device("cuda", int(sys.argv[1]))
free = torch.cuda.mem_get_info(device)[0]
held = torch.empty(free - (int(sys.argv[2]) + 512 << 20), dtype=torch.uint8, device=device)
rest = torch.cuda.mem_get_info(device)[0] - (int(sys.argv[2]) << 20)  # once its own code is there
more = torch.empty(max(rest, 1), dtype=torch.uint8, device=device)
print("held", flush=True)
time.sleep(600)
PYTHON
  holder=$!
  local i
  for ((i = 0; i < 300; ++i)); do
    grep -q held "$out/holder" && return 0
    kill -0 "$holder" 2>/dev/null || break
    sleep 0.1
  done
  cat "$out/holder"
  return 1
}

# full_device <list>: another process takes the memory of the list's last GPU. A reload is refused and names the GPU, the
# version that is there goes on, and once the memory is free again the reload works.
full_device() {
  local address rc=0 holder
  start_server "$models" --shard replicas || return 1
  address=127.0.0.1:$(cat "$out/port")
  hold_memory "${1##*:}" 64 || return 1
  "$bin/awqctl" --address "$address" load llama-layer 2>&1 | tee "$out/refused"
  grep -q "RESOURCE_EXHAUSTED.*${1##*,}" "$out/refused" || rc=1
  "$bin/gpu_e2e" "$address" llama-layer 1000 16 || rc=1
  kill "$holder"
  wait "$holder" 2>/dev/null
  "$bin/awqctl" --address "$address" load llama-layer || rc=1
  "$bin/gpu_e2e" "$address" llama-layer 1000 16 || rc=1
  stop_server
  return $rc
}

# Loses devices of a list of several GPUs.
lose_devices() {
  [[ $(gpus) == *,* ]] || return 0
  have gpu_lost_device_test && step "a GPU of $1 faults" env AWQD_TEST_DEVICE="$1" "$bin/gpu_lost_device_test"
  if python3 -c 'import torch' 2>/dev/null; then
    step "a GPU of $1 is full" full_device "$1"
    [[ -n $server_pid ]] && cleanup && server_pid=
  else
    skip "a GPU of $1 is full" "PyTorch is not installed"
  fi
  return 0
}

# on_devices <list>: every way to share them, then what they are for.
on_devices() {
  local shard one=$device
  device=$1
  for shard in replicas columns models experts; do check_server "$shard on $1: " --shard "$shard"; done
  lose_devices "$1"
  measure_devices "$1"
  device=$one
}

measure_devices() {
  have make_expert_stack || return
  step "replicas measured on $1" measure_replicas "$1"
  step "experts spread over $1" measure_spread "$1"
  [[ -n $server_pid ]] && cleanup && server_pid=
  return 0
}

# One GPU as two devices; then the GPUs of the machine, two and all of them. Or the list that --device names.
part_devices() {
  local count i list=cuda:0 one=$device
  count=$(nvidia-smi -L | grep -c '^GPU ')
  write_models || return
  if [[ $device == *,* ]]; then on_devices "$device"; return; fi
  device=cuda:0
  check_server "one of $count: "
  device=$one
  on_devices cuda:0,cuda:0
  [[ $count -ge 2 ]] || { skip "devices on several GPUs" "needs two GPUs, got $count"; return; }
  for ((i = 1; i < count; ++i)); do
    list+=,cuda:$i
    [[ $i -eq 1 || $((i + 1)) -eq $count ]] && on_devices "$list"
  done
}

# Measures the loss of a GPU in the list that --device names, and the gain of sharing: part devices without its checks.
part_measured() {
  write_models || return
  lose_devices "$device"
  measure_devices "$device"
}

nvidia-smi --query-gpu=index,name,driver_version,memory.total,memory.used --format=csv,noheader ||
  { echo "no GPU: nvidia-smi failed" >&2; exit 1; }
for part in ${parts//,/ }; do
  declare -F "part_$part" >/dev/null || { echo "--part: got $part" >&2; exit 2; }
  "part_$part"
done

echo
echo "== summary (logs in $out)"
printf '%s\n' "${summary[@]}"
[[ $failed -eq 0 && $ran -gt 0 ]]
