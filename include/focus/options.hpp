// Which pairs of positions attend to each other, how pairs are scored, and how tokens are grouped.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_VERSION_NAMESPACE {

/// Bit g is set: the token belongs to group g. Up to 64 groups.
using group_mask = std::uint64_t;
inline constexpr index_t max_groups = 64;

/// pattern_options::window: no local pairs at all.
inline constexpr index_t no_window = -1;
/// pattern_options::window: every pair is local, which is dense attention.
inline constexpr index_t unlimited_window = (std::numeric_limits<index_t>::max)();

/// Which pairs are visible whatever their groups (the paper's local pairs, w), and where the
/// queries stand.
struct pattern_options {
  /// A query sees no key at a later position.
  bool causal = true;
  /// w: pairs with i - j <= w are local, w + 1 keys with the token itself (|i - j| <= w when not
  /// causal). Elsewhere a window of W tokens is w = W - 1.
  index_t window = 128;
  /// Keys at positions below this one are visible to every query that causality lets see them.
  index_t sink_tokens = 0;
  /// The position of query 0, key 0 being at position 0; none: n_k - n_q, so that the last query
  /// and the last key stand at the same position.
  std::optional<index_t> query_offset = std::nullopt;
};

/// Every causal pair.
inline constexpr pattern_options full_causal{.window = unlimited_window};

/// How a pair is scored: s_ij = softcap(scale * q_i . k_j). As all options, numbers are double, and
/// rounded to the type in which the call computes.
struct score_options {
  /// None: 1 / sqrt(head_dim). 0 means 0.
  std::optional<double> scale = std::nullopt;
  /// c > 0: s becomes c tanh(s / c), before masking and gating. None or 0: no cap.
  std::optional<double> softcap = std::nullopt;
};

/// Sinkhorn balancing (arXiv 2604.03260, 1306.0895): tau and N.
struct sinkhorn_options {
  double temperature = 0.1;
  int iterations = 10;
};

/// How a projected token is compared with a centroid.
enum class similarity { dot, cosine };

/// What the soft gate multiplies: the score (Eq. 2 of the paper), or the softmax weight.
enum class gate_kind { score, weight };

struct gate_options {
  gate_kind kind = gate_kind::score;
  /// lambda of Eq. 2, for gate_kind::score: sigmoid(sharpness * g_i . g_j).
  double sharpness = 10.0;
};

}  // namespace FOCUS_VERSION_NAMESPACE
}  // namespace focus

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// A half-open range of key positions.
struct key_range {
  index_t begin = 0, end = 0;
  [[nodiscard]] constexpr bool empty() const noexcept { return begin >= end; }
  [[nodiscard]] constexpr index_t size() const noexcept {
    return std::max<index_t>(end - begin, 0);
  }
};

/// pattern_options with its defaults worked out for given lengths.
struct resolved_pattern {
  bool causal = true;
  index_t window = 0;  // -1 ... n: wide windows are cut to what the lengths can show
  index_t sinks = 0;   // 0 ... n_k
  index_t query_offset = 0;
  index_t n_k = 0;

