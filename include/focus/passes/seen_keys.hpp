// Which keys of a cache some queries see: page by page for the bulk of them, and key by key where
// the window, the sinks, later positions or mixed masks decide.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "focus/cache/cell_store.hpp"
#include "focus/config.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Queries that walk a cache's keys together: at most as many as a word has bits, in which a key is
/// marked by those who see it.
inline constexpr index_t most_queries_together = 64;

/// Some queries of a call, in any order.
struct query_chunk {
  const group_mask* masks;  // of all queries of the call
  const index_t* order;     // [count] which of them these are
  index_t count;
  index_t first_position;    // of query 0 of the call
  index_t earliest, latest;  // positions among these

  query_chunk(const group_mask* query_masks, const index_t* queries, index_t query_count,
              index_t position_of_first) noexcept
      : masks(query_masks),
        order(queries),
        count(query_count),
        first_position(position_of_first),
        earliest(position(0)),
        latest(position(0)) {
    for (index_t i = 1; i < count; ++i) {
      earliest = (std::min)(earliest, position(i));
      latest = (std::max)(latest, position(i));
    }
  }
  [[nodiscard]] index_t position(index_t i) const noexcept { return first_position + order[i]; }
  [[nodiscard]] group_mask mask(index_t i) const noexcept { return masks[order[i]]; }
  /// All of them, a bit each.
  [[nodiscard]] std::uint64_t all() const noexcept {
    return ~std::uint64_t{0} >> (most_queries_together - count);
  }
  /// Those whose groups meet `mask`.
  [[nodiscard]] std::uint64_t meeting(group_mask key_mask) const noexcept {
    std::uint64_t bits = 0;
    for (index_t i = 0; i < count; ++i) bits |= std::uint64_t{(mask(i) & key_mask) != 0} << i;
    return bits;
  }
};

/// Pages [begin, end) of a cell, in which some query of a chunk may see keys.
struct page_run {
  index_t cell = 0, begin = 0, end = 0;
};

/// The most runs of pages that a chunk has.
inline index_t most_page_runs(const cell_store& store) noexcept {
  return 2 * store.cells();
}

/// Writes the runs of pages that a chunk walks, cell by cell; returns how many there are.
inline index_t find_page_runs(const cell_store& store, const resolved_pattern& pattern,
                              const query_chunk& chunk, page_run* runs) noexcept {
  index_t count = 0;
  const bool all_local = pattern.window >= 0 && pattern.window >= chunk.earliest;
  for (index_t c = 0; c < store.cells(); ++c) {
    const cached_cell& cell = store.cell(c);
    const index_t pages = cell.pages.size();
    if (pages == 0) continue;
    if (all_local || store.is_mixed(c) || chunk.meeting(cell.mask) != 0) {
      runs[count++] = {c, 0, pages};
      continue;
    }
    // The first page that begins at `position` or later.
    const auto first_from = [&](index_t position) {
      index_t low = 0, high = pages;
      while (low < high) {
        const index_t middle = low + (high - low) / 2;
        if (cell.pages[middle].first >= position)
          high = middle;
        else
          low = middle + 1;
      }
      return low;
    };
    const index_t sinks = first_from(pattern.sinks);
    // The page before may end within the window.
    const index_t local =
        pattern.window < 0
            ? pages
            : (std::max<index_t>)(first_from(chunk.earliest - pattern.window) - 1, 0);
    if (local <= sinks) {
      runs[count++] = {c, 0, pages};
      continue;
    }
    if (sinks > 0) runs[count++] = {c, 0, sinks};
    if (local < pages) runs[count++] = {c, local, pages};
  }
  return count;
}

/// A list of keys, each of which some query of a chunk sees. There is room for a page more.
struct seen_keys {
  const std::byte** rows;  // of kv head 0
  std::uint64_t* queries;  // who sees it, a bit each; of no meaning for a chunk of one query
  index_t size = 0;
  bool all_see_all = true;

  void add(const std::byte* row, std::uint64_t by) noexcept {
    rows[size] = row;
    queries[size++] = by;
  }
};

