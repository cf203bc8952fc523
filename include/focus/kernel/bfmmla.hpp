// bfloat16 in Arm's matrix products, BFMMLA. What all kernels of bfloat16 have in common is in
// kernel/bfloat16_tile.hpp.
//
// A vector of 8 elements is a pair of rows of 4: of two queries, of two keys, of two rows of
// weights, or of two columns of values. The product of two such vectors is their 2 x 2 inner
// products, added to sums in float.
//
//   query rows   [depth / 4][rows][4]
//   key panel    [depth / 4][8 keys][4]
//   value panel  [slots / 4][8 columns][4]
//   weights      in the memory of the scores: of each 4 floats of an even row the first half, and
//                the second half for the row after it
//
// BFMMLA takes subnormal numbers for zeros, in the operands and in the sums, and rounds sums to odd
// whatever FPCR says (but for its bit EBF, where the processor has that).
#pragma once

#include "focus/config.hpp"
#if FOCUS_HAS_BFMMLA

#include <algorithm>
#include <arm_neon.h>
#include <cstring>

#include "focus/kernel/bfloat16_tile.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Two rows, 4 elements of each in turn; `step` elements from one 4 of a row to the next. Zeros
/// fill up the last.
template <class T>
FOCUS_ALWAYS_INLINE void pack_row_pair(const T* even, const T* odd, index_t depth, index_t step,
                                       bfloat16* to) {
  constexpr index_t quad = tile_sizes<bfloat16>::quad;
  for (index_t t = 0; t < depth; t += 2 * quad, to += 2 * step) {
    const auto four_by_two = [&](const T* row) FOCUS_LAMBDA_INLINE {
      return vreinterpretq_u64_u16(
          detail::load_bits<uint16x8_t>(row == nullptr ? nullptr : row + t, depth - t));
    };
    const uint64x2_t a = four_by_two(even), b = four_by_two(odd);
    store_bits(vreinterpretq_u16_u64(vzip1q_u64(a, b)), to);
    if (t + quad < depth) store_bits(vreinterpretq_u16_u64(vzip2q_u64(a, b)), to + step);
  }
}

/// 8 elements, which may be weights in the memory of floats.
FOCUS_ALWAYS_INLINE bfloat16x8_t load_pair(const void* from) noexcept {
  bfloat16x8_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return pair;
}

/// sum[r][c] += a(r) * b(c), with a vector for each pair of rows or columns.
template <int RowPairs, int ColumnPairs>
FOCUS_ALWAYS_INLINE void multiply_pairs(const array_of<bfloat16x8_t, RowPairs>& a,
                                        const bfloat16* b,
                                        table_of<float32x4_t, RowPairs, ColumnPairs>& sum) {
  array_of<bfloat16x8_t, ColumnPairs> columns;
  static_for<ColumnPairs>([&](auto c) FOCUS_LAMBDA_INLINE {
    columns[c] = load_pair(b + c * tile_sizes<bfloat16>::pair_size);
  });
  static_for<RowPairs>([&](auto r) FOCUS_LAMBDA_INLINE {
    static_for<ColumnPairs>(
        [&](auto c) FOCUS_LAMBDA_INLINE { sum[r][c] = vbfmmlaq_f32(sum[r][c], a[r], columns[c]); });
  });
}

/// The first halves of two vectors, and the second halves: two rows of 2 x 2 sums, or back.
FOCUS_ALWAYS_INLINE float32x4_t first_halves(float32x4_t a, float32x4_t b) noexcept {
  return vcombine_f32(vget_low_f32(a), vget_low_f32(b));
}
FOCUS_ALWAYS_INLINE float32x4_t second_halves(float32x4_t a, float32x4_t b) noexcept {
  return vcombine_f32(vget_high_f32(a), vget_high_f32(b));
}

/// Rows 2 r and 2 r + 1 of `to` from the sums of each pair of rows r.
template <int RowPairs, int ColumnPairs>
FOCUS_ALWAYS_INLINE void store_rows(const table_of<float32x4_t, RowPairs, ColumnPairs>& sum,
                                    float* to, index_t stride) {
  static_for<RowPairs>([&](auto r) FOCUS_LAMBDA_INLINE {
    float* even = to + 2 * r * stride;
    static_for<ColumnPairs / 2>([&](auto c) FOCUS_LAMBDA_INLINE {
      vst1q_f32(even + 4 * c, first_halves(sum[r][2 * c], sum[r][2 * c + 1]));
      vst1q_f32(even + stride + 4 * c, second_halves(sum[r][2 * c], sum[r][2 * c + 1]));
    });
  });
}
/// The way back.
template <int RowPairs, int ColumnPairs>
FOCUS_ALWAYS_INLINE void load_rows(const float* from, index_t stride,
                                   table_of<float32x4_t, RowPairs, ColumnPairs>& sum) {
  static_for<RowPairs>([&](auto r) FOCUS_LAMBDA_INLINE {
    const float* even = from + 2 * r * stride;
    static_for<ColumnPairs / 2>([&](auto c) FOCUS_LAMBDA_INLINE {
      const float32x4_t a = vld1q_f32(even + 4 * c), b = vld1q_f32(even + stride + 4 * c);
      sum[r][2 * c] = first_halves(a, b);
      sum[r][2 * c + 1] = second_halves(a, b);
    });
  });
}

