// The textbook forms themselves, against values worked out by hand.
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "catch.hpp"
#include "focus/reference.hpp"
#include "guarded_tensor.hpp"

namespace test_reference {
namespace {

using focus::group_mask;
using focus::index_t;
using focus::no_window;
using focus::unlimited_window;
using matrix = std::vector<double>;
namespace reference = focus::reference;

constexpr double inf = std::numeric_limits<double>::infinity();
const double not_a_number = std::numeric_limits<double>::quiet_NaN();

bool near(double a, double b) {
  return a == b || std::abs(a - b) < 1e-12;
}

/// One head in double. Queries and keys of dimension d, values of dimension d_v.
struct head {
  index_t d = 1, d_v = 1;
  matrix q, k, v;
  matrix out{}, lse{};

  index_t n_q() const { return static_cast<index_t>(q.size()) / d; }
  index_t n_k() const { return static_cast<index_t>(k.size()) / d; }
  focus::tensor_view<const double, 3> q_view() const { return {q.data(), {1, n_q(), d}}; }
  focus::tensor_view<const double, 3> k_view() const { return {k.data(), {1, n_k(), d}}; }
  focus::tensor_view<const double, 3> v_view() const { return {v.data(), {1, n_k(), d_v}}; }
  focus::tensor_view<double, 3> out_view() {
    out.assign(static_cast<std::size_t>(n_q() * d_v), not_a_number);
    return {out.data(), {1, n_q(), d_v}};
  }
  focus::matrix_view<double> lse_view() {
    lse.assign(static_cast<std::size_t>(n_q()), not_a_number);
    return {lse.data(), {1, n_q()}};
  }

