// The vector layer with AVX2 and FMA: 8 floats or 4 doubles.
#pragma once

#include <cstdint>
#include <immintrin.h>

#include "focus/config.hpp"
#include "focus/kernel/eighths.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/scalar.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

template <class A>
struct avx2_vector;

template <>
struct avx2_vector<float> {
  static constexpr int width = 8;
  __m256 v;

  static avx2_vector zero() noexcept { return {_mm256_setzero_ps()}; }
  static avx2_vector broadcast(float x) noexcept { return {_mm256_set1_ps(x)}; }
  static avx2_vector load(const float* p) noexcept { return {_mm256_loadu_ps(p)}; }
  void store(float* p) const noexcept { _mm256_storeu_ps(p, v); }
  friend avx2_vector operator+(avx2_vector a, avx2_vector b) noexcept {
    return {_mm256_add_ps(a.v, b.v)};
  }
  friend avx2_vector operator-(avx2_vector a, avx2_vector b) noexcept {
    return {_mm256_sub_ps(a.v, b.v)};
  }
  friend avx2_vector operator*(avx2_vector a, avx2_vector b) noexcept {
    return {_mm256_mul_ps(a.v, b.v)};
  }
  friend avx2_vector operator/(avx2_vector a, avx2_vector b) noexcept {
    return {_mm256_div_ps(a.v, b.v)};
  }
};

template <>
struct avx2_vector<double> {
  static constexpr int width = 4;
  __m256d v;

  static avx2_vector zero() noexcept { return {_mm256_setzero_pd()}; }
  static avx2_vector broadcast(double x) noexcept { return {_mm256_set1_pd(x)}; }
  static avx2_vector load(const double* p) noexcept { return {_mm256_loadu_pd(p)}; }
  void store(double* p) const noexcept { _mm256_storeu_pd(p, v); }
  friend avx2_vector operator+(avx2_vector a, avx2_vector b) noexcept {
    return {_mm256_add_pd(a.v, b.v)};
  }
  friend avx2_vector operator-(avx2_vector a, avx2_vector b) noexcept {
    return {_mm256_sub_pd(a.v, b.v)};
  }
  friend avx2_vector operator*(avx2_vector a, avx2_vector b) noexcept {
    return {_mm256_mul_pd(a.v, b.v)};
  }
  friend avx2_vector operator/(avx2_vector a, avx2_vector b) noexcept {
    return {_mm256_div_pd(a.v, b.v)};
  }
};

using avx2_float = avx2_vector<float>;
using avx2_double = avx2_vector<double>;

inline avx2_float fma(avx2_float a, avx2_float b, avx2_float c) noexcept {
  return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
inline avx2_double fma(avx2_double a, avx2_double b, avx2_double c) noexcept {
  return {_mm256_fmadd_pd(a.v, b.v, c.v)};
}
inline avx2_float maximum(avx2_float a, avx2_float b) noexcept {
  return {_mm256_max_ps(a.v, b.v)};
}
inline avx2_double maximum(avx2_double a, avx2_double b) noexcept {
  return {_mm256_max_pd(a.v, b.v)};
}
inline avx2_float minimum(avx2_float a, avx2_float b) noexcept {
  return {_mm256_min_ps(a.v, b.v)};
}
inline avx2_double minimum(avx2_double a, avx2_double b) noexcept {
  return {_mm256_min_pd(a.v, b.v)};
}

inline avx2_float zero_where_less(avx2_float x, avx2_float a, avx2_float b) noexcept {
  return {_mm256_andnot_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ), x.v)};
}
inline avx2_double zero_where_less(avx2_double x, avx2_double a, avx2_double b) noexcept {
  return {_mm256_andnot_pd(_mm256_cmp_pd(a.v, b.v, _CMP_LT_OQ), x.v)};
}

inline avx2_float round(avx2_float x) noexcept {
  return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline avx2_double round(avx2_double x) noexcept {
  return {_mm256_round_pd(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// n goes straight into the exponent field; of a NaN the conversion leaves 0 there after the shift.
inline avx2_float scale_by_power(avx2_float x, avx2_float n) noexcept {
  const __m256i shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.v), shifted))};
}
inline avx2_double scale_by_power(avx2_double x, avx2_double n) noexcept {
  const __m256i shifted = _mm256_slli_epi64(_mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(n.v)), 52);
  return {_mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(x.v), shifted))};
}

