// Attention over two disjoint sets of keys, merged exactly.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <type_traits>

#include "focus/checks/merge_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The shares of two states in their merged one, and its logsumexp.
struct merge_weights {
  double a = 0, b = 0, lse = 0;
};

/// lse_a and lse_b are natural logarithms, neither of them -inf.
inline merge_weights weigh_states(double lse_a, double lse_b) noexcept {
  const double top = lse_a < lse_b ? lse_b : lse_a;
  const double a = std::exp(lse_a - top), b = std::exp(lse_b - top), sum = a + b;
  return {a / sum, b / sum, top + std::log(sum)};
}

/// Copies a row, bit for bit where the types are the same.
template <class From, class To>
void copy_row(const From* from, index_t count, To* to) {
  for (index_t c = 0; c < count; ++c) {
    if constexpr (std::same_as<From, To>)
      to[c] = from[c];
    else
      to[c] = narrow<To>(static_cast<accumulator_t<To>>(detail::widen(from[c])));
  }
}

/// to = weight_a * a + weight_b * b. `to` may be a or b.
template <class A, class TA, class TB, class TOut>
void mix_rows(A weight_a, const TA* a, A weight_b, const TB* b, index_t count, TOut* to) {
  constexpr int lanes = vec<A>::width;
  const vec<A> factor_a = vec<A>::broadcast(weight_a), factor_b = vec<A>::broadcast(weight_b);
  for (index_t c = 0; c < count; c += lanes) {
    const index_t length = (std::min<index_t>)(lanes, count - c);
    const vec<A> x =
        length == lanes ? detail::load_widened(a + c) : detail::load_widened_partial(a + c, length);
    const vec<A> y =
        length == lanes ? detail::load_widened(b + c) : detail::load_widened_partial(b + c, length);
    detail::store_narrowed(fma(x, factor_a, y * factor_b), to + c, length);
  }
}

/// The merge after its checks.
template <class A, class TA, class LA, class TB, class LB, class TOut, class LOut>
void run_merge(const tensor_view<const TA, 3>& out_a, const matrix_view<const LA>& lse_a,
               const tensor_view<const TB, 3>& out_b, const matrix_view<const LB>& lse_b,
               const tensor_view<TOut, 3>& out, const matrix_view<LOut>& lse,
               const any_executor& exec) {
  constexpr index_t task_rows = 64;
  const index_t heads = out.extent(0), n = out.extent(1), value_dim = out.extent(2);
  const index_t tasks_a_head = ceil_div(n, task_rows);
  exec.parallel_for(heads * tasks_a_head, [&](index_t task, index_t) {
    const index_t h = task / tasks_a_head, first = task % tasks_a_head * task_rows;
    for (index_t i = first; i < (std::min)(first + task_rows, n); ++i) {
      const LA& a = lse_a(h, i);
      const LB& b = lse_b(h, i);
      const bool a_empty = is_minus_infinity(a), b_empty = is_minus_infinity(b);
      TOut* const row = out.row(h, i);
      if (a_empty && b_empty) {
        fill(row, row + value_dim, detail::narrow<TOut>(A{0}));
        store_minus_infinity(lse(h, i));
      } else if (b_empty) {
        copy_row(out_a.row(h, i), value_dim, row);
        lse(h, i) = static_cast<LOut>(a);
      } else if (a_empty) {
        copy_row(out_b.row(h, i), value_dim, row);
        lse(h, i) = static_cast<LOut>(b);
      } else {
        const merge_weights w = weigh_states(static_cast<double>(a), static_cast<double>(b));
        mix_rows(static_cast<A>(w.a), out_a.row(h, i), static_cast<A>(w.b), out_b.row(h, i),
                 value_dim, row);
        lse(h, i) = static_cast<LOut>(w.lse);
      }
    }
  });
}

}  // namespace detail

/// The attention state (out, lse) over the union of two disjoint sets of keys, from the states over
/// each:
///
///   lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
///
/// A state with an lse of -inf is empty: the other one is then copied bit for bit, whatever out
/// holds beside the -inf; of two empty states the result is zeros and -inf.
///
/// @param out_a  [heads, n, value_dim], any strides but the last and any storage type, like out_b
///               and out
/// @param lse_a  [heads, n], natural logarithm, float or double, like lse_b and lse
/// @param out_b  [heads, n, value_dim]
/// @param lse_b  [heads, n]
/// @param out    [heads, n, value_dim]. May be out_a or out_b itself (same memory, strides and
///               type), and overlap nothing else
/// @param lse    [heads, n]. May be lse_a or lse_b itself, and overlap nothing else
/// @param exec   where the loops run
/// @throws invalid_argument before anything is written
template <tensor_like<3> OutA, tensor_like<2> LseA, tensor_like<3> OutB, tensor_like<2> LseB,
          mutable_tensor_like<3> Out, mutable_tensor_like<2> Lse, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void merge_attention_states(const OutA& out_a, const LseA& lse_a, const OutB& out_b,
                            const LseB& lse_b, Out&& out, Lse&& lse, Exec&& exec = {}) {
  constexpr const char* name = "merge_attention_states";
  using A = accumulator_t<detail::element_of<Out>>;
  static_assert(std::same_as<A, accumulator_t<detail::element_of<OutA>>> &&
                    std::same_as<A, accumulator_t<detail::element_of<OutB>>>,
                "focus: out_a, out_b and out must all be double, or all be types whose sums are "
                "float.");
  using lse_type = detail::element_of<Lse>;
  static_assert(std::floating_point<lse_type> && std::floating_point<detail::element_of<LseA>> &&
                    std::floating_point<detail::element_of<LseB>>,
                "focus: lse_a, lse_b and lse must be float or double.");
  const auto o_a = detail::as_const_view(out_a);
  const auto o_b = detail::as_const_view(out_b);
  const auto l_a = detail::as_const_view(lse_a);
  const auto l_b = detail::as_const_view(lse_b);
  const auto o = detail::as_view(out);
  const auto l = detail::as_view(lse);
  detail::check_merge_arguments(name, o_a, l_a, o_b, l_b, o, l);

  detail::run_merge<A>(o_a, l_a, o_b, l_b, o, l, detail::any_executor(exec));
}

}  // namespace FOCUS_ABI
}  // namespace focus
