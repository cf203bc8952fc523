// Focus attention with hard groups against the textbook, which decides each pair from the masks.
#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention_checks.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/reference.hpp"
#include "focus/routing_plan.hpp"
#include "focus/sparse_attention.hpp"
#include "oracle.hpp"
#include "pairwise.hpp"

namespace test_sparse_attention {
namespace {

using namespace oracle;

struct call {
  static constexpr operation op = operation::sparse;
  template <class T, class Out, class Lse, class Exec>
  void operator()(const call_inputs<T>& in, Out out, Lse lse, Exec&& exec) const {
    const focus::routing_plan plan =
        focus::make_routing_plan(in.query_masks, in.key_masks, in.pattern);
    focus::sparse_attention(in.q, in.k, in.v, plan, out, in.score, lse, exec);
  }
};

void check(const attention_case& c) {
  INFO(describe(c));
  CHECK(check_values<call>(c) == "");
}

/// (K, k).
const std::vector<std::array<int, 2>> group_counts{{1, 1}, {2, 1},  {4, 1},  {4, 2},  {4, 4},
                                                   {8, 3}, {64, 1}, {64, 4}, {64, 64}};

}  // namespace

TEST_CASE("sparse_attention: groupings") {
  for_each_pairing(
      [](grouping groups, const std::array<int, 2>& counts, index_t window, bool causal,
         bool separate) {
        check({.n_q = 109,
               .n_k = 109,
               .d = 8,
               .d_v = 8,
               .pattern = {.causal = causal, .window = window, .sink_tokens = window == 20 ? 1 : 0},
               .groups = groups,
               .group_count = counts[0],
               .top_k = counts[1],
               .separate_masks = separate});
      },
      all_groupings, group_counts, std::array{focus::no_window, index_t{0}, index_t{20}},
      std::array{true, false}, std::array{true, false});
}

TEST_CASE("sparse_attention: lists of keys, one after the other") {
  const attention_case lists{.n_q = 700,
                             .n_k = 700,
                             .d = 4,
                             .d_v = 4,
                             .pattern = {.window = 20, .sink_tokens = 1},
                             .groups = grouping::drawn,
                             .group_count = 16,
                             .top_k = 2};
  const auto check_lists = [](const attention_case& c) {
    const problem<float> p(c);
    const auto plan = focus::make_routing_plan(p.query_masks, p.key_masks, c.pattern);
    INFO(describe(c));
    CHECK(plan.layout() == focus::detail::plan_layout::groups);
    CHECK(std::ssize(plan.key_runs()) >= c.top_k);
    CHECK(check_values<call>(c) == "");
  };
  for_each_pairing(
      [&](bool separate, bool causal, index_t window) {
        attention_case c = lists;
        c.separate_masks = separate, c.pattern = {.causal = causal, .window = window};
        check_lists(c);
        c.heads = 4, c.kv_heads = 2, c.n_q = separate ? 650 : 700;
        check_lists(c);
        c.group_count = 32, c.pattern.sink_tokens = 3;
        check_lists(c);
        // Lists that few queries have in common.
        c.group_count = 8, c.groups = grouping::scattered;
        check(c);
      },
      std::array{true, false}, std::array{true, false}, std::array{focus::no_window, index_t{20}});
  for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
    for (const index_t window : {focus::no_window, index_t{20}}) {
      attention_case c = lists;
      c.type = type, c.pattern.window = window;
      check_lists(c);
      CHECK(check_same_bits<call>(c) == "");
      CHECK(check_poisoned_key<call>(c, 333, not_a_number) == "");
      CHECK(check_poisoned_query<call>(c, 1, 444) == "");
    }
}

TEST_CASE("sparse_attention: lengths around the tiles") {
  for (const index_t n : odd_lengths)
    for (const int top_k : {1, 2})
      for (const bool causal : {true, false})
        check({.n_q = n,
               .n_k = n,
               .pattern = {.causal = causal, .window = 5, .sink_tokens = 1},
               .group_count = 3,
               .top_k = top_k});
  // Cells as long as a tile, one more and one less.
  for (const index_t n : odd_lengths)
    check({.heads = 1,
           .n_q = 2 * n,
           .n_k = 2 * n,
           .d = 4,
           .d_v = 4,
           .pattern = {.window = focus::no_window},
           .group_count = 2});
}

TEST_CASE("sparse_attention: windows and sinks") {
  for (const index_t window : odd_windows)
    for (const index_t sinks : {index_t{0}, index_t{1}, index_t{4}, index_t{59}, index_t{60},
                                index_t{77}, focus::unlimited_window})
      for (const bool causal : {true, false})
        check({.n_q = 60,
               .n_k = 60,
               .pattern = {.causal = causal, .window = window, .sink_tokens = sinks},
               .groups = grouping::mixed,
               .group_count = 6,
               .top_k = 2});
}

TEST_CASE("sparse_attention: query_offset, more queries than keys, and fewer") {
  constexpr index_t far = index_t{1} << 60;
  for (const auto& [n_q, n_k] : std::vector<std::array<index_t, 2>>{
           {40, 60}, {1, 100}, {7, 257}, {100, 7}, {97, 130}, {0, 5}, {5, 0}})
    for (const std::optional<index_t> offset :
         {std::optional<index_t>{}, std::optional<index_t>{-far}, std::optional<index_t>{-39},
          std::optional<index_t>{-1}, std::optional<index_t>{0}, std::optional<index_t>{30},
          std::optional<index_t>{200}, std::optional<index_t>{far}})
      for (const index_t window : {focus::no_window, index_t{10}, far - 20})
        for (const bool causal : {true, false})
          for (const bool separate : {true, false})
            check({.n_q = n_q,
                   .n_k = n_k,
                   .d = 8,
                   .d_v = 8,
                   .pattern = {.causal = causal,
                               .window = window,
                               .sink_tokens = 2,
                               .query_offset = offset},
                   .group_count = 3,
                   .separate_masks = separate});
}

TEST_CASE("sparse_attention: head dimensions") {
  for (const auto& [d, d_v] : head_dims)
    check({.n_q = 100,
           .n_k = 100,
           .d = d,
           .d_v = d_v,
           .pattern = {.window = 9, .sink_tokens = 1},
           .memory = layout::padded,
           .groups = grouping::runs,
           .group_count = 4,
           .top_k = 2});
}

TEST_CASE("sparse_attention: heads share kv heads") {
  for (const auto& [heads, kv_heads] :
       std::vector<std::array<index_t, 2>>{{1, 1}, {4, 4}, {4, 2}, {9, 3}, {5, 1}, {0, 0}, {0, 2}})
    check({.heads = heads, .kv_heads = kv_heads, .n_q = 50, .n_k = 50});
}

TEST_CASE("sparse_attention: storage types and layouts") {
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
               .pattern = {.window = 10, .sink_tokens = 1},
               .type = type,
               .memory = memory,
               .group_count = 4,
               .top_k = 2});
}

