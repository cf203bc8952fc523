// The vector layer with AVX-512 (F, BW, DQ, VL): 16 floats or 8 doubles.
#pragma once

#include <cstdint>
// GCC 12 warns of its own _mm512_undefined_ps() wherever an intrinsic that uses it is inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include "focus/config.hpp"
#include "focus/kernel/eighths.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/scalar.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

template <class A>
struct avx512_vector;

template <>
struct avx512_vector<float> {
  static constexpr int width = 16;
  __m512 v;

  static avx512_vector zero() noexcept { return {_mm512_setzero_ps()}; }
  static avx512_vector broadcast(float x) noexcept { return {_mm512_set1_ps(x)}; }
  static avx512_vector load(const float* p) noexcept { return {_mm512_loadu_ps(p)}; }
  void store(float* p) const noexcept { _mm512_storeu_ps(p, v); }
  friend avx512_vector operator+(avx512_vector a, avx512_vector b) noexcept {
    return {_mm512_add_ps(a.v, b.v)};
  }
  friend avx512_vector operator-(avx512_vector a, avx512_vector b) noexcept {
    return {_mm512_sub_ps(a.v, b.v)};
  }
  friend avx512_vector operator*(avx512_vector a, avx512_vector b) noexcept {
    return {_mm512_mul_ps(a.v, b.v)};
  }
  friend avx512_vector operator/(avx512_vector a, avx512_vector b) noexcept {
    return {_mm512_div_ps(a.v, b.v)};
  }
};

template <>
struct avx512_vector<double> {
  static constexpr int width = 8;
  __m512d v;

  static avx512_vector zero() noexcept { return {_mm512_setzero_pd()}; }
  static avx512_vector broadcast(double x) noexcept { return {_mm512_set1_pd(x)}; }
  static avx512_vector load(const double* p) noexcept { return {_mm512_loadu_pd(p)}; }
  void store(double* p) const noexcept { _mm512_storeu_pd(p, v); }
  friend avx512_vector operator+(avx512_vector a, avx512_vector b) noexcept {
    return {_mm512_add_pd(a.v, b.v)};
  }
  friend avx512_vector operator-(avx512_vector a, avx512_vector b) noexcept {
    return {_mm512_sub_pd(a.v, b.v)};
  }
  friend avx512_vector operator*(avx512_vector a, avx512_vector b) noexcept {
    return {_mm512_mul_pd(a.v, b.v)};
  }
  friend avx512_vector operator/(avx512_vector a, avx512_vector b) noexcept {
    return {_mm512_div_pd(a.v, b.v)};
  }
};

using avx512_float = avx512_vector<float>;
using avx512_double = avx512_vector<double>;

inline avx512_float fma(avx512_float a, avx512_float b, avx512_float c) noexcept {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline avx512_double fma(avx512_double a, avx512_double b, avx512_double c) noexcept {
  return {_mm512_fmadd_pd(a.v, b.v, c.v)};
}
inline avx512_float maximum(avx512_float a, avx512_float b) noexcept {
  return {_mm512_max_ps(a.v, b.v)};
}
inline avx512_double maximum(avx512_double a, avx512_double b) noexcept {
  return {_mm512_max_pd(a.v, b.v)};
}
inline avx512_float minimum(avx512_float a, avx512_float b) noexcept {
  return {_mm512_min_ps(a.v, b.v)};
}
inline avx512_double minimum(avx512_double a, avx512_double b) noexcept {
  return {_mm512_min_pd(a.v, b.v)};
}

inline avx512_float zero_where_less(avx512_float x, avx512_float a, avx512_float b) noexcept {
  return {_mm512_mask_mov_ps(x.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), _mm512_setzero_ps())};
}
inline avx512_double zero_where_less(avx512_double x, avx512_double a, avx512_double b) noexcept {
  return {_mm512_mask_mov_pd(x.v, _mm512_cmp_pd_mask(a.v, b.v, _CMP_LT_OQ), _mm512_setzero_pd())};
}

