// Gradients of softly gated attention against the textbook, and the textbook against central
// differences.
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "attention_checks.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/soft_gate.hpp"
#include "focus/soft_gate_backward.hpp"
#include "gradient_checks.hpp"
#include "oracle.hpp"

namespace test_soft_gate_backward {
namespace {

using namespace oracle;

constexpr operation op = operation::soft_gate;
constexpr std::array both_kinds{focus::gate_kind::score, focus::gate_kind::weight};

void check(const attention_case& c) {
  INFO(describe(c));
  CHECK(check_gradients<op>(c) == "");
}

}  // namespace

TEST_CASE("soft_gate_attention_backward: the textbook agrees with central differences") {
  for (const focus::gate_kind kind : both_kinds)
    for (const float softcap : {0.0f, 2.0f})
      for (const bool causal : {true, false})
        for (const int groups : {1, 4}) {
          const attention_case c{.heads = 4,
                                 .kv_heads = 2,
                                 .n_q = 11,
                                 .n_k = 13,
                                 .d = 5,
                                 .d_v = 3,
                                 .pattern = {.causal = causal, .window = 1, .sink_tokens = 1},
                                 .score = {.softcap = softcap},
                                 .group_count = groups,
                                 .gate = {.kind = kind, .sharpness = 3.0f}};
          INFO(describe(c));
          CHECK(largest_difference(c, op, 25) < 1e-7);
        }
}

TEST_CASE("soft_gate_attention_backward: lengths around the tiles") {
  for (const index_t n : odd_lengths)
    for (const focus::gate_kind kind : both_kinds)
      check({.n_q = n,
             .n_k = n,
             .pattern = {.causal = n % 3 != 0, .window = 5, .sink_tokens = 1},
             .gate = {.kind = kind}});
}

TEST_CASE("soft_gate_attention_backward: groups and windows") {
  for (const focus::gate_kind kind : both_kinds)
    for (const int groups : {1, 3, 16, 17, 64})
      for (const index_t window :
           {focus::no_window, index_t{0}, index_t{20}, focus::unlimited_window})
        for (const bool one_hot : {false, true})
          check({.n_q = 70,
                 .n_k = 90,
                 .d = 8,
                 .d_v = 8,
                 .pattern = {.window = window, .sink_tokens = window == 20 ? 2 : 0},
                 .group_count = groups,
                 .separate_masks = true,
                 .gate = {.kind = kind, .sharpness = 2.0f},
                 .one_hot_assignment = one_hot});
}

TEST_CASE("soft_gate_attention_backward: head dimensions, heads, storage, layouts, lengths") {
  for (const focus::gate_kind kind : both_kinds) {
    for (const auto& [d, d_v] : head_dims)
      check({.n_q = 40, .n_k = 40, .d = d, .d_v = d_v, .gate = {.kind = kind}});
    for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
      for (const layout memory :
           {layout::heads_first, layout::tokens_first, layout::padded, layout::misaligned})
        check({.heads = 6,
               .kv_heads = 2,
               .n_q = 61,
               .n_k = 70,
               .d = 20,
               .d_v = 12,
               .score = {.softcap = 3.0f},
               .type = type,
               .memory = memory,
               .gate = {.kind = kind}});
    for (const auto& [n_q, n_k] :
         std::vector<std::array<index_t, 2>>{{1, 100}, {100, 7}, {0, 5}, {5, 0}})
      check({.n_q = n_q, .n_k = n_k, .gate = {.kind = kind}});
  }
}

TEST_CASE("soft_gate_attention_backward: the same bits for any threads") {
  for (const focus::gate_kind kind : both_kinds)
    CHECK(check_gradient_bits<op>({.heads = 4,
                                   .kv_heads = 2,
                                   .n_q = 500,
                                   .n_k = 500,
                                   .d = 8,
                                   .d_v = 8,
                                   .gate = {.kind = kind}}) == "");
}

TEST_CASE("soft_gate_attention_backward: what is left out changes nothing else") {
  const attention_case c{.heads = 4, .kv_heads = 2, .gate = {.kind = focus::gate_kind::weight}};
  gradient_problem<float> p(c);
  p.attend(op);
  const gradients<float> all = differentiate<op>(p);
  const call_inputs<float> in = p.inputs();
  gradients<float> some(c), lse_only(c), no_dlse(c), zeros(c);

  focus::soft_gate_attention_backward(
      in.q, in.k, in.v, in.query_assignment, in.key_assignment, in.gate, p.out.view(), p.lse.view(),
      p.dout.view(), p.dlse.view(), {}, {}, {}, some.dquery.view(), {}, in.pattern);
  CHECK(some.dquery.same_bits(all.dquery));
  focus::soft_gate_attention_backward(
      in.q, in.k, in.v, in.query_assignment, in.key_assignment, in.gate, p.out.view(), p.lse.view(),
      p.dout.view(), p.dlse.view(), {}, some.dk.view(), {}, {}, some.dkey.view(), in.pattern);
  CHECK(some.dk.same_bits(all.dk));
  CHECK(some.dkey.same_bits(all.dkey));

  // The sum of what dout and dlse give alone. A dout of zeros is no dout.
  focus::soft_gate_attention_backward(in.q, in.k, in.v, in.query_assignment, in.key_assignment,
                                      in.gate, {}, p.lse.view(), {}, p.dlse.view(),
                                      lse_only.dq.view(), lse_only.dk.view(), lse_only.dv.view(),
                                      lse_only.dquery.view(), lse_only.dkey.view(), in.pattern);
  focus::soft_gate_attention_backward(in.q, in.k, in.v, in.query_assignment, in.key_assignment,
                                      in.gate, p.out.view(), p.lse.view(), p.dout.view(), {},
                                      no_dlse.dq.view(), no_dlse.dk.view(), no_dlse.dv.view(),
                                      no_dlse.dquery.view(), no_dlse.dkey.view(), in.pattern);
  const auto whole = all.values(), a = lse_only.values(), b = no_dlse.values();
  for (std::size_t x = 0; x < whole.size(); ++x) {
    std::vector<double> sum = a[x];
    for (std::size_t at = 0; at < sum.size(); ++at) sum[at] += b[x][at];
    INFO(gradient_names[x]);
    CHECK(compare_values(gradient_names[x], sum, whole[x], 1e-5 * largest_magnitude(whole[x])) ==
          "");
  }
  CHECK(largest_magnitude(lse_only.dv.values()) == 0);
}

TEST_CASE("soft_gate_attention_backward: a pruned pair has a finite gradient, and can come back") {
  // Group 0 and group 1 share nothing: all distant pairs between them are pruned.
  const attention_case c{.heads = 1,
                         .n_q = 40,
                         .n_k = 40,
                         .pattern = {.window = 0},
                         .group_count = 2,
                         .gate = {.kind = focus::gate_kind::weight},
                         .one_hot_assignment = true};
  gradient_problem<float> p(c);
  // A pruned key whose score is far above all others: exp(s - lse) leaves the range of float.
  for (index_t x = 0; x < c.d; ++x) p.k.view()(0, 3, x) *= 400;
  p.attend(op);
  const gradients<float> g = differentiate<op>(p);
  for (const auto& values : g.values())
    for (const double x : values) CHECK(std::isfinite(x));
  CHECK(largest_magnitude(g.dquery.values()) > 0);
}

TEST_CASE("soft_gate_attention_backward: empty rows, and what hidden pairs hold") {
  // Nothing but distant pairs, all pruned for some rows.
  check({.n_q = 40,
         .n_k = 40,
         .pattern = {.window = focus::no_window},
         .group_count = 2,
         .gate = {.kind = focus::gate_kind::weight},
         .one_hot_assignment = true});

  // What causality hides reaches nobody: not through K, V, nor the assignments.
  const attention_case c{.heads = 1, .n_q = 60, .n_k = 60};
  for (const focus::gate_kind kind : both_kinds) {
    attention_case of_kind = c;
    of_kind.gate.kind = kind;
    gradient_problem<float> clean(of_kind), poisoned(of_kind);
    clean.attend(op);
    const auto nan = static_cast<float>(not_a_number);
    poisoned.k.view()(0, 50, 0) = nan;
    poisoned.v.view()(0, 50, 0) = nan;
    poisoned.key_assignment.view()(50, 0) = nan;
    poisoned.attend(op);
    const gradients<float> a = differentiate<op>(clean), b = differentiate<op>(poisoned);
    for (index_t i = 0; i < 50; ++i) {
      INFO(i);
      CHECK(oracle::same_row_bits<float>(a.dq.view(), b.dq.view(), 0, i));
      for (index_t x = 0; x < c.group_count; ++x)
        CHECK(a.dquery.view()(i, x) == b.dquery.view()(i, x));
    }
  }
}

TEST_CASE("soft_gate_attention_backward: the assignment of no keys may have any shape") {
  const attention_case c{.heads = 1, .n_q = 2, .n_k = 0, .group_count = 4};
  gradient_problem<float> p(c);
  gradients<float> g(c);
  const call_inputs<float> in = p.inputs();
  const focus::matrix_view<const float> of_none(nullptr, {0, 64});
  focus::soft_gate_attention(in.q, in.k, in.v, in.query_assignment, of_none, in.gate, p.out.view(),
                             in.pattern, in.score, p.lse.view());
  focus::soft_gate_attention_backward(in.q, in.k, in.v, in.query_assignment, of_none, in.gate,
                                      p.out.view(), p.lse.view(), p.dout.view(), {}, {}, {}, {},
                                      g.dquery.view(), {}, in.pattern);
  CHECK(g.guards_hold());
  CHECK(largest_magnitude(g.dquery.values()) == 0);
}

TEST_CASE("soft_gate_attention_backward: sharpness and lse at the ends of the range") {
  for (const focus::gate_kind kind : both_kinds) {
    gradient_problem<float> p({.gate = {.kind = kind, .sharpness = 3e38f}});
    p.attend(op);
    for (const auto& values : differentiate<op>(p).values())
      for (const double x : values) CHECK(std::isfinite(x));
  }
  // A logsumexp far below all scores, as no forward pass writes it: what a row does not see stays
  // out of its reach.
  const attention_case c{.heads = 1, .n_q = 20, .n_k = 20};
  gradient_problem<float> p(c);
  p.attend(op);
  p.lse.view()(0, 3) = std::numeric_limits<float>::lowest();
  const gradients<float> g = differentiate<op>(p);
  for (index_t j = 4; j < c.n_k; ++j)
    for (index_t x = 0; x < c.d_v; ++x) CHECK(std::isfinite(g.dv.view()(0, j, x)));
}

TEST_CASE("soft_gate_attention_backward: no allocation with a workspace") {
  const attention_case c{.n_q = 100, .n_k = 100};
  gradient_problem<float> p(c);
  p.attend(op);
  gradients<float> g(c);
  const call_inputs<float> in = p.inputs();
  focus::workspace scratch;
  const auto run = [&] {
    focus::soft_gate_attention_backward(in.q, in.k, in.v, in.query_assignment, in.key_assignment,
                                        in.gate, p.out.view(), p.lse.view(), p.dout.view(),
                                        p.dlse.view(), g.dq.view(), g.dk.view(), g.dv.view(),
                                        g.dquery.view(), g.dkey.view(), in.pattern, {},
                                        focus::with_workspace(focus::serial_executor{}, scratch));
  };
  run();
  CHECK(allocations_of(run) == 0);
}

TEST_CASE("soft_gate_attention_backward: bad arguments are refused by name, with nothing written") {
  const attention_case c{.n_q = 6, .n_k = 6, .group_count = 4};
  gradient_problem<float> p(c);
  p.attend(op);
  gradients<float> g(c);
  const call_inputs<float> in = p.inputs();
  using matrix = focus::matrix_view<float>;
  std::vector<float> spare(400, 7.0f);
  using in_matrix = focus::matrix_view<const float>&;
  using out_matrix = matrix&;
  using options = focus::gate_options&;
  using change_of =
      std::function<void(in_matrix, in_matrix, in_matrix, out_matrix, out_matrix, options)>;
  const auto refuse = [&](const char* name, const change_of& change) {
    focus::matrix_view<const float> g_q = in.query_assignment, g_k = in.key_assignment;
    focus::matrix_view<const float> dlse = p.dlse.view();
    matrix dg_q = g.dquery.view(), dg_k = g.dkey.view();
    focus::gate_options gate = in.gate;
    change(g_q, g_k, dlse, dg_q, dg_k, gate);
    CHECK(refusal(name, [&] {
            focus::soft_gate_attention_backward(in.q, in.k, in.v, g_q, g_k, gate, p.out.view(),
                                                p.lse.view(), p.dout.view(), dlse, g.dq.view(),
                                                g.dk.view(), g.dv.view(), dg_q, dg_k, in.pattern);
          }) == "");
    CHECK(g.untouched());
    CHECK(std::all_of(spare.begin(), spare.end(), [](float x) { return x == 7.0f; }));
  };
  refuse("query_assignment",
         [&](in_matrix g_q, in_matrix, in_matrix, out_matrix, out_matrix, options) {
           g_q = matrix(spare.data(), {6, 3});
         });
  refuse("key_assignment",
         [&](in_matrix, in_matrix g_k, in_matrix, out_matrix, out_matrix, options) {
           g_k = matrix(spare.data(), {5, 4});
         });
  refuse("dlse", [&](in_matrix, in_matrix, in_matrix dlse, out_matrix, out_matrix, options) {
    dlse = matrix(spare.data(), {3, 6});
  });
  refuse("dquery_assignment",
         [&](in_matrix, in_matrix, in_matrix, out_matrix dg_q, out_matrix, options) {
           dg_q = matrix(spare.data(), {6, 5});
         });
  refuse("dkey_assignment",
         [&](in_matrix, in_matrix, in_matrix, out_matrix, out_matrix dg_k, options) {
           dg_k = matrix(nullptr, {6, 4});
         });
  refuse("dkey_assignment",
         [&](in_matrix, in_matrix g_k, in_matrix, out_matrix, out_matrix dg_k, options) {
           g_k = matrix(spare.data(), {6, 4}), dg_k = matrix(spare.data() + 23, {6, 4});
         });
  refuse("dkey_assignment",
         [&](in_matrix, in_matrix, in_matrix, out_matrix dg_q, out_matrix dg_k, options) {
           dg_q = matrix(spare.data(), {6, 4}), dg_k = matrix(spare.data(), {6, 4});
         });
  for (const double bad : {not_a_number, infinity, -infinity})
    refuse("sharpness", [bad](in_matrix, in_matrix, in_matrix, out_matrix, out_matrix,
                              options gate) { gate.sharpness = static_cast<float>(bad); });
}

}  // namespace test_soft_gate_backward
