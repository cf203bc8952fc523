#!/usr/bin/env bash
# All tests, on a fresh Debian or Ubuntu: installs what is missing (as root or with sudo), builds with GCC and with Clang,
# warnings as errors, and runs every instruction set, the sanitizers, and the users' ways of having the library.
#
#   tests/run.sh                        everything
#   tests/run.sh --only TIER [TIER...]  these tiers alone, by preset or by name; may be given again
#   tests/run.sh --list                 the tiers: preset and name
#   tests/run.sh --help                 this
#
# JOBS in the environment: processes at a time, by default one for each processor.
# All that it writes is in build/. The last line is "N passed, N failed", with ", N skipped" where this machine
# could not run something; the exit status is 0 when nothing failed, 2 for arguments that are none.
# shellcheck disable=SC2086  # a tier's processor flags are a list of words
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

readonly packages=(g++ clang cmake ninja-build pkg-config catch2 libbenchmark-dev libeigen3-dev libomp-dev
  libsimde-dev libcli11-dev libpcre2-dev nlohmann-json3-dev g++-aarch64-linux-gnu qemu-user
  clang-format clang-tidy shellcheck)
readonly logs=build/logs

# install_packages PACKAGE...
install_packages() {
  local missing=() package
  if ! command -v dpkg-query >/dev/null; then
    echo "Not a Debian or Ubuntu: nothing is installed. These packages' counterparts are needed: $*"
    return
  fi
  for package in "$@"; do
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

# The newest of the compilers clang++-NN, from 19 on; before that, they and what they need are installed where the distribution
# has them.
newest_clang() { compgen -c clang++- | grep -xE 'clang\+\+-(19|[2-9][0-9])' | sort -Vr | head -n 1; }
install_newest_clang() {
  if [[ -n $(newest_clang) ]] || ! command -v apt-cache >/dev/null; then return; fi
  local version wanted=()
  offered() { apt-cache pkgnames clang- 2>/dev/null | grep -xE 'clang-(19|[2-9][0-9])' | sort -Vu; }
  if [[ -z $(offered) ]]; then
    local root=()
    if ((EUID != 0)); then root=(sudo); fi
    "${root[@]}" apt-get update >>"$logs/packages.log" 2>&1
  fi
  for version in $({
    offered | grep -x clang-19
    offered | tail -n 1
  } | sort -u); do
    wanted+=("$version" "libclang-rt-${version#clang-}-dev")
  done
  if ((${#wanted[@]} > 0)); then install_packages "${wanted[@]}"; fi
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

# A tier that needs a compiler which not every system has: with_compiler COMPILER CALL NAME PRESET ... [-D...].
with_compiler() {
  local compiler=$1 call=$2
  shift 2
  if ! command -v "${compiler:-none}" >/dev/null; then
    echo "== $1"
    skip "$1: this system offers no ${compiler:-Clang from 19 on}"
    return
  fi
  "$call" "$@" "-DCMAKE_CXX_COMPILER=$compiler"
}

# Compiles only: build_tier NAME PRESET TARGET [-D...].
build_tier() {
  local name=$1 preset=$2 target=$3
  shift 3
  configure "$name" "$preset" "$@" || return
  if build "$preset" "$target"; then pass; else fail "$name: building" "$logs/$preset.log"; fi
  echo "  built; $SECONDS s so far"
}

# Runs tests that need nothing built: label_tier NAME PRESET LABEL [-D...].
label_tier() {
  local name=$1 preset=$2 label=$3
  shift 3
  configure "$name" "$preset" "$@" || return
  run_tests "$name" "$preset" --label-regex "$label"
}

# Fuzzers, a minute each: fuzz_tier NAME PRESET.
fuzz_tier() {
  local name=$1 preset=$2
  if ! cpu_has $avx2 || ! clang++ -fsanitize=fuzzer,address -x c++ -o /dev/null - 2>/dev/null \
    <<<'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'; then
    echo "== $name"
    skip "$name: this system has no libFuzzer for its clang++, or this processor no AVX2"
    return
  fi
  build_tier "$name" "$preset" all && run_tests "$name" "$preset" --label-regex fuzz
}

# Tiers: each is a line of all_tiers. `tier NAME PRESET ...` is a test_tier; `tier_of CALL NAME PRESET ...` another kind. Where they
# are only listed, their names are collected; else each runs in the background, as soon as fewer than tiers_at_once do, and its
# report is printed whole.
tier() { tier_of test_tier "$@"; }
tier_of() {
  local call=("$1") name preset
  shift
  if [[ ${call[0]} == with_compiler ]]; then
    call+=("$1" "$2")
    shift 2
  fi
  name=$1 preset=$2
  if [[ -n $listing ]]; then
    names+=("$name") presets+=("$preset")
    return
  fi
  is_selected "$name" "$preset" || return 0
  while (($(jobs -rp | wc -l) >= tiers_at_once)); do wait -n; done
  echo "Started: $name"
  (
    result=$logs/$preset.result
    echo "unfinished" >"$result"
    "${call[@]}" "$@" >"$logs/$preset.report" 2>&1
    sed -i '/^unfinished$/d' "$result"
    cat "$logs/$preset.report"
  ) &
  started+=("$logs/$preset.result")
}
# on_request CALL ARGUMENTS...: as tier_of, for what the other tiers have already.
on_request() {
  if [[ -n $listing ]] || ((${#only[@]} > 0)); then tier_of "$@"; fi
}

is_selected() {
  if ((${#only[@]} == 0)); then return 0; fi
  local wanted
  for wanted in "${only[@]}"; do
    if [[ $wanted == "$1" || $wanted == "$2" ]]; then return 0; fi
  done
  return 1
}

readonly avx2="avx2 fma f16c" avx512="avx512f avx512bw avx512dq avx512vl" any=""
readonly amx="$avx512 avx512_bf16 amx_tile amx_bf16"
# One build optimises as users do and has everything; the others are many and -O1 is quick.
readonly quick=(-DFOCUS_BUILD_BENCH=OFF -DFOCUS_BUILD_EXAMPLES=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1)

all_tiers() {
  local newest avx512_tests
  newest=$(newest_clang)
  tier "GCC, AVX2, with benchmarks and examples" avx2 "$avx2" all . "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG"
  tier "Clang, AVX2" clang-avx2 "$avx2" all "unit|interoperability|compile" "${quick[@]}"
  tier "Address and undefined-behaviour sanitizers" asan-ubsan "$avx2" focus_unit_tests unit "${quick[@]}"
  if [[ -n $listing ]] || ((${#only[@]} > 0)) || ! cpu_has $amx; then
    tier "GCC, AVX-512 and AMX emulated on AVX2" avx512-emulated "$avx2" focus_kernel_tests "kernel|bfloat16"
  fi
  tier "GCC, NEON with bfloat16 products under qemu" neon-bf16 "$any" focus_kernel_tests "kernel|bfloat16" "${quick[@]}"
  tier "GCC, NEON under qemu" neon "$any" test_compile_plain thread "${quick[@]}"
  tier "GCC, plain C++" generic "$any" focus_kernel_tests kernel "${quick[@]}"
  # With AVX-512 all unit tests run once: in the tier that has the most of it.
  if cpu_has $amx; then avx512_tests=(focus_kernel_tests kernel); else avx512_tests=(focus_unit_tests unit); fi
  tier "GCC, AMX" amx "$amx" focus_unit_tests unit "${quick[@]}"
  tier "GCC, AVX-512" avx512 "$avx512" "${avx512_tests[@]}" "${quick[@]}"
  tier "Clang, AVX-512" clang-avx512 "$avx512" focus_kernel_tests kernel "${quick[@]}"
  tier "Thread sanitizer" tsan "$avx2" focus_race_tests race "${quick[@]}"
  tier "Clients" clients "$any" focus_clients clients
  tier_of with_compiler "$newest" test_tier "Newest Clang, AVX2" newest "$avx2" focus_newest_tests "quick|finite_math"
  tier_of build_tier "Warnings of GCC" warnings focus_warnings
  # The last that knows AVX-512 in vectors of 256 bits.
  tier_of with_compiler clang++-19 build_tier "Warnings of Clang 19" warnings-clang-19 focus_warnings
  if [[ -n $listing || $newest != clang++-19 ]]; then
    tier_of with_compiler "$newest" build_tier "Warnings of the newest Clang" warnings-clang focus_warnings
  fi
  tier_of build_tier "Warnings of GCC for 64-bit Arm" warnings-neon focus_warnings
  tier_of label_tier "Style" style style
  tier_of fuzz_tier "Fuzzers" fuzz
  on_request test_tier "Quick loop" dev "$any" focus_quick_tests quick
}

names=() presets=() only=() started=() listing=yes
all_tiers
readonly names presets
listing=
usage() { sed -n '2,/^# shellcheck/{/^# shellcheck/d;s/^# \{0,1\}//p}' tests/run.sh; }
while (($# > 0)); do
  case $1 in
    --help | -h)
      usage
      exit 0
      ;;
    --list)
      for at in "${!names[@]}"; do printf '%-18s %s\n' "${presets[at]}" "${names[at]}"; done
      exit 0
      ;;
    --only)
      if (($# < 2)) || [[ $2 == --* ]]; then
        echo "--only needs a tier: tests/run.sh --list lists them" >&2
        exit 2
      fi
      shift
      while (($# > 0)) && [[ $1 != --* ]]; do
        if ! printf '%s\n' "${names[@]}" "${presets[@]}" | grep -qxF -- "$1"; then
          echo "No tier is called \"$1\": tests/run.sh --list lists them" >&2
          exit 2
        fi
        only+=("$1")
        shift
      done
      ;;
    *)
      echo "Not an option: $1; tests/run.sh --help says what is" >&2
      exit 2
      ;;
  esac
done

# Several tiers at a time, each with its share of the processors: one that links or runs a single test leaves none idle.
readonly jobs=${JOBS:-$(nproc)}
tiers=${#names[@]}
if ((${#only[@]} > 0)); then tiers=${#only[@]}; fi
readonly tiers_at_once=$((jobs < tiers ? jobs : tiers))
readonly jobs_a_tier=$((jobs / tiers_at_once))
mkdir -p "$logs"
rm -f "$logs"/*.result

install_packages "${packages[@]}"
# libFuzzer, where it is a package of its own.
if is_selected "Fuzzers" fuzz && command -v apt-cache >/dev/null && apt-cache show libclang-rt-dev >/dev/null 2>&1; then
  install_packages libclang-rt-dev
fi
for at in "${!names[@]}"; do
  if [[ ${presets[at]} =~ ^(newest|warnings-clang.*)$ ]] && is_selected "${names[at]}" "${presets[at]}"; then
    install_newest_clang
    break
  fi
done

trap 'kill 0' INT # the tiers too: in the background they do not hear it
all_tiers
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
