// Rows that will be used soon, asked for while the processor multiplies.
#pragma once

#include <cstdint>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// A queue of rows of tensors, which next() asks for one by one. A tile's products call it every
/// few steps (tile_sizes::prefetch_steps), so that requests to memory keep coming and never come in
/// a burst: what the next tile takes is on its way while this one computes. Rows go to L2: L1 is
/// full of what is being multiplied.
class row_prefetcher {
 public:
  void clear() noexcept { runs_ = at_ = 0, now_ = {}; }

  /// Rows [first, first + count) of a head, or, where there is an order, rows order[first] ... of
  /// it. More runs of rows than there is room for are left out.
  template <class T>
  void add(const tensor_view<T, 3>& rows, index_t head, index_t first, index_t count,
           const index_t* order = nullptr) noexcept {
    if (count <= 0 || runs_ == most_runs) return;
    constexpr auto size = static_cast<index_t>(sizeof(T));
    run_[runs_++] = {reinterpret_cast<const char*>(rows.row(head, 0)),
                     rows.stride(1) * size,
                     rows.extent(2) * size,
                     order,
                     first,
                     first + count};
    if (runs_ == 1) now_ = run_[0];
  }

  /// Asks for the next row.
  FOCUS_ALWAYS_INLINE void next() noexcept {
#if defined(__GNUC__) || defined(__clang__)
    if (now_.first >= now_.end) {
      if (at_ + 1 >= runs_) return;
      now_ = run_[++at_];
    }
    constexpr index_t line = 64;
    const index_t row = now_.order == nullptr ? now_.first : now_.order[now_.first];
    ++now_.first;
    if (row < 0) return;  // a slot without a key
    const char* const from = now_.rows + row * now_.stride;
    for (index_t at = 0; at < now_.bytes; at += line) __builtin_prefetch(from + at, 0, 2);
#endif
  }

 private:
  static constexpr int most_runs = 8;
  struct run {
    const char* rows = nullptr;
    index_t stride = 0, bytes = 0;
    const index_t* order = nullptr;
    index_t first = 0, end = 0;
  };
  run run_[static_cast<std::size_t>(most_runs)];
  run now_;
  int runs_ = 0, at_ = 0;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
