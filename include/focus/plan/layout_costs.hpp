// What the layouts of a routing plan cost.
#pragma once

#include <algorithm>

#include "focus/config.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// What layouts cost, in the time that it takes to compute a score of one head, edges of tiles
/// included. The constants were fitted to times on AVX2, head_dim 64.
class layout_costs {
  static constexpr index_t strip = tile_sizes<float>::strip_rows;
  static constexpr index_t panel = tile_sizes<float>::panel;
  /// A pair that is tested costs so many times what one costs that is not.
  static constexpr double test_factor = 1.06;
  /// In scores: what a row costs when a second pass follows that over local pairs (for packing once
  /// more and handing the row over), and for each list after its first; and what it costs to pack a
  /// slot more than there are keys.
  static constexpr double second_pass = 40, another_list = 24, another_slot = 16;
  /// In scores: what a list costs, however few rows it has.
  static constexpr double any_list = 512;

 public:
  layout_costs(const resolved_pattern& pattern, index_t n_q) noexcept
      : causal_(pattern.causal), rows_(static_cast<double>(n_q)) {
    const index_t samples = (std::min)(n_q, index_t{64});
    double visible = 0, local = 0, distant = 0;
    for (index_t sample = 0; sample < samples; ++sample) {
      const index_t i = (2 * sample + 1) * n_q / (2 * samples);
      visible += static_cast<double>(pattern.visible_end(i));
      local += static_cast<double>(pattern.local(i).size() + pattern.sink_end(i));
      distant +=
          static_cast<double>(pattern.distant_before(i) + pattern.n_k - pattern.distant_after(i));
    }
    visible_ = visible / static_cast<double>(samples);
    local_ = local / static_cast<double>(samples);
    distant_share_ = distant / static_cast<double>(samples * pattern.n_k);
  }

  /// The one pass in token order that tests each pair.
  [[nodiscard]] double pair_by_pair() const noexcept {
    return test_factor * rows_ * (visible_ + panel);
  }
  /// What comes before the pairs of cells or lists: the window pass, and handing over.
  [[nodiscard]] double before_groups() const noexcept {
    return rows_ * (local_ + panel + second_pass);
  }
  /// What it costs that `rows` queries of one cell walk `keys` keys of one. Where the causal limit
  /// cuts through, a strip of queries computes for all its rows what the last of them sees, and the
  /// rows of a small cell are far apart; half a panel more is cut off at its end.
  [[nodiscard]] double walk(index_t rows, index_t keys) const noexcept {
    const auto all = static_cast<double>(keys);
    const double apart = causal_ ? all * strip / static_cast<double>(2 * rows) : 0;
    return static_cast<double>(round_up(rows, strip)) *
           ((std::min)(distant_share_ * all + apart, all) + panel / 2);
  }
  /// What lists cost beside their walks. later_rows: how often a row goes on from another list;
  /// extra_slots: packed beyond one for each key.
  [[nodiscard]] static double lists(index_t count, index_t later_rows,
                                    index_t extra_slots) noexcept {
    return any_list * static_cast<double>(count) +
           another_list * static_cast<double>((std::max)(later_rows, index_t{0})) +
           another_slot * static_cast<double>((std::max)(extra_slots, index_t{0}));
  }

 private:
  bool causal_;
  double rows_;
  // Of an average query: all keys that it sees, those that are local or sinks, and the share of all
  // keys that are distant and visible.
  double visible_, local_, distant_share_;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
