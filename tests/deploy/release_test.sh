#!/usr/bin/env bash
# The contents of a release packed from this build, and the tags that may be released.
# usage: release_test.sh <build directory> <source directory>
set -euo pipefail
ROOT="$(cd "$2" && pwd)"
# shellcheck source=deploy/lib.sh
source "$ROOT/deploy/lib.sh"
command -v dpkg-shlibdeps >/dev/null || { echo "dpkg-dev is not installed"; exit 77; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
version="$(sed -n 's/^project(awqd VERSION \([0-9.]*\).*/\1/p' "$ROOT/CMakeLists.txt")"

# Without a tool for images, the script says so.
mkdir "$work/bin"
ln -s /usr/bin/* "$work/bin/"
rm -f "$work/bin/docker" "$work/bin/buildah"
SOURCE_DATE_EPOCH=1000000000 PATH="$work/bin" "$ROOT/deploy/release.sh" --pack "$1" --image scratch --out "$work/out" >"$work/said"
grep -q "^no image: neither buildah nor docker" "$work/said" || die "without a tool for images, got: $(cat "$work/said")"
(cd "$work/out" && sha256sum --quiet -c SHA256SUMS) || die "SHA256SUMS does not agree with the files"
listed="$(awk '{ print $2 }' "$work/out/SHA256SUMS" | sort)"
[[ "$listed" == "$(cd "$work/out" && find . -type f ! -name SHA256SUMS -printf '%P\n' | sort)" ]] ||
  die "SHA256SUMS does not list every file: $listed"
debian="$(dpkg --print-architecture)"
for file in "awqd-server_${version}_$debian.deb" "awqd-client_${version}_$debian.deb" "libawqd-dev_${version}_$debian.deb" \
  "awqd-$version-linux-$(uname -m).tar.gz" "awqd-$version.spdx.json"; do
  grep -qx "$file" <<<"$listed" || die "the release lacks $file, and has: $listed"
done

# The image, on no base: its user, its entry point, and the folder's own files.
if command -v buildah >/dev/null && [[ $EUID -eq 0 ]]; then
  printf '[storage]\ndriver = "vfs"\ngraphroot = "%s/storage"\nrunroot = "%s/run"\n' "$work" "$work" >"$work/storage.conf"
  CONTAINERS_STORAGE_CONF="$work/storage.conf" BUILDAH_ISOLATION=chroot \
    "$ROOT/deploy/release.sh" --pack "$1" --image scratch --out "$work/with_image" >/dev/null
  python3 - "$work/with_image/awqd-$version-image.tar.gz" <<'PYTHON'
import io, json, sys, tarfile
with tarfile.open(sys.argv[1]) as image:
    read = lambda name: image.extractfile(name).read()
    entry, = json.loads(read("manifest.json"))
    config = json.loads(read(entry["Config"]))["config"]
    files = {name for layer in entry["Layers"] for name in tarfile.open(fileobj=io.BytesIO(read(layer))).getnames()}
assert config["User"] == "65532:65532" and config["Entrypoint"] == ["/opt/awqd/bin/awqd"], config
assert {"opt/awqd/bin/awqd", "opt/awqd/bin/awqctl"} <= files, sorted(files)[:20]
PYTHON
  grep -q " awqd-$version-image.tar.gz\$" "$work/with_image/SHA256SUMS" || die "SHA256SUMS lacks the image"
fi

# The SBOM names every library that the folder carries, in the version that is installed.
python3 - "$work/out" "$version" <<'PYTHON'
import json, pathlib, platform, subprocess, sys, tarfile
out, version = pathlib.Path(sys.argv[1]), sys.argv[2]
sbom = json.loads((out / f"awqd-{version}.spdx.json").read_text())
packages = {package["name"]: package["versionInfo"] for package in sbom["packages"]}
assert packages.pop("awqd") == version, packages
assert sbom["creationInfo"]["created"] == "2001-09-09T01:46:40Z", sbom["creationInfo"]
for name, at in packages.items():
    installed = subprocess.run(["dpkg-query", "-W", "-f", "${Version}\n", name], capture_output=True, text=True, check=True)
    assert at in installed.stdout.split(), f"{name}: got {at}, expected {installed.stdout}"
with tarfile.open(out / f"awqd-{version}-linux-{platform.machine()}.tar.gz") as tar:
    licences = {pathlib.Path(name).name for name in tar.getnames() if "/licenses/" in name}
assert licences, "the folder has no licences"
# Each package whose licence the folder has because it contains a library of the package.
missing = licences - packages.keys()
assert not missing, f"not in the SBOM: {missing}"
described = {entry["fileName"][2:] for entry in sbom["files"]}
expected = {path.name for path in out.iterdir() if path.suffix in (".deb", ".gz")}
assert described == expected, (described, expected)
PYTHON

# The API returns the same version.
server_pid=""
trap '[[ -z "$server_pid" ]] || kill "$server_pid" 2>/dev/null; rm -rf "$work"' EXIT
start_server "$1/bin" "$ROOT/tests/data/awq" "$work/server.log" --device=cpu || die "the server does not start"
told="$("$1/bin/awqctl" --address "$address" --json status | python3 -c 'import json, sys; print(json.load(sys.stdin)["version"])')"
stop_server
server_pid=""
[[ "$told" == "$version" ]] || die "GetServerInfo tells version $told, expected $version"

# Tests tags in a clone of the committed files.
git -C "$ROOT" rev-parse -q --verify HEAD >/dev/null || { say "release test: ok, without tags: this is no clone"; exit; }
git clone -q --shared "$ROOT" "$work/clone"
cp "$ROOT/deploy/release.sh" "$work/clone/deploy/" # as it is here, committed or not
commit() {
  git -C "$work/clone" -c user.name=test -c user.email=test@localhost commit -qam "$1"
}
# refused <text> <tag>: expects a refusal with this text.
refused() {
  local said
  said="$("$work/clone/deploy/release.sh" --check "$2" 2>&1)" && die "tag $2 may be released: $said"
  [[ "$said" == *"$1"* ]] || die "tag $2: expected \"$1\", got: $said"
}
refused "there is none" v7.0.0
git -C "$work/clone" tag v7.0.0
refused "expected the tag v$version" v7.0.0
sed -i "0,/^## .*/s//## $version (unreleased)/" "$work/clone/CHANGELOG.md"
commit "to be released" || true
git -C "$work/clone" tag -f "v$version" >/dev/null
refused "it is not released yet" "v$version"
sed -i "0,/^## .*/s//## $version (2026-01-31)/" "$work/clone/CHANGELOG.md"
commit "release"
git -C "$work/clone" tag -f "v$version" >/dev/null
[[ "$("$work/clone/deploy/release.sh" --check "v$version")" == "tag v$version may be released" ]] ||
  die "a tag with everything in place is refused"
sed -i 's/^appVersion: .*/appVersion: 9.9.9/' "$work/clone/deploy/kubernetes/awqd/Chart.yaml"
commit "another version"
git -C "$work/clone" tag -f "v$version" >/dev/null
refused 'Chart.yaml: got version "9.9.9"' "v$version"
say "release test: ok"
