// 2^x and what is made of it, on whole vectors.
#pragma once

#include <array>
#include <cstddef>

#include "focus/config.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/unroll.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

template <class A>
inline constexpr A log2_e = static_cast<A>(1.44269504088896340736L);
template <class A>
inline constexpr A ln_2 = static_cast<A>(0.69314718055994530942L);

/// (2^f - 1) / f as a polynomial for |f| <= 1/2, lowest coefficient first: minimax for the relative
/// error of 2^f, found with Remez's algorithm (degree 6 of 2^f in float, 12 in double); those of
/// float rounded so that the errors of evaluation are small too.
template <class A>
inline constexpr std::array<A, sizeof(A) == 4 ? 6 : 12> exp2_coefficients = {};
template <>
inline constexpr std::array<float, 6> exp2_coefficients<float> = {0x1.62e430p-1f,  0x1.ebfbd6p-3f,
                                                                  0x1.c6ae7cp-5f,  0x1.3b2898p-7f,
                                                                  0x1.5f7a76p-10f, 0x1.472b4ap-13f};
template <>
inline constexpr std::array<double, 12> exp2_coefficients<double> = {
    0x1.62e42fefa39efp-1,  0x1.ebfbdff82c58fp-3,  0x1.c6b08d704a0d6p-5,  0x1.3b2ab6fba4ea8p-7,
    0x1.5d87fe78a130ep-10, 0x1.430912f859936p-13, 0x1.ffcbfc7ac320ap-17, 0x1.62c0229a68191p-20,
    0x1.b524d0eb0169cp-24, 0x1.e4cd9d7852d36p-28, 0x1.ea142219959c2p-32, 0x1.c6d9a468d55afp-36};

/// The same for |f| <= 1/16, in float: those near the minimax polynomial whose result is off the
/// least, all roundings counted.
inline constexpr float exp2_small_coefficients[] = {0x1.62e42ep-1f, 0x1.ec0b86p-3f, 0x1.c6d0b6p-5f};

/// The same for 0 <= f <= 1, in float and of lower degree: minimax for the relative error of 2^f,
/// 2^-23.5, found with Remez's algorithm.
inline constexpr float exp2_weight_coefficients[] = {0x1.62e4bap-1f, 0x1.ebdb56p-3f, 0x1.c91ce6p-5f,
                                                     0x1.277856p-7f, 0x1.e974fap-10f};

/// The least x whose 2^x is a normal number.
template <class A>
inline constexpr A exp2_lowest = sizeof(A) == 4 ? A(-126) : A(-1022);
template <class A>
inline constexpr A exp2_highest = sizeof(A) == 4 ? A(127) : A(1023);

/// (2^f - 1) / f for |f| <= 1/2.
template <class A>
FOCUS_ALWAYS_INLINE vec<A> exp2_fraction(vec<A> f) noexcept {
  constexpr auto& c = exp2_coefficients<A>;
  constexpr int degree = static_cast<int>(c.size()) - 1;
  vec<A> p = vec<A>::broadcast(c[degree]);
  static_for<degree>([&](auto i) FOCUS_LAMBDA_INLINE {
    p = fma(p, f, vec<A>::broadcast(c[static_cast<std::size_t>(degree - 1 - i)]));
  });
  return p;
}

/// 2^x for x <= exp2_highest: within 1 ULP where there is FMA (1.2 where a power is looked up),
/// down to exp2_lowest; below it off by less than the least normal number, and exactly 0 from
/// exp2_lowest - 1 down (so at -inf). Exactly 1 at 0; NaN stays NaN. The processor rounds to
/// nearest, as it does unless told otherwise: else the lookup of AVX2 is off by up to 32 ULP.
template <class A>
FOCUS_ALWAYS_INLINE vec<A> exp2(vec<A> x) noexcept {
  const vec<A> clamped = maximum(vec<A>::broadcast(exp2_lowest<A> - 1), x);
  if constexpr (requires { nearest_eighth(clamped); }) {  // x = n / 8 + f, |f| <= 1/16
    const auto [rounded, power] = nearest_eighth(clamped);
    const vec<A> f = clamped - rounded;
    const auto& c = exp2_small_coefficients;
    vec<A> p = fma(vec<A>::broadcast(c[2]), f, vec<A>::broadcast(c[1]));
    p = fma(p, f, vec<A>::broadcast(c[0]));
    return fma(f * p, power, power);
  } else {  // x = n + f, |f| <= 1/2
    const vec<A> n = round(clamped);
    const vec<A> f = clamped - n;
    const vec<A> p = fma(exp2_fraction<A>(f), f, vec<A>::broadcast(A{1}));
    return scale_by_power(p, n);
  }
}

#if FOCUS_HAS_AVX512
/// 2^x in half the time, as exact as weights need that are rounded to bfloat16, and sums of them:
/// within 2^-22 (of all floats from -1 to 0, off by 2^-22.38 at most). Exactly 1 at 0, and exactly
/// 0 below exp2_lowest (so at -inf); NaN stays NaN.
FOCUS_ALWAYS_INLINE vec<float> exp2_weight(vec<float> x) noexcept {
  constexpr auto& c = exp2_weight_coefficients;
  const vec<float> f = above_floor(x);
  vec<float> p = fma(vec<float>::broadcast(c[4]), f, vec<float>::broadcast(c[3]));
  p = fma(p, f, vec<float>::broadcast(c[2]));
  p = fma(p, f, vec<float>::broadcast(c[1]));
  p = fma(p, f, vec<float>::broadcast(c[0]));
  p = fma(p, f, vec<float>::broadcast(1));
  return scale_by_power_of_floor(p, x);
}
#endif

/// 1 / (1 + e^-x).
template <class A>
FOCUS_ALWAYS_INLINE vec<A> sigmoid(vec<A> x) noexcept {
  const vec<A> one = vec<A>::broadcast(A{1});
  const vec<A> y =
      minimum(vec<A>::broadcast(exp2_highest<A> - 1), x * vec<A>::broadcast(-log2_e<A>));
  return one / (one + exp2<A>(y));
}

/// tanh(x) with a small relative error near 0 too: e / (e + 2) with e = e^(2x) - 1 = 2^n (2^f - 1)
/// + (2^n - 1).
template <class A>
FOCUS_ALWAYS_INLINE vec<A> tanh(vec<A> x) noexcept {
  const vec<A> one = vec<A>::broadcast(A{1});
  const vec<A> limit = vec<A>::broadcast(A{60});  // 1 - tanh is below 2^-59 from there on
  const vec<A> y =
      maximum(vec<A>::zero() - limit, minimum(limit, x * vec<A>::broadcast(2 * log2_e<A>)));
  const vec<A> n = round(y);
  const vec<A> f = y - n;
  const vec<A> power = scale_by_power(one, n);
  const vec<A> e = fma(exp2_fraction<A>(f) * f, power, power - one);
  return e / (e + vec<A>::broadcast(A{2}));
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