/// The products of pairs of rows; see bfloat16_operand.
struct bfmmla_products {
  using sizes = tile_sizes<bfloat16>;

  template <int Rows>
  FOCUS_NOINLINE static void score(const bfloat16* query, const bfloat16* key_panel, index_t depth,
                                   float* scores) {
    constexpr index_t quad = sizes::quad;
    constexpr int row_pairs = Rows / sizes::pair, key_pairs = sizes::panel / sizes::pair;
    table_of<float32x4_t, row_pairs, key_pairs> sum;
    static_for<row_pairs * key_pairs>(
        [&](auto i) FOCUS_LAMBDA_INLINE { sum[i / key_pairs][i % key_pairs] = vdupq_n_f32(0); });
    for (index_t t = 0; t < depth; t += quad) {
      array_of<bfloat16x8_t, row_pairs> rows;
      static_for<row_pairs>(
          [&](auto r) FOCUS_LAMBDA_INLINE { rows[r] = load_pair(query + r * sizes::pair_size); });
      multiply_pairs<row_pairs, key_pairs>(rows, key_panel, sum);
      query += sizes::padded_rows * quad;
      key_panel += sizes::panel * quad;
    }
    store_rows<row_pairs, key_pairs>(sum, scores, sizes::score_stride);
  }

  template <int Rows, int Columns>
  FOCUS_NOINLINE static void multiply(const float* weights, const bfloat16* values, index_t count,
                                      float* acc, index_t acc_stride) {
    constexpr index_t quad = sizes::quad, stride = sizes::score_stride;
    constexpr int row_pairs = Rows / sizes::pair, column_pairs = Columns / sizes::pair;
    table_of<float32x4_t, row_pairs, column_pairs> sum;
    load_rows<row_pairs, column_pairs>(acc, acc_stride, sum);
    for (index_t t = 0; t < count; t += quad) {
      array_of<bfloat16x8_t, row_pairs> rows;
      static_for<row_pairs>(
          [&](auto r) FOCUS_LAMBDA_INLINE { rows[r] = load_pair(weights + 2 * r * stride); });
      multiply_pairs<row_pairs, column_pairs>(rows, values, sum);
      weights += quad;
      values += quad * sizes::panel;
    }
    store_rows<row_pairs, column_pairs>(sum, acc, acc_stride);
  }

  static index_t place(index_t column, index_t slot) noexcept {
    return column * sizes::quad + slot;
  }

  /// Square transpositions of 4 rows and 4 slots.
  template <int Rows>
  FOCUS_NOINLINE static void transpose(const float* weights, bfloat16* columns) {
    constexpr index_t quad = sizes::quad, stride = sizes::score_stride;
    for (index_t row = 0; row < Rows; row += quad, columns += sizes::padded_rows * quad)
      for (index_t slot = 0; slot < sizes::strip_rows; slot += quad) {
        const auto load = [&](index_t r) {
          return vreinterpretq_u16_bf16(load_pair(weights + (row + r) * stride + slot));
        };
        const uint16x8_t first = load(0), second = load(sizes::pair);
        const uint16x8_t even = vzip1q_u16(first, second), odd = vzip2q_u16(first, second);
        store_bits(vzip1q_u16(even, odd), columns + slot * quad);
        store_bits(vzip2q_u16(even, odd), columns + (slot + 2) * quad);
      }
  }

  static bfloat16 weight(const float* weights, int row, index_t slot) noexcept {
    constexpr int pair = sizes::pair, quad = sizes::quad;
    const float* of_pair = weights + (row - row % pair) * sizes::score_stride + slot / quad * quad;
    bfloat16 result;
    std::memcpy(&result,
                reinterpret_cast<const bfloat16*>(of_pair) + row % pair * quad + slot % quad,
                sizeof result);
    return result;
  }
};

/// bfloat16 in Arm's matrix products; see kernel/operand.hpp.
template <>
struct operand<bfloat16> : bfloat16_operand<bfloat16, bfmmla_products> {
  /// Nothing is held.
  struct scope {};

