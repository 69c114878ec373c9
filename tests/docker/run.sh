#!/usr/bin/env bash
# Builds the CPU image from the Dockerfile and runs it as its user on a read-only root file system: health, a
# matmul, SIGTERM, exit status 0. Without a Docker engine: buildah with chroot isolation, on a base image that
# debootstrap makes from this machine's apt mirror. Status 77 is a skip; the last line says why.
# usage: run.sh [newer]     (newer: the image with gRPC 1.83, on Debian 13)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"
grpc="${1:-distribution}"
work="$ROOT/build/docker"
port=18001

skip() { echo "$*"; exit 77; }
fail() { echo "error: $*"; exit 1; }
for tool in buildah debootstrap unshare apt-get; do
  command -v "$tool" >/dev/null || skip "$tool is not installed"
done
[[ $EUID -eq 0 ]] || skip "debootstrap and chroot isolation need root"
unshare --mount true 2>/dev/null || skip "mount namespaces are not allowed here"
case "$grpc" in
  distribution) codename="$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)" library="" ;;
  newer)
    codename=trixie library=libgrpc++.so.1.83
    [[ "$(dpkg --print-architecture)" == amd64 ]] || skip "the recipe with gRPC 1.83 is for amd64" ;;
  *) fail "got \"$grpc\", expected newer or nothing" ;;
esac
base="localhost/awqd-base-$codename" image="localhost/awqd-cpu-$grpc"

mkdir -p "$work"
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
buildah() { command buildah --root "$work/storage" --runroot "$work/run" "$@"; }

# make_base: the base image, of the mirror that this machine's own packages come from, which has all releases.
make_base() {
  local mirror container
  buildah inspect --type image "$base" >/dev/null 2>&1 && return 0
  mirror="${DEBIAN_MIRROR:-$(apt_mirror "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)")}"
  [[ -n "$mirror" ]] || skip "apt names no mirror here; DEBIAN_MIRROR can"
  rm -rf "$work/base"
  debootstrap --variant=minbase --include=ca-certificates "$codename" "$work/base" "$mirror" >"$work/debootstrap.log" 2>&1 ||
    skip "debootstrap could not fetch $codename from the mirror (log: $work/debootstrap.log)"
  # Packages inside come the same way as outside.
  cp -r /etc/apt/apt.conf.d "$work/base/etc/apt/"
  [[ "$grpc" == newer ]] || cp -r /etc/apt/sources.list.d "$work/base/etc/apt/"
  container="$(buildah from scratch)"
  buildah add -q "$container" "$work/base" / >/dev/null
  buildah commit -q --rm "$container" "$base" >/dev/null
  rm -rf "$work/base"
}

# config <template>: a field of the built image's configuration.
config() { buildah inspect --type image --format "$1" "$image"; }

check_config() {
  [[ "$(config '{{.Docker.Config.User}}')" == 65532:65532 ]] || fail "the image's user is not 65532:65532"
  [[ "$(config '{{.Docker.Config.Entrypoint}}')" == '[/opt/awqd/bin/awqd]' ]] || fail "the entry point is not in exec form"
  [[ "$(config '{{index .Docker.Config.Healthcheck.Test 0}}')" == CMD ]] || fail "no health check in exec form"
  [[ "$(config '{{.Docker.Config.Env}}')" == *AWQD_ADDRESS=0.0.0.0:8001* ]] || fail "it does not listen where published ports arrive"
  [[ "$(config '{{.Docker.Config.ExposedPorts}}')" == *8001/tcp* ]] || fail "port 8001 is not exposed"
}

# in_image <command>...: runs it in the image's root, read-only, as the image's user. The shell is replaced, so that a
# signal sent to this process reaches the command.
in_image() {
  # shellcheck disable=SC2016  # expanded by the inner shell
  exec unshare --mount --propagation=private sh -c '
    root="$1"; shift
    mount --bind "$root" "$root" && mount -o remount,bind,ro "$root"
    mount --bind /dev "$root/dev" && mount --rbind /proc "$root/proc"
    exec chroot --userspec=65532:65532 "$root" "$@"' in_image "$image_root" "$@"
}

run_image() {
  local container server status=0
  container="$(buildah from "$image")"
  image_root="$(buildah mount "$container")"
  [[ -z "$library" || -e "$image_root/opt/awqd/lib/$library" ]] || fail "the image has no $library"
  trap 'buildah rm "$container" >/dev/null' RETURN
  (in_image /opt/awqd/bin/awqd --address=127.0.0.1:$port --model_repository=/opt/awqd/models) >"$work/server.log" 2>&1 &
  server=$!
  for _ in $(seq 60); do
    status=0
    (in_image /opt/awqd/bin/awqctl --address 127.0.0.1:$port healthcheck) >"$work/health.log" 2>&1 || status=$?
    [[ $status -eq 0 ]] && break
    kill -0 "$server" 2>/dev/null || { cat "$work/server.log"; fail "the server ended before it was healthy"; }
    sleep 0.5
  done
  [[ $status -eq 0 ]] || { cat "$work/server.log" "$work/health.log"; fail "the server did not become healthy in 30 s"; }
  # The subshell became the server, so its number is the server's.
  [[ "$(stat -c %u "/proc/$server")" == 65532 ]] || fail "the server does not run as user 65532"
  (in_image /bin/sh -c 'touch /probe 2>/dev/null || touch /tmp/probe 2>/dev/null') && fail "the root file system is writable"
  (in_image /opt/awqd/bin/awqctl --address 127.0.0.1:$port matmul all-MiniLM-L6-v2-awq \
    encoder.layer.0.attention.self.query --random 4) || fail "the call did not succeed"
  kill -TERM "$server"
  status=0
  wait "$server" || status=$?
  [[ $status -eq 0 ]] || { cat "$work/server.log"; fail "the server ended with status $status on SIGTERM"; }
}

make_base
echo "base image ready after $SECONDS s"
buildah build --format docker --layers --build-arg BASE="$base" --build-arg RUNTIME="$base" --build-arg GRPC="$grpc" \
  -t "$image" "$ROOT" >"$work/build.log" 2>&1 || {
  lacks="$(grep -m 1 'the mirror does not have it' "$work/build.log" || true)"
  [[ -z "$lacks" ]] || skip "$lacks"
  tail -n 40 "$work/build.log"
  fail "the image does not build"
}
echo "image built after $SECONDS s"
check_config
run_image
echo "docker test: ok after $SECONDS s"
