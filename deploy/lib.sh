# shellcheck shell=bash
# Shared by deploy/quickstart.sh and tests/run.sh: installing packages, finding CUDA, configuring and building.

say() { printf '%s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# packages_of <section>...: the package names of deploy/packages.txt.
packages_of() {
  local section
  for section in "$@"; do
    awk -v want="[$section]" '/^\[/ { on = ($1 == want); next } on && /^[a-z0-9]/ { print $1 }' \
      "$ROOT/deploy/packages.txt"
  done
}

# missing_packages <package>...: those that dpkg does not have installed.
missing_packages() {
  local package
  for package in "$@"; do
    [[ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" == installed ]] || say "$package"
  done
}

# install_packages <section>...: installs what is missing and says what; does nothing when all is there.
install_packages() {
  local wanted missing as_root=()
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    warn "no apt here; the build needs what deploy/packages.txt lists"
    return 0
  fi
  mapfile -t wanted < <(packages_of "$@")
  mapfile -t missing < <(missing_packages "${wanted[@]}")
  [[ ${#missing[@]} -gt 0 ]] || return 0
  if [[ $EUID -ne 0 ]]; then
    command -v sudo >/dev/null ||
      die "these packages are missing and neither root nor sudo is at hand to install them: ${missing[*]}"
    as_root=(sudo)
  fi
  say "Installing with apt: ${missing[*]}"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq >/dev/null ||
    warn "apt-get update failed; going on with the package lists that are here"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${missing[@]}" >/dev/null || die "apt-get could not install: ${missing[*]}"
}

# apt_mirror <codename>: where apt has the main packages of that release from, or nothing.
apt_mirror() {
  # shellcheck disable=SC2016  # the dollar signs are apt's
  apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(SITE)' 'Created-By: Packages' 2>/dev/null |
    awk -v want="$1" '$1 == want && $2 == "main" { print $3; exit }'
}

# find_nvcc: prints the CUDA compiler's path, or fails.
find_nvcc() {
  command -v nvcc && return 0
  [[ -x /usr/local/cuda/bin/nvcc ]] && say /usr/local/cuda/bin/nvcc
}

# gpu_architectures: what to compile for, for the GPUs of this machine as the driver names them; fails without one
# of compute capability 7.5 or newer. Code for 8.0 also runs on 8.6 and 8.9. A GPU newer than 9.0 translates portable
# code when it starts: that for 9.0, because code for less knows no clusters.
gpu_architectures() {
  local caps list
  caps="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null)" || return 1
  list="$(awk -F. '
    $1 == 7 && $2 >= 5 { print "75-real" }
    $1 == 8 { print "80-real" }
    $1 == 9 { print "80-real"; print "90a-real" }
    $1 > 9 { print "90-virtual" }' <<<"$caps" | sort -u | paste -sd ';')"
  [[ -n "$list" ]] && say "$list"
}

# build_jobs: one a core, fewer where memory is short: a file of generated gRPC code takes about 1 GB to compile.
build_jobs() {
  local cores memory_kb jobs
  cores="$(nproc)"
  memory_kb="$(awk '/MemAvailable/ { print $2 }' /proc/meminfo)"
  jobs=$((memory_kb / 1300000))
  ((jobs < 1)) && jobs=1
  say $((jobs < cores ? jobs : cores))
}

# use_ccache: has a compiler cache serve what it holds, where one is installed. Paths count from this checkout, so that
# what one checkout compiled serves another; a precompiled header counts by its content. What a file includes is what the
# compiler says when it has compiled it, so that what is not in the cache is not preprocessed once more for it.
use_ccache() {
  command -v ccache >/dev/null || return 0
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
  export CCACHE_BASEDIR="$ROOT" CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_DEPEND=1
}

# configure <preset> <cmake argument>...: quiet unless it fails.
configure() {
  local preset="$1" log="$ROOT/build/$1-configure.log"
  shift
  mkdir -p "$ROOT/build"
  use_ccache
  (cd "$ROOT" && cmake --preset "$preset" "$@") >"$log" 2>&1 || {
    tail -n 40 "$log" >&2
    die "cmake could not configure preset $preset (full log: $log)"
  }
}

# build <preset> <target>...: shows progress on a terminal and the failing command otherwise. A compiler that crashed
# gets a second try, once: GCC 12 does so about once in 500 files while it reads a precompiled header.
build() {
  local preset="$1" log="$ROOT/build/$1-build.log" command
  shift
  command=(cmake --build "$ROOT/build/$preset" -j "$(build_jobs)" --target "$@")
  if [[ -t 1 ]]; then
    "${command[@]}" || die "the build failed"
    return
  fi
  "${command[@]}" >"$log" 2>&1 && return
  if grep -q "internal compiler error" "$log"; then
    warn "the compiler crashed, and is tried once more"
    "${command[@]}" >"$log" 2>&1 && return
  fi
  grep -A 30 -m 3 -E "^FAILED:|error:" "$log" >&2 || tail -n 40 "$log" >&2
  die "the build failed (full log: $log)"
}

# start_server <folder with awqd and awqctl> <model repository> <log> <option>...: starts it on port $port of this
# machine, a free one unless it is set, and waits for health. Sets server_pid and address; on failure prints the log and fails.
start_server() {
  local bin="$1" models="$2" log="$3"
  shift 3
  "$bin/awqd" --address="127.0.0.1:${port:-0}" --model_repository="$models" "$@" >"$log" 2>&1 &
  server_pid=$!
  address=""
  for _ in $(seq 300); do
    address="$(sed -n 's/.*listening on \(127\.0\.0\.1:[0-9][0-9]*\).*/\1/p' "$log" | head -n 1)"
    if [[ -n "$address" ]] || ! kill -0 "$server_pid" 2>/dev/null; then break; fi
    sleep 0.1
  done
  if [[ -z "$address" ]] || ! "$bin/awqctl" --address "$address" healthcheck --wait 60 >/dev/null; then
    cat "$log" >&2
    return 1
  fi
}

# port_taken <port>: whether something listens there on this machine.
port_taken() {
  (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

# stop_server: SIGTERM, and its exit status.
stop_server() {
  kill -TERM "$server_pid"
  wait "$server_pid"
}
