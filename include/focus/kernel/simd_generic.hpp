// The vector layer in plain C++: short arrays that the compiler may or may not vectorise.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "focus/config.hpp"
#include "focus/scalar.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// A vector of 16 bytes, which every 64-bit processor has.
template <class A>
struct generic_vector {
  static constexpr int width = 16 / static_cast<int>(sizeof(A));
  static constexpr std::size_t size = static_cast<std::size_t>(width);
  A lane[size];

  static generic_vector zero() noexcept { return broadcast(A{0}); }
  static generic_vector broadcast(A x) noexcept {
    generic_vector v;
    for (A& lane : v.lane) lane = x;
    return v;
  }
  static generic_vector load(const A* p) noexcept {
    generic_vector v;
    for (std::size_t l = 0; l < size; ++l) v.lane[l] = p[l];
    return v;
  }
  void store(A* p) const noexcept {
    for (std::size_t l = 0; l < size; ++l) p[l] = lane[l];
  }

  template <class F>
  static FOCUS_ALWAYS_INLINE generic_vector map(F&& f) noexcept {
    generic_vector v;
    for (std::size_t l = 0; l < size; ++l) v.lane[l] = f(l);
    return v;
  }
  friend generic_vector operator+(generic_vector a, generic_vector b) noexcept {
    return map([&](std::size_t l) { return a.lane[l] + b.lane[l]; });
  }
  friend generic_vector operator-(generic_vector a, generic_vector b) noexcept {
    return map([&](std::size_t l) { return a.lane[l] - b.lane[l]; });
  }
  friend generic_vector operator*(generic_vector a, generic_vector b) noexcept {
    return map([&](std::size_t l) { return a.lane[l] * b.lane[l]; });
  }
  friend generic_vector operator/(generic_vector a, generic_vector b) noexcept {
    return map([&](std::size_t l) { return a.lane[l] / b.lane[l]; });
  }
};

#if defined(__FP_FAST_FMAF) && defined(__FP_FAST_FMA)
inline constexpr bool has_fused_multiply_add = true;
#else
inline constexpr bool has_fused_multiply_add = false;
#endif

