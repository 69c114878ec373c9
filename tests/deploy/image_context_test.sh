#!/usr/bin/env bash
# The files that .dockerignore lets into the image's build stage are enough to configure the Dockerfile's build. Only
# `tests/run.sh --docker` builds the image itself.
# usage: image_context_test.sh <source directory>
set -euo pipefail
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$1"
mapfile -t paths < <(sed -n 's/^!//p' .dockerignore)
((${#paths[@]} > 10)) || { echo "error: .dockerignore names ${#paths[@]} paths"; exit 1; }
cp -r --parents "${paths[@]}" "$work"
cd "$work"
cmake --preset release -DAWQD_CUDA=OFF >configure.log 2>&1 || { tail -n 20 configure.log; echo "error: the image's context does not configure"; exit 1; }
# The bundle has the files that the README shows.
lacks=0
while read -r picture; do
  [[ -e "$1/$picture" && ! -e "$picture" ]] || continue
  echo "error: README.md shows $picture, which .dockerignore keeps out"
  lacks=1
done < <(sed -n 's/^!\[[^]]*\](\([^)]*\)).*/\1/p' README.md)
((lacks == 0))
echo "image context test: ok"
