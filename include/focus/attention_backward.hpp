// The gradient of dense and windowed attention.
#pragma once

#include <type_traits>

#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/backward_arguments.hpp"
#include "focus/config.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/passes/backward.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The gradient of attention after the checks of its views.
template <class Arguments>
void run_attention_backward(const char* function, const Arguments& args,
                            const pattern_options& pattern, const score_options& score,
                            const any_executor& exec) {
  validate(pattern, function);
  validate(score, function);
  using A = typename Arguments::accumulator;
  const attention_shape& s = args.shape;
  const auto resolved = detail::resolve(pattern, s.n_q, s.n_k);
  const auto scoring = detail::resolve<A>(score, s.head_dim);
  detail::with_gradient_operands(args, [&]<class E>(const auto& stored) {
    detail::run_backward<E>(stored, scoring, make_ungated{}, local_pass(resolved, s.n_q), no_pass{},
                            exec);
  });
}

}  // namespace detail

/// The gradient of attention (arXiv 2205.14135, section 3 and appendix B.2), with the same pattern
/// and score. For loss L and dout = dL / dout:
///
///   P_ij = exp(s_ij - lse_i),   delta_i = dout_i . out_i,   dS_ij = P_ij (dout_i . v_j - delta_i)
///   dq_i = scale sum_j dS_ij k_j,   dk_j = scale sum_i dS_ij q_i,   dv_j = sum_i P_ij dout_i
///
/// (dS times 1 - tanh^2 where scores are capped). dk and dv are sums over the query heads of the kv
/// head too.
///
/// @param q, k, v, pattern, score  as given to attention
/// @param out   [heads, n_q, value_dim], what attention wrote
/// @param lse   [heads, n_q], what attention wrote; natural logarithm
/// @param dout  [heads, n_q, value_dim]
/// @param dq    [heads, n_q, head_dim] or {}: left out; overwritten
/// @param dk    [kv_heads, n_k, head_dim] or {}
/// @param dv    [kv_heads, n_k, value_dim] or {}. No output may overlap another argument; slices of
///              one fused buffer may interleave.
/// @param exec  where the loops run; the same bits for any number of threads
/// @throws invalid_argument before anything is written
///
/// bfloat16 products: where q, k, v, dout and each gradient that is asked for are stored in
/// bfloat16, out in whatever type, and the rest is as attention says, all five products are of
/// elements as stored, with sums in float. P and dS are made in float and each rounded to bfloat16
/// once, for the three products that they enter: a term of dv, dq or dk is off by up to 2^-8 of
/// itself, and so dv_j by up to 2^-8 sum_i P_ij |dout_i|, where terms cancel too; dq_i and dk_j
/// likewise. Errors of single terms average out: a sum of many is off by little more than the
/// rounding of its result, 2^-8 of that. A gradient of another type is finer, and none of a call is
/// computed this way then. q . k and dout . v must be finite floats; what is subnormal in P, dS, an
/// element or a sum counts as 0.
///
/// A row that sees no key (lse -inf) has no gradient and gives none. Weights are computed again
/// block by block: memory is O(n d), packed copies of K and V and one to 32 sums of dk and dv.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, tensor_like<3> Out,
          tensor_like<2> Lse, tensor_like<3> Dout,
          mutable_tensor_like<3> Dq = tensor_view<float, 3>,
          mutable_tensor_like<3> Dk = tensor_view<float, 3>,
          mutable_tensor_like<3> Dv = tensor_view<float, 3>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void attention_backward(const Q& q, const K& k, const V& v, const Out& out, const Lse& lse,
                        const Dout& dout, Dq&& dq, Dk&& dk, Dv&& dv,
                        const pattern_options& pattern = full_causal,
                        const score_options& score = {}, Exec&& exec = {}) {
  constexpr const char* name = "attention_backward";
  const auto args = detail::check_backward_arguments(name, false, q, k, v, out, lse, dout,
                                                     matrix_view<const float>{}, dq, dk, dv);
  detail::run_attention_backward(name, args, pattern, score, detail::any_executor(exec));
}

