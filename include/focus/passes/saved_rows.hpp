// Where the running softmax of query rows lies while other tiles are at work.
#pragma once

#include <type_traits>

#include "focus/config.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/query_tile.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The running softmax of the rows of some heads, in numbered areas of n_q rows. Accumulators are
/// kept in the output rows where they can be: what is written last is then written to a line that
/// is in the cache, and no other memory is gone through.
template <class E>
class saved_rows {
  using A = accumulator_t<E>;

 public:
  /// areas: one for each head that is computed at a time. in_out: whether accumulators are left in
  /// place.
  saved_rows(scratch_plan& scratch, index_t areas, index_t n_q, index_t value_dim, bool in_out)
      : n_q_(n_q), value_dim_(value_dim) {
    rest_ = scratch.add<row_softmax<A>>(areas * n_q);
    acc_ = scratch.add<A>(in_out ? 0 : areas * n_q * value_dim);
  }

  /// Row r of the tile, which is query i of `head`.
  template <class Arguments>
  void save(const scratch_memory& memory, const Arguments& args, const query_tile<E>& tile,
            index_t r, index_t area, index_t head, index_t i) const noexcept {
    tile.save_row(r, acc(memory, args, area, head, i), memory[rest_][area * n_q_ + i]);
  }
  template <class Arguments>
  void restore(const scratch_memory& memory, const Arguments& args, query_tile<E>& tile, index_t r,
               index_t area, index_t head, index_t i) const noexcept {
    tile.restore_row(r, acc(memory, args, area, head, i), memory[rest_][area * n_q_ + i]);
  }
  /// Asks for a row that will be restored, or written where it is kept.
  template <class Arguments>
  void prefetch(const scratch_memory& memory, const Arguments& args, index_t area, index_t head,
                index_t i) const noexcept {
    detail::prefetch_row(args.out.row(head, i), value_dim_);
    if constexpr (!keeps_in_out<Arguments>)
      detail::prefetch_row(acc(memory, args, area, head, i), value_dim_);
  }

 private:
  template <class Arguments>
  static constexpr bool keeps_in_out =
      std::is_same_v<typename decltype(Arguments::out)::value_type, A>&& std::is_same_v<E, A>;

  template <class Arguments>
  A* acc(const scratch_memory& memory, const Arguments& args, index_t area, index_t head,
         index_t i) const noexcept {
    if constexpr (keeps_in_out<Arguments>)
      return args.out.row(head, i);
    else
      return memory[acc_] + (area * n_q_ + i) * value_dim_;
  }

  index_t n_q_, value_dim_;
  scratch_array<row_softmax<A>> rest_;  // [areas][n_q]
  scratch_array<A> acc_;                // [areas][n_q][value_dim]
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
