#!/usr/bin/env bash
# check_format.sh CLANG_FORMAT: each source is as clang-format leaves it. (Its --dry-run also counts changes that are none.)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
bad=0 checked=0
while IFS= read -r -d '' file; do
  [[ -e $file ]] || continue
  checked=$((checked + 1))
  diff -u --label "$file" --label "$file, formatted" "$file" <("$1" "$file") || bad=1
done < <(bash tests/style/sources.sh '*.hpp' '*.cpp')
echo "$checked files"
((bad == 0 && checked > 100))
