// Dense and windowed attention against the textbook, and what the contract says of every attention
// function.
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "attention_checks.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/attention.hpp"
#include "oracle.hpp"

namespace test_attention {
namespace {

using namespace oracle;

struct call {
  static constexpr operation op = operation::attention;
  template <class T, class Out, class Lse, class Exec>
  void operator()(const call_inputs<T>& in, Out out, Lse lse, Exec&& exec) const {
    focus::attention(in.q, in.k, in.v, out, in.pattern, in.score, lse, exec);
  }
};

void check(const attention_case& c) {
  INFO(describe(c));
  CHECK(check_values<call>(c) == "");
}

constexpr focus::pattern_options dense = focus::full_causal;

}  // namespace

TEST_CASE("attention: lengths around the tiles") {
  for (const index_t n : odd_lengths)
    for (const bool causal : {true, false})
      for (const index_t window : {index_t{5}, focus::unlimited_window})
        check({.n_q = n, .n_k = n, .pattern = {.causal = causal, .window = window}});
}

TEST_CASE("attention: more queries than keys, and fewer") {
  for (const auto& [n_q, n_k] : std::vector<std::array<index_t, 2>>{{1, 100},
                                                                    {1, 257},
                                                                    {7, 100},
                                                                    {100, 7},
                                                                    {33, 64},
                                                                    {97, 130},
                                                                    {130, 97},
                                                                    {0, 5},
                                                                    {5, 0},
                                                                    {100, 1}})
    for (const bool causal : {true, false})
      for (const index_t window : {index_t{0}, index_t{20}, focus::unlimited_window})
        for (const index_t sinks : {0, 3})
          check({.n_q = n_q,
                 .n_k = n_k,
                 .pattern = {.causal = causal, .window = window, .sink_tokens = sinks}});
}

TEST_CASE("attention: head dimensions") {
  for (const auto& [d, d_v] : head_dims) {
    check({.n_q = 70, .n_k = 70, .d = d, .d_v = d_v, .pattern = dense});
    check({.n_q = 70,
           .n_k = 70,
           .d = d,
           .d_v = d_v,
           .pattern = {.window = 9, .sink_tokens = 1},
           .memory = layout::padded});
  }
}

TEST_CASE("attention: windows and sinks") {
  for (const index_t window : odd_windows)
    for (const index_t sinks : {index_t{0}, index_t{1}, index_t{4}, index_t{59}, index_t{60},
                                index_t{77}, focus::unlimited_window})
      for (const bool causal : {true, false})
        check({.n_q = 60,
               .n_k = 60,
               .pattern = {.causal = causal, .window = window, .sink_tokens = sinks}});
}

TEST_CASE("attention: query_offset") {
  constexpr index_t far = index_t{1} << 60;
  for (const index_t offset :
       {-far, index_t{-100}, index_t{-39}, index_t{-1}, index_t{0}, index_t{1}, index_t{30},
        index_t{59}, index_t{60}, index_t{200}, far})
    for (const index_t window :
         {focus::no_window, index_t{0}, index_t{10}, far - 20, focus::unlimited_window})
      for (const bool causal : {true, false})
        for (const index_t sinks : {0, 2})
          check({.n_q = 40,
                 .n_k = 60,
                 .pattern = {.causal = causal,
                             .window = window,
                             .sink_tokens = sinks,
                             .query_offset = offset}});
}

TEST_CASE("attention: heads share kv heads") {
  for (const auto& [heads, kv_heads] : std::vector<std::array<index_t, 2>>{
           {1, 1}, {4, 4}, {4, 2}, {6, 2}, {9, 3}, {5, 1}, {0, 0}, {0, 2}})
    check({.heads = heads, .kv_heads = kv_heads, .n_q = 50, .n_k = 50, .pattern = dense});
}

TEST_CASE("attention: storage types and layouts") {
  for (const storage type : all_storage)
    for (const layout memory :
         {layout::heads_first, layout::tokens_first, layout::padded, layout::misaligned})
      for (const auto& [d, d_v] : std::vector<std::array<index_t, 2>>{{64, 64}, {13, 27}})
        check({.heads = 4,
               .kv_heads = 2,
               .n_q = 75,
               .n_k = 83,
               .d = d,
               .d_v = d_v,
               .pattern = {.window = 30, .sink_tokens = 1},
               .type = type,
               .memory = memory});
}

TEST_CASE("attention: scale and softcap") {
  for (const focus::score_options score : {focus::score_options{.scale = 0.0f},
                                           {.scale = 0.7f},
                                           {.scale = -0.7f},
                                           {.scale = 3.0f, .softcap = 5.0f},
                                           {.softcap = 0.0f},
                                           {.softcap = 0.5f},
                                           {.softcap = 50.0f},
                                           {.scale = 0.0f, .softcap = 2.0f},
                                           {.softcap = 1e6f}})
    for (const storage type : {storage::float32, storage::float64})
      for (const index_t window : {index_t{6}, focus::unlimited_window})
        check({.pattern = {.window = window, .sink_tokens = 2}, .score = score, .type = type});
}

TEST_CASE("attention: scale and softcap at the ends of the range") {
  constexpr float most = (std::numeric_limits<float>::max)();
  for (const storage type : {storage::float32, storage::float64})
    for (const focus::score_options score : {focus::score_options{.softcap = 3e38f},
                                             {.softcap = most},
                                             {.softcap = std::numeric_limits<float>::infinity()},
                                             {.softcap = 1e-30f},
                                             {.softcap = 1e-42f},
                                             {.scale = 1e-42f},
                                             {.scale = 1e-42f, .softcap = 2.0f}})
      check({.score = score, .type = type});
  // A finite scale times a score of 0 is 0, however large the scale: equal weights.
  attention_case c{.score = {.scale = most}, .query_magnitude = 0};
  check(c);
  c.score.softcap = 5.0f;
  check(c);
}

// Two keys with s = 2 scale: a scale that is rounded to float shows in the eighth digit.
TEST_CASE("attention: options are double where Q, K and V are") {
  const std::vector<double> q{2, 2}, k{1, 0}, v{1, 0};
  const focus::tensor_view<const double, 3> queries(q.data(), {1, 2, 1}), keys(k.data(), {1, 2, 1}),
      values(v.data(), {1, 2, 1});
  std::vector<double> out(2), lse(2);
  const auto run = [&](const focus::score_options& score) {
    focus::attention(queries, keys, values, focus::tensor_view<double, 3>(out.data(), {1, 2, 1}),
                     focus::full_causal, score, focus::matrix_view<double>(lse.data(), {1, 2}));
  };
  run({.scale = 0.1});
  CHECK(std::abs(lse[1] - std::log1p(std::exp(0.2))) < 1e-15);
  CHECK(std::abs(out[1] - 1 / (1 + std::exp(-0.2))) < 1e-15);
  run({.scale = 1.0, .softcap = 0.3});
  CHECK(std::abs(lse[1] - std::log1p(std::exp(0.3 * std::tanh(2 / 0.3)))) < 1e-15);
  // Beyond the range of float it is the largest one.
  std::vector<float> zeros(2, 0.0f), narrow_out(2, 9.0f);
  const focus::tensor_view<const float, 3> nothing(zeros.data(), {1, 2, 1});
  focus::attention(nothing, nothing, nothing,
                   focus::tensor_view<float, 3>(narrow_out.data(), {1, 2, 1}), focus::full_causal,
                   {.scale = 1e300});
  CHECK(narrow_out == zeros);
}

TEST_CASE("attention: a sum that underflows is 0, not -0") {
  // The second key weighs e^-30, and its share of the smallest negative number underflows.
  const std::vector<float> q{1.0f}, k{0.0f, -30.0f}, v{0.0f, -1e-45f};
  std::vector<float> out{7.0f};
  focus::attention(focus::tensor_view<const float, 3>(q.data(), {1, 1, 1}),
                   focus::tensor_view<const float, 3>(k.data(), {1, 2, 1}),
                   focus::tensor_view<const float, 3>(v.data(), {1, 2, 1}),
                   focus::tensor_view<float, 3>(out.data(), {1, 1, 1}));
  CHECK(out[0] == 0.0f);
  CHECK(!std::signbit(out[0]));
}

TEST_CASE("attention: huge scores") {
  for (const double magnitude : {1e2, 1e3, 1e5})
    for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
      for (const float softcap : {0.0f, 30.0f})
        check({.n_q = 100,
               .n_k = 100,
               .d = 64,
               .d_v = 20,
               .pattern = dense,
               .score = {.softcap = softcap},
               .type = type,
               .query_magnitude = magnitude});
}

TEST_CASE("attention: the same bits for any number of threads") {
  for (const storage type : all_storage) {
    const attention_case c{.heads = 3,
                           .kv_heads = 3,
                           .n_q = 211,
                           .n_k = 230,
                           .pattern = {.window = 70, .sink_tokens = 2},
                           .type = type};
    INFO(describe(c));
    CHECK(check_same_bits<call>(c) == "");
  }
  CHECK(check_same_bits<call>({.n_q = 0, .n_k = 0}) == "");
  CHECK(check_same_bits<call>({.n_q = 300, .n_k = 300, .d = 64, .d_v = 64, .pattern = dense}) ==
        "");
}

TEST_CASE("attention: NaN and inf in a key reach the rows that attend to it") {
  for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
    for (const double value : {not_a_number, infinity, -infinity})
      for (const index_t key : {0, 1, 50, 99}) {
        // What infinities do to a storage type, they do to all.
        if (type != storage::float32 && value == value) continue;
        for (const index_t window : {index_t{0}, index_t{10}, focus::unlimited_window})
          for (const bool causal : {true, false}) {
            const attention_case c{
                .n_q = 100,
                .n_k = 100,
                .pattern = {.causal = causal, .window = window, .sink_tokens = 1},
                .type = type};
            INFO(describe(c) << ", key " << key << ", value " << value);
            CHECK(check_poisoned_key<call>(c, key, value) == "");
          }
      }
}

TEST_CASE("attention: NaN in a query reaches its row only") {
  for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
    for (const index_t query : {0, 1, 6, 50, 99})
      for (const index_t window :
           {focus::no_window, index_t{0}, index_t{10}, focus::unlimited_window})
        for (const std::optional<float> softcap :
             {std::optional<float>{}, std::optional<float>{20.0f}}) {
          const attention_case c{.n_q = 100,
                                 .n_k = 100,
                                 .pattern = {.window = window},
                                 .score = {.softcap = softcap},
                                 .type = type};
          INFO(describe(c) << ", query " << query);
          CHECK(check_poisoned_query<call>(c, 1, query) == "");
        }
}

TEST_CASE("attention: an infinite query") {
  for (const double value : {infinity, -infinity})
    CHECK(check_poisoned_query<call>({.n_q = 50, .n_k = 50}, 1, 20, value) == "");
}

TEST_CASE("attention: NaN and inf in one of many blocks of keys") {
  for (const storage type : {storage::float32, storage::float64})
    for (const double value : {not_a_number, infinity, -infinity})
      for (const index_t key : {0, 300, 599}) {
        const attention_case c{
            .heads = 1, .n_q = 30, .n_k = 600, .d = 4, .d_v = 4, .pattern = dense, .type = type};
        INFO(describe(c) << ", key " << key << ", value " << value);
        CHECK(check_poisoned_key<call>(c, key, value) == "");
      }
}

TEST_CASE("attention: scores of -inf") {
  for (const storage type : {storage::float32, storage::float64})
    for (const std::optional<float> softcap : {std::optional<float>{}, std::optional<float>{5.0f}})
      for (const index_t count : {1, 300, 600})
        for (const bool first : {true, false})
          for (const index_t window : {index_t{8}, focus::unlimited_window}) {
            const attention_case c{.heads = 1,
                                   .n_q = 600,
                                   .n_k = 600,
                                   .d = 2,
                                   .d_v = 2,
                                   .pattern = {.window = window},
                                   .score = {.softcap = softcap},
                                   .type = type};
            INFO(describe(c) << ", count " << count << (first ? ", first" : ", last"));
            CHECK(check_vanishing_keys<call>(c, count, first) == "");
          }
}

TEST_CASE("attention: earlier rows do not see later tokens") {
  for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
    for (const index_t first : {1, 40, 100, 149}) {
      const attention_case c{
          .n_q = 150, .n_k = 150, .pattern = {.window = 60, .sink_tokens = 1}, .type = type};
      INFO(describe(c) << ", first " << first);
      CHECK(check_later_tokens<call>(c, first) == "");
    }
}

TEST_CASE("attention: lse in double, and mixed storage types") {
  const attention_case c{.n_q = 50, .n_k = 50};
  const problem<float> p(c);
  answer<float, double> a(c);
  focus::attention(p.q.view(), p.k.view(), p.v.view(), a.out.view(), c.pattern, c.score,
                   a.lse.view());
  CHECK(compare(p, a, call::op) == "");

  // Keys in bfloat16, values in float16; the truth is that of the values as stored.
  const problem<focus::bfloat16> keys(c);
  const problem<focus::float16> values(c);
  problem<float> widened_inputs(c);
  std::size_t at = 0;
  const std::vector<double> k = keys.k.values(), v = values.v.values();
  widened_inputs.k.fill([&] { return k[at++]; });
  at = 0;
  widened_inputs.v.fill([&] { return v[at++]; });
  answer<float> mixed(c);
  focus::attention(widened_inputs.q.view(), keys.k.view(), values.v.view(), mixed.out.view(),
                   c.pattern, c.score, mixed.lse.view());
  CHECK(compare(widened_inputs, mixed, call::op) == "");
}

TEST_CASE("attention: slices of one fused buffer are no overlap") {
  // Each token's row: q of two heads, k and v of one, out of two.
  constexpr index_t n = 30, d = 8, row = 6 * d;
  const attention_case c{.n_q = n, .n_k = n, .d = d, .d_v = d, .pattern = dense};
  const problem<float> p(c);
  std::vector<float> fused(static_cast<std::size_t>(n * row), 0.5f);
  using view = focus::tensor_view<float, 3>;
  const view q(fused.data(), {2, n, d}, {d, row, 1}),
      k(fused.data() + 2 * d, {1, n, d}, {d, row, 1}),
      v(fused.data() + 3 * d, {1, n, d}, {d, row, 1}),
      out(fused.data() + 4 * d, {2, n, d}, {d, row, 1});
  for (index_t i = 0; i < n; ++i)
    for (index_t x = 0; x < d; ++x) {
      q(0, i, x) = p.q.view()(0, i, x), q(1, i, x) = p.q.view()(1, i, x);
      k(0, i, x) = p.k.view()(0, i, x), v(0, i, x) = p.v.view()(0, i, x);
    }
  focus::attention(q, k, v, out);
  const answer<float> apart = solve<call>(p);
  for (index_t h = 0; h < 2; ++h)
    for (index_t i = 0; i < n; ++i) CHECK(same_row_bits<float>(out, apart.out.view(), h, i));
}

TEST_CASE("attention: strides of zero share keys among heads") {
  const attention_case c{.heads = 4, .kv_heads = 1, .pattern = dense};
  const problem<float> p(c);
  const answer<float> shared = solve<call>(p);
  const auto k = p.k.view(), v = p.v.view();
  answer<float> repeated(c);
  using view = focus::tensor_view<const float, 3>;
  focus::attention(p.q.view(), view(k.data(), {4, c.n_k, c.d}, {0, k.stride(1), 1}),
                   view(v.data(), {4, c.n_k, c.d_v}, {0, v.stride(1), 1}), repeated.out.view(),
                   dense, {}, repeated.lse.view(), thread_executor(1));
  CHECK(repeated.same_bits(shared));
}

TEST_CASE("attention: views of const and no arguments but four") {
  const attention_case c{.pattern = dense};
  problem<float> p(c);
  answer<float> a(c), b(c);
  focus::attention(p.q.view(), p.k.view(), p.v.view(), a.out.view());
  const problem<float>& fixed = p;
  focus::attention(fixed.q.view(), fixed.k.view(), fixed.v.view(), b.out.view(), focus::full_causal,
                   {}, {}, {});
  CHECK(a.out.same_bits(b.out));
}

TEST_CASE("attention: nothing at all") {
  using view = focus::tensor_view<float, 3>;
  focus::attention(view(), view(), view(), view());
  focus::attention(view(nullptr, {2, 0, 8}), view(nullptr, {2, 0, 8}), view(nullptr, {2, 0, 8}),
                   view(nullptr, {2, 0, 8}), focus::full_causal, {},
                   focus::matrix_view<float>(nullptr, {2, 0}));
  // No columns: scores are 0. No value columns: the lse is there all the same.
  check({.n_q = 9, .n_k = 9, .d = 0, .d_v = 4, .pattern = dense});
  check({.n_q = 9, .n_k = 9, .d = 4, .d_v = 0, .pattern = dense});
}

TEST_CASE("attention: exceptions from a loop reach the caller") {
  CHECK(throws_from_body<call>({}, 0));
  CHECK(throws_from_body<call>({.heads = 4, .kv_heads = 4, .n_q = 200, .n_k = 200}, 1));
  CHECK_FALSE(throws_from_body<call>({}, 1 << 20));
}

TEST_CASE("attention: bad arguments") {
  check_refusals<call>();
}

TEST_CASE("attention: head_dim 0 without data, several kv heads") {
  std::vector<float> values(2 * 40 * 3), out(values.size(), std::nanf(""));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = i < 120 ? 1.0f : 2.0f;
  const focus::tensor_view<const float, 3> none(nullptr, {2, 40, 0});
  focus::attention(none, none, focus::tensor_view<const float, 3>(values.data(), {2, 40, 3}),
                   focus::tensor_view<float, 3>(out.data(), {2, 40, 3}));
  CHECK(out == values);  // means of values that are all the same
}

}  // namespace test_attention
