// Steps of generation: caches that are full, and the last tokens' queries.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include <focus/decode.hpp>
#include <focus/kv_cache.hpp>
#include <focus/options.hpp>
#include <focus/scalar.hpp>
#include <focus/tensor_view.hpp>

#include "masks.hpp"
#include "workload.hpp"

namespace bench {

struct decode_setting {
  index_t tokens = 4096, heads = 8, kv_heads = 8, head_dim = 64;
  index_t queries = 1, sequences = 1;
  index_t groups = 0;  // 0: dense
  index_t window = 128, sinks = 1;

  focus::pattern_options pattern() const {
    if (groups == 0) return {.window = focus::unlimited_window};
    return {.window = window, .sink_tokens = sinks};
  }
  mask_list masks() const {
    return groups == 0 ? mask_list(static_cast<std::size_t>(tokens), 1)
                       : balanced_masks(tokens, groups, 1);
  }
  /// Bytes of K and V in all caches.
  double bytes(double element_bytes) const {
    return static_cast<double>(sequences * tokens * kv_heads * 2 * head_dim) * element_bytes;
  }
};

/// T: what the caches keep; queries are of that type, too, or float for 8 bits.
template <class T>
class decode_workload {
 public:
  using query_type = std::conditional_t<std::is_same_v<T, std::int8_t>, float, T>;

  explicit decode_workload(const decode_setting& s)
      : setting_(s),
        masks_(s.masks()),
        q_(made_up<query_type>(s.sequences * s.heads * s.queries * s.head_dim, 1)),
        out_(q_.size()) {
    constexpr index_t block = 256;  // the same rows again and again
    const auto rows = made_up<query_type>(s.kv_heads * block * s.head_dim, 2);
    for (index_t n = 0; n < s.sequences; ++n) {
      focus::kv_cache<T> cache(s.kv_heads, s.head_dim, s.head_dim, s.pattern());
      for (index_t first = 0; first < s.tokens; first += block) {
        const index_t count = (std::min)(block, s.tokens - first);
        const focus::tensor_view<const query_type, 3> view(
            rows.data(), {s.kv_heads, count, s.head_dim}, {block * s.head_dim, s.head_dim, 1});
        cache.append(view, view,
                     std::span(masks_).subspan(static_cast<std::size_t>(first),
                                               static_cast<std::size_t>(count)));
      }
      caches_.push_back(std::move(cache));
    }
    for (index_t n = 0; n < s.sequences; ++n) {
      const index_t size = s.heads * s.queries * s.head_dim;
      const std::array<index_t, 3> extents{s.heads, s.queries, s.head_dim};
      steps_.push_back({{q_.data() + n * size, extents},
                        std::span(masks_).last(static_cast<std::size_t>(s.queries)),
                        &caches_[static_cast<std::size_t>(n)],
                        {out_.data() + n * size, extents}});
    }
  }

  /// One step of all sequences.
  template <class Exec>
  void step(Exec&& exec) {
    focus::decode_attention(steps_, {}, exec);
  }

  focus::kv_cache<T>& cache() { return caches_.front(); }
  double cache_bytes() const {
    double sum = 0;
    for (const auto& cache : caches_) sum += static_cast<double>(cache.memory_bytes());
    return sum;
  }
  /// Bytes of K and V that a step has to read: keys that some query sees, once for each kv head.
  double bytes_read() const {
    const decode_setting& s = setting_;
    index_t keys = 0;
    for (index_t j = 0; j < s.tokens; ++j) {
      bool seen = false;
      for (index_t i = s.tokens - s.queries; i < s.tokens && !seen; ++i) {
        const bool shared =
            (masks_[static_cast<std::size_t>(i)] & masks_[static_cast<std::size_t>(j)]) != 0;
        seen = j <= i && (s.groups == 0 || shared || i - j <= s.window || j < s.sinks);
      }
      keys += seen;
    }
    return static_cast<double>(s.sequences * s.kv_heads * keys * 2 * s.head_dim) * sizeof(T);
  }

 private:
  decode_setting setting_;
  mask_list masks_;
  std::vector<query_type> q_, out_;
  std::vector<focus::kv_cache<T>> caches_;
  std::vector<focus::decode_sequence<T, query_type>> steps_;
};

}  // namespace bench
