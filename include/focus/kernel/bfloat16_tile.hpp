// bfloat16 multiplied as it is stored: what kernel/amx.hpp and kernel/bfmmla.hpp have in common.
// Where Q, K, V and out are all stored in bfloat16, both products are made of the bits as they are,
// with sums in float, and only the weights P are rounded to bfloat16; backward, P and dS are, once.
//
// An instruction set adds how queries, keys and values are packed, weigh_row, round_weights, and
// its products.
#pragma once

#include "focus/config.hpp"
#if FOCUS_HAS_BFLOAT16_PRODUCTS

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "focus/kernel/panels.hpp"
#include "focus/kernel/row_panels.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kernel/widened_operand.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The bits of as many elements as a Vector holds; of `count` if that is less, zeros behind them;
/// all zeros where row is null.
template <class Vector, class T>
FOCUS_ALWAYS_INLINE Vector load_bits(const T* row, index_t count) noexcept {
  static_assert(is_bfloat16<T>);
  constexpr auto most = static_cast<index_t>(sizeof(Vector) / sizeof(T));
  if (row != nullptr && count >= most) {
    Vector all;
    std::memcpy(&all, static_cast<const void*>(row), sizeof all);
    return all;
  }
  Vector part{};
  if (row != nullptr)
    std::memcpy(&part, static_cast<const void*>(row), static_cast<std::size_t>(count) * sizeof(T));
  return part;
}
template <class Vector>
FOCUS_ALWAYS_INLINE void store_bits(Vector bits, bfloat16* to) noexcept {
  std::memcpy(static_cast<void*>(to), &bits, sizeof bits);
}

/// Multiplies `count` scores, whole vectors of them, in place.
FOCUS_NOINLINE inline void multiply_row(float* row, index_t count, float factor) {
  const vec<float> x = vec<float>::broadcast(factor);
  for (index_t j = 0; j < count; j += vec<float>::width)
    (vec<float>::load(row + j) * x).store(row + j);
}

/// The factor by which a row of scores is to be multiplied in the step that measures them from
/// `shift`. Scores that are multiplied and measured in one step keep what the maximum has lost to
/// rounding. Of huge scores that would be more than a weight can say: they are multiplied here, and
/// so rounded, too.
FOCUS_ALWAYS_INLINE float factor_with_shift(float shift, float factor, index_t count, float* row) {
  constexpr float huge = 4096;
  if ((shift > -huge && shift < huge) || is_equal(factor, 1)) return factor;
  multiply_row(row, count, factor);
  return 1;
}

/// What operand<bfloat16> has in common on all instruction sets. E is bfloat16, and a parameter so
/// that strip_state<E>, which has a part of operand<E>, is not needed before that is there.
/// Products are those of the instruction set, each with one panel; weights lie in the memory of the
/// scores:
///   score<Rows>(query, key_panel, depth, scores)
///                           scores[r][c] = query row r . key c
///   multiply<Rows, Columns>(weights, values, count, acc, acc_stride)
///                           acc[r][c] += sum over t < count of weights[r][t] * values[t][c], for
///                           the first Columns of the panel
///   place(column, slot)     where a value lies among those of a panel's slot_step slots
///   weight(weights, r, t)   the weight of row r and slot t
///   transpose<Rows>(weights, columns)
///                           the weights of Rows rows and strip_rows slots, as query rows: the
///                           slots are its rows, and its depth is the rows, which zeros fill up
///                           to whole chunks
/// A value panel has the form of a key panel whose depth are its slots, so that score multiplies
/// transposed weights.
template <class E, class Products>
struct bfloat16_operand {
  /// Queries keep their own bits, so scores are multiplied: as a rule where their maximum is taken
  /// off, for nothing. (A factor so small that the lowest number times it is a score like others
  /// would show what is hidden: then before anything is.)
  struct score_factor {
    float factor = 1;

