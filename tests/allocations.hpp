// Counts the allocations of a test program: included by its one source file, it replaces operator
// new.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "focus/config.hpp"

namespace oracle {

inline std::atomic<long> allocation_count{0};
/// How many more succeed, if not negative.
inline std::atomic<long> allocations_left{-1};

/// How many allocations f makes.
template <class F>
long allocations_of(F&& f) {
  const long before = allocation_count;
  f();
  return allocation_count - before;
}

inline void* counted_allocation(std::size_t bytes, std::size_t alignment) {
  ++allocation_count;
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  // aligned_alloc wants a multiple of the alignment, and malloc may answer null to 0 bytes.
  const std::size_t rounded = (bytes / alignment + 1) * alignment;
  if (void* p = std::aligned_alloc(alignment, rounded)) return p;
  throw std::bad_alloc();
}

}  // namespace oracle

// Out of line: inlined, the compiler would find a mismatch of operator new and free.
FOCUS_NOINLINE void* operator new(std::size_t bytes) {
  return oracle::counted_allocation(bytes, alignof(std::max_align_t));
}
FOCUS_NOINLINE void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return oracle::counted_allocation(bytes, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
FOCUS_NOINLINE void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return oracle::counted_allocation(bytes, static_cast<std::size_t>(alignment));
}
FOCUS_NOINLINE void operator delete(void* p) noexcept {
  std::free(p);
}
FOCUS_NOINLINE void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}
FOCUS_NOINLINE void operator delete(void* p, std::align_val_t) noexcept {
  std::free(p);
}
FOCUS_NOINLINE void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}
