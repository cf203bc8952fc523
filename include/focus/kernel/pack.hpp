// Packs K and V: panels of keys, in scratch memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "focus/config.hpp"
#include "focus/kernel/operand.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/parallel.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Areas of scratch memory for packed keys, each for those of one kv head, and what fills them.
template <class E>
class key_packer {
  static constexpr int panel = tile_sizes<E>::panel;
  static constexpr int lanes = tile_sizes<E>::lanes;
  /// Panels in a task: enough work to be worth handing out, few enough to share a short sequence
  /// among threads.
  static constexpr index_t task_panels = 8;

 public:
  /// Plans so many areas with room for `slot_count` slots (rounded up to whole panels) each.
  key_packer(scratch_plan& plan, index_t areas, index_t slot_count, index_t head_dim,
             index_t value_dim)
      : slots_(round_up(slot_count, panel)), head_dim_(head_dim), value_dim_(value_dim) {
    keys_ = plan.add<E>(areas * keys_size() + lanes);
    values_ = plan.add<E>(areas * values_size());
    nonfinite_ = plan.add<std::uint8_t>(areas * (slots_ / panel));
  }

  /// What is packed in an area.
  [[nodiscard]] packed_keys<E> head(const scratch_memory& memory, index_t area) const noexcept {
    packed_keys<E> packed;
    packed.keys = keys(memory, area), packed.values = values(memory, area);
    packed.nonfinite_values = nonfinite(memory, area);
    packed.value_panel_step = packed_keys<E>::value_stride(slots_) * panel;
    packed.head_dim = head_dim_, packed.value_dim = value_dim_;
    return packed;
  }
  /// The same, from the area's place `place` on: the slots from first_slot on. Both are multiples
  /// of panel.
  [[nodiscard]] packed_keys<E> from(const scratch_memory& memory, index_t area, index_t place,
                                    index_t first_slot) const noexcept {
    packed_keys<E> packed = head(memory, area);
    packed.keys += place * packed_keys<E>::packed_depth(head_dim_);
    packed.values += place * panel;
    packed.nonfinite_values += place / panel;
    packed.first_slot = first_slot;
    return packed;
  }

  /// Packs slots [first, end) of kv head `kv_head` into an area, from its place `place` on, a
  /// multiple of panel. token_of(slot): the token to be packed at that slot, or -1 for none.
  template <class TK, class TV, class TokenOf>
  void pack_slots(const scratch_memory& memory, index_t area, const tensor_view<const TK, 3>& k,
                  const tensor_view<const TV, 3>& v, index_t kv_head, index_t first, index_t end,
                  index_t place, TokenOf&& token_of) const {
    pack_rows(
        memory, area, first, end, place,
        [&](index_t slot) -> const TK* {
          const index_t token = token_of(slot);
          return token < 0 ? nullptr : k.row(kv_head, token);
        },
        [&](index_t slot) -> const TV* {
          const index_t token = token_of(slot);
          return token < 0 ? nullptr : v.row(kv_head, token);
        });
  }
  /// The same for keys from anywhere. key_of(slot), value_of(slot): their rows, or null.
  template <class KeyOf, class ValueOf>
  void pack_rows(const scratch_memory& memory, index_t area, index_t first, index_t end,
                 index_t place, KeyOf&& key_of, ValueOf&& value_of) const {
    using key_row = decltype(key_of(first));
    using value_row = decltype(value_of(first));
    for (; first < end; first += panel, place += panel) {
      // The next panel's keys, which may be scattered tokens.
      for (index_t slot = first + panel; slot < (std::min)(first + 2 * panel, end); ++slot) {
        detail::prefetch_row(key_of(slot), head_dim_);
        detail::prefetch_row(value_of(slot), value_dim_);
      }
      operand<E>::pack_key_panel(
          [&](int c) -> key_row { return first + c < end ? key_of(first + c) : nullptr; },
          head_dim_, keys(memory, area) + place * packed_keys<E>::packed_depth(head_dim_));
      nonfinite(memory, area)[place / panel] = operand<E>::pack_value_panel(
          [&](int c) -> value_row { return first + c < end ? value_of(first + c) : nullptr; },
          value_dim_, place, packed_keys<E>::value_stride(slots_), values(memory, area));
    }
  }

  /// Packs all heads of k and v, each into an area of its own.
  template <class TK, class TV, class TokenOf>
  void pack(const scratch_memory& memory, const tensor_view<const TK, 3>& k,
            const tensor_view<const TV, 3>& v, TokenOf&& token_of, const any_executor& exec) const {
    const index_t task_slots = task_panels * panel, tasks_a_head = ceil_div(slots_, task_slots);
    exec.parallel_for(k.extent(0) * tasks_a_head, [&](index_t task, index_t) {
      const index_t kv_head = task / tasks_a_head, first = task % tasks_a_head * task_slots;
      pack_slots(memory, kv_head, k, v, kv_head, first, (std::min)(first + task_slots, slots_),
                 first, token_of);
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
  E* keys(const scratch_memory& memory, index_t area) const noexcept {
    return memory[keys_] + area * keys_size();
  }
  E* values(const scratch_memory& memory, index_t area) const noexcept {
    return memory[values_] + area * values_size();
  }
  std::uint8_t* nonfinite(const scratch_memory& memory, index_t area) const noexcept {
    return memory[nonfinite_] + area * (slots_ / panel);
  }

  [[nodiscard]] index_t keys_size() const noexcept {
    return slots_ * packed_keys<E>::packed_depth(head_dim_);
  }
  [[nodiscard]] index_t values_size() const noexcept {
    return round_up(value_dim_, panel) * packed_keys<E>::value_stride(slots_);
  }

  index_t slots_, head_dim_, value_dim_;
  scratch_array<E> keys_, values_;
  scratch_array<std::uint8_t> nonfinite_;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
