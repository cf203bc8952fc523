// Loops over plain data whose code belongs to this instruction set.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "focus/config.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// std::fill and std::copy on plain data, in this namespace: the standard's would be shared between
/// translation units compiled for different instruction sets, and the linker may keep the one that
/// another processor cannot run.
template <class T>
FOCUS_ALWAYS_INLINE void fill(T* first, T* last, std::type_identity_t<T> value) noexcept {
  for (; first < last; ++first) *first = value;
}
template <class T>
FOCUS_ALWAYS_INLINE void copy(const T* first, const T* last, T* to) noexcept {
  if (first != last) std::memcpy(to, first, static_cast<std::size_t>(last - first) * sizeof(T));
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
