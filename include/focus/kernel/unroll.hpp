// Loops that are unrolled for certain.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "focus/config.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Arrays by sizes that are int, as template parameters here are: T[Size], T[Rows][Columns].
template <class T, int Size>
using array_of = T[static_cast<std::size_t>(Size)];
template <class T, int Rows, int Columns>
using table_of = T[static_cast<std::size_t>(Rows)][static_cast<std::size_t>(Columns)];

/// Calls f(std::integral_constant<int, 0>) ... f(std::integral_constant<int, N - 1>): a loop that
/// is unrolled for certain, so that arrays indexed by it live in registers.
template <int N, class F>
FOCUS_ALWAYS_INLINE constexpr void static_for(F&& f) {
  [&]<int... Index>(std::integer_sequence<int, Index...>) {
    (f(std::integral_constant<int, Index>{}), ...);
  }
  (std::make_integer_sequence<int, N>{});
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
