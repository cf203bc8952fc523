// From group masks to work: tokens sorted into cells, so that the pairs that share a group lie side
// by side.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <functional>
#include <span>

#include "focus/config.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/plan/buffer.hpp"
#include "focus/plan/cells.hpp"
#include "focus/plan/layout_costs.hpp"
#include "focus/plan/mask_table.hpp"
#include "focus/plan/pair_count.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
/// Which pairs hard Focus attention computes (the top-k selection and the decomposition of arXiv
/// 2604.03260, for any number of groups a token), laid out for the kernels.
///
/// Pair (query i, key j) is allowed iff j is visible to i (causality) and i - j <= window, or j is
/// a sink, or the masks of i and j have a group in common. Tokens of equal mask form a cell; two
/// cells attend to each other iff their masks intersect, so each allowed pair is computed exactly
/// once, for any number of groups a token. Where tokens have several groups, cells are many and
/// small, and the rows of a tile far apart in time: then each group has a list of its keys, and a
/// list of its queries, which walk it; a query leaves out of a list what it has met in those
/// before. The plan depends on masks and options alone: one plan serves all heads, and any type of
/// Q, K and V.
/// rebuild() reuses the memory of earlier plans.
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
  void rebuild(std::span<const group_mask> query_masks, std::span<const group_mask> key_masks,
               const pattern_options& pattern) {
    rebuild_from(query_masks, key_masks, pattern);
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
  /// Counted when asked for: O(n_q x D) with D distinct key masks, and never more than O(n_q x n_k
  /// x groups a query / 64).
  [[nodiscard]] index_t allowed_pairs() const;

  // What the kernels read.

  [[nodiscard]] detail::plan_layout layout() const noexcept { return layout_; }
  /// Query rows sorted by cell; where the layout is groups, by list: those without a list first,
  /// then the queries of each list.
  [[nodiscard]] std::span<const index_t> query_order() const noexcept {
    return query_order_.view();
  }
  /// The tiles of query rows, each within a cell or a list, round by round. There are no tiles
  /// where the layout needs no cells.
  [[nodiscard]] std::span<const detail::row_tile> tiles() const noexcept { return tiles_.view(); }
  /// The groups of a tile's rows; where the layout is groups, the one whose list they walk.
  [[nodiscard]] group_mask tile_mask(const detail::row_tile& tile) const noexcept {
    return query_runs_[tile.run].mask;
  }
  /// In a round no row is twice. None where there are no tiles.
  [[nodiscard]] index_t rounds() const noexcept { return rounds_.size(); }
  [[nodiscard]] detail::task_range round(index_t r) const noexcept { return rounds_[r]; }
  /// Whether query row `row` is in no later round than that of `tile`, which has it.
  [[nodiscard]] bool is_last_tile_of(const detail::row_tile& tile, index_t row) const noexcept {
    if (layout_ != detail::plan_layout::groups) return true;
    const group_mask list = tile_mask(tile);
    return (groups_of(row) & ~(list | (list - 1))) == 0;
  }
  /// The groups of query row `row` that some key has, too; where the layout is groups, the lists
  /// that it walks, in rising order.
  [[nodiscard]] group_mask groups_of(index_t row) const noexcept {
    return query_masks_[row] & shared_groups_;
  }
  /// Where the layout is groups: of queries, in query_order(), those of the list key_runs()[list].
  [[nodiscard]] const detail::token_run& list_queries(index_t list) const noexcept {
    return query_runs_[query_runs_.size() - key_runs_.size() + list];
  }
  /// Where the layout is groups: the list of a tile's rows, which have one.
  [[nodiscard]] index_t list_of(const detail::row_tile& tile) const noexcept {
    return tile.run - (query_runs_.size() - key_runs_.size());
  }
  /// Where the layout is groups, for each place in query_order(): the slots of its list hold
  /// distant keys before the query from the list's first up to this one, ...
  [[nodiscard]] std::span<const index_t> before_ends() const noexcept {
    return before_ends_.view();
  }
  /// ... and distant keys behind it from this one on; empty where the pattern is causal.
  [[nodiscard]] std::span<const index_t> after_begins() const noexcept {
    return after_begins_.view();
  }
  /// The keys that are walked, sinks and keys without a group left out; each cell or list begins a
  /// new panel, and -1 fills up its last.
  [[nodiscard]] std::span<const index_t> key_slots() const noexcept { return key_slots_.view(); }
  /// The mask of each slot's key, where the layout is groups.
  [[nodiscard]] std::span<const group_mask> slot_masks() const noexcept {
    return slot_masks_.view();
  }
  /// Cells of keys, or lists with the one bit of their group as mask, in rising order: [begin, end)
  /// are slots.
  [[nodiscard]] std::span<const detail::token_run> key_runs() const noexcept {
    return key_runs_.view();
  }

 private:
  void rebuild_from(std::span<const group_mask> query_masks, std::span<const group_mask> key_masks,
                    const pattern_options& pattern);
  void number_masks(std::span<const group_mask> masks, index_t first, detail::mask_table& table,
                    detail::buffer<detail::token_run>& cells, detail::buffer<index_t>& cell_of);
  void clear() noexcept;
  void lay_out(const detail::resolved_pattern& pattern);
  void count_groups() noexcept;
  void count_list_queries() noexcept;
  [[nodiscard]] detail::plan_layout choose_layout(const detail::resolved_pattern& pattern);
  void sort_queries_by_cell();
  void sort_queries_by_group();
  void add_round(index_t first_cell);
  void sort_keys_by_cell(index_t first);
  void sort_keys_by_group(index_t first);
  void limit_lists(const detail::resolved_pattern& pattern);

  pattern_options pattern_;
  detail::buffer<group_mask> query_masks_, key_masks_;
  detail::buffer<index_t> query_order_, key_slots_, before_ends_, after_begins_;
  detail::buffer<group_mask> slot_masks_;
  detail::buffer<detail::token_run> query_runs_, key_runs_;
  detail::buffer<detail::row_tile> tiles_;
  detail::buffer<detail::task_range> rounds_;
  group_mask shared_groups_ = 0;  // of some query and some key behind the sinks
  detail::plan_layout layout_ = detail::plan_layout::none;

  // While the plan is built: the cell of each token, where the next token of each cell goes, the
  // keys and the queries of each group, and the groups that some query has beside it.
  detail::mask_table query_table_, key_table_;
  detail::buffer<index_t> cell_of_query_, cell_of_key_, next_;
  std::array<index_t, max_groups> group_sizes_{}, list_queries_{};
  std::array<group_mask, max_groups> companions_{};
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

[[nodiscard]] inline routing_plan make_routing_plan(std::span<const group_mask> query_masks,
                                                    std::span<const group_mask> key_masks,
                                                    const pattern_options& pattern) {
  routing_plan plan;
  plan.rebuild(query_masks, key_masks, pattern);
  return plan;
}

inline void routing_plan::rebuild_from(std::span<const group_mask> query_masks,
                                       std::span<const group_mask> key_masks,
                                       const pattern_options& pattern) {
  detail::validate(pattern, "make_routing_plan");
  const auto is_own = [&](std::span<const group_mask> masks) {
    const auto is_in = [&](const detail::buffer<group_mask>& own) {
      return std::less_equal<>{}(own.begin(), masks.data()) &&
             std::less<>{}(masks.data(), own.end());
    };
    return !masks.empty() && (is_in(query_masks_) || is_in(key_masks_));
  };
  if (is_own(query_masks) || is_own(key_masks)) {
    detail::buffer<group_mask> query_copy, key_copy;
    query_copy.assign(query_masks);
    key_copy.assign(key_masks);
    return rebuild_from(query_copy.view(), key_copy.view(), pattern_options(pattern));
  }
  // When memory runs out halfway, what is left is a plan of no tokens.
  struct work {
    routing_plan& plan;
    bool done = false;
    ~work() {
      if (!done) plan.clear();
    }
  } rebuilding{*this};
  clear();
  pattern_ = pattern;
  query_masks_.assign(query_masks);
  key_masks_.assign(key_masks);
  lay_out(detail::resolve(pattern, query_masks_.size(), key_masks_.size()));
  rebuilding.done = true;
}

inline void routing_plan::clear() noexcept {
  query_masks_.clear(), key_masks_.clear();
  query_order_.clear(), key_slots_.clear(), slot_masks_.clear();
  before_ends_.clear(), after_begins_.clear();
  query_runs_.clear(), key_runs_.clear(), tiles_.clear(), rounds_.clear();
  layout_ = detail::plan_layout::none;
}

inline void routing_plan::lay_out(const detail::resolved_pattern& pattern) {
  // Positions within the window of every query leave nothing to the groups.
  const index_t n_q = query_masks_.size(), n_k = key_masks_.size();
  const bool any_distant = n_q > 0 && (pattern.distant_before(n_q - 1) > pattern.sinks ||
                                       (!pattern.causal && pattern.distant_after(0) < n_k));
  if (!any_distant) return;

  number_masks(query_masks_.view(), 0, query_table_, query_runs_, cell_of_query_);
  number_masks(key_masks_.view(), pattern.sinks, key_table_, key_runs_, cell_of_key_);
  count_groups();
  layout_ = choose_layout(pattern);
  if (layout_ == detail::plan_layout::cells) {
    sort_queries_by_cell();
    sort_keys_by_cell(pattern.sinks);
  } else if (layout_ == detail::plan_layout::groups) {
    sort_queries_by_group();
    sort_keys_by_group(pattern.sinks);
    limit_lists(pattern);
  }
}

/// Fills `cells` with the distinct masks of masks[first, n) (their sizes in `end`) and cell_of with
/// each token's.
inline void routing_plan::number_masks(std::span<const group_mask> masks, index_t first,
                                       detail::mask_table& table,
                                       detail::buffer<detail::token_run>& cells,
                                       detail::buffer<index_t>& cell_of) {
  table.clear();
  cell_of.resize(static_cast<index_t>(masks.size()));
  for (index_t i = first; i < cell_of.size(); ++i) {
    const index_t c = table.insert(masks[static_cast<std::size_t>(i)]);
    if (c == cells.size()) cells.push_back({table.mask(c), 0, 0});
    ++cells[c].end;
    cell_of[i] = c;
  }
}

/// Which groups some query and some key have in common, and the number of keys in each of them.
inline void routing_plan::count_groups() noexcept {
  group_mask asked = 0;
  for (const detail::token_run& c : query_runs_) asked |= c.mask;
  group_sizes_ = {};
  shared_groups_ = 0;
  for (const detail::token_run& c : key_runs_)
    for (group_mask rest = c.mask & asked; rest != 0; rest &= rest - 1) {
      shared_groups_ |= rest & (~rest + 1);
      group_sizes_[static_cast<std::size_t>(std::countr_zero(rest))] += c.end;
    }
}

/// The number of queries that walk each group's list, and which other lists they walk.
inline void routing_plan::count_list_queries() noexcept {
  list_queries_ = {};
  companions_ = {};
  for (const detail::token_run& c : query_runs_) {
    const group_mask shared = c.mask & shared_groups_;
    for (group_mask rest = shared; rest != 0; rest &= rest - 1) {
      const auto g = static_cast<std::size_t>(std::countr_zero(rest));
      list_queries_[g] += c.end;
      companions_[g] |= shared;
    }
  }
}

/// Picks the layout of the least cost.
inline detail::plan_layout routing_plan::choose_layout(const detail::resolved_pattern& pattern) {
  if (shared_groups_ == 0) return detail::plan_layout::none;
  const index_t n_q = query_masks_.size(), n_k = key_masks_.size();
  const detail::layout_costs costs(pattern, n_q);
  const double tested = costs.pair_by_pair();
  double by_cell = tested, by_group = tested;

  // Panels that are filled up, and a key that is packed once for each of its groups, must stay a
  // small part of the work and of the memory.
  constexpr index_t slots_a_key = 4, panel = detail::widest_panel;
  const index_t most_slots = slots_a_key * n_k + max_groups * panel;
  index_t cell_slots = 0, list_slots = 0;
  for (const detail::token_run& c : key_runs_)
    if ((c.mask & shared_groups_) != 0) cell_slots += detail::round_up(c.end, panel);
  for (const index_t size : group_sizes_) list_slots += detail::round_up(size, panel);

  // Comparing all cells with all may not outgrow the O(n) of the rest of the plan.
  constexpr index_t tests_a_token = 64;
  if (query_runs_.size() * key_runs_.size() <= tests_a_token * (n_q + n_k)) {
    bool all_meet = true;
    double cells = costs.before_groups();
    for (const detail::token_run& q : query_runs_)
      for (const detail::token_run& k : key_runs_) {
        const bool meet = (q.mask & k.mask) != 0;
        all_meet &= meet;
        if (meet) cells += costs.walk(q.end, k.end);
      }
    if (all_meet) return detail::plan_layout::dense;
    if (cell_slots <= most_slots) by_cell = cells;
  }

  if (list_slots <= most_slots) {
    count_list_queries();
    index_t later_rows = -n_q;
    by_group = costs.before_groups();
    for (std::size_t g = 0; g < group_sizes_.size(); ++g) {
      if (list_queries_[g] == 0) continue;
      by_group += costs.walk(list_queries_[g], group_sizes_[g]);
      later_rows += list_queries_[g];
    }
    by_group += costs.lists(std::popcount(shared_groups_), later_rows, list_slots - n_k);
  }
  // Where no token has several groups, cells are lists, which are packed one by one.
  const auto is_single = [&](const detail::token_run& c) {
    return std::popcount(c.mask & shared_groups_) <= 1;
  };
  const bool single = std::all_of(query_runs_.begin(), query_runs_.end(), is_single) &&
                      std::all_of(key_runs_.begin(), key_runs_.end(), is_single);
  if (single && list_slots <= most_slots && by_cell < tested) return detail::plan_layout::groups;
  if (by_cell <= by_group && by_cell < tested) return detail::plan_layout::cells;
  return by_group < tested ? detail::plan_layout::groups : detail::plan_layout::pair_by_pair;
}

/// Turns the sizes in query_runs_ into ranges and sorts the query rows into them (stable counting
/// sort): one round.
inline void routing_plan::sort_queries_by_cell() {
  next_.resize(query_runs_.size());
  index_t total = 0;
  for (index_t c = 0; c < query_runs_.size(); ++c) {
    detail::token_run& run = query_runs_[c];
    const index_t size = run.end;
    run.begin = next_[c] = total;
    run.end = total += size;
  }
  query_order_.resize(query_masks_.size());
  for (index_t i = 0; i < query_masks_.size(); ++i) query_order_[next_[cell_of_query_[i]]++] = i;
  add_round(0);
}

/// Sorts the query rows by list, a row once for each of its groups that has keys; rows without such
/// a group come first. query_runs_ become the lists, with the one bit of their group as mask. Lists
/// one after the other that have no row in common are a round.
inline void routing_plan::sort_queries_by_group() {
  index_t without = 0;
  for (const detail::token_run& c : query_runs_)
    if ((c.mask & shared_groups_) == 0) without += c.end;
  query_runs_.clear();
  if (without > 0) query_runs_.push_back({0, 0, without});
  std::array<index_t, max_groups> next{};
  index_t total = without, first_run = 0;
  group_mask in_round = 0;
  for (std::size_t g = 0; g < list_queries_.size(); ++g) {
    if (list_queries_[g] == 0) continue;
    if ((companions_[g] & in_round) != 0) {
      add_round(first_run);
      first_run = query_runs_.size();
      in_round = 0;
    }
    next[g] = total;
    in_round |= group_mask{1} << g;
    query_runs_.push_back({group_mask{1} << g, total, total + list_queries_[g]});
    total += list_queries_[g];
  }
  add_round(first_run);
  query_order_.resize(total);
  index_t next_without = 0;
  for (index_t i = 0; i < query_masks_.size(); ++i) {
    const group_mask groups = groups_of(i);
    if (groups == 0) query_order_[next_without++] = i;
    for (group_mask rest = groups; rest != 0; rest &= rest - 1)
      query_order_[next[static_cast<std::size_t>(std::countr_zero(rest))]++] = i;
  }
}

/// Cuts query_runs_ from `first_cell` on into the tiles of a new round.
inline void routing_plan::add_round(index_t first_cell) {
  const index_t first_tile = tiles_.size();
  for (index_t c = first_cell; c < query_runs_.size(); ++c) {
    const detail::token_run& run = query_runs_[c];
    for (index_t begin = run.begin; begin < run.end; begin += detail::plan_tile_rows)
      tiles_.push_back({c, begin, (std::min)(detail::plan_tile_rows, run.end - begin)});
  }
  rounds_.push_back({first_tile, tiles_.size()});
}

/// The same for the keys from position `first` on, each cell padded to whole panels.
inline void routing_plan::sort_keys_by_cell(index_t first) {
  next_.resize(key_runs_.size());
  index_t total = 0;
  for (index_t c = 0; c < key_runs_.size(); ++c) {
    detail::token_run& run = key_runs_[c];
    const index_t size = (run.mask & shared_groups_) != 0 ? run.end : 0;
    run.begin = next_[c] = total;
    run.end = total + size;
    total += detail::round_up(size, detail::widest_panel);
  }
  key_slots_.resize(total);
  detail::fill(key_slots_.begin(), key_slots_.end(), index_t{-1});
  for (index_t j = first; j < key_masks_.size(); ++j)
    if ((key_masks_[j] & shared_groups_) != 0) key_slots_[next_[cell_of_key_[j]]++] = j;
}

/// Lists the keys from position `first` on under each of their groups, each list padded to whole
/// panels.
inline void routing_plan::sort_keys_by_group(index_t first) {
  key_runs_.clear();
  std::array<index_t, max_groups> next{};
  index_t total = 0;
  for (std::size_t g = 0; g < group_sizes_.size(); ++g) {
    if (group_sizes_[g] == 0) continue;
    next[g] = total;
    key_runs_.push_back({group_mask{1} << g, total, total + group_sizes_[g]});
    total += detail::round_up(group_sizes_[g], detail::widest_panel);
  }
  key_slots_.resize(total);
  slot_masks_.resize(total);
  detail::fill(key_slots_.begin(), key_slots_.end(), index_t{-1});
  detail::fill(slot_masks_.begin(), slot_masks_.end(), group_mask{0});
  for (index_t j = first; j < key_masks_.size(); ++j)
    for (group_mask rest = key_masks_[j] & shared_groups_; rest != 0; rest &= rest - 1) {
      const index_t slot = next[static_cast<std::size_t>(std::countr_zero(rest))]++;
      key_slots_[slot] = j;
      slot_masks_[slot] = key_masks_[j];
    }
}

/// Where each query's window cuts its lists: the same for all heads. Queries and keys of a list
/// both go up in position.
inline void routing_plan::limit_lists(const detail::resolved_pattern& pattern) {
  before_ends_.resize(query_order_.size());
  if (!pattern.causal) after_begins_.resize(query_order_.size());
  for (index_t list = 0; list < key_runs_.size(); ++list) {
    const detail::token_run &keys = key_runs_[list], &queries = list_queries(list);
    index_t before = keys.begin, after = keys.begin;
    for (index_t q = queries.begin; q < queries.end; ++q) {
      const index_t i = query_order_[q], end = pattern.distant_before(i);
      while (before < keys.end && key_slots_[before] < end) ++before;
      before_ends_[q] = before;
      if (pattern.causal) continue;
      const index_t begin = pattern.distant_after(i);
      while (after < keys.end && key_slots_[after] < begin) ++after;
      after_begins_[q] = after;
    }
  }
}

inline index_t routing_plan::allowed_pairs() const {
  return detail::count_pairs(query_masks(), key_masks(),
                             detail::resolve(pattern_, query_count(), key_count()));
}

}  // namespace FOCUS_ABI
}  // namespace focus
