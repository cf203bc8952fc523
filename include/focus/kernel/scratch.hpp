// The scratch memory of a call: planned first, then allocated at once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/parallel.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The scratch memory of one call: first each array is planned, then all are allocated at once,
/// then handed out.
class scratch_plan {
 public:
  /// Plans `count` elements on a cache line of their own; returns where they will be.
  template <class T>
  std::size_t add(index_t count) noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::size_t at = bytes_;
    const std::size_t length = static_cast<std::size_t>(count) * sizeof(T);
    bytes_ += (length + line - 1) / line * line;
    return at;
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  /// Goes on behind what `other` plans, too: two plans from here on share memory, and what is in it
  /// lasts until the other one is used.
  void cover(const scratch_plan& other) noexcept { bytes_ = (std::max)(bytes_, other.bytes_); }

 private:
  static constexpr std::size_t line = 64;
  std::size_t bytes_ = 0;
};

/// The memory itself: the executor's workspace where it lends one, else memory of the call's own.
class scratch_memory {
 public:
  scratch_memory(const any_executor& exec, const scratch_plan& plan)
      : base_((exec.scratch() != nullptr ? *exec.scratch() : own_).reserve(plan.bytes())) {}

  template <class T>
  [[nodiscard]] T* at(std::size_t offset) const noexcept {
    return reinterpret_cast<T*>(base_ + offset);
  }

 private:
  workspace own_;
  std::byte* base_;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
