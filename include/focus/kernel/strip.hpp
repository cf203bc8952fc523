// Tiles of query rows, and strips: the rows of a tile that go through a register block together.
#pragma once

#include <concepts>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/kernel/row_prefetcher.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Half-open range of slots.
struct slot_range {
  index_t begin = 0, end = 0;
};

/// A tile of query rows as passes see it: they set which slots its rows see, and let it attend to
/// them.
template <class T>
concept walked_tile = requires(T& tile, const T& as_it_is, index_t row) {
  { T::padded_rows } -> std::convertible_to<index_t>;  // rows for which there is room
  { as_it_is.rows() } -> std::same_as<index_t>;
  { tile.limit(row) } -> std::same_as<slot_range&>;
};

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

/// How operands of type E are packed and multiplied: kernel/operand.hpp.
template <class E>
struct operand;

/// Sums of the weights of a row: as many as tile_sizes::row_sums says.
template <class E>
struct weight_sums {
  accumulator_t<E> of[tile_sizes<E>::row_sums];
};

/// The running softmax of the rows of a strip, and what they may see of the keys at hand.
template <class E>
struct strip_state {
  using A = accumulator_t<E>;
  const E* query;           // its first row in the tile's packed query rows
  const slot_range* limit;  // [rows]
  A* top;                   // [rows] running maximum of the scores; lowest: nothing seen yet
  A* sum;                   // [row_sums][padded_rows] running sums of 2^(score - top)
  A* acc;                   // [rows][acc_stride] running sum of 2^(score - top) * value
  index_t acc_stride;
  row_prefetcher* ahead = nullptr;  // what else to ask for while multiplying
  [[no_unique_address]] typename operand<E>::score_factor factor = {};

  /// sum = rescale * sum + sums of more weights, for row r.
  void add_weights(int r, A rescale, const weight_sums<E>& sums) const noexcept {
    for (int i = 0; i < tile_sizes<E>::row_sums; ++i) {
      A& running = sum[i * tile_sizes<E>::padded_rows + r];
      running = running * rescale + sums.of[i];
    }
  }
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
