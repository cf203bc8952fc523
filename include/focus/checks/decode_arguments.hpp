// The arguments of decode_attention, and what is checked of them before anything is written.
#pragma once

#include <array>
#include <span>
#include <string>

#include "focus/checks/overlap.hpp"
#include "focus/config.hpp"
#include "focus/decode_sequence.hpp"
#include "focus/error.hpp"
#include "focus/kv_cache.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {

namespace detail {

/// Checks shapes, null pointers and overlap; throws invalid_argument with the argument's name.
template <class T, class TQ, class TOut, class TLse>
void check_decode_sequence(const char* function, const decode_sequence<T, TQ, TOut, TLse>& s) {
  require(s.cache != nullptr, function, "cache", "a cache", "a null pointer");
  const kv_cache<T>& cache = *s.cache;
  const index_t heads = s.q.extent(0), m = s.q.extent(1);
  require_shape(s.q, {heads, m, cache.head_dim()}, function, "q");
  if (cache.kv_heads() == 0 ? heads != 0 : heads % cache.kv_heads() != 0)
    fail_argument(function, "q",
                  std::string("a number of heads that is a multiple of kv_heads = ") +
                      std::to_string(cache.kv_heads()),
                  heads);
  if (m > cache.size())
    fail_argument(function, "q",
                  std::string("no more queries than there are tokens in the cache, ") +
                      std::to_string(cache.size()),
                  m);
  require_length(s.query_masks.size(), m, function, "query_masks");
  require_shape(s.out, {heads, m, cache.value_dim()}, function, "out");
  require_data(s.q, function, "q");
  require_data(s.out, function, "out");
  require_distinct_elements(s.out, "out", function);
  require_disjoint(s.out, "out", s.q, "q", function);
  if (!is_given(s.lse)) return;
  require_shape(s.lse, {heads, m}, function, "lse");
  require_data(s.lse, function, "lse");
  require_distinct_elements(s.lse, "lse", function);
  require_disjoint(s.lse, "lse", s.q, "q", function);
  require_disjoint(s.lse, "lse", s.out, "out", function);
}

/// The same for many sequences, which must be of one layer: they agree in heads and dimensions.
template <class Sequence>
void check_decode_sequences(const char* function, std::span<const Sequence> sequences) {
  for (const Sequence& s : sequences) {
    check_decode_sequence(function, s);
    const Sequence& first = sequences.front();
    const auto shape = [](const Sequence& of) {
      return std::array{of.q.extent(0), of.cache->kv_heads(), of.cache->head_dim(),
                        of.cache->value_dim()};
    };
    if (shape(s) != shape(first))
      fail_argument(function, "sequences",
                    std::string("[heads, kv_heads, head_dim, value_dim] of the first one, ") +
                        describe_shape(shape(first)),
                    describe_shape(shape(s)));
  }
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
