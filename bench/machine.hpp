// What this core can do at best, measured in the same run as what is compared with it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <ctime>

#include <focus/kernel/simd.hpp>

namespace bench {

/// The processor time that the program has taken, in seconds. The benchmarks have one thread, and
/// other programs on the machine are not to count.
inline double cpu_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

/// Floating-point operations a second (an FMA is two) of a loop that touches registers only: 12
/// independent sums hide the latency of the FMA units (5 cycles, 2 units at most) and fit the 16
/// registers of AVX2. The best of several tries.
template <class A>
double measure_fma_peak() {
  using vec = focus::detail::vec<A>;
  constexpr int sums = 12, repetitions = 500'000, tries = 20;
  A factor = A(0.999), term = A(0.001);
  double best = 0;
  for (int t = 0; t < tries; ++t) {
    // Opaque to the optimiser: neither hoisted nor folded.
    asm volatile("" : "+m"(factor), "+m"(term));
    const vec a = vec::broadcast(factor), b = vec::broadcast(term);
    vec sum[sums];
    focus::detail::static_for<sums>([&](auto i) { sum[i] = vec::broadcast(static_cast<A>(i)); });
    const double start = cpu_seconds();
    for (int r = 0; r < repetitions; ++r)
      focus::detail::static_for<sums>([&](auto i) { sum[i] = fma(sum[i], a, b); });
    const double seconds = cpu_seconds() - start;
    A sink[static_cast<std::size_t>(vec::width)];
    focus::detail::static_for<sums>([&](auto i) {
      sum[i].store(sink);
      asm volatile("" : : "r"(sink) : "memory");
    });
    best = (std::max)(best, 2.0 * sums * vec::width * repetitions / seconds);
  }
  return best;
}

}  // namespace bench
