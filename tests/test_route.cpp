// Hidden states to masks in one pass: the same as its parts, the same bits however it is called.
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/parallel.hpp"
#include "focus/route.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"
#include "routing_cases.hpp"

namespace test_route {
namespace {

using namespace oracle;
using masks = std::vector<group_mask>;

template <class A>
std::vector<A> made_up_potentials(index_t groups) {
  generator random(7);
  std::vector<A> f;
  for (index_t g = 0; g < groups; ++g) f.push_back(static_cast<A>(random.normal()));
  return f;
}

template <class H, class T, class A>
masks solve(const router_problem<H, T>& p, const std::vector<A>& f, int k, int threads = 1) {
  masks out(static_cast<std::size_t>(p.spec.n));
  focus::route(p.hidden.view(), p.params(), f, k, out, {}, thread_executor(threads));
  return out;
}

/// The masks from the scores that centroid_scores gives, ranked one by one: route must find the
/// very same.
template <class H, class T, class A>
masks by_parts(const router_problem<H, T>& p, const std::vector<A>& f, int k) {
  using sums = focus::detail::centroid_accumulator<H, T>;
  const index_t n = p.spec.n, groups = p.spec.groups;
  guarded_tensor<sums, 2> scores({n, groups}, layout::heads_first);
  focus::centroid_scores(p.hidden.view(), p.params(), scores.view());
  for (index_t i = 0; i < n; ++i)
    for (index_t g = 0; g < groups; ++g) {
      sums& s = scores.view()(i, g);
      s = s / static_cast<sums>(focus::sinkhorn_options{}.temperature) +
          static_cast<sums>(f[static_cast<std::size_t>(g)]);
    }
  masks out(static_cast<std::size_t>(n));
  focus::top_k_groups(scores.view(), k, out);
  return out;
}

template <class H, class T, class A = float>
void check_parts(const router_case& c) {
  const router_problem<H, T> p(c);
  const auto f = made_up_potentials<A>(c.groups);
  for (const int k : {1, 2, 4, 64}) {
    if (k > c.groups) continue;
    const masks got = solve(p, f, k);
    CHECK(got == by_parts(p, f, k));
    for (const group_mask mask : got) CHECK(std::popcount(mask) == k);
  }
}

struct small_router {
  std::vector<float> hidden{1, 0, 0, 1}, projection{1, 0, 0, 1}, centroids{1, 0, 0, 1}, bias{0, 0},
      potentials{0, 0};
  masks out{99, 99};
  int k = 1;
  focus::centroid_params<float> params{{projection.data(), {2, 2}}, {centroids.data(), {2, 2}}};
  focus::matrix_view<const float> hidden_view{hidden.data(), {2, 2}};
  std::span<const float> potentials_view{potentials};
  std::span<group_mask> out_view{out};
  focus::sinkhorn_options options;

