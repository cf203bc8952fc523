// From group masks to work: tokens sorted into cells, so that the pairs that share a group lie side
// by side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "focus/buffer.hpp"
#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/tensor_view.hpp"

namespace focus::inline FOCUS_ABI {
namespace detail {

/// Tokens with the same mask, in a row of an order sorted by mask, by position within.
struct cell {
  group_mask mask = 0;
  index_t begin = 0, end = 0;
};

/// Query rows [begin, begin + rows) of the sorted order, all of one cell.
struct cell_tile {
  index_t cell = 0;
  index_t begin = 0, rows = 0;
};

/// Numbers the distinct masks of a sequence in the order in which they first appear.
class mask_table {
 public:
  void clear() {
    if (slots_.size() == 0) slots_.resize(first_capacity);
    detail::fill(slots_.begin(), slots_.end(), slot{});
    masks_.clear();
  }
  /// The number of `mask`, a new one if it has not been seen.
  index_t insert(group_mask mask) {
    if (2 * (masks_.size() + 1) > slots_.size()) grow();
    slot& s = find(mask);
    if (s.number < 0) {
      s = {mask, masks_.size()};
      masks_.push_back(mask);
    }
    return s.number;
  }
  [[nodiscard]] index_t size() const noexcept { return masks_.size(); }
  [[nodiscard]] group_mask mask(index_t number) const noexcept { return masks_[number]; }

 private:
  static constexpr index_t first_capacity = 256;
  struct slot {
    group_mask mask = 0;
    index_t number = -1;
  };

  slot& find(group_mask mask) noexcept {
    // Fibonacci hashing; the table is a power of two and never more than half full.
    const auto last = static_cast<std::uint64_t>(slots_.size() - 1);
    std::uint64_t at = (mask * 0x9e3779b97f4a7c15u) >> 20;
    while (slots_[static_cast<index_t>(at & last)].number >= 0 &&
           slots_[static_cast<index_t>(at & last)].mask != mask)
      ++at;
    return slots_[static_cast<index_t>(at & last)];
  }
  void grow() {
    slots_.resize(2 * slots_.size());
    detail::fill(slots_.begin(), slots_.end(), slot{});
    for (index_t i = 0; i < masks_.size(); ++i) find(masks_[i]) = {masks_[i], i};
  }

  buffer<slot> slots_;
  buffer<group_mask> masks_;
};

}  // namespace detail

/// Which pairs hard Focus attention computes (section 1, steps 4 and 5 of the method), laid out for
/// the kernels.
///
/// Pair (query i, key j) is allowed iff j is visible to i (causality) and i - j <= window, or j is
/// a sink, or the masks of i and j have a group in common. Tokens of equal mask form a cell; two
/// cells attend to each other iff their masks intersect, so each allowed pair is computed exactly
/// once, for any number of groups a token. The plan depends on masks and options alone: one plan
/// serves all heads, and any type of Q, K and V. rebuild() reuses the memory of earlier plans.
class routing_plan {
 public:
  routing_plan() noexcept = default;

  /// As make_routing_plan, in place.
  void rebuild(std::span<const group_mask> masks, const pattern_options& pattern = {}) {
    rebuild_from(masks, masks, pattern);
  }
  template <span_like<group_mask> KeyMasks>
  void rebuild(std::span<const group_mask> query_masks, const KeyMasks& key_masks,
               const pattern_options& pattern = {}) {
    rebuild_from(query_masks, detail::as_span(key_masks), pattern);
  }

  [[nodiscard]] index_t query_count() const noexcept { return query_masks_.size(); }
  [[nodiscard]] index_t key_count() const noexcept { return key_masks_.size(); }
  [[nodiscard]] const pattern_options& pattern() const noexcept { return pattern_; }
  /// The masks that the plan was made of, in token order.
  [[nodiscard]] std::span<const group_mask> query_masks() const noexcept {
    return query_masks_.view();
  }
  [[nodiscard]] std::span<const group_mask> key_masks() const noexcept { return key_masks_.view(); }

  /// The exact number of (query, key) pairs that are computed for one head.
  /// Counted when asked for: O(n_q x distinct key masks).
  [[nodiscard]] index_t allowed_pairs() const;

