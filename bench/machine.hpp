// What this core can do at best, measured in the same run as what is compared with it. Each is the
// best of several tries: a limit, not a habit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define FOCUS_BENCH_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define FOCUS_BENCH_AMX 0
#endif

#include <focus/kernel/exp2.hpp>
#include <focus/kernel/simd.hpp>
#include <focus/tensor_view.hpp>

#include "timing.hpp"

namespace bench {

/// `work` a second, for a call that does so much.
template <class F>
double best_rate(double work, int tries, F&& call) {
  double best = 0;
  for (int t = 0; t < tries; ++t) {
    const double start = cpu_seconds();
    call();
    best = (std::max)(best, work / (cpu_seconds() - start));
  }
  return best;
}

/// Floating-point operations a second (an FMA is two) of a loop that touches registers only: 12
/// independent sums hide the latency of the FMA units (5 cycles, 2 units at most) and fit the 16
/// registers of AVX2.
template <class A>
double measure_fma_peak() {
  using vec = focus::detail::vec<A>;
  constexpr int sums = 12, repetitions = 500'000;
  A factor = A(0.999), term = A(0.001);
  return best_rate(2.0 * sums * vec::width * repetitions, 20, [&] {
    // Opaque to the optimiser: neither hoisted nor folded.
    asm volatile("" : "+m"(factor), "+m"(term));
    const vec a = vec::broadcast(factor), b = vec::broadcast(term);
    vec sum[sums];
    focus::detail::static_for<sums>([&](auto i) { sum[i] = vec::broadcast(static_cast<A>(i)); });
    for (int r = 0; r < repetitions; ++r)
      focus::detail::static_for<sums>([&](auto i) { sum[i] = fma(sum[i], a, b); });
    A sink[static_cast<std::size_t>(vec::width)];
    focus::detail::static_for<sums>([&](auto i) {
      sum[i].store(sink);
      asm volatile("" : : "r"(sink) : "memory");
    });
  });
}

/// Exponentials a second of the library's 2^x, on floats in the L1 cache.
inline double measure_exp_rate() {
  using vec = focus::detail::vec<float>;
  constexpr std::size_t size = 2048;
  constexpr int repetitions = 500;
  std::vector<float> x(size), y(size);
  for (std::size_t i = 0; i < size; ++i) x[i] = -0.01f * static_cast<float>(i);
  return best_rate(static_cast<double>(size) * repetitions, 20, [&] {
    for (int r = 0; r < repetitions; ++r) {
      for (std::size_t i = 0; i < size; i += static_cast<std::size_t>(vec::width))
        focus::detail::exp2<float>(vec::load(&x[i])).store(&y[i]);
      asm volatile("" : : "r"(y.data()) : "memory");
    }
  });
}

/// Bytes a second that one core reads from memory that no cache holds.
inline double measure_bandwidth() {
  using vec = focus::detail::vec<float>;
  constexpr std::size_t size = std::size_t{64} << 20, lanes = static_cast<std::size_t>(vec::width);
  const std::vector<float> x(size, 1.0f);
  return best_rate(static_cast<double>(size) * sizeof(float), 5, [&] {
    vec sum[8];
    for (vec& s : sum) s = vec::zero();
    for (std::size_t i = 0; i < size; i += 8 * lanes)
      focus::detail::static_for<8>([&](auto u) {
        sum[u] = sum[u] + vec::load(&x[i + static_cast<std::size_t>(u) * lanes]);
      });
    float total = 0;
    for (const vec& s : sum) total += reduce_add(s);
    asm volatile("" : : "m"(total));
  });
}

/// Bytes a second that the threads of an executor read together, by the wall clock. From 1 GiB:
/// servers' last caches hold 256 MiB and more.
template <class Exec>
double measure_bandwidth(Exec& exec) {
  using vec = focus::detail::vec<float>;
  constexpr std::size_t part = std::size_t{16} << 20, lanes = static_cast<std::size_t>(vec::width);
  constexpr focus::index_t parts = 16;
  static const std::vector<float> x(part * static_cast<std::size_t>(parts), 1.0f);
  const auto read = [](focus::index_t p, focus::index_t) {
    const float* const from = x.data() + static_cast<std::size_t>(p) * part;
    vec sum[8];
    for (vec& s : sum) s = vec::zero();
    for (std::size_t i = 0; i < part; i += 8 * lanes)
      focus::detail::static_for<8>([&](auto u) {
        sum[u] = sum[u] + vec::load(from + i + static_cast<std::size_t>(u) * lanes);
      });
    float total = 0;
    for (const vec& s : sum) total += reduce_add(s);
    asm volatile("" : : "m"(total));
  };
  double best = 0;
  for (int tries = 0; tries < 3; ++tries) {
    const stopwatch time(false);
    exec.parallel_for(parts, read);
    best = (std::max)(best, static_cast<double>(x.size()) * sizeof(float) / time.seconds());
  }
  return best;
}

/// Operations a second of the AMX tile product of bf16 (16 x 32 by 32 x 16, sums in float), on
/// tiles in registers; 0 where it is not compiled for or the system does not permit it.
inline double measure_amx_peak() {
#if FOCUS_BENCH_AMX
  constexpr long request_permission = 0x1023, tile_data = 18;  // arch_prctl(2)
  if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) return 0;
  struct alignas(64) {
    unsigned char palette = 1, start_row = 0, reserved[14] = {};
    unsigned short row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
  constexpr int repetitions = 100'000, products = 4;
  const double rate = best_rate(2.0 * 16 * 16 * 32 * products * repetitions, 20, [&] {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int r = 0; r < repetitions; ++r) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  });
  _tile_release();
  return rate;
#else
  return 0;
#endif
}

}  // namespace bench
