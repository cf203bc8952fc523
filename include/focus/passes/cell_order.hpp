// The pass over a plan's cells or lists of keys.
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

/// The pass over cells: each tile of a query cell walks the key cells that meet it, or the one list
/// of its round. Sets the limits of the tile's rows and calls attend(rules) for each.
template <walked_tile Tile, class Attend>
void attend_distant(Tile& tile, const routing_plan& plan, const row_tile& rows,
                    const resolved_pattern& pattern, Attend&& attend) {
  const index_t* row = plan.query_order().data() + rows.begin;
  const group_mask mask = plan.tile_mask(rows);
  // In lists, a key that shares several groups with a query is met in the first of them.
  group_mask met[Tile::padded_rows] = {}, any_met = 0;
  if (plan.layout() == plan_layout::groups)
    for (index_t r = 0; r < rows.rows; ++r)
      any_met |= met[r] = plan.query_masks()[static_cast<std::size_t>(row[r])] & (mask - 1);
  const auto attend_cell = [&] {
    if (any_met == 0)
      attend(no_rules{});
    else
      attend(keys_met_before{met, plan.slot_masks().data()});
  };
  for (const token_run& c : plan.key_runs()) {
    if ((c.mask & mask) == 0) continue;
    limit_rows_to_prefix(tile, c, plan.key_slots(),
                         [&](index_t r) { return pattern.distant_before(row[r]); });
    attend_cell();
    if (pattern.causal) continue;
    limit_rows_to_prefix(tile, c, plan.key_slots(),
                         [&](index_t r) { return pattern.distant_after(row[r]); });
    for (index_t r = 0; r < tile.rows(); ++r) tile.limit(r) = {tile.limit(r).end, c.end};
    attend_cell();
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