TEST_CASE("sparse_attention: scale, softcap and huge scores") {
  for (const focus::score_options score : {focus::score_options{},
                                           {.scale = 0.0f},
                                           {.scale = -0.7f},
                                           {.scale = 3.0f, .softcap = 5.0f},
                                           {.softcap = 50.0f}})
    for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
      for (const double magnitude : {1.0, 1e3})
        check({.n_q = 90,
               .n_k = 90,
               .d = 64,
               .d_v = 20,
               .pattern = {.window = 6, .sink_tokens = 2},
               .score = score,
               .type = type,
               .top_k = 2,
               .query_magnitude = magnitude});
}

TEST_CASE("sparse_attention: longer sequences") {
  for (const auto& [group_count, top_k] : std::vector<std::array<int, 2>>{{8, 1}, {8, 2}, {64, 4}})
    for (const grouping groups :
         {grouping::balanced, grouping::runs, grouping::skewed, grouping::scattered})
      check({.heads = 1,
             .n_q = 700,
             .n_k = 700,
             .d = 8,
             .d_v = 8,
             .pattern = {.window = 128, .sink_tokens = 1},
             .groups = groups,
             .group_count = group_count,
             .top_k = top_k});
}

TEST_CASE("sparse_attention: the same bits for any number of threads") {
  for (const storage type : all_storage) {
    const attention_case c{.heads = 3,
                           .kv_heads = 3,
                           .n_q = 211,
                           .n_k = 230,
                           .pattern = {.window = 30, .sink_tokens = 2},
                           .type = type,
                           .top_k = 2};
    INFO(describe(c));
    CHECK(check_same_bits<call>(c) == "");
  }
  for (const grouping groups : all_groupings)
    CHECK(check_same_bits<call>(
              {.n_q = 300, .n_k = 300, .groups = groups, .group_count = 64, .top_k = 4}) == "");
  CHECK(check_same_bits<call>({.n_q = 0, .n_k = 0}) == "");
}

