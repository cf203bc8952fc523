#!/bin/sh
# Builds `peers` for this machine with the libraries that are there, and compares; options go to compare.py.
#
# Debian, Ubuntu: apt-get install g++ cmake pkg-config libbenchmark-dev libeigen3-dev libopenblas-dev libdnnl-dev python3
#   BUILD_DIR  where to build; default: build-peers at the top of the repository
#   PYTHON     the Python that has PyTorch, if any; default: python3
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
root=$(dirname -- "$(dirname -- "$here")")
build=${BUILD_DIR:-$root/build-peers}

cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS=-march=native -DFOCUS_BENCH_PEERS=ON \
  -DFOCUS_BUILD_TESTS=OFF -DFOCUS_BUILD_BENCH=ON -DFOCUS_BUILD_EXAMPLES=OFF >/dev/null
cmake --build "$build" --target peers >/dev/null
exec "${PYTHON:-python3}" "$here/compare.py" "$build/bench/peers/peers" "$@"