// In GCC without optimisation the intrinsics are macros, whose mask of all bits is a negative
// number.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wsign-conversion"
#endif
inline avx512_float round(avx512_float x) noexcept {
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline avx512_double round(avx512_double x) noexcept {
  return {_mm512_roundscale_pd(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/// x - floor(x): from 0 to 1, to which what lies little below a whole number is rounded.
inline avx512_float above_floor(avx512_float x) noexcept {
  return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

// Products below the normal numbers would be exact here, and slow on some processors.
inline avx512_float scale_by_power(avx512_float x, avx512_float n) noexcept {
  const __mmask16 normal = _mm512_cmp_ps_mask(n.v, _mm512_set1_ps(-127), _CMP_NLE_UQ);
  return {_mm512_maskz_scalef_ps(normal, x.v, n.v)};
}
inline avx512_double scale_by_power(avx512_double x, avx512_double n) noexcept {
  const __mmask8 normal = _mm512_cmp_pd_mask(n.v, _mm512_set1_pd(-1023), _CMP_NLE_UQ);
  return {_mm512_maskz_scalef_pd(normal, x.v, n.v)};
}
/// a * 2^floor(x), of 1 <= a <= 2; 0 where x < -126, as that may be no normal number, and NaN where
/// x is.
inline avx512_float scale_by_power_of_floor(avx512_float a, avx512_float x) noexcept {
  const __mmask16 normal = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  return {_mm512_maskz_scalef_ps(normal, a.v, x.v)};
}

inline power_of_eighth<avx512_float> nearest_eighth(avx512_float x) noexcept {
  // The compiler does not see that these are sums, which -fassociative-math would let it change.
  constexpr int to_nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m512 offset = _mm512_set1_ps(eighths_offset);
  const __m512 count = _mm512_add_round_ps(x.v, offset, to_nearest);
  const __m512 rounded = _mm512_sub_round_ps(count, offset, to_nearest);
  const __m512i bits = _mm512_castps_si512(count);
  // The lookup takes four bits: the table is there twice.
  const __m512i table = _mm512_broadcast_i64x4(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(powers_of_eighths)));
  const __m512i power =
      _mm512_add_epi32(_mm512_permutexvar_epi32(bits, table), _mm512_slli_epi32(bits, 20));
  return {{rounded}, {_mm512_castsi512_ps(power)}};
}

inline avx512_float exponent(avx512_float x) noexcept {
  const __m512i field =
      _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(x.v), 23), _mm512_set1_epi32(0xff));
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(field, _mm512_set1_epi32(127)))};
}
inline avx512_double exponent(avx512_double x) noexcept {
  // An integer below 2^52 under the exponent of 2^52 is that integer plus 2^52.
  const __m512i field =
      _mm512_and_si512(_mm512_srli_epi64(_mm512_castpd_si512(x.v), 52), _mm512_set1_epi64(0x7ff));
  const __m512d shifted =
      _mm512_castsi512_pd(_mm512_or_si512(field, _mm512_set1_epi64(0x4330000000000000)));
  return {_mm512_sub_pd(shifted, _mm512_set1_pd(0x1p52 + 1023))};
}
inline avx512_float mantissa(avx512_float x) noexcept {
  const __m512i kept =
      _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(static_cast<int>(0x807fffff)));
  return {_mm512_castsi512_ps(_mm512_or_si512(kept, _mm512_set1_epi32(0x3f800000)))};
}
inline avx512_double mantissa(avx512_double x) noexcept {
  const __m512i kept = _mm512_and_si512(
      _mm512_castpd_si512(x.v), _mm512_set1_epi64(static_cast<long long>(0x800fffffffffffffu)));
  return {_mm512_castsi512_pd(_mm512_or_si512(kept, _mm512_set1_epi64(0x3ff0000000000000)))};
}
inline avx512_float where_zero(avx512_float x, avx512_float a, avx512_float b) noexcept {
  return {_mm512_mask_mov_ps(b.v, _mm512_cmp_ps_mask(x.v, _mm512_setzero_ps(), _CMP_EQ_OQ), a.v)};
}
inline avx512_double where_zero(avx512_double x, avx512_double a, avx512_double b) noexcept {
  return {_mm512_mask_mov_pd(b.v, _mm512_cmp_pd_mask(x.v, _mm512_setzero_pd(), _CMP_EQ_OQ), a.v)};
}

