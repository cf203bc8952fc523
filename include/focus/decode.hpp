// Attention of the last tokens of a sequence over its cache: a token at a time, a block of prefill,
// or tokens that are a guess.
#pragma once

#include <span>
#include <type_traits>

#include "focus/checks/decode_arguments.hpp"
#include "focus/config.hpp"
#include "focus/decode_sequence.hpp"
#include "focus/kv_cache.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/passes/decode.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

template <class X>
inline constexpr bool is_decode_sequence = false;
template <class T, class TQ, class TOut, class TLse>
inline constexpr bool is_decode_sequence<decode_sequence<T, TQ, TOut, TLse>> = true;

}  // namespace detail

/// Sparse attention of the last m tokens in a cache, which were appended before: query i stands at
/// position size() - m + i, and sees of the keys up to it those within the window, the sinks, and
/// those with a group in common; the pattern is the cache's. What sparse_attention computes for
/// these rows (arXiv 2604.03260, top-k selection), up to rounding.
///
///   out_i = sum_j softmax_j(s_ij) v_j,   s_ij = softcap(scale * q_i . k_j),   (i, j) allowed
///
/// @param q     [heads, m, head_dim], any strides but the last; heads is a multiple of the cache's
///              kv_heads: query head h reads kv head h / (heads / kv_heads). m = 1 is a token,
///              m > 1 a block of prefill, or a guess (speculative decoding), of which truncate
///              takes back what does not hold. Another type than the cache's is welcome.
/// @param query_masks  [m] the groups of each query; a router with masks of its own for queries may
///              give others than those that were appended
/// @param cache K, V and masks; not changed, so that calls may run at the same time
/// @param out   [heads, m, value_dim]; a row that sees no key is zeros. May not overlap q or lse
/// @param score scale and softcap
/// @param lse   [heads, m] or {}: log sum_j exp(s_ij), natural logarithm; -inf for a row that sees
///              no key
/// @param exec  where the loops run; the same bits for any number of threads
/// @throws invalid_argument before anything is written
///
/// Up to 16 rows of a kv head (m x heads / kv_heads) read each key once, where it is, for all of
/// them; more have their keys packed block by block, and queries with the same mask are taken
/// together. Products of bfloat16: as attention says, from 8 rows on. Memory: for each 1024 keys of
/// the cache the sums of the rows, and a list of 1024 keys a thread.
template <tensor_like<3> Q, span_like<group_mask> Masks, class T, mutable_tensor_like<3> Out,
          mutable_tensor_like<2> Lse = matrix_view<float>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void decode_attention(const Q& q, const Masks& query_masks, const kv_cache<T>& cache, Out&& out,
                      const score_options& score = {}, Lse&& lse = {}, Exec&& exec = {}) {
  constexpr const char* name = "decode_attention";
  const decode_sequence<T, detail::element_of<Q>, detail::element_of<Out>, detail::element_of<Lse>>
      sequence{detail::as_const_view(q), detail::as_span(query_masks), &cache, detail::as_view(out),
               detail::as_view(lse)};
  detail::check_decode_sequence(name, sequence);
  detail::validate(score, name);
  detail::run_decode(std::span(&sequence, 1), score, detail::any_executor(exec));
}

/// The same for many sequences, each with a cache of its own: a step of an engine in one call. The
/// same bits as a loop of calls, but threads share out all keys of all sequences.
///
/// @param sequences  decode_sequence of one type (std::span, std::vector, ...), that agree in
///                   heads, kv_heads, head_dim and value_dim; m and what is cached may differ.
///                   Their outputs may not overlap.
template <class Sequences, class Exec = serial_executor>
requires(detail::is_decode_sequence<detail::span_element_of<const Sequences>>&& executor<
         std::remove_reference_t<Exec>>) void decode_attention(const Sequences& sequences,
                                                               const score_options& score = {},
                                                               Exec&& exec = {}) {
  constexpr const char* name = "decode_attention";
  using sequence = detail::span_element_of<const Sequences>;
  const std::span<const sequence> all = detail::as_span(sequences);
  detail::check_decode_sequences(name, all);
  detail::validate(score, name);
  detail::run_decode(all, score, detail::any_executor(exec));
}

}  // namespace FOCUS_ABI
}  // namespace focus
