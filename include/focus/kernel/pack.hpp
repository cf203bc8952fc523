// Copies of Q, K and V in the order in which the tile products read them, widened to the type of
// the sums. (Those of bfloat16 that is multiplied as it is are in kernel/amx.hpp and
// kernel/bfmmla.hpp; where the type of what is packed matters beside that of the sums, it is called
// E.)
//
//   query rows   of a tile: [chunks of the depth][rows][depth_chunk], whose elements a tile product
//                broadcasts
//   key panel    `panel` keys side by side (K^T): [depth][panel], which it loads as vectors
//   value panel  `panel` columns of V: [slots][panel], likewise
//
// A slot is a place in a packed order of keys: token order for local pairs, that of cells or lists
// for distant ones. Slots that pad a run of keys to a whole panel hold zeros.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/scratch.hpp"
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

/// Calls f with the size of a strip, as a constant, that has room for `rows` rows: the last strip
/// of a tile is filled up to one of a few sizes with rows that see nothing.
template <class E, class F>
FOCUS_ALWAYS_INLINE void with_strip_rows(index_t rows, F&& f) {
  constexpr int full = tile_sizes<E>::strip_rows, half = tile_sizes<E>::half_strip;
  constexpr bool halves_only = tile_sizes<E>::smallest_strip == half;
  if (rows > half)
    f(std::integral_constant<int, full>{});
  else if (rows > 2 || halves_only)
    f(std::integral_constant<int, half>{});
  else if constexpr (!halves_only) {
    if (rows == 2)
      f(std::integral_constant<int, 2>{});
    else
      f(std::integral_constant<int, 1>{});
  }
}

/// Elements of a tile's packed query rows.
template <class E>
constexpr index_t query_rows_size(index_t depth) noexcept {
  constexpr int chunk = tile_sizes<E>::depth_chunk;
  return ceil_div(depth, chunk) * chunk * tile_sizes<E>::padded_rows;
}

/// Packs the query rows row_of(0) ... row_of(rows - 1), times `factor`; zeros fill up the last
/// strip.
template <class A, class RowOf>
void pack_query_rows(index_t rows, index_t depth, A factor, RowOf&& row_of, A* to) {
  constexpr int lanes = vec<A>::width, chunk = tile_sizes<A>::depth_chunk;
  static_assert(chunk % lanes == 0);
  const vec<A> scale = vec<A>::broadcast(factor);
  for (index_t first = 0; first < depth; first += chunk, to += tile_sizes<A>::padded_rows * chunk) {
    const index_t width = (std::min<index_t>)(chunk, depth - first);
    for (index_t r = 0; r < rows; ++r) {
      constexpr index_t ahead = 6;
      if (r + ahead < rows) prefetch_row(row_of(r + ahead) + first, width);
      const auto* from = row_of(r) + first;
      using T = std::remove_cvref_t<decltype(*from)>;
      A* row = to + r * chunk;
      index_t c = 0;
      for (; c + lanes <= width; c += lanes)
        (detail::load_widened<T, A>(from + c) * scale).store(row + c);
      if (c < width)
        (detail::load_widened_partial<T, A>(from + c, width - c) * scale).store(row + c);
    }
    fill(to + rows * chunk, to + round_up(rows, tile_sizes<A>::strip_rows) * chunk, A{0});
  }
}

