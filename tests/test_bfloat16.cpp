// What is stored in bfloat16: products of its bits where the instruction set has them (AMX, where
// the operating system agrees, and Arm's BFMMLA), sums of widened elements elsewhere. The same
// tests hold for both.
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention_checks.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/attention.hpp"
#include "focus/checks/attention_arguments.hpp"
#include "focus/options.hpp"
#include "focus/routing_plan.hpp"
#include "focus/sparse_attention.hpp"
#include "oracle.hpp"

namespace test_bfloat16 {
namespace {

using namespace oracle;

/// A user's type with bfloat16's bits whose sums are in double: its products are not those in
/// float.
struct carefully_summed {
  std::uint16_t bits = 0;
};

/// How a call gets its operands: as the library decides, or as if the operating system had refused.
/// Of the types that the checks know, only those of bfloat16 are called.
enum class grant { asked, refused };
constexpr auto refuse = [] {
  return false;
};

template <grant Grant>
struct dense_call {
  static constexpr operation op = operation::attention;
  template <class T, class Out, class Lse, class Exec>
  void operator()(const call_inputs<T>& in, Out out, Lse lse, Exec&& exec) const {
    using namespace focus::detail;
    if constexpr (!is_bfloat16<T>) {
      FAIL("bfloat16 only");
    } else if constexpr (Grant == grant::asked) {
      focus::attention(in.q, in.k, in.v, out, in.pattern, in.score, lse, exec);
    } else {
      const auto args = check_attention_views("attention", in.q, in.k, in.v, out, lse);
      with_operands<decltype(args)>(refuse, [&]<class E>() {
        const attention_call<E> call{resolve(in.pattern, args.shape.n_q, args.shape.n_k),
                                     resolve<float>(in.score, args.shape.head_dim)};
        run_call(args, any_executor(exec), call);
      });
    }
  }
};

template <grant Grant>
struct sparse_call {
  static constexpr operation op = operation::sparse;
  template <class T, class Out, class Lse, class Exec>
  void operator()(const call_inputs<T>& in, Out out, Lse lse, Exec&& exec) const {
    using namespace focus::detail;
    const focus::routing_plan plan =
        focus::make_routing_plan(in.query_masks, in.key_masks, in.pattern);
    if constexpr (!is_bfloat16<T>) {
      FAIL("bfloat16 only");
    } else if constexpr (Grant == grant::asked) {
      focus::sparse_attention(in.q, in.k, in.v, plan, out, in.score, lse, exec);
    } else {
      const auto args = check_attention_views("sparse_attention", in.q, in.k, in.v, out, lse);
      with_operands<decltype(args)>(refuse, [&]<class E>() {
        const sparse_attention_call<E> call{std::span(&plan, 1),
                                            resolve<float>(in.score, args.shape.head_dim)};
        run_call(args, any_executor(exec), call);
      });
    }
  }
};

using dense = dense_call<grant::asked>;
using sparse = sparse_call<grant::asked>;

/// In bfloat16.
attention_case stored(attention_case c) {
  c.type = storage::bfloat16;
  return c;
}

template <class Call>
void check(const attention_case& c) {
  INFO(describe(c));
  CHECK(check_values<Call>(stored(c)) == "");
}

/// The operands that attention of these storage types takes.
template <class Operand, class T, class K, class Out>
bool takes(bool permitted) {
  using arguments = focus::detail::attention_arguments<T, K, T, Out, float>;
  bool same = false;
  focus::detail::with_operands<arguments>([=] { return permitted; },
                                          [&]<class E>() { same = std::is_same_v<E, Operand>; });
  return same;
}

}  // namespace

TEST_CASE("bfloat16: where operands stay bfloat16") {
  using focus::bfloat16;
  using operand = std::conditional_t<FOCUS_HAS_BFLOAT16_PRODUCTS, bfloat16, float>;
  CHECK(takes<operand, bfloat16, bfloat16, bfloat16>(true));
  CHECK(takes<operand, engine_bfloat16, bfloat16, engine_bfloat16>(true));
  CHECK(takes<float, bfloat16, bfloat16, bfloat16>(false));
  // Weights in bfloat16 are not good enough for an output that is finer, whatever the inputs are.
  CHECK(takes<float, bfloat16, bfloat16, float>(true));
  CHECK(takes<float, bfloat16, bfloat16, focus::float16>(true));
  CHECK(takes<float, bfloat16, float, bfloat16>(true));
  CHECK(takes<float, focus::float16, focus::float16, focus::float16>(true));
  CHECK(takes<double, double, double, double>(true));
}

TEST_CASE("bfloat16: lengths around the tiles") {
  for (const index_t n : odd_lengths)
    for (const bool causal : {true, false})
      for (const index_t window : {index_t{5}, focus::unlimited_window})
        check<dense>({.n_q = n, .n_k = n, .pattern = {.causal = causal, .window = window}});
  for (const auto& [n_q, n_k] :
       std::vector<std::array<index_t, 2>>{{1, 257}, {7, 100}, {100, 7}, {130, 97}, {33, 600}})
    for (const index_t window : {index_t{20}, focus::unlimited_window})
      check<dense>({.n_q = n_q, .n_k = n_k, .pattern = {.window = window, .sink_tokens = 3}});
}

TEST_CASE("bfloat16: head dimensions") {
  for (const auto& [d, d_v] : head_dims) {
    check<dense>({.n_q = 70, .n_k = 70, .d = d, .d_v = d_v, .pattern = focus::full_causal});
    check<dense>({.n_q = 70,
                  .n_k = 70,
                  .d = d,
                  .d_v = d_v,
                  .pattern = {.window = 9, .sink_tokens = 1},
                  .memory = layout::misaligned});
    check<sparse>({.heads = 4, .kv_heads = 2, .n_q = 70, .n_k = 70, .d = d, .d_v = d_v});
  }
  check<dense>({.n_q = 9, .n_k = 9, .d = 0, .d_v = 4, .pattern = focus::full_causal});
  check<dense>({.n_q = 9, .n_k = 9, .d = 4, .d_v = 0, .pattern = focus::full_causal});
}

TEST_CASE("bfloat16: scale and softcap") {
  for (const focus::score_options score : {focus::score_options{.scale = 0.0f},
                                           {.scale = -0.7f},
                                           {.scale = 3.0f, .softcap = 5.0f},
                                           {.softcap = 0.5f},
                                           {.scale = 1e-42f},
                                           {.scale = 1e-42f, .softcap = 2.0f},
                                           {.softcap = 3e38f}})
    check<dense>({.pattern = {.window = 6, .sink_tokens = 2}, .score = score});
  // A finite scale times a score of 0 is 0, however large the scale: equal weights.
  check<dense>({.score = {.scale = 3.4e38f}, .query_magnitude = 0});
}

TEST_CASE("bfloat16: huge scores") {
  // Where the factor is not exact, and a product of it is off by more than the weights can say.
  for (const double magnitude : {1e2, 1e4, 1e6, 1e10, 1e20})
    for (const float scale : {0.125f, 0.3f}) {
      check<dense>({.n_q = 100,
                    .n_k = 100,
                    .d = 64,
                    .pattern = focus::full_causal,
                    .score = {.scale = scale},
                    .query_magnitude = magnitude});
      check<dense>({.n_q = 100,
                    .n_k = 300,
                    .pattern = {.window = 20},
                    .score = {.scale = -scale, .softcap = 30.0f},
                    .query_magnitude = magnitude});
    }
}

TEST_CASE("bfloat16: groupings, in each layout of the plan") {
  for (const grouping groups : all_groupings)
    for (const auto& [group_count, top_k] :
         std::vector<std::array<int, 2>>{{1, 1}, {4, 1}, {4, 2}, {8, 3}, {64, 4}})
      for (const index_t window : {focus::no_window, index_t{20}})
        for (const bool causal : {true, false})
          check<sparse>(
              {.n_q = 109,
               .n_k = 109,
               .d = 8,
               .d_v = 8,
               .pattern = {.causal = causal, .window = window, .sink_tokens = window == 20 ? 1 : 0},
               .groups = groups,
               .group_count = group_count,
               .top_k = top_k,
               .separate_masks = top_k == 3});
  check<sparse>(
      {.n_q = 700, .n_k = 700, .d = 40, .d_v = 40, .pattern = {.window = 20, .sink_tokens = 1}});
  check<sparse>({.n_q = 700,
                 .n_k = 700,
                 .d = 40,
                 .d_v = 40,
                 .pattern = {.window = 20},
                 .groups = grouping::drawn,
                 .group_count = 16,
                 .top_k = 2});
}

TEST_CASE("bfloat16: NaN and inf in a key reach the rows that attend to it") {
  for (const double value : {not_a_number, infinity, -infinity})
    for (const index_t key : {0, 31, 32, 299}) {
      if (key != 31 && value == value) continue;
      // Far from the sink, all rows of a strip see the same one key of the first panel.
      for (const index_t window : {index_t{10}, focus::unlimited_window}) {
        const attention_case c = stored({.heads = 1,
                                         .n_q = 300,
                                         .n_k = 300,
                                         .d = 20,
                                         .d_v = 50,
                                         .pattern = {.window = window, .sink_tokens = 1}});
        INFO(describe(c) << ", key " << key << ", value " << value);
        CHECK(check_poisoned_key<dense>(c, key, value) == "");
      }
      for (const int group_count : {4, 64}) {
        const attention_case c = stored({.n_q = 300,
                                         .n_k = 300,
                                         .d = 5,
                                         .d_v = 33,
                                         .pattern = {.window = 3, .sink_tokens = 1},
                                         .group_count = group_count,
                                         .top_k = 2});
        INFO(describe(c) << ", key " << key << ", value " << value);
        CHECK(check_poisoned_key<sparse>(c, key, value) == "");
      }
    }
}

TEST_CASE("bfloat16: scores of -inf") {
  for (const index_t count : {1, 300, 600})
    for (const bool first : {true, false})
      for (const index_t window : {index_t{8}, focus::unlimited_window}) {
        const attention_case c = stored(
            {.heads = 1, .n_q = 600, .n_k = 600, .d = 2, .d_v = 2, .pattern = {.window = window}});
        INFO(describe(c) << ", count " << count << (first ? ", first" : ", last"));
        CHECK(check_vanishing_keys<dense>(c, count, first) == "");
      }
}

TEST_CASE("bfloat16: refused by the operating system") {
  using dense_refused = dense_call<grant::refused>;
  using sparse_refused = sparse_call<grant::refused>;
  const attention_case c = stored({.heads = 4,
                                   .kv_heads = 2,
                                   .n_q = 150,
                                   .n_k = 170,
                                   .d = 40,
                                   .d_v = 24,
                                   .pattern = {.window = 30, .sink_tokens = 1}});
  INFO(describe(c));
  CHECK(check_values<dense_refused>(c) == "");
  CHECK(check_values<sparse_refused>(c) == "");
  CHECK(check_same_bits<dense_refused>(c) == "");
  CHECK(check_same_bits<sparse_refused>(c) == "");
  CHECK(check_values<dense>(c) == "");
  CHECK(check_values<sparse>(c) == "");
  CHECK(check_same_bits<dense>(c) == "");
  CHECK(check_same_bits<sparse>(c) == "");
}

TEST_CASE("bfloat16: what rounding the weights costs") {
  // Each weight is off by at most half an epsilon, and their sum with them: the mean of the values
  // by at most half an epsilon of the mean distance of the values from it, which is no more than
  // the largest value. The output's own rounding is half an epsilon more. Sums in float add little.
  for (const double magnitude : {0.1, 1.0, 30.0})
    for (const double offset : {0.0, 8.0}) {
      const attention_case c = stored({.heads = 1,
                                       .n_q = 400,
                                       .n_k = 400,
                                       .d = 64,
                                       .d_v = 64,
                                       .pattern = focus::full_causal,
                                       .query_magnitude = magnitude});
      problem<focus::bfloat16> p(c);
      generator random(7);
      p.v.fill([&] { return offset + random.normal(); });
      const dense_problem exact = p.dense();
      const attention_state expected = truth(exact, operation::attention);
      const answer<focus::bfloat16> got = solve<dense>(p);
      const std::vector<double> out = got.out.values();
      double largest_error_of_mean = 0;
      for (std::size_t at = 0; at < out.size(); ++at)
        largest_error_of_mean =
            (std::max)(largest_error_of_mean,
                       std::abs(out[at] - expected.out[at]) -
                           0.5 * epsilon<focus::bfloat16>() * std::abs(expected.out[at]));
      INFO(describe(c) << ", offset " << offset);
      // From a mean of 8, values are no farther than some 3.
      CHECK(largest_error_of_mean <= 0.5 * epsilon<focus::bfloat16>() * 4.5);
      CHECK(compare(p, got, operation::attention) == "");
    }
}

TEST_CASE("bfloat16: the mean of equal values is that value") {
  // One key weighs 1, and each of the others 1 / 15.94: halfway between two of bfloat16, nearly, so
  // that all are rounded down by almost half an epsilon. The value is one of which less is already
  // another.
  constexpr index_t n = 300;
  constexpr double value = 1.9921875;
  attention_case c = stored({.heads = 1, .n_q = n, .n_k = n, .d = 1, .d_v = 40});
  c.pattern = {.causal = false, .window = focus::unlimited_window};
  c.score.scale = static_cast<float>(std::log(16 / 1.0038));
  problem<focus::bfloat16> p(c);
  p.q.fill([] { return 1.0; });
  bool first = true;
  p.k.fill([&] { return std::exchange(first, false) ? 0.0 : -1.0; });
  p.v.fill([] { return value; });
  const answer<focus::bfloat16> got = solve<dense>(p);
  CHECK(compare(p, got, operation::attention) == "");
  for (const double x : got.out.values()) REQUIRE(x == value);
}

}  // namespace test_bfloat16

