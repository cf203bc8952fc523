// Query-side rows of a tile as value panels: for sums over the rows of a tile, which the gradients
// of its keys are.
#pragma once

#include <algorithm>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/parallel.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Query-side rows of a tile (Q, dout or assignments) in the form of value panels, rows in the
/// place of slots: [panels][stride rows][panel].
template <class E>
struct row_panels {
  static constexpr int panel = tile_sizes<E>::panel;
  static constexpr index_t stride = tile_sizes<E>::tile_rows + 1;  // as packed_keys::value_stride

  E* data = nullptr;
  index_t width = 0;       // elements of a row
  bool nonfinite = false;  // some element is NaN or infinite: even a weight of 0 may not touch it

  [[nodiscard]] static index_t size(index_t width) noexcept {
    return ceil_div(width, panel) * panel * stride;
  }
  /// Packs rows row_of(0) ... row_of(rows - 1); of operands that are not widened, zeros behind them
  /// up to whole panels of rows.
  template <class RowOf>
  void pack(index_t rows, RowOf&& row_of) {
    nonfinite = false;
    for (index_t first = 0; first < rows; first += panel) {
      const index_t count = (std::min<index_t>)(panel, rows - first);
      if constexpr (std::is_same_v<E, accumulator_t<E>>) {
        array_of<decltype(row_of(0)), panel> some;
        for (index_t r = 0; r < count; ++r) some[r] = row_of(first + r);
        nonfinite |= detail::spread_over_panels(some, count, width, first, stride, data);
      } else {
        static_assert(tile_sizes<E>::tile_rows % panel == 0);
        nonfinite |= operand<E>::pack_value_panel(
            [&](int r) { return r < count ? row_of(first + r) : nullptr; }, width, first, stride,
            data);
      }
    }
  }
  /// Panel p from row `row` on.
  [[nodiscard]] const E* at(index_t p, index_t row) const noexcept {
    return data + (p * stride + row) * panel;
  }
};

/// Where products with transposed weights are made, of operands that take more than registers for
/// it.
template <class E>
struct transposition_scratch {
  E* weights = nullptr;              // operand<E>::transposed_size elements
  accumulator_t<E>* sums = nullptr;  // operand<E>::transposed_sums_size elements
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
