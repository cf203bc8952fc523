// The arguments that every attention function takes, and what is checked of them before anything is
// written.
#pragma once

#include <concepts>
#include <string>

#include "focus/checks/overlap.hpp"
#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The extents of one attention call.
struct attention_shape {
  index_t heads = 0, kv_heads = 0;
  index_t n_q = 0, n_k = 0;
  index_t head_dim = 0, value_dim = 0;

  /// Query head h reads kv head h / queries_per_kv_head().
  [[nodiscard]] constexpr index_t queries_per_kv_head() const noexcept {
    return kv_heads > 0 ? heads / kv_heads : 1;
  }
};

/// The heads [first, first + count) of a tensor; of one that has no data, or no elements at all,
/// the extents.
template <class T, int Rank>
tensor_view<T, Rank> heads_slice(const tensor_view<T, Rank>& view, index_t first, index_t count) {
  auto extents = view.extents();
  extents[0] = count;
  T* const data = view.data() == nullptr ? nullptr : view.data() + first * view.stride(0);
  return {data, extents, view.strides()};
}

/// Views of Q, K, V, out and lse after their checks, as the kernels take them.
template <scalar TQ, scalar TK, scalar TV, scalar TOut, std::floating_point TLse>
struct attention_arguments {
  using accumulator = accumulator_t<TQ>;
  static_assert(std::same_as<accumulator, accumulator_t<TK>> &&
                    std::same_as<accumulator, accumulator_t<TV>> &&
                    std::same_as<accumulator, accumulator_t<TOut>>,
                "focus: q, k, v and out must all be double, or all be types whose sums are float.");

  /// Everything but lse is stored in bfloat16, of whatever name, and summed in float.
  static constexpr bool all_bfloat16 = std::same_as<accumulator, float> && is_bfloat16<TQ> &&
                                       is_bfloat16<TK> && is_bfloat16<TV> && is_bfloat16<TOut>;

  tensor_view<const TQ, 3> q;
  tensor_view<const TK, 3> k;
  tensor_view<const TV, 3> v;
  tensor_view<TOut, 3> out;
  matrix_view<TLse> lse;  // empty: not wanted
  attention_shape shape;

  [[nodiscard]] constexpr bool wants_lse() const noexcept { return lse.data() != nullptr; }

  /// The same for kv heads [first, first + count) and the query heads that read them.
  [[nodiscard]] attention_arguments heads_of(index_t first, index_t count) const {
    attention_arguments part = *this;
    const index_t group = shape.queries_per_kv_head();
    part.q = heads_slice(q, first * group, count * group);
    part.k = heads_slice(k, first, count);
    part.v = heads_slice(v, first, count);
    part.out = heads_slice(out, first * group, count * group);
    part.lse = heads_slice(lse, first * group, count * group);
    part.shape.heads = count * group;
    part.shape.kv_heads = count;
    return part;
  }
};

/// Checks the shapes of Q, K and V and that they have data; returns what they say.
template <class TQ, class TK, class TV>
attention_shape check_attention_inputs(const char* function, const tensor_view<const TQ, 3>& q,
                                       const tensor_view<const TK, 3>& k,
                                       const tensor_view<const TV, 3>& v) {
  attention_shape s;
  s.heads = q.extent(0), s.n_q = q.extent(1), s.head_dim = q.extent(2);
  s.kv_heads = k.extent(0), s.n_k = k.extent(1), s.value_dim = v.extent(2);
  require_shape(k, {s.kv_heads, s.n_k, s.head_dim}, function, "k");
  require_shape(v, {s.kv_heads, s.n_k, s.value_dim}, function, "v");
  if (s.kv_heads == 0 ? s.heads != 0 : s.heads % s.kv_heads != 0)
    fail_argument(
        function, "q",
        "a number of heads that is a multiple of kv_heads = " + std::to_string(s.kv_heads),
        s.heads);
  require_data(q, function, "q");
  require_data(k, function, "k");
  require_data(v, function, "v");
  return s;
}

/// Checks shapes, null pointers and overlap; throws invalid_argument with the argument's name.
template <class TQ, class TK, class TV, class TOut, class TLse>
auto check_attention_views(const char* function, const tensor_view<const TQ, 3>& q,
                           const tensor_view<const TK, 3>& k, const tensor_view<const TV, 3>& v,
                           const tensor_view<TOut, 3>& out, const matrix_view<TLse>& lse) {
  const attention_shape s = check_attention_inputs(function, q, k, v);
  require_shape(out, {s.heads, s.n_q, s.value_dim}, function, "out");
  require_data(out, function, "out");
  require_distinct_elements(out, "out", function);
  require_disjoint(out, "out", q, "q", function);
  require_disjoint(out, "out", k, "k", function);
  require_disjoint(out, "out", v, "v", function);
  if (lse.data() != nullptr || !lse.empty()) {
    require_shape(lse, {s.heads, s.n_q}, function, "lse");
    require_data(lse, function, "lse");
    require_distinct_elements(lse, "lse", function);
    require_disjoint(lse, "lse", q, "q", function);
    require_disjoint(lse, "lse", k, "k", function);
    require_disjoint(lse, "lse", v, "v", function);
    require_disjoint(lse, "lse", out, "out", function);
  }
  return attention_arguments<TQ, TK, TV, TOut, TLse>{q, k, v, out, lse, s};
}

/// The same for tensors of whatever type: all behind it depends on the types of their elements
/// alone.
template <class Q, class K, class V, class Out, class Lse>
auto check_attention_arguments(const char* function, Q&& q, K&& k, V&& v, Out&& out, Lse&& lse) {
  return detail::check_attention_views(function, detail::as_const_view(q), detail::as_const_view(k),
                                       detail::as_const_view(v), detail::as_view(out),
                                       detail::as_view(lse));
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
