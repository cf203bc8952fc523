// What merging two attention states checks before anything is written.
#pragma once

#include <concepts>

#include "focus/checks/overlap.hpp"
#include "focus/config.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Refuses an output that shares an element with an input, unless it is that very tensor.
template <class Out, class In, int Rank>
void require_same_or_disjoint(const tensor_view<Out, Rank>& out, const char* out_name,
                              const tensor_view<const In, Rank>& other, const char* other_name,
                              const char* function) {
  if constexpr (std::same_as<Out, In>)
    if (out.data() == other.data() && same_offsets(out, other)) return;
  require_disjoint(out, out_name, other, other_name, function);
}

/// Checks the two states and where the merged one goes; throws invalid_argument.
template <class TA, class LA, class TB, class LB, class TOut, class LOut>
void check_merge_arguments(const char* function, const tensor_view<const TA, 3>& o_a,
                           const matrix_view<const LA>& l_a, const tensor_view<const TB, 3>& o_b,
                           const matrix_view<const LB>& l_b, const tensor_view<TOut, 3>& o,
                           const matrix_view<LOut>& l) {
  const index_t heads = o_a.extent(0), n = o_a.extent(1), value_dim = o_a.extent(2);
  require_shape(l_a, {heads, n}, function, "lse_a");
  require_shape(o_b, {heads, n, value_dim}, function, "out_b");
  require_shape(l_b, {heads, n}, function, "lse_b");
  require_shape(o, {heads, n, value_dim}, function, "out");
  require_shape(l, {heads, n}, function, "lse");
  require_data(o_a, function, "out_a");
  require_data(l_a, function, "lse_a");
  require_data(o_b, function, "out_b");
  require_data(l_b, function, "lse_b");
  require_data(o, function, "out");
  require_data(l, function, "lse");
  require_distinct_elements(o, "out", function);
  require_distinct_elements(l, "lse", function);
  require_same_or_disjoint(o, "out", o_a, "out_a", function);
  require_same_or_disjoint(o, "out", o_b, "out_b", function);
  require_disjoint(o, "out", l_a, "lse_a", function);
  require_disjoint(o, "out", l_b, "lse_b", function);
  require_disjoint(o, "out", l, "lse", function);
  require_same_or_disjoint(l, "lse", l_a, "lse_a", function);
  require_same_or_disjoint(l, "lse", l_b, "lse_b", function);
  require_disjoint(l, "lse", o_a, "out_a", function);
  require_disjoint(l, "lse", o_b, "out_b", function);
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