inline power_of_eighth<avx2_float> nearest_eighth(avx2_float x) noexcept {
  const __m256 offset = _mm256_set1_ps(eighths_offset);
  // What -fassociative-math would do to these sums is prevented.
  __m256 count = _mm256_add_ps(x.v, offset);
#if defined(__GNUC__) || defined(__clang__)
  asm("" : "+x"(count));
#endif
  __m256 rounded = _mm256_sub_ps(count, offset);
#if defined(__GNUC__) || defined(__clang__)
  asm("" : "+x"(rounded));
#endif
  const __m256i bits = _mm256_castps_si256(count);
  const __m256i table = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(powers_of_eighths));
  const __m256i power =
      _mm256_add_epi32(_mm256_permutevar8x32_epi32(table, bits), _mm256_slli_epi32(bits, 20));
  return {{rounded}, {_mm256_castsi256_ps(power)}};
}

inline avx2_float exponent(avx2_float x) noexcept {
  const __m256i field =
      _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(x.v), 23), _mm256_set1_epi32(0xff));
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(field, _mm256_set1_epi32(127)))};
}
inline avx2_double exponent(avx2_double x) noexcept {
  // An integer below 2^52 under the exponent of 2^52 is that integer plus 2^52.
  const __m256i field =
      _mm256_and_si256(_mm256_srli_epi64(_mm256_castpd_si256(x.v), 52), _mm256_set1_epi64x(0x7ff));
  const __m256d shifted =
      _mm256_castsi256_pd(_mm256_or_si256(field, _mm256_set1_epi64x(0x4330000000000000)));
  return {_mm256_sub_pd(shifted, _mm256_set1_pd(0x1p52 + 1023))};
}
inline avx2_float mantissa(avx2_float x) noexcept {
  const __m256 kept =
      _mm256_and_ps(x.v, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0x807fffff))));
  return {_mm256_or_ps(kept, _mm256_set1_ps(1.0f))};
}
inline avx2_double mantissa(avx2_double x) noexcept {
  const __m256d kept = _mm256_and_pd(
      x.v, _mm256_castsi256_pd(_mm256_set1_epi64x(static_cast<long long>(0x800fffffffffffffu))));
  return {_mm256_or_pd(kept, _mm256_set1_pd(1.0))};
}
inline avx2_float where_zero(avx2_float x, avx2_float a, avx2_float b) noexcept {
  return {_mm256_blendv_ps(b.v, a.v, _mm256_cmp_ps(x.v, _mm256_setzero_ps(), _CMP_EQ_OQ))};
}
inline avx2_double where_zero(avx2_double x, avx2_double a, avx2_double b) noexcept {
  return {_mm256_blendv_pd(b.v, a.v, _mm256_cmp_pd(x.v, _mm256_setzero_pd(), _CMP_EQ_OQ))};
}

/// All bits of each of four 64-bit lanes: sets[l] & with is empty.
inline __m256i disjoint(const std::uint64_t* sets, std::uint64_t with) noexcept {
  const __m256i common =
      _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(sets)),
                       _mm256_set1_epi64x(static_cast<long long>(with)));
  return _mm256_cmpeq_epi64(common, _mm256_setzero_si256());
}
inline avx2_float where_disjoint(const std::uint64_t* sets, std::uint64_t with, avx2_float a,
                                 avx2_float b) noexcept {
  // The even halves of both, then the middle quarters back into their places.
  const __m256 halves = _mm256_shuffle_ps(_mm256_castsi256_ps(disjoint(sets, with)),
                                          _mm256_castsi256_ps(disjoint(sets + 4, with)), 0x88);
  const __m256d mask = _mm256_permute4x64_pd(_mm256_castps_pd(halves), 0xd8);
  return {_mm256_blendv_ps(b.v, a.v, _mm256_castpd_ps(mask))};
}
inline avx2_double where_disjoint(const std::uint64_t* sets, std::uint64_t with, avx2_double a,
                                  avx2_double b) noexcept {
  return {_mm256_blendv_pd(b.v, a.v, _mm256_castsi256_pd(disjoint(sets, with)))};
}