  /// The keys that query i may see at all: [0, visible_end(i)).
  [[nodiscard]] constexpr index_t visible_end(index_t i) const noexcept {
    return causal ? std::clamp<index_t>(i + query_offset + 1, 0, n_k) : n_k;
  }
  /// The sinks that query i sees: [0, sink_end(i)).
  [[nodiscard]] constexpr index_t sink_end(index_t i) const noexcept {
    return (std::min)(sinks, visible_end(i));
  }
  /// Where the window of query i begins and ends, window >= 0; both go up with i, those of queries
  /// that lie beyond the keys, whose windows are empty, too.
  [[nodiscard]] constexpr index_t window_begin(index_t i) const noexcept {
    return std::clamp<index_t>(i + query_offset - window, 0, n_k);
  }
  [[nodiscard]] constexpr index_t window_end(index_t i) const noexcept {
    return causal ? visible_end(i) : std::clamp<index_t>(i + query_offset + window + 1, 0, n_k);
  }
  /// The local keys of query i.
  [[nodiscard]] constexpr key_range local(index_t i) const noexcept {
    if (window < 0) return {};
    const key_range r{window_begin(i), window_end(i)};
    return r.empty() ? key_range{} : r;
  }
  /// Distant keys of query i, sinks left out, lie in [sinks, distant_before(i)) and, when not
  /// causal, in [max(sinks, distant_after(i)), n_k).
  [[nodiscard]] constexpr index_t distant_before(index_t i) const noexcept {
    const index_t p = i + query_offset;
    return (std::min)(visible_end(i), std::clamp<index_t>(p - window, 0, n_k));
  }
  [[nodiscard]] constexpr index_t distant_after(index_t i) const noexcept {
    if (causal) return n_k;
    return (std::max)(distant_before(i),
                      std::clamp<index_t>(i + query_offset + window + 1, 0, n_k));
  }
};

inline void validate(const pattern_options& pattern, const char* function) {
  require(pattern.window >= -1, function, "window", "at least -1", pattern.window);
  require(pattern.sink_tokens >= 0, function, "sink_tokens", "at least 0", pattern.sink_tokens);
  // Positions are sums of an offset, a length and a window: half the range keeps them exact.
  constexpr index_t limit = index_t{1} << 61;
  if (pattern.query_offset)
    require(*pattern.query_offset > -limit && *pattern.query_offset < limit, function,
            "query_offset", "a magnitude below 2^61", *pattern.query_offset);
}

inline resolved_pattern resolve(const pattern_options& pattern, index_t n_q, index_t n_k) noexcept {
  resolved_pattern r;
  r.causal = pattern.causal;
  r.n_k = n_k;
  r.query_offset = pattern.query_offset.value_or(n_k - n_q);
  // No difference of positions exceeds |offset| + n_q + n_k.
  const index_t offset = r.query_offset < 0 ? -r.query_offset : r.query_offset;
  r.window = (std::min)(pattern.window, offset + n_q + n_k);
  r.sinks = (std::min)(pattern.sink_tokens, n_k);
  return r;
}

/// The options of a score with their defaults worked out.
template <class A>
struct resolved_score {
  A scale = 1;
  A softcap = 0;  // 0: none
};

inline void validate(const score_options& score, const char* function) {
  if (score.softcap)
    require(!is_nan(*score.softcap) && *score.softcap >= 0, function, "softcap", "at least 0",
            *score.softcap);
}

/// x in the type A of float or double; what is finite stays finite.
template <class A>
A saturated(double x) noexcept {
  constexpr auto most = static_cast<double>((std::numeric_limits<A>::max)());
  constexpr double greatest = (std::numeric_limits<double>::max)();
  return static_cast<A>(x >= -greatest && x <= greatest ? std::clamp(x, -most, most) : x);
}

template <class A>
resolved_score<A> resolve(const score_options& score, index_t head_dim) noexcept {
  const A head_dim_or_1 = static_cast<A>((std::max<index_t>)(head_dim, 1));
  resolved_score<A> r{score.scale ? saturated<A>(*score.scale) : A{1} / std::sqrt(head_dim_or_1),
                      0};
  // Caps at the ends of the range, where products with them would leave it: so wide that no score
  // reaches it, or so narrow that all scores are 0.
  const double softcap = score.softcap.value_or(0);
  if (softcap >= 0x1p-100 && softcap <= 0x1p100) r.softcap = static_cast<A>(softcap);
  if (softcap > 0 && softcap < 0x1p-100) r.scale = 0;
  return r;
}

inline void validate(const sinkhorn_options& options, const char* function) {
  require(!is_nan(options.temperature) && options.temperature > 0, function, "temperature",
          "above 0", options.temperature);
  require(options.iterations >= 0, function, "iterations", "at least 0", options.iterations);
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