/// Bit l: sets[l] & with is empty, for eight sets.
inline __mmask8 disjoint(const std::uint64_t* sets, std::uint64_t with) noexcept {
  const __m512i common = _mm512_set1_epi64(static_cast<long long>(with));
  return static_cast<__mmask8>(~_mm512_test_epi64_mask(_mm512_loadu_si512(sets), common));
}
inline avx512_float where_disjoint(const std::uint64_t* sets, std::uint64_t with, avx512_float a,
                                   avx512_float b) noexcept {
  const auto mask = static_cast<__mmask16>(disjoint(sets, with) | disjoint(sets + 8, with) << 8);
  return {_mm512_mask_mov_ps(b.v, mask, a.v)};
}
inline avx512_double where_disjoint(const std::uint64_t* sets, std::uint64_t with, avx512_double a,
                                    avx512_double b) noexcept {
  return {_mm512_mask_mov_pd(b.v, disjoint(sets, with), a.v)};
}

template <bool Meeting>
inline void store_where_groups(float* p, const std::uint64_t* sets, std::uint64_t with,
                               std::int64_t count, float value) noexcept {
  const __m512i common = _mm512_set1_epi64(static_cast<long long>(with));
  const std::uint32_t there = 0xffffu >> (16 - count);
  const __m512i first = _mm512_maskz_loadu_epi64(static_cast<__mmask8>(there), sets);
  const __m512i second = _mm512_maskz_loadu_epi64(static_cast<__mmask8>(there >> 8), sets + 8);
  const std::uint32_t meeting = _mm512_test_epi64_mask(first, common) |
                                std::uint32_t{_mm512_test_epi64_mask(second, common)} << 8;
  const auto where = static_cast<__mmask16>((Meeting ? meeting : ~meeting) & there);
  _mm512_mask_storeu_ps(p, where, _mm512_set1_ps(value));
}

/// Without a branch on where the edges are: 32 lanes are stored at each end, most of them masked
/// off.
inline bool store_edges(float* p, std::int64_t begin, std::int64_t end, std::int64_t count,
                        float value) noexcept {
  const std::int64_t behind = count - end;
  if (begin > 32 || behind > 32 || count < 32) return false;
  const __m512 values = _mm512_set1_ps(value);
  const auto head = static_cast<std::uint32_t>((std::uint64_t{1} << begin) - 1);
  const auto tail = static_cast<std::uint32_t>(~std::uint64_t{0} << (32 - behind));
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>(head), values);
  _mm512_mask_storeu_ps(p + 16, static_cast<__mmask16>(head >> 16), values);
  _mm512_mask_storeu_ps(p + count - 32, static_cast<__mmask16>(tail), values);
  _mm512_mask_storeu_ps(p + count - 16, static_cast<__mmask16>(tail >> 16), values);
  return true;
}

inline float reduce_add(avx512_float x) noexcept {
  return _mm512_reduce_add_ps(x.v);
}
inline double reduce_add(avx512_double x) noexcept {
  return _mm512_reduce_add_pd(x.v);
}
inline float reduce_max(avx512_float x) noexcept {
  return _mm512_reduce_max_ps(x.v);
}
inline double reduce_max(avx512_double x) noexcept {
  return _mm512_reduce_max_pd(x.v);
}

