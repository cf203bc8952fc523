// How a token's K and V of one kv head lie in a cache: side by side, as stored or in 8 bits.
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {

/// What a kv_cache can keep K and V in: a storage type, or std::int8_t, with a scale for each row
/// of K and of V.
template <class T>
concept cache_storage = scalar<T> || std::same_as<T, std::int8_t>;

namespace detail {

template <class T>
struct cached_accumulator {
  using type = accumulator_t<T>;
};
template <>
struct cached_accumulator<std::int8_t> {
  using type = float;
};
/// The type of the sums over what is cached in T.
template <class T>
using cached_accumulator_t = typename cached_accumulator<T>::type;

/// The scales of a row of 8-bit numbers: x = scale * number.
struct row_scales {
  float key, value;
};

/// K [head_dim], V [value_dim], and with 8 bits the two scales: one run of memory for each key.
template <cache_storage T>
class cached_row {
 public:
  using value_type = T;
  static constexpr bool is_quantised = std::is_same_v<T, std::int8_t>;
  using accumulator = cached_accumulator_t<T>;

  cached_row(index_t head_dim, index_t value_dim) noexcept
      : head_dim_(head_dim), value_dim_(value_dim) {}

  [[nodiscard]] index_t head_dim() const noexcept { return head_dim_; }
  [[nodiscard]] index_t value_dim() const noexcept { return value_dim_; }
  [[nodiscard]] index_t bytes() const noexcept {
    const index_t elements = (head_dim_ + value_dim_) * static_cast<index_t>(sizeof(T));
    if constexpr (is_quantised)
      return scales_at() + static_cast<index_t>(sizeof(row_scales));
    else
      return elements;
  }
  [[nodiscard]] const T* key(const std::byte* row) const noexcept {
    return reinterpret_cast<const T*>(row);
  }
  [[nodiscard]] const T* value(const std::byte* row) const noexcept { return key(row) + head_dim_; }
  [[nodiscard]] row_scales scales(const std::byte* row) const noexcept requires is_quantised {
    row_scales s;
    std::memcpy(&s, row + scales_at(), sizeof s);
    return s;
  }

  /// Writes a token's K and V.
  template <class TK, class TV>
  void write(std::byte* row, const TK* k, const TV* v) const noexcept {
    T* const to = reinterpret_cast<T*>(row);
    if constexpr (is_quantised) {
      const row_scales s{quantise(k, head_dim_, to), quantise(v, value_dim_, to + head_dim_)};
      std::memcpy(row + scales_at(), &s, sizeof s);
    } else {
      narrow_row(k, head_dim_, to);
      narrow_row(v, value_dim_, to + head_dim_);
    }
  }
  /// A token's K and V as they are kept.
  void read(const std::byte* row, accumulator* k, accumulator* v) const noexcept {
    if constexpr (is_quantised) {
      const row_scales s = scales(row);
      for (index_t c = 0; c < head_dim_; ++c) k[c] = s.key * static_cast<float>(key(row)[c]);
      for (index_t c = 0; c < value_dim_; ++c) v[c] = s.value * static_cast<float>(value(row)[c]);
    } else {
      for (index_t c = 0; c < head_dim_; ++c) k[c] = detail::widen(key(row)[c]);
      for (index_t c = 0; c < value_dim_; ++c) v[c] = detail::widen(value(row)[c]);
    }
  }

 private:
  [[nodiscard]] index_t scales_at() const noexcept {
    return round_up(head_dim_ + value_dim_, static_cast<index_t>(alignof(row_scales)));
  }

  template <class From>
  static void narrow_row(const From* from, index_t width, T* to) noexcept {
    if constexpr (std::is_same_v<From, T>) {
      if (width > 0) std::memcpy(to, from, static_cast<std::size_t>(width) * sizeof(T));
    } else {
      for (index_t c = 0; c < width; ++c)
        to[c] = narrow<T>(static_cast<accumulator>(detail::widen(from[c])));
    }
  }

  /// The nearest of -127 ... 127 times the scale that is returned, max |x| / 127: off by half of it
  /// at most. The scale of a row with a NaN or an infinity is NaN: all of the row is.
  template <class From>
  static float quantise(const From* from, index_t width, std::int8_t* to) noexcept {
    constexpr float most = 127;
    float largest = 0;
    std::uint32_t largest_bits = 0;  // of magnitudes, which bits order as numbers do
    for (index_t c = 0; c < width; ++c) {
      const auto x = static_cast<float>(detail::widen(from[c]));
      largest_bits = (std::max)(largest_bits, std::bit_cast<std::uint32_t>(x) & 0x7fffffffu);
    }
    const bool finite = largest_bits < infinity_bits<float>;
    if (finite) largest = std::bit_cast<float>(largest_bits);
    // Numbers that are too small for their inverse count as 0.
    const bool any = largest > most / (std::numeric_limits<float>::max)();
    const float to_steps = any ? most / largest : 0;
    for (index_t c = 0; c < width; ++c) {
      const float x = any ? static_cast<float>(detail::widen(from[c])) * to_steps : 0.0f;
      // Half a step further from 0, the rest cut off: compilers make vectors of it.
      to[c] = static_cast<std::int8_t>(static_cast<std::int32_t>(x + (x < 0 ? -0.5f : 0.5f)));
    }
    if (!finite) return std::numeric_limits<float>::quiet_NaN();
    return any ? largest / most : 0;
  }

  index_t head_dim_, value_dim_;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
