#!/usr/bin/env bash
# Builds the CPU image from the Dockerfile and runs it as its user on a read-only root file system: health, a
# matmul, SIGTERM, exit status 0. Without a Docker engine: buildah with chroot isolation, on a base image that
# debootstrap makes from this machine's apt mirror. Status 77 is a skip; the last line says why.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
work="$ROOT/build/docker"
port=18001

skip() { echo "$*"; exit 77; }
fail() { echo "error: $*"; exit 1; }
for tool in buildah debootstrap unshare apt-get; do
  command -v "$tool" >/dev/null || skip "$tool is not installed"
done
[[ $EUID -eq 0 ]] || skip "debootstrap and chroot isolation need root"
unshare --mount true 2>/dev/null || skip "mount namespaces are not allowed here"

mkdir -p "$work"
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
buildah() { command buildah --root "$work/storage" --runroot "$work/run" "$@"; }

# make_base: image awqd-base from the release and the mirror that this machine's own packages come from.
make_base() {
  local codename mirror container
  buildah inspect --type image localhost/awqd-base >/dev/null 2>&1 && return 0
  codename="$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)"
  # shellcheck disable=SC2016  # the dollar signs are apt's
  mirror="$(apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(SITE)' 'Created-By: Packages' |
    awk -v want="$codename" '$1 == want && $2 == "main" { print $3; exit }')"
  [[ -n "$mirror" ]] || skip "apt names no mirror of $codename"
  rm -rf "$work/base"
  debootstrap --variant=minbase --include=ca-certificates "$codename" "$work/base" "$mirror" >"$work/debootstrap.log" 2>&1 ||
    skip "debootstrap could not fetch $codename from the mirror (log: $work/debootstrap.log)"
  # Packages inside come the same way as outside.
  cp -r /etc/apt/apt.conf.d /etc/apt/sources.list.d "$work/base/etc/apt/"
  container="$(buildah from scratch)"
  buildah add -q "$container" "$work/base" / >/dev/null
  buildah commit -q --rm "$container" localhost/awqd-base >/dev/null
  rm -rf "$work/base"
}

# config <template>: a field of the built image's configuration.
config() { buildah inspect --type image --format "$1" localhost/awqd-cpu; }

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
  container="$(buildah from localhost/awqd-cpu)"
  image_root="$(buildah mount "$container")"
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
buildah build --format docker --layers --build-arg BASE=localhost/awqd-base --build-arg RUNTIME=localhost/awqd-base \
  -t localhost/awqd-cpu "$ROOT" >"$work/build.log" 2>&1 || { tail -n 40 "$work/build.log"; fail "the image does not build"; }
echo "image built after $SECONDS s"
check_config
run_image
echo "docker test: ok after $SECONDS s"