/// Spreads `count` rows (zeros for those that are null) over panels: element c of rows[r] goes to
/// panel c / panel, row first + r of its `stride` rows; zeros fill up the last panel. True when an
/// element is NaN or infinite.
template <class A, class T>
FOCUS_NOINLINE bool spread_over_panels(const T* const* rows, index_t count, index_t width,
                                       index_t first, index_t stride, A* panels) {
  constexpr int panel = tile_sizes<A>::panel, lanes = tile_sizes<A>::lanes,
                vectors = tile_sizes<A>::vectors;
  vec<A> poison[vectors];  // 0 * x is NaN just for NaN and infinite x
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

/// One key panel, of the rows row_of(0) ... row_of(panel - 1); null: none.
template <class A, class RowOf>
void pack_key_panel(RowOf&& row_of, index_t depth, A* to) {
  pack_rows_as_columns<tile_sizes<A>::panel>(row_of, depth, to);
}

/// The same rows' values, from slot `first` on, in all value panels. True when an element is NaN or
/// infinite.
template <class A, class RowOf>
bool pack_value_panel(RowOf&& row_of, index_t width, index_t first, index_t stride, A* panels) {
  constexpr int panel = tile_sizes<A>::panel;
  decltype(row_of(0)) rows[panel];
  for (int c = 0; c < panel; ++c) rows[c] = row_of(c);
  return detail::spread_over_panels(rows, panel, width, first, stride, panels);
}

/// The packed K and V of one kv head.
template <class E>
struct packed_keys {
  static constexpr int panel = tile_sizes<E>::panel;

  const E* keys = nullptr;    // [slots / panel][packed_depth][panel]
  const E* values = nullptr;  // [value_panels][slots + 1][panel]
  /// For each key panel: some value in it is NaN or infinite, so that even a weight of 0 may not
  /// touch it.
  const std::uint8_t* nonfinite_values = nullptr;  // [slots / panel]
  index_t slots = 0;
  index_t head_dim = 0, value_dim = 0;

  [[nodiscard]] index_t value_panels() const noexcept { return ceil_div(value_dim, panel); }
  [[nodiscard]] const E* key_panel(index_t slot) const noexcept {
    return keys + slot * packed_depth(head_dim);
  }
  [[nodiscard]] const E* value_panel(index_t p, index_t slot) const noexcept {
    return values + (p * value_stride(slots) + slot) * panel;
  }
  /// Rows of a value panel in memory. The panels of one key are written together: one row more than
  /// there are slots, whose number is often a power of two, keeps them in different cache sets.
  [[nodiscard]] static constexpr index_t value_stride(index_t slots) noexcept { return slots + 1; }
  [[nodiscard]] static constexpr index_t packed_depth(index_t head_dim) noexcept {
    return round_up(head_dim, tile_sizes<E>::depth_step);
  }
};

/// Packs the keys of some kv heads: where in the scratch memory they lie, and the loop that fills
/// it.
template <class E>
class key_packer {
  static constexpr int panel = tile_sizes<E>::panel;
  static constexpr int lanes = tile_sizes<E>::lanes;
  /// Panels in a task: enough work to be worth handing out, few enough to share a short sequence
  /// among threads.
  static constexpr index_t task_panels = 8;

 public:
  /// Plans room for `slots` (rounded up to whole panels) of each of up to kv_heads heads.
  key_packer(scratch_plan& plan, index_t kv_heads, index_t slots, index_t head_dim,
             index_t value_dim)
      : kv_heads_(kv_heads),
        slots_(round_up(slots, panel)),
        head_dim_(head_dim),
        value_dim_(value_dim) {
    keys_ = plan.add<E>(kv_heads_ * keys_size() + lanes);
    values_ = plan.add<E>(kv_heads_ * values_size());
    nonfinite_ = plan.add<std::uint8_t>(kv_heads_ * (slots_ / panel));
  }

  [[nodiscard]] packed_keys<E> head(const scratch_memory& memory, index_t kv_head) const noexcept {
    return {keys(memory, kv_head),
            values(memory, kv_head),
            nonfinite(memory, kv_head),
            slots_,
            head_dim_,
            value_dim_};
  }

  /// Packs all heads of k and v. token_of(slot): the token to be packed at that slot, or -1 for
  /// none.
  template <class TK, class TV, class TokenOf>
  void pack(const scratch_memory& memory, const tensor_view<const TK, 3>& k,
            const tensor_view<const TV, 3>& v, TokenOf&& token_of, const any_executor& exec) const {
    const index_t panels = slots_ / panel, tasks_a_head = ceil_div(panels, task_panels);
    exec.parallel_for(k.extent(0) * tasks_a_head, [&](index_t task, index_t) {
      const index_t kv_head = task / tasks_a_head;
      const index_t first = task % tasks_a_head * task_panels;
      const index_t last = (std::min)(first + task_panels, panels);
      for (index_t p = first; p < last; ++p) {
        // The next panel's keys, which may be scattered tokens.
        for (index_t slot = (p + 1) * panel; p + 1 < last && slot < (p + 2) * panel; ++slot) {
          const index_t token = token_of(slot);
          if (token < 0) continue;
          prefetch_row(k.row(kv_head, token), head_dim_);
          prefetch_row(v.row(kv_head, token), value_dim_);
        }
        pack_key_panel(
            [&](int c) -> const TK* {
              const index_t token = token_of(p * panel + c);
              return token < 0 ? nullptr : k.row(kv_head, token);
            },
            head_dim_, keys(memory, kv_head) + p * panel * packed_keys<E>::packed_depth(head_dim_));
        nonfinite(memory, kv_head)[p] = pack_value_panel(
            [&](int c) -> const TV* {
              const index_t token = token_of(p * panel + c);
              return token < 0 ? nullptr : v.row(kv_head, token);
            },
            value_dim_, p* panel, packed_keys<E>::value_stride(slots_), values(memory, kv_head));
      }
    });
  }

  /// Packs all heads of k and v, token t at slot t.
  template <class TK, class TV>
  void pack_in_token_order(const scratch_memory& memory, const tensor_view<const TK, 3>& k,
                           const tensor_view<const TV, 3>& v, const any_executor& exec) const {
    pack(
        memory, k, v, [n = k.extent(1)](index_t slot) { return slot < n ? slot : -1; }, exec);
  }

 private:
  E* keys(const scratch_memory& memory, index_t kv_head) const noexcept {
    return memory[keys_] + kv_head * keys_size();
  }
  E* values(const scratch_memory& memory, index_t kv_head) const noexcept {
    return memory[values_] + kv_head * values_size();
  }
  std::uint8_t* nonfinite(const scratch_memory& memory, index_t kv_head) const noexcept {
    return memory[nonfinite_] + kv_head * (slots_ / panel);
  }

  [[nodiscard]] index_t keys_size() const noexcept {
    return slots_ * packed_keys<E>::packed_depth(head_dim_);
  }
  [[nodiscard]] index_t values_size() const noexcept {
    return round_up(value_dim_, panel) * packed_keys<E>::value_stride(slots_);
  }

  index_t kv_heads_, slots_, head_dim_, value_dim_;
  scratch_array<E> keys_, values_;
  scratch_array<std::uint8_t> nonfinite_;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
