#!/usr/bin/env bash
# All tests, on a fresh Debian or Ubuntu: installs what is missing (as root or with sudo), builds with GCC and with Clang,
# warnings as errors, and runs every instruction set, the sanitizers, and the users' ways of having the library.
# All that it writes is in build/. The last line is "N passed, N failed", with ", N skipped" where this machine
# could not run something; the exit status is 0 when nothing failed.
# shellcheck disable=SC2086  # a tier's processor flags are a list of words
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

readonly packages=(g++ clang cmake ninja-build pkg-config catch2 libbenchmark-dev libeigen3-dev libomp-dev
  libsimde-dev libcli11-dev libpcre2-dev nlohmann-json3-dev g++-aarch64-linux-gnu qemu-user)
# Several tiers at a time, each with its share of the processors: one that links or runs a single test leaves none idle.
readonly jobs=${JOBS:-$(nproc)}
tiers=$(grep -cE '(^|\|\| )tier "' tests/run.sh)
readonly tiers
readonly tiers_at_once=$((jobs < tiers ? jobs : tiers))
readonly jobs_a_tier=$((jobs / tiers_at_once))
readonly logs=build/logs
mkdir -p "$logs"
rm -f "$logs"/*.result

install_packages() {
  local missing=() package
  if ! command -v dpkg-query >/dev/null; then
    echo "Not a Debian or Ubuntu: nothing is installed. These packages' counterparts are needed: ${packages[*]}"
    return
  fi
  for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  if ((${#missing[@]} == 0)); then return; fi
  echo "Installing: ${missing[*]}"
  local root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || {
      echo "Neither root nor sudo: install these by hand, then run this again: ${missing[*]}"
      exit 1
    }
    root=(sudo)
  fi
  if ! { "${root[@]}" apt-get update &&
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } \
    >"$logs/packages.log" 2>&1; then
    tail -n 20 "$logs/packages.log"
    echo "The packages could not be installed: ${missing[*]}"
    exit 1
  fi
}

cpu_has() {
  local flag
  for flag in "$@"; do grep -qw "$flag" /proc/cpuinfo || return 1; done
}

# What a tier has to say when it has ended, and to add up: a line for each test.
pass() { echo "passed" >>"$result"; }
fail() {
  echo "FAILED: $1 (see $2)" >>"$result"
  echo "  FAILED: $1"
  # The errors of compilers and of CMake, or else the end.
  { grep -E -A 3 '(error|Error)[: ]|^FAILED: ' "$2" || tail -n 40 "$2"; } | head -n 60 | cut -c 1-400 | sed 's/^/    /'
}
skip() {
  echo "NOT RUN: $1" >>"$result"
  echo "  NOT RUN: $1"
}

# configure NAME PRESET [-D...]
configure() {
  local name=$1 preset=$2
  shift 2
  echo "== $name"
  if ! cmake --preset "$preset" "$@" >"$logs/$preset.log" 2>&1; then
    fail "$name: configuring" "$logs/$preset.log"
    return 1
  fi
  if grep -q 'NOT built' "$logs/$preset.log"; then fail "$name: parts are left out" "$logs/$preset.log"; fi
}

# build PRESET TARGET: as far as it goes.
build() {
  cmake --build "build/$1" --parallel "$jobs_a_tier" --target "$2" -- -k 0 >>"$logs/$1.log" 2>&1
}

test_name() { sed -E 's/.*Test +#[0-9]+: ([^ ]+) .*/\1/' <<<"$1"; }

# run_tests NAME PRESET [ctest arguments]: counts each of CTest's tests.
run_tests() {
  local name=$1 preset=$2 log="$logs/$2.test.log" status total=0 bad=0 line
  shift 2
  ctest --test-dir "build/$preset" --parallel "$jobs_a_tier" --output-on-failure --no-tests=error --timeout 900 "$@" >"$log" 2>&1
  status=$?
  while read -r line; do
    total=$((total + 1))
    if [[ $line == *' Passed '* ]]; then
      pass
    elif [[ $line == *'***Skipped'* ]]; then
      skip "$name: $(test_name "$line")"
    else
      bad=$((bad + 1))
      echo "FAILED: $name: $(test_name "$line") (see $log)" >>"$result"
    fi
  done < <(grep -E '^ *[0-9]+/[0-9]+ Test +#' "$log")
  if ((bad > 0)); then tail -n 80 "$log" | sed 's/^/    /'; fi
  if ((status != 0 && bad == 0)); then fail "$name: ctest" "$log"; fi
  echo "  $total tests, $bad failed; $SECONDS s so far"
}

