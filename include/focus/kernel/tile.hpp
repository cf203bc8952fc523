// The tile algorithm: online softmax (arXiv 1805.02867, 2205.14135) of a strip of query rows
// against packed keys.
//
// A strip is as many query rows as a register block has. It takes up to block_keys keys at a time:
// scores S = Q K^T into a buffer that stays in L1, running maximum and weights P = 2^(S - max) in
// place, then acc += P V. Scores are in units of log2: the factor scale * log2(e) is folded into
// the packed queries, or multiplied by afterwards where those keep their own bits (score_factor).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/pack.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Half-open range of slots.
struct slot_range {
  index_t begin = 0, end = 0;
};

/// sum[r][v] += a(r, t) * b(t, v) over t < depth: the inner product of all kernels. a(r, t) is one
/// element at a[r * RowStep + t * DepthStep]; b(t, .) is the row of a panel.
template <int Rows, int Vectors, int RowStep, int DepthStep, class A>
FOCUS_ALWAYS_INLINE void multiply(const A* a, const A* b, index_t depth,
                                  vec<A> (&sum)[Rows][Vectors]) {
  constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
  for (index_t t = 0; t < depth; ++t, a += DepthStep, b += panel) {
    vec<A> column[Vectors];
    static_for<Vectors>([&](auto v)
                            FOCUS_LAMBDA_INLINE { column[v] = vec<A>::load(b + v * lanes); });
    static_for<Rows>([&](auto r) FOCUS_LAMBDA_INLINE {
      const vec<A> element = vec<A>::broadcast(a[r * RowStep]);
      static_for<Vectors>(
          [&](auto v) FOCUS_LAMBDA_INLINE { sum[r][v] = fma(element, column[v], sum[r][v]); });
    });
  }
}

/// scores[r][0, panel) = query row r . key, for one key panel; only the first Vectors vectors of
/// it.
template <int Rows, int Vectors, class A>
FOCUS_NOINLINE void score_panel(const A* query, const A* key_panel, index_t depth, A* scores) {
  constexpr int lanes = vec<A>::width, stride = tile_sizes<A>::score_stride,
                panel = tile_sizes<A>::panel, chunk = tile_sizes<A>::depth_chunk;
  vec<A> sum[Rows][Vectors];
  static_for<Rows * Vectors>(
      [&](auto i) FOCUS_LAMBDA_INLINE { sum[i / Vectors][i % Vectors] = vec<A>::zero(); });
  for (index_t first = 0; first < depth; first += chunk) {
    multiply<Rows, Vectors, chunk, 1>(query, key_panel, (std::min<index_t>)(chunk, depth - first),
                                      sum);
    query += tile_sizes<A>::padded_rows * chunk;
    key_panel += chunk * panel;
  }
  static_for<Rows * Vectors>([&](auto i) FOCUS_LAMBDA_INLINE {
    sum[i / Vectors][i % Vectors].store(scores + i / Vectors * stride + i % Vectors * lanes);
  });
}

/// acc[r] = rescale[r] * acc[r] + sum over t of weights[r][t] * values[t], for one value panel.
template <int Rows, int Vectors, class A>
FOCUS_NOINLINE void accumulate_panel(const A* weights, const A* values, index_t count,
                                     const A* rescale, A* acc, index_t acc_stride) {
  constexpr int lanes = vec<A>::width, stride = tile_sizes<A>::score_stride;
  vec<A> sum[Rows][Vectors];
  static_for<Rows>([&](auto r) FOCUS_LAMBDA_INLINE {
    const vec<A> factor = vec<A>::broadcast(rescale[r]);
    static_for<Vectors>([&](auto v) FOCUS_LAMBDA_INLINE {
      sum[r][v] = vec<A>::load(acc + r * acc_stride + v * lanes) * factor;
    });
  });
  multiply<Rows, Vectors, stride, 1>(weights, values, count, sum);
  static_for<Rows>([&](auto r) FOCUS_LAMBDA_INLINE {
    static_for<Vectors>(
        [&](auto v) FOCUS_LAMBDA_INLINE { sum[r][v].store(acc + r * acc_stride + v * lanes); });
  });
}

/// What q . k is still to be multiplied by before it is a score in units of log2 (or, where scores
/// are capped, the argument of tanh): 1, since the packed queries hold the factor.
template <class E>
struct score_factor {
  using A = accumulator_t<E>;
  void set(A) noexcept {}
  /// Multiplies, or leaves it to weigh_row; returns what is left to be multiplied by, which is
  /// above 0: the largest product is then the largest score. capped: nothing may be left.
  template <int Rows>
  A apply(A*, index_t, [[maybe_unused]] bool capped) const noexcept {
    return 1;
  }
};