  // What the kernels read.

  /// Every visible pair is allowed: the plan is dense attention.
  [[nodiscard]] bool complete() const noexcept { return complete_; }
  /// Some pair may be allowed that is neither local nor a sink.
  [[nodiscard]] bool has_distant_pairs() const noexcept { return tiles_.size() > 0; }
  /// Pairs of a query and a key cell must still be tested one by one: cells were too many and too
  /// small to be worth it.
  [[nodiscard]] bool tests_pairs() const noexcept { return tests_pairs_; }
  /// Query rows sorted by cell.
  [[nodiscard]] std::span<const index_t> query_order() const noexcept {
    return query_order_.view();
  }
  /// The tiles of query rows, each within a cell. All queries are in one.
  [[nodiscard]] std::span<const detail::cell_tile> tiles() const noexcept { return tiles_.view(); }
  [[nodiscard]] group_mask tile_mask(const detail::cell_tile& tile) const noexcept {
    return query_cells_[tile.cell].mask;
  }
  /// Keys sorted by cell, sinks and keys without a group left out; each cell begins a new panel,
  /// and -1 fills up the last.
  [[nodiscard]] std::span<const index_t> key_slots() const noexcept { return key_slots_.view(); }
  /// The mask of each slot's key, when pairs are tested.
  [[nodiscard]] std::span<const group_mask> slot_masks() const noexcept {
    return slot_masks_.view();
  }
  /// Cells of keys: [begin, end) are slots.
  [[nodiscard]] std::span<const detail::cell> key_cells() const noexcept {
    return key_cells_.view();
  }

 private:
  void rebuild_from(std::span<const group_mask> query_masks, std::span<const group_mask> key_masks,
                    const pattern_options& pattern);
  void number_masks(std::span<const group_mask> masks, index_t first, detail::mask_table& table,
                    detail::buffer<detail::cell>& cells);
  [[nodiscard]] bool cells_are_few() const noexcept;
  [[nodiscard]] bool all_cells_meet() const noexcept;
  [[nodiscard]] bool cells_pay(const detail::resolved_pattern& pattern) const noexcept;
  void sort_queries();
  void sort_keys(index_t first);
  void make_one_cell(index_t first);

  pattern_options pattern_;
  detail::buffer<group_mask> query_masks_, key_masks_;
  detail::buffer<index_t> query_order_, key_slots_;
  detail::buffer<group_mask> slot_masks_;
  detail::buffer<detail::cell> query_cells_, key_cells_;
  detail::buffer<detail::cell_tile> tiles_;
  bool complete_ = false, tests_pairs_ = false;