TEST_CASE("sparse_attention: heads apart, or rows of them, have the same bits") {
  // Eight kv heads are enough for two threads to take whole heads, and not for three: a list is cut
  // into other tiles then.
  for (const layout memory : {layout::heads_first, layout::tokens_first})
    for (const bool causal : {true, false})
      for (const int top_k : {1, 2}) {
        const attention_case c{.heads = 8,
                               .kv_heads = 8,
                               .n_q = 700,
                               .n_k = 700,
                               .d = 8,
                               .d_v = 16,
                               .pattern = {.causal = causal, .window = 20, .sink_tokens = 1},
                               .memory = memory,
                               .groups = grouping::drawn,
                               .group_count = 3,
                               .top_k = top_k};
        INFO(describe(c));
        CHECK(check_same_bits<call>(c) == "");
      }
}

TEST_CASE("sparse_attention: sinks, few and many, before the windows and in them") {
  for (const index_t sinks : {1, 3, 4, 5, 70})
    for (const index_t window : {focus::no_window, index_t{0}, index_t{20}})
      for (const storage type : {storage::float32, storage::float64, storage::bfloat16}) {
        attention_case c{.n_q = 330,
                         .n_k = 330,
                         .d = 40,
                         .d_v = 64,
                         .pattern = {.window = window, .sink_tokens = sinks},
                         .type = type,
                         .top_k = 1};
        check(c);
        c.n_q = 260, c.score.softcap = 5, c.heads = 4, c.kv_heads = 2, c.d_v = 24;
        check(c);
      }
}

TEST_CASE("sparse_attention: NaN and inf in values that are read where they lie") {
  // Of whole vectors on any instruction set; a window that some rows of a strip see and others do
  // not.
  for (const storage type : {storage::float32, storage::float64})
    for (const double value : {not_a_number, infinity})
      for (const index_t key : {0, 100, 160, 299}) {
        const attention_case c{.n_q = 300,
                               .n_k = 300,
                               .d = 16,
                               .d_v = 64,
                               .pattern = {.window = 25, .sink_tokens = 1},
                               .type = type,
                               .group_count = 4};
        INFO(describe(c));
        CHECK(check_poisoned_key<call>(c, key, value) == "");
      }
}

TEST_CASE("sparse_attention: NaN and inf in a key reach the rows that attend to it") {
  for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
    for (const double value : {not_a_number, infinity, -infinity})
      for (const index_t key : {0, 1, 50, 99}) {
        // What infinities do to a storage type, they do to all.
        if (type != storage::float32 && value == value) continue;
        for (const grouping groups :
             {grouping::balanced, grouping::runs, grouping::mixed, grouping::scattered})
          for (const int group_count : {4, 64})
            for (const bool causal : {true, false}) {
              const attention_case c{
                  .n_q = 100,
                  .n_k = 100,
                  .pattern = {.causal = causal, .window = key == 50 ? focus::no_window : 7},
                  .type = type,
                  .groups = groups,
                  .group_count = group_count,
                  .top_k = 2};
              INFO(describe(c) << ", key " << key << ", value " << value);
              CHECK(check_poisoned_key<call>(c, key, value) == "");
            }
      }
}

