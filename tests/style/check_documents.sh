#!/usr/bin/env bash
# The documents and what they are about: links lead to files, the map of the source names each header, and each header includes
# only what the map says it may.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
bad=0 links=0 includes=0
fail() {
  echo "$1"
  bad=1
}

while IFS= read -r -d '' document; do
  while IFS= read -r link; do
    links=$((links + 1))
    [[ -e $(dirname "$document")/$link ]] || fail "$document: no such file: $link"
  done < <(sed '/^ *\x60\x60\x60/,/^ *\x60\x60\x60/d' "$document" | tr '\n' ' ' | grep -oE '\]\([^)# ]+' | sed 's/^](//' | grep -v '^https\?:')
done < <(bash tests/style/sources.sh '*.md')

# From left to right; reference/ takes no more than the checks, and what is to their right but plan/ and kernel/.
layer() {
  case $1 in
    passes/*) echo 1 ;;
    reference/*) echo 1 ;;
    checks/*) echo 2 ;;
    routing_plan.hpp | kv_cache.hpp | decode_sequence.hpp) echo 3 ;;
    plan/* | cache/*) echo 4 ;;
    kernel/*) echo 5 ;;
    config.hpp | error.hpp | tensor_view.hpp | scalar.hpp | options.hpp | parallel.hpp | centroid_params.hpp) echo 6 ;;
    *) echo 0 ;;
  esac
}
readonly map=include/focus/README.md
while IFS= read -r -d '' file; do
  header=${file##*include/focus/}
  grep -qF "\`${header##*/}\`" $map || grep -qF "\`$header\`" $map || fail "$map does not name $header"
  while IFS= read -r included; do
    includes=$((includes + 1))
    if (($(layer "$included") < $(layer "$header"))); then fail "$header includes $included, to its left"; fi
    case $header:$included in
      reference/*:passes/* | reference/*:plan/* | reference/*:kernel/*) fail "$header includes $included" ;;
      passes/*:reference/*) fail "$header includes $included" ;;
      plan/*:kernel/tuning.hpp | plan/*:kernel/plain_data.hpp) ;;
      plan/*:cache/* | cache/*:kernel/*) fail "$header includes $included" ;;
      plan/*:kernel/*) fail "$header includes $included" ;;
    esac
  done < <(sed -n 's|^#include "focus/\(.*\)".*|\1|p' "$file")
done < <(bash tests/style/sources.sh 'include/*.hpp')
echo "$links links, $includes includes"
((bad == 0 && links > 20 && includes > 300))
