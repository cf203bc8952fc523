// Loops that are unrolled for certain.
#pragma once

#include <type_traits>
#include <utility>

#include "focus/config.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

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
