// fuzz_shapes without a fuzzer: random_shapes [--cases N] [--seed S] [--first CASE]. Case r of a
// seed is the same in each run of it, whatever N is; says which were wrong, and goes on.
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "../oracle.hpp"
#include "shapes.hpp"

int main(int argc, char** argv) {
  long cases = 10000, seed = 1, first = 0;
  for (int at = 1; at < argc; at += 2) {
    const std::string name = argv[at];
    char* end = nullptr;
    const long value = at + 1 < argc ? std::strtol(argv[at + 1], &end, 10) : -1;
    if (end == nullptr || *end != '\0' || value < 0 ||
        (name != "--cases" && name != "--seed" && name != "--first")) {
      std::fprintf(stderr, "usage: %s [--cases N] [--seed S] [--first CASE]\n", argv[0]);
      return 2;
    }
    (name == "--cases" ? cases : name == "--seed" ? seed : first) = value;
  }

  const auto start = std::chrono::steady_clock::now();
  long faults = 0;
  for (long r = first; r < first + cases; ++r) {
    oracle::generator random(static_cast<std::uint64_t>(seed * 1000003 + r));
    std::array<std::uint8_t, 64> bytes;
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.bits() >> 56);
    std::string what;
    const std::string wrong = shapes::fault(bytes.data(), bytes.size(), what);
    if (wrong.empty()) continue;
    ++faults;
    std::printf("case %ld of seed %ld: %s\n  %s\n", r, seed, what.c_str(), wrong.c_str());
    std::fflush(stdout);
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("%ld cases, %ld faults, %.1f s\n", cases, faults, took.count());
  return faults == 0 ? 0 : 1;
}
