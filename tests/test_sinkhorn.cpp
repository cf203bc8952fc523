// Balanced assignments and their potentials, against the textbook form, by hand, and by their own
// laws.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/parallel.hpp"
#include "focus/reference/routing.hpp"
#include "focus/sinkhorn.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"

namespace test_sinkhorn {
namespace {

using namespace oracle;

struct balance_case {
  index_t n = 100, groups = 8;
  focus::sinkhorn_options options = {};
  double spread = 1;  // of the scores
  double tilt = 0;    // added to the scores of group 0
  layout memory = layout::heads_first;
  std::uint64_t seed = 1;
};

std::string describe(const balance_case& c) {
  std::ostringstream text;
  text << "n " << c.n << ", K " << c.groups << ", temperature " << c.options.temperature
       << ", iterations " << c.options.iterations << ", spread " << c.spread << ", tilt " << c.tilt
       << ", layout " << static_cast<int>(c.memory);
  return text.str();
}

std::vector<balance_case> balance_cases() {
  std::vector<balance_case> all;
  for (const index_t n : {0, 1, 2, 7, 255, 256, 257, 1000}) all.push_back({.n = n});
  for (const index_t groups : {1, 2, 3, 4, 5, 9, 16, 17, 63, 64})
    all.push_back({.groups = groups, .memory = layout::padded});
  for (const int iterations : {0, 1, 2, 3, 50})
    all.push_back({.options = {.iterations = iterations}, .memory = layout::misaligned});
  for (const double temperature : {0.05, 1.0, 30.0})
    all.push_back({.options = {.temperature = temperature}, .tilt = 0.5});
  return all;
}

template <class T>
guarded_tensor<T, 2> make_scores(const balance_case& c) {
  guarded_tensor<T, 2> scores({c.n, c.groups}, c.memory);
  generator random(c.seed);
  index_t at = 0;
  scores.fill([&] { return c.spread * random.normal() + (at++ % c.groups == 0 ? c.tilt : 0.0); });
  return scores;
}

template <class T>
struct balanced {
  guarded_tensor<T, 2> assignment;
  std::vector<T> log_group_scale;

  explicit balanced(const balance_case& c)
      : assignment({c.n, c.groups}, c.memory),
        log_group_scale(static_cast<std::size_t>(c.groups), static_cast<T>(not_a_number)) {}
  bool same_bits(const balanced& other) const {
    return assignment.same_bits(other.assignment) &&
           std::memcmp(log_group_scale.data(), other.log_group_scale.data(),
                       log_group_scale.size() * sizeof(T)) == 0;
  }
};

template <class Out, class T>
balanced<Out> solve(const balance_case& c, const guarded_tensor<T, 2>& scores, int threads = 1) {
  balanced<Out> b(c);
  focus::sinkhorn(scores.view(), b.assignment.view(), b.log_group_scale, c.options,
                  thread_executor(threads));
  return b;
}

balanced<double> truth(const balance_case& c, const std::vector<double>& scores) {
  balanced<double> b({.n = c.n, .groups = c.groups});
  focus::reference::sinkhorn(focus::matrix_view<const double>(scores.data(), {c.n, c.groups}),
                             b.assignment.view(), b.log_group_scale, c.options);
  return b;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = a.size() == b.size() ? 0 : infinity;
  for (std::size_t x = 0; x < a.size() && x < b.size(); ++x)
    largest = a[x] == b[x] ? largest : (std::max)(largest, std::abs(a[x] - b[x]));
  return largest;
}

/// Sinkhorn with outputs of type Out against the textbook; what is wrong, or nothing.
template <class Out, class T>
std::string check_values(const balance_case& c) {
  const guarded_tensor<T, 2> scores = make_scores<T>(c);
  const balanced<Out> b = solve<Out>(c, scores);
  if (!b.assignment.guards_hold()) return "memory outside the extents was written";
  const balanced<double> expected = truth(c, scores.values());
  // Logarithms as large as the scores over the temperature, and column sums of n terms, are rounded
  // a few times.
  const double logits = 1 + std::log(1.0 + static_cast<double>(c.n)) +
                        largest_magnitude(scores.values()) / c.options.temperature;
  const double tolerance = 8 * epsilon<Out>() * logits;
  if (!(largest_difference(b.assignment.values(), expected.assignment.values()) <= tolerance))
    return "the assignment differs";
  const std::vector<double> f(b.log_group_scale.begin(), b.log_group_scale.end());
  if (!(largest_difference(f, expected.log_group_scale) <= tolerance))
    return "the potentials differ";
  double mean = 0;
  for (const double x : f) mean += x;
  if (!(std::abs(mean) <= tolerance * static_cast<double>(c.groups)))
    return "the potentials' mean is not 0";
  return {};
}

std::vector<double> column_sums(const std::vector<double>& assignment, index_t groups) {
  std::vector<double> sums(static_cast<std::size_t>(groups));
  for (std::size_t x = 0; x < assignment.size(); ++x) sums[x % sums.size()] += assignment[x];
  return sums;
}

struct small_problem {
  std::vector<float> scores{0, 0, 0, 1}, assignment = std::vector<float>(4, 99.0f),
                                         potentials = std::vector<float>(2, 99.0f);
  focus::matrix_view<const float> scores_view{scores.data(), {2, 2}};
  focus::matrix_view<float> assignment_view{assignment.data(), {2, 2}};
  std::span<float> potentials_view{potentials};
  focus::sinkhorn_options options;