template <>
struct focus::scalar_traits<test_bfloat16::carefully_summed> {
  using accumulator = double;
  static constexpr storage_format format = storage_format::bfloat16;
  static double to_accumulator(test_bfloat16::carefully_summed x) {
    return scalar_traits<bfloat16>::to_accumulator({x.bits});
  }
  static test_bfloat16::carefully_summed from_accumulator(double x) {
    return {scalar_traits<bfloat16>::from_accumulator(static_cast<float>(x)).bits};
  }
};

namespace test_bfloat16 {

TEST_CASE("bfloat16: not for types whose sums are in double") {
  using element = carefully_summed;
  constexpr index_t n = 20, d = 8;
  std::vector<element> x(n * d), out(n * d);
  for (element& e : x) e = focus::scalar_traits<element>::from_accumulator(1.5);
  const focus::tensor_view<const element, 3> view(x.data(), {1, n, d});
  const focus::tensor_view<element, 3> result(out.data(), {1, n, d});
  const auto all_equal = [&] {
    for (const element e : out)
      if (e.bits != x.front().bits) return false;
    return true;
  };
  focus::attention(view, view, view, result);
  CHECK(all_equal());
  out.assign(out.size(), element{});
  const std::vector<focus::group_mask> masks(n, 1);
  focus::sparse_attention(view, view, view, focus::make_routing_plan(masks, {.window = 2}), result);
  CHECK(all_equal());
}

}  // namespace test_bfloat16
