// What a routing plan is made of: runs of tokens, tiles of query rows, rounds of tiles.
#pragma once

#include "focus/config.hpp"
#include "focus/options.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Tokens side by side in an order that is sorted by mask, or by group, and within that by
/// position: those of one mask (a cell), or of one group (its list).
struct token_run {
  group_mask mask = 0;
  index_t begin = 0, end = 0;
};

/// Query rows [begin, begin + rows) of the sorted order, all of one cell, or of one list's part of
/// a round.
struct row_tile {
  index_t run = 0;
  index_t begin = 0, rows = 0;
};

/// How the distant pairs of a plan are laid out.
enum class plan_layout {
  none,    ///< no pair is distant: the window pass is all
  dense,   ///< every visible pair is allowed: the window pass with an unlimited window
  cells,   ///< keys sorted by mask; a query cell walks the key cells that meet it
  groups,  ///< a list of keys for each group; a query walks those of its groups, one in each round,
           ///< leaving out what it has met
  pair_by_pair  ///< keys in token order, each pair tested: cells and lists would cost more
};

/// Tasks [begin, end) of a list, none of which needs what another of them does.
struct task_range {
  index_t begin = 0, end = 0;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