  // While the plan is built: the cell of each token, and where the next token of each cell goes.
  detail::mask_table query_table_, key_table_;
  detail::buffer<index_t> cell_of_query_, cell_of_key_, next_;
};

/// Plans sparse self-attention: query i and key i are the same token, with masks[i].
/// @param masks    [n] from route or top_k_groups; 0: no group, local and sink pairs only
/// @param pattern  window, sinks, causality, query_offset
/// @throws invalid_argument
[[nodiscard]] inline routing_plan make_routing_plan(std::span<const group_mask> masks,
                                                    const pattern_options& pattern = {}) {
  routing_plan plan;
  plan.rebuild(masks, pattern);
  return plan;
}

/// Plans sparse attention with masks of their own for queries [n_q] and keys [n_k].
template <span_like<group_mask> KeyMasks>
[[nodiscard]] routing_plan make_routing_plan(std::span<const group_mask> query_masks,
                                             const KeyMasks& key_masks,
                                             const pattern_options& pattern = {}) {
  routing_plan plan;
  plan.rebuild(query_masks, key_masks, pattern);
  return plan;
}

inline void routing_plan::rebuild_from(std::span<const group_mask> query_masks,
                                       std::span<const group_mask> key_masks,
                                       const pattern_options& pattern) {
  detail::validate(pattern, "make_routing_plan");
  const auto n_q = static_cast<index_t>(query_masks.size());
  const auto n_k = static_cast<index_t>(key_masks.size());
  pattern_ = pattern;
  query_masks_.resize(n_q);
  key_masks_.resize(n_k);
  detail::copy(query_masks.data(), query_masks.data() + n_q, query_masks_.data());
  detail::copy(key_masks.data(), key_masks.data() + n_k, key_masks_.data());
  query_order_.clear(), key_slots_.clear(), slot_masks_.clear();
  query_cells_.clear(), key_cells_.clear(), tiles_.clear();
  complete_ = tests_pairs_ = false;

  const auto resolved = detail::resolve(pattern, n_q, n_k);
  // Positions within the window of every query leave nothing to the groups.
  const bool any_distant = n_q > 0 && (resolved.distant_before(n_q - 1) > resolved.sinks ||
                                       (!resolved.causal && resolved.distant_after(0) < n_k));
  if (!any_distant) return;

  cell_of_query_.resize(n_q);
  cell_of_key_.resize(n_k);
  number_masks(query_masks_.view(), 0, query_table_, query_cells_);
  number_masks(key_masks_.view(), resolved.sinks, key_table_, key_cells_);
  const bool few = cells_are_few();
  if (few && all_cells_meet()) {
    complete_ = true;
    return;
  }
  if (few && cells_pay(resolved)) {
    sort_queries();
    sort_keys(resolved.sinks);
  } else {
    make_one_cell(resolved.sinks);
  }
  for (index_t c = 0; c < query_cells_.size(); ++c) {
    const detail::cell& cell = query_cells_[c];
    for (index_t begin = cell.begin; begin < cell.end; begin += detail::plan_tile_rows)
      tiles_.push_back({c, begin, (std::min)(detail::plan_tile_rows, cell.end - begin)});
  }
}

/// Fills `cells` with the distinct masks of masks[first, n) (their sizes in `end`) and cell_of_*
/// with each token's.
inline void routing_plan::number_masks(std::span<const group_mask> masks, index_t first,
                                       detail::mask_table& table,
                                       detail::buffer<detail::cell>& cells) {
  index_t* cell_of = &table == &query_table_ ? cell_of_query_.data() : cell_of_key_.data();
  table.clear();
  for (index_t i = first; i < static_cast<index_t>(masks.size()); ++i) {
    const index_t c = table.insert(masks[static_cast<std::size_t>(i)]);
    if (c == cells.size()) cells.push_back({table.mask(c), 0, 0});
    ++cells[c].end;
    cell_of[i] = c;
  }
}

/// Comparing all cells with all may not outgrow the O(n) of the rest: with more cells than that,
/// pairs are tested instead.
inline bool routing_plan::cells_are_few() const noexcept {
  constexpr index_t tests_a_token = 64;
  return query_cells_.size() * key_cells_.size() <=
         tests_a_token * (query_masks_.size() + key_masks_.size());
}

/// Every query's mask meets every key's.
inline bool routing_plan::all_cells_meet() const noexcept {
  for (const detail::cell& q : query_cells_)
    for (const detail::cell& k : key_cells_)
      if ((q.mask & k.mask) == 0) return false;
  return true;
}

/// Whether walking cells costs less than testing every pair.
inline bool routing_plan::cells_pay(const detail::resolved_pattern& pattern) const noexcept {
  const index_t n_q = query_masks_.size(), n_k = key_masks_.size();
  // A strip of queries computes whole panels of keys, and one panel more where the causal limit
  // cuts through.
  constexpr index_t strip = detail::tile_sizes<float>::strip_rows,
                    panel = detail::tile_sizes<float>::panel;
  const auto share = [&](index_t keys) {
    return pattern.causal ? keys / 2 : keys;
  };
  double cost = 0;
  for (const detail::cell& q : query_cells_)
    for (const detail::cell& k : key_cells_)
      if ((q.mask & k.mask) != 0)
        cost += static_cast<double>(detail::round_up(q.end, strip)) *
                static_cast<double>(share(k.end) + panel);
  return cost < static_cast<double>(n_q) * static_cast<double>(share(n_k) + panel);
}

/// Turns the sizes in query_cells_ into ranges and sorts the query rows into them (stable counting
/// sort).
inline void routing_plan::sort_queries() {
  next_.resize(query_cells_.size());
  index_t total = 0;
  for (index_t c = 0; c < query_cells_.size(); ++c) {
    detail::cell& cell = query_cells_[c];
    const index_t size = cell.end;
    cell.begin = next_[c] = total;
    cell.end = total += size;
  }
  query_order_.resize(query_masks_.size());
  for (index_t i = 0; i < query_masks_.size(); ++i) query_order_[next_[cell_of_query_[i]]++] = i;
}

/// The same for the keys from position `first` on, each cell padded to whole panels.
inline void routing_plan::sort_keys(index_t first) {
  next_.resize(key_cells_.size());
  index_t total = 0;
  for (index_t c = 0; c < key_cells_.size(); ++c) {
    detail::cell& cell = key_cells_[c];
    const index_t size = cell.mask != 0 ? cell.end : 0;
    cell.begin = next_[c] = total;
    cell.end = total + size;
    total += detail::round_up(size, detail::widest_panel);
  }
  key_slots_.resize(total);
  detail::fill(key_slots_.begin(), key_slots_.end(), index_t{-1});
  for (index_t j = first; j < key_masks_.size(); ++j)
    if (key_masks_[j] != 0) key_slots_[next_[cell_of_key_[j]]++] = j;
}

/// One cell of all tokens in their own order, with a test for each pair.
inline void routing_plan::make_one_cell(index_t first) {
  tests_pairs_ = true;
  query_cells_.clear(), key_cells_.clear();
  query_order_.resize(query_masks_.size());
  for (index_t i = 0; i < query_order_.size(); ++i) query_order_[i] = i;
  query_cells_.push_back({~group_mask{0}, 0, query_order_.size()});

  const index_t count = key_masks_.size() -
                        std::count(key_masks_.begin() + first, key_masks_.end(), group_mask{0}) -
                        first;
  key_slots_.resize(detail::round_up(count, detail::widest_panel));
  slot_masks_.resize(key_slots_.size());
  index_t slot = 0;
  for (index_t j = first; j < key_masks_.size(); ++j) {
    if (key_masks_[j] == 0) continue;
    slot_masks_[slot] = key_masks_[j];
    key_slots_[slot++] = j;
  }
  detail::fill(key_slots_.begin() + slot, key_slots_.end(), index_t{-1});
  detail::fill(slot_masks_.begin() + slot, slot_masks_.end(), group_mask{0});
  key_cells_.push_back({~group_mask{0}, 0, slot});
}

inline index_t routing_plan::allowed_pairs() const {
  const auto pattern = detail::resolve(pattern_, query_count(), key_count());
  // How many keys of each mask lie before the first position that is not distant, and how many lie
  // behind the last.
  detail::mask_table table;
  table.clear();
  detail::buffer<index_t> before, behind;
  const auto count_of = [&](detail::buffer<index_t>& counts, index_t j) -> index_t& {
    return counts[table.insert(key_masks_[j])];
  };
  for (index_t j = pattern.sinks; j < key_count(); ++j) table.insert(key_masks_[j]);
  before.resize(table.size());
  behind.resize(table.size());
  detail::fill(before.begin(), before.end(), index_t{0});
  detail::fill(behind.begin(), behind.end(), index_t{0});
  for (index_t j = pattern.sinks; j < key_count(); ++j) ++count_of(behind, j);

  index_t pairs = 0, before_end = pattern.sinks, behind_begin = pattern.sinks;
  for (index_t i = 0; i < query_count(); ++i) {
    const detail::key_range local = pattern.local(i);
    const index_t sinks = pattern.sink_end(i);
    pairs +=
        local.size() + sinks - detail::key_range{local.begin, (std::min)(local.end, sinks)}.size();
    for (; before_end < pattern.distant_before(i); ++before_end) ++count_of(before, before_end);
    for (; behind_begin < pattern.distant_after(i); ++behind_begin)
      --count_of(behind, behind_begin);
    for (index_t c = 0; c < table.size(); ++c)
      if ((query_masks_[i] & table.mask(c)) != 0) pairs += before[c] + behind[c];
  }
  return pairs;
}

}  // namespace focus::inline FOCUS_ABI
