// Pages of memory: where a cache keeps its tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

#include "focus/config.hpp"
#include "focus/parallel.hpp"
#include "focus/plan/buffer.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Pages of one size, each on a cache line of its own. They are handed out by number, stay where
/// they are, and are used again once they are given back; what they hold in the meantime is lost.
class page_pool {
 public:
  explicit page_pool(index_t page_bytes) noexcept : page_bytes_(round_up(page_bytes, line)) {}
  page_pool(const page_pool& other) : page_pool(other.page_bytes_) {
    while (pages() < other.pages()) add_block(other.pages() - pages());
    for (index_t p = 0; p < pages(); ++p)
      std::memcpy(addresses_[p], other.addresses_[p], static_cast<std::size_t>(page_bytes_));
    first_free_ = other.first_free_;
  }
  page_pool(page_pool&& other) noexcept : page_pool(other.page_bytes_) { swap(other); }
  page_pool& operator=(const page_pool& other) {
    page_pool copy(other);
    swap(copy);
    return *this;
  }
  page_pool& operator=(page_pool&& other) noexcept {
    swap(other);
    return *this;
  }
  ~page_pool() {
    for (std::byte* block : blocks_) ::operator delete(block, alignment);
  }
  void swap(page_pool& other) noexcept {
    std::swap(page_bytes_, other.page_bytes_);
    std::swap(first_free_, other.first_free_);
    addresses_.swap(other.addresses_);
    blocks_.swap(other.blocks_);
  }

  /// A page that nobody has. Throws std::bad_alloc, with everything as before.
  index_t take() {
    if (first_free_ < 0) add_block((std::max)(least_block, pages() / share));
    const index_t page = first_free_;
    std::memcpy(&first_free_, addresses_[page], sizeof first_free_);
    return page;
  }
  void give_back(index_t page) noexcept {
    std::memcpy(addresses_[page], &first_free_, sizeof first_free_);
    first_free_ = page;
  }

  [[nodiscard]] std::byte* operator[](index_t page) const noexcept { return addresses_[page]; }
  [[nodiscard]] index_t page_bytes() const noexcept { return page_bytes_; }
  [[nodiscard]] index_t pages() const noexcept { return addresses_.size(); }
  /// Bytes of all pages, whether taken or not.
  [[nodiscard]] index_t bytes() const noexcept { return pages() * page_bytes_; }

 private:
  static constexpr index_t line = 64;
  static constexpr std::align_val_t alignment{64};
  /// Pages are allocated by blocks: of so many, or of this share of what there is, so that there
  /// are few blocks and no more than 3% of the memory waits for tokens.
  static constexpr index_t least_block = 16, share = 32;

  /// Adds so many pages, which are free: a chain in which each begins with the next one's number.
  void add_block(index_t count) {
    addresses_.reserve(pages() + count);
    blocks_.reserve(blocks_.size() + 1);
    auto* const block = static_cast<std::byte*>(
        ::operator new(static_cast<std::size_t>(count * page_bytes_), alignment));
    blocks_.push_back(block);
    const index_t first = pages();
    for (index_t p = 0; p < count; ++p) addresses_.push_back(block + p * page_bytes_);
    for (index_t p = first + count; p > first; --p) give_back(p - 1);
  }

  index_t page_bytes_;
  index_t first_free_ = -1;
  buffer<std::byte*> addresses_;  // [pages]
  buffer<std::byte*> blocks_;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
