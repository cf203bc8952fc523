// Gradients on the plan against the textbook, which decides each pair from the masks.
#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "attention_checks.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/routing_plan.hpp"
#include "focus/sparse_attention.hpp"
#include "focus/sparse_attention_backward.hpp"
#include "gradient_checks.hpp"
#include "oracle.hpp"
#include "pairwise.hpp"

namespace test_sparse_attention_backward {
namespace {

using namespace oracle;

constexpr operation op = operation::sparse;

void check(const attention_case& c) {
  INFO(describe(c));
  CHECK(check_gradients<op>(c) == "");
}

}  // namespace

TEST_CASE("sparse_attention_backward: the textbook agrees with central differences") {
  for (const grouping groups : all_groupings)
    for (const bool causal : {true, false}) {
      const attention_case c{.heads = 2,
                             .n_q = 11,
                             .n_k = 13,
                             .d = 5,
                             .d_v = 3,
                             .pattern = {.causal = causal, .window = 1, .sink_tokens = 1},
                             .score = {.softcap = 2.0f},
                             .groups = groups,
                             .separate_masks = true};
      INFO(describe(c));
      CHECK(largest_difference(c, op, 20) < 1e-8);
    }
}

TEST_CASE("sparse_attention_backward: groupings, in every layout of a plan") {
  for_each_pairing(
      [](grouping groups, const std::array<int, 2>& counts, index_t window, bool causal) {
        check({.n_q = 109,
               .n_k = 109,
               .d = 8,
               .d_v = 8,
               .pattern = {.causal = causal, .window = window, .sink_tokens = window == 20 ? 1 : 0},
               .groups = groups,
               .group_count = counts[0],
               .top_k = counts[1],
               .separate_masks = window == 0});
      },
      all_groupings,
      std::vector<std::array<int, 2>>{{1, 1}, {4, 1}, {4, 2}, {8, 3}, {64, 1}, {64, 4}},
      std::array{focus::no_window, index_t{0}, index_t{20}}, std::array{true, false});
  // Cells of many tiles, and lists, in two rounds and three.
  for (const int top_k : {1, 2, 3})
    for (const index_t window : {focus::no_window, index_t{9}})
      check({.n_q = 700,
             .n_k = 700,
             .d = 4,
             .d_v = 4,
             .pattern = {.window = window, .sink_tokens = 1},
             .groups = top_k == 1 ? grouping::balanced : grouping::drawn,
             .group_count = top_k == 1 ? 3 : 16,
             .top_k = top_k});
}

TEST_CASE("sparse_attention_backward: lengths around the tiles") {
  for (const index_t n : odd_lengths)
    for (const int top_k : {1, 2})
      check({.n_q = n,
             .n_k = n,
             .pattern = {.causal = n % 2 == 0, .window = 5, .sink_tokens = 1},
             .group_count = 3,
             .top_k = top_k});
}

TEST_CASE("sparse_attention_backward: head dimensions, heads, storage, layouts, lengths") {
  for (const auto& [d, d_v] : head_dims) check({.n_q = 70, .n_k = 70, .d = d, .d_v = d_v});
  for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
    for (const layout memory :
         {layout::heads_first, layout::tokens_first, layout::padded, layout::misaligned})
      check({.heads = 6,
             .kv_heads = 2,
             .n_q = 61,
             .n_k = 90,
             .d = 20,
             .d_v = 12,
             .score = {.softcap = 3.0f},
             .type = type,
             .memory = memory,
             .top_k = 2,
             .separate_masks = true});
  for (const auto& [n_q, n_k] :
       std::vector<std::array<index_t, 2>>{{1, 100}, {100, 7}, {0, 5}, {5, 0}})
    check({.n_q = n_q, .n_k = n_k, .separate_masks = true});
}

TEST_CASE("sparse_attention_backward: the same bits for any threads") {
  for (const int top_k : {1, 2})
    CHECK(check_gradient_bits<op>({.heads = 4,
                                   .kv_heads = 2,
                                   .n_q = 900,
                                   .n_k = 900,
                                   .d = 8,
                                   .d_v = 8,
                                   .pattern = {.window = 40, .sink_tokens = 1},
                                   .top_k = top_k}) == "");
}

TEST_CASE("sparse_attention_backward: dlse, the textbook agrees with central differences") {
  for (const grouping groups : all_groupings)
    for (const attention_case& c : with_dlse({.heads = 2,
                                   .n_q = 11,
                                   .n_k = 13,
                                   .d = 5,
                                   .d_v = 3,
                                   .pattern = {.window = 1, .sink_tokens = 1},
                                   .groups = groups,
                                   .separate_masks = true})) {
      INFO(describe(c));
      CHECK(largest_difference(c, op, 20) < 1e-8);
    }
}

TEST_CASE("sparse_attention_backward: dlse, alone and with dout") {
  for (const grouping groups : all_groupings)
    for (const index_t window : {focus::no_window, index_t{0}, index_t{20}, index_t{109}})
      for (const attention_case& c : with_dlse({.heads = 4,
                                     .kv_heads = 2,
                                     .n_q = 109,
                                     .n_k = 109,
                                     .d = 8,
                                     .d_v = 8,
                                     .pattern = {.window = window},
                                     .groups = groups,
                                     .top_k = 2}))
        check(c);
  for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
    for (const attention_case& c : with_dlse({.heads = 6,
                                   .kv_heads = 2,
                                   .n_q = 61,
                                   .n_k = 90,
                                   .d = 20,
                                   .d_v = 12,
                                   .score = {.softcap = 3.0f},
                                   .type = type,
                                   .memory = layout::tokens_first,
                                   .top_k = 2,
                                   .separate_masks = true}))
      check(c);
  for (const index_t n : {0, 1, 2})
    for (const attention_case& c : with_dlse({.n_q = n, .n_k = n})) check(c);
  for (const attention_case& c : with_dlse({.heads = 4,
                                 .kv_heads = 2,
                                 .n_q = 900,
                                 .n_k = 900,
                                 .d = 8,
                                 .d_v = 8,
                                 .pattern = {.window = 40, .sink_tokens = 1},
                                 .top_k = 2}))
    CHECK(check_gradient_bits<op>(c) == "");
}

TEST_CASE("sparse_attention_backward: dlse of rows that see no key") {
  for (const grouping groups : {grouping::zero, grouping::mixed, grouping::balanced})
    CHECK(check_dlse_of_empty_rows<op>(
              {.n_q = 70,
               .n_k = 30,
               .pattern = {.window = groups == grouping::balanced ? index_t{3} : focus::no_window},
               .groups = groups}) == "");
}

TEST_CASE("sparse_attention_backward: {} in each place that may be empty") {
  const attention_case c{.heads = 4, .kv_heads = 2};
  gradient_problem<float> p(c);
  p.attend(op);
  gradients<float> g(c);
  const call_inputs<float> in = p.inputs();
  const auto out = p.out.view(), dout = p.dout.view(), dq = g.dq.view(), dk = g.dk.view(),
             dv = g.dv.view();
  const auto lse = p.lse.view(), dlse = p.dlse.view();
  using none = focus::matrix_view<const float>;
  const auto& plan = p.plan;
  focus::sparse_attention_backward(in.q, in.k, in.v, plan, out, lse, dout, {}, {}, {});
  focus::sparse_attention_backward(in.q, in.k, in.v, plan, out, lse, dout, {}, {}, {}, {}, {});
  focus::sparse_attention_backward(in.q, in.k, in.v, plan, out, lse, dout, {}, dk, dv, {});
  focus::sparse_attention_backward(in.q, in.k, in.v, plan, out, lse, dout, dq, {}, {}, {}, {});
  focus::sparse_attention_backward(in.q, in.k, in.v, plan, out, lse, dout, dlse, {}, {}, {});
  focus::sparse_attention_backward(in.q, in.k, in.v, plan, out, lse, dout, none{}, {}, dk, {}, {});
  focus::sparse_attention_backward(in.q, in.k, in.v, plan, {}, lse, {}, dlse, dq, {}, dv, {}, {});
  focus::sparse_attention_backward(in.q, in.k, in.v, plan, {}, lse, {}, none{}, {}, {}, {}, {}, {});
  namespace reference = focus::reference;
  reference::sparse_attention_backward(in.q, in.k, in.v, plan, out, lse, dout, {}, {}, {}, {}, {});
  reference::sparse_attention_backward(in.q, in.k, in.v, plan, {}, lse, {}, dlse, {}, dk, {}, {});
  CHECK(g.guards_hold());
}

TEST_CASE("sparse_attention_backward: no allocation with a workspace") {
  const attention_case c{.n_q = 300, .n_k = 300};
  gradient_problem<float> p(c);
  p.attend(op);
  gradients<float> g(c);
  const call_inputs<float> in = p.inputs();
  focus::workspace scratch;
  const auto run = [&] {
    focus::sparse_attention_backward(in.q, in.k, in.v, p.plan, p.out.view(), p.lse.view(),
                                     p.dout.view(), g.dq.view(), g.dk.view(), g.dv.view(), {},
                                     focus::with_workspace(focus::serial_executor{}, scratch));
  };
  run();
  CHECK(allocations_of(run) == 0);
}

TEST_CASE("sparse_attention_backward: bad arguments are refused by name, with nothing written") {
  const attention_case c{.n_q = 30, .n_k = 30};
  gradient_problem<float> p(c);
  p.attend(op);
  gradients<float> g(c);
  const call_inputs<float> in = p.inputs();
  const focus::routing_plan other = focus::make_routing_plan(std::vector<group_mask>(29, 1));
  const auto call = [&](const focus::routing_plan& plan, auto dq, focus::score_options score) {
    focus::sparse_attention_backward(in.q, in.k, in.v, plan, p.out.view(), p.lse.view(),
                                     p.dout.view(), dq, g.dk.view(), g.dv.view(), score);
  };
  CHECK(refusal("plan", [&] { call(other, g.dq.view(), {}); }) == "");
  CHECK(refusal("softcap", [&] { call(p.plan, g.dq.view(), {.softcap = -1.0f}); }) == "");
  CHECK(refusal("dq", [&] { call(p.plan, g.dk.view(), {}); }) == "");
  const auto call_with_dlse = [&](const focus::routing_plan& plan, auto dlse, auto dq) {
    focus::sparse_attention_backward(in.q, in.k, in.v, plan, p.out.view(), p.lse.view(),
                                     p.dout.view(), dlse, dq, g.dk.view(), g.dv.view());
  };
  CHECK(refusal("plan", [&] { call_with_dlse(other, p.dlse.view(), g.dq.view()); }) == "");
  std::vector<float> spare(2 * 30 * 16, 7.0f);
  const focus::matrix_view<float> long_dlse(spare.data(), {2, 31}), dlse(spare.data(), {2, 30});
  CHECK(refusal("dlse", [&] { call_with_dlse(p.plan, long_dlse, g.dq.view()); }) == "");
  const focus::tensor_view<float, 3> dq(spare.data(), {2, 30, 16});
  CHECK(refusal("dq", [&] { call_with_dlse(p.plan, dlse, dq); }) == "");
  CHECK(std::all_of(spare.begin(), spare.end(), [](float x) { return x == 7.0f; }));
  CHECK(g.untouched());
}

}  // namespace test_sparse_attention_backward
