// Patterns from which sparse attention has nothing to gain: it must not be slower than dense.
#pragma once

#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "comparison.hpp"

namespace bench {

/// The patterns at one sequence length; those of small n at the lengths that are small.
inline std::vector<sparse_case> hard_patterns(index_t tokens, const focus::pattern_options& usual) {
  constexpr index_t small = 256;
  if (tokens <= small) {
    focus::pattern_options narrow = usual, none = usual;
    narrow.window = 15, none.window = focus::no_window;
    return {{"small n", 8, 1, balanced_masks(tokens, 8, 1), {}, usual},
            {"small n, k = 2", 8, 2, balanced_masks(tokens, 8, 2), {}, usual},
            {"small n, window 15", 8, 1, balanced_masks(tokens, 8, 1), {}, narrow},
            {"small n, no window", 8, 1, balanced_masks(tokens, 8, 1), {}, none}};
  }
  focus::pattern_options wide = usual;
  wide.window = tokens;
  const mask_list all(static_cast<std::size_t>(tokens), ~focus::group_mask{0});
  return {{"K = 4, k = 2", 4, 2, balanced_masks(tokens, 4, 2), {}, usual},
          {"K = 8, k = 2", 8, 2, balanced_masks(tokens, 8, 2), {}, usual},
          {"k = K = 8", 8, 8, balanced_masks(tokens, 8, 8), {}, usual},
          {"all 64 bits set", 64, 64, all, {}, usual},
          {"K = 64, k = 4", 64, 4, balanced_masks(tokens, 64, 4), {}, usual},
          {"K = 64, k = 16", 64, 16, balanced_masks(tokens, 64, 16), {}, usual},
          {"each its own, k = 3", 64, 3, distinct_masks(tokens, 3), {}, usual},
          {"each its own, k = 8", 64, 8, distinct_masks(tokens, 8), {}, usual},
          {"window >= n", 8, 1, balanced_masks(tokens, 8, 1), {}, wide}};
}

/// The worst of each pattern over the sequence lengths, by the time of plan and attention.
class worst_ratios {
 public:
  void add(const attention_setting& s, const sparse_case& what, const comparison& c) {
    const auto at = worst_.try_emplace(what.masks, std::pair{s.tokens, c});
    if (at.second) order_.push_back(what.masks);
    auto& kept = at.first->second;
    if (c.without_route >= kept.second.without_route) kept = {s.tokens, c};
  }

  void print() const {
    std::printf("%-22s %7s %10s %8s %8s %13s %14s %11s\n", "worst of", "at n", "dense ms", "pairs",
                "sparse", "plan + sparse", "with route too", "allocations");
    for (const std::string& name : order_) {
      const auto& [tokens, c] = worst_.at(name);
      std::printf("%-22s %7lld %10.4f %7.1f%% %7.2fx %12.2fx %13.2fx %11ld\n", name.c_str(),
                  static_cast<long long>(tokens), 1e3 * c.dense,
                  100 * static_cast<double>(c.pairs) / causal_pairs(tokens), c.sparse / c.dense,
                  c.without_route, 1 / c.speedup, c.allocations);
    }
  }

 private:
  std::vector<std::string> order_;
  std::map<std::string, std::pair<index_t, comparison>> worst_;
};

}  // namespace bench