/// What a thread holds while it multiplies operands of type E: nothing.
template <class E>
struct operand_scope {};

/// The running softmax of the rows of a strip, and what they may see of the keys at hand.
template <class E>
struct strip_state {
  using A = accumulator_t<E>;
  const E* query;           // its first row in the tile's packed query rows
  const slot_range* limit;  // [rows]
  A* top;                   // [rows] running maximum of the scores; -inf: nothing seen yet
  A* sum;                   // [rows] running sum of 2^(score - top); see tile_sizes::row_sums
  A* acc;                   // [rows][acc_stride] running sum of 2^(score - top) * value
  index_t acc_stride;
  [[no_unique_address]] score_factor<E> factor = {};
};

/// The slots that some row of the strip sees, within `block`.
template <int Rows>
slot_range visible_slots(const slot_range* limit, slot_range block) noexcept {
  slot_range all{block.end, block.begin};
  for (int r = 0; r < Rows; ++r) {
    if (limit[r].begin >= limit[r].end) continue;
    all.begin = (std::min)(all.begin, limit[r].begin);
    all.end = (std::max)(all.end, limit[r].end);
  }
  return {(std::max)(all.begin, block.begin), (std::min)(all.end, block.end)};
}

/// Calls f(block) for the slots within any of the limits, in blocks of `block_keys` from a panel
/// border on.
template <class E, class F>
void for_each_block(const slot_range* limits, index_t rows, index_t slots, index_t block_keys,
                    F&& f) {
  constexpr int panel = tile_sizes<E>::panel;
  slot_range all{slots, 0};
  for (index_t r = 0; r < rows; ++r) {
    if (limits[r].begin >= limits[r].end) continue;
    all.begin = (std::min)(all.begin, limits[r].begin);
    all.end = (std::max)(all.end, limits[r].end);
  }
  for (index_t slot = all.begin / panel * panel; slot < all.end; slot += block_keys)
    f(slot_range{slot, (std::min)(slot + block_keys, all.end)});
}

/// Scores of slots [base, end) for all rows: scores[r][slot - base]. base is a multiple of
/// score_step.
template <int Rows, class A>
void score_slots(const A* query, const packed_keys<A>& keys, index_t base, index_t end, A* scores) {
  constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
  index_t slot = base;
  if (slot % panel != 0) {  // the second half of a panel
    score_panel<Rows, 1>(query, keys.key_panel(slot - lanes) + lanes, keys.head_dim, scores);
    slot += lanes, scores += lanes;
  }
  for (; slot < end; slot += panel, scores += panel) {
    if (end - slot > lanes)
      score_panel<Rows, 2>(query, keys.key_panel(slot), keys.head_dim, scores);
    else
      score_panel<Rows, 1>(query, keys.key_panel(slot), keys.head_dim, scores);
  }
}

/// s = softcap * tanh(s / softcap), with 1 / softcap folded into the queries; gives units of log2.
template <int Rows, class A>
void cap_scores(A* scores, index_t count, A softcap) {
  const vec<A> factor = vec<A>::broadcast(softcap * log2_e<A>);
  for (int r = 0; r < Rows; ++r)
    for (index_t j = 0; j < count; j += vec<A>::width) {
      A* s = scores + r * tile_sizes<A>::score_stride + j;
      (tanh<A>(vec<A>::load(s)) * factor).store(s);
    }
}

/// Sets to `value` what is at slots outside each row's limits, in slots [base, base + count):
/// scores to -inf. True when a slot that some row of the strip sees is hidden from another.
template <int Rows, class A>
bool hide_outside(const slot_range* limit, slot_range seen, index_t base, index_t count, A* scores,
                  A value = lowest<A>) {
  bool partial = false;
  for (int r = 0; r < Rows; ++r, scores += tile_sizes<A>::score_stride) {
    const index_t begin = std::clamp(limit[r].begin, base, base + count);
    const index_t end = std::clamp(limit[r].end, begin, base + count);
    fill(scores, scores + (begin - base), value);
    fill(scores + (end - base), scores + count, value);
    partial |= begin > seen.begin || end < seen.end;
  }
  return partial;
}