/// The same for a loss that depends on lse too, as one over states that are merged does:
///
///   delta_i = dout_i . out_i - dlse_i
///
/// @param dlse  dL / dlse, [heads, n_q], or an empty view: zeros. What it holds for a row that sees
///              no key does not count.
/// @param out, dout  {} for both: all gradients come from dlse
///
/// The rest is as above.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V,
          tensor_like<3> Out = tensor_view<const float, 3>, tensor_like<2> Lse,
          tensor_like<3> Dout = tensor_view<const float, 3>, tensor_like<2> Dlse,
          mutable_tensor_like<3> Dq = tensor_view<float, 3>,
          mutable_tensor_like<3> Dk = tensor_view<float, 3>,
          mutable_tensor_like<3> Dv = tensor_view<float, 3>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void attention_backward(const Q& q, const K& k, const V& v, const Out& out, const Lse& lse,
                        const Dout& dout, const Dlse& dlse, Dq&& dq, Dk&& dk, Dv&& dv,
                        const pattern_options& pattern = full_causal,
                        const score_options& score = {}, Exec&& exec = {}) {
  constexpr const char* name = "attention_backward";
  const auto args =
      detail::check_backward_arguments(name, true, q, k, v, out, lse, dout, dlse, dq, dk, dv);
  detail::run_attention_backward(name, args, pattern, score, detail::any_executor(exec));
}

/// The same for a batch of sequences of one length each, and one call for all of them: the same
/// bits as a loop of calls, but threads share out sequences and heads.
///
/// @param q, dout, ...  [batch, ...], what they are above
/// @param lse           [batch, heads, n_q]
///
/// The rest is as above. Memory: for each thread that of one kv head; in a batch of fewer than
/// twice as many kv heads as there are threads, that of a call for one sequence.
template <tensor_like<4> Q, tensor_like<4> K, tensor_like<4> V, tensor_like<4> Out,
          tensor_like<3> Lse, tensor_like<4> Dout,
          mutable_tensor_like<4> Dq = tensor_view<float, 4>,
          mutable_tensor_like<4> Dk = tensor_view<float, 4>,
          mutable_tensor_like<4> Dv = tensor_view<float, 4>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void attention_backward(const Q& q, const K& k, const V& v, const Out& out, const Lse& lse,
                        const Dout& dout, Dq&& dq, Dk&& dk, Dv&& dv,
                        const pattern_options& pattern = full_causal,
                        const score_options& score = {}, Exec&& exec = {}) {
  constexpr const char* name = "attention_backward";
  const auto args = detail::check_backward_arguments(name, false, q, k, v, out, lse, dout,
                                                     tensor_view<const float, 3>{}, dq, dk, dv);
  detail::run_attention_backward(name, args, pattern, score, detail::any_executor(exec));
}

/// The same for a batch of sequences, with dlse [batch, heads, n_q].
template <tensor_like<4> Q, tensor_like<4> K, tensor_like<4> V,
          tensor_like<4> Out = tensor_view<const float, 4>, tensor_like<3> Lse,
          tensor_like<4> Dout = tensor_view<const float, 4>, tensor_like<3> Dlse,
          mutable_tensor_like<4> Dq = tensor_view<float, 4>,
          mutable_tensor_like<4> Dk = tensor_view<float, 4>,
          mutable_tensor_like<4> Dv = tensor_view<float, 4>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void attention_backward(const Q& q, const K& k, const V& v, const Out& out, const Lse& lse,
                        const Dout& dout, const Dlse& dlse, Dq&& dq, Dk&& dk, Dv&& dv,
                        const pattern_options& pattern = full_causal,
                        const score_options& score = {}, Exec&& exec = {}) {
  constexpr const char* name = "attention_backward";
  const auto args =
      detail::check_backward_arguments(name, true, q, k, v, out, lse, dout, dlse, dq, dk, dv);
  detail::run_attention_backward(name, args, pattern, score, detail::any_executor(exec));
}

}  // namespace FOCUS_ABI
}  // namespace focus
