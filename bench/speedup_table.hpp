// What `speedup` prints, and the same as a file.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>

#include "comparison.hpp"

namespace bench {

/// What the counted work says of one result.
struct figures {
  double pairs_share;  // computed / causal pairs
  double ideal;        // causal pairs / computed: the speedup if a pair took equally long
  double efficiency;   // speedup / ideal
  double peak_share;   // of dense: operations a second / FMA peak of the cores in use
};

inline figures figures_of(const attention_setting& s, const comparison& c, double peak) {
  const double causal = causal_pairs(s.tokens), ideal = causal / static_cast<double>(c.pairs);
  const double flops = static_cast<double>(s.heads) * flops_per_pair(s.head_dim) * causal;
  return {.pairs_share = 1 / ideal,
          .ideal = ideal,
          .efficiency = c.speedup / ideal,
          .peak_share = flops / c.dense / (peak * static_cast<double>(s.threads))};
}

class speedup_table {
 public:
  /// csv: the name of a file, or empty.
  explicit speedup_table(const std::string& csv) {
    if (!csv.empty() && (csv_ = std::fopen(csv.c_str(), "w")) == nullptr)
      throw std::runtime_error(csv + " cannot be written");
    std::printf("%7s %4s %4s %3s %2s %-22s %10s %7s %8s %7s %10s %8s %7s %7s %6s %6s %9s %9s\n",
                "tokens", "type", "d", "K", "k", "masks", "dense ms", "of peak", "route ms",
                "plan ms", "sparse ms", "speedup", "pairs", "ideal", "effic.", "allocs", "dense MB",
                "sparse MB");
    if (csv_ != nullptr)
      std::fprintf(csv_,
                   "tokens,type,head_dim,heads,kv_heads,threads,window,sinks,groups,top_k,masks,"
                   "dense_ms,dense_peak_share,route_ms,plan_ms,sparse_ms,speedup,pairs_share,"
                   "ideal_speedup,efficiency,allocations,dense_scratch_mb,sparse_scratch_mb,"
                   "rounds\n");
  }
  ~speedup_table() {
    if (csv_ != nullptr) std::fclose(csv_);
  }
  speedup_table(const speedup_table&) = delete;
  speedup_table& operator=(const speedup_table&) = delete;

  void add(const attention_setting& s, const std::string& type, const sparse_case& what,
           const comparison& c, double peak) {
    const figures f = figures_of(s, c, peak);
    constexpr double ms = 1e3, mb = 1e-6;
    const double dense_mb = mb * static_cast<double>(c.dense_scratch);
    const double sparse_mb = mb * static_cast<double>(c.sparse_scratch);
    std::printf(
        "%7lld %4s %4lld %3lld %2lld %-22s %10.2f %6.1f%% %8.3f %7.3f %10.2f %7.2fx %6.1f%% %6.2fx "
        "%6.2f %6ld %9.2f %9.2f\n",
        as_long(s.tokens), type.c_str(), as_long(s.head_dim), as_long(what.groups),
        as_long(what.top_k), what.masks.c_str(), ms * c.dense, 100 * f.peak_share, ms * c.route,
        ms * c.plan, ms * c.sparse, c.speedup, 100 * f.pairs_share, f.ideal, f.efficiency,
        c.allocations, dense_mb, sparse_mb);
    std::fflush(stdout);
    if (csv_ == nullptr) return;
    std::fprintf(csv_,
                 "%lld,%s,%lld,%lld,%lld,%lld,%lld,%lld,%lld,%lld,%s,%.4f,%.4f,%.4f,%.4f,%.4f,%.4f,"
                 "%.5f,%.4f,%.4f,%ld,%.3f,%.3f,%lld\n",
                 as_long(s.tokens), type.c_str(), as_long(s.head_dim), as_long(s.heads),
                 as_long(s.kv_heads), as_long(s.threads), as_long(what.pattern.window),
                 as_long(what.pattern.sink_tokens), as_long(what.groups), as_long(what.top_k),
                 what.masks.c_str(), ms * c.dense, f.peak_share, ms * c.route, ms * c.plan,
                 ms * c.sparse, c.speedup, f.pairs_share, f.ideal, f.efficiency, c.allocations,
                 dense_mb, sparse_mb, as_long(c.rounds));
    std::fflush(csv_);
  }

 private:
  static long long as_long(index_t n) { return n; }

  std::FILE* csv_ = nullptr;
};

}  // namespace bench
