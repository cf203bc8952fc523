// Attention over a cache in its textbook form.
#pragma once

#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/decode_arguments.hpp"
#include "focus/config.hpp"
#include "focus/decode_sequence.hpp"
#include "focus/kv_cache.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/reference/attention.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace reference {

/// Sparse attention of the last m tokens in a cache: each pair is decided from the two masks and
/// the positions, and computed from K and V as the cache keeps them, which are read back first.
///
/// @param q            [heads, m, head_dim]
/// @param query_masks  [m]
/// @param cache        as in focus::decode_attention, like the rest
template <tensor_like<3> Q, span_like<group_mask> Masks, class T, mutable_tensor_like<3> Out,
          mutable_tensor_like<2> Lse = matrix_view<float>, class Exec = serial_executor>
void decode_attention(const Q& q, const Masks& query_masks, const kv_cache<T>& cache, Out&& out,
                      const score_options& score = {}, Lse&& lse = {},
                      [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::decode_attention";
  using real = typename kv_cache<T>::accumulator;
  const decode_sequence<T, detail::element_of<Q>, detail::element_of<Out>, detail::element_of<Lse>>
      sequence{detail::as_const_view(q), detail::as_span(query_masks), &cache, detail::as_view(out),
               detail::as_view(lse)};
  detail::check_decode_sequence(function, sequence);
  detail::validate(score, function);
  const index_t heads = cache.kv_heads(), n = cache.size();
  std::vector<real> k(static_cast<std::size_t>(heads * n * cache.head_dim()));
  std::vector<real> v(static_cast<std::size_t>(heads * n * cache.value_dim()));
  std::vector<group_mask> masks(static_cast<std::size_t>(n));
  const tensor_view<real, 3> k_view(k.data(), {heads, n, cache.head_dim()});
  const tensor_view<real, 3> v_view(v.data(), {heads, n, cache.value_dim()});
  cache.read(0, k_view, v_view, masks);
  const auto arguments = detail::check_attention_arguments(function, sequence.q, k_view, v_view,
                                                           sequence.out, sequence.lse);
  detail::textbook::sparse_attention(arguments, sequence.query_masks, masks, cache.pattern(),
                                     score);
}

}  // namespace reference
}  // namespace FOCUS_ABI
}  // namespace focus
