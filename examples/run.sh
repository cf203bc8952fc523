#!/bin/sh
# A pretrained language model reads a novel, with full attention and with Focus attention, side by side.
#
# Installs what is missing (as root or through sudo), fetches a small model and novels (95 MB), builds with the instruction
# set of this machine, and prints perplexity and cost on a novel that the routers were not trained on. Some five minutes on
# two cores, downloads aside.
#   --calibrate  with centroids calibrated on Emma, without any training, instead of the trained routers of this repository
#   BUILD_DIR    where to build; default: build-examples beside this folder
set -eu

calibrate=
case ${1-} in
  "") ;;
  --calibrate) calibrate=yes ;;
  *) echo "usage: $0 [--calibrate]" >&2; exit 2 ;;
esac

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(dirname -- "$here")
build=${BUILD_DIR:-$root/build-examples}
data=$here/language_model/data
model=$data/SmolLM2-135M-Instruct.Q4_1.gguf
routers=$here/language_model/routers
packages="g++ make cmake pkg-config libeigen3-dev libpcre2-dev libcli11-dev nlohmann-json3-dev python3 python3-pip"

say() { printf '\n== %s\n' "$*"; }
fail() {
  printf 'run.sh: %s\n' "$*" >&2
  exit 1
}

missing() {
  for package in $packages; do
    dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || printf '%s ' "$package"
  done
}

if command -v dpkg-query >/dev/null 2>&1 && command -v apt-get >/dev/null 2>&1; then
  wanted=$(missing)
  if [ -n "$wanted" ]; then
    if [ "$(id -u)" -eq 0 ]; then
      as_root=
    elif command -v sudo >/dev/null 2>&1; then
      as_root=sudo
    else
      fail "to be installed first, as root: $wanted"
    fi
    say "installing $wanted"
    $as_root apt-get update -q >/dev/null 2>&1 || echo "apt-get update failed; going on with the old lists"
    log=$(mktemp)
    # shellcheck disable=SC2086  # a list of packages
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $wanted \
      >"$log" 2>&1 || { tail -n 5 "$log" >&2; rm -f "$log"; fail "cannot install: $wanted"; }
    rm -f "$log"
  fi
else
  echo "run.sh: neither Debian nor Ubuntu; going on with what is there. Needed are: $packages"
fi

say "model and novels"
sh "$here/language_model/fetch.sh"

say "building in $build"
cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS=-march=native \
  -DFOCUS_BUILD_TESTS=OFF -DFOCUS_BUILD_BENCH=OFF -DFOCUS_BUILD_EXAMPLES=ON >"$data/cmake.log" 2>&1 ||
  { tail -n 20 "$data/cmake.log" >&2; fail "cannot configure"; }
cmake --build "$build" --target language_model --parallel "$(nproc)" >"$data/build.log" 2>&1 ||
  { tail -n 20 "$data/build.log" >&2; fail "cannot build"; }
program=$(find "$build" -type f -name language_model -perm -u+x | head -n 1)
[ -n "$program" ] || fail "the build made no program: see $data/cmake.log"

if [ -n "$calibrate" ]; then
  say "calibrating 8 groups for each layer on Emma"
  set -- "$data/emma-8-groups.safetensors"
  "$program" calibrate --model "$model" --text "$data/emma.txt" --groups 8 --output "$1"
else
  set -- "$routers/smollm2-135m.k8.safetensors" "$routers/smollm2-135m.k16.safetensors"
fi

router=$1
say "what a layer's groups are made of"
"$program" groups --model "$model" --text "$data/emma.txt" --router "$router" --layer 4 --tokens 8 --windows 4

say "reading Persuasion"
for each; do
  shift
  set -- "$@" --router "$each"
done
"$program" perplexity --model "$model" --text "$data/persuasion.txt" --context 2048 "$@" \
  --top-k 1,2:1 --window 128 --sinks 1 --json "$data/persuasion.json"

say "going on with it: from 2048 tokens, with Focus attention over KV caches"
"$program" generate --model "$model" --prompt-file "$data/persuasion.txt" --prompt-tokens 2048 --tokens 48 \
  --attention focus --router "$router"

say "more: $program --help, and examples/language_model/README.md"
