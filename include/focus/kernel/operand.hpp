// Operands: the type E in which a tile packs Q, K and V and multiplies them, and all that hangs on
// it, operand<E>. For float and double, to which every storage type can be widened, it is in
// kernel/widened_operand.hpp; for bfloat16 that is multiplied as it is stored, where the
// instruction set has such products, in kernel/amx.hpp and kernel/bfmmla.hpp.
#pragma once

#include <concepts>

#include "focus/config.hpp"
#include "focus/kernel/amx.hpp"
#include "focus/kernel/bfmmla.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/row_panels.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kernel/widened_operand.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// What q . k is still to be multiplied by before it is a score in units of log2 (or, where scores
/// are capped, the argument of tanh).
template <class F, class A, int Rows>
concept score_factor_of = std::default_initializable<F> &&
    requires(F& factor, const F& as_set, A x, A* scores, index_t count, bool capped) {
  factor.set(x);
  // Multiplies the scores of a strip, or leaves that to weigh_row; returns what is left to be
  // multiplied by, which is above 0: the largest product is then the largest score. capped: nothing
  // may be left.
  { as_set.template apply<Rows>(scores, count, capped) } -> std::same_as<A>;
};

/// What operand<E> has for the packing. row_of(i) points to a row of any storage type that E may
/// hold.
template <class O, class E>
concept packed_operand_of = requires(index_t rows, index_t depth, accumulator_t<E> factor,
                                     index_t width, index_t slot, index_t stride,
                                     const E* (*row_of)(index_t), E* to) {
  // Packs the query rows row_of(0) ... row_of(rows - 1), times `factor` unless score_factor keeps
  // that; zeros fill up the last strip.
  O::pack_queries(rows, depth, factor, row_of, to);
  // Packs the rows row_of(0) ... row_of(panel - 1) as one key panel; null: none.
  O::pack_key_panel(row_of, depth, to);
  // Packs the same rows' values, from a slot on, in all value panels, which are `stride` rows high;
  // true when an element is NaN or infinite.
  { O::pack_value_panel(row_of, width, slot, stride, to) } -> std::same_as<bool>;
};

/// What it has for the products. A: the type of the sums. Rows: those of a strip.
template <class O, class E, class A, int Rows>
concept multiplied_operand_of = requires(const E* query, const packed_keys<E>& keys, index_t base,
                                         index_t end, A* scores, int r, A shift, A factor,
                                         index_t count, A* row, const strip_state<E>& strip,
                                         slot_range seen, const A* weights, const A* rescale,
                                         const A* gates, bool (*sees)(int, index_t),
                                         row_prefetcher* ahead) {
  requires score_factor_of<typename O::score_factor, A, Rows>;
  // scores[r][slot - base] = query row r . key, for slots [base, end), which score_factor then
  // multiplies. base is a multiple of tile_sizes::score_step. ahead: asked for on the way; may be
  // null.
  O::template score_slots<Rows>(query, keys, base, end, scores, ahead);
  // Turns `count` scores of row r of a strip into its weights, 2^(factor score - shift), in place
  // and as accumulate takes them; returns their sums.
  { O::weigh_row(r, shift, factor, count, row) } -> std::same_as<weight_sums<E>>;
  // The same for 2^(score - shift) times a gate.
  { O::weigh_gated_row(r, shift, count, row, gates) } -> std::same_as<weight_sums<E>>;
  // acc = rescale * acc + weights * values over the slots of `seen`. weights: [rows][score_stride],
  // of slot seen.begin on.
  O::template accumulate<Rows>(strip, keys, seen, weights, rescale);
  // The same bits, without touching a value that a row may not see: 0 * NaN is not 0. For the rare
  // block in which some value is NaN or infinite and some row does not see all keys.
  O::template accumulate_seen<Rows>(strip, keys, seen, weights, rescale, sees);
};

/// What it has for gradients: the same products with other numbers than weights of a softmax, and
/// sums over the rows of a tile, which are products with transposed weights.
template <class O, class E, class A>
concept differentiated_operand_of = requires(int r, index_t slot, index_t count, A* row,
                                             const A* weights, const row_panels<E>& rows,
                                             index_t first, index_t last, index_t keys,
                                             A* const* to,
                                             const transposition_scratch<E>& scratch) {
  // Turns `count` numbers of row r of a strip into weights as accumulate takes them, in place. Even
  // rows before odd ones.
  O::round_weights(r, count, row);
  // One of them.
  { O::weight(weights, r, slot) } -> std::same_as<A>;
  // Elements of transposition_scratch.
  { O::transposed_size } -> std::convertible_to<index_t>;
  { O::transposed_sums_size } -> std::convertible_to<index_t>;
  // to[c] += sum over rows t in [first, last) of weights[t][c] * rows[t], for `keys` keys, at most
  // strip_rows. first: that of a strip. weights: as accumulate takes them, [rows][score_stride],
  // from a whole number of strip_rows slots behind the first of a panel on. Where some row is not
  // finite, weights of 0 are left out: 0 * NaN is not 0. Whole panels of `to` are written.
  O::accumulate_rows(weights, rows, first, last, keys, to, scratch);
};

/// All of it. scope: what a thread holds while it packs and multiplies.
template <class O, class E>
concept operand_of = std::default_initializable<typename O::scope> && packed_operand_of<O, E> &&
    multiplied_operand_of<O, E, accumulator_t<E>, tile_sizes<E>::strip_rows> &&
    differentiated_operand_of<O, E, accumulator_t<E>>;

static_assert(operand_of<operand<float>, float> && operand_of<operand<double>, double>);
#if FOCUS_HAS_BFLOAT16_PRODUCTS
static_assert(operand_of<operand<bfloat16>, bfloat16>);
#endif

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
