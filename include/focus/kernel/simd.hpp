// The vector layer: the one type `vec<A>` (A float or double) over which all tile algorithms are
// written, chosen at compile time. What it offers is the concept vector_of.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "focus/config.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/simd_generic.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"
#if FOCUS_HAS_AVX512
#include "focus/kernel/simd_avx512.hpp"
#elif FOCUS_HAS_AVX2 && FOCUS_HAS_FMA
#include "focus/kernel/simd_avx2.hpp"
#elif FOCUS_HAS_NEON
#include "focus/kernel/simd_neon.hpp"
#endif

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

#if FOCUS_HAS_AVX512
template <class A>
using vec = avx512_vector<A>;
#elif FOCUS_HAS_AVX2 && FOCUS_HAS_FMA
template <class A>
using vec = avx2_vector<A>;
#elif FOCUS_HAS_NEON
template <class A>
using vec = neon_vector<A>;
#else
template <class A>
using vec = generic_vector<A>;
#endif

/// A vector of `width` numbers of type A.
template <class V, class A>
concept vector_of = requires(V a, V b, V c, A x, const A* from, A* to, const std::uint64_t* sets,
                             std::uint64_t with, V (&rows)[V::width]) {
  { V::zero() } -> std::same_as<V>;
  { V::broadcast(x) } -> std::same_as<V>;
  { V::load(from) } -> std::same_as<V>;  // from any address
  a.store(to);
  { a + b } -> std::same_as<V>;
  { a - b } -> std::same_as<V>;
  requires std::same_as<decltype(a * b), V>;
  { a / b } -> std::same_as<V>;
  { fma(a, b, c) } -> std::same_as<V>;  // a * b + c
  // b where either is NaN, so that a NaN in b survives.
  { maximum(a, b) } -> std::same_as<V>;
  { minimum(a, b) } -> std::same_as<V>;
  { zero_where_less(a, b, c) } -> std::same_as<V>;  // a, with 0 where b < c
  { where_zero(a, b, c) } -> std::same_as<V>;       // b where a is 0, else c
  // a where sets[lane] & with is 0, else b.
  { where_disjoint(sets, with, a, b) } -> std::same_as<V>;
  { round(a) } -> std::same_as<V>;  // to the nearest integer
  // a * 2^b for integers b that keep a normal; 0 for a = 1 and the greatest b that does not.
  { scale_by_power(a, b) } -> std::same_as<V>;
  // e and m with a = m * 2^e, 1 <= |m| < 2, for normal a.
  { exponent(a) } -> std::same_as<V>;
  { mantissa(a) } -> std::same_as<V>;
  // Over the lanes.
  { reduce_add(a) } -> std::same_as<A>;
  { reduce_max(a) } -> std::same_as<A>;
  transpose(rows);
};
static_assert(vector_of<vec<float>, float> && vector_of<vec<double>, double>);

// What the layer in use may lack: vectors of bfloat16, float16 and 8-bit numbers that are widened
// at once, vectors of floats that are narrowed to bfloat16 at once; add_lanes(x), the sum of each
// of `width` vectors in the lane of its number, where that is less than a transposition; where a
// lookup is fast, nearest_eighth(x) of floats: n / 8 next to x, |x| <= 127, and 2^(n / 8); and
// where stores can be masked,
//   store_edges(p, begin, end, count, x)               as fill_edges, where it returns true
//   store_where_groups<Meeting>(p, sets, with, count, x)
//                                   p[l] = x for l < count <= width where sets[l] & with is not 0,
//                                   or, if not Meeting, is 0
// A function of somebody else's is not meant by these names.
void load_bfloat16() = delete;
void load_float16() = delete;
void load_int8() = delete;
void add_lanes() = delete;
void store_bfloat16() = delete;
void nearest_eighth() = delete;
void store_edges() = delete;
template <bool>
void store_where_groups() = delete;

/// vec<A>::width elements of storage type T, widened. T is float, double, bfloat16, float16 or the
/// user's own.
template <class T, class A = accumulator_t<T>>
FOCUS_ALWAYS_INLINE vec<A> load_widened(const T* p) {
  constexpr storage_format format = format_of<T>();
  [[maybe_unused]] const void* const bits = p;
  if constexpr (std::is_same_v<T, A>) {
    return vec<A>::load(p);
  } else if constexpr (format == storage_format::bfloat16 &&
                       requires { load_bfloat16(bits, static_cast<vec<A>*>(nullptr)); }) {
    static_assert(sizeof(T) == 2, "focus: a storage type of format bfloat16 must be 2 bytes.");
    return load_bfloat16(bits, static_cast<vec<A>*>(nullptr));
  } else if constexpr (format == storage_format::float16 &&
                       requires { load_float16(bits, static_cast<vec<A>*>(nullptr)); }) {
    static_assert(sizeof(T) == 2, "focus: a storage type of format float16 must be 2 bytes.");
    return load_float16(bits, static_cast<vec<A>*>(nullptr));
  } else {
    A lane[static_cast<std::size_t>(vec<A>::width)];
    for (int l = 0; l < vec<A>::width; ++l) lane[l] = static_cast<A>(detail::widen(p[l]));
    return vec<A>::load(lane);
  }
}

/// The first `count` < vec<A>::width elements, zeros behind them; nothing beyond them is read.
template <class T, class A = accumulator_t<T>>
FOCUS_ALWAYS_INLINE vec<A> load_widened_partial(const T* p, index_t count) {
  A lane[static_cast<std::size_t>(vec<A>::width)] = {};
  for (index_t l = 0; l < count; ++l) lane[l] = static_cast<A>(detail::widen(p[l]));
  return vec<A>::load(lane);
}

/// The first min(count, vec<A>::width) elements, zeros behind them.
template <class T, class A = accumulator_t<T>>
FOCUS_ALWAYS_INLINE vec<A> load_widened_up_to(const T* p, index_t count) {
  return count >= vec<A>::width ? detail::load_widened<T, A>(p)
                                : detail::load_widened_partial<T, A>(p, count);
}

/// The first `count` <= vec<A>::width elements of x, rounded to T; nothing behind them is written.
template <class T, class A = accumulator_t<T>>
FOCUS_ALWAYS_INLINE void store_narrowed(vec<A> x, T* p, index_t count) {
  constexpr int lanes = vec<A>::width;
  if constexpr (std::is_same_v<T, A>) {
    if (count == lanes) return x.store(p);
  } else if constexpr (is_bfloat16<T> && std::is_same_v<accumulator_t<T>, A> &&
                       requires(void* bits) { store_bfloat16(x, bits); }) {
    if (count == lanes) return store_bfloat16(x, static_cast<void*>(p));
    std::uint16_t bits[static_cast<std::size_t>(lanes)];
    store_bfloat16(x, static_cast<void*>(bits));
    std::memcpy(static_cast<void*>(p), bits, static_cast<std::size_t>(count) * sizeof(T));
    return;
  }
  A lane[static_cast<std::size_t>(lanes)];
  x.store(lane);
  for (index_t l = 0; l < count; ++l) p[l] = narrow<T>(static_cast<accumulator_t<T>>(lane[l]));
}

/// p[0, begin) = value, p[end, count) = value.
template <class A>
FOCUS_ALWAYS_INLINE void fill_edges(A* p, index_t begin, index_t end, index_t count,
                                    A value) noexcept {
  if constexpr (requires { store_edges(p, begin, end, count, value); })
    if (store_edges(p, begin, end, count, value)) return;
  for (index_t j = 0; j < begin; ++j) p[j] = value;
  for (index_t j = end; j < count; ++j) p[j] = value;
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
