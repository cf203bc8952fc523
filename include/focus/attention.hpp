// Dense and windowed attention, with sinks.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "focus/checks/attention_arguments.hpp"
#include "focus/config.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/passes/sequences.hpp"
#include "focus/passes/token_order.hpp"
#include "focus/passes/window.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Attention after the checks of its views.
template <class Arguments>
void run_attention(const char* function, const Arguments& args, const pattern_options& pattern,
                   const score_options& score, const any_executor& exec) {
  validate(pattern, function);
  validate(score, function);
  using A = typename Arguments::accumulator;
  const attention_shape& s = args.shape;
  const auto resolved = detail::resolve(pattern, s.n_q, s.n_k);
  const auto scoring = detail::resolve<A>(score, s.head_dim);
  detail::with_operands<Arguments>([&]<class E>() {
    detail::run_call(args, exec, attention_call<E>{resolved, scoring, can_be_left<E>(args)});
  });
}

}  // namespace detail

/// Softmax attention over all keys that `pattern` makes visible: dense (the default, causal),
/// windowed, with sinks.
///
///   out_i = sum_j softmax_j(s_ij) v_j,   s_ij = softcap(scale * q_i . k_j)
///
/// over the keys j that are local to i or sinks.
///
/// @param q    [heads, n_q, head_dim], any strides but the last
/// @param k    [kv_heads, n_k, head_dim]; query head h reads kv head h / (heads / kv_heads)
/// @param v    [kv_heads, n_k, value_dim]
/// @param out  [heads, n_q, value_dim]; a row that sees no key is zeros. May not overlap another
///             argument; slices of one fused buffer may interleave.
/// @param pattern  which pairs are visible; with n_q != n_k the last query stands at the last key,
///             unless query_offset is given
/// @param score    scale and softcap
/// @param lse  [heads, n_q] or {}: log sum_j exp(s_ij), natural logarithm; -inf for a row that sees
///             no key
/// @param exec where the loops run
/// @throws invalid_argument before anything is written
///
/// bfloat16 products: where q, k, v and out are all stored in bfloat16, and the translation unit is
/// compiled for Arm's bfloat16 extension, or for AVX-512 and AMX and the operating system grants
/// the tile registers when it is asked (by each call; else AVX-512 does the work), both products
/// are of elements as stored, with sums in float. The weights are rounded to bfloat16 and divided
/// by their own sum: out_i is off by up to 2^-8 times the mean distance of the values v_j from it,
/// which is at most max |v|, beside its own rounding of 2^-8 |out_i|. An output of another type is
/// finer than that, and is not computed this way. lse keeps the weights as they were. q . k, before
/// the scale, must be a finite float, and what is subnormal in it, in q, k and v, or in a sum of
/// weighted values, counts as 0.
///
/// Memory: packed copies of K and V, O(n_k d), of as many kv heads as keep the threads busy.
/// FlashAttention (arXiv 2205.14135), online softmax (1805.02867).
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, mutable_tensor_like<3> Out,
          mutable_tensor_like<2> Lse = matrix_view<float>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void attention(const Q& q, const K& k, const V& v, Out&& out,
               const pattern_options& pattern = full_causal, const score_options& score = {},
               Lse&& lse = {}, Exec&& exec = {}) {
  constexpr const char* name = "attention";
  const auto args = detail::check_attention_arguments(name, q, k, v, out, lse);
  detail::run_attention(name, args, pattern, score, detail::any_executor(exec));
}

/// The same for a batch of sequences of one length each, and one call for all of them: the same
/// bits as a loop of calls, but threads share out sequences and heads, where a short sequence alone
/// has little to share.
///
/// @param q    [batch, heads, n_q, head_dim], any strides but the last
/// @param k    [batch, kv_heads, n_k, head_dim]
/// @param v    [batch, kv_heads, n_k, value_dim]
/// @param out  [batch, heads, n_q, value_dim]. May not overlap another argument; slices of one
///             fused buffer may interleave.
/// @param lse  [batch, heads, n_q] or {}
///
/// The rest is as above. Memory: for each thread a packed copy of K and V of one kv head, O(n_k d);
/// in a batch of fewer than twice as many kv heads as there are threads, that of a call for one
/// sequence.
template <tensor_like<4> Q, tensor_like<4> K, tensor_like<4> V, mutable_tensor_like<4> Out,
          mutable_tensor_like<3> Lse = tensor_view<float, 3>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void attention(const Q& q, const K& k, const V& v, Out&& out,
               const pattern_options& pattern = full_causal, const score_options& score = {},
               Lse&& lse = {}, Exec&& exec = {}) {
  constexpr const char* name = "attention";
  const auto args = detail::check_attention_arguments(name, q, k, v, out, lse);
  detail::run_attention(name, args, pattern, score, detail::any_executor(exec));
}

}  // namespace FOCUS_ABI
}  // namespace focus
