// The arguments that every attention function takes, and what is checked of them before anything is
// written.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <string>

#include "focus/checks/overlap.hpp"
#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The extents of one attention call, or of each sequence of a batch.
struct attention_shape {
  index_t heads = 0, kv_heads = 0;
  index_t n_q = 0, n_k = 0;
  index_t head_dim = 0, value_dim = 0;

  /// Query head h reads kv head h / queries_per_kv_head().
  [[nodiscard]] constexpr index_t queries_per_kv_head() const noexcept {
    return kv_heads > 0 ? heads / kv_heads : 1;
  }
  /// The same for some kv heads and the query heads that read them.
  [[nodiscard]] constexpr attention_shape of_kv_heads(index_t count) const noexcept {
    attention_shape part = *this;
    part.heads = count * queries_per_kv_head();
    part.kv_heads = count;
    return part;
  }
};

/// The heads [first, first + count) of a tensor; of one that has no data, or no elements at all,
/// the extents.
template <class T, int Rank>
tensor_view<T, Rank> heads_slice(const tensor_view<T, Rank>& view, index_t first, index_t count) {
  auto extents = view.extents();
  extents[0] = count;
  // The strides of an empty view may be any numbers: they are not to be multiplied.
  T* const data = view.empty() ? view.data() : view.data() + first * view.stride(0);
  return {data, extents, view.strides()};
}

/// The tensor of sequence `b` of a batch of them; of one that has no data the extents.
template <class T, int Rank>
tensor_view<T, Rank - 1> sequence_slice(const tensor_view<T, Rank>& view, index_t b) {
  std::array<index_t, static_cast<std::size_t>(Rank - 1)> extents, strides;
  for (int r = 1; r < Rank; ++r) {
    extents[static_cast<std::size_t>(r - 1)] = view.extent(r);
    strides[static_cast<std::size_t>(r - 1)] = view.stride(r);
  }
  return {view.empty() ? view.data() : view.data() + b * view.stride(0), extents, strides};
}

/// Views of Q, K, V, out and lse after their checks, as the kernels take them. Rank: of Q, 3, or 4
/// for a batch of sequences.
template <scalar TQ, scalar TK, scalar TV, scalar TOut, std::floating_point TLse, int Rank = 3>
struct attention_arguments {
  static constexpr int rank = Rank;
  using accumulator = accumulator_t<TQ>;
  static_assert(std::same_as<accumulator, accumulator_t<TK>> &&
                    std::same_as<accumulator, accumulator_t<TV>> &&
                    std::same_as<accumulator, accumulator_t<TOut>>,
                "focus: q, k, v and out must all be double, or all be types whose sums are float.");

  /// Everything but lse is stored in bfloat16, of whatever name, and summed in float.
  static constexpr bool all_bfloat16 = std::same_as<accumulator, float> && is_bfloat16<TQ> &&
                                       is_bfloat16<TK> && is_bfloat16<TV> && is_bfloat16<TOut>;

  tensor_view<const TQ, Rank> q;
  tensor_view<const TK, Rank> k;
  tensor_view<const TV, Rank> v;
  tensor_view<TOut, Rank> out;
  tensor_view<TLse, Rank - 1> lse;  // empty: not wanted
  attention_shape shape;

  [[nodiscard]] constexpr bool wants_lse() const noexcept { return lse.data() != nullptr; }

  /// The arguments of sequence b.
  [[nodiscard]] attention_arguments<TQ, TK, TV, TOut, TLse> sequence(index_t b) const
      requires(Rank == 4) {
    return {detail::sequence_slice(q, b),   detail::sequence_slice(k, b),
            detail::sequence_slice(v, b),   detail::sequence_slice(out, b),
            detail::sequence_slice(lse, b), shape};
  }
  /// The same for kv heads [first, first + count) and the query heads that read them.
  [[nodiscard]] attention_arguments heads_of(index_t first, index_t count) const
      requires(Rank == 3) {
    attention_arguments part = *this;
    const index_t group = shape.queries_per_kv_head();
    part.q = heads_slice(q, first * group, count * group);
    part.k = heads_slice(k, first, count);
    part.v = heads_slice(v, first, count);
    part.out = heads_slice(out, first * group, count * group);
    part.lse = heads_slice(lse, first * group, count * group);
    part.shape = shape.of_kv_heads(count);
    return part;
  }
};

