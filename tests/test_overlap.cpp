// Whether views share elements, against the addresses themselves.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "catch.hpp"
#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/overlap.hpp"
#include "focus/tensor_view.hpp"
#include "oracle.hpp"

namespace test_overlap {
namespace {

using focus::index_t;
using focus::matrix_view;
using focus::tensor_view;
using focus::detail::overlaps;
using oracle::generator;

/// Calls f with the address of each byte of each element.
template <class T, int Rank, class F>
void for_each_byte(const tensor_view<T, Rank>& view, F&& f) {
  std::array<index_t, static_cast<std::size_t>(Rank)> index{};
  if (view.empty()) return;
  for (;;) {
    std::intptr_t at = reinterpret_cast<std::intptr_t>(view.data());
    for (std::size_t r = 0; r < index.size(); ++r)
      at += index[r] * view.strides()[r] * static_cast<std::intptr_t>(sizeof(T));
    for (std::size_t byte = 0; byte < sizeof(T); ++byte) f(at + static_cast<std::intptr_t>(byte));
    std::size_t r = index.size();
    while (r > 0 && ++index[r - 1] == view.extents()[r - 1]) index[--r] = 0;
    if (r == 0) return;
  }
}

template <class A, int RankA, class B, int RankB>
bool share_a_byte(const tensor_view<A, RankA>& a, const tensor_view<B, RankB>& b) {
  std::set<std::intptr_t> bytes;
  for_each_byte(a, [&](std::intptr_t at) { bytes.insert(at); });
  bool shared = false;
  for_each_byte(b, [&](std::intptr_t at) { shared = shared || bytes.contains(at); });
  return shared;
}

template <class T, int Rank>
bool each_byte_once(const tensor_view<T, Rank>& a) {
  std::set<std::intptr_t> bytes;
  bool once = true;
  for_each_byte(a, [&](std::intptr_t at) { once = once && bytes.insert(at).second; });
  return once;
}

template <class T, int Rank>
bool has_distinct_elements(const tensor_view<T, Rank>& a) {
  try {
    focus::detail::require_distinct_elements(a, "out", "f");
    return true;
  } catch (const focus::invalid_argument&) {
    return false;
  }
}

alignas(64) std::array<double, 512> memory;

template <class T, int Rank>
tensor_view<T, Rank> random_view(generator& random, index_t largest_extent,
                                 index_t largest_stride) {
  std::array<index_t, static_cast<std::size_t>(Rank)> extents{}, strides{};
  for (std::size_t r = 0; r < extents.size(); ++r) {
    extents[r] = 1 + random.below(largest_extent);
    strides[r] = random.below(2 * largest_stride + 1) - largest_stride;
  }
  strides.back() = 1;
  T* const middle =
      reinterpret_cast<T*>(memory.data()) + memory.size() * sizeof(double) / sizeof(T) / 2;
  return {middle + random.below(41) - 20, extents, strides};
}

template <class T, int Rank>
std::string describe(const tensor_view<T, Rank>& a) {
  std::ostringstream text;
  text << "at " << reinterpret_cast<std::intptr_t>(a.data()) % 4096 << " extents "
       << focus::detail::describe_shape(a.extents()) << " strides "
       << focus::detail::describe_shape(a.strides());
  return text.str();
}

template <class A, int RankA, class B, int RankB>
void check_random(std::uint64_t seed, int count, index_t largest_extent, index_t largest_stride) {
  generator random(seed);
  int shared_count = 0;
  for (int c = 0; c < count; ++c) {
    const auto a = random_view<A, RankA>(random, largest_extent, largest_stride);
    const auto b = random_view<B, RankB>(random, largest_extent, largest_stride);
    const bool shared = share_a_byte(a, b);
    shared_count += shared;
    INFO(describe(a) << " and " << describe(b));
    if (overlaps(a, b) != shared || overlaps(b, a) != shared) FAIL("shared " << shared);
    if (has_distinct_elements(a) != each_byte_once(a)) FAIL("elements of the first");
  }
  // The cases are of both kinds.
  CHECK(shared_count > count / 20);
  CHECK(shared_count < count - count / 20);
}

}  // namespace

TEST_CASE("overlaps: what the addresses say, for random layouts") {
  check_random<float, 1, float, 1>(1, 2000, 20, 1);
  check_random<float, 2, float, 2>(2, 3000, 4, 30);
  check_random<float, 3, float, 3>(3, 3000, 3, 40);
  check_random<float, 3, float, 2>(4, 2000, 4, 25);
  check_random<double, 2, float, 3>(5, 2000, 3, 30);
  check_random<std::uint8_t, 2, float, 2>(6, 2000, 4, 25);
  check_random<std::uint16_t, 3, std::uint64_t, 2>(7, 2000, 3, 20);
}

TEST_CASE("overlaps: nothing overlaps an empty view or a null one") {
  float x[4] = {};
  const matrix_view<float> all(x, {2, 2});
  CHECK(!overlaps(all, matrix_view<float>(x, {0, 2})));
  CHECK(!overlaps(matrix_view<float>(x, {2, 0}), all));
  CHECK(!overlaps(all, matrix_view<float>(nullptr, {2, 2})));
  CHECK(overlaps(all, all));
}

TEST_CASE("overlaps: the slices of a fused QKV buffer interleave") {
  const index_t tokens = 50, heads = 4, kv_heads = 2, d = 8, row = (heads + 2 * kv_heads) * d;
  std::vector<float> fused(static_cast<std::size_t>(tokens * row));
  const auto slice = [&](index_t first_head, index_t count) {
    return tensor_view<float, 3>(fused.data() + first_head * d, {count, tokens, d}, {d, row, 1});
  };
  const auto q = slice(0, heads), k = slice(heads, kv_heads), v = slice(heads + kv_heads, kv_heads);
  CHECK(!overlaps(q, k));
  CHECK(!overlaps(k, v));
  CHECK(!overlaps(v, q));
  CHECK(overlaps(q, slice(heads - 1, kv_heads)));
  CHECK(overlaps(slice(1, 1), q));
  CHECK(has_distinct_elements(q));
}

TEST_CASE("overlaps: large layouts are decided at once") {
  // Addresses only: nothing is there, and nothing is read.
  const index_t n = index_t{1} << 20;
  const auto at = [](index_t element) {
    return reinterpret_cast<float*>((std::uintptr_t{1} << 40) +
                                    static_cast<std::uintptr_t>(element) * sizeof(float));
  };
  const tensor_view<float, 3> a(at(0), {64, n, 128}, {128, 64 * 128 * 2, 1});
  const tensor_view<float, 3> between(at(64 * 128), {64, n, 128}, {128, 64 * 128 * 2, 1});
  const tensor_view<float, 3> one_off(at(64 * 128 - 1), {64, n, 128}, {128, 64 * 128 * 2, 1});
  CHECK(!overlaps(a, between));
  CHECK(overlaps(a, one_off));
  CHECK(has_distinct_elements(a));
}

TEST_CASE("require_disjoint names both arguments") {
  std::vector<float> x(8);
  const std::span<float> first = std::span(x).first(5), last = std::span(x).last(4);
  try {
    focus::detail::require_disjoint(focus::detail::span_view(first), "out",
                                    focus::detail::span_view(last), "in", "f");
    FAIL("was not refused");
  } catch (const focus::invalid_argument& e) {
    CHECK(std::string(e.what()) ==
          "focus::f: out: expected no overlap with in, got a shared element");
  }
  CHECK_NOTHROW(focus::detail::require_disjoint(focus::detail::span_view(first), "out",
                                                focus::detail::span_view(last.last(3)), "in", "f"));
}

TEST_CASE("require_distinct_elements: rows that share memory are no output") {
  std::vector<float> x(100);
  CHECK(!has_distinct_elements(matrix_view<float>(x.data(), {2, 4}, {0, 1})));
  CHECK(!has_distinct_elements(matrix_view<float>(x.data(), {2, 4}, {3, 1})));
  CHECK(has_distinct_elements(matrix_view<float>(x.data(), {2, 4}, {4, 1})));
  CHECK(has_distinct_elements(matrix_view<float>(x.data() + 50, {2, 4}, {-4, 1})));
  CHECK(has_distinct_elements(matrix_view<float>(x.data(), {1, 4}, {0, 1})));
  CHECK(!has_distinct_elements(tensor_view<float, 3>(x.data(), {2, 2, 4}, {4, 4, 1})));
  CHECK(has_distinct_elements(matrix_view<float>(nullptr, {0, 4}, {0, 1})));
}

// The undefined-behaviour sanitizer sees to it that they are not multiplied either.
TEST_CASE("overlap: strides that have no meaning may be any number") {
  constexpr index_t most = (std::numeric_limits<index_t>::max)();
  std::vector<float> x(100);
  for (const index_t wild : {most, -most - 1}) {
    const tensor_view<float, 3> a(x.data(), {1, 2, 4}, {wild, 4, 1});
    const tensor_view<float, 3> b(x.data() + 4, {2, 1, 4}, {20, wild, 1});
    CHECK(overlaps(a, b));
    CHECK(has_distinct_elements(a));
    CHECK(!overlaps(a, matrix_view<float>(x.data() + 8, {1, 4}, {wild, 1})));
    const tensor_view<float, 3> empty(x.data(), {3, 0, 4}, {wild, wild, 1});
    CHECK(focus::detail::heads_slice(empty, 2, 1).empty());
    CHECK(focus::detail::sequence_slice(empty, 2).empty());
    CHECK(!overlaps(a, empty));
  }
}

}  // namespace test_overlap
