// Made-up inputs of one attention call.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include <focus/options.hpp>
#include <focus/tensor_view.hpp>

namespace bench {

using focus::index_t;

inline std::vector<float> made_up(index_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(size));
  for (index_t i = 0; i < size; ++i) values.push_back(normal(random));
  return values;
}

/// Q, K, V and out as [heads, tokens, head_dim].
class attention_inputs {
 public:
  attention_inputs(index_t heads, index_t tokens, index_t head_dim)
      : extents_{heads, tokens, head_dim},
        q_(made_up(heads * tokens * head_dim, 1)),
        k_(made_up(heads * tokens * head_dim, 2)),
        v_(made_up(heads * tokens * head_dim, 3)),
        out_(q_.size()) {}

  focus::tensor_view<const float, 3> q() const { return {q_.data(), extents_}; }
  focus::tensor_view<const float, 3> k() const { return {k_.data(), extents_}; }
  focus::tensor_view<const float, 3> v() const { return {v_.data(), extents_}; }
  focus::tensor_view<float, 3> out() { return {out_.data(), extents_}; }

 private:
  std::array<index_t, 3> extents_;
  std::vector<float> q_, k_, v_, out_;
};

/// A mask of top_k groups for each token; each group has its equal share of the tokens, in random
/// order.
inline std::vector<focus::group_mask> balanced_masks(index_t tokens, int groups, int top_k) {
  std::vector<index_t> order(static_cast<std::size_t>(tokens));
  std::iota(order.begin(), order.end(), index_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937_64(4));
  std::mt19937_64 random(5);
  std::vector<focus::group_mask> masks(order.size());
  for (std::size_t t = 0; t < masks.size(); ++t) {
    masks[t] = focus::group_mask{1} << (order[t] % groups);
    for (int chosen = 1; chosen < top_k;) {
      const focus::group_mask bit = focus::group_mask{1}
                                    << (random() % static_cast<unsigned>(groups));
      if ((masks[t] & bit) == 0) masks[t] |= bit, ++chosen;
    }
  }
  return masks;
}

/// Pairs (i, j) with j <= i.
inline double causal_pairs(index_t tokens) {
  return 0.5 * static_cast<double>(tokens) * static_cast<double>(tokens + 1);
}

/// Floating-point operations of one (query, key) pair in one head: q . k and the weight times v.
inline double flops_per_pair(index_t head_dim) {
  return 4.0 * static_cast<double>(head_dim);
}

}  // namespace bench
