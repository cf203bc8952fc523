// The distinct masks of a sequence of tokens.
#pragma once

#include <cstdint>

#include "focus/config.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/options.hpp"
#include "focus/plan/buffer.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

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
}  // namespace FOCUS_ABI
}  // namespace focus