/// Square transposition of 16 vectors of 16 floats in place.
FOCUS_ALWAYS_INLINE void transpose(avx512_float (&r)[16]) noexcept {
  __m512 pair[16], quad[16];
  static_for<8>([&](auto p) FOCUS_LAMBDA_INLINE {
    constexpr int i = 2 * p();
    pair[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
    pair[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
  });
  static_for<4>([&](auto q) FOCUS_LAMBDA_INLINE {
    constexpr int i = 4 * q();
    quad[i] = _mm512_shuffle_ps(pair[i], pair[i + 2], 0x44);
    quad[i + 1] = _mm512_shuffle_ps(pair[i], pair[i + 2], 0xee);
    quad[i + 2] = _mm512_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
    quad[i + 3] = _mm512_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
  });
  // quad[4 b + c] holds in its 128-bit lane l column 4 l + c of rows 4 b ... 4 b + 3.
  static_for<4>([&](auto c) FOCUS_LAMBDA_INLINE {
    const __m512 low = _mm512_shuffle_f32x4(quad[c], quad[4 + c], 0x88);   // lanes 0, 2
    const __m512 high = _mm512_shuffle_f32x4(quad[c], quad[4 + c], 0xdd);  // lanes 1, 3
    const __m512 low2 = _mm512_shuffle_f32x4(quad[8 + c], quad[12 + c], 0x88);
    const __m512 high2 = _mm512_shuffle_f32x4(quad[8 + c], quad[12 + c], 0xdd);
    r[c].v = _mm512_shuffle_f32x4(low, low2, 0x88);
    r[4 + c].v = _mm512_shuffle_f32x4(high, high2, 0x88);
    r[8 + c].v = _mm512_shuffle_f32x4(low, low2, 0xdd);
    r[12 + c].v = _mm512_shuffle_f32x4(high, high2, 0xdd);
  });
}
/// Square transposition of 8 vectors of 8 doubles in place.
FOCUS_ALWAYS_INLINE void transpose(avx512_double (&r)[8]) noexcept {
  __m512d pair[8];
  static_for<4>([&](auto p) FOCUS_LAMBDA_INLINE {
    constexpr int i = 2 * p();
    pair[i] = _mm512_unpacklo_pd(r[i].v, r[i + 1].v);
    pair[i + 1] = _mm512_unpackhi_pd(r[i].v, r[i + 1].v);
  });
  // pair[2 b + c] holds in its 128-bit lane l column 2 l + c of rows 2 b and 2 b + 1.
  static_for<2>([&](auto c) FOCUS_LAMBDA_INLINE {
    const __m512d low = _mm512_shuffle_f64x2(pair[c], pair[2 + c], 0x88);
    const __m512d high = _mm512_shuffle_f64x2(pair[c], pair[2 + c], 0xdd);
    const __m512d low2 = _mm512_shuffle_f64x2(pair[4 + c], pair[6 + c], 0x88);
    const __m512d high2 = _mm512_shuffle_f64x2(pair[4 + c], pair[6 + c], 0xdd);
    r[c].v = _mm512_shuffle_f64x2(low, low2, 0x88);
    r[2 + c].v = _mm512_shuffle_f64x2(high, high2, 0x88);
    r[4 + c].v = _mm512_shuffle_f64x2(low, low2, 0xdd);
    r[6 + c].v = _mm512_shuffle_f64x2(high, high2, 0xdd);
  });
}

/// The sum of each of 16 vectors, in the lane of its number: as a transposition that adds up on the
/// way.
FOCUS_ALWAYS_INLINE avx512_float add_lanes(const avx512_float (&x)[16]) noexcept {
  __m512 quad[4];
  static_for<4>([&](auto q) FOCUS_LAMBDA_INLINE {
    constexpr int i = 4 * q();
    const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(x[i].v, x[i + 1].v),
                                     _mm512_unpackhi_ps(x[i].v, x[i + 1].v));
    const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(x[i + 2].v, x[i + 3].v),
                                      _mm512_unpackhi_ps(x[i + 2].v, x[i + 3].v));
    // Of each 128-bit lane the sums of vectors i ... i + 3.
    quad[q] = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
  });
  const __m512 first = _mm512_add_ps(_mm512_shuffle_f32x4(quad[0], quad[1], 0x44),
                                     _mm512_shuffle_f32x4(quad[0], quad[1], 0xee));
  const __m512 second = _mm512_add_ps(_mm512_shuffle_f32x4(quad[2], quad[3], 0x44),
                                      _mm512_shuffle_f32x4(quad[2], quad[3], 0xee));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88),
                        _mm512_shuffle_f32x4(first, second, 0xdd))};
}

/// 16 numbers of 8 bits as floats.
inline avx512_float load_int8(const void* p, avx512_float*) noexcept {
  const __m128i bits = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bits))};
}
/// 16 bfloat16 patterns as floats.
inline avx512_float load_bfloat16(const void* p, avx512_float*) noexcept {
  const __m256i bits = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
/// 16 floats as bfloat16 patterns, the bits of float_to_bfloat16_bits: the processor's conversion
/// would take subnormal numbers for zeros.
inline void store_bfloat16(avx512_float x, void* p) noexcept {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
  const __m512i upper = _mm512_srli_epi32(bits, 16);
  const __m512i is_odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), is_odd), 16);
  const __m512i quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
  const __m256i narrowed = _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
  _mm256_storeu_si256(static_cast<__m256i*>(p), narrowed);
}
/// 16 float16 patterns as floats.
inline avx512_float load_float16(const void* p, avx512_float*) noexcept {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))};
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
