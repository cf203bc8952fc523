// The exact number of pairs that hard Focus attention computes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "focus/config.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/plan/buffer.hpp"
#include "focus/plan/mask_table.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// How many keys of each distinct mask lie in two ranges of positions that move with the query:
/// those before the window, and those behind it. Counting costs a test for each distinct mask.
class counts_by_mask {
 public:
  /// table: of the masks of keys [first, n_k), all of which are behind the window at first.
  counts_by_mask(std::span<const group_mask> key_masks, index_t first, mask_table& table)
      : key_masks_(key_masks), table_(table), before_end_(first), behind_begin_(first) {
    before_.resize(table.size()), behind_.resize(table.size());
    detail::fill(before_.begin(), before_.end(), index_t{0});
    detail::fill(behind_.begin(), behind_.end(), index_t{0});
    for (auto j = first; j < static_cast<index_t>(key_masks.size()); ++j) ++count_of(behind_, j);
  }

  /// The keys that share a group with `mask`, of [first, before_end) and [behind_begin, n_k). Both
  /// bounds go up from call to call.
  index_t count(group_mask mask, index_t before_end, index_t behind_begin) {
    for (; before_end_ < before_end; ++before_end_) ++count_of(before_, before_end_);
    for (; behind_begin_ < behind_begin; ++behind_begin_) --count_of(behind_, behind_begin_);
    index_t keys = 0;
    for (index_t c = 0; c < table_.size(); ++c)
      if ((mask & table_.mask(c)) != 0) keys += before_[c] + behind_[c];
    return keys;
  }

 private:
  index_t& count_of(buffer<index_t>& counts, index_t j) {
    return counts[table_.insert(key_masks_[static_cast<std::size_t>(j)])];
  }

  std::span<const group_mask> key_masks_;
  mask_table& table_;
  buffer<index_t> before_, behind_;
  index_t before_end_, behind_begin_;
};

/// For each group a bit for each key. Counting costs a word for each group of the query and 64
/// keys, however many distinct masks there are.
class keys_by_group {
 public:
  static constexpr index_t word_bits = 64;

  explicit keys_by_group(std::span<const group_mask> key_masks)
      : words_(ceil_div(static_cast<index_t>(key_masks.size()), word_bits)) {
    bits_.resize(max_groups * words_);
    detail::fill(bits_.begin(), bits_.end(), std::uint64_t{0});
    for (std::size_t j = 0; j < key_masks.size(); ++j)
      for (group_mask rest = key_masks[j]; rest != 0; rest &= rest - 1)
        bits_[std::countr_zero(rest) * words_ + static_cast<index_t>(j) / word_bits] |=
            std::uint64_t{1} << j % word_bits;
  }

  /// The keys of [begin, end) that share a group with `mask`.
  [[nodiscard]] index_t count(group_mask mask, index_t begin, index_t end) const noexcept {
    if (begin >= end || mask == 0) return 0;
    const std::uint64_t* rows[max_groups];
    int groups = 0;
    for (group_mask rest = mask; rest != 0; rest &= rest - 1)
      rows[groups++] = bits_.data() + std::countr_zero(rest) * words_;
    const index_t first = begin / word_bits, last = (end - 1) / word_bits;
    index_t keys = 0;
    for (index_t w = first; w <= last; ++w) {
      std::uint64_t any = 0;
      for (int g = 0; g < groups; ++g) any |= rows[g][w];
      if (w == first) any &= ~std::uint64_t{0} << begin % word_bits;
      if (w == last) any &= ~std::uint64_t{0} >> (word_bits - 1 - (end - 1) % word_bits);
      keys += std::popcount(any);
    }
    return keys;
  }

 private:
  index_t words_;
  buffer<std::uint64_t> bits_;  // [max_groups][words_]
};

/// Local pairs, sinks, and distant pairs with a group in common, each counted once.
inline index_t count_pairs(std::span<const group_mask> query_masks,
                           std::span<const group_mask> key_masks, const resolved_pattern& pattern) {
  const auto n_q = static_cast<index_t>(query_masks.size());
  const auto for_each_query = [&](auto&& distant_keys) {
    index_t pairs = 0;
    for (index_t i = 0; i < n_q; ++i) {
      const key_range local = pattern.local(i);
      const index_t sinks = pattern.sink_end(i);
      pairs += local.size() + sinks - key_range{local.begin, (std::min)(local.end, sinks)}.size() +
               distant_keys(query_masks[static_cast<std::size_t>(i)], pattern.distant_before(i),
                            (std::max)(pattern.sinks, pattern.distant_after(i)));
    }
    return pairs;
  };

  mask_table table;
  table.clear();
  index_t group_bits = 0;
  for (const group_mask mask : query_masks) group_bits += std::popcount(mask);
  // Words that would be read for the groups of an average query. With more distinct masks than
  // that, counting them is slower.
  const index_t words =
      group_bits / (std::max<index_t>)(n_q, 1) * ceil_div(pattern.n_k, keys_by_group::word_bits);
  index_t j = pattern.sinks;
  for (; j < pattern.n_k && table.size() <= words + max_groups; ++j)
    table.insert(key_masks[static_cast<std::size_t>(j)]);
  if (j == pattern.n_k) {
    counts_by_mask keys(key_masks, pattern.sinks, table);
    return for_each_query([&](group_mask mask, index_t before_end, index_t behind_begin) {
      return keys.count(mask, before_end, behind_begin);
    });
  }
  const keys_by_group keys(key_masks);
  return for_each_query([&](group_mask mask, index_t before_end, index_t behind_begin) {
    return keys.count(mask, pattern.sinks, before_end) +
           keys.count(mask, behind_begin, pattern.n_k);
  });
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
