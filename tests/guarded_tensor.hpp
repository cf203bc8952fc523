// Memory that shows what is read or written outside a tensor, for each storage type.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "focus/config.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace oracle {

using focus::index_t;

inline const double not_a_number = std::numeric_limits<double>::quiet_NaN();
inline const double infinity = std::numeric_limits<double>::infinity();

/// A bfloat16 that says so: the library's vector conversions apply.
struct engine_bfloat16 {
  std::uint16_t pattern = 0;
};

/// A type of which the library knows only how to convert it: a float with its bytes moved round.
struct engine_float {
  std::uint32_t turned = 0;
};

}  // namespace oracle

template <>
struct focus::scalar_traits<oracle::engine_bfloat16> {
  using accumulator = float;
  static constexpr focus::storage_format format = focus::storage_format::bfloat16;
  static float to_accumulator(oracle::engine_bfloat16 x) {
    return focus::scalar_traits<focus::bfloat16>::to_accumulator({x.pattern});
  }
  static oracle::engine_bfloat16 from_accumulator(float x) {
    return {focus::scalar_traits<focus::bfloat16>::from_accumulator(x).bits};
  }
};

template <>
struct focus::scalar_traits<oracle::engine_float> {
  using accumulator = float;
  static float to_accumulator(oracle::engine_float x) {
    return std::bit_cast<float>(std::rotr(x.turned, 8));
  }
  static oracle::engine_float from_accumulator(float x) {
    return {std::rotl(std::bit_cast<std::uint32_t>(x), 8)};
  }
};

namespace oracle {

/// The distance between 1 and the next number of the storage type.
template <class T>
constexpr double epsilon() {
  if constexpr (std::is_same_v<T, focus::bfloat16> || std::is_same_v<T, engine_bfloat16>)
    return 0x1p-7;
  else if constexpr (std::is_same_v<T, focus::float16>)
    return 0x1p-10;
  else if constexpr (std::is_same_v<T, double>)
    return std::numeric_limits<double>::epsilon();
  else
    return static_cast<double>(std::numeric_limits<float>::epsilon());
}

template <class T>
double widened(const T& x) {
  return static_cast<double>(focus::scalar_traits<T>::to_accumulator(x));
}

template <class T>
T narrowed(double x) {
  return focus::scalar_traits<T>::from_accumulator(static_cast<focus::accumulator_t<T>>(x));
}

/// How a tensor [heads, n, d], or a batch of them [batch, heads, n, d], lies in memory.
enum class layout {
  heads_first,   // dense
  tokens_first,  // [n, heads, d], [batch, n, heads, d]
  padded,        // odd strides: gaps between the rows, between the heads, and between sequences
  misaligned,    // dense, one element off
  batch_inside,  // [heads, n, batch, d]; of one sequence dense
};

/// A tensor with guard elements before, after and in its gaps. All memory starts as bytes 0xff, a
/// NaN in each storage type: what should not be read poisons what reads it, and what should not be
/// written shows when it is.
template <class T, int Rank>
class guarded_tensor {
  static constexpr std::size_t rank_size = static_cast<std::size_t>(Rank);

 public:
  guarded_tensor() = default;
  FOCUS_NOINLINE guarded_tensor(std::array<index_t, rank_size> extents, layout l)
      : extents_(extents) {
    const index_t padding = l == layout::padded ? 3 : 0;
    strides_.back() = 1;
    for (std::size_t r = rank_size - 1; r > 0; --r)
      strides_[r - 1] = strides_[r] * extents[r] + (r == rank_size - 1 ? padding : padding + 2);
    if constexpr (Rank == 3)
      if (l == layout::tokens_first) strides_ = {extents[2], extents[0] * extents[2], 1};
    if constexpr (Rank == 4) {
      const auto [batch, heads, n, d] = extents;
      if (l == layout::tokens_first) strides_ = {n * heads * d, d, heads * d, 1};
      if (l == layout::batch_inside) strides_ = {d, n * batch * d, batch * d, 1};
    }
    first_ = guard + (l == layout::misaligned ? 1 : 0);
    index_t size = 1;
    for (std::size_t r = 0; r < rank_size; ++r)
      size += strides_[r] * (std::max)(extents[r] - 1, index_t{0});
    memory_.resize(static_cast<std::size_t>(first_ + size + guard));
    std::memset(static_cast<void*>(memory_.data()), 0xff, memory_.size() * sizeof(T));
  }

  focus::tensor_view<T, Rank> view() { return {memory_.data() + first_, extents_, strides_}; }
  focus::tensor_view<const T, Rank> view() const {
    return {memory_.data() + first_, extents_, strides_};
  }

  /// Whether all memory is as it was at the start.
  FOCUS_NOINLINE bool untouched() const {
    return std::all_of(memory_.begin(), memory_.end(), [](const T& x) { return is_guard(x); });
  }

  /// Whether the memory outside the extents is as it was at the start.
  FOCUS_NOINLINE bool guards_hold() const {
    std::vector<bool> inside(memory_.size());
    for_each([&](std::size_t at) { inside[at] = true; });
    for (std::size_t at = 0; at < memory_.size(); ++at)
      if (!inside[at] && !is_guard(memory_[at])) return false;
    return true;
  }

  FOCUS_NOINLINE bool same_bits(const guarded_tensor& other) const {
    return memory_.size() == other.memory_.size() &&
           std::memcmp(memory_.data(), other.memory_.data(), memory_.size() * sizeof(T)) == 0;
  }

  /// Calls f with the place in memory of each element, in the order of the indices.
  template <class F>
  void for_each(F&& f) const {
    std::array<index_t, rank_size> index{};
    if (std::any_of(extents_.begin(), extents_.end(), [](index_t e) { return e == 0; })) return;
    for (;;) {
      index_t at = first_;
      for (std::size_t r = 0; r < rank_size; ++r) at += index[r] * strides_[r];
      f(static_cast<std::size_t>(at));
      std::size_t r = rank_size;
      while (r > 0 && ++index[r - 1] == extents_[r - 1]) index[--r] = 0;
      if (r == 0) return;
    }
  }

  /// The elements in double, dense, row-major.
  FOCUS_NOINLINE std::vector<double> values() const {
    std::vector<double> all;
    for_each([&](std::size_t at) { all.push_back(widened(memory_[at])); });
    return all;
  }
  template <class Make>
  void fill(Make&& make) {
    for_each([&](std::size_t at) { memory_[at] = narrowed<T>(make()); });
  }

 private:
  static constexpr index_t guard = 37;

  static bool is_guard(const T& x) {
    std::array<unsigned char, sizeof(T)> bytes, ones;
    ones.fill(0xff);
    std::memcpy(bytes.data(), &x, sizeof(T));
    return bytes == ones;
  }

  std::array<index_t, rank_size> extents_{}, strides_{};
  index_t first_ = guard;
  std::vector<T> memory_;
};

template <class T>
bool same_row_bits(focus::tensor_view<const T, 3> a, focus::tensor_view<const T, 3> b, index_t h,
                   index_t i) {
  return std::memcmp(a.row(h, i), b.row(h, i), static_cast<std::size_t>(a.extent(2)) * sizeof(T)) ==
         0;
}

}  // namespace oracle
