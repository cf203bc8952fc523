// Soft gates and gradients of what is stored in bfloat16: products of its bits where the
// instruction set has them, sums of widened elements elsewhere. The same tests hold for both.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

#include "allocations.hpp"
#include "attention_checks.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/attention_backward.hpp"
#include "focus/checks/backward_arguments.hpp"
#include "focus/config.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/passes/backward.hpp"
#include "focus/scalar.hpp"
#include "focus/soft_gate.hpp"
#include "focus/tensor_view.hpp"
#include "gradient_checks.hpp"
#include "oracle.hpp"

namespace test_bfloat16_training {
namespace {

using namespace oracle;
using focus::gate_kind;

constexpr std::array both_gates{focus::gate_options{},
                                focus::gate_options{.kind = gate_kind::weight}};

struct gated_call {
  static constexpr operation op = operation::soft_gate;
  template <class T, class Out, class Lse, class Exec>
  void operator()(const call_inputs<T>& in, Out out, Lse lse, Exec&& exec) const {
    focus::soft_gate_attention(in.q, in.k, in.v, in.query_assignment, in.key_assignment, in.gate,
                               out, in.pattern, in.score, lse, exec);
  }
};

/// In bfloat16.
attention_case stored(attention_case c) {
  c.type = storage::bfloat16;
  return c;
}

void check_gated(const attention_case& c) {
  INFO(describe(c));
  CHECK(check_values<gated_call>(stored(c)) == "");
}

template <operation Op>
void check_gradients_of_stored(const attention_case& c) {
  INFO(describe(stored(c)));
  CHECK(check_gradients<Op>(stored(c)) == "");
}
/// Of all three operations, soft gates of both kinds.
void check_all(attention_case c) {
  check_gradients_of_stored<operation::attention>(c);
  check_gradients_of_stored<operation::sparse>(c);
  for (const focus::gate_options gate : both_gates) {
    c.gate = gate;
    check_gradients_of_stored<operation::soft_gate>(c);
  }
}

/// Calls f with the operation, as a constant, for each of them.
template <class F>
void for_each_operation(F&& f) {
  f(std::integral_constant<operation, operation::attention>{});
  f(std::integral_constant<operation, operation::sparse>{});
  f(std::integral_constant<operation, operation::soft_gate>{});
}

using given = focus::tensor_view<focus::bfloat16, 3>;
using given_float = focus::tensor_view<float, 3>;

/// The operands that attention_backward takes, of queries and keys in bfloat16.
template <class Operand, class Dout, class Dq, class Dk, class Dv>
bool takes(bool permitted, bool with_dq) {
  std::vector<double> memory(64);
  const auto view = [&]<class T>(T) {
    return focus::tensor_view<T, 3>(reinterpret_cast<T*>(memory.data()), {1, 2, 2});
  };
  using T = focus::bfloat16;
  focus::detail::backward_arguments<T, T, T, float, Dout, float, float, Dq, Dk, Dv> args;
  args.q = args.k = args.v = view(T{});
  args.dout = view(Dout{});
  if (with_dq) args.dq = view(Dq{});
  args.dk = view(Dk{});
  bool same = false;
  focus::detail::with_gradient_operands(
      args, [=] { return permitted; },
      [&]<class E>(const auto&) { same = std::is_same_v<E, Operand>; });
  return same;
}

}  // namespace

TEST_CASE("bfloat16_training: soft gates, lengths around the tiles") {
  for (const index_t n : odd_lengths)
    for (const focus::gate_options gate : both_gates)
      for (const bool causal : {true, false})
        check_gated({.n_q = n,
                     .n_k = n,
                     .pattern = {.causal = causal, .window = 5, .sink_tokens = 1},
                     .gate = gate});
  for (const auto& [n_q, n_k] :
       std::vector<std::array<index_t, 2>>{{1, 257}, {7, 100}, {100, 7}, {130, 97}, {33, 600}})
    for (const focus::gate_options gate : both_gates)
      check_gated(
          {.n_q = n_q, .n_k = n_k, .pattern = {.window = 20, .sink_tokens = 3}, .gate = gate});
}

TEST_CASE("bfloat16_training: soft gates, head dimensions and numbers of groups") {
  for (const focus::gate_options gate : both_gates) {
    for (const auto& [d, d_v] : head_dims)
      check_gated(
          {.n_q = 70, .n_k = 70, .d = d, .d_v = d_v, .memory = layout::misaligned, .gate = gate});
    for (const int groups : {1, 2, 7, 16, 17, 64})
      check_gated({.heads = 4,
                   .kv_heads = 2,
                   .n_q = 110,
                   .n_k = 110,
                   .pattern = {.window = 9, .sink_tokens = 1},
                   .group_count = groups,
                   .gate = gate});
    check_gated({.n_q = 9, .n_k = 9, .d = 0, .d_v = 4, .gate = gate});
    check_gated({.n_q = 9, .n_k = 9, .d = 4, .d_v = 0, .gate = gate});
  }
}

TEST_CASE("bfloat16_training: soft gates, scale, softcap, sharpness and huge scores") {
  for (const focus::gate_options gate :
       {focus::gate_options{}, focus::gate_options{.sharpness = 1000.0f},
        focus::gate_options{.sharpness = -3.0f}, focus::gate_options{.kind = gate_kind::weight}})
    for (const double magnitude : {1.0, 1e3, 1e6})
      for (const focus::score_options score : {focus::score_options{},
                                               {.scale = 0.0f},
                                               {.scale = -0.7f},
                                               {.scale = 3.0f, .softcap = 5.0f},
                                               {.scale = 1e-42f}})
        check_gated({.n_q = 100,
                     .n_k = 100,
                     .d = 64,
                     .d_v = 20,
                     .pattern = {.window = 6, .sink_tokens = 2},
                     .score = score,
                     .gate = gate,
                     .query_magnitude = magnitude});
}

TEST_CASE("bfloat16_training: soft gates, NaN and inf in a key") {
  for (const focus::gate_options gate : both_gates)
    for (const bool one_hot : {true, false})
      for (const double value : {not_a_number, infinity, -infinity})
        for (const index_t key : {0, 31, 299}) {
          const attention_case c = stored({.heads = 1,
                                           .n_q = 300,
                                           .n_k = 300,
                                           .d = 20,
                                           .d_v = 50,
                                           .pattern = {.window = 7},
                                           .gate = gate,
                                           .one_hot_assignment = one_hot});
          INFO(describe(c) << ", key " << key << ", value " << value);
          CHECK(check_poisoned_key<gated_call>(c, key, value) == "");
        }
}

TEST_CASE("bfloat16_training: soft gates, the same bits for any number of threads") {
  for (const focus::gate_options gate : both_gates)
    CHECK(check_same_bits<gated_call>(stored({.heads = 3,
                                              .kv_heads = 3,
                                              .n_q = 211,
                                              .n_k = 230,
                                              .pattern = {.window = 30, .sink_tokens = 2},
                                              .gate = gate})) == "");
}

TEST_CASE("bfloat16_training: where the operands of gradients stay bfloat16") {
  using focus::bfloat16;
  using operand = std::conditional_t<FOCUS_HAS_BFLOAT16_PRODUCTS, bfloat16, float>;
  CHECK(takes<operand, bfloat16, bfloat16, bfloat16, bfloat16>(true, true));
  CHECK(takes<operand, engine_bfloat16, bfloat16, engine_bfloat16, bfloat16>(true, true));
  CHECK(takes<float, bfloat16, bfloat16, bfloat16, bfloat16>(false, true));
  // What is finer than the weights; but what is left out has no say.
  CHECK(takes<float, float, bfloat16, bfloat16, bfloat16>(true, true));
  CHECK(takes<float, bfloat16, float, bfloat16, bfloat16>(true, true));
  CHECK(takes<operand, bfloat16, float, bfloat16, bfloat16>(true, false));
  CHECK(takes<float, bfloat16, bfloat16, float, bfloat16>(true, false));
  CHECK(takes<operand, bfloat16, bfloat16, bfloat16, float>(true, true));
}

TEST_CASE("bfloat16_training: gradients, lengths around the tiles") {
  for (const index_t n : odd_lengths)
    for (const bool causal : {true, false})
      check_all({.n_q = n,
                 .n_k = n,
                 .pattern = {.causal = causal,
                             .window = n % 2 ? focus::unlimited_window : 20,
                             .sink_tokens = n % 3}});
  for (const auto& [n_q, n_k] :
       std::vector<std::array<index_t, 2>>{{40, 150}, {1, 100}, {100, 7}, {0, 5}, {5, 0}})
    check_all({.n_q = n_q, .n_k = n_k, .pattern = {.window = 9, .sink_tokens = 1}});
}

TEST_CASE("bfloat16_training: gradients, head dimensions, heads and layouts") {
  for (const auto& [d, d_v] : head_dims) check_all({.n_q = 50, .n_k = 70, .d = d, .d_v = d_v});
  for (const auto& [heads, kv_heads] :
       std::vector<std::array<index_t, 2>>{{1, 1}, {6, 1}, {6, 2}, {4, 4}})
    for (const layout memory : {layout::tokens_first, layout::padded, layout::misaligned})
      check_all({.heads = heads,
                 .kv_heads = kv_heads,
                 .n_q = 37,
                 .n_k = 50,
                 .d = 20,
                 .d_v = 12,
                 .memory = memory});
}

TEST_CASE("bfloat16_training: gradients, scores") {
  for (const focus::score_options score : {focus::score_options{.scale = 0.0f},
                                           {.scale = -0.7f},
                                           {.softcap = 1.5f},
                                           {.scale = 2.0f, .softcap = 30.0f},
                                           {.scale = 1e-30f}})
    check_all({.score = score});
  check_all({.n_q = 100, .n_k = 100, .d = 64, .query_magnitude = 30});
  // (Of the gate of weights, exp(s - lse) of a pruned pair is beyond all numbers here.)
  const attention_case huge{.n_q = 100, .n_k = 100, .d = 64, .query_magnitude = 1e4};
  check_gradients_of_stored<operation::attention>(huge);
  check_gradients_of_stored<operation::sparse>(huge);
}

TEST_CASE("bfloat16_training: gradients of sparse attention, in each layout of the plan") {
  for (const grouping groups : all_groupings)
    for (const auto& [group_count, top_k] :
         std::vector<std::array<int, 2>>{{1, 1}, {4, 1}, {4, 2}, {8, 3}, {64, 4}})
      for (const index_t window : {focus::no_window, index_t{20}})
        check_gradients_of_stored<operation::sparse>(
            {.n_q = 109,
             .n_k = 109,
             .d = 8,
             .d_v = 8,
             .pattern = {.causal = group_count != 8,
                         .window = window,
                         .sink_tokens = window == 20 ? 1 : 0},
             .groups = groups,
             .group_count = group_count,
             .top_k = top_k,
             .separate_masks = top_k == 3});
  for (const auto& [group_count, top_k] : std::vector<std::array<int, 2>>{{4, 1}, {16, 2}})
    check_gradients_of_stored<operation::sparse>({.n_q = 500,
                                                  .n_k = 500,
                                                  .d = 40,
                                                  .d_v = 24,
                                                  .pattern = {.window = 20, .sink_tokens = 1},
                                                  .groups = grouping::drawn,
                                                  .group_count = group_count,
                                                  .top_k = top_k});
}

TEST_CASE("bfloat16_training: gradients of soft gates, groups and windows") {
  for (const gate_kind kind : {gate_kind::score, gate_kind::weight})
    for (const int groups : {1, 3, 16, 17, 64})
      for (const index_t window : {focus::no_window, index_t{20}})
        for (const bool one_hot : {false, true})
          check_gradients_of_stored<operation::soft_gate>(
              {.n_q = 70,
               .n_k = 90,
               .d = 8,
               .d_v = 8,
               .pattern = {.window = window, .sink_tokens = window == 20 ? 2 : 0},
               .group_count = groups,
               .separate_masks = true,
               .gate = {.kind = kind, .sharpness = 2.0f},
               .one_hot_assignment = one_hot});
}

TEST_CASE("bfloat16_training: gradients of dlse, alone and with dout") {
  for_each_operation([](auto op) {
    for (const attention_case& c : with_dlse({.heads = 4,
                                   .kv_heads = 2,
                                   .n_q = 37,
                                   .n_k = 50,
                                   .d = 20,
                                   .d_v = 12,
                                   .score = {.softcap = 3.0f}}))
      check_gradients_of_stored<op()>(c);
  });
  constexpr operation dense = operation::attention;
  using T = focus::bfloat16;
  CHECK(check_dlse_of_empty_rows<dense, T>({.n_q = 30, .n_k = 10, .pattern = {.window = 3}}) == "");
  CHECK(check_dlse_of_empty_rows<dense, T>({.pattern = {.window = focus::no_window}}) == "");
}

TEST_CASE("bfloat16_training: gradients, the same bits for any threads, and in a workspace") {
  const attention_case c{.heads = 4, .kv_heads = 2, .n_q = 400, .n_k = 400, .d = 8, .d_v = 8};
  for_each_operation(
      [&](auto op) { CHECK(check_gradient_bits<op(), focus::bfloat16>(stored(c)) == ""); });
  gradient_problem<focus::bfloat16> p(stored(c));
  p.attend(operation::attention);
  gradients<focus::bfloat16> g(c);
  const call_inputs<focus::bfloat16> in = p.inputs();
  focus::workspace scratch;
  const auto run = [&] {
    focus::attention_backward(in.q, in.k, in.v, p.out.view(), p.lse.view(), p.dout.view(),
                              g.dq.view(), g.dk.view(), g.dv.view(), in.pattern, {},
                              focus::with_workspace(focus::serial_executor{}, scratch));
  };
  run();
  CHECK(allocations_of(run) == 0);
}

TEST_CASE("bfloat16_training: any gradient may be left out, or be finer") {
  const attention_case c =
      stored({.heads = 4, .kv_heads = 2, .n_q = 70, .n_k = 70, .pattern = focus::full_causal});
  using T = focus::bfloat16;
  gradient_problem<T> p(c);
  p.attend(operation::attention);
  const gradients<T> all = differentiate<operation::attention>(p);
  const call_inputs<T> in = p.inputs();
  gradients<T> dq(c), dk(c), dv(c);
  const auto run = [&](auto&& x, auto&& y, auto&& z) {
    focus::attention_backward(in.q, in.k, in.v, p.out.view(), p.lse.view(), p.dout.view(), x, y, z,
                              in.pattern);
  };
  const given left_out;
  const given_float left_out_float;  // what {} is
  run(dq.dq.view(), left_out, left_out_float);
  run(left_out_float, dk.dk.view(), left_out_float);
  run(left_out, left_out_float, dv.dv.view());
  CHECK(dq.dq.same_bits(all.dq));
  CHECK(dk.dk.same_bits(all.dk));
  CHECK(dv.dv.same_bits(all.dv));

  // In float they are what they are without any rounding of weights.
  guarded_tensor<float, 3> fine({c.heads, c.n_q, c.d}, c.memory);
  run(fine.view(), left_out_float, left_out_float);
  const dense_problem dense = p.dense();
  const auto dout = p.dout.values(), dlse = p.dlse.values();
  const auto expected = textbook_gradients<double>(dense, operation::attention, dout, dlse);
  const auto naive = textbook_gradients<float>(dense, operation::attention, dout, dlse);
  CHECK(compare_values("dq", fine.values(), expected[0],
                       2 * largest_error(naive[0], expected[0]) +
                           64 * epsilon<float>() * largest_magnitude(expected[0])) == "");
}

TEST_CASE("bfloat16_training: gradients, refused by the operating system") {
  const attention_case c = stored({.heads = 4,
                                   .kv_heads = 2,
                                   .n_q = 150,
                                   .n_k = 170,
                                   .d = 40,
                                   .d_v = 24,
                                   .pattern = {.window = 30, .sink_tokens = 1}});
  using T = focus::bfloat16;
  gradient_problem<T> p(c);
  p.attend(operation::attention);
  gradients<T> g(c);
  const call_inputs<T> in = p.inputs();
  using namespace focus::detail;
  const auto args = check_backward_arguments(
      "attention_backward", false, in.q, in.k, in.v, p.out.view(), p.lse.view(), p.dout.view(),
      focus::matrix_view<const float>{}, g.dq.view(), g.dk.view(), g.dv.view());
  const auto score = resolve<float>(in.score, c.d);
  focus::serial_executor exec;
  with_gradient_operands(
      args, [] { return false; },
      [&]<class E>(const auto& stored_args) {
        run_backward<E>(stored_args, score, make_ungated{},
                        local_pass(resolve(in.pattern, c.n_q, c.n_k), c.n_q), no_pass{},
                        any_executor(exec));
      });
  CHECK(compare_gradients<operation::attention>(p, g) == "");
}

TEST_CASE("bfloat16_training: gradients, NaN and inf reach only their own") {
  const attention_case c = stored({.heads = 1,
                                   .n_q = 300,
                                   .n_k = 300,
                                   .d = 20,
                                   .d_v = 50,
                                   .pattern = {.window = 6, .sink_tokens = 1}});
  using T = focus::bfloat16;
  constexpr operation op = operation::attention;
  gradient_problem<T> clean(c);
  clean.attend(op);
  const gradients<T> expected = differentiate<op>(clean);
  for (const double poison : {not_a_number, infinity})
    for (const index_t at : {31, 70}) {
      const auto spoilt = [&](auto member) {
        gradient_problem<T> p = clean;
        (p.*member).view()(0, at, 2) = narrowed<T>(poison);
        p.attend(op);
        return differentiate<op>(p);
      };
      using problem_type = gradient_problem<T>;
      const gradients<T> of_query = spoilt(&problem_type::q), of_key = spoilt(&problem_type::k),
                         of_value = spoilt(&problem_type::v), of_dout = spoilt(&problem_type::dout);
      const auto same = [&](const gradients<T>& g, auto member, index_t row) {
        return oracle::same_row_bits<T>((g.*member).view(), (expected.*member).view(), 0, row);
      };
      for (index_t i = 0; i < c.n_q; ++i) {
        INFO("poison " << poison << " at " << at << ", row " << i);
        const bool sees = i >= at && i - at <= 6;
        CHECK((sees || same(of_key, &gradients<T>::dq, i)));
        CHECK((sees || same(of_value, &gradients<T>::dq, i)));
        CHECK((i == at) != same(of_query, &gradients<T>::dq, i));
        CHECK((i == at) != same(of_dout, &gradients<T>::dq, i));
        const bool is_seen = i == 0 || (i >= at - 6 && i <= at);
        CHECK(is_seen != same(of_query, &gradients<T>::dk, i));
        CHECK(is_seen != same(of_dout, &gradients<T>::dk, i));
        CHECK(is_seen != same(of_dout, &gradients<T>::dv, i));
        const bool meets = i == 0 || (i >= at - 6 && i <= at + 6);
        CHECK((meets || same(of_key, &gradients<T>::dk, i)));
        CHECK((meets || same(of_value, &gradients<T>::dk, i)));
        CHECK((meets || same(of_key, &gradients<T>::dv, i)));
      }
    }
}

TEST_CASE("bfloat16_training: what rounding P and dS costs") {
  // In the mean of squares the gradients err as the naive form does that rounds P and dS once, and
  // then its results, as these are.
  for (const double magnitude : {0.1, 1.0, 10.0})
    for_each_operation([&](auto op) {
      const attention_case c = stored({.heads = 2,
                                       .n_q = 200,
                                       .n_k = 200,
                                       .d = 32,
                                       .d_v = 48,
                                       .pattern = {.window = 60, .sink_tokens = 1},
                                       .gate = {.kind = gate_kind::weight},
                                       .query_magnitude = magnitude});
      gradient_problem<focus::bfloat16> p(c);
      p.attend(op());
      const auto got = differentiate<op()>(p).values();
      const dense_problem dense = p.dense();
      const auto dout = p.dout.values(), dlse = p.dlse.values();
      const auto expected = textbook_gradients<double>(dense, op(), dout, dlse);
      const auto naive =
          textbook_gradients<float, gradient_weight<focus::bfloat16>>(dense, op(), dout, dlse);
      for (std::size_t x = 0; x < 3; ++x) {
        double of_got = 0, of_naive = 0;
        for (std::size_t at = 0; at < expected[x].size(); ++at) {
          const double stored_naive = widened(narrowed<focus::bfloat16>(naive[x][at]));
          of_got += std::pow(got[x][at] - expected[x][at], 2);
          of_naive += std::pow(stored_naive - expected[x][at], 2);
        }
        INFO(describe(c) << ", " << gradient_names[x] << ": " << std::sqrt(of_got) << ", naive "
                         << std::sqrt(of_naive));
        CHECK(std::sqrt(of_got) <= 1.1 * std::sqrt(of_naive));
      }
    });
}

}  // namespace test_bfloat16_training
