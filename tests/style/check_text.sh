#!/usr/bin/env bash
# Holds the text files to .editorconfig: no tab, no blank at the end of a line, no carriage return, a newline at the end. And
# C++ to 100 columns: clang-format does not reflow comments.
set -uo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
cd "$here/../.." || exit 1
bad=0 checked=0
while IFS= read -r -d '' file; do
  # Bytes, and what is empty or has been removed.
  case $file in *.safetensors | */fuzz/corpus/*) continue ;; esac
  [[ -s $file ]] || continue
  checked=$((checked + 1))
  blanks='[[:blank:]]$'
  if [[ $file == *.svg ]]; then blanks='$^'; fi
  grep -nE "$blanks" "$file" | sed "s|^|$file: blank at the end: |" | grep . && bad=1
  grep -n $'\t' "$file" | sed "s|^|$file: tab: |" | grep . && bad=1
  grep -n $'\r' "$file" | sed "s|^|$file: carriage return: |" | grep . && bad=1
  case $file in
    *.hpp | *.cpp) grep -nE '^.{101,}$' "$file" | sed "s|^|$file: more than 100 columns: |" | grep . && bad=1 ;;
  esac
  if [[ -n $(tail -c 1 "$file") ]]; then echo "$file: no newline at the end" && bad=1; fi
  iconv -f UTF-8 -t UTF-8 "$file" >/dev/null 2>&1 || { echo "$file: not UTF-8" && bad=1; }
done < <(bash tests/style/sources.sh '*')
echo "$checked files"
((bad == 0 && checked > 100))
