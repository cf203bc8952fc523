// The gradients of assignments against central differences, the textbook form and the naive form in
// float, by hand, and by their own laws.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/parallel.hpp"
#include "focus/reference.hpp"
#include "focus/sinkhorn.hpp"
#include "focus/sinkhorn_backward.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"

namespace test_sinkhorn_backward {
namespace {

using namespace oracle;
using values = std::vector<double>;

struct gradient_case {
  index_t n = 40, groups = 8;
  focus::sinkhorn_options options = {};
  double spread = 0.2;  // of the scores
  double tilt = 0;      // added to the scores of group 0
  layout memory = layout::heads_first;
  std::uint64_t seed = 1;
};

std::string describe(const gradient_case& c) {
  std::ostringstream text;
  text << "n " << c.n << ", K " << c.groups << ", temperature " << c.options.temperature
       << ", iterations " << c.options.iterations << ", spread " << c.spread << ", tilt " << c.tilt
       << ", layout " << static_cast<int>(c.memory);
  return text.str();
}

std::vector<gradient_case> gradient_cases() {
  std::vector<gradient_case> all;
  for (const index_t n : {0, 1, 2, 7, 255, 256, 257, 300, 600}) all.push_back({.n = n});
  for (const index_t groups : {1, 2, 3, 4, 5, 9, 16, 17, 63, 64})
    all.push_back({.groups = groups, .memory = layout::padded});
  for (const int iterations : {0, 1, 2, 3, 20})
    for (const double tilt : {0.0, 0.5})
      all.push_back(
          {.options = {.iterations = iterations}, .tilt = tilt, .memory = layout::misaligned});
  for (const float temperature : {0.05f, 1.0f, 30.0f})
    all.push_back({.options = {.temperature = temperature}, .spread = 1});
  return all;
}

template <class T>
guarded_tensor<T, 2> make_scores(const gradient_case& c) {
  guarded_tensor<T, 2> scores({c.n, c.groups}, c.memory);
  generator random(c.seed);
  index_t at = 0;
  scores.fill([&] { return c.spread * random.normal() + (at++ % c.groups == 0 ? c.tilt : 0.0); });
  return scores;
}

template <class T>
guarded_tensor<T, 2> make_dassignment(const gradient_case& c) {
  guarded_tensor<T, 2> dq({c.n, c.groups}, c.memory);
  generator random(c.seed + 100);
  dq.fill([&] { return random.normal(); });
  return dq;
}

std::vector<float> make_potentials(const gradient_case& c) {
  generator random(c.seed + 200);
  std::vector<float> f;
  for (index_t g = 0; g < c.groups; ++g) f.push_back(static_cast<float>(random.normal()));
  return f;
}

focus::matrix_view<const double> view(const gradient_case& c, const values& x) {
  return {x.data(), {c.n, c.groups}};
}
focus::matrix_view<double> view(const gradient_case& c, values& x) {
  return {x.data(), {c.n, c.groups}};
}

/// A forward pass, and what its gradient starts from.
template <class T, class Q>
struct gradient_problem {
  gradient_case spec;
  guarded_tensor<T, 2> scores;
  guarded_tensor<Q, 2> assignment, dassignment;
  std::vector<Q> log_group_scale;

  explicit gradient_problem(const gradient_case& c)
      : spec(c),
        scores(make_scores<T>(c)),
        assignment({c.n, c.groups}, c.memory),
        dassignment(make_dassignment<Q>(c)),
        log_group_scale(static_cast<std::size_t>(c.groups)) {
    focus::sinkhorn(scores.view(), assignment.view(), log_group_scale, c.options);
  }

