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

/// An array of T that a scratch_plan has room for: memory[array] is its first element.
template <class T>
class scratch_array {
 public:
  scratch_array() noexcept = default;

 private:
  friend class scratch_plan;
  friend class scratch_block;
  explicit scratch_array(std::size_t offset) noexcept : offset_(offset) {}

  std::size_t offset_ = 0;  // in bytes, from where the plan's memory begins
};

/// Memory laid out by a scratch_plan.
class scratch_block {
 public:
  explicit scratch_block(std::byte* begin) noexcept : begin_(begin) {}

  template <class T>
  [[nodiscard]] T* operator[](scratch_array<T> array) const noexcept {
    return reinterpret_cast<T*>(begin_ + array.offset_);
  }

 private:
  std::byte* begin_;
};

class scratch_memory;

/// What each worker has a copy of: the arrays of a plan of their own, once for each worker.
class worker_scratch {
 public:
  worker_scratch() noexcept = default;

  /// The arrays of one worker: of(memory, worker)[array].
  [[nodiscard]] scratch_block of(const scratch_memory& memory, index_t worker) const noexcept;

 private:
  friend class scratch_plan;
  worker_scratch(scratch_array<std::byte> copies, std::size_t bytes) noexcept
      : copies_(copies), bytes_(bytes) {}

  scratch_array<std::byte> copies_;  // [workers][bytes]
  std::size_t bytes_ = 0;
};

/// The scratch memory of one call: first each array is planned, then all are allocated at once,
/// then handed out.
class scratch_plan {
 public:
  /// Plans `count` elements on a cache line of their own.
  template <class T>
  scratch_array<T> add(index_t count) noexcept {
    static_assert(std::is_trivially_copyable_v<T>);
    const scratch_array<T> array(bytes_);
    const std::size_t length = static_cast<std::size_t>(count) * sizeof(T);
    bytes_ += (length + line - 1) / line * line;
    return array;
  }
  /// Plans what `one` plans once for each worker.
  worker_scratch add_each(index_t workers, const scratch_plan& one) noexcept {
    return {add<std::byte>(static_cast<index_t>(one.bytes()) * workers), one.bytes()};
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
      : all_((exec.scratch() != nullptr ? *exec.scratch() : own_).reserve(plan.bytes())) {}
  /// Part of other scratch memory, for a call within a call.
  explicit scratch_memory(scratch_block part) noexcept : all_(part) {}

  template <class T>
  [[nodiscard]] T* operator[](scratch_array<T> array) const noexcept {
    return all_[array];
  }

 private:
  workspace own_;
  scratch_block all_;
};

inline scratch_block worker_scratch::of(const scratch_memory& memory,
                                        index_t worker) const noexcept {
  return scratch_block(memory[copies_] + static_cast<std::size_t>(worker) * bytes_);
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
