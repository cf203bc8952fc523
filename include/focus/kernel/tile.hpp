// The tile algorithm: online softmax (arXiv 1805.02867, 2205.14135) of a strip of query rows
// against packed keys.
//
// A strip is as many query rows as a register block has. It takes up to block_keys keys at a time:
// scores S = Q K^T into a buffer that stays in L1, running maximum and weights P = 2^(S - max) in
// place, then acc += P V. Scores are in units of log2: the factor scale * log2(e) is folded into
// the packed queries, or multiplied by afterwards where those keep their own bits
// (operand<E>::score_factor).
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/operand.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kernel/widened_operand.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

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
void for_each_block(const slot_range* limits, index_t rows, const packed_keys<E>& keys,
                    index_t block_keys, F&& f) {
  constexpr int panel = tile_sizes<E>::panel;
  slot_range all{(std::numeric_limits<index_t>::max)(), 0};
  for (index_t r = 0; r < rows; ++r) {
    if (limits[r].begin >= limits[r].end) continue;
    all.begin = (std::min)(all.begin, limits[r].begin);
    all.end = (std::max)(all.end, limits[r].end);
  }
  if (all.begin >= all.end) return;
  const index_t step = keys.blocks_from_first ? block_keys : panel;
  for (index_t slot = all.begin - (all.begin - keys.first_slot) % step; slot < all.end;
       slot += block_keys)
    f(slot_range{slot, (std::min)(slot + block_keys, all.end)});
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
/// scores to `lowest`. True when a slot that some row of the strip sees is hidden from another.
template <int Rows, class A>
bool hide_outside(const slot_range* limit, slot_range seen, index_t base, index_t count, A* scores,
                  A value = lowest<A>) {
  bool partial = false;
  for (int r = 0; r < Rows; ++r, scores += tile_sizes<A>::score_stride) {
    const index_t begin = std::clamp(limit[r].begin, base, base + count);
    const index_t end = std::clamp(limit[r].end, begin, base + count);
    fill_edges(scores, begin - base, end - base, count, value);
    partial |= begin > seen.begin || end < seen.end;
  }
  return partial;
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

/// The largest of `count` scores, whole vectors of them; `lowest` of none.
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

/// Raises the running maxima of the rows of a strip to those of the scores of slots [base, base +
/// count), turns these scores into weights 2^(s - top) in place, and adds them to the running sums;
/// rescale[r] is the factor that what was accumulated so far needs for the new maximum. Outside a
/// row's limits weights are 0, and scores are `lowest` or, beyond the vectors that its limits
/// reach, anything. A row that has seen nothing above that keeps it as its top, and weights of 0.
/// factor: what score_factor left to do. gates: [rows][score_stride] or null; each weight is
/// multiplied by its gate (with nothing left of the factor).
template <int Rows, class E>
void update_softmax(const strip_state<E>& strip, accumulator_t<E>* scores, index_t base,
                    index_t count, accumulator_t<E>* rescale, accumulator_t<E> factor = 1,
                    const accumulator_t<E>* gates = nullptr) {
  using A = accumulator_t<E>;
  constexpr int lanes = vec<A>::width, stride = tile_sizes<A>::score_stride;
  constexpr int padded_rows = (Rows + lanes - 1) / lanes * lanes;
  array_of<A, padded_rows> shift = {}, drop = {};
  for (int r = 0; r < Rows; ++r) {
    const slot_range own = own_scores<E>(strip.limit[r], base, count);
    const A highest = highest_score(scores + r * stride + own.begin, own.end - own.begin);
    A block_top = highest;
    // What is hidden does not raise the maximum, whatever the factor makes of it.
    if constexpr (!std::is_empty_v<typename operand<E>::score_factor>)
      block_top = highest > lowest<A> ? highest * factor : lowest<A>;
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
      strip.add_weights(r, rescale[r],
                        operand<E>::weigh_row(r, shift[r], factor, size, row + begin));
    else
      strip.add_weights(
          r, rescale[r],
          operand<E>::weigh_gated_row(r, shift[r], size, row + begin, gates + r * stride + begin));
  }
}

/// Adds the slots of `block` (at most block_keys, from a panel border on) to the running softmax of
/// one strip: the online softmax step. first_row: the strip's first row within its tile, for the
/// rules.
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

  operand<E>::template score_slots<Rows>(strip.query, keys, base, seen.end, scores, strip.ahead);
  const A factor = strip.factor.template apply<Rows>(scores, count, softcap > 0);
  if (softcap > 0) cap_scores<Rows>(scores, count, softcap);
  bool partial = hide_outside<Rows>(strip.limit, taken, base, count, scores);
  partial |= rules.template hide<Rows>(first_row, base, seen.end - base, scores);
  A rescale[tile_sizes<E>::strip_rows + lanes];
  update_softmax<Rows>(strip, scores, base, count, rescale, factor);

  A* weights = scores + (taken.begin - base);
  if (!partial || !keys.may_be_nonfinite(seen.begin, seen.end)) {
    operand<E>::template accumulate<Rows>(strip, keys, taken, weights, rescale);
  } else {
    operand<E>::template accumulate_seen<Rows>(
        strip, keys, taken, weights, rescale, [&](int r, index_t slot) {
          return slot >= strip.limit[r].begin && slot < strip.limit[r].end &&
                 !rules.hides(first_row + r, slot);
        });
  }
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