  /// The query rows as they are; zeros fill up the depth and the last strip.
  template <class RowOf>
  static void pack_queries(index_t rows, index_t depth, float, RowOf&& row_of, bfloat16* to) {
    constexpr index_t quad = sizes::quad, ahead = 6;
    for (index_t r = 0; r < round_up(rows, sizes::strip_rows); r += sizes::pair) {
      for (index_t next = r + ahead; next < (std::min)(r + ahead + sizes::pair, rows); ++next)
        detail::prefetch_row(row_of(next), depth);
      detail::pack_row_pair(r < rows ? row_of(r) : nullptr, r + 1 < rows ? row_of(r + 1) : nullptr,
                            depth, sizes::padded_rows * quad, to + r * quad);
    }
  }

  template <class RowOf>
  static void pack_key_panel(RowOf&& row_of, index_t depth, bfloat16* to) {
    for (int c = 0; c < sizes::panel; c += sizes::pair)
      detail::pack_row_pair(row_of(c), row_of(c + 1), depth, sizes::panel * sizes::quad,
                            to + c * sizes::quad);
  }

  /// The values of one key panel: V^T of 4 slots at a time.
  template <class RowOf>
  static bool pack_value_panel(RowOf&& row_of, index_t width, index_t first, index_t stride,
                               bfloat16* panels) {
    constexpr index_t panel = sizes::panel;
    constexpr int quad = sizes::quad;
    static_assert(panel == 8);
    const uint16x8_t exponent = vdupq_n_u16(0x7f80);
    uint16x8_t nonfinite = vdupq_n_u16(0);
    for (int c = 0; c < panel; c += quad)
      for (index_t column = 0; column < width; column += panel) {
        uint16x8_t row[quad];
        for (int t = 0; t < quad; ++t) {
          const auto* from = row_of(c + t);
          row[t] = detail::load_bits<uint16x8_t>(from == nullptr ? nullptr : from + column,
                                                 width - column);
          nonfinite = vorrq_u16(nonfinite, vceqq_u16(vandq_u16(row[t], exponent), exponent));
        }
        bfloat16* to = panels + (column / panel * stride + first + c) * panel;
        const uint16x8_t low_even = vzip1q_u16(row[0], row[2]),
                         low_odd = vzip1q_u16(row[1], row[3]),
                         high_even = vzip2q_u16(row[0], row[2]),
                         high_odd = vzip2q_u16(row[1], row[3]);
        store_bits(vzip1q_u16(low_even, low_odd), to);
        store_bits(vzip2q_u16(low_even, low_odd), to + panel);
        store_bits(vzip1q_u16(high_even, high_odd), to + 2 * panel);
        store_bits(vzip2q_u16(high_even, high_odd), to + 3 * panel);
      }
    return vmaxvq_u16(nonfinite) != 0;
  }

  /// The weights of a row, of whole vectors of slots, rounded to bfloat16. Those of an odd row lie
  /// in the memory of the even one before it, which has been through this by then.
  FOCUS_ALWAYS_INLINE static weight_sums<bfloat16> weigh_row(int r, float shift, float factor,
                                                             index_t count, float* row) {
    constexpr int lanes = vec<float>::width;
    factor = factor_with_shift(shift, factor, count, row);
    const vec<float> scale = vec<float>::broadcast(factor), offset = vec<float>::broadcast(-shift);
    float* const to = row - r % 2 * tile_sizes<bfloat16>::score_stride + r % 2 * (lanes / 2);
    vec<float> total = vec<float>::zero(), rounded = vec<float>::zero();
    for (index_t j = 0; j < count; j += lanes) {
      const vec<float> weight = exp2<float>(fma(vec<float>::load(row + j), scale, offset));
      const bfloat16x4_t four = vcvt_bf16_f32(weight.v);
      std::memcpy(static_cast<void*>(to + j), &four, sizeof four);
      total = total + weight;
      rounded = rounded + vec<float>{vcvt_f32_bf16(four)};
    }
    return {{reduce_add(total), reduce_add(rounded)}};
  }

  /// Rounds `count` weights of a row, whole vectors of them, to bfloat16, as accumulate takes them;
  /// returns the sum of what they become. Even rows before odd ones, as in weigh_row.
  FOCUS_ALWAYS_INLINE static float round_weights(int r, index_t count, float* row) {
    constexpr int lanes = vec<float>::width;
    float* const to = row - r % 2 * tile_sizes<bfloat16>::score_stride + r % 2 * (lanes / 2);
    vec<float> total = vec<float>::zero();
    for (index_t j = 0; j < count; j += lanes) {
      const bfloat16x4_t four = vcvt_bf16_f32(vec<float>::load(row + j).v);
      std::memcpy(static_cast<void*>(to + j), &four, sizeof four);
      total = total + vec<float>{vcvt_f32_bf16(four)};
    }
    return reduce_add(total);
  }

 private:
  using sizes = tile_sizes<bfloat16>;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus

#endif
