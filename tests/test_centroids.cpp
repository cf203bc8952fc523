// Eq. 1 against its textbook form, by hand, bit for bit where that is promised, and what is
// refused.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/centroids.hpp"
#include "focus/parallel.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"
#include "routing_cases.hpp"

namespace test_centroids {
namespace {

using namespace oracle;

template <class Out, class H, class T>
guarded_tensor<Out, 2> solve(const router_problem<H, T>& p, int threads = 1) {
  guarded_tensor<Out, 2> scores({p.spec.n, p.spec.groups}, p.spec.memory);
  focus::centroid_scores(p.hidden.view(), p.params(), scores.view(), thread_executor(threads));
  return scores;
}

/// Scores in Out of hidden states in H and a router in T: what is wrong, or nothing.
template <class Out, class H, class T>
std::string check_values(const router_case& c) {
  const router_problem<H, T> p(c);
  const guarded_tensor<Out, 2> scores = solve<Out>(p);
  if (!scores.guards_hold()) return "memory outside the extents was written";
  const true_scores truth = score_in_double(p);
  const std::vector<double> values = scores.values();
  using sums = focus::detail::centroid_accumulator<H, T>;
  for (std::size_t x = 0; x < values.size(); ++x) {
    const double error = std::abs(values[x] - truth.scores[x]);
    const double tolerance = 8 * epsilon<sums>() * (truth.magnitudes[x] + 1e-30) +
                             epsilon<Out>() * std::abs(truth.scores[x]);
    if (!(error <= tolerance))
      return "score " + std::to_string(x) + " is " + std::to_string(values[x]) + ", not " +
             std::to_string(truth.scores[x]);
  }
  return {};
}

struct small_router {
  std::vector<float> hidden{1, 2, 0, 0}, projection{1, 0, 0, 2}, centroids{1, 0, 3, 4, 0, 0};
  std::vector<float> bias{-1, -1};
  std::vector<float> scores = std::vector<float>(6, 99.0f);
  focus::centroid_params<float> params{{projection.data(), {2, 2}}, {centroids.data(), {3, 2}}};
  focus::matrix_view<const float> hidden_view{hidden.data(), {2, 2}};
  focus::matrix_view<float> scores_view{scores.data(), {2, 3}};

