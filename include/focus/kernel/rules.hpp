// Rules: which of the keys within a row's limits are hidden from it all the same.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>

#include "focus/config.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/options.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Rules say which of the keys within a row's limits are hidden all the same.
template <class R, int Rows = tile_sizes<float>::strip_rows>
concept hiding_rules = requires(const R& rules, index_t first_row, index_t base, index_t count,
                                float* scores, index_t row, index_t slot) {
  // Sets the scores of hidden keys to `lowest`, in slots [base, base + count) for the rows of a
  // strip that begins with row `first_row` of its tile; returns whether there may have been any.
  { rules.template hide<Rows>(first_row, base, count, scores) } -> std::same_as<bool>;
  // The same for one pair, row of the tile and slot.
  { rules.hides(row, slot) } -> std::same_as<bool>;
};

/// Hides no key.
struct no_rules {
  template <int Rows, class A>
  bool hide(index_t, index_t, index_t, A*) const noexcept {
    return false;
  }
  [[nodiscard]] bool hides(index_t, index_t) const noexcept { return false; }
};

/// Which keys a row does not see, by whether their groups and `mask` have any in common.
enum class hidden_keys { meeting, disjoint };

/// Sets the scores of those of `count` keys to `lowest`.
template <hidden_keys Hidden, class A>
void hide_by_groups(const group_mask* key_masks, group_mask mask, index_t count,
                    A* scores) noexcept {
  constexpr int lanes = vec<A>::width;
  constexpr bool hides_meeting = Hidden == hidden_keys::meeting;
  index_t j = 0;
  if constexpr (requires {
                  store_where_groups<hides_meeting>(scores, key_masks, mask, count, A{});
                }) {
    for (; j < count; j += lanes)
      store_where_groups<hides_meeting>(scores + j, key_masks + j, mask,
                                        (std::min<index_t>)(lanes, count - j), lowest<A>);
    return;
  }
  const vec<A> hidden = vec<A>::broadcast(lowest<A>);
  for (; j + lanes <= count; j += lanes) {
    const vec<A> score = vec<A>::load(scores + j);
    where_disjoint(key_masks + j, mask, hides_meeting ? score : hidden,
                   hides_meeting ? hidden : score)
        .store(scores + j);
  }
  for (; j < count; ++j)
    if (((key_masks[j] & mask) != 0) == hides_meeting) scores[j] = lowest<A>;
}

/// Keys in any of some groups, which each row has of its own, are hidden from it.
struct keys_met_before {
  const group_mask* excluded;   // of the tile's rows; the last strip's are all there, whether its
                                // rows exist or not
  const group_mask* key_masks;  // [slots]

  template <int Rows, class A>
  bool hide(index_t first_row, index_t base, index_t count, A* scores) const noexcept {
    for (index_t r = 0; r < Rows; ++r, scores += tile_sizes<A>::score_stride)
      if (excluded[first_row + r] != 0)
        hide_by_groups<hidden_keys::meeting>(key_masks + base, excluded[first_row + r], count,
                                             scores);
    return true;
  }
  [[nodiscard]] bool hides(index_t row, index_t slot) const noexcept {
    return (key_masks[slot] & excluded[row]) != 0;
  }
};

/// Slots are positions; pairs that are neither local nor sinks are hidden when they have no group
/// in common.
struct keys_without_shared_group {
  const group_mask* query_masks;  // of the tile's rows; the last strip's are all there, whether its
                                  // rows exist or not
  const group_mask* key_masks;    // [n_k]
  const resolved_pattern* pattern;
  index_t tile_row;  // the query that row 0 of the tile is

  template <int Rows, class A>
  bool hide(index_t first_row, index_t base, index_t count, A* scores) const noexcept {
    for (index_t r = 0; r < Rows; ++r, scores += tile_sizes<A>::score_stride) {
      const key_range local = pattern->local(tile_row + first_row + r);
      const index_t sinks = pattern->sink_end(tile_row + first_row + r);
      const group_mask mask = query_masks[first_row + r];
      if (local.empty()) {
        hide_row(mask, sinks, base + count, base, scores);
      } else {
        hide_row(mask, sinks, (std::min)(local.begin, base + count), base, scores);
        hide_row(mask, (std::max)(local.end, sinks), base + count, base, scores);
      }
    }
    return true;
  }
  [[nodiscard]] bool hides(index_t row, index_t slot) const noexcept {
    const key_range local = pattern->local(tile_row + row);
    return slot >= pattern->sink_end(tile_row + row) && (slot < local.begin || slot >= local.end) &&
           (query_masks[row] & key_masks[slot]) == 0;
  }

 private:
  /// Hides what shares no group with `mask` in slots [begin, end); those before base are not in
  /// `scores`.
  template <class A>
  void hide_row(group_mask mask, index_t begin, index_t end, index_t base,
                A* scores) const noexcept {
    const index_t first = (std::max)(begin, base);
    if (first >= end) return;
    hide_by_groups<hidden_keys::disjoint>(key_masks + first, mask, end - first,
                                          scores + (first - base));
  }
};

/// Each key is marked by the queries that see it; each query has some rows of the tile.
struct keys_of_other_queries {
  const std::uint64_t* seen_by;  // [slots], a bit for each query
  index_t rows_a_query;

  template <int Rows, class A>
  bool hide(index_t first_row, index_t base, index_t count, A* scores) const noexcept {
    for (index_t r = 0; r < Rows; ++r, scores += tile_sizes<A>::score_stride)
      hide_by_groups<hidden_keys::disjoint>(seen_by + base, bit_of(first_row + r), count, scores);
    return true;
  }
  [[nodiscard]] bool hides(index_t row, index_t slot) const noexcept {
    return (seen_by[slot] & bit_of(row)) == 0;
  }

 private:
  /// Rows that fill up the last strip have the bit of no query, or of any.
  [[nodiscard]] std::uint64_t bit_of(index_t row) const noexcept {
    return std::uint64_t{1} << (row / rows_a_query & 63);
  }
};

static_assert(hiding_rules<keys_of_other_queries> && hiding_rules<no_rules> &&
              hiding_rules<keys_met_before> && hiding_rules<keys_without_shared_group>);

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
