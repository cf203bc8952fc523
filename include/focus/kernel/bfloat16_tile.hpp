// bfloat16 multiplied as it is stored: what kernel/amx.hpp and kernel/bfmmla.hpp have in common.
// Where Q, K, V and out are all stored in bfloat16, both products are made of the bits as they are,
// with sums in float, and only the weights P are rounded to bfloat16.
//
// An instruction set adds how queries, keys and values are packed, weigh_row, and tile_products.
#pragma once

#include "focus/config.hpp"
#if FOCUS_HAS_BFLOAT16_PRODUCTS

#include <concepts>
#include <cstddef>
#include <cstring>

#include "focus/kernel/pack.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/tile.hpp"
#include "focus/kernel/tuning.hpp"
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

/// Queries keep their own bits, so scores are multiplied: as a rule where their maximum is taken
/// off, for nothing. (A factor so small that the lowest number times it is a score like others would
/// show what is hidden: then before anything is.)
template <>
struct score_factor<bfloat16> {
  float factor = 1;

  void set(float x) noexcept { factor = x; }
  template <int Rows>
  float apply(float* scores, index_t count, bool capped) const noexcept {
    if (factor > 0x1p-60f && !capped) return factor;
    for (int r = 0; r < Rows; ++r, scores += tile_sizes<bfloat16>::score_stride)
      multiply_row(scores, count, factor);
    return 1;
  }
};

/// The factor by which a row of scores is to be multiplied in the step that measures them from
/// `shift`. Scores that are multiplied and measured in one step keep what the maximum has lost to
/// rounding. Of huge scores that would be more than a weight can say: they are multiplied here, and
/// so rounded, too.
FOCUS_ALWAYS_INLINE float factor_with_shift(float shift, float factor, index_t count, float* row) {
  constexpr float huge = 4096;
  if ((shift > -huge && shift < huge) || factor == 1) return factor;
  multiply_row(row, count, factor);
  return 1;
}

/// Adds to the sums of row r of a strip: `sum` of its weights, and `norm` of them as rounded. Their
/// sum as rounded divides the output: it then is a mean of values, exact where they are all the
/// same. The logsumexp is that of the weights before.
FOCUS_ALWAYS_INLINE void add_to_sums(const strip_state<bfloat16>& strip, int r, float rescale,
                                     float sum, float norm) {
  float& of_rounded = strip.sum[tile_sizes<bfloat16>::padded_rows + r];
  strip.sum[r] = strip.sum[r] * rescale + sum;
  of_rounded = of_rounded * rescale + norm;
}

/// Brings what is summed up to the new maximum: acc[r] = rescale[r] * acc[r].
template <int Rows>
void rescale_sums(const strip_state<bfloat16>& strip, const float* rescale) {
  for (int r = 0; r < Rows; ++r) {
    if (rescale[r] == 1) continue;
    const vec<float> factor = vec<float>::broadcast(rescale[r]);
    float* acc = strip.acc + r * strip.acc_stride;
    for (index_t c = 0; c < strip.acc_stride; c += vec<float>::width)
      (vec<float>::load(acc + c) * factor).store(acc + c);
  }
}

/// The products of an instruction set, each with one panel. Weights lie in the memory of the
/// scores.
///   score<Rows>(query, key_panel, depth, scores)
///                           scores[r][c] = query row r . key c
///   multiply<Rows, Columns>(weights, values, count, acc, acc_stride)
///                           acc[r][c] += sum over t < count of weights[r][t] * values[t][c], for
///                           the first Columns of the panel
///   place(column, slot)     of a value, in a panel's slot_step slots
///   weight(weights, r, t)   one of them
template <class E>
struct tile_products;

/// Scores of slots [base, end), and of the rest of the last panel, not yet multiplied by their
/// factor.
template <int Rows, std::same_as<bfloat16> E>
void score_slots(const E* query, const packed_keys<E>& keys, index_t base, index_t end,
                 float* scores) {
  constexpr int panel = tile_sizes<E>::panel;
  for (index_t slot = base; slot < end; slot += panel, scores += panel)
    tile_products<E>::template score<Rows>(query, keys.key_panel(slot), keys.head_dim, scores);
}

/// acc = rescale * acc + weights * values over whole steps of slots.
template <int Rows, std::same_as<bfloat16> E>
void accumulate_values(const strip_state<E>& strip, const packed_keys<E>& keys, slot_range taken,
                       const float* weights, const float* rescale) {
  constexpr int panel = tile_sizes<E>::panel;
  const index_t count = taken.end - taken.begin;
  rescale_sums<Rows>(strip, rescale);
  for (index_t p = 0; p < keys.value_panels(); ++p) {
    const E* values = keys.value_panel(p, taken.begin);
    float* acc = strip.acc + p * panel;
    if (keys.value_dim - p * panel > panel / 2)
      tile_products<E>::template multiply<Rows, panel>(weights, values, count, acc,
                                                       strip.acc_stride);
    else
      tile_products<E>::template multiply<Rows, panel / 2>(weights, values, count, acc,
                                                           strip.acc_stride);
  }
}

/// The same bits, without touching a value that a row may not see. Values that are NaN or infinite
/// are zeros in the products, and then added for the rows that see them.
template <int Rows, std::same_as<bfloat16> E, class Sees>
FOCUS_NOINLINE void accumulate_seen_values(const strip_state<E>& strip, const packed_keys<E>& keys,
                                           slot_range taken, const float* weights,
                                           const float* rescale, Sees&& sees) {
  using products = tile_products<E>;
  constexpr index_t panel = tile_sizes<E>::panel, step = tile_sizes<E>::slot_step;
  const auto finite = [](E x) {
    return (x.bits & 0x7f80u) != 0x7f80u;
  };
  rescale_sums<Rows>(strip, rescale);
  alignas(64) E finite_values[static_cast<std::size_t>(step * panel)];
  for (index_t p = 0; p < keys.value_panels(); ++p)
    for (index_t slot = taken.begin; slot < taken.end; slot += step) {
      const E* values = keys.value_panel(p, slot);
      for (index_t x = 0; x < step * panel; ++x)
        finite_values[x] = finite(values[x]) ? values[x] : E{};
      products::template multiply<Rows, panel>(weights + (slot - taken.begin), finite_values, step,
                                               strip.acc + p * panel, strip.acc_stride);
    }

  for (index_t column = 0; column < keys.value_dim; ++column)
    for (index_t slot = taken.begin; slot < taken.end; ++slot) {
      const E* values = keys.value_panel(column / panel, slot / step * step);
      const E value = values[products::place(column % panel, slot % step)];
      if (finite(value)) continue;
      for (int r = 0; r < Rows; ++r)
        if (sees(r, slot))
          strip.acc[r * strip.acc_stride + column] +=
              widen(products::weight(weights, r, slot - taken.begin)) * widen(value);
    }
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus

#endif
