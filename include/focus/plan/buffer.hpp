// A growing array that keeps its memory, for what routing plans and caches own.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <type_traits>
#include <utility>

#include "focus/config.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// As std::vector for plain data, except that resize() neither keeps nor initialises elements, and
/// that its code belongs to this instruction set: two translation units with different flags never
/// share an instantiation.
template <class T>
class buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  buffer() noexcept = default;
  buffer(const buffer& other) { *this = other; }
  buffer(buffer&& other) noexcept { swap(other); }
  buffer& operator=(const buffer& other) {
    if (this == &other) return *this;
    assign(other.view());
    return *this;
  }
  buffer& operator=(buffer&& other) noexcept {
    swap(other);
    other.clear();
    return *this;
  }
  ~buffer() = default;

  void swap(buffer& other) noexcept {
    memory_.swap(other.memory_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

  /// The elements are indeterminate afterwards.
  void resize(index_t size) {
    if (size > capacity_) {
      memory_.reset();
      size_ = capacity_ = 0;
      memory_.reset(static_cast<T*>(::operator new(static_cast<std::size_t>(size) * sizeof(T))));
      capacity_ = size;
    }
    size_ = size;
  }
  void clear() noexcept { size_ = 0; }
  /// Copies elements that are not its own.
  void assign(std::span<const T> from) {
    resize(static_cast<index_t>(from.size()));
    if (!from.empty()) std::memcpy(data(), from.data(), from.size() * sizeof(T));
  }

  /// Appends, growing by doubling.
  void push_back(const T& value) {
    if (size_ == capacity_) grow(capacity_ < 16 ? 32 : 2 * capacity_);
    data()[size_++] = value;
  }
  /// Room for `size` elements, by doubling at least: push_back allocates nothing until then.
  void reserve(index_t size) {
    if (size > capacity_) grow(size > 2 * capacity_ ? size : 2 * capacity_);
  }
  void pop_back() noexcept { --size_; }

  [[nodiscard]] T* data() noexcept { return memory_.get(); }
  [[nodiscard]] const T* data() const noexcept { return memory_.get(); }
  [[nodiscard]] index_t size() const noexcept { return size_; }
  [[nodiscard]] index_t capacity() const noexcept { return capacity_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] T& operator[](index_t i) noexcept { return data()[i]; }
  [[nodiscard]] const T& operator[](index_t i) const noexcept { return data()[i]; }
  [[nodiscard]] T* begin() noexcept { return data(); }
  [[nodiscard]] T* end() noexcept { return data() + size_; }
  [[nodiscard]] const T* begin() const noexcept { return data(); }
  [[nodiscard]] const T* end() const noexcept { return data() + size_; }
  [[nodiscard]] std::span<const T> view() const noexcept {
    return {data(), static_cast<std::size_t>(size_)};
  }

 private:
  struct deleter {
    void operator()(T* p) const noexcept { ::operator delete(p); }
  };
  void grow(index_t capacity) {
    buffer larger;
    larger.resize(capacity);
    if (size_ > 0) std::memcpy(larger.data(), data(), static_cast<std::size_t>(size_) * sizeof(T));
    larger.size_ = size_;
    swap(larger);
  }

  std::unique_ptr<T, deleter> memory_;
  index_t size_ = 0, capacity_ = 0;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