    void set(float x) noexcept { factor = x; }
    template <int Rows>
    float apply(float* scores, index_t count, bool capped) const noexcept {
      if (factor > 0x1p-60f && !capped) return factor;
      for (int r = 0; r < Rows; ++r, scores += tile_sizes<E>::score_stride)
        multiply_row(scores, count, factor);
      return 1;
    }
  };

  /// The rest of the last panel gets its scores too.
  template <int Rows>
  FOCUS_NOINLINE static void score_slots(const E* query, const packed_keys<E>& keys, index_t base,
                                         index_t end, float* scores,
                                         row_prefetcher* ahead = nullptr) {
    constexpr int panel = tile_sizes<E>::panel, rows_a_panel = 4;
    for (index_t slot = base; slot < end; slot += panel, scores += panel) {
      if (ahead != nullptr)
        for (int row = 0; row < rows_a_panel; ++row) ahead->next();
      Products::template score<Rows>(query, keys.key_panel(slot), keys.head_dim, scores);
    }
  }

  FOCUS_ALWAYS_INLINE static weight_sums<E> weigh_gated_row(int r, float shift, index_t count,
                                                            float* row, const float* gates) {
    const float total = exponentiate_row(shift, count, row, gates);
    return {{total, operand<E>::round_weights(r, count, row)}};
  }

  /// taken: whole steps of slots.
  template <int Rows>
  FOCUS_NOINLINE static void accumulate(const strip_state<E>& strip, const packed_keys<E>& keys,
                                        slot_range taken, const float* weights,
                                        const float* rescale) {
    constexpr int panel = tile_sizes<E>::panel;
    const index_t count = taken.end - taken.begin;
    rescale_sums<Rows>(strip, rescale);
    for (index_t p = 0; p < keys.value_panels(); ++p) {
      const E* values = keys.value_panel(p, taken.begin);
      float* acc = strip.acc + p * panel;
      if (keys.value_dim - p * panel > panel / 2)
        Products::template multiply<Rows, panel>(weights, values, count, acc, strip.acc_stride);
      else
        Products::template multiply<Rows, panel / 2>(weights, values, count, acc, strip.acc_stride);
    }
  }

  /// Values that are NaN or infinite are zeros in the products, and then added for the rows that
  /// see them.
  template <int Rows, class Sees>
  FOCUS_NOINLINE static void accumulate_seen(const strip_state<E>& strip,
                                             const packed_keys<E>& keys, slot_range taken,
                                             const float* weights, const float* rescale,
                                             Sees&& sees) {
    constexpr index_t panel = tile_sizes<E>::panel, step = tile_sizes<E>::slot_step;
    rescale_sums<Rows>(strip, rescale);
    alignas(64) E finite_values[static_cast<std::size_t>(step * panel)];
    for (index_t p = 0; p < keys.value_panels(); ++p)
      for (index_t slot = taken.begin; slot < taken.end; slot += step) {
        const E* values = keys.value_panel(p, slot);
        copy_finite(values, step * panel, finite_values);
        Products::template multiply<Rows, panel>(weights + (slot - taken.begin), finite_values,
                                                 step, strip.acc + p * panel, strip.acc_stride);
      }

    for (index_t column = 0; column < keys.value_dim; ++column)
      for (index_t slot = taken.begin; slot < taken.end; ++slot) {
        const E* values = keys.value_panel(column / panel, slot / step * step);
        const E value = values[Products::place(column % panel, slot % step)];
        if (finite(value)) continue;
        for (int r = 0; r < Rows; ++r)
          if (sees(r, slot))
            strip.acc[r * strip.acc_stride + column] +=
                widen(Products::weight(weights, r, slot - taken.begin)) * widen(value);
      }
  }

  static float weight(const float* weights, int r, index_t slot) noexcept {
    return widen(Products::weight(weights, r, slot));
  }

  static constexpr index_t transposed_size = query_rows_size<E>(tile_sizes<E>::tile_rows);
  static constexpr index_t transposed_sums_size =
      tile_sizes<E>::strip_rows * tile_sizes<E>::score_stride;

