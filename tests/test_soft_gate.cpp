// Focus attention with the soft gate, both kinds, against the textbook.
#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "attention_checks.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/options.hpp"
#include "focus/soft_gate.hpp"
#include "oracle.hpp"

namespace test_soft_gate {
namespace {

using namespace oracle;
using focus::gate_kind;

constexpr std::array both_gates{focus::gate_options{},
                                focus::gate_options{.kind = gate_kind::weight}};

struct call {
  static constexpr operation op = operation::soft_gate;
  template <class T, class Out, class Lse, class Exec>
  void operator()(const call_inputs<T>& in, Out out, Lse lse, Exec&& exec) const {
    focus::soft_gate_attention(in.q, in.k, in.v, in.query_assignment, in.key_assignment, in.gate,
                               out, in.pattern, in.score, lse, exec);
  }
};

void check(const attention_case& c) {
  INFO(describe(c));
  CHECK(check_values<call>(c) == "");
}

}  // namespace

TEST_CASE("soft_gate: kinds, groups and sharpness") {
  for (const gate_kind kind : {gate_kind::score, gate_kind::weight})
    for (const int groups : {1, 2, 3, 7, 8, 16, 17, 64})
      for (const float sharpness : {0.0f, 1.0f, 10.0f, 1000.0f, -3.0f})
        for (const bool causal : {true, false})
          if (kind == gate_kind::score || sharpness == 10.0f)
            check({.n_q = 70,
                   .n_k = 70,
                   .pattern = {.causal = causal, .window = 9, .sink_tokens = 1},
                   .group_count = groups,
                   .gate = {.kind = kind, .sharpness = sharpness}});
}

TEST_CASE("soft_gate: lengths around the tiles") {
  for (const index_t n : odd_lengths)
    for (const focus::gate_options gate : both_gates)
      for (const bool causal : {true, false})
        check({.n_q = n,
               .n_k = n,
               .pattern = {.causal = causal, .window = 5, .sink_tokens = 1},
               .gate = gate});
}

TEST_CASE("soft_gate: windows and sinks") {
  for (const index_t window : odd_windows)
    for (const index_t sinks :
         {index_t{0}, index_t{1}, index_t{4}, index_t{60}, focus::unlimited_window})
      for (const bool causal : {true, false})
        for (const focus::gate_options gate : both_gates)
          check({.n_q = 60,
                 .n_k = 60,
                 .pattern = {.causal = causal, .window = window, .sink_tokens = sinks},
                 .gate = gate});
}

TEST_CASE("soft_gate: query_offset, more queries than keys, and fewer") {
  constexpr index_t far = index_t{1} << 60;
  for (const auto& [n_q, n_k] :
       std::vector<std::array<index_t, 2>>{{40, 60}, {1, 100}, {7, 257}, {100, 7}, {0, 5}, {5, 0}})
    for (const std::optional<index_t> offset :
         {std::optional<index_t>{}, std::optional<index_t>{-far}, std::optional<index_t>{-1},
          std::optional<index_t>{0}, std::optional<index_t>{30}, std::optional<index_t>{200},
          std::optional<index_t>{far}})
      for (const index_t window : {focus::no_window, index_t{10}, far - 20})
        for (const bool causal : {true, false})
          for (const focus::gate_options gate : both_gates)
            check({.n_q = n_q,
                   .n_k = n_k,
                   .d = 8,
                   .d_v = 8,
                   .pattern = {.causal = causal,
                               .window = window,
                               .sink_tokens = 2,
                               .query_offset = offset},
                   .gate = gate});
}

TEST_CASE("soft_gate: head dimensions and heads") {
  for (const auto& [d, d_v] : head_dims)
    for (const focus::gate_options gate : both_gates)
      check({.n_q = 60, .n_k = 60, .d = d, .d_v = d_v, .memory = layout::padded, .gate = gate});
  for (const auto& [heads, kv_heads] :
       std::vector<std::array<index_t, 2>>{{1, 1}, {4, 4}, {4, 2}, {9, 3}, {5, 1}, {0, 0}, {0, 2}})
    check({.heads = heads, .kv_heads = kv_heads, .n_q = 50, .n_k = 50});
}

TEST_CASE("soft_gate: storage types and layouts") {
  for (const storage type : all_storage)
    for (const layout memory :
         {layout::heads_first, layout::tokens_first, layout::padded, layout::misaligned})
      for (const focus::gate_options gate : both_gates)
        check({.heads = 4,
               .kv_heads = 2,
               .n_q = 75,
               .n_k = 83,
               .d = 13,
               .d_v = 27,
               .pattern = {.window = 10, .sink_tokens = 1},
               .type = type,
               .memory = memory,
               .group_count = 5,
               .gate = gate});
}

TEST_CASE("soft_gate: scale, softcap and huge scores") {
  for (const focus::score_options score : {focus::score_options{},
                                           {.scale = 0.0f},
                                           {.scale = -0.7f},
                                           {.scale = 3.0f, .softcap = 5.0f},
                                           {.softcap = 50.0f}})
    for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
      for (const double magnitude : {1.0, 1e3})
        for (const focus::gate_options gate : both_gates)
          check({.n_q = 90,
                 .n_k = 90,
                 .d = 64,
                 .d_v = 20,
                 .pattern = {.window = 6, .sink_tokens = 2},
                 .score = score,
                 .type = type,
                 .gate = gate,
                 .query_magnitude = magnitude});
}

TEST_CASE("soft_gate: the weight gate with one-hot assignments is sparse attention") {
  for (const grouping groups :
       {grouping::balanced, grouping::runs, grouping::skewed, grouping::zero})
    for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
      for (const bool causal : {true, false})
        for (const bool separate : {true, false}) {
          const attention_case c{.n_q = 110,
                                 .n_k = 110,
                                 .pattern = {.causal = causal, .window = 7, .sink_tokens = 1},
                                 .type = type,
                                 .groups = groups,
                                 .group_count = 5,
                                 .separate_masks = separate,
                                 .gate = {.kind = gate_kind::weight},
                                 .one_hot_assignment = true};
          INFO(describe(c));
          with_main_storage(type, [&]<class T>() {
            const problem<T> p(c);
            CHECK(compare(p, solve<call>(p), operation::sparse) == "");
          });
        }
}

TEST_CASE("soft_gate: a p of 0 prunes a NaN key") {
  for (const double value : {not_a_number, infinity, -infinity})
    for (const index_t key : {0, 1, 50, 99})
      for (const bool one_hot : {true, false})
        for (const storage type : {storage::float32, storage::float64, storage::bfloat16}) {
          const attention_case c{.n_q = 100,
                                 .n_k = 100,
                                 .pattern = {.window = 7},
                                 .type = type,
                                 .group_count = 8,
                                 .gate = {.kind = gate_kind::weight},
                                 .one_hot_assignment = one_hot};
          INFO(describe(c) << ", key " << key << ", value " << value);
          CHECK(check_poisoned_key<call>(c, key, value) == "");
        }
}

TEST_CASE("soft_gate: NaN in a key or a query with the score gate") {
  for (const index_t at : {0, 1, 50, 99})
    for (const storage type : {storage::float32, storage::float64}) {
      const attention_case c{.n_q = 100, .n_k = 100, .pattern = {.window = 7}, .type = type};
      INFO(describe(c) << ", at " << at);
      for (const double value : {not_a_number, infinity, -infinity})
        CHECK(check_poisoned_key<call>(c, at, value) == "");
      CHECK(check_poisoned_query<call>(c, 1, at) == "");
    }
}

TEST_CASE("soft_gate: NaN in a query with the weight gate, empty rows too") {
  for (const index_t query : {0, 1, 50, 99})
    for (const grouping groups : {grouping::balanced, grouping::zero}) {
      const attention_case c{.n_q = 100,
                             .n_k = 100,
                             .pattern = {.window = focus::no_window},
                             .groups = groups,
                             .gate = {.kind = gate_kind::weight},
                             .one_hot_assignment = true};
      INFO(describe(c) << ", query " << query);
      CHECK(check_poisoned_query<call>(c, 1, query) == "");
    }
}

TEST_CASE("soft_gate: NaN and inf in one of many blocks of keys") {
  for (const focus::gate_options gate : both_gates)
    for (const double value : {not_a_number, infinity, -infinity})
      for (const index_t key : {0, 300, 599}) {
        const attention_case c{.heads = 1,
                               .n_q = 30,
                               .n_k = 600,
                               .d = 4,
                               .d_v = 4,
                               .pattern = {.window = 3},
                               .gate = gate};
        INFO(describe(c) << ", key " << key << ", value " << value);
        CHECK(check_poisoned_key<call>(c, key, value) == "");
      }
}

TEST_CASE("soft_gate: scores of -inf") {
  for (const focus::gate_options gate : both_gates)
    for (const bool one_hot : {true, false})
      for (const index_t count : {1, 300, 600})
        for (const bool first : {true, false}) {
          const attention_case c{.heads = 1,
                                 .n_q = 600,
                                 .n_k = 600,
                                 .d = 2,
                                 .d_v = 2,
                                 .pattern = {.window = 8},
                                 .gate = gate,
                                 .one_hot_assignment = one_hot};
          INFO(describe(c) << ", count " << count << (first ? ", first" : ", last"));
          CHECK(check_vanishing_keys<call>(c, count, first) == "");
        }
}

TEST_CASE("soft_gate: the weight gate with products of very different sizes") {
  // Products down to 1e-36: a small p with a large score may still be the largest
  // weight.
  for (const storage type : {storage::float32, storage::float64})
    for (const double smallest : {1e-3, 1e-12, 1e-18}) {
      const attention_case c{.n_q = 60,
                             .n_k = 60,
                             .pattern = {.window = focus::no_window},
                             .type = type,
                             .gate = {.kind = gate_kind::weight},
                             .query_magnitude = 50};
      INFO(describe(c) << ", smallest " << smallest);
      with_main_storage(type, [&]<class T>() {
        problem<T> p(c);
        generator random(9);
        p.query_assignment.fill([&] { return random.below(2) == 0 ? smallest : random.uniform(); });
        p.key_assignment.fill([&] { return random.below(4) == 0 ? 0.0 : smallest; });
        CHECK(compare(p, solve<call>(p), operation::soft_gate) == "");
      });
    }
}

TEST_CASE("soft_gate: NaN in a token's assignment reaches the pairs that are gated") {
  for (const focus::gate_options gate : both_gates) {
    const attention_case c{
        .n_q = 60, .n_k = 60, .pattern = {.window = 4, .sink_tokens = 1}, .gate = gate};
    const problem<float> p(c);
    const answer<float> clean = solve<call>(p);
    problem<float> bad = p;
    bad.key_assignment.view()(30, 1) = std::numeric_limits<float>::quiet_NaN();
    const answer<float> poisoned = solve<call>(bad);
    for (index_t i = 0; i <= 34; ++i) CHECK(poisoned.same_row_bits(clean, 0, i));
    for (index_t i = 35; i < 60; ++i) CHECK(std::isnan(poisoned.out.view()(0, i, 0)));
  }
}

TEST_CASE("soft_gate: the same bits for any number of threads") {
  for (const storage type : all_storage)
    for (const focus::gate_options gate : both_gates) {
      const attention_case c{.heads = 3,
                             .kv_heads = 3,
                             .n_q = 211,
                             .n_k = 230,
                             .pattern = {.window = 30, .sink_tokens = 2},
                             .type = type,
                             .gate = gate};
      INFO(describe(c));
      CHECK(check_same_bits<call>(c) == "");
    }
  CHECK(check_same_bits<call>({.n_q = 0, .n_k = 0}) == "");
}

TEST_CASE("soft_gate: earlier rows do not see later tokens") {
  for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
    for (const focus::gate_options gate : both_gates)
      for (const index_t first : {1, 40, 100, 149}) {
        const attention_case c{.n_q = 150,
                               .n_k = 150,
                               .pattern = {.window = 20, .sink_tokens = 1},
                               .type = type,
                               .gate = gate};
        INFO(describe(c) << ", first " << first);
        CHECK(check_later_tokens<call>(c, first) == "");
      }
}

TEST_CASE("soft_gate: lse in double, and no arguments but seven") {
  const attention_case c{.n_q = 50, .n_k = 50, .pattern = {}};
  problem<float> p(c);
  answer<float, double> a(c);
  focus::soft_gate_attention(p.q.view(), p.k.view(), p.v.view(), p.query_assignment.view(),
                             p.key_assignment.view(), {}, a.out.view(), {}, {}, a.lse.view());
  CHECK(compare(p, a, call::op) == "");
  answer<float> b(c);
  focus::soft_gate_attention(p.q.view(), p.k.view(), p.v.view(), p.query_assignment.view(),
                             p.key_assignment.view(), {}, b.out.view());
  CHECK(b.out.same_bits(a.out));
}

TEST_CASE("soft_gate: nothing at all") {
  using view = focus::tensor_view<float, 3>;
  using matrix = focus::matrix_view<float>;
  focus::soft_gate_attention(view(), view(), view(), matrix(nullptr, {0, 4}),
                             matrix(nullptr, {0, 4}), {}, view());
  focus::soft_gate_attention(view(nullptr, {2, 0, 8}), view(nullptr, {1, 0, 8}),
                             view(nullptr, {1, 0, 8}), matrix(nullptr, {0, 4}),
                             matrix(nullptr, {0, 4}), {}, view(nullptr, {2, 0, 8}));
  for (const focus::gate_options gate : both_gates) {
    check({.n_q = 9, .n_k = 9, .d = 0, .d_v = 4, .gate = gate});
    check({.n_q = 9, .n_k = 9, .d = 4, .d_v = 0, .gate = gate});
  }
}

TEST_CASE("soft_gate: exceptions from a loop reach the caller") {
  CHECK(throws_from_body<call>({}, 0));
  CHECK(throws_from_body<call>({.heads = 4, .n_q = 200, .n_k = 200}, 1));
}

TEST_CASE("soft_gate: bad arguments") {
  check_refusals<call>();

  refused_call<call> refuse({.n_q = 5, .n_k = 7, .d_v = 6});
  std::vector<float>& spare = refuse.spare;
  using view = refused_call<call>::view;
  using matrix = refused_call<call>::matrix;
  using inputs = call_inputs<float>&;
  refuse("query_assignment", [&](inputs in, view&, matrix&) {
    in.query_assignment = matrix(spare.data(), {4, 4});
  });
  refuse("query_assignment", [&](inputs in, view&, matrix&) {
    in.query_assignment = matrix(spare.data(), {5, 5});
  });
  refuse("key_assignment", [&](inputs in, view&, matrix&) {
    in.key_assignment = matrix(spare.data(), {6, 4});
  });
  refuse("query_assignment", [&](inputs in, view&, matrix&) {
    in.query_assignment = matrix(nullptr, {5, 4});
  });
  refuse("key_assignment", [&](inputs in, view&, matrix&) {
    in.key_assignment = matrix(nullptr, {7, 4});
  });
  // No group, and more than 64.
  for (const index_t groups : {0, 65})
    refuse("key_assignment", [&](inputs in, view&, matrix&) {
      in.query_assignment = matrix(spare.data(), {5, groups}, {0, 1});
      in.key_assignment = matrix(spare.data(), {7, groups}, {0, 1});
    });
  refuse("sharpness", [&](inputs in, view&, matrix&) {
    in.gate.sharpness = std::numeric_limits<float>::quiet_NaN();
  });
  refuse("out", [&](inputs in, view& out, matrix&) {
    in.query_assignment = matrix(spare.data(), {5, 4}), out = view(spare.data() + 19, {2, 5, 6});
  });
  refuse("out", [&](inputs in, view& out, matrix&) {
    in.key_assignment = matrix(spare.data() + 59, {7, 4}), out = view(spare.data(), {2, 5, 6});
  });
  refuse("lse", [&](inputs in, view&, matrix& lse) {
    in.key_assignment = matrix(spare.data(), {7, 4}), lse = matrix(spare.data() + 27, {2, 5});
  });
  refuse("lse", [&](inputs in, view&, matrix& lse) {
    in.query_assignment = matrix(spare.data(), {5, 4}), lse = matrix(spare.data(), {2, 5});
  });
}

}  // namespace test_soft_gate