  template <class DS, class Exec = focus::serial_executor>
  guarded_tensor<DS, 2> backward(Exec&& exec = {}) const {
    guarded_tensor<DS, 2> ds({spec.n, spec.groups}, spec.memory);
    focus::sinkhorn_backward(scores.view(), assignment.view(), log_group_scale, dassignment.view(),
                             ds.view(), spec.options, exec);
    return ds;
  }
};

values true_gradient(const gradient_case& c, const values& scores, const values& dassignment) {
  values ds(scores.size(), not_a_number), q(scores.size());
  const values f(static_cast<std::size_t>(c.groups));
  focus::reference::sinkhorn_backward(view(c, scores), view(c, q), f, view(c, dassignment),
                                      view(c, ds), c.options);
  return ds;
}

/// What anyone would write, with all sums in float.
values naive_gradient(const gradient_case& c, const values& scores, const values& dassignment) {
  using row = std::vector<float>;
  const auto n = static_cast<std::size_t>(c.n), groups = static_cast<std::size_t>(c.groups);
  row l(scores.begin(), scores.end());
  for (float& x : l) x /= static_cast<float>(c.options.temperature);
  std::vector<row> u{row(n)}, f{row(groups)};
  for (int t = 0; t < c.options.iterations; ++t) {
    row next_f(groups), next_u(n);
    for (std::size_t g = 0; g < groups; ++g) {
      float top = -std::numeric_limits<float>::infinity(), sum = 0;
      for (std::size_t i = 0; i < n; ++i) top = (std::max)(top, l[i * groups + g] + u.back()[i]);
      for (std::size_t i = 0; i < n; ++i) sum += std::exp(l[i * groups + g] + u.back()[i] - top);
      next_f[g] = -(top + std::log(sum));
    }
    for (std::size_t i = 0; i < n; ++i) {
      float top = -std::numeric_limits<float>::infinity(), sum = 0;
      for (std::size_t g = 0; g < groups; ++g) top = (std::max)(top, l[i * groups + g] + next_f[g]);
      for (std::size_t g = 0; g < groups; ++g) sum += std::exp(l[i * groups + g] + next_f[g] - top);
      next_u[i] = -(top + std::log(sum));
    }
    u.push_back(next_u), f.push_back(next_f);
  }
  row dl(l.size()), df(groups);
  for (std::size_t i = 0; i < n; ++i) {
    float top = -std::numeric_limits<float>::infinity(), sum = 0, mean = 0;
    row q(groups);
    for (std::size_t g = 0; g < groups; ++g) top = (std::max)(top, l[i * groups + g] + f.back()[g]);
    for (std::size_t g = 0; g < groups; ++g)
      sum += q[g] = std::exp(l[i * groups + g] + f.back()[g] - top);
    for (std::size_t g = 0; g < groups; ++g) {
      q[g] /= sum;
      mean += q[g] * static_cast<float>(dassignment[i * groups + g]);
    }
    for (std::size_t g = 0; g < groups; ++g) {
      dl[i * groups + g] = q[g] * (static_cast<float>(dassignment[i * groups + g]) - mean);
      df[g] += dl[i * groups + g];
    }
  }
  for (std::size_t t = f.size() - 1; t > 0; --t) {
    row du(n), next_df(groups);
    for (std::size_t i = 0; i < n; ++i)
      for (std::size_t g = 0; g < groups; ++g) {
        const float share = std::exp(l[i * groups + g] + u[t - 1][i] + f[t][g]) * df[g];
        dl[i * groups + g] -= share;
        du[i] -= share;
      }
    for (std::size_t i = 0; i < n && t > 1; ++i)
      for (std::size_t g = 0; g < groups; ++g) {
        const float share = std::exp(l[i * groups + g] + u[t - 1][i] + f[t - 1][g]) * du[i];
        dl[i * groups + g] -= share;
        next_df[g] -= share;
      }
    df = next_df;
  }
  for (float& x : dl) x /= static_cast<float>(c.options.temperature);
  return values(dl.begin(), dl.end());
}

double largest_difference(const values& a, const values& b) {
  double largest = a.size() == b.size() ? 0 : infinity;
  for (std::size_t x = 0; x < a.size() && x < b.size(); ++x) {
    const double difference = std::abs(a[x] - b[x]);
    largest = difference <= largest ? largest : difference;  // NaN is kept
  }
  return largest;
}

double dot(const values& a, const values& b) {
  double sum = 0;
  for (std::size_t x = 0; x < a.size(); ++x) sum += a[x] * b[x];
  return sum;
}

/// The derivative of f along `direction` at x, from f at two distances on both sides.
template <class F>
double central_difference(const values& x, const values& direction, double step, F&& f) {
  const auto at = [&](double distance) {
    values moved = x;
    for (std::size_t e = 0; e < x.size(); ++e) moved[e] += distance * direction[e];
    return f(moved);
  };
  return (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step);
}

/// Some elements by themselves, and some directions in which all change.
std::vector<values> directions(std::size_t size, std::uint64_t seed) {
  generator random(seed);
  std::vector<values> all;
  for (int r = 0; r < 6 && size > 0; ++r) {
    values one(size), mixed(size);
    one[static_cast<std::size_t>(random.below(static_cast<index_t>(size)))] = 1;
    for (double& x : mixed) x = random.normal();
    all.push_back(one);
    all.push_back(mixed);
  }
  return all;
}

/// The largest relative error of `gradient` against central differences of f. `slope`: what a
/// gradient that does not cancel amounts to; where it cancels (one token: all of it), it is
/// rounding errors of that.
template <class F>
double gradient_error(const values& x, const values& gradient, double step, double slope, F&& f) {
  double largest = 0;
  for (const values& direction : directions(x.size(), 5)) {
    const double expected = central_difference(x, direction, step, f);
    const double error = std::abs(dot(gradient, direction) - expected);
    const double scale =
        (std::sqrt(dot(gradient, gradient)) + 1e-3 * slope) * std::sqrt(dot(direction, direction));
    const double relative = error / scale;
    largest = relative <= largest ? largest : relative;
  }
  return largest;
}

/// Gradients of type DS against the textbook; what is wrong, or nothing.
template <class DS, class T, class Q>
std::string check_values(const gradient_case& c) {
  const gradient_problem<T, Q> p(c);
  const guarded_tensor<DS, 2> ds = p.template backward<DS>();
  if (!ds.guards_hold()) return "memory outside the extents was written";
  const values scores = p.scores.values(), dq = p.dassignment.values();
  const values expected = true_gradient(c, scores, dq);
  // The assignment is given in the precision of Q.
  using rounding = std::common_type_t<Q, focus::accumulator_t<T>>;
  double tolerance = epsilon<DS>() * largest_magnitude(expected) +
                     4 * epsilon<Q>() / static_cast<double>(c.options.temperature);
  if (std::is_same_v<rounding, float> && !std::is_same_v<DS, double>)
    tolerance += 2 * largest_difference(naive_gradient(c, scores, dq), expected);
  else
    tolerance += 1e-12 * (1 + largest_magnitude(expected));
  const double error = largest_difference(ds.values(), expected);
  if (error <= tolerance) return {};
  return "the gradient differs by " + std::to_string(error / tolerance) + " tolerances";
}

struct small_problem {
  std::vector<float> scores{0, 0, 0, 1}, assignment{0.5f, 0.5f, 0.25f, 0.75f},
      dassignment{1, 2, 3, 4}, potentials{0, 0}, dscores = std::vector<float>(4, 99.0f),
                                                 dpotentials = std::vector<float>(2, 99.0f);
  focus::matrix_view<const float> scores_view{scores.data(), {2, 2}},
      assignment_view{assignment.data(), {2, 2}}, dassignment_view{dassignment.data(), {2, 2}};
  focus::matrix_view<float> dscores_view{dscores.data(), {2, 2}};
  std::span<const float> potentials_view{potentials};
  std::span<float> dpotentials_view{dpotentials};
  focus::sinkhorn_options options;

