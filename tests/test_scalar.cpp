// Storage types: every 16-bit pattern, every rounding border, types of the user's.
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "catch.hpp"
#include "focus/scalar.hpp"
#include "guarded_tensor.hpp"

namespace test_scalar {
namespace {

struct unknown_type {};
static_assert(focus::scalar<float> && focus::scalar<double>);
static_assert(focus::scalar<focus::bfloat16> && focus::scalar<focus::float16>);
static_assert(focus::scalar<oracle::engine_bfloat16> && focus::scalar<oracle::engine_float>);
static_assert(!focus::scalar<int> && !focus::scalar<unknown_type>);
static_assert(std::is_same_v<focus::accumulator_t<float>, float>);
static_assert(std::is_same_v<focus::accumulator_t<const double>, double>);
static_assert(std::is_same_v<focus::accumulator_t<focus::float16>, float>);
static_assert(sizeof(focus::bfloat16) == 2 && std::is_trivially_copyable_v<focus::bfloat16>);
static_assert(sizeof(focus::float16) == 2 && std::is_trivially_copyable_v<focus::float16>);
static_assert(focus::detail::format_of<oracle::engine_bfloat16>() ==
              focus::storage_format::bfloat16);
static_assert(focus::detail::format_of<oracle::engine_float>() == focus::storage_format::other);
static_assert(focus::detail::widen(focus::detail::narrow<focus::float16>(1.5f)) == 1.5f);

/// A 16-bit type with `fraction` bits behind the leading one and exponents from `lowest` on.
template <class T>
struct format;
template <>
struct format<focus::bfloat16> {
  static constexpr int fraction = 7, lowest = -126;
};
template <>
struct format<focus::float16> {
  static constexpr int fraction = 10, lowest = -14;
};

/// What a pattern without a sign stands for; the pattern of infinity is taken as the next power of
/// two, which is what rounding measures from.
template <class T>
double value_of(int pattern) {
  constexpr int fraction = format<T>::fraction;
  const int exponent = pattern >> fraction, mantissa = pattern & ((1 << fraction) - 1);
  if (exponent == 0) return std::ldexp(mantissa, format<T>::lowest - fraction);
  return std::ldexp(mantissa + (1 << fraction), format<T>::lowest + exponent - 1 - fraction);
}

template <class T>
constexpr int infinity_pattern = ((1 << (15 - format<T>::fraction)) - 1) << format<T>::fraction;

template <class T>
float widened(int pattern) {
  return focus::scalar_traits<T>::to_accumulator({static_cast<std::uint16_t>(pattern)});
}
template <class T>
int narrowed(float x) {
  return focus::scalar_traits<T>::from_accumulator(x).bits;
}
bool is_negative(float x) {
  return std::bit_cast<std::uint32_t>(x) >> 31 != 0;
}

template <class T>
void check_all_patterns() {
  constexpr int infinite = infinity_pattern<T>;
  int wrong = 0;
  for (int sign : {0, 0x8000})
    for (int pattern = 0; pattern < 0x8000; ++pattern) {
      const float x = widened<T>(sign | pattern);
      wrong += is_negative(x) != (sign != 0);
      if (pattern < infinite) {
        const double expected = sign ? -value_of<T>(pattern) : value_of<T>(pattern);
        wrong += static_cast<double>(x) != expected;
        wrong += narrowed<T>(x) != (sign | pattern);
      } else if (pattern == infinite) {
        wrong += !std::isinf(x) || narrowed<T>(x) != (sign | pattern);
      } else {
        // Quiet, with the sign and the rest of the payload kept.
        constexpr int quiet = 1 << (format<T>::fraction - 1);
        wrong += !std::isnan(x) || narrowed<T>(x) != (sign | pattern | quiet);
      }
    }
  CHECK(wrong == 0);
}

/// Between each two neighbours lies a border: the midpoint goes to the even pattern, its neighbours
/// to the nearer one.
template <class T>
void check_rounding() {
  int wrong = 0;
  for (int pattern = 0; pattern < infinity_pattern<T>; ++pattern) {
    const double middle = (value_of<T>(pattern) + value_of<T>(pattern + 1)) / 2;
    const auto x = static_cast<float>(middle);
    if (static_cast<double>(x) != middle)
      continue;  // finer than float: below the subnormal numbers
    const float below = std::nextafter(x, 0.0f),
                above = std::nextafter(x, std::numeric_limits<float>::infinity());
    const int even = pattern % 2 == 0 ? pattern : pattern + 1;
    for (const bool negative : {false, true}) {
      const int sign = negative ? 0x8000 : 0;
      const auto signed_of = [&](float v) {
        return negative ? -v : v;
      };
      wrong += narrowed<T>(signed_of(x)) != (sign | even);
      wrong += narrowed<T>(signed_of(below)) != (sign | pattern);
      wrong += narrowed<T>(signed_of(above)) != (sign | (pattern + 1));
    }
  }
  CHECK(wrong == 0);
}

/// Numbers become their nearest patterns and come back, however they are converted; integers are
/// patterns.
template <class T>
void check_conversions() {
  const std::vector<float> numbers = {1.5f, -2.0f, 300.0f, 0.0f};
  const std::vector<T> converted(numbers.begin(), numbers.end());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    CHECK(static_cast<float>(converted[i]) == numbers[i]);
    CHECK(converted[i] == focus::scalar_traits<T>::from_accumulator(numbers[i]));
    CHECK(T(static_cast<double>(numbers[i])) == converted[i]);
    CHECK(T{converted[i].bits} == converted[i]);
    CHECK(T(static_cast<int>(converted[i].bits)) == converted[i]);
  }
  CHECK(T(0.1f) == focus::scalar_traits<T>::from_accumulator(0.1f));
  CHECK(T() == T(0.0f));
  static_assert(static_cast<float>(T(-0.75f)) == -0.75f);
  static_assert(!std::is_convertible_v<float, T> && !std::is_convertible_v<int, T>);
  static_assert(!std::is_convertible_v<T, float>);
}

}  // namespace

