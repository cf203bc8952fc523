// The forms in which copies of Q, K and V lie, in the order in which the tile products read them.
// Those of operands that are widened to the type of the sums:
//
//   query rows   of a tile: [chunks of the depth][rows][depth_chunk], whose elements a tile product
//                broadcasts
//   key panel    `panel` keys side by side (K^T): [depth][panel], which it loads as vectors
//   value panel  `panel` columns of V: [slots][panel], likewise
//
// (Those of bfloat16 that is multiplied as it is are in kernel/amx.hpp and kernel/bfmmla.hpp.)
//
// A slot is a place in a packed order of keys: token order for local pairs, that of cells or lists
// for distant ones. Slots that pad a run of keys to a whole panel hold zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "focus/config.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Asks for a row of `width` elements that will be read soon. Rows of a cell lie apart in memory,
/// where no hardware looks ahead.
template <class T>
FOCUS_ALWAYS_INLINE void prefetch_row([[maybe_unused]] const T* row,
                                      [[maybe_unused]] index_t width) noexcept {
#if defined(__GNUC__) || defined(__clang__)
  constexpr index_t line = 64;
  if (row == nullptr) return;
  const char* const first = reinterpret_cast<const char*>(row);
  for (index_t at = 0; at < width * static_cast<index_t>(sizeof(T)); at += line)
    __builtin_prefetch(first + at);
#endif
}

/// to[t * Columns + c] = rows[c][t] for t < depth, c < Columns. Where a row is null, its
/// column is filled with numbers that nobody reads (zeros when all are null). Whole vectors are
/// stored, so up to lanes - 1 elements behind the last one are overwritten: `to` needs that slack.
template <int Columns, class A, class T>
FOCUS_NOINLINE void pack_columns(const T* const (&given_rows)[static_cast<std::size_t>(Columns)],
                                 index_t depth, A* to) {
  constexpr int lanes = vec<A>::width;
  constexpr int blocks = (Columns + lanes - 1) / lanes;
  const T* any = nullptr;
  for (const T* row : given_rows)
    if (row != nullptr) any = row;
  if (any == nullptr) return fill(to, to + depth * Columns, A{0});
  const T* rows[static_cast<std::size_t>(blocks * lanes)];
  for (int c = 0; c < blocks * lanes; ++c)
    rows[c] = c < Columns && given_rows[c] != nullptr ? given_rows[c] : any;

  // In rising order of t and c: what one vector writes beyond its columns, the next one corrects.
  index_t t = 0;
  for (; t + lanes <= depth; t += lanes) {
    vec<A> block[static_cast<std::size_t>(blocks)][static_cast<std::size_t>(lanes)];
    static_for<blocks>([&](auto b) FOCUS_LAMBDA_INLINE {
      static_for<lanes>([&](auto l) FOCUS_LAMBDA_INLINE {
        block[b][l] = detail::load_widened<T, A>(rows[b * lanes + l] + t);
      });
      transpose(block[b]);
    });
    static_for<lanes>([&](auto l) FOCUS_LAMBDA_INLINE {
      static_for<blocks>([&](auto b) FOCUS_LAMBDA_INLINE {
        block[b][l].store(to + (t + l) * Columns + b * lanes);
      });
    });
  }
  // One by one: nothing behind a row may be read.
  for (; t < depth; ++t)
    for (int c = 0; c < Columns; ++c)
      to[t * Columns + c] = static_cast<A>(detail::widen(rows[c][t]));
}

/// The same, from row_of(0) ... row_of(Columns - 1).
template <int Columns, class A, class RowOf>
void pack_rows_as_columns(RowOf&& row_of, index_t depth, A* to) {
  decltype(row_of(0)) rows[static_cast<std::size_t>(Columns)];
  for (int c = 0; c < Columns; ++c) rows[c] = row_of(c);
  pack_columns<Columns>(rows, depth, to);
}

/// Elements of a tile's packed query rows.
template <class E>
constexpr index_t query_rows_size(index_t depth) noexcept {
  constexpr int chunk = tile_sizes<E>::depth_chunk;
  return ceil_div(depth, chunk) * chunk * tile_sizes<E>::padded_rows;
}

