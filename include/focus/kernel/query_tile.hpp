// A tile of query rows: the unit of work of a thread. It packs its queries, walks runs of packed
// keys block by block with all its strips, and hands out the finished rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/operand.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/row_prefetcher.hpp"
#include "focus/kernel/rules.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tile.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Scratch memory of the tiles of all workers.
template <class E>
class query_tile_layout {
  using A = accumulator_t<E>;
  static constexpr int panel = tile_sizes<E>::panel;
  static constexpr int padded_rows = tile_sizes<E>::padded_rows;

 public:
  query_tile_layout(scratch_plan& plan, index_t workers, index_t head_dim, index_t value_dim)
      : head_dim_(head_dim), value_dim_(value_dim), acc_stride_(round_up(value_dim, panel)) {
    scratch_plan one;
    queries_ = one.add<E>(query_rows_size<E>(head_dim_));
    acc_ = one.add<A>(padded_rows * acc_stride_);
    top_ = one.add<A>(padded_rows);
    sum_ = one.add<A>(tile_sizes<E>::row_sums * padded_rows);
    limits_ = one.add<slot_range>(padded_rows);
    scores_ = one.add<A>(tile_sizes<E>::strip_rows * tile_sizes<E>::score_stride);
    tiles_ = plan.add_each(workers, one);
  }

 private:
  template <class>
  friend class query_tile;
  index_t head_dim_, value_dim_, acc_stride_;
  scratch_array<E> queries_;
  scratch_array<A> acc_, top_, sum_, scores_;
  scratch_array<slot_range> limits_;
  worker_scratch tiles_;
};

/// to[0, count) = from[0, count), in whole vectors where they fit.
template <class A>
FOCUS_ALWAYS_INLINE void copy_elements(const A* from, index_t count, A* to) noexcept {
  constexpr int lanes = vec<A>::width;
  index_t c = 0;
  for (; c + lanes <= count; c += lanes) vec<A>::load(from + c).store(to + c);
  for (; c < count; ++c) to[c] = from[c];
}

/// Of a row's running softmax, what is not its accumulator: its maximum, in units of log2, the sum
/// of its weights, and that of the weights by which values were multiplied.
template <class A>
struct row_softmax {
  A top, sum, norm;
};

/// The output row of a running softmax, acc / norm, into `out`; zeros when nothing was seen.
template <class A, class T>
void finish_row(const A* acc, const row_softmax<A>& row, index_t value_dim, T* out) {
  constexpr int lanes = vec<A>::width;
  const vec<A> factor = vec<A>::broadcast(A{1} / row.norm);
  index_t c = 0;
  if (!is_zero(row.sum)) {
    // Adding 0 turns -0 into 0: a sum that began with underflow may have either sign.
    for (; c + lanes <= value_dim; c += lanes)
      detail::store_narrowed(fma(vec<A>::load(acc + c), factor, vec<A>::zero()), out + c, lanes);
    if (c < value_dim)
      detail::store_narrowed(fma(vec<A>::load(acc + c), factor, vec<A>::zero()), out + c,
                             value_dim - c);
    return;
  }
  // A value that came with a weight of 0 may have been infinite: zeros are written, not
  // multiplied by.
  for (; c < value_dim; c += lanes)
    detail::store_narrowed(vec<A>::zero(), out + c, (std::min<index_t>)(lanes, value_dim - c));
}
/// The logsumexp of a row that has seen something, natural logarithm.
template <class A>
[[nodiscard]] A logsumexp(const row_softmax<A>& row) {
  // A row of NaN scores alone never raises its maximum, but its sum is NaN.
  return is_nan(row.sum) ? row.sum : (row.top + std::log2(row.sum)) * ln_2<A>;
}

/// Running softmax of up to tile_rows query rows, in the scratch memory of one worker.
template <class E>
class query_tile : operand<E>::scope {
  using A = accumulator_t<E>;
  static constexpr int strip_rows = tile_sizes<E>::strip_rows;
  /// Where among its running sums that of the weights by which values were multiplied lies.
  static constexpr index_t norm_at = (tile_sizes<E>::row_sums - 1) * tile_sizes<E>::padded_rows;

 public:
  /// Rows for which there is room.
  static constexpr int padded_rows = tile_sizes<E>::padded_rows;

  query_tile(const scratch_memory& memory, const query_tile_layout<E>& layout,
             index_t worker) noexcept
      : head_dim_(layout.head_dim_),
        value_dim_(layout.value_dim_),
        acc_stride_(layout.acc_stride_) {
    const scratch_block own = layout.tiles_.of(memory, worker);
    queries_ = own[layout.queries_];
    acc_ = own[layout.acc_];
    top_ = own[layout.top_];
    sum_ = own[layout.sum_];
    limits_ = own[layout.limits_];
    scores_ = own[layout.scores_];
  }

  [[nodiscard]] index_t rows() const noexcept { return rows_; }

  /// Begins with `rows` rows that have seen nothing. row_of(r): the elements of query row r; scores
  /// are their products times `factor`.
  template <class RowOf>
  void begin(index_t rows, A factor, RowOf&& row_of) {
    take_queries(rows, factor, row_of);
    for (index_t r = 0; r < rows; ++r) clear_row(r);
  }
  /// The same, except that each row is still to be cleared, to be restored, or to see sinks.
  template <class RowOf>
  void take_queries(index_t rows, A factor, RowOf&& row_of) {
    rows_ = rows;
    ahead_ = nullptr;
    factor_.set(factor);
    operand<E>::pack_queries(rows, head_dim_, factor, row_of, queries_);
    const index_t padded = rows + strip_rows;
    fill(limits_, limits_ + padded, slot_range{});
    for (index_t r = rows; r < padded; ++r) clear_row(r);
  }
  /// Row r has seen nothing.
  void clear_row(index_t r) noexcept {
    top_[r] = lowest<A>;
    sum_[r] = sum_[r + norm_at] = A{0};
    fill(acc_ + r * acc_stride_, acc_ + (r + 1) * acc_stride_, A{0});
  }

