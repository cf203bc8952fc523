// Storage types: float, double, bfloat16, float16, and any type of the user's for which
// scalar_traits is specialised.
#pragma once

#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "focus/config.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Rounds to nearest, ties to even; NaN stays NaN (quiet).
constexpr std::uint16_t float_to_bfloat16_bits(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

constexpr float bfloat16_bits_to_float(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// Rounds to nearest, ties to even; overflows to infinity; NaN stays NaN (quiet).
constexpr std::uint16_t float_to_float16_bits(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // >= 65520
  if (magnitude < 0x38800000u) {               // below 2^-14: subnormal, in units of 2^-24
    if (magnitude < 0x33000000u) return sign;  // below 2^-25
    const std::uint32_t shift = 126u - (magnitude >> 23);
    const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t half = mantissa >> shift;
    const std::uint32_t rest = mantissa & ((1u << shift) - 1u), tie = 1u << (shift - 1);
    return static_cast<std::uint16_t>(sign | (half + (rest > tie || (rest == tie && (half & 1u)))));
  }
  const std::uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}

constexpr float float16_bits_to_float(std::uint16_t half) noexcept {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fu, mantissa = half & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus

// The same types under any compiler flags. What they call is not: their functions are always
// inlined, so that units compiled for different instruction sets share none.
namespace focus {
inline namespace FOCUS_VERSION_NAMESPACE {

/// bfloat16 as stored: the upper half of a float.
struct bfloat16 {
  std::uint16_t bits = 0;

  FOCUS_ALWAYS_INLINE constexpr bfloat16() noexcept {}
  /// An integer is the pattern itself.
  template <std::integral Integer>
  FOCUS_ALWAYS_INLINE constexpr explicit(!std::same_as<Integer, std::uint16_t>)
      bfloat16(Integer pattern) noexcept
      : bits(static_cast<std::uint16_t>(pattern)) {}
  /// A number is rounded (a double to float before): to nearest, ties to even.
  template <std::floating_point F>
  FOCUS_ALWAYS_INLINE constexpr explicit bfloat16(F number) noexcept
      : bits(detail::float_to_bfloat16_bits(static_cast<float>(number))) {}
  FOCUS_ALWAYS_INLINE constexpr explicit operator float() const noexcept {
    return detail::bfloat16_bits_to_float(bits);
  }
  FOCUS_ALWAYS_INLINE friend constexpr bool operator==(bfloat16 a, bfloat16 b) noexcept {
    return a.bits == b.bits;
  }
};

/// IEEE 754 binary16 as stored.
struct float16 {
  std::uint16_t bits = 0;

  FOCUS_ALWAYS_INLINE constexpr float16() noexcept {}
  /// An integer is the pattern itself.
  template <std::integral Integer>
  FOCUS_ALWAYS_INLINE constexpr explicit(!std::same_as<Integer, std::uint16_t>)
      float16(Integer pattern) noexcept
      : bits(static_cast<std::uint16_t>(pattern)) {}
  /// A number is rounded (a double to float before): to nearest, ties to even, to infinity from
  /// 65520 on.
  template <std::floating_point F>
  FOCUS_ALWAYS_INLINE constexpr explicit float16(F number) noexcept
      : bits(detail::float_to_float16_bits(static_cast<float>(number))) {}
  FOCUS_ALWAYS_INLINE constexpr explicit operator float() const noexcept {
    return detail::float16_bits_to_float(bits);
  }
  FOCUS_ALWAYS_INLINE friend constexpr bool operator==(float16 a, float16 b) noexcept {
    return a.bits == b.bits;
  }
};

}  // namespace FOCUS_VERSION_NAMESPACE
}  // namespace focus

namespace focus {
inline namespace FOCUS_ABI {

/// How a 16-bit or 32-bit pattern in memory is to be read, so that kernels can widen whole vectors
/// at once.
enum class storage_format { float32, float64, bfloat16, float16, other };

/// What the library needs to know of a storage type. A specialisation for an engine's own type has
///   using accumulator = float;               // the type in which sums are kept: float or double
///   static accumulator to_accumulator(T);    // exact widening
///   static T from_accumulator(accumulator);  // rounding
///   static constexpr storage_format format;  // optional: bfloat16 or float16, where the type is
///                                            // just those bits, rounded to nearest, ties to even:
///                                            // for the vectorised conversions
template <class T>
struct scalar_traits;

template <>
struct scalar_traits<float> {
  using accumulator = float;
  static constexpr storage_format format = storage_format::float32;
  static constexpr float to_accumulator(float x) noexcept { return x; }
  static constexpr float from_accumulator(float x) noexcept { return x; }
};

template <>
struct scalar_traits<double> {
  using accumulator = double;
  static constexpr storage_format format = storage_format::float64;
  static constexpr double to_accumulator(double x) noexcept { return x; }
  static constexpr double from_accumulator(double x) noexcept { return x; }
};

namespace detail {

/// Of a type that converts to float and, rounding, from it.
template <class T, storage_format Format>
struct traits_by_conversion {
  using accumulator = float;
  static constexpr storage_format format = Format;
  static constexpr float to_accumulator(T x) noexcept { return static_cast<float>(x); }
  static constexpr T from_accumulator(float x) noexcept { return T(x); }
};

}  // namespace detail

template <>
struct scalar_traits<bfloat16> : detail::traits_by_conversion<bfloat16, storage_format::bfloat16> {
};
template <>
struct scalar_traits<float16> : detail::traits_by_conversion<float16, storage_format::float16> {};

/// A storage type: one with a scalar_traits specialisation whose accumulator is float or double.
template <class T>
concept scalar = requires(T x, typename scalar_traits<T>::accumulator a) {
  requires std::floating_point<typename scalar_traits<T>::accumulator>;
  { scalar_traits<T>::to_accumulator(x) } -> std::same_as<typename scalar_traits<T>::accumulator>;
  { scalar_traits<T>::from_accumulator(a) } -> std::same_as<T>;
};

/// The type in which sums of T are kept.
template <class T>
using accumulator_t = typename scalar_traits<std::remove_cv_t<T>>::accumulator;

namespace detail {

template <class T>
constexpr storage_format format_of() noexcept {
  if constexpr (requires { scalar_traits<T>::format; })
    return scalar_traits<T>::format;
  else
    return storage_format::other;
}

template <class T>
inline constexpr bool is_bfloat16 =
    sizeof(T) == 2 && format_of<std::remove_cv_t<T>>() == storage_format::bfloat16;

template <class T>
constexpr accumulator_t<T> widen(const T& x) noexcept(
    noexcept(scalar_traits<T>::to_accumulator(x))) {
  return scalar_traits<T>::to_accumulator(x);
}

template <class T>
constexpr T narrow(accumulator_t<T> x) noexcept(noexcept(scalar_traits<T>::from_accumulator(x))) {
  return scalar_traits<T>::from_accumulator(x);
}

/// Exact comparisons, where they are meant: compilers may warn of ==. NaN is equal to nothing.
template <std::floating_point A>
constexpr bool is_equal(A a, std::type_identity_t<A> b) noexcept {
  return a >= b && a <= b;
}
template <std::floating_point A>
constexpr bool is_zero(A x) noexcept {
  return is_equal(x, 0);
}

/// NaN by its bits: holds under -ffast-math, where std::isnan is folded to false.
constexpr bool is_nan(float x) noexcept {
  return (std::bit_cast<std::uint32_t>(x) & 0x7fffffffu) > 0x7f800000u;
}
constexpr bool is_nan(double x) noexcept {
  return (std::bit_cast<std::uint64_t>(x) & 0x7fffffffffffffffu) > 0x7ff0000000000000u;
}

// A compiler that is told that there are no infinities (-ffast-math, -ffinite-math-only,
// -fno-honor-infinities, which no macro shows) takes any number that it finds to be one for a
// reason to compute nothing. So none is computed with: what is not there counts as the lowest
// finite number, and -infinity, which callers are promised, is written and recognised as bits in
// memory.

/// Stands for -infinity among scores: of a key that is hidden, or of a row that has seen nothing.
/// Its weight beside any score above it is 0; a score that low counts as hidden.
template <std::floating_point A>
inline constexpr A lowest = std::numeric_limits<A>::lowest();

/// The bits of +infinity; those of -infinity have the sign, too.
template <std::floating_point A>
using bits_of = std::conditional_t<sizeof(A) == 4, std::uint32_t, std::uint64_t>;
template <std::floating_point A>
inline constexpr bits_of<A> infinity_bits = static_cast<bits_of<A>>(sizeof(A) == 4
                                                                        ? 0x7f800000u
                                                                        : 0x7ff0000000000000u);
template <std::floating_point A>
inline constexpr bits_of<A> sign_bit = bits_of<A>{1} << (8 * sizeof(A) - 1);

template <std::floating_point A>
FOCUS_ALWAYS_INLINE void store_infinity(A& to) noexcept {
  constexpr bits_of<A> bits = infinity_bits<A>;
  std::memcpy(&to, &bits, sizeof to);
}
template <std::floating_point A>
FOCUS_ALWAYS_INLINE void store_minus_infinity(A& to) noexcept {
  constexpr bits_of<A> bits = infinity_bits<A> | sign_bit<A>;
  std::memcpy(&to, &bits, sizeof to);
}
template <std::floating_point A>
FOCUS_ALWAYS_INLINE bool is_minus_infinity(const A& x) noexcept {
  bits_of<A> bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits == (infinity_bits<A> | sign_bit<A>);
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