/// Turns a row of scores into weights 2^(s - shift) (times their gates, if any) in place; returns
/// their sum. Two vectors at a time: the exponentials of both overlap.
template <class A, class... Gates>
FOCUS_ALWAYS_INLINE A exponentiate_row(A shift, index_t count, A* row, const Gates*... gates) {
  constexpr int lanes = vec<A>::width;
  const vec<A> offset = vec<A>::broadcast(shift);
  const auto weigh = [&](index_t j) FOCUS_LAMBDA_INLINE {
    vec<A> weight = exp2<A>(vec<A>::load(row + j) - offset);
    ((weight = weight * vec<A>::load(gates + j)), ...);
    weight.store(row + j);
    return weight;
  };
  vec<A> total = vec<A>::zero(), total_of_odd = vec<A>::zero();
  index_t j = 0;
  for (; j + lanes < count; j += 2 * lanes) {
    const vec<A> even = weigh(j), odd = weigh(j + lanes);
    total = total + even;
    total_of_odd = total_of_odd + odd;
  }
  if (j < count) total = total + weigh(j);
  return reduce_add(total + total_of_odd);
}

/// Turns the scores of row r of a strip into weights and adds them to its sums, in units of the
/// maximum that `shift` is. No part of the factor of these operands is left.
template <class E>
FOCUS_ALWAYS_INLINE void weigh_row(const strip_state<E>& strip, int r, accumulator_t<E> shift,
                                   accumulator_t<E>, index_t count, accumulator_t<E>* row,
                                   accumulator_t<E> rescale) {
  strip.sum[r] = strip.sum[r] * rescale + exponentiate_row(shift, count, row);
}

/// Which of `count` scores, of slots from `base` on, a row goes through: those within its limits,
/// in whole vectors; or all, where rows are not apart.
template <class E>
slot_range own_scores(slot_range limit, index_t base, index_t count) noexcept {
  if constexpr (!tile_sizes<E>::rows_apart) return {0, count};
  constexpr index_t step = (std::max)(tile_sizes<E>::lanes, tile_sizes<E>::slot_step);
  const index_t begin = std::clamp<index_t>(limit.begin - base, 0, count);
  const index_t end = std::clamp(limit.end - base, begin, count);
  if (begin == end) return {};
  return {begin / step * step, round_up(end, step)};
}

/// The largest of `count` scores, whole vectors of them; -inf of none.
template <class A>
FOCUS_ALWAYS_INLINE A highest_score(const A* row, index_t count) noexcept {
  constexpr int lanes = vec<A>::width;
  if (count == 0) return lowest<A>;
  vec<A> even = vec<A>::load(row), odd = even;
  index_t j = lanes;
  for (; j + lanes < count; j += 2 * lanes) {
    odd = maximum(odd, vec<A>::load(row + j));
    even = maximum(even, vec<A>::load(row + j + lanes));
  }
  if (j < count) odd = maximum(odd, vec<A>::load(row + j));
  return reduce_max(maximum(even, odd));
}

/// Turns the scores of slots [base, base + count) into weights 2^(s - top) in place, after raising
/// top to their maximum; rescale[r] is the factor that the sums so far need for it. Outside a row's
/// limits weights are 0, and scores are -inf or, beyond the vectors that its limits reach,
/// anything. A row that has seen only -inf keeps top at -inf and weights of 0. factor: what
/// score_factor left to do. gates: [rows][score_stride] or null; each weight is multiplied by its
/// gate.
template <int Rows, class E>
void update_softmax(const strip_state<E>& strip, accumulator_t<E>* scores, index_t base,
                    index_t count, accumulator_t<E>* rescale, accumulator_t<E> factor = 1,
                    const accumulator_t<E>* gates = nullptr) {
  using A = accumulator_t<E>;
  constexpr int lanes = vec<A>::width, stride = tile_sizes<A>::score_stride;
  constexpr int padded_rows = (Rows + lanes - 1) / lanes * lanes;
  A shift[padded_rows] = {}, drop[padded_rows] = {};
  for (int r = 0; r < Rows; ++r) {
    const slot_range own = own_scores<E>(strip.limit[r], base, count);
    const A highest = highest_score(scores + r * stride + own.begin, own.end - own.begin);
    // What is hidden does not raise the maximum, whatever the factor makes of it.
    const A block_top = highest > lowest<A> ? highest * factor : lowest<A>;
    const A top = block_top > strip.top[r] ? block_top : strip.top[r];
    // Measured from 0, not from itself, nothing seen weighs 2^lowest = 0.
    shift[r] = top > lowest<A> ? top : A{0};
    drop[r] = strip.top[r] - shift[r];
    strip.top[r] = top;
  }
  for (int r = 0; r < padded_rows; r += lanes) exp2<A>(vec<A>::load(drop + r)).store(rescale + r);
  for (int r = 0; r < Rows; ++r) {
    A* const row = scores + r * stride;
    const slot_range own = own_scores<E>(strip.limit[r], base, count);
    const index_t begin = own.begin, size = own.end - begin;
    if constexpr (tile_sizes<E>::rows_apart) {
      fill(row, row + begin, A{0});
      fill(row + own.end, row + count, A{0});
    }
    if (gates == nullptr)
      weigh_row(strip, r, shift[r], factor, size, row + begin, rescale[r]);
    else
      strip.sum[r] = strip.sum[r] * rescale[r] +
                     exponentiate_row(shift[r], size, row + begin, gates + r * stride + begin);
  }
}