/// f(arguments of a sequence, its number), for each in turn.
template <class Arguments, class F>
void for_each_sequence(const Arguments& args, F&& f) {
  if constexpr (Arguments::rank == 4)
    for (index_t b = 0; b < args.q.extent(0); ++b) f(args.sequence(b), b);
  else
    f(args, index_t{0});
}

/// The shape that a tensor must have beside Q: {extents...}, and where Q is a batch of sequences,
/// their number before that.
template <class TQ, int Rank, class... Extents>
auto shape_beside(const tensor_view<const TQ, Rank>& q, Extents... extents) {
  static_assert(Rank == 3 || Rank == 4);
  if constexpr (Rank == 4)
    return std::array{q.extent(0), extents...};
  else
    return std::array{extents...};
}

/// Checks the shapes of Q, K and V and that they have data; returns what they say.
template <class TQ, class TK, class TV, int Rank>
attention_shape check_attention_inputs(const char* function, const tensor_view<const TQ, Rank>& q,
                                       const tensor_view<const TK, Rank>& k,
                                       const tensor_view<const TV, Rank>& v) {
  attention_shape s;
  s.heads = q.extent(Rank - 3), s.n_q = q.extent(Rank - 2), s.head_dim = q.extent(Rank - 1);
  s.kv_heads = k.extent(Rank - 3), s.n_k = k.extent(Rank - 2), s.value_dim = v.extent(Rank - 1);
  detail::require_shape(k, detail::shape_beside(q, s.kv_heads, s.n_k, s.head_dim), function, "k");
  detail::require_shape(v, detail::shape_beside(q, s.kv_heads, s.n_k, s.value_dim), function, "v");
  if (s.kv_heads == 0 ? s.heads != 0 : s.heads % s.kv_heads != 0)
    fail_argument(function, "q",
                  std::string("a number of heads that is a multiple of kv_heads = ") +
                      std::to_string(s.kv_heads),
                  s.heads);
  require_data(q, function, "q");
  require_data(k, function, "k");
  require_data(v, function, "v");
  return s;
}

/// Checks shapes, null pointers and overlap; throws invalid_argument with the argument's name.
template <class TQ, class TK, class TV, class TOut, class TLse, int Rank>
auto check_attention_views(const char* function, const tensor_view<const TQ, Rank>& q,
                           const tensor_view<const TK, Rank>& k,
                           const tensor_view<const TV, Rank>& v, const tensor_view<TOut, Rank>& out,
                           const tensor_view<TLse, Rank - 1>& lse) {
  const attention_shape s = detail::check_attention_inputs(function, q, k, v);
  detail::require_shape(out, detail::shape_beside(q, s.heads, s.n_q, s.value_dim), function, "out");
  require_data(out, function, "out");
  require_distinct_elements(out, "out", function);
  require_disjoint(out, "out", q, "q", function);
  require_disjoint(out, "out", k, "k", function);
  require_disjoint(out, "out", v, "v", function);
  if (lse.data() != nullptr || !lse.empty()) {
    detail::require_shape(lse, detail::shape_beside(q, s.heads, s.n_q), function, "lse");
    require_data(lse, function, "lse");
    require_distinct_elements(lse, "lse", function);
    require_disjoint(lse, "lse", q, "q", function);
    require_disjoint(lse, "lse", k, "k", function);
    require_disjoint(lse, "lse", v, "v", function);
    require_disjoint(lse, "lse", out, "out", function);
  }
  return attention_arguments<TQ, TK, TV, TOut, TLse, Rank>{q, k, v, out, lse, s};
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
