// The walks of a tile over a plan's cells or lists of keys.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

#include "focus/checks/attention_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/rules.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/options.hpp"
#include "focus/plan/cells.hpp"
#include "focus/routing_plan.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The pattern by which a plan's local pairs are computed: in the dense layout those are all.
inline resolved_pattern resolve(const routing_plan& plan, const attention_shape& s) {
  pattern_options pattern = plan.pattern();
  if (plan.layout() == plan_layout::dense) pattern.window = unlimited_window;
  return detail::resolve(pattern, s.n_q, s.n_k);
}

/// Sets the limits of a tile's rows to the slots of `keys` up to the first position that is not
/// below limit(row). positions: of the key at each slot. Rows and keys both go up in position:
/// after a search for the first row, the others walk along.
template <walked_tile Tile, class Limit>
void limit_rows_to_prefix(Tile& tile, const token_run& keys, std::span<const index_t> positions,
                          Limit&& limit) {
  const auto position = [&](index_t slot) {
    return positions[static_cast<std::size_t>(slot)];
  };
  index_t end = keys.begin;
  for (auto step =
           static_cast<index_t>(std::bit_floor(static_cast<std::uint64_t>(keys.end - keys.begin)));
       step > 0; step /= 2)
    if (end + step <= keys.end && position(end + step - 1) < limit(0)) end += step;
  for (index_t r = 0; r < tile.rows(); ++r) {
    while (end < keys.end && position(end) < limit(r)) ++end;
    tile.limit(r) = {keys.begin, end};
  }
}

/// A tile of one list's queries, whose row r is at place + r of query_order(), walks the list's
/// keys. Sets the limits of the tile's rows and calls attend(rules), once or twice.
template <walked_tile Tile, class Attend>
void attend_list(Tile& tile, const routing_plan& plan, index_t list, index_t place,
                 Attend&& attend) {
  const token_run& keys = plan.key_runs()[static_cast<std::size_t>(list)];
  const index_t* row = plan.query_order().data() + place;
  // A key that shares several groups with a query is met in the first of them.
  group_mask met[Tile::padded_rows] = {}, any_met = 0;
  for (index_t r = 0; r < tile.rows(); ++r)
    any_met |= met[r] = plan.groups_of(row[r]) & (keys.mask - 1);
  const auto attend_keys = [&] {
    if (any_met == 0)
      attend(no_rules{});
    else
      attend(keys_met_before{met, plan.slot_masks().data()});
  };
  const index_t* before = plan.before_ends().data() + place;
  for (index_t r = 0; r < tile.rows(); ++r) tile.limit(r) = {keys.begin, before[r]};
  attend_keys();
  if (plan.after_begins().empty()) return;
  const index_t* after = plan.after_begins().data() + place;
  for (index_t r = 0; r < tile.rows(); ++r) tile.limit(r) = {after[r], keys.end};
  attend_keys();
}

/// The pass over cells: each tile of a query cell walks the key cells that meet it, or that of a
/// list's queries the list. Sets the limits of the tile's rows and calls attend(rules) for each.
template <walked_tile Tile, class Attend>
void attend_distant(Tile& tile, const routing_plan& plan, const row_tile& rows,
                    const resolved_pattern& pattern, Attend&& attend) {
  const group_mask mask = plan.tile_mask(rows);
  if (plan.layout() == plan_layout::groups) {
    if (mask != 0) detail::attend_list(tile, plan, plan.list_of(rows), rows.begin, attend);
    return;
  }
  const index_t* row = plan.query_order().data() + rows.begin;
  for (const token_run& c : plan.key_runs()) {
    if ((c.mask & mask) == 0) continue;
    limit_rows_to_prefix(tile, c, plan.key_slots(),
                         [&](index_t r) { return pattern.distant_before(row[r]); });
    attend(no_rules{});
    if (pattern.causal) continue;
    limit_rows_to_prefix(tile, c, plan.key_slots(),
                         [&](index_t r) { return pattern.distant_after(row[r]); });
    for (index_t r = 0; r < tile.rows(); ++r) tile.limit(r) = {tile.limit(r).end, c.end};
    attend(no_rules{});
  }
}

/// The plan's pairs tested one by one, in token order: attend(rules), once.
template <walked_tile Tile, class Attend>
void attend_pair_by_pair(Tile& tile, const routing_plan& plan, const resolved_pattern& pattern,
                         index_t first_row, Attend&& attend) {
  group_mask query_masks[Tile::padded_rows] = {};
  copy(plan.query_masks().data() + first_row, plan.query_masks().data() + first_row + tile.rows(),
       query_masks);
  for (index_t r = 0; r < tile.rows(); ++r) tile.limit(r) = {0, pattern.visible_end(first_row + r)};
  attend(keys_without_shared_group{query_masks, plan.key_masks().data(), &pattern, first_row});
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