/// acc = rescale * acc + weights * values over the slots of `seen`. weights: [rows][score_stride],
/// of slot seen.begin on.
template <int Rows, class A>
void accumulate_values(const strip_state<A>& strip, const packed_keys<A>& keys, slot_range seen,
                       const A* weights, const A* rescale) {
  constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
  for (index_t p = 0; p < keys.value_panels(); ++p) {
    const A* values = keys.value_panel(p, seen.begin);
    A* acc = strip.acc + p * panel;
    if (keys.value_dim - p * panel > lanes)
      accumulate_panel<Rows, 2>(weights, values, seen.end - seen.begin, rescale, acc,
                                strip.acc_stride);
    else
      accumulate_panel<Rows, 1>(weights, values, seen.end - seen.begin, rescale, acc,
                                strip.acc_stride);
  }
}

/// The same bits, without touching a value that a row may not see: 0 * NaN is not 0. For the rare
/// block in which some value is NaN or infinite and some row does not see all keys.
template <int Rows, class A, class Sees>
FOCUS_NOINLINE void accumulate_seen_values(const strip_state<A>& strip, const packed_keys<A>& keys,
                                           slot_range seen, const A* weights, const A* rescale,
                                           Sees&& sees) {
  constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
  for (index_t column = 0; column < round_up(keys.value_dim, lanes); column += lanes)
    for (int r = 0; r < Rows; ++r) {
      A* acc = strip.acc + r * strip.acc_stride + column;
      vec<A> sum = vec<A>::load(acc) * vec<A>::broadcast(rescale[r]);
      for (index_t slot = seen.begin; slot < seen.end; ++slot) {
        if (!sees(r, slot)) continue;
        const A weight = weights[r * tile_sizes<A>::score_stride + slot - seen.begin];
        const A* values = keys.value_panel(column / panel, slot) + column % panel;
        sum = fma(vec<A>::broadcast(weight), vec<A>::load(values), sum);
      }
      sum.store(acc);
    }
}

template <class E>
bool has_nonfinite_values(const packed_keys<E>& keys, slot_range seen) noexcept {
  constexpr int panel = tile_sizes<E>::panel;
  for (index_t p = seen.begin / panel; p < ceil_div(seen.end, panel); ++p)
    if (keys.nonfinite_values[p] != 0) return true;
  return false;
}

/// One strip against the slots of `block` (begin on a panel border, at most block_keys of them):
/// the online softmax step. first_row: the strip's first row within its tile, for the rules.
template <int Rows, class E, class Rules>
void attend_block(const strip_state<E>& strip, const packed_keys<E>& keys, slot_range block,
                  accumulator_t<E> softcap, const Rules& rules, index_t first_row,
                  accumulator_t<E>* scores) {
  using A = accumulator_t<E>;
  constexpr int lanes = vec<A>::width, step = tile_sizes<E>::slot_step,
                score_step = tile_sizes<E>::score_step;
  const slot_range seen = visible_slots<Rows>(strip.limit, block);
  if (seen.begin >= seen.end) return;
  const index_t base = seen.begin / score_step * score_step;
  const index_t count = round_up(seen.end - base, (std::max)(lanes, step));
  // What P V takes; what is not seen of it weighs nothing.
  const slot_range taken{seen.begin / step * step, round_up(seen.end, step)};

  score_slots<Rows>(strip.query, keys, base, seen.end, scores);
  const A factor = strip.factor.template apply<Rows>(scores, count, softcap > 0);
  if (softcap > 0) cap_scores<Rows>(scores, count, softcap);
  bool partial = hide_outside<Rows>(strip.limit, taken, base, count, scores);
  partial |= rules.template hide<Rows>(first_row, base, seen.end - base, scores);
  A rescale[tile_sizes<E>::strip_rows + lanes];
  update_softmax<Rows>(strip, scores, base, count, rescale, factor);

  A* weights = scores + (taken.begin - base);
  if (!partial || !has_nonfinite_values(keys, seen)) {
    accumulate_values<Rows>(strip, keys, taken, weights, rescale);
  } else {
    accumulate_seen_values<Rows>(strip, keys, taken, weights, rescale, [&](int r, index_t slot) {
      return slot >= strip.limit[r].begin && slot < strip.limit[r].end &&
             !rules.hides(first_row + r, slot);
    });
  }
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
