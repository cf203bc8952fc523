// Made-up group masks.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <numeric>
#include <random>
#include <vector>

#include <focus/options.hpp>
#include <focus/tensor_view.hpp>

namespace bench {

using focus::group_mask;
using focus::index_t;
using mask_list = std::vector<group_mask>;

namespace detail {

constexpr group_mask bit(index_t group) {
  return group_mask{1} << group;
}

/// Groups drawn by `draw`, until there are top_k different ones.
template <class Draw>
void draw_more(group_mask& mask, index_t top_k, Draw&& draw) {
  while (std::popcount(mask) < top_k) mask |= bit(draw());
}

}  // namespace detail

/// Each group has its equal share of the tokens, in random order; the groups after a token's first
/// are drawn evenly.
inline mask_list balanced_masks(index_t tokens, index_t groups, index_t top_k) {
  std::vector<index_t> order(static_cast<std::size_t>(tokens));
  std::iota(order.begin(), order.end(), index_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937_64(4));
  std::mt19937_64 random(5);
  std::uniform_int_distribution<index_t> any(0, groups - 1);
  mask_list masks;
  masks.reserve(order.size());
  for (const index_t place : order) {
    masks.push_back(detail::bit(place % groups));
    detail::draw_more(masks.back(), top_k, [&] { return any(random); });
  }
  return masks;
}

/// Neighbours agree: runs of 64 tokens with equal masks, each drawn evenly.
inline mask_list run_masks(index_t tokens, index_t groups, index_t top_k) {
  constexpr std::size_t length = 64;
  std::mt19937_64 random(6);
  std::uniform_int_distribution<index_t> any(0, groups - 1);
  mask_list masks(static_cast<std::size_t>(tokens));
  for (std::size_t t = 0; t < masks.size(); ++t)
    if (t % length == 0)
      detail::draw_more(masks[t], top_k, [&] { return any(random); });
    else
      masks[t] = masks[t - 1];
  return masks;
}

/// A few groups hold most tokens: group g is drawn in proportion to 1 / (g + 1), Zipf's law.
inline mask_list skewed_masks(index_t tokens, index_t groups, index_t top_k) {
  std::vector<double> shares;
  for (index_t g = 0; g < groups; ++g) shares.push_back(1.0 / static_cast<double>(g + 1));
  std::discrete_distribution<index_t> zipf(shares.begin(), shares.end());
  std::mt19937_64 random(7);
  mask_list masks(static_cast<std::size_t>(tokens));
  for (group_mask& mask : masks) detail::draw_more(mask, top_k, [&] { return zipf(random); });
  return masks;
}

/// No two tokens have the same mask: sets of `top_k` of 64 groups, in random order. There are
/// 41,664 of three.
inline mask_list distinct_masks(index_t tokens, index_t top_k) {
  mask_list masks;
  masks.reserve(static_cast<std::size_t>(tokens));
  group_mask set = detail::bit(top_k) - 1;
  while (std::ssize(masks) < tokens) {
    masks.push_back(set);
    // The next larger number with as many bits: the lowest run of ones gives its highest to the
    // zero above it, and the rest falls to the bottom.
    const group_mask lowest = set & (~set + 1), carried = set + lowest;
    set = carried | (((set ^ carried) >> 2) / lowest);
  }
  std::shuffle(masks.begin(), masks.end(), std::mt19937_64(8));
  return masks;
}

}  // namespace bench
