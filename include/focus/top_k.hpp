// Top-k: each token keeps its k best groups.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "focus/checks/overlap.hpp"
#include "focus/checks/routing_arguments.hpp"
#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/options.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// A place in the ranking of numbers as an integer: the larger, the better. NaN is below -infinity,
/// the two zeros are equal. Integers, because comparisons with NaN do not survive -ffast-math.
template <std::floating_point A>
constexpr auto rank_of(A x) noexcept {
  using integer = std::conditional_t<sizeof(A) == 4, std::int32_t, std::int64_t>;
  constexpr integer lowest = (std::numeric_limits<integer>::min)();
  const auto bits = std::bit_cast<integer>(x);
  const integer magnitude = bits & ~lowest;
  const integer rank = bits < 0 ? -magnitude : magnitude;
  return is_nan(x) ? lowest + 1 : rank;
}

/// The k groups of the highest rank, the lower group first among equals; `ranks` is used up.
template <std::signed_integral Rank>
constexpr group_mask select_groups(Rank* ranks, index_t groups, int k) noexcept {
  constexpr Rank taken = (std::numeric_limits<Rank>::min)();  // below any rank
  group_mask mask = 0;
  for (int picked = 0; picked < k; ++picked) {
    Rank best = taken;
    index_t at = 0;
    for (index_t g = 0; g < groups; ++g) {
      const bool better = ranks[g] > best;
      best = better ? ranks[g] : best;
      at = better ? g : at;
    }
    mask |= group_mask{1} << at;
    ranks[at] = taken;
  }
  return mask;
}

/// The k best groups of one token. value(g): what group g is ranked by.
template <class Value>
constexpr group_mask best_groups(index_t groups, int k, Value&& value) {
  decltype(rank_of(value(0))) ranks[max_groups];
  for (index_t g = 0; g < groups; ++g) ranks[g] = rank_of(value(g));
  return select_groups(ranks, groups, k);
}

}  // namespace detail

/// The k best groups of each token, as a mask with exactly k bits.
///
/// Ties go to the lower group; NaN ranks last. The mask of a token depends on that token alone.
///
/// @param assignment  [n, K], 1 <= K <= 64: assignments, or any scores in which larger is better
/// @param k           1 ... K
/// @param masks       [n]: bit g is set where group g is one of the k best. May not overlap
///                    assignment
/// @throws invalid_argument before anything is written
template <tensor_like<2> Assignment, mutable_span_like<group_mask> Masks>
void top_k_groups(const Assignment& assignment, int k, Masks&& masks) {
  constexpr const char* name = "top_k_groups";
  const auto a = detail::as_const_view(assignment);
  const auto out = detail::as_span(masks);
  const index_t n = a.extent(0), groups = a.extent(1);
  detail::require(groups >= 1 && groups <= max_groups, name, "assignment", "1 to 64 groups",
                  groups);
  detail::require_top_k(k, groups, name);
  detail::require_data(a, name, "assignment");
  detail::require_length(out.size(), n, name, "masks");
  detail::require_data(detail::span_view(out), name, "masks");
  detail::require_disjoint(detail::span_view(out), "masks", a, "assignment", name);
  for (index_t i = 0; i < n; ++i) {
    const auto* row = a.row(i);
    out[static_cast<std::size_t>(i)] =
        detail::best_groups(groups, k, [&](index_t g) { return detail::widen(row[g]); });
  }
}

}  // namespace FOCUS_ABI
}  // namespace focus
