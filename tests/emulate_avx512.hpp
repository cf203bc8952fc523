// AVX-512 and AMX without such a processor, for tests only: included before everything else
// (-include) in a build for AVX2, it puts portable functions in the place of the intrinsics and
// then announces both, so that the library's layers for them are compiled and run as they stand,
// slowly.
//
// Most of it is SIMDe; what SIMDe 0.7 lacks, and the library uses, is written out below. An
// intrinsic that neither has is a compile error. The compiler's own header comes first: it declares
// the real names, which macros then hide. GCC must optimise (-O1): without, its header has macros
// of its own.
#pragma once

#include <immintrin.h>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#pragma GCC diagnostic ignored "-Wsign-conversion"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wpsabi"
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#pragma GCC diagnostic pop

#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulate_amx.hpp"

namespace focus_test::avx512 {

/// The lanes of a vector as an array, and back.
template <class T, int N>
struct lanes {
  T lane[N];
  template <class V>
  static lanes of(const V& v) {
    static_assert(sizeof(V) == sizeof(lanes));
    lanes x;
    std::memcpy(x.lane, &v, sizeof x);
    return x;
  }
  template <class V>
  V as() const {
    static_assert(sizeof(V) == sizeof(lanes));
    V v;
    std::memcpy(&v, lane, sizeof v);
    return v;
  }
};

/// x 2^floor(y), rounded once.
template <class T>
T scaled(T x, T y) {
  if (!(y == y)) return y;
  constexpr T reach = 8192;  // beyond any exponent
  return std::ldexp(x, static_cast<int>(std::floor(y < -reach ? -reach : y > reach ? reach : y)));
}

/// 0 where `mask` has no bit.
template <class T, int N, class V>
V scalef(std::uint32_t mask, const V& a, const V& b) {
  const auto x = lanes<T, N>::of(a), y = lanes<T, N>::of(b);
  lanes<T, N> z;
  for (int i = 0; i < N; ++i)
    z.lane[i] = (mask >> i & 1) != 0 ? scaled(x.lane[i], y.lane[i]) : T{0};
  return z.template as<V>();
}

/// What is left of x above the next whole number below it: the one kind of reduction that the
/// library asks for. None of infinities.
template <int Control, class V>
V reduced(const V& v) {
  static_assert(Control == (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  auto x = lanes<float, 16>::of(v);
  for (float& lane : x.lane) lane = std::isinf(lane) ? 0 : lane - std::floor(lane);
  return x.template as<V>();
}

/// Halves are combined until one lane is left, the order in which compilers expand their
/// reductions.
template <class T, int N, class V, class F>
T reduce(const V& v, F&& combine) {
  auto x = lanes<T, N>::of(v);
  for (int half = N / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x.lane[i] = combine(x.lane[i], x.lane[i + half]);
  return x.lane[0];
}
template <class T>
T sum(T a, T b) {
  return a + b;
}
/// The second where either is NaN.
template <class T>
T maximum(T a, T b) {
  return a > b ? a : b;
}

/// Lanes of 128 bits: two of a, then two of b, each chosen by two bits of the selector.
template <int Selector, class V>
V shuffle_lanes(const V& a, const V& b) {
  struct quarter {
    std::uint64_t bits[2];
  };
  const auto x = lanes<quarter, 4>::of(a), y = lanes<quarter, 4>::of(b);
  const lanes<quarter, 4> z{{x.lane[Selector & 3], x.lane[(Selector >> 2) & 3],
                             y.lane[(Selector >> 4) & 3], y.lane[(Selector >> 6) & 3]}};
  return z.template as<V>();
}

inline __m512i widen_unsigned(__m256i v) {
  const auto x = lanes<std::uint16_t, 16>::of(v);
  lanes<std::uint32_t, 16> y;
  for (int i = 0; i < 16; ++i) y.lane[i] = x.lane[i];
  return y.as<__m512i>();
}

inline __m512i widen_signed(__m128i v) {
  const auto x = lanes<std::int8_t, 16>::of(v);
  lanes<std::int32_t, 16> y;
  for (int i = 0; i < 16; ++i) y.lane[i] = x.lane[i];
  return y.as<__m512i>();
}

inline __m256i lower_halves(__m512i v) {
  const auto x = lanes<std::uint32_t, 16>::of(v);
  lanes<std::uint16_t, 16> y;
  for (int i = 0; i < 16; ++i) y.lane[i] = static_cast<std::uint16_t>(x.lane[i]);
  return y.as<__m256i>();
}

inline __m512 integers_to_floats(__m512i v) {
  const auto x = lanes<std::int32_t, 16>::of(v);
  lanes<float, 16> y;
  for (int i = 0; i < 16; ++i) y.lane[i] = static_cast<float>(x.lane[i]);
  return y.as<__m512>();
}

inline __m512 widen_float16(__m256i v) {
  lanes<float, 16> x;
  _mm256_storeu_ps(x.lane, simde_mm256_cvtph_ps(_mm256_castsi256_si128(v)));
  _mm256_storeu_ps(x.lane + 8, simde_mm256_cvtph_ps(_mm256_extracti128_si256(v, 1)));
  return x.as<__m512>();
}

/// Lanes without a bit are neither read nor written.
template <class T, int N, class V>
void store_some(T* p, unsigned mask, const V& v) {
  const auto x = lanes<T, N>::of(v);
  for (int i = 0; i < N; ++i)
    if ((mask >> i & 1) != 0) p[i] = x.lane[i];
}
template <class V, int N, class T>
V load_some(unsigned mask, const T* p) {
  lanes<T, N> x = {};
  for (int i = 0; i < N; ++i)
    if ((mask >> i & 1) != 0) x.lane[i] = p[i];
  return x.template as<V>();
}

}  // namespace focus_test::avx512

#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps(p, mask, v) focus_test::avx512::store_some<float, 16>(p, mask, v)
#undef _mm512_maskz_loadu_epi64
#define _mm512_maskz_loadu_epi64(mask, p) focus_test::avx512::load_some<__m512i, 8>(mask, p)
// SIMDe lacks these; nobody here has set another rounding mode than theirs.
#undef _mm512_add_round_ps
#define _mm512_add_round_ps(a, b, rounding) (static_cast<void>(rounding), _mm512_add_ps(a, b))
#undef _mm512_sub_round_ps
#define _mm512_sub_round_ps(a, b, rounding) (static_cast<void>(rounding), _mm512_sub_ps(a, b))
// SIMDe has these two, but flushes subnormal numbers, which the processor does not.
#undef _mm512_maskz_scalef_ps
#define _mm512_maskz_scalef_ps(mask, a, b) focus_test::avx512::scalef<float, 16>(mask, a, b)
#undef _mm512_maskz_scalef_pd
#define _mm512_maskz_scalef_pd(mask, a, b) focus_test::avx512::scalef<double, 8>(mask, a, b)

#undef _mm512_reduce_ps
#define _mm512_reduce_ps(v, control) focus_test::avx512::reduced<control>(v)

#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps(v) \
  focus_test::avx512::reduce<float, 16>(v, focus_test::avx512::sum<float>)
#undef _mm512_reduce_add_pd
#define _mm512_reduce_add_pd(v) \
  focus_test::avx512::reduce<double, 8>(v, focus_test::avx512::sum<double>)
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps(v) \
  focus_test::avx512::reduce<float, 16>(v, focus_test::avx512::maximum<float>)
#undef _mm512_reduce_max_pd
#define _mm512_reduce_max_pd(v) \
  focus_test::avx512::reduce<double, 8>(v, focus_test::avx512::maximum<double>)
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4(a, b, selector) focus_test::avx512::shuffle_lanes<selector>(a, b)
#undef _mm512_shuffle_f64x2
#define _mm512_shuffle_f64x2(a, b, selector) focus_test::avx512::shuffle_lanes<selector>(a, b)
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32(v) focus_test::avx512::widen_unsigned(v)
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(v) focus_test::avx512::widen_signed(v)
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16(v) focus_test::avx512::lower_halves(v)
#undef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps(v) focus_test::avx512::integers_to_floats(v)
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(v) focus_test::avx512::widen_float16(v)

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
// It is the library that is to meet AVX-512 here: Eigen would use intrinsics that are not emulated.
#define EIGEN_DONT_VECTORIZE 1
