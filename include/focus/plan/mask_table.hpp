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
///
/// Open addressing in a table of a power of two that is never more than half full. Masks have
/// structure (few bits set, all of them high), so all bits are mixed. Whoever knows the mixing can
/// still choose masks that meet in one place: a mask that finds too many places taken changes the
/// seed, and all are placed anew. The numbers do not depend on any of this.
class mask_table {
 public:
  void clear() {
    if (slots_.empty()) slots_.resize(first_capacity);
    masks_.clear();
    seed_ = 0, most_probes_ = first_most_probes;
    empty_slots();
  }
  /// The number of `mask`, a new one if it has not been seen.
  index_t insert(group_mask mask) {
    if (2 * (masks_.size() + 1) > slots_.size()) {
      slots_.resize(2 * slots_.size());
      place_all();
    }
    slot* s = find(mask);
    while (s == nullptr) {
      change_seed();
      s = find(mask);
    }
    if (s->number < 0) {
      *s = {mask, masks_.size()};
      masks_.push_back(mask);
    }
    return s->number;
  }
  [[nodiscard]] index_t size() const noexcept { return masks_.size(); }
  [[nodiscard]] group_mask mask(index_t number) const noexcept { return masks_[number]; }

 private:
  static constexpr index_t first_capacity = 256;
  /// Half full and well mixed, a table of 2^20 places makes one mask in 10^9 look at more.
  static constexpr index_t first_most_probes = 64;
  struct slot {
    group_mask mask = 0;
    index_t number = -1;
  };

  /// The place of `mask`, its own or an empty one; null where too many are taken.
  slot* find(group_mask mask) noexcept {
    const auto last = static_cast<std::uint64_t>(slots_.size() - 1);
    std::uint64_t at = mixed(mask ^ seed_);
    for (index_t probe = 0; probe < most_probes_; ++probe, ++at) {
      slot& s = slots_[static_cast<index_t>(at & last)];
      if (s.number < 0 || s.mask == mask) return &s;
    }
    return nullptr;
  }
  /// A bijection in which each bit of the result hangs on all bits of x (the finalizer of
  /// MurmurHash3, with Stafford's constants).
  static std::uint64_t mixed(std::uint64_t x) noexcept {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  void change_seed() noexcept {
    seed_ = mixed(seed_ + 0x9e3779b97f4a7c15u);
    most_probes_ *= 2;  // an end to it, whatever comes
    place_all();
  }
  /// Places all masks anew, with other seeds where some do not find a place.
  void place_all() noexcept {
    empty_slots();
    for (index_t i = 0; i < masks_.size(); ++i) {
      slot* const s = find(masks_[i]);
      if (s == nullptr) return change_seed();
      *s = {masks_[i], i};
    }
  }
  void empty_slots() noexcept { detail::fill(slots_.begin(), slots_.end(), slot{}); }

  buffer<slot> slots_;
  buffer<group_mask> masks_;
  std::uint64_t seed_ = 0;
  index_t most_probes_ = first_most_probes;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
