// The tokens of a growing sequence by cell: those of one mask side by side, in order of position.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "focus/cache/page_pool.hpp"
#include "focus/config.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/plan/buffer.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Tokens in a page. A cell's last page is half empty on average: few of them keep that small, and
/// 8 rows of 64 + 64 floats still are 4 KiB side by side.
inline constexpr index_t page_slots = 8;

/// What a page begins with: of each of its slots the token that is in it. Behind it are their rows,
/// [kv_heads][page_slots][row_bytes].
struct page_header {
  index_t position[static_cast<std::size_t>(page_slots)];
  group_mask mask[static_cast<std::size_t>(page_slots)];
};

/// A page of a cell, and the position of its first token.
struct cell_page {
  index_t page = 0, first = 0;
};

/// Tokens of one mask, or, of the mixed cell, of any; page after page, all but the last one full.
struct cached_cell {
  group_mask mask = 0;
  index_t size = 0;
  buffer<cell_page> pages;
};

/// Where the rows of a sequence's tokens lie. Cells are in the order of their first tokens; behind
/// them is the mixed cell, for masks that too few tokens have. In which cell a token is depends on
/// the masks up to it alone, however they came and whatever was truncated in between.
class cell_store {
 public:
  cell_store(index_t kv_heads, index_t row_bytes)
      : head_bytes_(page_slots * row_bytes),
        row_bytes_(row_bytes),
        pool_(static_cast<index_t>(sizeof(page_header)) + kv_heads * head_bytes_) {}

  cell_store(const cell_store&) = default;
  /// `other` is empty afterwards.
  cell_store(cell_store&& other) noexcept
      : head_bytes_(other.head_bytes_),
        row_bytes_(other.row_bytes_),
        pool_(other.pool_.page_bytes()) {
    swap(other);
  }
  /// Where a copy cannot be made, this is as before.
  cell_store& operator=(const cell_store& other) {
    cell_store copy(other);
    swap(copy);
    return *this;
  }
  cell_store& operator=(cell_store&& other) noexcept {
    cell_store moved(std::move(other));
    swap(moved);
    return *this;
  }
  ~cell_store() = default;
  void swap(cell_store& other) noexcept {
    std::swap(head_bytes_, other.head_bytes_);
    std::swap(row_bytes_, other.row_bytes_);
    std::swap(size_, other.size_);
    std::swap(used_pages_, other.used_pages_);
    pool_.swap(other.pool_);
    cells_.swap(other.cells_);
    masks_.swap(other.masks_);
    std::swap(mixed_, other.mixed_);
  }

  /// Tokens in it.
  [[nodiscard]] index_t size() const noexcept { return size_; }
  /// Cells, with the mixed one, which is the last.
  [[nodiscard]] index_t cells() const noexcept { return static_cast<index_t>(cells_.size()) + 1; }
  [[nodiscard]] const cached_cell& cell(index_t i) const noexcept {
    return is_mixed(i) ? mixed_ : cells_[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] bool is_mixed(index_t i) const noexcept { return i + 1 == cells(); }
  /// Pages that hold tokens.
  [[nodiscard]] index_t pages() const noexcept { return used_pages_; }
  /// Bytes allocated.
  [[nodiscard]] index_t bytes() const noexcept {
    index_t tables = 0;
    for (index_t i = 0; i < cells(); ++i)
      tables += cell(i).pages.capacity() * static_cast<index_t>(sizeof(cell_page));
    return pool_.bytes() + tables;
  }

  [[nodiscard]] const page_header& header(cell_page p) const noexcept {
    return *reinterpret_cast<const page_header*>(pool_[p.page]);
  }
  /// The rows of a page for kv head 0; those of the next head are head_bytes() behind them.
  [[nodiscard]] const std::byte* rows(cell_page p) const noexcept {
    return pool_[p.page] + sizeof(page_header);
  }
  [[nodiscard]] index_t row_bytes() const noexcept { return row_bytes_; }
  [[nodiscard]] index_t head_bytes() const noexcept { return head_bytes_; }

  /// Gives the next token a place: its row for kv head 0, which is to be written. Throws
  /// std::bad_alloc; truncate(size()) then has everything as before.
  std::byte* add(group_mask mask) {
    cached_cell& cell = cell_of(mask);
    const index_t slot = cell.size % page_slots;
    if (slot == 0) {
      cell.pages.reserve(cell.pages.size() + 1);
      cell.pages.push_back({pool_.take(), size_});
      ++used_pages_;
    }
    std::byte* const page = pool_[cell.pages[cell.pages.size() - 1].page];
    auto& tokens = *reinterpret_cast<page_header*>(page);
    tokens.position[slot] = size_;
    tokens.mask[slot] = mask;
    ++cell.size;
    ++size_;
    return page + sizeof(page_header) + slot * row_bytes_;
  }

  /// Forgets all tokens but the first `size`.
  void truncate(index_t size) noexcept {
    for (cached_cell& cell : cells_) truncate(cell, size);
    truncate(mixed_, size);
    // A cell whose first token is gone is behind those that have one left.
    while (!cells_.empty() && cells_.back().size == 0) {
      cells_.pop_back();
      masks_.pop_back();
    }
    size_ = size;
  }

 private:
  /// Cells that there may be: each costs half a page on average, 4 tokens, which is 6% of the
  /// sequence where it has as many as this.
  [[nodiscard]] index_t most_cells() const noexcept {
    constexpr index_t few = 16, tokens_a_cell = 64;
    return few + size_ / tokens_a_cell;
  }

  cached_cell& cell_of(group_mask mask) {
    for (index_t i = 0; i < masks_.size(); ++i)
      if (masks_[i] == mask) return cells_[static_cast<std::size_t>(i)];
    if (masks_.size() >= most_cells()) return mixed_;
    masks_.reserve(masks_.size() + 1);
    cached_cell cell;
    cell.mask = mask;
    cell.pages.reserve(1);
    cells_.push_back(std::move(cell));
    masks_.push_back(mask);
    return cells_.back();
  }

  void truncate(cached_cell& cell, index_t size) noexcept {
    while (!cell.pages.empty()) {
      const cell_page last = cell.pages[cell.pages.size() - 1];
      const index_t before = (cell.pages.size() - 1) * page_slots;
      const index_t* const position = header(last).position;
      while (cell.size > before && position[cell.size - 1 - before] >= size) --cell.size;
      if (cell.size > before) return;
      pool_.give_back(last.page);
      cell.pages.pop_back();
      --used_pages_;
    }
    cell.size = 0;
  }

  index_t head_bytes_, row_bytes_;
  index_t size_ = 0, used_pages_ = 0;
  page_pool pool_;
  std::vector<cached_cell> cells_;
  buffer<group_mask> masks_;  // of cells_
  cached_cell mixed_;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
