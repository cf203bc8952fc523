#!/usr/bin/env bash
# check_scripts.sh SHELLCHECK: it has nothing to say about the scripts.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
bash tests/style/sources.sh '*.sh' '.ci/run' | xargs -0 "$1"
