// The arguments that every backward pass of attention takes, and what is checked of them before
// anything is written.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <type_traits>

#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/overlap.hpp"
#include "focus/config.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Views of the arguments of a backward pass after their checks. Rank: of Q, 3, or 4 for a batch of
/// sequences.
template <scalar TQ, scalar TK, scalar TV, scalar TOut, scalar TDout, std::floating_point TLse,
          std::floating_point TDlse, scalar TDq, scalar TDk, scalar TDv, int Rank = 3>
struct backward_arguments {
  static constexpr int rank = Rank;
  using accumulator = accumulator_t<TQ>;

  tensor_view<const TQ, Rank> q;
  tensor_view<const TK, Rank> k;
  tensor_view<const TV, Rank> v;
  tensor_view<const TOut, Rank> out;
  tensor_view<const TLse, Rank - 1> lse;
  tensor_view<const TDout, Rank> dout;  // the last four: not wanted, or zeros, where they are null
  tensor_view<const TDlse, Rank - 1> dlse;
  tensor_view<TDq, Rank> dq;
  tensor_view<TDk, Rank> dk;
  tensor_view<TDv, Rank> dv;
  attention_shape shape;

  /// Q, K and V are stored in bfloat16, of whatever name, and summed in float.
  static constexpr bool inputs_are_bfloat16 =
      std::same_as<accumulator, float> && is_bfloat16<TQ> && is_bfloat16<TK> && is_bfloat16<TV>;
  /// So are dout and the gradients: all that is multiplied, and all that is written. What is left
  /// out has no say, and out none either, whose only product is with dout.
  [[nodiscard]] bool all_bfloat16() const noexcept {
    return inputs_are_bfloat16 && (is_bfloat16<TDout> || !detail::is_given(dout)) &&
           (is_bfloat16<TDq> || !detail::is_given(dq)) &&
           (is_bfloat16<TDk> || !detail::is_given(dk)) &&
           (is_bfloat16<TDv> || !detail::is_given(dv));
  }
  template <class T>
  using stored_bfloat16 = std::conditional_t<is_bfloat16<T>, T, bfloat16>;
  /// The same arguments where all are: what is left out has that type too.
  [[nodiscard]] auto in_bfloat16() const noexcept {
    return backward_arguments<TQ, TK, TV, TOut, stored_bfloat16<TDout>, TLse, TDlse,
                              stored_bfloat16<TDq>, stored_bfloat16<TDk>, stored_bfloat16<TDv>,
                              Rank>{q,
                                    k,
                                    v,
                                    out,
                                    lse,
                                    as_bfloat16(dout),
                                    dlse,
                                    as_bfloat16(dq),
                                    as_bfloat16(dk),
                                    as_bfloat16(dv),
                                    shape};
  }

  /// The arguments of sequence b.
  [[nodiscard]] backward_arguments<TQ, TK, TV, TOut, TDout, TLse, TDlse, TDq, TDk, TDv> sequence(
      index_t b) const requires(Rank == 4) {
    return {detail::sequence_slice(q, b),
            detail::sequence_slice(k, b),
            detail::sequence_slice(v, b),
            detail::sequence_slice(out, b),
            detail::sequence_slice(lse, b),
            detail::sequence_slice(dout, b),
            detail::sequence_slice(dlse, b),
            detail::sequence_slice(dq, b),
            detail::sequence_slice(dk, b),
            detail::sequence_slice(dv, b),
            shape};
  }
  /// The same for kv heads [first, first + count) and the query heads that read them.
  [[nodiscard]] backward_arguments heads_of(index_t first, index_t count) const
      requires(Rank == 3) {
    backward_arguments part = *this;
    const index_t group = shape.queries_per_kv_head();
    const index_t first_head = first * group, heads = count * group;
    part.q = heads_slice(q, first_head, heads);
    part.k = heads_slice(k, first, count);
    part.v = heads_slice(v, first, count);
    part.out = heads_slice(out, first_head, heads);
    part.lse = heads_slice(lse, first_head, heads);
    part.dout = heads_slice(dout, first_head, heads);
    part.dlse = heads_slice(dlse, first_head, heads);
    part.dq = heads_slice(dq, first_head, heads);
    part.dk = heads_slice(dk, first, count);
    part.dv = heads_slice(dv, first, count);
    part.shape = shape.of_kv_heads(count);
    return part;
  }

 private:
  template <class T>
  static auto as_bfloat16(const tensor_view<T, Rank>& view) noexcept {
    if constexpr (is_bfloat16<std::remove_const_t<T>>)
      return view;
    else if constexpr (std::is_const_v<T>)
      return tensor_view<const bfloat16, Rank>{};
    else
      return tensor_view<bfloat16, Rank>{};
  }
};

/// A view and the name that the signature gives it.
template <class T, int Rank>
struct named_view {
  const tensor_view<T, Rank>& view;
  const char* name;
};
template <class T, int Rank>
named_view(const tensor_view<T, Rank>&, const char*) -> named_view<T, Rank>;

