// Counts the allocations of the program and the memory they hold. To be included in one
// translation unit: it replaces operator new.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

namespace bench {

inline std::atomic<long> allocations{0};
inline std::atomic<std::size_t> live_bytes{0}, peak_bytes{0};

/// The most memory that was held at a time during a call, beyond what was held before it.
template <class F>
std::size_t peak_of(F&& call) {
  const std::size_t before = live_bytes;
  peak_bytes = before;
  call();
  return peak_bytes - before;
}

namespace detail {

/// Room in front of an allocation for its size; as large as its alignment, to keep it.
constexpr std::size_t prefix(std::size_t alignment) {
  return (std::max)(alignment, alignof(std::max_align_t));
}

inline void* allocate(std::size_t bytes, std::size_t alignment) {
  const std::size_t before = prefix(alignment);
  const std::size_t whole = before + (bytes + before - 1) / before * before;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(before, whole));
  if (memory == nullptr) throw std::bad_alloc();
  std::memcpy(memory, &bytes, sizeof bytes);
  allocations.fetch_add(1, std::memory_order_relaxed);
  const std::size_t live = live_bytes.fetch_add(bytes) + bytes;
  std::size_t peak = peak_bytes;
  while (peak < live && !peak_bytes.compare_exchange_weak(peak, live)) {
  }
  return memory + before;
}

inline void release(void* memory, std::size_t alignment) noexcept {
  if (memory == nullptr) return;
  std::byte* const whole = static_cast<std::byte*>(memory) - prefix(alignment);
  std::size_t bytes = 0;
  std::memcpy(&bytes, whole, sizeof bytes);
  live_bytes.fetch_sub(bytes);
  std::free(whole);
}

}  // namespace detail
}  // namespace bench

void* operator new(std::size_t bytes) {
  return bench::detail::allocate(bytes, 64);
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return bench::detail::allocate(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept {
  bench::detail::release(memory, 64);
}
void operator delete(void* memory, std::size_t) noexcept {
  bench::detail::release(memory, 64);
}
void operator delete(void* memory, std::align_val_t alignment) noexcept {
  bench::detail::release(memory, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory, std::size_t, std::align_val_t alignment) noexcept {
  bench::detail::release(memory, static_cast<std::size_t>(alignment));
}