/// Spreads `count` rows (zeros for those that are null) over panels: element c of rows[r] goes to
/// panel c / panel, row first + r of its `stride` rows; zeros fill up the last panel. True when an
/// element is NaN or infinite.
template <class A, class T>
FOCUS_NOINLINE bool spread_over_panels(const T* const* rows, index_t count, index_t width,
                                       index_t first, index_t stride, A* panels) {
  constexpr int panel = tile_sizes<A>::panel, lanes = tile_sizes<A>::lanes,
                vectors = tile_sizes<A>::vectors;
  array_of<vec<A>, vectors> poison;  // 0 * x is NaN just for NaN and infinite x
  static_for<vectors>([&](auto v) FOCUS_LAMBDA_INLINE { poison[v] = vec<A>::zero(); });
  for (index_t r = 0; r < count; ++r) {
    A* to = panels + (first + r) * panel;
    for (index_t column = 0; column < width; column += panel, to += stride * panel) {
      const index_t there = rows[r] == nullptr ? 0 : width - column;
      static_for<vectors>([&](auto v) FOCUS_LAMBDA_INLINE {
        const index_t left = there - v * lanes;
        const vec<A> x =
            left >= lanes ? detail::load_widened<T, A>(rows[r] + column + v * lanes)
            : left > 0    ? detail::load_widened_partial<T, A>(rows[r] + column + v * lanes, left)
                          : vec<A>::zero();
        poison[v] = fma(x, vec<A>::zero(), poison[v]);
        x.store(to + v * lanes);
      });
    }
  }
  vec<A> all = poison[0];
  for (int v = 1; v < vectors; ++v) all = all + poison[v];
  return is_nan(reduce_add(all));
}

/// Packed K and V of one kv head. V may also be read where it lies: `read_values`.
template <class E>
struct packed_keys {
  static constexpr int panel = tile_sizes<E>::panel;

  const E* keys = nullptr;    // [slots / panel][packed_depth][panel]
  const E* values = nullptr;  // [value_panels][slots + 1][panel], or rows of V
  /// For each key panel: some value in it is NaN or infinite, so that even a weight of 0 may not
  /// touch it. Null where V is not packed: then nobody knows.
  const std::uint8_t* nonfinite_values = nullptr;  // [slots / panel]
  /// Elements from the values of one slot to those of the next, and from panel to panel.
  index_t value_step = panel, value_panel_step = 0;
  index_t head_dim = 0, value_dim = 0;
  /// What is packed begins with this slot, a multiple of panel.
  index_t first_slot = 0;
  /// Where the blocks begin in which a tile takes slots: at whole numbers of blocks from first_slot
  /// on, so that a row's bits do not depend on the rows beside it; or else where the tile's rows
  /// do.
  bool blocks_from_first = false;

  /// Has V read where it lies: row 0 is that of first_slot.
  void read_values(const E* rows, index_t stride, index_t width) noexcept {
    values = rows, nonfinite_values = nullptr;
    value_step = stride, value_panel_step = panel, value_dim = width;
  }

  [[nodiscard]] index_t value_panels() const noexcept { return ceil_div(value_dim, panel); }
  [[nodiscard]] const E* key_panel(index_t slot) const noexcept {
    return keys + (slot - first_slot) * packed_depth(head_dim);
  }
  /// A slot's values in panel p.
  [[nodiscard]] const E* value_panel(index_t p, index_t slot) const noexcept {
    return values + p * value_panel_step + (slot - first_slot) * value_step;
  }
  /// Whether some value of slots [begin, end) may be NaN or infinite.
  [[nodiscard]] bool may_be_nonfinite(index_t begin, index_t end) const noexcept {
    if (nonfinite_values == nullptr) return true;
    for (index_t p = (begin - first_slot) / panel; p < ceil_div(end - first_slot, panel); ++p)
      if (nonfinite_values[p] != 0) return true;
    return false;
  }
  /// Rows of a value panel in memory. The panels of one key are written together: one row more than
  /// there are slots, whose number is often a power of two, keeps them in different cache sets.
  [[nodiscard]] static constexpr index_t value_stride(index_t slot_count) noexcept {
    return slot_count + 1;
  }
  [[nodiscard]] static constexpr index_t packed_depth(index_t head_dim) noexcept {
    return round_up(head_dim, tile_sizes<E>::depth_step);
  }
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