/// Refuses an output that overlaps itself or any of `others`.
template <class Out, class... Others>
void require_apart(const char* function, const Out& out, const Others&... others) {
  if (out.view.empty()) return;
  require_distinct_elements(out.view, out.name, function);
  (require_disjoint(out.view, out.name, others.view, others.name, function), ...);
}

/// A view that must have the given shape, or, where it may be left out, be {}.
template <int Rank, class T>
void require_tensor(
    const tensor_view<T, Rank>& view,
    const std::type_identity_t<std::array<index_t, static_cast<std::size_t>(Rank)>>& shape,
    bool optional, const char* function, const char* name) {
  if (optional && !detail::is_given(view)) return;
  require_shape(view, shape, function, name);
  require_data(view, function, name);
}

/// Checks shapes, null pointers and overlap; throws invalid_argument with the argument's name.
/// only_lse: out and dout may both be left out.
template <class TQ, class TK, class TV, class TOut, class TLse, class TDout, class TDlse, class TDq,
          class TDk, class TDv, int Rank>
auto check_backward_views(const char* function, bool only_lse, const tensor_view<const TQ, Rank>& q,
                          const tensor_view<const TK, Rank>& k,
                          const tensor_view<const TV, Rank>& v,
                          const tensor_view<const TOut, Rank>& out,
                          const tensor_view<const TLse, Rank - 1>& lse,
                          const tensor_view<const TDout, Rank>& dout,
                          const tensor_view<const TDlse, Rank - 1>& dlse,
                          const tensor_view<TDq, Rank>& dq, const tensor_view<TDk, Rank>& dk,
                          const tensor_view<TDv, Rank>& dv) {
  const attention_shape s = detail::check_attention_inputs(function, q, k, v);
  const auto require_extents = [&](const auto& view, bool optional, const char* name,
                                   auto... extents) {
    detail::require_tensor(view, detail::shape_beside(q, extents...), optional, function, name);
  };
  only_lse = only_lse && !detail::is_given(dout);
  require_extents(out, only_lse, "out", s.heads, s.n_q, s.value_dim);
  require_extents(lse, false, "lse", s.heads, s.n_q);
  require_extents(dout, only_lse, "dout", s.heads, s.n_q, s.value_dim);
  require_extents(dlse, true, "dlse", s.heads, s.n_q);
  require_extents(dq, true, "dq", s.heads, s.n_q, s.head_dim);
  require_extents(dk, true, "dk", s.kv_heads, s.n_k, s.head_dim);
  require_extents(dv, true, "dv", s.kv_heads, s.n_k, s.value_dim);
  const auto apart_from_inputs = [&](const auto& view, const auto&... others) {
    detail::require_apart(function, view, named_view{q, "q"}, named_view{k, "k"},
                          named_view{v, "v"}, named_view{out, "out"}, named_view{lse, "lse"},
                          named_view{dout, "dout"}, named_view{dlse, "dlse"}, others...);
  };
  const named_view dq_named{dq, "dq"};  // one declaration each: the types may differ
  const named_view dk_named{dk, "dk"};
  apart_from_inputs(dq_named);
  apart_from_inputs(dk_named, dq_named);
  apart_from_inputs(named_view{dv, "dv"}, dq_named, dk_named);

  using A = accumulator_t<TQ>;
  // Of q, k and v alone: an argument that is left out is a view of float, whatever these are.
  static_assert(std::same_as<A, accumulator_t<TK>> && std::same_as<A, accumulator_t<TV>>,
                "focus: q, k and v must all be double, or all be types whose sums are float.");
  static_assert(std::same_as<A, double> || (std::same_as<accumulator_t<TOut>, float> &&
                                            std::same_as<accumulator_t<TDout>, float>),
                "focus: out and dout may be double only when q, k and v are double.");
  return backward_arguments<TQ, TK, TV, TOut, TDout, TLse, TDlse, TDq, TDk, TDv, Rank>{
      q, k, v, out, lse, dout, dlse, dq, dk, dv, s};
}

/// The same for tensors of whatever type.
template <class Q, class K, class V, class Out, class Lse, class Dout, class Dlse, class Dq,
          class Dk, class Dv>
auto check_backward_arguments(const char* function, bool only_lse, Q&& q, K&& k, V&& v, Out&& out,
                              Lse&& lse, Dout&& dout, Dlse&& dlse, Dq&& dq, Dk&& dk, Dv&& dv) {
  return detail::check_backward_views(
      function, only_lse, detail::as_const_view(q), detail::as_const_view(k),
      detail::as_const_view(v), detail::as_const_view(out), detail::as_const_view(lse),
      detail::as_const_view(dout), detail::as_const_view(dlse), detail::as_view(dq),
      detail::as_view(dk), detail::as_view(dv));
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
