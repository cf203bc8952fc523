// Attention states merged: the textbook's values, exact copies, aliasing, and what is refused.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/merge.hpp"
#include "focus/parallel.hpp"
#include "focus/reference/attention.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"

namespace test_merge {
namespace {

using namespace oracle;

constexpr index_t heads = 2;

template <class T, class L>
struct state {
  guarded_tensor<T, 3> out;
  guarded_tensor<L, 2> lse;

  state(index_t n, index_t d, layout memory)
      : out({heads, n, d}, memory), lse({heads, n}, memory) {}

  /// Made-up values; every third row is empty from `first_empty` on, and holds NaN.
  void fill(std::uint64_t seed, index_t first_empty) {
    generator random(seed);
    out.fill([&] { return random.normal(); });
    lse.fill([&] { return 5 * random.normal(); });
    for (index_t h = 0; h < heads; ++h)
      for (index_t i = first_empty; i < lse.view().extent(1); i += 3) {
        lse.view()(h, i) = static_cast<L>(-infinity);
        for (index_t c = 0; c < out.view().extent(2); ++c)
          out.view()(h, i, c) = narrowed<T>(not_a_number);
      }
  }
};

/// out and lse in double, by the textbook.
template <class A, class B>
state<double, double> truth(const A& a, const B& b) {
  const auto [h, n, d] = a.out.view().extents();
  const std::vector<double> out_a = a.out.values(), out_b = b.out.values(), lse_a = a.lse.values(),
                            lse_b = b.lse.values();
  state<double, double> merged(n, d, layout::heads_first);
  focus::reference::merge_attention_states(
      focus::tensor_view<const double, 3>(out_a.data(), {h, n, d}),
      focus::matrix_view<const double>(lse_a.data(), {h, n}),
      focus::tensor_view<const double, 3>(out_b.data(), {h, n, d}),
      focus::matrix_view<const double>(lse_b.data(), {h, n}), merged.out.view(), merged.lse.view());
  return merged;
}

bool within(const std::vector<double>& got, const std::vector<double>& expected, double relative) {
  if (got.size() != expected.size()) return false;
  for (std::size_t x = 0; x < got.size(); ++x)
    if (got[x] != expected[x] &&
        !(std::abs(got[x] - expected[x]) <= relative * (1 + std::abs(expected[x]))))
      return false;
  return true;
}

template <class TA, class TB, class TOut, class L = float>
void check_values(index_t n, index_t d, layout memory) {
  INFO("n " << n << ", d " << d << ", layout " << static_cast<int>(memory));
  state<TA, L> a(n, d, memory);
  state<TB, L> b(n, d, memory);
  a.fill(1, 0), b.fill(2, 1);
  // Rows 0, 3, 6 ... are empty in a, 1, 4, 7 ... in b, and some in both.
  for (index_t i = 0; i < n; i += 9) b.lse.view()(1, i) = static_cast<L>(-infinity);
  const state<double, double> expected = truth(a, b);
  const auto merge = [&](int threads) {
    state<TOut, L> merged(n, d, memory);
    focus::merge_attention_states(a.out.view(), a.lse.view(), b.out.view(), b.lse.view(),
                                  merged.out.view(), merged.lse.view(), thread_executor(threads));
    return merged;
  };
  const state<TOut, L> merged = merge(1);
  CHECK(merged.out.guards_hold());
  CHECK(merged.lse.guards_hold());
  CHECK(within(merged.out.values(), expected.out.values(), 4 * epsilon<TOut>()));
  CHECK(within(merged.lse.values(), expected.lse.values(), 4 * epsilon<L>()));
  for (const int threads : {2, 3}) {
    CHECK(merge(threads).out.same_bits(merged.out));
    CHECK(merge(threads).lse.same_bits(merged.lse));
  }
}

}  // namespace

TEST_CASE("merge_attention_states: the textbook's values") {
  for (const layout memory :
       {layout::heads_first, layout::tokens_first, layout::padded, layout::misaligned})
    for (const index_t n : {0, 1, 40, 130})
      for (const index_t d : {0, 1, 7, 8, 64}) {
        check_values<float, float, float>(n, d, memory);
        check_values<double, double, double>(n, d, memory);
        check_values<float, focus::bfloat16, focus::float16>(n, d, memory);
      }
  check_values<float, float, float, double>(20, 33, layout::padded);
  check_values<double, double, double, double>(20, 33, layout::padded);
  check_values<focus::float16, focus::float16, focus::float16>(20, 33, layout::padded);
  check_values<engine_bfloat16, engine_float, float>(20, 33, layout::padded);
  check_values<focus::bfloat16, float, engine_float>(20, 33, layout::padded);
}

TEST_CASE("merge_attention_states: by hand") {
  const std::vector<float> out_a{8, 2}, out_b{4, 6}, lse_a{0}, lse_b{std::log(3.0f)};
  std::vector<float> out(2), lse(1);
  focus::merge_attention_states(focus::tensor_view<const float, 3>(out_a.data(), {1, 1, 2}),
                                focus::matrix_view<const float>(lse_a.data(), {1, 1}),
                                focus::tensor_view<const float, 3>(out_b.data(), {1, 1, 2}),
                                focus::matrix_view<const float>(lse_b.data(), {1, 1}),
                                focus::tensor_view<float, 3>(out.data(), {1, 1, 2}),
                                focus::matrix_view<float>(lse.data(), {1, 1}));
  CHECK(out[0] == Approx(5));
  CHECK(out[1] == Approx(5));
  CHECK(lse[0] == Approx(std::log(4.0)));
}

TEST_CASE("merge_attention_states: an empty state leaves the other bit for bit") {
  const auto check = []<class T>(T) {
    state<T, float> a(6, 9, layout::heads_first), b(6, 9, layout::heads_first);
    a.fill(1, 6), b.fill(2, 0);
    // A NaN with a payload, and a signalling one: a copy keeps them.
    std::memset(static_cast<void*>(a.out.view().row(0, 0)), 0x7f, sizeof(T));
    if constexpr (sizeof(T) == 2) {
      const std::uint16_t signalling = std::is_same_v<T, focus::float16> ? 0x7c01 : 0x7f81;
      std::memcpy(static_cast<void*>(a.out.view().row(0, 0) + 1), &signalling, 2);
    }
    for (const bool empty_first : {false, true}) {
      state<T, float> merged(6, 9, layout::heads_first);
      const auto& first = empty_first ? b : a;
      const auto& second = empty_first ? a : b;
      focus::merge_attention_states(first.out.view(), first.lse.view(), second.out.view(),
                                    second.lse.view(), merged.out.view(), merged.lse.view());
      for (index_t h = 0; h < heads; ++h)
        for (const index_t i : {0, 3}) {
          CHECK(same_row_bits<T>(std::as_const(merged.out).view(), std::as_const(a.out).view(), h,
                                 i));
          CHECK(merged.lse.view()(h, i) == a.lse.view()(h, i));
        }
    }
  };
  check(float{});
  check(double{});
  check(focus::bfloat16{});
  check(focus::float16{});
  check(engine_float{});
}

TEST_CASE("merge_attention_states: two empty states give zeros and -inf") {
  state<float, float> a(4, 5, layout::padded), merged(4, 5, layout::padded);
  a.fill(1, 0);
  a.fill(1, 1), a.fill(1, 2);
  a.out.fill([] { return not_a_number; });
  a.lse.fill([] { return -infinity; });
  focus::merge_attention_states(a.out.view(), a.lse.view(), a.out.view(), a.lse.view(),
                                merged.out.view(), merged.lse.view());
  CHECK(merged.out.values() == std::vector<double>(40, 0.0));
  CHECK(merged.lse.values() == std::vector<double>(8, -infinity));
}

TEST_CASE("merge_attention_states: NaN stays in its row, and reaches the lse") {
  state<float, float> a(5, 4, layout::heads_first), b(5, 4, layout::heads_first),
      merged(5, 4, layout::heads_first);
  a.fill(1, 5), b.fill(2, 5);
  a.lse.view()(0, 2) = static_cast<float>(not_a_number);
  focus::merge_attention_states(a.out.view(), a.lse.view(), b.out.view(), b.lse.view(),
                                merged.out.view(), merged.lse.view());
  for (index_t h = 0; h < heads; ++h)
    for (index_t i = 0; i < 5; ++i) {
      const bool poisoned = h == 0 && i == 2;
      CHECK(std::isnan(merged.lse.view()(h, i)) == poisoned);
      CHECK(std::isnan(merged.out.view()(h, i, 3)) == poisoned);
    }
}

TEST_CASE("merge_attention_states: far apart, and huge logsumexps") {
  state<float, float> a(3, 2, layout::heads_first), b(3, 2, layout::heads_first),
      merged(3, 2, layout::heads_first);
  a.fill(1, 3), b.fill(2, 3);
  a.lse.fill([] { return 3e38; });
  b.lse.fill([] { return -3e38; });
  focus::merge_attention_states(a.out.view(), a.lse.view(), b.out.view(), b.lse.view(),
                                merged.out.view(), merged.lse.view());
  CHECK(merged.out.values() == a.out.values());
  CHECK(merged.lse.values() == a.lse.values());
}

TEST_CASE("merge_attention_states: out and lse may be those of a state") {
  state<float, float> a(70, 11, layout::tokens_first), b(70, 11, layout::tokens_first),
      expected(70, 11, layout::tokens_first);
  a.fill(1, 0), b.fill(2, 1);
  focus::merge_attention_states(a.out.view(), a.lse.view(), b.out.view(), b.lse.view(),
                                expected.out.view(), expected.lse.view());
  SECTION("of the first") {
    focus::merge_attention_states(a.out.view(), a.lse.view(), b.out.view(), b.lse.view(),
                                  a.out.view(), a.lse.view());
    CHECK(a.out.same_bits(expected.out));
    CHECK(a.lse.same_bits(expected.lse));
  }
  SECTION("of the second") {
    focus::merge_attention_states(a.out.view(), a.lse.view(), b.out.view(), b.lse.view(),
                                  b.out.view(), b.lse.view());
    CHECK(b.out.same_bits(expected.out));
    CHECK(b.lse.same_bits(expected.lse));
  }
  SECTION("one of each") {
    focus::merge_attention_states(a.out.view(), a.lse.view(), b.out.view(), b.lse.view(),
                                  a.out.view(), b.lse.view());
    CHECK(a.out.same_bits(expected.out));
    CHECK(b.lse.same_bits(expected.lse));
  }
}

TEST_CASE("merge_attention_states: nothing to merge, with null pointers; no allocation") {
  const focus::tensor_view<float, 3> out(nullptr, {2, 0, 4});
  const focus::matrix_view<float> lse(nullptr, {2, 0});
  CHECK_NOTHROW(focus::merge_attention_states(out, lse, out, lse, out, lse));
  state<float, float> a(70, 11, layout::padded), b(70, 11, layout::padded),
      merged(70, 11, layout::padded);
  a.fill(1, 0), b.fill(2, 1);
  CHECK(allocations_of([&] {
          focus::merge_attention_states(a.out.view(), a.lse.view(), b.out.view(), b.lse.view(),
                                        merged.out.view(), merged.lse.view());
        }) == 0);
}

TEST_CASE("merge_attention_states: bad arguments are refused before anything is written") {
  using tensor = focus::tensor_view<float, 3>;
  using matrix = focus::matrix_view<float>;
  std::vector<float> memory(100, 99.0f);
  float* const at = memory.data();
  // out_a 0, lse_a 8, out_b 12, lse_b 20, out 24, lse 32
  tensor out_a(at, {2, 2, 2}), out_b(at + 12, {2, 2, 2}), out(at + 24, {2, 2, 2});
  matrix lse_a(at + 8, {2, 2}), lse_b(at + 20, {2, 2}), lse(at + 32, {2, 2});
  const auto refusal_of = [&](const std::string& argument) {
    return refusal(argument,
                   [&] { focus::merge_attention_states(out_a, lse_a, out_b, lse_b, out, lse); });
  };
  SECTION("shapes") {
    lse_a = {at + 8, {2, 1}};
    CHECK(refusal_of("lse_a").empty());
    lse_a = {at + 8, {2, 2}}, out_b = {at + 12, {2, 2, 1}};
    CHECK(refusal_of("out_b").empty());
    out_b = {at + 12, {2, 2, 2}}, lse_b = {at + 20, {1, 2}};
    CHECK(refusal_of("lse_b").empty());
    lse_b = {at + 20, {2, 2}}, out = {at + 24, {1, 2, 2}};
    CHECK(refusal_of("out").empty());
    out = {at + 24, {2, 2, 2}}, lse = {};
    CHECK(refusal_of("lse").empty());
  }
  SECTION("null pointers") {
    out_a = {nullptr, {2, 2, 2}};
    CHECK(refusal_of("out_a").empty());
    out_a = {at, {2, 2, 2}}, lse = {nullptr, {2, 2}};
    CHECK(refusal_of("lse").empty());
  }
  SECTION("overlap") {
    out = {at + 1, {2, 2, 2}};
    CHECK(refusal_of("out").empty());
    out = {at, {2, 2, 2}, {2, 4, 1}};  // the memory of out_a in another order
    CHECK(refusal_of("out").empty());
    out = {at + 24, {2, 2, 2}, {0, 2, 1}};
    CHECK(refusal_of("out").empty());
    out = {at + 20, {2, 2, 2}};
    CHECK(refusal_of("out").empty());
    out = {at + 26, {2, 2, 2}};
    CHECK(refusal_of("out").empty());
    out = {at + 24, {2, 2, 2}}, lse = {at + 9, {2, 2}};
    CHECK(refusal_of("lse").empty());
    lse = {at + 12, {2, 2}};
    CHECK(refusal_of("lse").empty());
    // The same memory as bytes of another type is no such tensor.
    std::vector<double> doubles(8, 1.0);
    lse = {at + 32, {2, 2}};
    CHECK(refusal("lse", [&] {
            focus::merge_attention_states(
                out_a, focus::matrix_view<const double>(doubles.data(), {2, 2}), out_b, lse_b, out,
                matrix(reinterpret_cast<float*>(doubles.data()), {2, 2}, {4, 1}));
          }).empty());
  }
  CHECK(memory == std::vector<float>(100, 99.0f));
}

}  // namespace test_merge