inline float reduce_add(avx2_float x) noexcept {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline double reduce_add(avx2_double x) noexcept {
  const __m128d s = _mm_add_pd(_mm256_castpd256_pd128(x.v), _mm256_extractf128_pd(x.v, 1));
  return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
}
inline float reduce_max(avx2_float x) noexcept {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline double reduce_max(avx2_double x) noexcept {
  const __m128d s = _mm_max_pd(_mm256_castpd256_pd128(x.v), _mm256_extractf128_pd(x.v, 1));
  return _mm_cvtsd_f64(_mm_max_sd(s, _mm_unpackhi_pd(s, s)));
}

/// Square transposition of 8 vectors of 8 floats in place.
FOCUS_ALWAYS_INLINE void transpose(avx2_float (&r)[8]) noexcept {
  __m256 pair[8], quad[8];
  static_for<4>([&](auto p) FOCUS_LAMBDA_INLINE {
    constexpr int i = 2 * p();
    pair[i] = _mm256_unpacklo_ps(r[i].v, r[i + 1].v);
    pair[i + 1] = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
  });
  static_for<2>([&](auto q) FOCUS_LAMBDA_INLINE {
    constexpr int i = 4 * q();
    quad[i] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0x44);
    quad[i + 1] = _mm256_shuffle_ps(pair[i], pair[i + 2], 0xee);
    quad[i + 2] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
    quad[i + 3] = _mm256_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
  });
  static_for<4>([&](auto i) FOCUS_LAMBDA_INLINE {
    r[i].v = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20);
    r[i + 4].v = _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31);
  });
}
/// Square transposition of 4 vectors of 4 doubles in place.
FOCUS_ALWAYS_INLINE void transpose(avx2_double (&r)[4]) noexcept {
  const __m256d a = _mm256_unpacklo_pd(r[0].v, r[1].v), b = _mm256_unpackhi_pd(r[0].v, r[1].v);
  const __m256d c = _mm256_unpacklo_pd(r[2].v, r[3].v), d = _mm256_unpackhi_pd(r[2].v, r[3].v);
  r[0].v = _mm256_permute2f128_pd(a, c, 0x20);
  r[1].v = _mm256_permute2f128_pd(b, d, 0x20);
  r[2].v = _mm256_permute2f128_pd(a, c, 0x31);
  r[3].v = _mm256_permute2f128_pd(b, d, 0x31);
}

/// The sum of each of 8 vectors, in the lane of its number: as a transposition that adds up on the
/// way.
FOCUS_ALWAYS_INLINE avx2_float add_lanes(const avx2_float (&x)[8]) noexcept {
  const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(x[0].v, x[1].v), _mm256_hadd_ps(x[2].v, x[3].v));
  const __m256 high =
      _mm256_hadd_ps(_mm256_hadd_ps(x[4].v, x[5].v), _mm256_hadd_ps(x[6].v, x[7].v));
  return {_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20),
                        _mm256_permute2f128_ps(low, high, 0x31))};
}

/// 8 numbers of 8 bits as floats.
inline avx2_float load_int8(const void* p, avx2_float*) noexcept {
  const __m128i bits = _mm_loadl_epi64(static_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bits))};
}
/// 8 bfloat16 patterns as floats.
inline avx2_float load_bfloat16(const void* p, avx2_float*) noexcept {
  const __m128i bits = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
/// 8 floats as bfloat16 patterns, the bits of float_to_bfloat16_bits.
inline void store_bfloat16(avx2_float x, void* p) noexcept {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
  const __m256i upper = _mm256_srli_epi32(bits, 16);
  const __m256i is_odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), is_odd), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i narrowed = _mm256_blendv_epi8(rounded, quiet, nan);
  _mm_storeu_si128(
      static_cast<__m128i*>(p),
      _mm_packus_epi32(_mm256_castsi256_si128(narrowed), _mm256_extracti128_si256(narrowed, 1)));
}
#if FOCUS_HAS_F16C
/// 8 float16 patterns as floats.
inline avx2_float load_float16(const void* p, avx2_float*) noexcept {
  return {_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)))};
}
#endif

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