  void attention(const focus::pattern_options& pattern, const focus::score_options& scores = {}) {
    reference::attention(q_view(), k_view(), v_view(), out_view(), pattern, scores, lse_view());
  }
  void sparse(const std::vector<group_mask>& query_masks, const std::vector<group_mask>& key_masks,
              const focus::pattern_options& pattern) {
    reference::sparse_attention(q_view(), k_view(), v_view(), query_masks, key_masks, pattern,
                                out_view(), {}, lse_view());
  }
  void soft_gate(matrix g_q, matrix g_k, const focus::gate_options& gate,
                 const focus::pattern_options& pattern, const focus::score_options& scores = {}) {
    const index_t groups = static_cast<index_t>(g_q.size()) / n_q();
    reference::soft_gate_attention(q_view(), k_view(), v_view(),
                                   focus::matrix_view<double>(g_q.data(), {n_q(), groups}),
                                   focus::matrix_view<double>(g_k.data(), {n_k(), groups}), gate,
                                   out_view(), pattern, scores, lse_view());
  }
};

/// Equal scores, and values that are the unit vectors: out is 1 / count at the keys that a query
/// attends to.
head which_keys(index_t n_q, index_t n_k) {
  head h{.d = 1,
         .d_v = n_k,
         .q = matrix(static_cast<std::size_t>(n_q), 0.0),
         .k = matrix(static_cast<std::size_t>(n_k), 1.0),
         .v = matrix(static_cast<std::size_t>(n_k * n_k), 0.0)};
  for (index_t j = 0; j < n_k; ++j) h.v[static_cast<std::size_t>(j * n_k + j)] = 1;
  return h;
}

/// The keys of each query as text, rows divided by a blank: "x.. xx. xxx".
std::string keys_of(const head& h) {
  std::string text;
  for (index_t i = 0; i < h.n_q(); ++i) {
    if (i > 0) text += ' ';
    index_t count = 0;
    for (index_t j = 0; j < h.n_k(); ++j) {
      const double share = h.out[static_cast<std::size_t>(i * h.n_k() + j)];
      text += share > 0 ? 'x' : '.';
      count += share > 0;
    }
    const double lse = h.lse[static_cast<std::size_t>(i)];
    if (!near(lse, count ? std::log(static_cast<double>(count)) : -inf)) text += "(bad lse)";
  }
  return text;
}

std::string keys(index_t n_q, index_t n_k, const focus::pattern_options& pattern) {
  head h = which_keys(n_q, n_k);
  h.attention(pattern);
  return keys_of(h);
}

std::string sparse_keys(const std::vector<group_mask>& query_masks,
                        const std::vector<group_mask>& key_masks,
                        const focus::pattern_options& pattern) {
  head h =
      which_keys(static_cast<index_t>(query_masks.size()), static_cast<index_t>(key_masks.size()));
  h.sparse(query_masks, key_masks, pattern);
  return keys_of(h);
}

}  // namespace

TEST_CASE("attention of two tokens") {
  // Row 1: scores 0 and log 3, so weights 1/4 and 3/4.
  head h{.q = {1, 1}, .k = {0, std::log(3.0)}, .v = {8, 4}};
  h.attention(focus::full_causal);
  CHECK(near(h.out[0], 8));
  CHECK(near(h.lse[0], 0));
  CHECK(near(h.out[1], 5));
  CHECK(near(h.lse[1], std::log(4.0)));
}

TEST_CASE("scale and softcap") {
  head h{.d = 4, .q = {1, 1, 1, 1}, .k = {0, 0, 0, 0, 1, 1, 1, 1}, .v = {0, 1}};
  const auto share_of_second = [&](double score) {
    return std::exp(score) / (1 + std::exp(score));
  };
  h.attention(focus::full_causal);
  CHECK(near(h.out[0], share_of_second(2)));  // 4 / sqrt(4)
  h.attention(focus::full_causal, {.scale = 0.25f});
  CHECK(near(h.out[0], share_of_second(1)));
  h.attention(focus::full_causal, {.scale = 0.0f});
  CHECK(near(h.out[0], 0.5));
  CHECK(near(h.lse[0], std::log(2.0)));
  h.attention(focus::full_causal, {.scale = -0.25f});
  CHECK(near(h.out[0], share_of_second(-1)));
  h.attention(focus::full_causal, {.scale = 0.25f, .softcap = 2.0f});
  CHECK(near(h.out[0], share_of_second(2 * std::tanh(0.5))));
  h.attention(focus::full_causal, {.scale = 0.25f, .softcap = 0.0f});
  CHECK(near(h.out[0], share_of_second(1)));
}

TEST_CASE("the window counts back from the token itself") {
  CHECK(keys(3, 3, focus::full_causal) == "x.. xx. xxx");
  CHECK(keys(3, 3, {.window = 1}) == "x.. xx. .xx");
  CHECK(keys(3, 3, {.window = 0}) == "x.. .x. ..x");
  CHECK(keys(3, 3, {.window = no_window}) == "... ... ...");
  CHECK(keys(3, 3, {.window = 2}) == "x.. xx. xxx");
  CHECK(keys(3, 3, {.window = unlimited_window - 1}) == "x.. xx. xxx");
  CHECK(keys(3, 3, {.causal = false, .window = 1}) == "xx. xxx .xx");
  CHECK(keys(3, 3, {.causal = false, .window = 0}) == "x.. .x. ..x");
  CHECK(keys(3, 3, {.causal = false, .window = unlimited_window}) == "xxx xxx xxx");
}

TEST_CASE("sinks are visible where causality lets them be") {
  CHECK(keys(4, 4, {.window = 0, .sink_tokens = 1}) == "x... xx.. x.x. x..x");
  CHECK(keys(4, 4, {.window = no_window, .sink_tokens = 2}) == "x... xx.. xx.. xx..");
  CHECK(keys(4, 4, {.window = no_window, .sink_tokens = 9}) == "x... xx.. xxx. xxxx");
  CHECK(keys(4, 4, {.causal = false, .window = no_window, .sink_tokens = 2}) ==
        "xx.. xx.. xx.. xx..");
}

TEST_CASE("the causal corner is at the bottom right unless query_offset says otherwise") {
  CHECK(keys(1, 3, focus::full_causal) == "xxx");
  CHECK(keys(2, 3, focus::full_causal) == "xx. xxx");
  CHECK(keys(3, 1, focus::full_causal) == ". . x");
  CHECK(keys(1, 3, {.window = unlimited_window, .query_offset = 0}) == "x..");
  CHECK(keys(2, 3, {.window = unlimited_window, .query_offset = -1}) == "... x..");
  CHECK(keys(1, 3, {.window = 8, .query_offset = 10}) == "..x");
  CHECK(keys(1, 3, {.window = 8, .sink_tokens = 1, .query_offset = 10}) == "x.x");
  CHECK(keys(1, 3, {.window = 8, .query_offset = 11}) == "...");
  CHECK(keys(2, 4, {.causal = false, .window = 1, .query_offset = 1}) == "xxx. .xxx");
}

TEST_CASE("masks decide the distant pairs") {
  const focus::pattern_options none{.window = no_window};
  CHECK(sparse_keys({1, 2, 1, 2}, {1, 2, 1, 2}, none) == "x... .x.. x.x. .x.x");
  CHECK(sparse_keys({1, 2, 1, 2}, {1, 2, 1, 2}, {.window = 1}) == "x... xx.. xxx. .xxx");
  CHECK(sparse_keys({1, 2, 1, 2}, {1, 2, 1, 2}, {.window = 0, .sink_tokens = 1}) ==
        "x... xx.. x.x. xx.x");
  // Two groups a token; no group; all groups.
  CHECK(sparse_keys({3, 6, 5, 0, ~group_mask{0}}, {1, 2, 4, 7, 0}, none) ==
        "x.... .x... x.x.. ..... xxxx.");
  CHECK(sparse_keys({1, 1}, {1, 2, 1}, {.causal = false, .window = no_window}) == "x.x x.x");
  const group_mask last = group_mask{1} << 63;
  CHECK(sparse_keys({last, last}, {last, 1}, none) == "x. x.");
}

TEST_CASE("a group of query heads reads one kv head") {
  const matrix q(4, 0.0), k(2, 0.0), v{1, 2};
  matrix out(4, not_a_number);
  reference::attention(focus::tensor_view<const double, 3>(q.data(), {4, 1, 1}),
                       focus::tensor_view<const double, 3>(k.data(), {2, 1, 1}),
                       focus::tensor_view<const double, 3>(v.data(), {2, 1, 1}),
                       focus::tensor_view<double, 3>(out.data(), {4, 1, 1}));
  CHECK(out == matrix{1, 1, 2, 2});
}

TEST_CASE("the score gate multiplies distant scores by a sigmoid") {
  // Row 1: key 0 is distant, p = 1/2, sigmoid(2 log 3 * 1/2) = 3/4, score 4/3 log 2: log 2 when
  // gated. Key 1 is local, 0.
  head h{.q = {0, 1}, .k = {4.0 / 3.0 * std::log(2.0), 0}, .v = {9, 3}};
  const focus::gate_options gate{.sharpness = static_cast<float>(2 * std::log(3.0))};
  const double exact = 1 / (1 + std::exp(-static_cast<double>(gate.sharpness) * 0.5)) * h.k[0];
  h.soft_gate({1, 0, 0.5, 0.5}, {1, 0, 0.5, 0.5}, gate, {.window = 0});
  CHECK(near(h.lse[1], std::log(std::exp(exact) + 1)));
  CHECK(std::abs(h.lse[1] - std::log(3.0)) < 1e-6);
  CHECK(std::abs(h.out[1] - 7) < 1e-6);
  // Unrelated: half the score.
  h.soft_gate({1, 0, 0, 1}, {1, 0, 0, 1}, {}, {.window = 0});
  CHECK(near(h.lse[1], std::log(std::exp(h.k[0] / 2) + 1)));
  // A local pair or a sink: the whole score, whatever the groups.
  const double whole = std::log(std::exp(h.k[0]) + 1);
  h.soft_gate({1, 0, 0, 1}, {1, 0, 0, 1}, {}, {.window = 1});
  CHECK(near(h.lse[1], whole));
  h.soft_gate({1, 0, 0, 1}, {1, 0, 0, 1}, {}, {.window = 0, .sink_tokens = 1});
  CHECK(near(h.lse[1], whole));
}

TEST_CASE("the weight gate multiplies distant weights by p") {
  // Row 1: key 0 has p = 1/4 and weight 8 / 4 = 2, key 1 is local with weight 1.
  head h{.q = {0, 1}, .k = {std::log(8.0), 0}, .v = {9, 3}};
  const focus::gate_options gate{.kind = focus::gate_kind::weight};
  h.soft_gate({1, 0, 0.25, 0.75}, {1, 0, 0, 1}, gate, {.window = 0});
  CHECK(near(h.out[1], 7));
  CHECK(near(h.lse[1], std::log(3.0)));
  // Local: p = 1.
  h.soft_gate({1, 0, 0.25, 0.75}, {1, 0, 0, 1}, gate, {.window = 1});
  CHECK(near(h.lse[1], std::log(9.0)));
  // p = 0 leaves the pair out, NaN or not.
  h.k[0] = not_a_number, h.v[0] = not_a_number;
  h.soft_gate({1, 0, 0, 1}, {1, 0, 0, 1}, gate, {.window = 0});
  CHECK(near(h.out[1], 3));
  CHECK(near(h.lse[1], 0));
}

TEST_CASE("an empty row is zeros and -inf") {
  head h{
      .q = {not_a_number, 1}, .k = {not_a_number, not_a_number}, .v = {not_a_number, not_a_number}};
  h.attention({.window = no_window});
  CHECK(h.out == matrix{0, 0});
  CHECK(h.lse == matrix{-inf, -inf});
  // Scores of -inf leave no weight either.
  h = {.q = {1, 1}, .k = {-inf, -inf}, .v = {1, not_a_number}};
  h.attention(focus::full_causal);
  CHECK(h.out == matrix{0, 0});
  CHECK(h.lse == matrix{-inf, -inf});
  // One key of -inf among others: no weight for it.
  h = {.q = {1, 1}, .k = {-inf, 0}, .v = {5, 7}};
  h.attention(focus::full_causal);
  CHECK(h.out == matrix{0, 7});
  CHECK(h.lse == matrix{-inf, 0});
}

TEST_CASE("NaN reaches the rows that attend to it and no others") {
  head h{.q = {1, 1, 1}, .k = {1, not_a_number, 1}, .v = {1, 2, 3}};
  h.attention({.window = 0});
  CHECK(h.out[0] == 1);
  CHECK(std::isnan(h.out[1]));
  CHECK(std::isnan(h.lse[1]));
  CHECK(h.out[2] == 3);
  h = {.q = {1, not_a_number, 1}, .k = {1, 1, 1}, .v = {1, 2, 3}};
  h.attention({.window = 0});
  CHECK(h.out[0] == 1);
  CHECK(std::isnan(h.out[1]));
  CHECK(h.out[2] == 3);
  h = {.q = {1, 1}, .k = {1, 1}, .v = {1, not_a_number}};
  h.attention(focus::full_causal);
  CHECK(std::isnan(h.out[1]));
  CHECK(near(h.lse[1], 1 + std::log(2.0)));
}

TEST_CASE("results are rounded to the storage type") {
  const std::array<focus::bfloat16, 2> q{}, k{};
  const std::array v{oracle::narrowed<focus::bfloat16>(1.0),
                     oracle::narrowed<focus::bfloat16>(1.0078125)};
  std::array<focus::bfloat16, 2> out{};
  std::array<float, 2> lse{};
  reference::attention(focus::tensor_view<const focus::bfloat16, 3>(q.data(), {1, 2, 1}),
                       focus::tensor_view<const focus::bfloat16, 3>(k.data(), {1, 2, 1}),
                       focus::tensor_view<const focus::bfloat16, 3>(v.data(), {1, 2, 1}),
                       focus::tensor_view<focus::bfloat16, 3>(out.data(), {1, 2, 1}),
                       focus::full_causal, {}, focus::matrix_view<float>(lse.data(), {1, 2}));
  CHECK(oracle::widened(out[1]) == 1.0);  // 1.00390625 lies half way: to even
  CHECK(lse[1] == static_cast<float>(std::log(2.0)));
}

TEST_CASE("merging two states") {
  const matrix a{8, not_a_number, 2, not_a_number, 1}, b{4, 7, not_a_number, not_a_number, 2};
  const matrix lse_a{0, -inf, 1.5, -inf, not_a_number}, lse_b{std::log(3.0), 2.5, -inf, -inf, 0};
  matrix out(5, 99.0), lse(5, 99.0);
  reference::merge_attention_states(focus::tensor_view<const double, 3>(a.data(), {1, 5, 1}),
                                    focus::matrix_view<const double>(lse_a.data(), {1, 5}),
                                    focus::tensor_view<const double, 3>(b.data(), {1, 5, 1}),
                                    focus::matrix_view<const double>(lse_b.data(), {1, 5}),
                                    focus::tensor_view<double, 3>(out.data(), {1, 5, 1}),
                                    focus::matrix_view<double>(lse.data(), {1, 5}));
  CHECK(near(out[0], 5));
  CHECK(near(lse[0], std::log(4.0)));
  CHECK(out[1] == 7);
  CHECK(lse[1] == 2.5);
  CHECK(out[2] == 2);
  CHECK(lse[2] == 1.5);
  CHECK(out[3] == 0);
  CHECK(lse[3] == -inf);
  CHECK(std::isnan(out[4]));
  CHECK(std::isnan(lse[4]));
}

TEST_CASE("merging gives attention over the union of the keys") {
  head all{.q = {1}, .k = {0.3, -1.2, 2.0}, .v = {1, 2, 3}};
  head first{.q = {1}, .k = {0.3, -1.2}, .v = {1, 2}}, rest{.q = {1}, .k = {2.0}, .v = {3}};
  all.attention(focus::full_causal), first.attention(focus::full_causal),
      rest.attention(focus::full_causal);
  matrix out(1), lse(1);
  reference::merge_attention_states(
      focus::tensor_view<const double, 3>(first.out.data(), {1, 1, 1}),
      focus::matrix_view<const double>(first.lse.data(), {1, 1}),
      focus::tensor_view<const double, 3>(rest.out.data(), {1, 1, 1}),
      focus::matrix_view<const double>(rest.lse.data(), {1, 1}),
      focus::tensor_view<double, 3>(out.data(), {1, 1, 1}),
      focus::matrix_view<double>(lse.data(), {1, 1}));
  CHECK(near(out[0], all.out[0]));
  CHECK(near(lse[0], all.lse[0]));
}

TEST_CASE("Sinkhorn of a 2 x 2 matrix") {
  // exp(S / temperature) = [1 1; 1 3].
  const double tau = 0.1;
  matrix scores{0, 0, 0, tau * std::log(3.0)}, q(4, not_a_number), f(2, not_a_number);
  const auto run = [&](int iterations) {
    reference::sinkhorn(focus::matrix_view<double>(scores.data(), {2, 2}),
                        focus::matrix_view<double>(q.data(), {2, 2}), f,
                        {.temperature = 0.1, .iterations = iterations});
  };
  SECTION("no iterations: the softmax") {
    run(0);
    CHECK(near(q[0], 0.5));
    CHECK(near(q[2], 0.25));
    CHECK(near(q[3], 0.75));
    CHECK(f == matrix{0, 0});
  }
  SECTION("one iteration: columns by 2 and 4, then rows by 3/4 and 5/4") {
    run(1);
    CHECK(near(q[0], 2.0 / 3.0));
    CHECK(near(q[1], 1.0 / 3.0));
    CHECK(near(q[2], 2.0 / 5.0));
    CHECK(near(q[3], 3.0 / 5.0));
    CHECK(near(f[0], 0.5 * std::log(2.0)));  // log(1/2) and log(1/4), less their mean
    CHECK(near(f[1], -0.5 * std::log(2.0)));
  }
  SECTION("many iterations: doubly stochastic, the cross ratio 3 kept") {
    run(200);
    const double p = std::sqrt(3.0) / (1 + std::sqrt(3.0));
    CHECK(near(q[0], p));
    CHECK(near(q[1], 1 - p));
    CHECK(near(q[2], 1 - p));
    CHECK(near(q[3], p));
  }
}

TEST_CASE("Sinkhorn in logarithms does not overflow, and its potentials give the assignment") {
  const index_t n = 5, groups = 3;
  matrix scores;
  for (int x = 0; x < n * groups; ++x) scores.push_back(100.0 * std::sin(1.0 + 2.0 * x));
  matrix q(scores.size(), not_a_number), again(scores.size(), not_a_number), f(3, not_a_number);
  const focus::matrix_view<const double> s(scores.data(), {n, groups});
  const focus::sinkhorn_options options{.temperature = 0.05f, .iterations = 7};
  reference::sinkhorn(s, focus::matrix_view<double>(q.data(), {n, groups}), f, options);
  for (std::size_t i = 0; i < 5; ++i) CHECK(near(q[3 * i] + q[3 * i + 1] + q[3 * i + 2], 1));
  CHECK(std::abs(f[0] + f[1] + f[2]) < 1e-9);
  reference::assign_groups(s, f, focus::matrix_view<double>(again.data(), {n, groups}), options);
  for (std::size_t x = 0; x < q.size(); ++x) CHECK(near(q[x], again[x]));
}

TEST_CASE("centroid scores") {
  // z = h W + bias: [1 2] [1 0; 0 2] = [1 4]; with the bias [-1 -1]: [0 3].
  const matrix hidden{1, 2, 0, 0}, w{1, 0, 0, 2}, c{1, 0, 3, 4, 0, 0}, bias{-1, -1};
  matrix s(6, not_a_number);
  focus::centroid_params<double> params;
  params.projection = {w.data(), {2, 2}};
  params.centroids = {c.data(), {3, 2}};
  const auto run = [&] {
    reference::centroid_scores(focus::matrix_view<const double>(hidden.data(), {2, 2}), params,
                               focus::matrix_view<double>(s.data(), {2, 3}));
  };
  run();
  CHECK(s == matrix{1, 19, 0, 0, 0, 0});
  params.bias = bias;
  run();
  CHECK(s == matrix{0, 12, 0, -1, -7, 0});
  params.metric = focus::similarity::cosine;
  run();
  CHECK(near(s[0], 0));
  CHECK(near(s[1], 4.0 / 5.0));
  CHECK(s[2] == 0);  // a centroid of length 0
  CHECK(near(s[3], -std::sqrt(0.5)));
  params.bias = {};
  run();
  CHECK(s[3] == 0);  // a token of length 0
  CHECK(s[4] == 0);
}

TEST_CASE("top-k: ties to the lower group, NaN last, exactly k bits") {
  const auto top = [](const matrix& row, int k) {
    std::vector<group_mask> mask(1);
    reference::top_k_groups(
        focus::matrix_view<const double>(row.data(), {1, static_cast<index_t>(row.size())}), k,
        mask);
    return mask[0];
  };
  CHECK(top({0.1, 0.7, 0.2}, 1) == 0b010);
  CHECK(top({0.1, 0.7, 0.2}, 2) == 0b110);
  CHECK(top({0.1, 0.7, 0.2}, 3) == 0b111);
  CHECK(top({0.5, 0.5, 0.5}, 2) == 0b011);
  CHECK(top({0.0, -0.0, 1.0}, 2) == 0b101);
  CHECK(top({not_a_number, -inf, not_a_number}, 1) == 0b010);
  CHECK(top({not_a_number, -inf, not_a_number}, 2) == 0b011);
  CHECK(top({not_a_number, not_a_number, not_a_number}, 2) == 0b011);
  matrix many(64, 0.0);
  many[63] = 1;
  CHECK(top(many, 1) == group_mask{1} << 63);
  CHECK(top(many, 64) == ~group_mask{0});
}

TEST_CASE("route ranks scores / temperature + potentials") {
  const std::vector<float> hidden{1, 0, 0, 1}, w{1, 0, 0, 1}, c{1, 0, 0, 1};
  std::vector<float> f{0, 0};
  std::vector<group_mask> masks(2);
  focus::centroid_params<float> params;
  params.projection = {w.data(), {2, 2}};
  params.centroids = {c.data(), {2, 2}};
  const focus::matrix_view<const float> h(hidden.data(), {2, 2});
  reference::route(h, params, f, 1, masks);
  CHECK(masks == std::vector<group_mask>{1, 2});
  f = {-9.5f, 0};  // not enough: 1 / 0.1 = 10 is more
  reference::route(h, params, f, 1, masks);
  CHECK(masks == std::vector<group_mask>{1, 2});
  f = {-10.5f, 0};
  reference::route(h, params, f, 1, masks);
  CHECK(masks == std::vector<group_mask>{2, 2});
}

TEST_CASE("no tokens") {
  reference::attention(focus::tensor_view<float, 3>(), focus::tensor_view<float, 3>(),
                       focus::tensor_view<float, 3>(), focus::tensor_view<float, 3>());
  std::vector<float> f(3, 9.0f);
  reference::sinkhorn(focus::matrix_view<float>(nullptr, {0, 3}),
                      focus::matrix_view<float>(nullptr, {0, 3}), f);
  CHECK(f == std::vector<float>{0, 0, 0});
  // Queries without keys are empty rows.
  head h{.q = {1, 2}, .k = {}, .v = {}};
  h.attention(focus::full_causal);
  CHECK(h.out == matrix{0, 0});
  CHECK(h.lse == matrix{-inf, -inf});
}

TEST_CASE("bad arguments are refused by name") {
  head h{.q = {1, 1}, .k = {1, 1}, .v = {1, 1}};
  const auto text_of = [](auto&& f) {
    try {
      f();
    } catch (const focus::invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string("nothing was thrown");
  };
  CHECK(text_of([&] { h.attention({.window = -2}); }) ==
        "focus::reference::attention: window: expected at least -1, got -2");
  CHECK(text_of([&] {
          h.sparse({1}, {1, 1}, {});
        }) == "focus::reference::sparse_attention: query_masks: expected length 2, got 1");
  CHECK(text_of([&] {
          h.soft_gate({1, 1}, {1, 1}, {}, {}, {.softcap = -1.0f});
        }) == "focus::reference::soft_gate_attention: softcap: expected at least 0, got -1");
}

}  // namespace test_reference