TEST_CASE("sparse_attention: NaN in a query reaches its row only") {
  for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
    for (const index_t query : {0, 1, 3, 6, 50, 99})
      for (const index_t window : {focus::no_window, index_t{0}, index_t{10}})
        for (const grouping groups :
             {grouping::balanced, grouping::mixed, grouping::zero, grouping::scattered}) {
          const attention_case c{.n_q = 100,
                                 .n_k = 100,
                                 .pattern = {.window = window},
                                 .type = type,
                                 .groups = groups};
          INFO(describe(c) << ", query " << query);
          CHECK(check_poisoned_query<call>(c, 1, query) == "");
        }
}

TEST_CASE("sparse_attention: an infinite query") {
  for (const double value : {infinity, -infinity})
    CHECK(check_poisoned_query<call>({.n_q = 50, .n_k = 50}, 1, 20, value) == "");
}

TEST_CASE("sparse_attention: NaN and inf in one of many blocks of keys") {
  for (const grouping groups : {grouping::balanced, grouping::scattered})
    for (const double value : {not_a_number, infinity, -infinity})
      for (const index_t key : {0, 300, 799}) {
        const attention_case c{.heads = 1,
                               .n_q = 40,
                               .n_k = 800,
                               .d = 4,
                               .d_v = 4,
                               .pattern = {.window = 3},
                               .groups = groups,
                               .group_count = 2};
        INFO(describe(c) << ", key " << key << ", value " << value);
        CHECK(check_poisoned_key<call>(c, key, value) == "");
      }
}

TEST_CASE("sparse_attention: scores of -inf") {
  for (const storage type : {storage::float32, storage::float64})
    for (const grouping groups : {grouping::balanced, grouping::runs, grouping::scattered})
      for (const index_t count : {1, 300, 600})
        for (const bool first : {true, false})
          for (const index_t window : {focus::no_window, index_t{8}}) {
            const attention_case c{.heads = 1,
                                   .n_q = 600,
                                   .n_k = 600,
                                   .d = 2,
                                   .d_v = 2,
                                   .pattern = {.window = window},
                                   .type = type,
                                   .groups = groups,
                                   .group_count = 2};
            INFO(describe(c) << ", count " << count << (first ? ", first" : ", last"));
            CHECK(check_vanishing_keys<call>(c, count, first) == "");
          }
}

TEST_CASE("sparse_attention: earlier rows do not see later tokens") {
  for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
    for (const index_t first : {1, 40, 100, 149})
      for (const grouping groups : {grouping::balanced, grouping::scattered}) {
        const attention_case c{.n_q = 150,
                               .n_k = 150,
                               .pattern = {.window = 20, .sink_tokens = 1},
                               .type = type,
                               .groups = groups,
                               .top_k = 2};
        INFO(describe(c) << ", first " << first);
        CHECK(check_later_tokens<call>(c, first) == "");
      }
}

TEST_CASE("sparse_attention: an unlimited window, or one group, is dense attention") {
  attention_case c{.n_q = 80,
                   .n_k = 80,
                   .pattern = {.window = focus::unlimited_window},
                   .groups = grouping::zero};
  const problem<float> p(c);
  CHECK(compare(p, solve<call>(p), operation::attention) == "");
  problem<float> grouped(c);
  grouped.query_masks.assign(80, 1), grouped.key_masks.assign(80, 1);
  grouped.spec.pattern.window = focus::no_window;
  const answer<float> a = solve<call>(grouped);
  CHECK(compare(p, a, operation::attention) == "");
}

TEST_CASE("sparse_attention: masks of zero leave the window and the sinks") {
  const attention_case c{
      .n_q = 80, .n_k = 80, .pattern = {.window = 5, .sink_tokens = 2}, .groups = grouping::zero};
  const problem<float> p(c);
  CHECK(compare(p, solve<call>(p), operation::attention) == "");
}

