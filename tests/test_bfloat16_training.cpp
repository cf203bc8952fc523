// Soft gates of what is stored in bfloat16: products of its bits where the instruction set has
// them, sums of widened elements elsewhere. The same tests hold for both.
#include <array>
#include <vector>

#include "attention_checks.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/options.hpp"
#include "focus/soft_gate.hpp"
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

}  // namespace test_bfloat16_training
