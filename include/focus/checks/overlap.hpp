// Whether two strided views share an element: outputs may not overlap inputs, slices of one fused
// buffer may interleave.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/parallel.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// One dimension of the difference of two address sets: steps of `stride` bytes from `low` to
/// `high` times.
struct difference_dimension {
  std::int64_t stride = 0, low = 0, high = 0;
};

/// Up to Capacity dimensions, by falling stride.
template <std::size_t Capacity>
class difference_dimensions {
 public:
  constexpr void insert(const difference_dimension& d) noexcept {
    std::size_t at = count_++;
    for (; at > 0 && sorted_[at - 1].stride < d.stride; --at) sorted_[at] = sorted_[at - 1];
    sorted_[at] = d;
  }
  [[nodiscard]] constexpr std::span<const difference_dimension> all() const noexcept {
    return {sorted_.data(), count_};
  }
  /// The dimension of that stride, or null.
  [[nodiscard]] constexpr difference_dimension* find(std::int64_t stride) noexcept {
    for (std::size_t r = 0; r < count_; ++r)
      if (sorted_[r].stride == stride) return &sorted_[r];
    return nullptr;
  }

 private:
  std::array<difference_dimension, Capacity> sorted_{};
  std::size_t count_ = 0;
};

/// Decides whether some combination of steps lands within (-bytes_b, bytes_a) of zero.
/// Dimensions come with falling strides, so that each level leaves few candidates; a budget bounds
/// the odd layouts for which it does not.
class overlap_search {
 public:
  constexpr overlap_search(std::span<const difference_dimension> dimensions, std::int64_t bytes_a,
                           std::int64_t bytes_b) noexcept
      : dimensions_(dimensions), bytes_a_(bytes_a), bytes_b_(bytes_b) {}

  /// Not inlined: in its callers GCC 12 at -Ofast loses sight of what has been initialised.
  FOCUS_NOINLINE constexpr bool meets(std::size_t level, std::int64_t offset) noexcept {
    if (budget_-- <= 0) return false;
    if (level == dimensions_.size()) return offset < bytes_a_ && offset > -bytes_b_;
    std::int64_t reach_low = -bytes_a_ + 1, reach_high = bytes_b_ - 1;
    for (std::size_t r = level + 1; r < dimensions_.size(); ++r) {
      reach_low += dimensions_[r].stride * dimensions_[r].low;
      reach_high += dimensions_[r].stride * dimensions_[r].high;
    }
    // offset + step * stride + [reach] must be able to come back to zero.
    const difference_dimension& d = dimensions_[level];
    const std::int64_t first = (std::max)(d.low, ceil_div(-offset - reach_high, d.stride));
    const std::int64_t last = (std::min)(d.high, floor_div(-offset - reach_low, d.stride));
    for (std::int64_t step = first; step <= last; ++step)
      if (meets(level + 1, offset + step * d.stride)) return true;
    return false;
  }

 private:
  static constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) noexcept {
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
  }
  static constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept {
    return -floor_div(-a, b);
  }

  std::span<const difference_dimension> dimensions_;
  std::int64_t bytes_a_, bytes_b_;
  int budget_ = 4096;
};

/// True when a and b share a byte that can be detected; exact for nested layouts, which all common
/// ones are.
template <class A, int RankA, class B, int RankB>
bool overlaps(const tensor_view<A, RankA>& a, const tensor_view<B, RankB>& b) {
  if (a.empty() || b.empty() || a.data() == nullptr || b.data() == nullptr) return false;
  difference_dimensions<static_cast<std::size_t>(RankA + RankB)> dimensions;
  // Adds `extent` steps of `stride` bytes, forwards for a and backwards for b; equal strides share
  // a dimension.
  const auto add = [&](std::int64_t extent, std::int64_t stride, int sign) {
    if (stride == 0) return;
    if (stride < 0) stride = -stride, sign = -sign;
    if (dimensions.find(stride) == nullptr) dimensions.insert({stride, 0, 0});
    difference_dimension& d = *dimensions.find(stride);
    (sign > 0 ? d.high : d.low) += sign * (extent - 1);
  };
  constexpr auto size_a = static_cast<std::int64_t>(sizeof(A));
  constexpr auto size_b = static_cast<std::int64_t>(sizeof(B));
  // The stride of a single row may be any number: it is not to be multiplied.
  for (int r = 0; r < RankA - 1; ++r)
    if (a.extent(r) > 1) add(a.extent(r), a.stride(r) * size_a, 1);
  for (int r = 0; r < RankB - 1; ++r)
    if (b.extent(r) > 1) add(b.extent(r), b.stride(r) * size_b, -1);
  // Differences of addresses as integers: the views may belong to unrelated allocations.
  const auto address = [](const void* p) {
    return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(p));
  };
  // The innermost dimension is a run of bytes: a at x covers [x, x + bytes_a).
  const std::int64_t bytes_a = a.extent(RankA - 1) * size_a, bytes_b = b.extent(RankB - 1) * size_b;
  overlap_search search(dimensions.all(), bytes_b, bytes_a);
  return search.meets(0, address(a.data()) - address(b.data()));
}

template <class T>
tensor_view<T, 1> span_view(std::span<T> s) {
  return {s.data(), {static_cast<index_t>(s.size())}};
}

/// Refuses an output that shares an element with another argument.
template <class Out, int RankOut, class In, int RankIn>
void require_disjoint(const tensor_view<Out, RankOut>& out, const char* out_name,
                      const tensor_view<In, RankIn>& other, const char* other_name,
                      const char* function) {
  if (overlaps(out, other))
    fail_argument(function, out_name, std::string("no overlap with ") + other_name,
                  "a shared element");
}

/// Refuses an output of which two indices name the same element.
template <class Out, int Rank>
void require_distinct_elements(const tensor_view<Out, Rank>& out, const char* out_name,
                               const char* function) {
  if (out.empty()) return;
  const std::int64_t bytes = out.extent(Rank - 1) * static_cast<std::int64_t>(sizeof(Out));
  // Two different rows differ by at least one step in some dimension r, and by any number of steps
  // in the others.
  for (int r = 0; r < Rank - 1; ++r) {
    if (out.extent(r) <= 1) continue;
    difference_dimensions<static_cast<std::size_t>(Rank)> dimensions;
    for (int other = 0; other < Rank - 1; ++other) {
      const std::int64_t steps = out.extent(other) - 1;
      if (steps == 0 || out.stride(other) == 0) continue;
      const std::int64_t stride = out.stride(other) * static_cast<std::int64_t>(sizeof(Out));
      dimensions.insert({stride < 0 ? -stride : stride, other == r ? 1 : -steps, steps});
    }
    const bool repeats =
        out.stride(r) == 0 || overlap_search(dimensions.all(), bytes, bytes).meets(0, 0);
    if (repeats)
      fail_argument(function, out_name, "strides that give each element its own place",
                    std::string("strides ") + describe_shape(out.strides()));
  }
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
