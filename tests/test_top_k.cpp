// The k best groups: ties, NaN, infinities, all k and K.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "catch.hpp"
#include "focus/reference/routing.hpp"
#include "focus/top_k.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"

namespace test_top_k {
namespace {

using namespace oracle;
using masks = std::vector<group_mask>;

template <class T = float>
group_mask top(const std::vector<double>& values, int k) {
  std::vector<T> row;
  for (const double x : values) row.push_back(static_cast<T>(x));
  masks mask(1);
  focus::top_k_groups(
      focus::matrix_view<const T>(row.data(), {1, static_cast<index_t>(row.size())}), k, mask);
  return mask[0];
}

/// Values with many ties, NaN, infinities, zeros of both signs and subnormal numbers.
template <class T>
guarded_tensor<T, 2> awkward_rows(index_t n, index_t groups, layout memory, std::uint64_t seed) {
  generator random(seed);
  guarded_tensor<T, 2> rows({n, groups}, memory);
  rows.fill([&]() -> double {
    switch (random.below(12)) {
      case 0:
        return not_a_number;
      case 1:
        return infinity;
      case 2:
        return -infinity;
      case 3:
        return 0.0;
      case 4:
        return -0.0;
      case 5:
        return -not_a_number;
      case 6:
        return 1e-41;
      case 7:
        return -1e-41;
      default:
        return static_cast<double>(random.below(7)) - 3;
    }
  });
  return rows;
}

template <class T>
void check_against_textbook(index_t groups, int k, layout memory) {
  const index_t n = 50;
  const guarded_tensor<T, 2> rows =
      awkward_rows<T>(n, groups, memory, static_cast<std::uint64_t>(100 * groups + k));
  masks got(static_cast<std::size_t>(n)), expected(static_cast<std::size_t>(n));
  focus::top_k_groups(rows.view(), k, got);
  focus::reference::top_k_groups(rows.view(), k, expected);
  INFO("K " << groups << ", k " << k);
  CHECK(got == expected);
  for (const group_mask mask : got) CHECK(std::popcount(mask) == k);
}

}  // namespace

TEST_CASE("top_k_groups: by hand") {
  CHECK(top({0.1, 0.7, 0.2}, 1) == 0b010);
  CHECK(top({0.1, 0.7, 0.2}, 2) == 0b110);
  CHECK(top({0.1, 0.7, 0.2}, 3) == 0b111);
  CHECK(top({-3, -1, -2}, 1) == 0b010);
  CHECK(top({5}, 1) == 1);
}

TEST_CASE("top_k_groups: ties go to the lower group") {
  CHECK(top({0.5, 0.5, 0.5}, 1) == 0b001);
  CHECK(top({0.5, 0.5, 0.5}, 2) == 0b011);
  CHECK(top({0.0, -0.0, 1.0}, 2) == 0b101);
  CHECK(top({-0.0, 0.0, 1.0}, 2) == 0b101);
  CHECK(top({0, 1, 0, 1, 1}, 2) == 0b01010);
}

TEST_CASE("top_k_groups: NaN ranks last, infinities by their value") {
  CHECK(top({not_a_number, -infinity, not_a_number}, 1) == 0b010);
  CHECK(top({not_a_number, -infinity, not_a_number}, 2) == 0b011);
  CHECK(top({not_a_number, not_a_number, not_a_number}, 2) == 0b011);
  CHECK(top({-not_a_number, not_a_number}, 1) == 0b01);
  CHECK(top({1e30, infinity, infinity, -infinity}, 3) == 0b0111);
  CHECK(top<double>({not_a_number, -infinity, -1e308, infinity}, 3) == 0b1110);
}

TEST_CASE("top_k_groups: 64 groups") {
  std::vector<double> many(64, 0.0);
  many[63] = 1;
  CHECK(top(many, 1) == group_mask{1} << 63);
  CHECK(top(many, 2) == ((group_mask{1} << 63) | 1));
  CHECK(top(many, 64) == ~group_mask{0});
}

TEST_CASE("top_k_groups: the textbook's masks") {
  for (const index_t groups : {1, 2, 3, 4, 7, 8, 9, 16, 17, 33, 64})
    for (const int k : {1, 2, 3, 4, 8, 16, 63, 64}) {
      if (k > groups) continue;
      check_against_textbook<float>(groups, k, layout::heads_first);
      check_against_textbook<double>(groups, k, layout::padded);
      check_against_textbook<focus::bfloat16>(groups, k, layout::misaligned);
      check_against_textbook<focus::float16>(groups, k, layout::padded);
    }
}

TEST_CASE("top_k_groups: no tokens, and no allocation") {
  CHECK_NOTHROW(
      focus::top_k_groups(focus::matrix_view<float>(nullptr, {0, 4}), 2, std::span<group_mask>()));
  const guarded_tensor<float, 2> rows = awkward_rows<float>(30, 8, layout::heads_first, 1);
  masks out(30);
  CHECK(allocations_of([&] { focus::top_k_groups(rows.view(), 2, out); }) == 0);
}

TEST_CASE("top_k_groups: bad arguments are refused before anything is written") {
  const std::vector<float> values(65 * 2, 1.0f);
  masks out(2, 99);
  const focus::matrix_view<const float> rows(values.data(), {2, 4});
  const auto refusal_of = [&](const std::string& argument, focus::matrix_view<const float> a, int k,
                              std::span<group_mask> m) {
    return refusal(argument, [&] { focus::top_k_groups(a, k, m); });
  };
  for (const int k : {-1, 0, 5}) CHECK(refusal_of("k", rows, k, out).empty());
  CHECK(refusal_of("assignment", {values.data(), {2, 65}}, 1, out).empty());
  CHECK(refusal_of("assignment", {values.data(), {2, 0}}, 1, out).empty());
  CHECK(refusal_of("assignment", {nullptr, {2, 4}}, 1, out).empty());
  CHECK(refusal_of("masks", rows, 1, std::span(out).first(1)).empty());
  CHECK(refusal_of("masks", rows, 1, {}).empty());
  const focus::matrix_view<const double> aliased(reinterpret_cast<const double*>(out.data()),
                                                 {2, 1});
  CHECK(refusal("masks", [&] { focus::top_k_groups(aliased, 1, out); }).empty());
  CHECK(out == masks{99, 99});
}

}  // namespace test_top_k