  small_problem() = default;
  small_problem(const small_problem&) = delete;

  /// Both functions name the argument; what is wrong, or nothing.
  std::string refusal_of(const std::string& argument) {
    const std::string balancing = refusal(
        argument, [&] { focus::sinkhorn(scores_view, assignment_view, potentials_view, options); });
    const std::string assigning = refusal(argument, [&] {
      focus::assign_groups(scores_view, potentials_view, assignment_view, options);
    });
    return balancing.empty() ? assigning : balancing;
  }
  bool untouched() const {
    return scores == std::vector<float>{0, 0, 0, 1} && assignment == std::vector<float>(4, 99.0f) &&
           potentials == std::vector<float>(2, 99.0f);
  }
};

}  // namespace

TEST_CASE("sinkhorn: the textbook's values") {
  for (const balance_case& c : balance_cases()) {
    INFO(describe(c));
    CHECK(check_values<float, float>(c).empty());
    CHECK(check_values<double, double>(c).empty());
    CHECK(check_values<double, float>(c).empty());
    CHECK(check_values<float, focus::bfloat16>(c).empty());
    CHECK(check_values<float, focus::float16>(c).empty());
    CHECK(check_values<float, engine_float>(c).empty());
    CHECK(check_values<float, double>(c).empty());
  }
}

TEST_CASE("sinkhorn: by hand") {
  // exp(S / tau) = [1 1; 1 3]; columns by 2 and 4, then rows by 3/4 and 5/4.
  const double tau = 0.1;
  const std::vector<double> scores{0, 0, 0, tau * std::log(3.0)};
  std::vector<double> q(4), f(2);
  focus::sinkhorn(focus::matrix_view<const double>(scores.data(), {2, 2}),
                  focus::matrix_view<double>(q.data(), {2, 2}), f, {.iterations = 1});
  const std::vector<double> expected{2.0 / 3, 1.0 / 3, 2.0 / 5, 3.0 / 5};
  CHECK(largest_difference(q, expected) < 1e-14);
  CHECK(f[0] == Approx(0.5 * std::log(2.0)));
  CHECK(f[1] == Approx(-0.5 * std::log(2.0)));
}

TEST_CASE("sinkhorn: rows sum to 1, columns tend to n / K, whatever group is favoured") {
  for (const double tilt : {0.0, 0.3, 1.0}) {
    const balance_case c{.n = 4096, .options = {.iterations = 60}, .spread = 0.3, .tilt = tilt};
    const balanced<float> b = solve<float>(c, make_scores<float>(c));
    const std::vector<double> q = b.assignment.values();
    for (const double sum : column_sums(q, c.groups)) CHECK(std::abs(sum / 512 - 1) < 0.02);
    double worst = 0;
    for (index_t i = 0; i < c.n; ++i) {
      double sum = 0;
      for (index_t g = 0; g < c.groups; ++g) sum += q[static_cast<std::size_t>(i * c.groups + g)];
      worst = (std::max)(worst, std::abs(sum - 1));
    }
    CHECK(worst < 1e-6);
  }
}

TEST_CASE("sinkhorn: no temperature and no score overflows") {
  for (const double temperature : {0.05, 1e-3})
    for (const double spread : {100.0, 1e4}) {
      balance_case c{.n = 500, .options = {.temperature = temperature}, .spread = spread};
      INFO(describe(c));
      CHECK(check_values<float, float>(c).empty());
      CHECK(check_values<double, double>(c).empty());
      c.tilt = 10 * spread;  // every weight of the other groups underflows at first
      CHECK(check_values<double, double>(c).empty());
      for (const float x : solve<float>(c, make_scores<float>(c)).log_group_scale)
        CHECK(std::isfinite(x));
    }
}

// Subnormal floats, what no float can be, and the end of double: assignments are then one-hot, or
// shared by scores that are the same.
TEST_CASE("sinkhorn and assign_groups: the lowest temperatures") {
  const std::vector<float> scores{0.5f, 0.25f, 0.25f, 0.5f, -1.0f, -1.0f, 3e18f, -3e18f};
  const std::vector<float> one_hot{1, 0, 0, 1, 0.5f, 0.5f, 1, 0};
  const focus::matrix_view<const float> s(scores.data(), {4, 2});
  for (const double temperature : {1e-30, 1e-39, 1e-45, 1e-60, 1e-310, 4.9e-324}) {
    INFO("temperature " << temperature);
    std::vector<float> q(8), f(2, 99.0f);
    const focus::matrix_view<float> assignment(q.data(), {4, 2});
    focus::sinkhorn(s, assignment, f, {.temperature = temperature, .iterations = 0});
    CHECK(q == one_hot);
    CHECK(f == std::vector<float>{0, 0});
    std::vector<float> again(8);
    focus::assign_groups(s, f, focus::matrix_view<float>(again.data(), {4, 2}),
                         {.temperature = temperature});
    CHECK(again == one_hot);
    std::vector<double> exact(8), exact_f(2);
    focus::reference::sinkhorn(s, focus::matrix_view<double>(exact.data(), {4, 2}), exact_f,
                               {.temperature = temperature});
    focus::sinkhorn(s, assignment, f, {.temperature = temperature});
    for (std::size_t x = 0; x < q.size(); ++x) {
      INFO("element " << x);
      CHECK(static_cast<double>(q[x]) == Approx(exact[x]).margin(1e-6));
    }
    for (const float x : f) CHECK(std::isfinite(x));
  }
}

TEST_CASE("assign_groups: potentials that float does not hold") {
  const std::vector<float> scores{1, 2, 3, 4};
  std::vector<float> q(4);
  focus::assign_groups(focus::matrix_view<const float>(scores.data(), {2, 2}),
                       std::vector<double>{1e300, -1e300},
                       focus::matrix_view<float>(q.data(), {2, 2}));
  CHECK(q == std::vector<float>{1, 0, 1, 0});
  // Logits and potentials so small that they vanish in float still tell groups apart.
  std::vector<float> same(4);
  focus::assign_groups(focus::matrix_view<const float>(scores.data(), {2, 2}),
                       std::vector<double>{0, 0}, focus::matrix_view<float>(same.data(), {2, 2}),
                       {.temperature = 1e300});
  CHECK(same == std::vector<float>(4, 0.5f));
}

TEST_CASE("sinkhorn: no iterations are the softmax, with potentials of zero") {
  const balance_case c{.n = 3, .groups = 2, .options = {.temperature = 1, .iterations = 0}};
  guarded_tensor<float, 2> scores = make_scores<float>(c);
  scores.view()(1, 0) = 0, scores.view()(1, 1) = std::log(3.0f);
  const balanced<float> b = solve<float>(c, scores);
  CHECK(b.assignment.view()(1, 0) == Approx(0.25));
  CHECK(b.assignment.view()(1, 1) == Approx(0.75));
  CHECK(b.log_group_scale == std::vector<float>{0, 0});
}

TEST_CASE("sinkhorn: one group takes everything") {
  const balance_case c{.n = 5, .groups = 1};
  const balanced<float> b = solve<float>(c, make_scores<float>(c));
  CHECK(b.assignment.values() == std::vector<double>(5, 1.0));
  CHECK(b.log_group_scale == std::vector<float>{0});
}

TEST_CASE("sinkhorn: a group that no token can join keeps its potential") {
  const balance_case c{.n = 300, .groups = 4, .options = {.iterations = 50}, .spread = 0.2};
  guarded_tensor<float, 2> scores = make_scores<float>(c);
  for (index_t i = 0; i < c.n; ++i) scores.view()(i, 2) = static_cast<float>(-infinity);
  const balanced<float> b = solve<float>(c, scores);
  const std::vector<double> sums = column_sums(b.assignment.values(), 4);
  CHECK(sums[2] == 0);
  for (const std::size_t g : {0u, 1u, 3u}) CHECK(sums[g] == Approx(100).epsilon(0.05));
  for (const float x : b.log_group_scale) CHECK(std::isfinite(x));
}

TEST_CASE("sinkhorn and assign_groups: the same bits for any number of threads") {
  for (const balance_case& c : balance_cases()) {
    INFO(describe(c));
    const guarded_tensor<float, 2> scores = make_scores<float>(c);
    const balanced<float> one = solve<float>(c, scores);
    for (const int threads : {2, 3}) CHECK(solve<float>(c, scores, threads).same_bits(one));
    balanced<float> again(c);
    again.log_group_scale = one.log_group_scale;
    for (const int threads : {1, 2, 3}) {
      focus::assign_groups(scores.view(), one.log_group_scale, again.assignment.view(), c.options,
                           thread_executor(threads));
      CHECK(again.same_bits(one));
    }
  }
}

TEST_CASE("assign_groups: the textbook's values") {
  for (const balance_case& c : balance_cases()) {
    INFO(describe(c));
    const guarded_tensor<float, 2> scores = make_scores<float>(c);
    const std::vector<double> as_double = scores.values();
    generator random(3);
    std::vector<float> f;
    for (index_t g = 0; g < c.groups; ++g) f.push_back(static_cast<float>(random.normal()));
    const std::vector<double> f_double(f.begin(), f.end());
    guarded_tensor<float, 2> assignment({c.n, c.groups}, c.memory);
    std::vector<double> expected(as_double.size());
    focus::assign_groups(scores.view(), f, assignment.view(), c.options);
    focus::reference::assign_groups(
        focus::matrix_view<const double>(as_double.data(), {c.n, c.groups}), f_double,
        focus::matrix_view<double>(expected.data(), {c.n, c.groups}), c.options);
    CHECK(assignment.guards_hold());
    const double logits =
        3 + largest_magnitude(as_double) / static_cast<double>(c.options.temperature);
    CHECK(largest_difference(assignment.values(), expected) <= 4 * epsilon<float>() * logits);
  }
}

TEST_CASE("assign_groups: the assignment of a token depends on that token alone") {
  for (const index_t groups : {3, 8, 17, 64}) {
    const balance_case c{.n = 300, .groups = groups};
    const guarded_tensor<float, 2> scores = make_scores<float>(c);
    const balanced<float> all = solve<float>(c, scores);
    std::vector<float> alone(static_cast<std::size_t>(groups));
    const focus::matrix_view<float> alone_view(alone.data(), {1, groups});
    for (index_t i = 0; i < c.n; ++i) {
      focus::assign_groups(focus::matrix_view<const float>(scores.view().row(i), {1, groups}),
                           all.log_group_scale, alone_view, c.options);
      REQUIRE(std::memcmp(alone.data(), all.assignment.view().row(i), alone.size() * 4) == 0);
    }
  }
}

TEST_CASE("assign_groups: NaN stays in its row") {
  const balance_case c{.n = 20};
  guarded_tensor<float, 2> scores = make_scores<float>(c);
  const std::vector<float> f(8, 0.0f);
  guarded_tensor<float, 2> clean({20, 8}, c.memory), poisoned({20, 8}, c.memory);
  focus::assign_groups(scores.view(), f, clean.view());
  scores.view()(4, 7) = static_cast<float>(not_a_number);
  focus::assign_groups(scores.view(), f, poisoned.view());
  for (index_t i = 0; i < 20; ++i)
    CHECK((std::memcmp(clean.view().row(i), poisoned.view().row(i), 32) == 0) == (i != 4));
  for (index_t g = 0; g < 8; ++g) CHECK(std::isnan(poisoned.view()(4, g)));
}

TEST_CASE("sinkhorn: allocates nothing when lent a workspace that has served before") {
  const balance_case c{.n = 1000};
  const guarded_tensor<float, 2> scores = make_scores<float>(c);
  balanced<float> b(c);
  focus::workspace ws;
  const auto run = [&] {
    focus::sinkhorn(scores.view(), b.assignment.view(), b.log_group_scale, c.options,
                    focus::with_workspace(focus::serial_executor{}, ws));
  };
  CHECK(allocations_of(run) == 1);
  CHECK(allocations_of(run) == 0);
  CHECK(allocations_of([&] {
          focus::assign_groups(scores.view(), b.log_group_scale, b.assignment.view());
        }) == 0);
}

TEST_CASE("sinkhorn and assign_groups: no tokens, with null pointers") {
  const focus::matrix_view<float> none(nullptr, {0, 2});
  std::vector<float> f(2, 99.0f);
  focus::sinkhorn(none, none, f);
  CHECK(f == std::vector<float>{0, 0});
  CHECK_NOTHROW(focus::assign_groups(none, f, none));
}

TEST_CASE("sinkhorn and assign_groups: bad arguments are refused before anything is written") {
  small_problem p;
  std::vector<float> many(65 * 2);
  SECTION("scores") {
    p.scores_view = {nullptr, {2, 2}};
    CHECK(p.refusal_of("scores").empty());
    p.scores_view = {p.scores.data(), {2, 0}};
    CHECK(p.refusal_of("scores").empty());
    p.scores_view = {many.data(), {2, 65}};
    CHECK(p.refusal_of("scores").empty());
  }
  SECTION("assignment") {
    p.assignment_view = {p.assignment.data(), {1, 2}};
    CHECK(p.refusal_of("assignment").empty());
    p.assignment_view = {nullptr, {2, 2}};
    CHECK(p.refusal_of("assignment").empty());
    p.assignment_view = {p.assignment.data(), {2, 2}, {0, 1}};
    CHECK(p.refusal_of("assignment").empty());
    p.assignment_view = {p.scores.data(), {2, 2}};
    CHECK(p.refusal_of("assignment").empty());
    p.assignment_view = {p.assignment.data(), {2, 2}};
    p.potentials_view = std::span(p.assignment).last(2);
    CHECK(p.refusal_of("assignment").empty());
  }
  SECTION("log_group_scale") {
    p.potentials_view = std::span(p.potentials).first(1);
    CHECK(p.refusal_of("log_group_scale").empty());
    p.potentials_view = {};
    CHECK(p.refusal_of("log_group_scale").empty());
    CHECK(refusal("log_group_scale", [&] {
            focus::sinkhorn(p.scores_view, p.assignment_view, std::span(p.scores).first(2));
          }).empty());
  }
  SECTION("options") {
    for (const float temperature :
         {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN(), static_cast<float>(-infinity)}) {
      p.options = {.temperature = temperature};
      CHECK(p.refusal_of("temperature").empty());
    }
    p.options = {.iterations = -1};
    CHECK(p.refusal_of("iterations").empty());
  }
  CHECK(p.untouched());
}

}  // namespace test_sinkhorn
