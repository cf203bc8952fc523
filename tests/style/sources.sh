#!/usr/bin/env bash
# The files of the repository, or of a copy without its history, that match the patterns; zero-terminated.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
  git ls-files -z --cached --others --exclude-standard -- "$@"
else
  names=()
  for pattern in "$@"; do names+=(-o -path "./${pattern#:/}"); done
  find . -type f \( -false "${names[@]}" \) -not -path './build*' -not -path './.git/*' -print0
fi