  FOCUS_NOINLINE static void accumulate_rows(const float* weights, const row_panels<E>& rows,
                                             index_t first, index_t last, index_t keys,
                                             float* const* to,
                                             const transposition_scratch<E>& scratch) {
    constexpr index_t strip = tile_sizes<E>::strip_rows, stride = tile_sizes<E>::score_stride;
    for (index_t row = first; row < last; row += strip)
      with_strip_rows<E>(last - row, [&](auto size) {
        Products::template transpose<size()>(
            weights + row * stride, scratch.weights + (row - first) * tile_sizes<E>::padded_rows);
      });
    for (index_t p = 0; p * tile_sizes<E>::panel < rows.width; ++p) {
      if (rows.nonfinite)
        add_finite_rows(weights, rows, p, first, last, keys, to, scratch);
      else
        add_transposed(scratch, rows.at(p, first), p, last - first, keys, to);
    }
  }

 private:
  static bool finite(E x) noexcept { return (x.bits & 0x7f80u) != 0x7f80u; }
  static void copy_finite(const E* from, index_t count, E* to) noexcept {
    for (index_t x = 0; x < count; ++x) to[x] = finite(from[x]) ? from[x] : E{};
  }

  /// Panel p of to[c] += transposed weights * rows, for `keys` keys and `depth` rows.
  static void add_transposed(const transposition_scratch<E>& scratch, const E* rows, index_t p,
                             index_t depth, index_t keys, float* const* to) {
    constexpr int lanes = vec<float>::width, panel = tile_sizes<E>::panel;
    with_strip_rows<E>(keys, [&](auto size) {
      Products::template score<size()>(scratch.weights, rows,
                                       round_up(depth, tile_sizes<E>::depth_step), scratch.sums);
    });
    const float* sums = scratch.sums;
    for (index_t c = 0; c < keys; ++c, sums += tile_sizes<E>::score_stride)
      for (index_t x = 0; x < panel; x += lanes) {
        float* const sum = to[c] + p * panel + x;
        (vec<float>::load(sum) + vec<float>::load(sums + x)).store(sum);
      }
  }

  /// The same where some rows are not finite: zeros in the product, and then added to the keys
  /// where they have a weight.
  static void add_finite_rows(const float* weights, const row_panels<E>& rows, index_t p,
                              index_t first, index_t last, index_t keys, float* const* to,
                              const transposition_scratch<E>& scratch) {
    constexpr index_t panel = tile_sizes<E>::panel, step = tile_sizes<E>::slot_step;
    alignas(64) E finite_rows[static_cast<std::size_t>(tile_sizes<E>::tile_rows * panel)];
    copy_finite(rows.at(p, first), round_up(last - first, step) * panel, finite_rows);
    add_transposed(scratch, finite_rows, p, last - first, keys, to);
    for (index_t t = first; t < last; ++t)
      for (index_t column = 0; column < panel; ++column) {
        const E value = rows.at(p, t / step * step)[Products::place(column, t % step)];
        if (finite(value)) continue;
        for (index_t c = 0; c < keys; ++c) {
          const float x = weight(weights, static_cast<int>(t), c);
          if (!is_zero(x)) to[c][p * panel + column] += x * widen(value);
        }
      }
  }

  /// Brings what is summed up to the new maximum: acc[r] = rescale[r] * acc[r].
  template <int Rows>
  static void rescale_sums(const strip_state<E>& strip, const float* rescale) {
    for (int r = 0; r < Rows; ++r) {
      if (is_equal(rescale[r], 1)) continue;
      const vec<float> factor = vec<float>::broadcast(rescale[r]);
      float* acc = strip.acc + r * strip.acc_stride;
      for (index_t c = 0; c < strip.acc_stride; c += vec<float>::width)
        (vec<float>::load(acc + c) * factor).store(acc + c);
    }
  }
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus

#endif