  small_problem() = default;
  small_problem(const small_problem&) = delete;

  std::string assigning_refusal_of(const std::string& argument) {
    return refusal(argument, [&] {
      focus::assign_groups_backward(scores_view, potentials_view, assignment_view, dassignment_view,
                                    dscores_view, dpotentials_view, options);
    });
  }
  /// Both functions, and their textbook forms, name the argument; what is wrong, or nothing.
  std::string refusal_of(const std::string& argument) {
    for (const std::string& wrong :
         {refusal(argument,
                  [&] {
                    focus::sinkhorn_backward(scores_view, assignment_view, potentials_view,
                                             dassignment_view, dscores_view, options);
                  }),
          refusal(argument,
                  [&] {
                    focus::reference::sinkhorn_backward(scores_view, assignment_view,
                                                        potentials_view, dassignment_view,
                                                        dscores_view, options);
                  }),
          assigning_refusal_of(argument)})
      if (!wrong.empty()) return wrong;
    return {};
  }
  bool untouched() const {
    return scores == std::vector<float>{0, 0, 0, 1} &&
           dassignment == std::vector<float>{1, 2, 3, 4} &&
           dscores == std::vector<float>(4, 99.0f) && dpotentials == std::vector<float>(2, 99.0f);
  }
};

}  // namespace

TEST_CASE("sinkhorn_backward: central differences, the textbook and the kernels in double") {
  for (const index_t n : {1, 7, 300})
    for (const index_t groups : {1, 2, 8, 64})
      for (const float temperature : {0.05f, 0.1f, 1.0f})
        for (const int iterations : {0, 1, 3, 10, 20}) {
          // Long ones at one temperature, with many iterations, or few where there are many groups.
          if (n == 300 && (temperature != 0.1f || iterations != (groups == 64 ? 3 : 20))) continue;
          const gradient_case c{.n = n,
                                .groups = groups,
                                .options = {.temperature = temperature, .iterations = iterations}};
          INFO(describe(c));
          const gradient_problem<double, double> p(c);
          const values scores = p.scores.values(), dq = p.dassignment.values();
          const auto loss = [&](const values& x) {
            values q(x.size()), f(static_cast<std::size_t>(groups));
            focus::sinkhorn(view(c, x), view(c, q), f, c.options);
            return dot(q, dq);
          };
          const double tau = static_cast<double>(temperature), step = 2e-3 * tau;
          CHECK(gradient_error(scores, p.backward<double>().values(), step, 1 / tau, loss) < 1e-7);
          CHECK(gradient_error(scores, true_gradient(c, scores, dq), step, 1 / tau, loss) < 1e-7);
        }
}

TEST_CASE("assign_groups_backward: central differences, the textbook and the kernels in double") {
  for (const index_t n : {1, 7, 300})
    for (const index_t groups : {1, 2, 8, 64})
      for (const float temperature : {0.05f, 0.1f, 1.0f}) {
        if (n == 300 && temperature != 0.1f) continue;
        const gradient_case c{.n = n, .groups = groups, .options = {.temperature = temperature}};
        INFO(describe(c));
        const values scores = make_scores<double>(c).values(),
                     dq = make_dassignment<double>(c).values();
        const std::vector<float> potentials = make_potentials(c);
        const values f(potentials.begin(), potentials.end());
        const auto assign = [&](const values& x, const values& log_group_scale) {
          values q(x.size());
          focus::assign_groups(view(c, x), log_group_scale, view(c, q), c.options);
          return q;
        };
        const values q = assign(scores, f);
        const auto check = [&](const values& ds, const values& df) {
          const auto by_scores = [&](const values& x) {
            return dot(assign(x, f), dq);
          };
          const auto by_potentials = [&](const values& x) {
            return dot(assign(scores, x), dq);
          };
          const double tau = static_cast<double>(temperature);
          CHECK(gradient_error(scores, ds, 2e-3 * tau, 1 / tau, by_scores) < 1e-7);
          CHECK(gradient_error(f, df, 2e-3, 1, by_potentials) < 1e-7);
        };
        values ds(scores.size()), df(f.size());
        focus::assign_groups_backward(view(c, scores), f, view(c, q), view(c, dq), view(c, ds), df,
                                      c.options);
        check(ds, df);
        values alone(scores.size());
        focus::assign_groups_backward(view(c, scores), f, view(c, q), view(c, dq), view(c, alone),
                                      {}, c.options);
        CHECK(alone == ds);
        focus::reference::assign_groups_backward(view(c, scores), f, view(c, q), view(c, dq),
                                                 view(c, ds), df, c.options);
        check(ds, df);
        focus::reference::assign_groups_backward(view(c, scores), f, view(c, q), view(c, dq),
                                                 view(c, alone), {}, c.options);
        CHECK(alone == ds);
      }
}

TEST_CASE("sinkhorn_backward: the textbook's values, as close as the naive form in float") {
  for (const gradient_case& c : gradient_cases()) {
    INFO(describe(c));
    CHECK(check_values<float, float, float>(c) == "");
    CHECK(check_values<double, double, double>(c) == "");
    CHECK(check_values<double, float, double>(c) == "");
    CHECK(check_values<float, double, double>(c) == "");
    CHECK(check_values<double, float, float>(c) == "");
    CHECK(check_values<float, focus::bfloat16, float>(c) == "");
    CHECK(check_values<focus::bfloat16, focus::bfloat16, float>(c) == "");
    CHECK(check_values<focus::float16, double, double>(c) == "");
    CHECK(check_values<engine_float, engine_float, float>(c) == "");
  }
}

TEST_CASE("assign_groups_backward: the textbook's values") {
  for (const gradient_case& c : gradient_cases()) {
    INFO(describe(c));
    const guarded_tensor<float, 2> scores = make_scores<float>(c), dq = make_dassignment<float>(c);
    guarded_tensor<float, 2> q({c.n, c.groups}, c.memory), ds({c.n, c.groups}, c.memory);
    const std::vector<float> f = make_potentials(c);
    std::vector<float> df(f.size(), 99.0f);
    focus::assign_groups(scores.view(), f, q.view(), c.options);
    focus::assign_groups_backward(scores.view(), f, q.view(), dq.view(), ds.view(), df, c.options);
    CHECK(ds.guards_hold());
    const values wide_scores = scores.values(), wide_dq = dq.values(), wide_q = q.values();
    values expected(wide_scores.size()), expected_df(f.size());
    focus::reference::assign_groups_backward(view(c, wide_scores), f, view(c, wide_q),
                                             view(c, wide_dq), view(c, expected), expected_df,
                                             c.options);
    // The assignment has the rounding errors of logits as large as these.
    const double tau = static_cast<double>(c.options.temperature);
    const double relative = 8 * epsilon<float>() * (4 + largest_magnitude(wide_scores) / tau);
    CHECK(largest_difference(ds.values(), expected) <= relative * largest_magnitude(wide_dq) / tau);
    CHECK(largest_difference(values(df.begin(), df.end()), expected_df) <=
          relative * largest_magnitude(wide_dq) * static_cast<double>(c.n));
  }
}

TEST_CASE("sinkhorn_backward: by hand") {
  // exp(S / tau) = [1 1; 1 3], columns divided by 2 and 4: q_00 = (1/2) / (1/2 + 1/4) = 2/3. Its
  // logit log(c_00 / c_01) moves q_00 by 2/9; c_00 has the slopes 1/2 and -1/2 in its column, c_01
  // 3/4 and -3/4.
  const double tau = 0.1;
  const values scores{0, 0, 0, tau * std::log(3.0)}, dq{1, 0, 0, 0};
  const gradient_case c{.n = 2, .groups = 2, .options = {.iterations = 1}};
  values q(4), f(2), ds(4);
  focus::sinkhorn(view(c, scores), view(c, q), f, c.options);
  focus::sinkhorn_backward(view(c, scores), view(c, q), f, view(c, dq), view(c, ds), c.options);
  const values expected{1.0 / 9 / tau, -1.0 / 6 / tau, -1.0 / 9 / tau, 1.0 / 6 / tau};
  CHECK(largest_difference(ds, expected) < 1e-13);
  CHECK(largest_difference(true_gradient(c, scores, dq), expected) < 1e-13);
}

TEST_CASE("sinkhorn_backward: what changes nothing has no gradient") {
  for (const int iterations : {1, 2, 10}) {
    const gradient_case c{.n = 300, .options = {.iterations = iterations}};
    const values ds = gradient_problem<double, double>(c).backward<double>().values();
    // A constant added to a group's scores is taken up by its potential.
    for (index_t g = 0; g < c.groups; ++g) {
      double sum = 0;
      for (index_t i = 0; i < c.n; ++i) sum += ds[static_cast<std::size_t>(i * c.groups + g)];
      CHECK(std::abs(sum) < 1e-12 * largest_magnitude(ds) * static_cast<double>(c.n));
    }
    // One group takes everything, whatever its scores are.
    const gradient_case one{.n = 300, .groups = 1, .options = {.iterations = iterations}};
    CHECK(gradient_problem<float, float>(one).backward<float>().values() == values(300, 0.0));
  }
}

TEST_CASE("sinkhorn_backward: no iterations are the softmax, token by token") {
  const gradient_case c{.n = 300, .options = {.iterations = 0}};
  const gradient_problem<float, float> p(c);
  guarded_tensor<float, 2> assigned({c.n, c.groups}, c.memory);
  focus::assign_groups_backward(p.scores.view(), std::vector<float>(8), p.assignment.view(),
                                p.dassignment.view(), assigned.view(), {}, c.options);
  CHECK(p.backward<float>().same_bits(assigned));
}

TEST_CASE("sinkhorn_backward: saturated assignments have finite gradients") {
  for (const float temperature : {0.05f, 1e-3f})
    for (const double spread : {10.0, 1000.0})
      for (const int iterations : {0, 1, 10}) {
        const gradient_case c{.n = 300,
                              .options = {.temperature = temperature, .iterations = iterations},
                              .spread = spread,
                              .tilt = 10 * spread};
        INFO(describe(c));
        for (const double x : gradient_problem<float, float>(c).backward<float>().values())
          REQUIRE(std::isfinite(x));
        const gradient_problem<double, double> p(c);
        const values expected = true_gradient(c, p.scores.values(), p.dassignment.values());
        CHECK(largest_difference(p.backward<double>().values(), expected) <=
              1e-7 * (1 + largest_magnitude(expected)));
      }
}

TEST_CASE(
    "sinkhorn_backward: scores of -inf have gradients of 0, a group that is all of them too") {
  for (const int iterations : {0, 1, 2, 10}) {
    const gradient_case c{.n = 300, .groups = 4, .options = {.iterations = iterations}};
    gradient_problem<float, float> p(c);
    for (index_t i = 0; i < c.n; ++i) p.scores.view()(i, 2) = static_cast<float>(-infinity);
    p.scores.view()(7, 1) = static_cast<float>(-infinity);
    focus::sinkhorn(p.scores.view(), p.assignment.view(), p.log_group_scale, c.options);
    const values ds = p.backward<float>().values();
    for (std::size_t i = 0; i < 300; ++i) CHECK(ds[i * 4 + 2] == 0);
    CHECK(ds[7 * 4 + 1] == 0);
    const values expected = true_gradient(c, p.scores.values(), p.dassignment.values());
    CHECK(largest_difference(ds, expected) <= 1e-5 * largest_magnitude(expected));
  }
}

TEST_CASE("sinkhorn_backward and assign_groups_backward: how far NaN and infinity reach") {
  for (const double bad : {not_a_number, infinity})
    for (const int iterations : {0, 1, 3}) {
      const gradient_case c{.n = 300, .options = {.iterations = iterations}};
      gradient_problem<float, float> p(c);
      const guarded_tensor<float, 2> clean = p.backward<float>();
      p.dassignment.view()(4, 7) = static_cast<float>(bad);
      const guarded_tensor<float, 2> ds = p.backward<float>();
      // Through the potentials one token moves all, through its own softmax only itself.
      for (index_t i = 0; i < c.n; ++i)
        for (index_t g = 0; g < c.groups; ++g)
          CHECK(std::isfinite(ds.view()(i, g)) == (iterations == 0 && i != 4));
      guarded_tensor<float, 2> assigned({c.n, c.groups}, c.memory);
      std::vector<float> df(8);
      focus::assign_groups_backward(p.scores.view(), std::vector<float>(8), p.assignment.view(),
                                    p.dassignment.view(), assigned.view(), df, c.options);
      for (index_t i = 0; i < c.n; ++i)
        for (index_t g = 0; g < c.groups; ++g) {
          CHECK(std::isfinite(assigned.view()(i, g)) == (i != 4));
          if (iterations == 0 && i != 4) CHECK(assigned.view()(i, g) == clean.view()(i, g));
        }
      for (const float x : df) CHECK(!std::isfinite(x));
    }
}

TEST_CASE("sinkhorn_backward and assign_groups_backward: the same bits for any number of threads") {
  for (const gradient_case& c : gradient_cases()) {
    INFO(describe(c));
    const gradient_problem<float, float> p(c);
    const guarded_tensor<float, 2> one = p.backward<float>();
    const auto assign = [&](int threads) {
      guarded_tensor<float, 2> all({c.n + 1, c.groups}, c.memory);
      const focus::matrix_view<float> rows = all.view();
      std::vector<float> df(static_cast<std::size_t>(c.groups));
      focus::assign_groups_backward(
          p.scores.view(), p.log_group_scale, p.assignment.view(), p.dassignment.view(),
          focus::matrix_view<float>(rows.data(), {c.n, c.groups}, rows.strides()), df, c.options,
          thread_executor(threads));
      std::copy(df.begin(), df.end(), rows.row(c.n));
      return all;
    };
    const guarded_tensor<float, 2> assigned = assign(1);
    for (const int threads : {1, 2, 3}) {
      CHECK(p.backward<float>(thread_executor(threads)).same_bits(one));
      CHECK(assign(threads).same_bits(assigned));
    }
  }
}

TEST_CASE("sinkhorn_backward: allocates nothing when lent a workspace that has served before") {
  const gradient_case c{.n = 1000};
  const gradient_problem<float, float> p(c);
  guarded_tensor<float, 2> ds({c.n, c.groups}, c.memory);
  guarded_tensor<double, 2> wide_ds({c.n, c.groups}, c.memory);
  guarded_tensor<focus::bfloat16, 2> narrow_ds({c.n, c.groups}, c.memory);
  std::vector<float> df(8);
  focus::workspace ws;
  const auto exec = focus::with_workspace(focus::serial_executor{}, ws);
  const auto run = [&](auto&& to) {
    return allocations_of([&] {
      focus::sinkhorn_backward(p.scores.view(), p.assignment.view(), p.log_group_scale,
                               p.dassignment.view(), to.view(), c.options, exec);
    });
  };
  const auto assign = [&] {
    return allocations_of([&] {
      focus::assign_groups_backward(p.scores.view(), p.log_group_scale, p.assignment.view(),
                                    p.dassignment.view(), ds.view(), df, c.options, exec);
    });
  };
  CHECK(run(ds) == 1);
  CHECK(run(ds) == 0);
  CHECK(assign() == 0);
  CHECK(run(wide_ds) == 1);
  CHECK(run(wide_ds) == 0);
  CHECK(run(narrow_ds) == 1);
  CHECK(run(narrow_ds) == 0);
  ws.release();
  CHECK(assign() == 1);
  CHECK(assign() == 0);
}

TEST_CASE("sinkhorn_backward and assign_groups_backward: no tokens, with null pointers") {
  const focus::matrix_view<float> none(nullptr, {0, 2});
  const std::vector<float> f(2);
  std::vector<float> df(2, 99.0f);
  CHECK_NOTHROW(focus::sinkhorn_backward(none, none, f, none, none));
  CHECK_NOTHROW(focus::reference::sinkhorn_backward(none, none, f, none, none));
  focus::assign_groups_backward(none, f, none, none, none, df);
  CHECK(df == std::vector<float>{0, 0});
  df = {99, 99};
  focus::reference::assign_groups_backward(none, f, none, none, none, df);
  CHECK(df == std::vector<float>{0, 0});
}

TEST_CASE("sinkhorn_backward and assign_groups_backward: bad arguments are refused") {
  small_problem p;
  std::vector<float> many(65 * 2);
  SECTION("scores") {
    p.scores_view = {nullptr, {2, 2}};
    CHECK(p.refusal_of("scores") == "");
    p.scores_view = {p.scores.data(), {2, 0}};
    CHECK(p.refusal_of("scores") == "");
    p.scores_view = {many.data(), {2, 65}};
    CHECK(p.refusal_of("scores") == "");
  }
  SECTION("assignment") {
    p.assignment_view = {p.assignment.data(), {1, 2}};
    CHECK(p.refusal_of("assignment") == "");
    p.assignment_view = {nullptr, {2, 2}};
    CHECK(p.refusal_of("assignment") == "");
  }
  SECTION("dassignment") {
    p.dassignment_view = {p.dassignment.data(), {2, 1}};
    CHECK(p.refusal_of("dassignment") == "");
    p.dassignment_view = {nullptr, {2, 2}};
    CHECK(p.refusal_of("dassignment") == "");
  }
  SECTION("dscores") {
    p.dscores_view = {p.dscores.data(), {1, 2}};
    CHECK(p.refusal_of("dscores") == "");
    p.dscores_view = {nullptr, {2, 2}};
    CHECK(p.refusal_of("dscores") == "");
    p.dscores_view = {p.dscores.data(), {2, 2}, {0, 1}};
    CHECK(p.refusal_of("dscores") == "");
    for (std::vector<float>* input : {&p.scores, &p.assignment, &p.dassignment}) {
      p.dscores_view = {input->data(), {2, 2}};
      CHECK(p.refusal_of("dscores") == "");
    }
    p.dscores_view = {p.dscores.data(), {2, 2}};
    p.potentials_view = std::span(p.dscores).last(2);
    CHECK(p.refusal_of("dscores") == "");
  }
  SECTION("log_group_scale") {
    p.potentials_view = std::span(p.potentials).first(1);
    CHECK(p.refusal_of("log_group_scale") == "");
    p.potentials_view = {};
    CHECK(p.refusal_of("log_group_scale") == "");
  }
  SECTION("dlog_group_scale") {
    p.dpotentials_view = std::span(p.dpotentials).first(1);
    CHECK(p.assigning_refusal_of("dlog_group_scale") == "");
    for (std::vector<float>* other :
         {&p.scores, &p.assignment, &p.dassignment, &p.potentials, &p.dscores}) {
      p.dpotentials_view = std::span(*other).first(2);
      CHECK(p.assigning_refusal_of("dlog_group_scale") == "");
    }
  }
  SECTION("options") {
    for (const float temperature :
         {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN(), static_cast<float>(-infinity)}) {
      p.options = {.temperature = temperature};
      CHECK(p.refusal_of("temperature") == "");
    }
    p.options = {.iterations = -1};
    CHECK(p.refusal_of("iterations") == "");
  }
  CHECK(p.untouched());
}

TEST_CASE("sinkhorn_backward: an exception of the executor's reaches the caller") {
  const gradient_problem<float, float> p({.n = 10});
  CHECK_THROWS_AS(p.backward<float>(throwing_executor{}), throwing_executor::error);
}

}  // namespace test_sinkhorn_backward
