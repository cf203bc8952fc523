// kv_cache: what is in it, its memory, and that it stays as it was when a call fails.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/kv_cache.hpp"
#include "focus/options.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"

namespace test_kv_cache {
namespace {

using namespace oracle;

/// K, V and masks of n tokens.
template <class T = float>
struct token_rows {
  guarded_tensor<T, 3> k, v;
  std::vector<group_mask> masks;

  token_rows(index_t kv_heads, index_t n, index_t d, index_t d_v)
      : k({kv_heads, n, d}, layout::padded), v({kv_heads, n, d_v}, layout::tokens_first) {}
  token_rows(index_t kv_heads, index_t n, index_t d, index_t d_v, grouping how, int groups,
             int top_k)
      : token_rows(kv_heads, n, d, d_v) {
    generator random(7);
    k.fill([&] { return random.normal(); });
    v.fill([&] { return random.normal(); });
    masks = make_masks(n, how, groups, top_k, 3);
  }
};

template <class T>
focus::tensor_view<T, 3> tokens(const focus::tensor_view<T, 3>& x, index_t first, index_t end) {
  return {x.row(0, first), {x.extent(0), end - first, x.extent(2)}, x.strides()};
}

/// Appends tokens [first, end).
template <class Cache, class T, class... Exec>
void append(Cache& cache, const token_rows<T>& rows, index_t first, index_t end, Exec&&... exec) {
  cache.append(tokens(rows.k.view(), first, end), tokens(rows.v.view(), first, end),
               std::span(rows.masks)
                   .subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(end - first)),
               exec...);
}

/// Whether the cache holds just the first tokens of `rows`.
template <class T>
bool holds(const focus::kv_cache<T>& cache, const token_rows<T>& rows, index_t size) {
  if (cache.size() != size) return false;
  token_rows<T> read(cache.kv_heads(), size, cache.head_dim(), cache.value_dim());
  read.masks.resize(static_cast<std::size_t>(size));
  cache.read(0, read.k.view(), read.v.view(), read.masks);
  for (index_t t = 0; t < size; ++t) {
    if (read.masks[static_cast<std::size_t>(t)] != rows.masks[static_cast<std::size_t>(t)])
      return false;
    for (index_t h = 0; h < cache.kv_heads(); ++h)
      if (!std::equal(read.k.view().row(h, t), read.k.view().row(h, t) + cache.head_dim(),
                      rows.k.view().row(h, t)) ||
          !std::equal(read.v.view().row(h, t), read.v.view().row(h, t) + cache.value_dim(),
                      rows.v.view().row(h, t)))
        return false;
  }
  return read.k.guards_hold() && read.v.guards_hold();
}

TEST_CASE("a cache holds what was appended and not truncated") {
  for (const grouping how : {grouping::balanced, grouping::scattered, grouping::one_group}) {
    const token_rows<> rows(2, 500, 5, 3, how, 7, 2);
    focus::kv_cache<float> cache(2, 5, 3);
    CHECK(holds(cache, rows, 0));
    index_t size = 0;
    generator random(5);
    for (int round = 0; round < 60; ++round) {
      const index_t to = (std::min)(size + random.below(40), index_t{500});
      append(cache, rows, size, to);
      size = random.below(3) == 0 ? random.below(to + 1) : to;
      cache.truncate(size);
      REQUIRE(holds(cache, rows, size));
    }
    append(cache, rows, size, 500, thread_executor(3));
    CHECK(holds(cache, rows, 500));
    cache.truncate(0);
    CHECK(holds(cache, rows, 0));
    append(cache, rows, 0, 0);
    CHECK(cache.size() == 0);
    cache.append(focus::tensor_view<const float, 3>(nullptr, {2, 0, 5}),
                 focus::tensor_view<const float, 3>(nullptr, {2, 0, 3}), std::vector<group_mask>{});
    CHECK(cache.size() == 0);
  }
}

TEST_CASE("part of a cache can be read") {
  const token_rows<> rows(1, 50, 4, 4, grouping::balanced, 3, 1);
  focus::kv_cache<float> cache(1, 4, 4);
  append(cache, rows, 0, 50);
  token_rows<> read(1, 10, 4, 4);
  read.masks.resize(10);
  cache.read(33, read.k.view(), read.v.view(), read.masks);
  for (index_t t = 0; t < 10; ++t) {
    CHECK(read.k.view()(0, t, 2) == rows.k.view()(0, 33 + t, 2));
    CHECK(read.masks[static_cast<std::size_t>(t)] == rows.masks[static_cast<std::size_t>(33 + t)]);
  }
}

TEST_CASE("rows are rounded to what a cache keeps") {
  const token_rows<> rows(2, 40, 6, 6, grouping::balanced, 3, 1);
  focus::kv_cache<focus::bfloat16> cache(2, 6, 6);
  append(cache, rows, 0, 40);
  token_rows<focus::bfloat16> read(2, 40, 6, 6);
  read.masks.resize(40);
  cache.read(0, read.k.view(), read.v.view(), read.masks);
  for (index_t t = 0; t < 40; ++t)
    for (index_t c = 0; c < 6; ++c)
      CHECK(read.k.view()(1, t, c) == focus::bfloat16(rows.k.view()(1, t, c)));
}

TEST_CASE("8-bit rows are off by at most 1 / 254 of their largest element") {
  const index_t d = 33;
  token_rows<> rows(1, 6, d, d, grouping::balanced, 1, 1);
  for (index_t c = 0; c < d; ++c) {
    rows.k.view()(0, 1, c) = 0;
    rows.k.view()(0, 2, c) *= 1e-42f;  // subnormal
    rows.k.view()(0, 3, c) *= 1e37f;
    rows.k.view()(0, 4, c) = c == 7 ? -3.0f : 1e-6f;
  }
  rows.k.view()(0, 5, 3) = static_cast<float>(infinity);
  rows.v.view()(0, 5, 3) = static_cast<float>(not_a_number);
  focus::kv_cache<std::int8_t> cache(1, d, d);
  append(cache, rows, 0, 6);
  token_rows<> read(1, 6, d, d);
  read.masks.resize(6);
  cache.read(0, read.k.view(), read.v.view(), read.masks);
  for (index_t t = 0; t < 5; ++t) {
    float largest = 0;
    for (index_t c = 0; c < d; ++c) largest = (std::max)(largest, std::abs(rows.k.view()(0, t, c)));
    for (index_t c = 0; c < d; ++c) {
      INFO("row " << t << ", column " << c);
      const double off = std::abs(static_cast<double>(read.k.view()(0, t, c)) -
                                  static_cast<double>(rows.k.view()(0, t, c)));
      CHECK(off <= static_cast<double>(largest) / 254 * (1 + 254 * 0x1p-23) + 1e-36);
    }
  }
  for (index_t c = 0; c < d; ++c) {
    CHECK(std::isnan(read.k.view()(0, 5, c)));
    CHECK(std::isnan(read.v.view()(0, 5, c)));
  }
  // Worked out by hand: largest 127, scale 1.
  token_rows<> whole(1, 1, 4, 1, grouping::balanced, 1, 1);
  const std::array<float, 4> numbers{127, -126.6f, 0.4f, 63.5f}, kept{127, -127, 0, 64};
  std::copy(numbers.begin(), numbers.end(), whole.k.view().row(0, 0));
  focus::kv_cache<std::int8_t> small(1, 4, 1);
  append(small, whole, 0, 1);
  token_rows<> back(1, 1, 4, 1);
  back.masks.resize(1);
  small.read(0, back.k.view(), back.v.view(), back.masks);
  for (index_t c = 0; c < 4; ++c)
    CHECK(back.k.view()(0, 0, c) == kept[static_cast<std::size_t>(c)]);
}

/// Bytes of a cache of n tokens over those of K and V.
double overhead(index_t n, int groups, int top_k, grouping how) {
  const index_t heads = 2, d = 64;
  focus::kv_cache<float> cache(heads, d, d);
  const token_rows<> rows(heads, 1, d, d, grouping::balanced, 1, 1);
  for (const group_mask mask : make_masks(n, how, groups, top_k, 9))
    cache.append(rows.k.view(), rows.v.view(), std::array{mask});
  return static_cast<double>(cache.memory_bytes()) / static_cast<double>(n * heads * 2 * d * 4);
}

TEST_CASE("memory is little more than K and V") {
  for (const index_t n : {4096, 5000, 9000}) {
    INFO("n " << n);
    CHECK(overhead(n, 1, 1, grouping::balanced) <= 1.15);
    CHECK(overhead(n, 8, 1, grouping::balanced) <= 1.15);
    CHECK(overhead(n, 16, 2, grouping::drawn) <= 1.15);
    CHECK(overhead(n, 64, 1, grouping::balanced) <= 1.15);
    CHECK(overhead(n, 64, 4, grouping::drawn) <= 1.3);
    CHECK(overhead(n, 64, 4, grouping::scattered) <= 1.3);
  }
}

TEST_CASE("a cache is as before when memory runs out or a body throws") {
  for (const grouping how : {grouping::balanced, grouping::scattered}) {
    const token_rows<> rows(2, 600, 4, 4, how, 9, 2);
    long failures = 0;
    for (long allowed = 0;; ++allowed) {
      focus::kv_cache<float> cache(2, 4, 4);
      append(cache, rows, 0, 100);
      bool failed = false;
      allocations_left = allowed;
      try {
        append(cache, rows, 100, 600);
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      allocations_left = -1;
      REQUIRE(holds(cache, rows, failed ? 100 : 600));
      if (!failed) break;
      ++failures;
      append(cache, rows, 100, 600);
      REQUIRE(holds(cache, rows, 600));
    }
    CHECK(failures > 2);

    focus::kv_cache<float> cache(2, 4, 4);
    append(cache, rows, 0, 30);
    CHECK_THROWS_AS(append(cache, rows, 30, 500, throwing_executor{1}), throwing_executor::error);
    CHECK(holds(cache, rows, 30));
  }
}

TEST_CASE("copies and moves: what fails changes nothing, what is left is empty") {
  const token_rows<> rows(2, 300, 4, 4, grouping::scattered, 9, 2);
  focus::kv_cache<float> cache(2, 4, 4), other(2, 4, 4);
  append(cache, rows, 0, 300);
  append(other, rows, 0, 7);
  for (long allowed = 0;; ++allowed) {
    bool failed = false;
    allocations_left = allowed;
    try {
      other = cache;
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
    REQUIRE(holds(other, rows, failed ? 7 : 300));
    REQUIRE(holds(cache, rows, 300));
    if (!failed) break;
  }
  focus::kv_cache<float> moved = std::move(other);
  CHECK(holds(moved, rows, 300));
  CHECK(other.size() == 0);  // NOLINT: what is left can be used
  append(other, rows, 0, 50);
  CHECK(holds(other, rows, 50));
  moved = std::move(other);
  CHECK(holds(moved, rows, 50));
}

TEST_CASE("an append allocates now and then, and not again what was truncated") {
  const token_rows<> rows(2, 2000, 8, 8, grouping::balanced, 8, 1);
  focus::kv_cache<float> cache(2, 8, 8);
  append(cache, rows, 0, 2000);
  cache.truncate(100);
  CHECK(allocations_of([&] { append(cache, rows, 100, 1900); }) == 0);
}

TEST_CASE("bad arguments are refused") {
  CHECK(refusal("kv_heads", [] { focus::kv_cache<float>(-1, 4, 4); }) == "");
  CHECK(refusal("head_dim", [] { focus::kv_cache<float>(1, -4, 4); }) == "");
  CHECK(refusal("value_dim", [] { focus::kv_cache<float>(1, 4, index_t{1} << 40); }) == "");
  CHECK(refusal("window", [] { focus::kv_cache<float>(1, 4, 4, {.window = -2}); }) == "");
  CHECK(refusal("query_offset", [] { focus::kv_cache<float>(1, 4, 4, {.query_offset = 3}); }) ==
        "");
  const token_rows<> rows(2, 10, 4, 5, grouping::balanced, 2, 1);
  focus::kv_cache<float> cache(2, 4, 5);
  append(cache, rows, 0, 3);
  const auto k = rows.k.view(), v = rows.v.view();
  const std::vector<group_mask>& masks = rows.masks;
  CHECK(refusal("k", [&] { cache.append(tokens(k, 0, 9), v, masks); }) == "");
  CHECK(refusal("k", [&] { cache.append(v, v, masks); }) == "");
  CHECK(refusal("v", [&] { cache.append(k, k, masks); }) == "");
  CHECK(refusal("k", [&] {
          cache.append(focus::tensor_view<const float, 3>(nullptr, {2, 10, 4}), v, masks);
        }) == "");
  CHECK(refusal("size", [&] { cache.truncate(-1); }) == "");
  CHECK(refusal("size", [&] { cache.truncate(4); }) == "");
  token_rows<> read(2, 3, 4, 5);
  read.masks.resize(3);
  CHECK(refusal("first", [&] { cache.read(-1, read.k.view(), read.v.view(), read.masks); }) == "");
  CHECK(refusal("masks", [&] { cache.read(1, read.k.view(), read.v.view(), read.masks); }) == "");
  CHECK(holds(cache, rows, 3));
}

}  // namespace
}  // namespace test_kv_cache
