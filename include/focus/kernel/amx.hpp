// bfloat16 in AMX tiles, which the operating system has to grant. What all kernels of bfloat16 have
// in common is in kernel/bfloat16_tile.hpp.
//
//   query rows   [chunks of the depth][rows][32]: 16 rows of a chunk are a tile
//   key panel    [chunks of the depth][2 tiles][16 pairs of the depth][16 keys][2]
//   value panel  [slots / 32][2 tiles][16 pairs of slots][16 columns][2]
//   weights      in the memory of the scores: of each 32 floats the first half
//
// TDPBF16PS takes subnormal numbers for zeros, in the operands and in the sums, and rounds to
// nearest whatever MXCSR says.
#pragma once

#include "focus/config.hpp"
#if FOCUS_HAS_AMX

#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "focus/kernel/bfloat16_tile.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Asks the operating system for the tile registers, on behalf of all threads of the process; false
/// where it refuses. Asking again changes nothing.
inline bool amx_permitted() noexcept {
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

/// All that was written is in memory before what follows, and nothing is read early. The
/// intrinsics of GCC 12 do not say that a tile is loaded from memory.
inline void order_tile_memory() noexcept {
  asm volatile("" ::: "memory");
}

/// The products of tiles; see bfloat16_operand.
struct amx_products {
  using sizes = tile_sizes<bfloat16>;
  static constexpr index_t tile = sizes::tile, panel = sizes::panel;

  /// 2 x 2 tiles of sums in tiles 0 to 3, queries in 4 and 5, keys in 6 and 7.
  template <int Rows>
  FOCUS_NOINLINE static void score(const bfloat16* query, const bfloat16* key_panel, index_t depth,
                                   float* scores) {
    constexpr index_t chunk = sizes::depth_chunk, row_bytes = 64;
    constexpr index_t score_bytes = sizes::score_stride * static_cast<index_t>(sizeof(float));
    constexpr bool two = Rows > tile;
    order_tile_memory();
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (two) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (index_t first = 0; first < depth; first += chunk) {
      _tile_stream_loadd(6, key_panel, row_bytes);
      _tile_loadd(4, query, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_stream_loadd(7, key_panel + tile * chunk, row_bytes);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (two) {
        _tile_loadd(5, query + tile * chunk, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      query += sizes::padded_rows * chunk;
      key_panel += sizes::panel * chunk;
    }
    _tile_stored(0, scores, score_bytes);
    _tile_stored(1, scores + tile, score_bytes);
    if constexpr (two) {
      _tile_stored(2, scores + tile * sizes::score_stride, score_bytes);
      _tile_stored(3, scores + tile * sizes::score_stride + tile, score_bytes);
    }
    order_tile_memory();
  }

  /// Sums in tiles 0 to 3, weights in 4 and 5, values in 6 and 7.
  template <int Rows, int Columns>
  FOCUS_NOINLINE static void multiply(const float* weights, const bfloat16* values, index_t count,
                                      float* acc, index_t acc_stride) {
    constexpr index_t row_bytes = 64;
    constexpr index_t weight_bytes = sizes::score_stride * static_cast<index_t>(sizeof(float));
    constexpr bool two_rows = Rows > tile, two_columns = Columns > tile;
    const index_t acc_bytes = acc_stride * static_cast<index_t>(sizeof(float));
    float* const lower = acc + tile * acc_stride;
    order_tile_memory();
    _tile_loadd(0, acc, acc_bytes);
    if constexpr (two_columns) _tile_loadd(1, acc + tile, acc_bytes);
    if constexpr (two_rows) _tile_loadd(2, lower, acc_bytes);
    if constexpr (two_rows && two_columns) _tile_loadd(3, lower + tile, acc_bytes);
    for (index_t t = 0; t < count; t += panel, weights += panel, values += panel * panel) {
      _tile_stream_loadd(6, values, row_bytes);
      _tile_loadd(4, weights, weight_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (two_columns) {
        _tile_stream_loadd(7, values + tile * panel, row_bytes);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (two_rows) {
        _tile_loadd(5, weights + tile * sizes::score_stride, weight_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (two_columns) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, acc, acc_bytes);
    if constexpr (two_columns) _tile_stored(1, acc + tile, acc_bytes);
    if constexpr (two_rows) _tile_stored(2, lower, acc_bytes);
    if constexpr (two_rows && two_columns) _tile_stored(3, lower + tile, acc_bytes);
    order_tile_memory();
  }

  /// Of 32 slots: its tile, pair, and half of that.
  static index_t place(index_t column, index_t slot) noexcept {
    return column / tile * tile * panel + (slot / 2 * tile + column % tile) * 2 + slot % 2;
  }

  /// Pairs of rows are 32-bit numbers: two square transpositions of these, of 16 slots each. The
  /// first interleaving of two rows works within 128 bits, of 8 slots: 4 of them in each result.
  template <int Rows>
  FOCUS_NOINLINE static void transpose(const float* weights, bfloat16* columns) {
    constexpr index_t chunk = sizes::depth_chunk, stride = sizes::score_stride;
    static_assert(sizes::strip_rows == panel && 2 * tile == chunk);
    vec<float> first_four[tile], last_four[tile];
    for (index_t pair = 0; pair < tile; ++pair) {
      first_four[pair] = last_four[pair] = vec<float>::zero();
      if (2 * pair >= Rows) continue;
      const __m512i even = _mm512_loadu_si512(weights + 2 * pair * stride);
      const __m512i odd = _mm512_loadu_si512(weights + (2 * pair + 1) * stride);
      first_four[pair].v = _mm512_castsi512_ps(_mm512_unpacklo_epi16(even, odd));
      last_four[pair].v = _mm512_castsi512_ps(_mm512_unpackhi_epi16(even, odd));
    }
    detail::transpose(first_four);
    detail::transpose(last_four);
    for (index_t c = 0; c < tile; ++c) {
      const index_t slot = c / 4 * 8 + c % 4;
      store_bits(first_four[c], columns + slot * chunk);
      store_bits(last_four[c], columns + (slot + 4) * chunk);
    }
  }

  static bfloat16 weight(const float* weights, int row, index_t slot) noexcept {
    const float* of_panel = weights + row * sizes::score_stride + slot / panel * panel;
    bfloat16 result;
    std::memcpy(&result, reinterpret_cast<const bfloat16*>(of_panel) + slot % panel, sizeof result);
    return result;
  }
};

/// bfloat16 in AMX tiles; see kernel/operand.hpp.
template <>
struct operand<bfloat16> : bfloat16_operand<bfloat16, amx_products> {
  /// The tiles of the calling thread, all eight of 16 rows of 64 bytes, until the end of the scope.
  struct scope {
    scope() noexcept {
      struct alignas(64) configuration {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      };
      static_assert(sizeof(configuration) == 64);
      const configuration all;
      // GCC 12's intrinsic says that it reads 8 bytes: here all are read, through a pointer of
      // which the compiler knows nothing afterwards.
      const void* at = &all;
      asm volatile("" : "+r"(at) : "m"(all) : "memory");
      _tile_loadconfig(at);
      asm volatile("" ::"m"(all) : "memory");
    }
    ~scope() { _tile_release(); }
    scope(const scope&) = delete;
    scope& operator=(const scope&) = delete;
  };

  /// The query rows as they are; zeros fill up the depth and the last strip.
  template <class RowOf>
  static void pack_queries(index_t rows, index_t depth, float, RowOf&& row_of, bfloat16* to) {
    constexpr int chunk = sizes::depth_chunk;
    for (index_t first = 0; first < depth; first += chunk, to += sizes::padded_rows * chunk) {
      for (index_t r = 0; r < rows; ++r) {
        constexpr index_t ahead = 6;
        if (r + ahead < rows)
          detail::prefetch_row(row_of(r + ahead) + first,
                               (std::min<index_t>)(chunk, depth - first));
        store_bits(detail::load_bits<vec<float>>(row_of(r) + first, depth - first), to + r * chunk);
      }
      fill(to + rows * chunk, to + round_up(rows, sizes::strip_rows) * chunk, bfloat16{});
    }
  }

  /// One key panel: in pairs of the depth, K^T is a transposition of 32-bit numbers.
  template <class RowOf>
  static void pack_key_panel(RowOf&& row_of, index_t depth, bfloat16* to) {
    constexpr int tile = sizes::tile, chunk = sizes::depth_chunk;
    for (int first_key = 0; first_key < sizes::panel; first_key += tile, to += tile * chunk) {
      decltype(row_of(0)) rows[tile];
      for (int c = 0; c < tile; ++c) rows[c] = row_of(first_key + c);
      for (index_t first = 0; first < depth; first += chunk) {
        vec<float> block[tile];
        for (int c = 0; c < tile; ++c)
          block[c] = detail::load_bits<vec<float>>(rows[c] == nullptr ? nullptr : rows[c] + first,
                                                   depth - first);
        transpose(block);
        for (int t = 0; t < tile; ++t) store_bits(block[t], to + first * sizes::panel + t * chunk);
      }
    }
  }

  /// The values of one key panel, in pairs of slots.
  template <class RowOf>
  static bool pack_value_panel(RowOf&& row_of, index_t width, index_t first, index_t stride,
                               bfloat16* panels) {
    constexpr int tile = sizes::tile, panel = sizes::panel;
    using T = std::remove_cvref_t<decltype(*row_of(0))>;
    vec<float> poison = vec<float>::zero();
    for (int c = 0; c < panel; c += 2) {
      const T *even_row = row_of(c), *odd_row = row_of(c + 1);
      for (index_t column = 0; column < round_up(width, panel); column += tile) {
        const auto load = [&](const T* row) FOCUS_LAMBDA_INLINE {
          if (row == nullptr || column >= width) return vec<float>::zero();
          return detail::load_widened_up_to<T, float>(row + column, width - column);
        };
        const vec<float> even = load(even_row), odd = load(odd_row);
        poison = fma(even, vec<float>::zero(), fma(odd, vec<float>::zero(), poison));
        const __m512i pairs = _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even.v), 16),
                                              _mm512_castps_si512(odd.v));
        store_bits(pairs, panels + (column / panel * stride + first) * panel +
                              (column % panel / tile * tile + c / 2) * panel);
      }
    }
    return is_nan(reduce_add(poison));
  }

  /// The weights of a row, of whole panels of slots, rounded to bfloat16.
  FOCUS_ALWAYS_INLINE static weight_sums<bfloat16> weigh_row(int, float shift, float factor,
                                                             index_t count, float* row) {
    constexpr int lanes = vec<float>::width, panel = tile_sizes<bfloat16>::panel;
    factor = factor_with_shift(shift, factor, count, row);
    const vec<float> scale = vec<float>::broadcast(factor), offset = vec<float>::broadcast(-shift);
    const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
    vec<float> total = vec<float>::zero(), total_of_upper = total, rounded = total;
    for (index_t j = 0; j < count; j += panel) {
      const vec<float> lower = exp2_weight(fma(vec<float>::load(row + j), scale, offset));
      const vec<float> upper = exp2_weight(fma(vec<float>::load(row + j + lanes), scale, offset));
      const __m512bh weights = _mm512_cvtne2ps_pbh(upper.v, lower.v);
      _mm512_storeu_si512(row + j, reinterpret_cast<__m512i>(weights));
      total = total + lower;
      total_of_upper = total_of_upper + upper;
      rounded.v = _mm512_dpbf16_ps(rounded.v, weights, ones);
    }
    return {{reduce_add(total + total_of_upper), reduce_add(rounded)}};
  }

  /// Rounds `count` weights of a row, of whole panels of slots, to bfloat16, in place and as
  /// accumulate takes them; returns the sum of what they become.
  FOCUS_ALWAYS_INLINE static float round_weights(int, index_t count, float* row) {
    constexpr int lanes = vec<float>::width, panel = tile_sizes<bfloat16>::panel;
    const auto ones = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
    vec<float> total = vec<float>::zero();
    for (index_t j = 0; j < count; j += panel) {
      const vec<float> lower = vec<float>::load(row + j), upper = vec<float>::load(row + j + lanes);
      const __m512bh weights = _mm512_cvtne2ps_pbh(upper.v, lower.v);
      _mm512_storeu_si512(row + j, reinterpret_cast<__m512i>(weights));
      total.v = _mm512_dpbf16_ps(total.v, weights, ones);
    }
    return reduce_add(total);
  }

  /// differentiate_softmax and round_weights of both in one step: P and dS of a row, of whole
  /// panels of slots.
  FOCUS_ALWAYS_INLINE static void differentiate_row(index_t count, float factor, float lse,
                                                    float delta, float* scores,
                                                    float* slopes) noexcept {
    constexpr int lanes = vec<float>::width, panel = tile_sizes<bfloat16>::panel;
    const vec<float> scale = vec<float>::broadcast(factor), offset = vec<float>::broadcast(-lse),
                     delta_v = vec<float>::broadcast(delta), zero = vec<float>::zero(),
                     highest = vec<float>::broadcast(exp2_highest<float>);
    const auto weigh = [&](const float* s) FOCUS_LAMBDA_INLINE {
      return exp2_weight(minimum(highest, fma(vec<float>::load(s), scale, offset)));
    };
    const auto slope = [&](vec<float> p, const float* dp) FOCUS_LAMBDA_INLINE {
      return where_zero(p, zero, p * (vec<float>::load(dp) - delta_v));
    };
    const auto store = [](vec<float> lower, vec<float> upper, float* to) FOCUS_LAMBDA_INLINE {
      const __m512bh both = _mm512_cvtne2ps_pbh(upper.v, lower.v);
      _mm512_storeu_si512(to, reinterpret_cast<__m512i>(both));
    };
    for (index_t j = 0; j < count; j += panel) {
      const vec<float> lower = weigh(scores + j), upper = weigh(scores + j + lanes);
      store(lower, upper, scores + j);
      store(slope(lower, slopes + j), slope(upper, slopes + j + lanes), slopes + j);
    }
  }

 private:
  using sizes = tile_sizes<bfloat16>;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus

#endif