  small_router() = default;
  small_router(const small_router&) = delete;
  void run() { focus::route(hidden_view, params, potentials_view, k, out_view, options); }
  std::string refusal_of(const std::string& argument) {
    return refusal(argument, [&] { run(); });
  }
};

}  // namespace

TEST_CASE("route: the masks of its parts, in each storage type") {
  for (const router_case& c : router_cases()) {
    INFO(describe(c));
    check_parts<float, float>(c);
    check_parts<focus::bfloat16, float>(c);
  }
  const router_case c{.n = 200, .d_model = 300, .d_group = 17, .with_bias = true};
  check_parts<double, double, double>(c);
  check_parts<double, double>(c);
  check_parts<float, float, double>(c);
  check_parts<focus::float16, focus::float16>(c);
  check_parts<focus::bfloat16, focus::bfloat16>(c);
  check_parts<engine_bfloat16, engine_float>(c);
  check_parts<engine_float, focus::bfloat16>(c);
}

TEST_CASE("route: the textbook's masks") {
  for (const focus::similarity metric : {focus::similarity::dot, focus::similarity::cosine})
    for (const int k : {1, 2, 5}) {
      const router_problem<double, double> p(
          {.n = 300, .d_model = 64, .metric = metric, .with_bias = true});
      const auto f = made_up_potentials<float>(8);
      masks expected(300);
      focus::reference::route(p.hidden.view(), p.params(), f, k, expected);
      CHECK(solve(p, f, k) == expected);
    }
}

TEST_CASE("route: potentials are added to scores over the temperature") {
  small_router r;
  r.run();
  CHECK(r.out == masks{1, 2});
  r.potentials = {-9.5f, 0};  // less than 1 / 0.1
  r.run();
  CHECK(r.out == masks{1, 2});
  r.potentials = {-10.5f, 0};
  r.run();
  CHECK(r.out == masks{2, 2});
  r.options.temperature = 0.05f;
  r.run();
  CHECK(r.out == masks{1, 2});
}

TEST_CASE("route: a saturated assignment ties where the ranking does not") {
  small_router r;
  r.hidden = {300, 299, 299, 300};  // exp(-10) and below
  r.options.temperature = 1e-3f;
  const std::vector<float> centroids{1, 0, 0, 1, -1, 0};
  r.params.centroids = {centroids.data(), {3, 2}};
  r.potentials = {0, 0, 0};
  r.potentials_view = r.potentials;
  r.k = 2;
  r.run();
  CHECK(r.out == masks{0b011, 0b011});
}

TEST_CASE("route: the lowest temperatures") {
  small_router r;
  r.hidden = {300, 299, 299, 300};
  for (const double temperature : {1e-30, 1e-39, 1e-60, 4.9e-324}) {
    r.options.temperature = temperature;
    r.run();
    CHECK(r.out == masks{1, 2});
  }
}

TEST_CASE("route: the highest temperatures") {
  small_router r;
  r.hidden = {300, 299, 299, 300};
  for (const double temperature : {1e30, 1e100, 1e300}) {
    r.options.temperature = temperature;
    r.run();
    CHECK(r.out == masks{1, 2});
  }
}

TEST_CASE("route: NaN ranks last and stays in its token") {
  small_router r;
  r.hidden = {1, static_cast<float>(not_a_number), 0, 1};
  r.run();
  CHECK(r.out == masks{1, 2});
  r.k = 2;
  r.run();
  CHECK(r.out == masks{3, 3});
}

TEST_CASE("route: the same masks alone, in a batch, and for any number of threads") {
  for (const router_case& c : router_cases()) {
    INFO(describe(c));
    // Near ties: many equal centroids, so that any difference of bits shows.
    router_problem<float, float> p(c);
    for (index_t g = 1; g < c.groups; ++g)
      for (index_t x = 0; x < c.d_group; ++x)
        p.centroids.view()(g, x) = p.centroids.view()(0, c.d_group - 1 - x);
    const std::vector<float> f(static_cast<std::size_t>(c.groups), 0.0f);
    const int k = c.groups > 1 ? 2 : 1;
    const masks all = solve(p, f, k);
    for (const int threads : {2, 3}) CHECK(solve(p, f, k, threads) == all);
    masks one_by_one;
    for (index_t i = 0; i < c.n; ++i) {
      masks alone(1);
      focus::route(focus::matrix_view<const float>(p.hidden.view().row(i), {1, c.d_model}),
                   p.params(), f, k, alone);
      one_by_one.push_back(alone[0]);
    }
    CHECK(one_by_one == all);
  }
}

TEST_CASE("route: no tokens, with null pointers") {
  small_router r;
  r.hidden_view = {nullptr, {0, 2}};
  r.out_view = {};
  CHECK_NOTHROW(r.run());
}

TEST_CASE("route: allocates nothing when lent a workspace that has served before") {
  const router_problem<focus::bfloat16, float> p({.n = 100});
  const std::vector<float> f(8, 0.0f);
  masks out(100);
  focus::workspace ws;
  const auto run = [&] {
    focus::route(p.hidden.view(), p.params(), f, 2, out, {},
                 focus::with_workspace(focus::serial_executor{}, ws));
  };
  CHECK(allocations_of(run) == 1);
  CHECK(allocations_of(run) == 0);
}

TEST_CASE("route: bad arguments are refused before anything is written") {
  small_router r;
  std::vector<float> many(65 * 2);
  SECTION("hidden and the router") {
    r.hidden_view = {r.hidden.data(), {2, 1}, {2, 1}};
    CHECK(r.refusal_of("hidden").empty());
    r.hidden_view = {nullptr, {2, 2}};
    CHECK(r.refusal_of("hidden").empty());
    r.hidden_view = {r.hidden.data(), {2, 2}};
    r.params.projection = {nullptr, {2, 2}};
    CHECK(r.refusal_of("params.projection").empty());
    r.params.projection = {r.projection.data(), {2, 2}};
    for (const index_t groups : {0, 65}) {
      r.params.centroids = {many.data(), {groups, 2}};
      CHECK(r.refusal_of("params.centroids").empty());
    }
    r.params.centroids = {r.centroids.data(), {2, 2}};
    r.params.bias = std::span(r.bias).first(1);
    CHECK(r.refusal_of("params.bias").empty());
  }
  SECTION("log_group_scale") {
    r.potentials_view = r.potentials_view.first(1);
    CHECK(r.refusal_of("log_group_scale").empty());
    r.potentials_view = {};
    CHECK(r.refusal_of("log_group_scale").empty());
  }
  SECTION("k") {
    for (const int k : {-1, 0, 3}) {
      r.k = k;
      CHECK(r.refusal_of("k").empty());
    }
  }
  SECTION("masks") {
    r.out_view = r.out_view.first(1);
    CHECK(r.refusal_of("masks").empty());
    r.out_view = {};
    CHECK(r.refusal_of("masks").empty());
    r.out_view = r.out;
    r.hidden_view = {reinterpret_cast<const float*>(r.out.data()), {2, 2}};
    CHECK(r.refusal_of("masks").empty());
    r.hidden_view = {r.hidden.data(), {2, 2}};
    r.potentials_view = {reinterpret_cast<const float*>(r.out.data()), 2};
    CHECK(r.refusal_of("masks").empty());
  }
  SECTION("options") {
    for (const float temperature : {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN()}) {
      r.options = {.temperature = temperature};
      CHECK(r.refusal_of("temperature").empty());
    }
    r.options = {.iterations = -1};
    CHECK(r.refusal_of("iterations").empty());
  }
  CHECK(r.out == masks{99, 99});
}

}  // namespace test_route