  /// What to ask for while attending, from now on.
  void prefetch(row_prefetcher& ahead) noexcept { ahead_ = &ahead; }

  /// The slots that row r sees in the next call of attend.
  [[nodiscard]] slot_range& limit(index_t r) noexcept { return limits_[r]; }

  /// Adds the keys within the rows' limits, less those that the rules hide, to their running
  /// softmax.
  template <hiding_rules Rules = no_rules>
  void attend(const packed_keys<E>& keys, A softcap, const Rules& rules = {}) {
    attend_strips(keys,
                  [&](auto strip, const strip_state<E>& state, index_t first, slot_range block) {
                    attend_block<strip()>(state, keys, block, softcap, rules, first, scores_);
                  });
  }

  /// [strip_rows][score_stride], for the step of attend_strips.
  [[nodiscard]] A* scores() noexcept { return scores_; }

  /// The strip that begins with row `first`.
  [[nodiscard]] strip_state<E> state_of(index_t first) noexcept {
    return {queries_ + first * tile_sizes<E>::depth_chunk,
            limits_ + first,
            top_ + first,
            sum_ + first,
            acc_ + first * acc_stride_,
            acc_stride_,
            ahead_,
            factor_};
  }

  /// Walks the slots within the rows' limits block by block: step(strip size, its state, its first
  /// row, block).
  template <class Step>
  void attend_strips(const packed_keys<E>& keys, Step&& step) {
    for_each_block<E>(limits_, rows_, keys, tile_sizes<E>::block_keys, [&](slot_range block) {
      for (index_t first = 0; first < rows_; first += strip_rows)
        with_strip_rows<E>(rows_ - first,
                           [&](auto strip) { step(strip, state_of(first), first, block); });
    });
  }

  /// Output row r, acc / sum, into `out`; zeros when nothing was seen.
  template <class T>
  void finish_row(index_t r, T* out) const {
    detail::finish_row(acc_ + r * acc_stride_, softmax(r), value_dim_, out);
  }
  [[nodiscard]] bool sees_nothing(index_t r) const noexcept { return is_zero(sum_[r]); }
  /// The logsumexp of a row that has seen something, natural logarithm.
  [[nodiscard]] A logsumexp(index_t r) const { return detail::logsumexp(softmax(r)); }

  /// Its logsumexp less that of the same row in `part`, a sum over some of the same keys, at least
  /// one. The maxima cancel before anything is rounded: small differences keep their accuracy.
  [[nodiscard]] A logsumexp_above(const query_tile& part, index_t r) const {
    return ((top_[r] - part.top_[r]) + (std::log2(sum_[r]) - std::log2(part.sum_[r]))) * ln_2<A>;
  }

  /// The running softmax of row r but for its accumulator.
  [[nodiscard]] row_softmax<A> softmax(index_t r) const noexcept {
    return {top_[r], sum_[r], sum_[r + norm_at]};
  }
  [[nodiscard]] const A* accumulator(index_t r) const noexcept { return acc_ + r * acc_stride_; }
  /// Puts the running softmax of row r aside, for another tile to go on from. acc: [value_dim].
  void save_row(index_t r, A* acc, row_softmax<A>& rest) const noexcept {
    detail::copy_elements(acc_ + r * acc_stride_, value_dim_, acc);
    rest = softmax(r);
  }
  void restore_row(index_t r, const A* acc, const row_softmax<A>& rest) noexcept {
    detail::copy_elements(acc, value_dim_, acc_ + r * acc_stride_);
    top_[r] = rest.top;
    sum_[r] = rest.sum;
    sum_[r + norm_at] = rest.norm;
  }

 private:
  index_t head_dim_, value_dim_, acc_stride_;
  index_t rows_ = 0;
  [[no_unique_address]] typename operand<E>::score_factor factor_;
  E* queries_;
  A *acc_, *top_, *sum_, *scores_;
  slot_range* limits_;
  row_prefetcher* ahead_ = nullptr;
};

static_assert(walked_tile<query_tile<float>>);

/// Writes row r of a tile, which is query `row` of `head`.
template <class Arguments, class E>
void write_row(const Arguments& args, const query_tile<E>& tile, index_t r, index_t head,
               index_t row) {
  tile.finish_row(r, args.out.row(head, row));
  if (args.wants_lse()) {
    using lse_type = typename decltype(args.lse)::value_type;
    if (tile.sees_nothing(r))
      store_minus_infinity(args.lse(head, row));
    else
      args.lse(head, row) = static_cast<lse_type>(tile.logsumexp(r));
  }
}

/// Writes all rows of a tile: its row r is query row_of(r) of `head`.
template <class Arguments, class E, class RowOf>
void write_rows(const Arguments& args, const query_tile<E>& tile, index_t head, RowOf&& row_of) {
  for (index_t r = 0; r < tile.rows(); ++r) detail::write_row(args, tile, r, head, row_of(r));
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