  small_router() = default;
  small_router(const small_router&) = delete;
  void run() { focus::centroid_scores(hidden_view, params, scores_view); }
  std::string refusal_of(const std::string& argument) {
    return refusal(argument, [&] { run(); });
  }
  bool untouched() const { return scores == std::vector<float>(6, 99.0f); }
};

}  // namespace

TEST_CASE("centroid_scores: the textbook's values") {
  for (const router_case& c : router_cases()) {
    INFO(describe(c));
    CHECK(check_values<float, float, float>(c).empty());
    CHECK(check_values<double, double, double>(c).empty());
    CHECK(check_values<float, focus::bfloat16, float>(c).empty());
    CHECK(check_values<float, focus::float16, focus::float16>(c).empty());
  }
}

TEST_CASE("centroid_scores: any mix of storage types") {
  for (const index_t d_model : {7, 300})
    for (const focus::similarity metric : {focus::similarity::dot, focus::similarity::cosine}) {
      const router_case c{
          .n = 23, .d_model = d_model, .d_group = 17, .metric = metric, .with_bias = true};
      INFO(describe(c));
      CHECK(check_values<float, focus::bfloat16, focus::bfloat16>(c).empty());
      CHECK(check_values<float, focus::float16, focus::bfloat16>(c).empty());
      CHECK(check_values<float, engine_bfloat16, engine_float>(c).empty());
      CHECK(check_values<float, engine_float, float>(c).empty());
      CHECK(check_values<float, float, focus::float16>(c).empty());
      CHECK(check_values<double, double, float>(c).empty());
      CHECK(check_values<double, float, double>(c).empty());
      CHECK(check_values<float, double, double>(c).empty());
      CHECK(check_values<focus::bfloat16, float, float>(c).empty());
    }
}

TEST_CASE("centroid_scores: by hand") {
  small_router r;
  r.run();
  // z = [1 4] and [0 0]
  CHECK(r.scores == std::vector<float>{1, 19, 0, 0, 0, 0});
  r.params.bias = r.bias;  // z = [0 3] and [-1 -1]
  r.run();
  CHECK(r.scores == std::vector<float>{0, 12, 0, -1, -7, 0});
  r.params.metric = focus::similarity::cosine;
  r.run();
  CHECK(r.scores[0] == 0);
  CHECK(r.scores[1] == Approx(0.8).epsilon(1e-6));
  CHECK(r.scores[2] == 0);  // a centroid of length 0
  CHECK(r.scores[3] == Approx(-std::sqrt(0.5)).epsilon(1e-6));
  CHECK(r.scores[4] == Approx(-7 / (5 * std::sqrt(2.0))).epsilon(1e-6));
  r.params.bias = {};
  r.run();
  CHECK(r.scores[3] == 0);  // a token of length 0
  CHECK(r.scores[4] == 0);
}

TEST_CASE("centroid_scores: cosines of very long and very short vectors") {
  for (const float magnitude : {1e-40f, 1e-30f, 1e-20f, 1e20f, 1e30f}) {
    small_router r;
    r.params.metric = focus::similarity::cosine;
    r.hidden = {magnitude, 2 * magnitude, -magnitude, magnitude};
    for (std::size_t x : {2u, 3u}) r.centroids[x] *= magnitude;
    r.run();
    const double tolerance = magnitude < 1e-38f ? 1e-4 : 1e-6;  // subnormal inputs are not exact
    CHECK(r.scores[0] == Approx(1 / std::sqrt(17.0)).epsilon(tolerance));
    CHECK(r.scores[1] == Approx(19 / (5 * std::sqrt(17.0))).epsilon(tolerance));
    CHECK(r.scores[4] == Approx(1 / std::sqrt(5.0)).epsilon(tolerance));
  }
}

TEST_CASE("centroid_scores: NaN and infinity stay in their row") {
  for (const focus::similarity metric : {focus::similarity::dot, focus::similarity::cosine})
    for (const double bad : {not_a_number, infinity}) {
      const router_case c{.n = 31, .d_group = 5, .metric = metric};
      const router_problem<float, float> clean(c);
      router_problem<float, float> poisoned = clean;
      poisoned.hidden.view()(13, 3) = static_cast<float>(bad);
      const auto expected = solve<float>(clean), got = solve<float>(poisoned);
      for (index_t i = 0; i < c.n; ++i) {
        const bool same = std::memcmp(expected.view().row(i), got.view().row(i), 8 * 4) == 0;
        CHECK(same == (i != 13));
      }
      if (std::isnan(bad) || metric == focus::similarity::cosine)
        for (index_t g = 0; g < c.groups; ++g) CHECK(std::isnan(got.view()(13, g)));
    }
}

TEST_CASE("centroid_scores: the same bits alone, in a batch, and for any number of threads") {
  for (const router_case& c : router_cases()) {
    INFO(describe(c));
    const router_problem<focus::bfloat16, float> p(c);
    const auto all = solve<float>(p);
    for (const int threads : {2, 3}) CHECK(solve<float>(p, threads).same_bits(all));
    std::vector<float> alone(static_cast<std::size_t>(c.groups));
    bool same = true;
    for (index_t i = 0; i < c.n; ++i) {
      focus::centroid_scores(
          focus::matrix_view<const focus::bfloat16>(p.hidden.view().row(i), {1, c.d_model}),
          p.params(), focus::matrix_view<float>(alone.data(), {1, c.groups}));
      same = same && std::memcmp(alone.data(), all.view().row(i), alone.size() * 4) == 0;
    }
    CHECK(same);
  }
}

TEST_CASE("centroid_scores: no model dimension leaves the bias, no group dimension zeros") {
  small_router r;
  r.hidden_view = {nullptr, {2, 0}};
  r.params.projection = {nullptr, {0, 2}};
  r.params.bias = r.bias;
  r.run();
  CHECK(r.scores == std::vector<float>{-1, -7, 0, -1, -7, 0});
  r.params.projection = {nullptr, {0, 0}};
  r.params.centroids = {nullptr, {3, 0}};
  r.params.bias = {};
  r.run();
  CHECK(r.scores == std::vector<float>(6, 0.0f));
}

TEST_CASE("centroid_scores: no tokens, with null pointers") {
  small_router r;
  r.hidden_view = {nullptr, {0, 2}};
  r.scores_view = {nullptr, {0, 3}};
  CHECK_NOTHROW(r.run());
}

TEST_CASE("centroid_scores: allocates nothing when lent a workspace that has served before") {
  const router_problem<float, float> p({.n = 100});
  std::vector<float> scores(800);
  focus::workspace ws;
  const auto run = [&] {
    focus::centroid_scores(p.hidden.view(), p.params(),
                           focus::matrix_view<float>(scores.data(), {100, 8}),
                           focus::with_workspace(focus::serial_executor{}, ws));
  };
  CHECK(allocations_of(run) == 1);
  CHECK(allocations_of(run) == 0);
}

TEST_CASE("centroid_scores: bad arguments are refused before anything is written") {
  small_router r;
  std::vector<float> many(65 * 2);
  SECTION("hidden") {
    r.hidden_view = {r.hidden.data(), {2, 1}, {2, 1}};
    CHECK(r.refusal_of("hidden").empty());
    r.hidden_view = {nullptr, {2, 2}};
    CHECK(r.refusal_of("hidden").empty());
  }
  SECTION("the router") {
    r.params.projection = {nullptr, {2, 2}};
    CHECK(r.refusal_of("params.projection").empty());
    r.params.projection = {r.projection.data(), {2, 2}};
    r.params.centroids = {r.centroids.data(), {6, 1}};
    CHECK(r.refusal_of("params.centroids").empty());
    r.params.centroids = {nullptr, {3, 2}};
    CHECK(r.refusal_of("params.centroids").empty());
    r.params.centroids = {r.centroids.data(), {0, 2}};
    CHECK(r.refusal_of("params.centroids").empty());
    r.params.centroids = {many.data(), {65, 2}};
    CHECK(r.refusal_of("params.centroids").empty());
    r.params.centroids = {r.centroids.data(), {3, 2}};
    r.params.bias = std::span(r.bias).first(1);
    CHECK(r.refusal_of("params.bias").empty());
  }
  SECTION("scores") {
    r.scores_view = {r.scores.data(), {3, 2}};
    CHECK(r.refusal_of("scores").empty());
    r.scores_view = {nullptr, {2, 3}};
    CHECK(r.refusal_of("scores").empty());
    r.scores_view = {r.scores.data(), {2, 3}, {2, 1}};
    CHECK(r.refusal_of("scores").empty());
  }
  SECTION("overlap") {
    r.scores_view = {r.centroids.data(), {2, 3}};
    CHECK(r.refusal_of("scores").empty());
    r.hidden_view = {r.scores.data() + 5, {2, 2}, {0, 1}};
    r.scores_view = {r.scores.data(), {2, 3}};
    CHECK(r.refusal_of("scores").empty());
    CHECK(r.centroids == std::vector<float>{1, 0, 3, 4, 0, 0});
  }
  CHECK(r.untouched());
}

TEST_CASE("centroid_scores: an exception of the executor's reaches the caller") {
  small_router r;
  CHECK_THROWS_AS(
      focus::centroid_scores(r.hidden_view, r.params, r.scores_view, throwing_executor{}),
      throwing_executor::error);
}

}  // namespace test_centroids