# A tier of the instruction set: test_tier NAME PRESET CPU_FLAGS TARGET LABEL [-D...]. CPU_FLAGS as in /proc/cpuinfo: where
# the processor lacks one, only a program of the whole library is built. LABEL: which of the tests, a regular expression.
test_tier() {
  local name=$1 preset=$2 needs=$3 target=$4 label=$5 runs=yes
  shift 5
  # shellcheck disable=SC2086  # a list of flags
  if ! cpu_has $needs; then runs=no name+=", built only" target=test_compile_plain; fi
  configure "$name" "$preset" "$@" || return
  if build "$preset" "$target"; then
    pass
  else
    fail "$name: building" "$logs/$preset.log"
  fi
  if [[ $runs == yes ]]; then
    run_tests "$name" "$preset" --label-regex "$label"
  else
    skip "$name: this processor lacks some of: $needs; the tests were not run"
  fi
}

# tier NAME PRESET ...: test_tier in the background, as soon as fewer than tiers_at_once run. Its report is printed whole.
tier() {
  while (($(jobs -rp | wc -l) >= tiers_at_once)); do wait -n; done
  echo "Started: $1"
  (
    result=$logs/$2.result
    echo "unfinished" >"$result"
    test_tier "$@" >"$logs/$2.report" 2>&1
    sed -i '/^unfinished$/d' "$result"
    cat "$logs/$2.report"
  ) &
  started+=("$logs/$2.result")
}

install_packages

readonly avx2="avx2 fma f16c" avx512="avx512f avx512bw avx512dq avx512vl" any=""
readonly amx="$avx512 avx512_bf16 amx_tile amx_bf16"
# One build optimises as users do and has everything; the others are many and -O1 is quick.
readonly quick=(-DFOCUS_BUILD_BENCH=OFF -DFOCUS_BUILD_EXAMPLES=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1)

started=()
trap 'kill 0' INT # the tiers too: in the background they do not hear it
tier "GCC, AVX2, with benchmarks and examples" avx2 "$avx2" all . "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG"
tier "Clang, AVX2" clang-avx2 "$avx2" all . "${quick[@]}"
tier "Address and undefined-behaviour sanitizers" asan-ubsan "$avx2" focus_unit_tests unit "${quick[@]}"
# shellcheck disable=SC2086
cpu_has $amx || tier "GCC, AVX-512 and AMX emulated on AVX2" avx512-emulated "$avx2" focus_kernel_tests "kernel|bfloat16"
tier "GCC, NEON with bfloat16 products under qemu" neon-bf16 "$any" focus_kernel_tests "kernel|bfloat16" "${quick[@]}"
tier "GCC, NEON under qemu" neon "$any" test_compile_plain thread "${quick[@]}"
tier "GCC, plain C++" generic "$any" focus_kernel_tests kernel "${quick[@]}"
# With AVX-512 all unit tests run once: in the tier that has the most of it.
# shellcheck disable=SC2086
if cpu_has $amx; then avx512_tests=(focus_kernel_tests kernel); else avx512_tests=(focus_unit_tests unit); fi
tier "GCC, AMX" amx "$amx" focus_unit_tests unit "${quick[@]}"
tier "GCC, AVX-512" avx512 "$avx512" "${avx512_tests[@]}" "${quick[@]}"
tier "Clang, AVX-512" clang-avx512 "$avx512" focus_kernel_tests kernel "${quick[@]}"
tier "Thread sanitizer" tsan "$avx2" test_compile_plain thread "${quick[@]}"
wait

echo
count() { cat "${started[@]}" | grep -c "^$1"; }
for result in "${started[@]}"; do
  if grep -q '^unfinished$' "$result"; then echo "FAILED: $result: ended early" >>"$result"; fi
done
cat "${started[@]}" | grep '^FAILED: '
cat "${started[@]}" | grep '^NOT RUN: '
echo "Took $((SECONDS / 60)) min $((SECONDS % 60)) s"
passed=$(count passed) failed=$(count FAILED) skipped=$(count 'NOT RUN')
if ((skipped > 0)); then
  echo "$passed passed, $failed failed, $skipped skipped"
else
  echo "$passed passed, $failed failed"
fi
((failed == 0 && passed > 0))
