// Packs K and V: panels of the keys of some kv heads, in scratch memory.
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
  key_packer(scratch_plan& plan, index_t kv_heads, index_t slot_count, index_t head_dim,
             index_t value_dim)
      : kv_heads_(kv_heads),
        slots_(round_up(slot_count, panel)),
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
          detail::prefetch_row(k.row(kv_head, token), head_dim_);
          detail::prefetch_row(v.row(kv_head, token), value_dim_);
        }
        operand<E>::pack_key_panel(
            [&](int c) -> const TK* {
              const index_t token = token_of(p * panel + c);
              return token < 0 ? nullptr : k.row(kv_head, token);
            },
            head_dim_, keys(memory, kv_head) + p * panel * packed_keys<E>::packed_depth(head_dim_));
        nonfinite(memory, kv_head)[p] = operand<E>::pack_value_panel(
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
