// What Google Benchmark does not say of an attention call: its share of the machine's FMA peak, the
// share of the causal pairs, its allocations.
#pragma once

#include <benchmark/benchmark.h>

#include <focus/tensor_view.hpp>

#include "allocations.hpp"
#include "machine.hpp"
#include "workload.hpp"

namespace bench {

using focus::index_t;

inline double fma_peak() {
  static const double peak = measure_fma_peak<float>();
  return peak;
}

/// Runs the calls of a benchmark and says of them what it does not.
class meter {
 public:
  template <class F>
  void run(benchmark::State& state, F&& call) {
    for (auto _ : state) {
      const long before = bench::allocations;
      const double start = cpu_seconds();
      call();
      seconds_ += cpu_seconds() - start;
      allocations_ += bench::allocations - before;
    }
  }
  /// pairs: of one head. operations: of one pair and head.
  void report(benchmark::State& state, double pairs, index_t heads, double operations,
              index_t tokens) const {
    const auto calls = static_cast<double>(state.iterations());
    const double rate = static_cast<double>(heads) * operations * pairs * calls / seconds_;
    state.counters["GFLOP/s"] = rate / 1e9;
    state.counters["peak_share"] = rate / peak_;
    state.counters["pairs_share"] = pairs / causal_pairs(tokens);
    state.counters["allocations"] = static_cast<double>(allocations_) / calls;
  }
  double seconds() const { return seconds_; }

 private:
  double peak_ = fma_peak();  // not to be measured in the time that is measured
  double seconds_ = 0;
  long allocations_ = 0;
};

}  // namespace bench