TEST_CASE("scalar: every pattern is widened exactly and comes back") {
  check_all_patterns<focus::bfloat16>();
  check_all_patterns<focus::float16>();
}

TEST_CASE("scalar: rounding is to nearest, ties to even, on both sides of each border") {
  check_rounding<focus::bfloat16>();
  check_rounding<focus::float16>();
}

TEST_CASE("scalar: the ends of the range") {
  const float inf = std::numeric_limits<float>::infinity();
  CHECK(narrowed<focus::float16>(65504.0f) == 0x7bff);
  CHECK(narrowed<focus::float16>(65519.996f) == 0x7bff);
  CHECK(narrowed<focus::float16>(65520.0f) == 0x7c00);
  CHECK(narrowed<focus::float16>(-1e30f) == 0xfc00);
  CHECK(narrowed<focus::float16>(inf) == 0x7c00);
  CHECK(narrowed<focus::float16>(0x1p-24f) == 1);
  CHECK(narrowed<focus::float16>(0x1p-25f) == 0);
  CHECK(narrowed<focus::float16>(0x1.000002p-25f) == 1);
  CHECK(narrowed<focus::float16>(-0.0f) == 0x8000);
  CHECK(narrowed<focus::float16>(0x1p-149f) == 0);
  CHECK(narrowed<focus::bfloat16>((std::numeric_limits<float>::max)()) == 0x7f80);
  CHECK(narrowed<focus::bfloat16>(-inf) == 0xff80);
  CHECK(narrowed<focus::bfloat16>(-0.0f) == 0x8000);
  CHECK(narrowed<focus::bfloat16>(0x1p-133f) == 1);
  CHECK(narrowed<focus::bfloat16>(0x1p-134f) == 0);
}

TEST_CASE("scalar: NaN stays NaN, whatever its payload") {
  for (std::uint32_t payload = 1; payload < 0x800000u; payload = payload * 2 + 1)
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const float x = std::bit_cast<float>(sign | 0x7f800000u | payload);
      CHECK(std::isnan(widened<focus::bfloat16>(narrowed<focus::bfloat16>(x))));
      CHECK(std::isnan(widened<focus::float16>(narrowed<focus::float16>(x))));
    }
}

TEST_CASE("scalar: float and double pass through") {
  CHECK(focus::detail::widen(1.25f) == 1.25f);
  CHECK(focus::detail::narrow<double>(1e-300) == 1e-300);
}

TEST_CASE("scalar: NaN and -infinity are told by their bits") {
  const auto check = []<class A>(A) {
    using limits = std::numeric_limits<A>;
    CHECK(focus::detail::is_nan(limits::quiet_NaN()));
    CHECK(focus::detail::is_nan(-limits::quiet_NaN()));
    CHECK(focus::detail::is_nan(limits::signaling_NaN()));
    for (const A x : {A{0}, A{1}, limits::infinity(), -limits::infinity(), (limits::max)(),
                      limits::denorm_min()})
      CHECK(!focus::detail::is_nan(x));
    A stored = 1;
    focus::detail::store_minus_infinity(stored);
    CHECK(stored == -limits::infinity());
    CHECK(focus::detail::is_minus_infinity(stored));
    focus::detail::store_infinity(stored);
    CHECK(stored == limits::infinity());
    CHECK(!focus::detail::is_minus_infinity(stored));
    CHECK(focus::detail::is_minus_infinity(-limits::infinity()));
    for (const A x : {A{0}, limits::infinity(), limits::lowest(), limits::quiet_NaN()})
      CHECK(!focus::detail::is_minus_infinity(x));
  };
  check(float{});
  check(double{});
}

TEST_CASE("scalar: types of the user's") {
  for (const float x : {0.0f, -1.5f, 3.25e10f}) {
    const auto stored = focus::detail::narrow<oracle::engine_float>(x);
    CHECK(stored.turned != std::bit_cast<std::uint32_t>(x) + (x == 0.0f));
    CHECK(focus::detail::widen(stored) == x);
    CHECK(focus::detail::narrow<oracle::engine_bfloat16>(x).pattern ==
          focus::detail::narrow<focus::bfloat16>(x).bits);
  }
}

TEST_CASE("scalar: conversions") {
  check_conversions<focus::bfloat16>();
  check_conversions<focus::float16>();
}

}  // namespace test_scalar