TEST_CASE("sparse_attention: one plan serves many calls, its copies too") {
  const attention_case c{.n_q = 70, .n_k = 70, .top_k = 2};
  const problem<float> p(c);
  focus::routing_plan plan = focus::make_routing_plan(p.query_masks, p.key_masks, c.pattern);
  const focus::routing_plan copy = plan;
  const attention_case other{.n_q = 70, .n_k = 70, .groups = grouping::runs, .seed = 5};
  const problem<float> o(other);
  plan.rebuild(o.query_masks, o.key_masks, other.pattern);
  answer<float> a(c), b(other);
  focus::sparse_attention(p.q.view(), p.k.view(), p.v.view(), copy, a.out.view(), {}, a.lse.view());
  CHECK(compare(p, a, call::op) == "");
  const focus::routing_plan moved = std::move(plan);
  focus::sparse_attention(o.q.view(), o.k.view(), o.v.view(), moved, b.out.view(), {},
                          b.lse.view());
  CHECK(compare(o, b, call::op) == "");
}

TEST_CASE("sparse_attention: the reference takes the plan") {
  const attention_case c{.n_q = 30, .n_k = 35, .top_k = 2, .separate_masks = true};
  const problem<float> p(c);
  const focus::routing_plan plan = focus::make_routing_plan(p.query_masks, p.key_masks, c.pattern);
  answer<float> a(c), b(c);
  focus::reference::sparse_attention(p.q.view(), p.k.view(), p.v.view(), plan, a.out.view(), {},
                                     a.lse.view());
  CHECK(compare(p, a, call::op) == "");
  focus::reference::sparse_attention(p.q.view(), p.k.view(), p.v.view(), plan, b.out.view());
  CHECK(b.out.same_bits(a.out));
}

TEST_CASE("sparse_attention: lse in double, and no arguments but five") {
  const attention_case c{.n_q = 50, .n_k = 50};
  problem<float> p(c);
  const focus::routing_plan plan = focus::make_routing_plan(p.query_masks, p.key_masks, c.pattern);
  answer<float, double> a(c);
  focus::sparse_attention(p.q.view(), p.k.view(), p.v.view(), plan, a.out.view(), {}, a.lse.view());
  CHECK(compare(p, a, call::op) == "");
  answer<float> b(c), d(c);
  focus::sparse_attention(p.q.view(), p.k.view(), p.v.view(), plan, b.out.view());
  CHECK(b.out.same_bits(a.out));
  focus::sparse_attention(p.q.view(), p.k.view(), p.v.view(), plan, d.out.view(), {}, {}, {});
  CHECK(d.out.same_bits(a.out));
}

TEST_CASE("sparse_attention: nothing at all") {
  using view = focus::tensor_view<float, 3>;
  const focus::routing_plan plan = focus::make_routing_plan(std::vector<group_mask>{});
  focus::sparse_attention(view(), view(), view(), plan, view());
  focus::sparse_attention(view(nullptr, {2, 0, 8}), view(nullptr, {1, 0, 8}),
                          view(nullptr, {1, 0, 8}), plan, view(nullptr, {2, 0, 8}));
  check({.n_q = 9, .n_k = 9, .d = 0, .d_v = 4});
  check({.n_q = 9, .n_k = 9, .d = 4, .d_v = 0});
}

TEST_CASE("sparse_attention: exceptions from a loop reach the caller") {
  CHECK(throws_from_body<call>({}, 0));
  CHECK(throws_from_body<call>({.heads = 4, .kv_heads = 4, .n_q = 200, .n_k = 200}, 1));
}

TEST_CASE("sparse_attention: bad arguments") {
  check_refusals<call>();

  // A plan made for other lengths.
  const attention_case c{.n_q = 5, .n_k = 7};
  const problem<float> p(c);
  answer<float> a(c);
  for (const auto& [n_q, n_k] :
       std::vector<std::array<std::size_t, 2>>{{4, 7}, {6, 7}, {5, 6}, {5, 8}, {7, 5}, {0, 0}}) {
    const focus::routing_plan plan =
        focus::make_routing_plan(std::vector<group_mask>(n_q, 1), std::vector<group_mask>(n_k, 1));
    CHECK(refusal("plan", [&] {
            focus::sparse_attention(p.q.view(), p.k.view(), p.v.view(), plan, a.out.view(), {},
                                    a.lse.view(), thread_executor(1));
          }) == "");
    CHECK(a.untouched());
  }
}

}  // namespace test_sparse_attention