template <class A>
FOCUS_ALWAYS_INLINE generic_vector<A> fma(generic_vector<A> a, generic_vector<A> b,
                                          generic_vector<A> c) noexcept {
  return generic_vector<A>::map([&](std::size_t l) {
    // Where the processor has a fused form, the compiler may use it in one place and not in
    // another: then say so, for the same bits everywhere.
    if constexpr (has_fused_multiply_add) return std::fma(a.lane[l], b.lane[l], c.lane[l]);
    return a.lane[l] * b.lane[l] + c.lane[l];
  });
}
template <class A>
FOCUS_ALWAYS_INLINE generic_vector<A> maximum(generic_vector<A> a, generic_vector<A> b) noexcept {
  return generic_vector<A>::map(
      [&](std::size_t l) { return a.lane[l] > b.lane[l] ? a.lane[l] : b.lane[l]; });
}
template <class A>
FOCUS_ALWAYS_INLINE generic_vector<A> minimum(generic_vector<A> a, generic_vector<A> b) noexcept {
  return generic_vector<A>::map(
      [&](std::size_t l) { return a.lane[l] < b.lane[l] ? a.lane[l] : b.lane[l]; });
}
template <class A>
FOCUS_ALWAYS_INLINE generic_vector<A> zero_where_less(generic_vector<A> x, generic_vector<A> a,
                                                      generic_vector<A> b) noexcept {
  return generic_vector<A>::map(
      [&](std::size_t l) { return a.lane[l] < b.lane[l] ? A{0} : x.lane[l]; });
}
template <class A>
FOCUS_ALWAYS_INLINE generic_vector<A> round(generic_vector<A> x) noexcept {
  return generic_vector<A>::map([&](std::size_t l) {
    // Through an integer: adding and taking away a large constant would not survive -ffast-math.
    // NaN is kept.
    using integer = std::conditional_t<sizeof(A) == 4, std::int32_t, std::int64_t>;
    const A v = x.lane[l];
    if (!(v > A(-1e6) && v < A(1e6))) return v;
    return static_cast<A>(static_cast<integer>(v + (v < 0 ? A(-0.5) : A(0.5))));
  });
}
template <class A>
FOCUS_ALWAYS_INLINE generic_vector<A> scale_by_power(generic_vector<A> x,
                                                     generic_vector<A> n) noexcept {
  return generic_vector<A>::map([&](std::size_t l) {
    // Beside a NaN that hid a row's maximum, n may be as large as a score, or NaN itself.
    const bool is_power = n.lane[l] < A(2000);
    if constexpr (sizeof(A) == 4) {
      const std::int32_t e = is_power ? static_cast<std::int32_t>(n.lane[l]) : 0;
      return x.lane[l] * std::bit_cast<float>(static_cast<std::uint32_t>(e + 127) << 23);
    } else {
      const std::int64_t e = is_power ? static_cast<std::int64_t>(n.lane[l]) : 0;
      return x.lane[l] * std::bit_cast<double>(static_cast<std::uint64_t>(e + 1023) << 52);
    }
  });
}
template <class A>
FOCUS_ALWAYS_INLINE generic_vector<A> where_disjoint(const std::uint64_t* sets, std::uint64_t with,
                                                     generic_vector<A> a,
                                                     generic_vector<A> b) noexcept {
  return generic_vector<A>::map(
      [&](std::size_t l) { return (sets[l] & with) == 0 ? a.lane[l] : b.lane[l]; });
}
template <class A>
FOCUS_ALWAYS_INLINE A reduce_add(generic_vector<A> v) noexcept {
  A sum = v.lane[0];
  for (std::size_t l = 1; l < generic_vector<A>::size; ++l) sum += v.lane[l];
  return sum;
}
template <class A>
FOCUS_ALWAYS_INLINE A reduce_max(generic_vector<A> v) noexcept {
  A top = v.lane[0];
  for (std::size_t l = 1; l < generic_vector<A>::size; ++l) top = v.lane[l] > top ? v.lane[l] : top;
  return top;
}

template <class A>
FOCUS_ALWAYS_INLINE generic_vector<A> exponent(generic_vector<A> x) noexcept {
  return generic_vector<A>::map([&](std::size_t l) {
    if constexpr (sizeof(A) == 4)
      return static_cast<float>(
          static_cast<std::int32_t>((std::bit_cast<std::uint32_t>(x.lane[l]) >> 23) & 0xffu) - 127);
    else
      return static_cast<double>(
          static_cast<std::int64_t>((std::bit_cast<std::uint64_t>(x.lane[l]) >> 52) & 0x7ffu) -
          1023);
  });
}
template <class A>
FOCUS_ALWAYS_INLINE generic_vector<A> mantissa(generic_vector<A> x) noexcept {
  return generic_vector<A>::map([&](std::size_t l) {
    if constexpr (sizeof(A) == 4)
      return std::bit_cast<float>((std::bit_cast<std::uint32_t>(x.lane[l]) & 0x807fffffu) |
                                  0x3f800000u);
    else
      return std::bit_cast<double>((std::bit_cast<std::uint64_t>(x.lane[l]) & 0x800fffffffffffffu) |
                                   0x3ff0000000000000u);
  });
}
template <class A>
FOCUS_ALWAYS_INLINE generic_vector<A> where_zero(generic_vector<A> x, generic_vector<A> a,
                                                 generic_vector<A> b) noexcept {
  return generic_vector<A>::map(
      [&](std::size_t l) { return is_zero(x.lane[l]) ? a.lane[l] : b.lane[l]; });
}

/// Square transposition of `width` vectors in place.
template <class A>
FOCUS_ALWAYS_INLINE void transpose(generic_vector<A> (&rows)[generic_vector<A>::width]) noexcept {
  constexpr std::size_t width = generic_vector<A>::size;
  for (std::size_t i = 0; i < width; ++i)
    for (std::size_t j = i + 1; j < width; ++j) std::swap(rows[i].lane[j], rows[j].lane[i]);
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