/// Adds the keys of a page that the only query of a chunk sees: without a branch, for masks are as
/// good as random.
inline void list_seen_by_one(const resolved_pattern& pattern, const query_chunk& chunk,
                             const page_header& tokens, index_t there, const std::byte* row,
                             index_t row_bytes, seen_keys& list) noexcept {
  const index_t position = chunk.position(0);
  const group_mask mask = chunk.mask(0);
  const index_t local_begin = pattern.window < 0 ? pattern.n_k : position - pattern.window;
  const index_t local_end = position + (pattern.causal || pattern.window < 0 ? 0 : pattern.window);
  const index_t last = pattern.causal ? position : pattern.n_k;
  for (index_t slot = 0; slot < there; ++slot, row += row_bytes) {
    const index_t key = tokens.position[slot];
    const bool local = (key >= local_begin) & (key <= local_end);
    const bool seen =
        (((tokens.mask[slot] & mask) != 0) | local | (key < pattern.sinks)) & (key <= last);
    list.rows[list.size] = row;
    list.size += seen;
  }
}

/// Adds the keys of some pages of a cell to the list.
inline void list_seen_keys(const cell_store& store, const resolved_pattern& pattern,
                           const query_chunk& chunk, const page_run& run,
                           seen_keys& list) noexcept {
  const cached_cell& cell = store.cell(run.cell);
  const bool mixed = store.is_mixed(run.cell);
  const std::uint64_t all = chunk.all(), meeting = mixed ? 0 : chunk.meeting(cell.mask);
  // Who sees a key by its position, and who can see it at all.
  const auto near_by = [&](index_t key) {
    if (key < pattern.sinks) return all;
    std::uint64_t bits = 0;
    if (pattern.window >= 0)
      for (index_t i = 0; i < chunk.count; ++i) {
        const index_t distance = chunk.position(i) - key;
        bits |= std::uint64_t{distance <= pattern.window && distance >= -pattern.window} << i;
      }
    return bits;
  };
  const auto causal = [&](index_t key) {
    if (!pattern.causal || key <= chunk.earliest) return all;
    std::uint64_t bits = 0;
    for (index_t i = 0; i < chunk.count; ++i) bits |= std::uint64_t{key <= chunk.position(i)} << i;
    return bits;
  };
  // In the bulk of the pages positions do not matter: no key is hidden by causality, and none is
  // local to anyone, or groups alone, or the window alone, let all queries see all keys.
  const index_t shown_before = pattern.causal ? chunk.earliest + 1 : pattern.n_k;
  const index_t distant_before =
      pattern.window < 0 ? shown_before : (std::min)(shown_before, chunk.earliest - pattern.window);
  const bool group_shows_all = !mixed && meeting == all;
  const auto is_bulk = [&](index_t begin, index_t end) {
    if (end > shown_before) return false;
    if (group_shows_all) return true;
    return !mixed && begin >= pattern.sinks && end <= distant_before;
  };
  const auto all_local = [&](index_t begin, index_t end) {
    return end <= shown_before && pattern.window >= 0 && begin >= chunk.latest - pattern.window &&
           end - 1 <= chunk.earliest + pattern.window;
  };
  for (index_t p = run.begin; p < run.end; ++p) {
    const cell_page page = cell.pages[p];
    const index_t there = (std::min)(page_slots, cell.size - p * page_slots);
    const index_t behind = p + 1 < cell.pages.size() ? cell.pages[p + 1].first : pattern.n_k;
    const std::byte* row = store.rows(page);
    const bool bulk = is_bulk(page.first, behind);
    if (bulk || all_local(page.first, behind)) {
      const std::uint64_t by = bulk ? meeting : all;
      if (by == 0) continue;
      list.all_see_all &= by == all;
      for (index_t slot = 0; slot < there; ++slot, row += store.row_bytes()) list.add(row, by);
      continue;
    }
    const page_header& tokens = store.header(page);
    if (chunk.count == 1) {
      list_seen_by_one(pattern, chunk, tokens, there, row, store.row_bytes(), list);
      continue;
    }
    for (index_t slot = 0; slot < there; ++slot, row += store.row_bytes()) {
      const index_t key = tokens.position[slot];
      const std::uint64_t group = mixed ? chunk.meeting(tokens.mask[slot]) : meeting;
      std::uint64_t by = group == all ? all : group | near_by(key);
      if (by != 0) by &= causal(key);
      if (by == 0) continue;
      list.all_see_all &= by == all;
      list.add(row, by);
    }
  }
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
