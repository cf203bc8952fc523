// The loss of a router: against two logsumexps of the textbook, its gradient against central
// differences and against the textbook gradient of the gated logsumexp.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "attention_checks.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/reference.hpp"
#include "focus/retained_mass.hpp"
#include "gradient_checks.hpp"
#include "oracle.hpp"

namespace test_retained_mass {
namespace {

using namespace oracle;

/// A case under the weight gate.
attention_case weighted(attention_case c) {
  c.gate.kind = focus::gate_kind::weight;
  c.d_v = 1;
  return c;
}

std::vector<index_t> every_third(index_t n) {
  std::vector<index_t> rows;
  for (index_t i = 1; i < n; i += 3) rows.push_back(i);
  return rows;
}

/// From the textbook's logsumexps.
double expected_loss(const dense_problem& p, std::span<const index_t> rows) {
  dense_problem full = p;
  full.spec.pattern.window = focus::unlimited_window;
  const attention_state all = truth(full, operation::attention),
                        gated = truth(p, operation::soft_gate);
  const index_t n = p.spec.n_q, heads = p.spec.heads;
  double sum = 0;
  const auto count = rows.empty() ? n : static_cast<index_t>(rows.size());
  for (index_t h = 0; h < heads; ++h)
    for (index_t r = 0; r < count; ++r) {
      const auto at =
          static_cast<std::size_t>(h * n + (rows.empty() ? r : rows[static_cast<std::size_t>(r)]));
      if (all.lse[at] != -infinity) sum += all.lse[at] - gated.lse[at];
    }
  return count * heads == 0 ? 0.0 : sum / static_cast<double>(count * heads);
}

template <class T>
double loss_of(const problem<T>& p, gradients<T>& g, std::span<const index_t> rows,
               int threads = 1) {
  const call_inputs<T> in = p.inputs();
  return focus::retained_mass_loss(in.q, in.k, in.query_assignment, in.key_assignment,
                                   g.dquery.view(), g.dkey.view(), rows, in.pattern, in.score,
                                   thread_executor(threads));
}

/// Loss and gradients are right. The gradient is that of soft_gate_attention with dlse = -1 / (rows
/// x heads) in the rows that count.
template <class T>
std::string check_loss(const attention_case& c, std::span<const index_t> rows) {
  using real = focus::accumulator_t<T>;
  const problem<T> p(c);
  gradients<T> g(c);
  const double loss = loss_of(p, g, rows);
  if (!g.guards_hold() || !g.dq.untouched()) return "memory outside the extents was written";
  const dense_problem dense = p.dense();
  const double expected = expected_loss(dense, rows);
  const double of_scores =
      epsilon<real>() * (8 + 4 * naive_form<real>(dense, operation::soft_gate).largest_score);
  if (!(std::abs(loss - expected) <= of_scores * (1 + std::abs(expected))) &&
      !(std::isinf(loss) && std::isinf(expected)))
    return "loss: expected " + std::to_string(expected) + ", got " + std::to_string(loss);

  const auto count = rows.empty() ? c.n_q : static_cast<index_t>(rows.size());
  std::vector<double> dout(static_cast<std::size_t>(c.heads * c.n_q * c.d_v)),
      dlse(static_cast<std::size_t>(c.heads * c.n_q));
  for (index_t h = 0; h < c.heads; ++h)
    for (index_t r = 0; r < count; ++r)
      dlse[static_cast<std::size_t>(h * c.n_q +
                                    (rows.empty() ? r : rows[static_cast<std::size_t>(r)]))] =
          -1.0 / static_cast<double>(count * c.heads);
  const auto truth_of = textbook_gradients<double>(dense, operation::soft_gate, dout, dlse);
  const auto naive = textbook_gradients<real>(dense, operation::soft_gate, dout, dlse);
  const auto got = g.values();
  for (std::size_t x : {std::size_t{3}, std::size_t{4}}) {
    const double tolerance =
        2 * largest_error(naive[x], truth_of[x]) + of_scores * largest_magnitude(truth_of[x]);
    const std::string wrong = compare_values(gradient_names[x], got[x], truth_of[x], tolerance);
    if (!wrong.empty()) return wrong;
  }
  return {};
}

void check(const attention_case& c, std::span<const index_t> rows = {}) {
  INFO(describe(c));
  CHECK(check_loss<float>(weighted(c), rows) == "");
  CHECK(check_loss<double>(weighted(c), rows) == "");
}

}  // namespace

TEST_CASE("retained_mass_loss: two logsumexps and their gradient") {
  for (const index_t n : {1, 2, 6, 7, 17, 96, 97, 129, 300}) {
    check({.heads = 4, .kv_heads = 2, .n_q = n, .n_k = n});
    const std::vector<index_t> rows = every_third(n);
    if (!rows.empty()) check({.heads = 4, .kv_heads = 2, .n_q = n, .n_k = n}, rows);
  }
  for (const int groups : {1, 2, 16, 64})
    for (const index_t window : {index_t{0}, index_t{3}, focus::unlimited_window})
      for (const bool causal : {true, false})
        check({.n_q = 50,
               .n_k = 70,
               .pattern = {.causal = causal, .window = window, .sink_tokens = 1},
               .score = {.softcap = 4.0f},
               .group_count = groups,
               .separate_masks = true});
}

TEST_CASE("retained_mass_loss: the reference form says the same") {
  const attention_case c = weighted({.heads = 4, .kv_heads = 2, .n_q = 40, .n_k = 50});
  const problem<double> p(c);
  const std::vector<index_t> rows = every_third(40);
  gradients<double> got(c), expected(c);
  const double loss = loss_of(p, got, rows);
  const call_inputs<double> in = p.inputs();
  CHECK(std::abs(focus::reference::retained_mass_loss(in.q, in.k, in.query_assignment,
                                                      in.key_assignment, expected.dquery.view(),
                                                      expected.dkey.view(), rows, in.pattern) -
                 loss) < 1e-13);
  for (std::size_t x : {std::size_t{3}, std::size_t{4}})
    CHECK(compare_values(gradient_names[x], got.values()[x], expected.values()[x], 1e-14) == "");
}

TEST_CASE("retained_mass_loss: a small loss among large scores keeps its accuracy") {
  // Assignments whose products are just below 1 keep nearly all.
  attention_case c = weighted({.n_q = 60, .n_k = 60, .group_count = 1, .query_magnitude = 30});
  problem<float> p(c);
  problem<double> same(c);
  p.query_assignment.fill([] { return 1.0; });
  p.key_assignment.fill([] { return 0.99; });
  same.query_assignment.fill([] { return 1.0; });
  same.key_assignment.fill([] { return static_cast<double>(0.99f); });
  gradients<float> g(c);
  gradients<double> exact(c);
  // The same numbers in double.
  const auto copy = [](const auto& from, const auto& to) {
    for (index_t h = 0; h < from.extent(0); ++h)
      for (index_t t = 0; t < from.extent(1); ++t)
        for (index_t x = 0; x < from.extent(2); ++x)
          to(h, t, x) = static_cast<double>(from(h, t, x));
  };
  copy(p.q.view(), same.q.view());
  copy(p.k.view(), same.k.view());
  const double loss = loss_of(p, g, {}), expected = loss_of(same, exact, {});
  // -log(m) near m = 1: an error of a few epsilon in each sum, whatever the scores are.
  CHECK(std::abs(loss - expected) < 8 * epsilon<float>());
}

TEST_CASE("retained_mass_loss: with one-hot assignments it is the mass of the hard pattern") {
  const attention_case c = weighted({.one_hot_assignment = true});
  const problem<double> p(c);
  gradients<double> g(c);
  const double loss = loss_of(p, g, {});
  dense_problem full = p.dense();
  const attention_state hard = truth(full, operation::sparse);
  full.spec.pattern.window = focus::unlimited_window;
  const attention_state all = truth(full, operation::attention);
  double sum = 0;
  for (std::size_t x = 0; x < all.lse.size(); ++x) sum += all.lse[x] - hard.lse[x];
  CHECK(std::abs(loss - sum / static_cast<double>(all.lse.size())) < 1e-12);
  // Everything is kept where everything is local.
  attention_case local = c;
  local.pattern.window = focus::unlimited_window;
  const problem<double> all_local(local);
  gradients<double> none(local);
  CHECK(std::abs(loss_of(all_local, none, {})) < 1e-13);
  CHECK(largest_magnitude(none.dquery.values()) == 0);
}

TEST_CASE("retained_mass_loss: the gradient agrees with central differences") {
  const attention_case c = weighted({.heads = 2, .n_q = 20, .n_k = 20, .d = 5});
  problem<double> p(c);
  gradients<double> g(c), unused(c);
  const std::vector<index_t> rows = every_third(20);
  loss_of(p, g, rows);
  generator random(4);
  for (int sample = 0; sample < 60; ++sample) {
    const bool of_query = sample % 2 == 0;
    const index_t t = random.below(20), x = random.below(c.group_count);
    double& value = of_query ? p.query_assignment.view()(t, x) : p.key_assignment.view()(t, x);
    const double before = value, step = 1e-5;
    value = before + step;
    const double above = loss_of(p, unused, rows);
    value = before + 2 * step;
    const double further = loss_of(p, unused, rows);
    value = before;
    const double here = loss_of(p, unused, rows);
    const double slope = (-3 * here + 4 * above - further) / (2 * step);
    const double expected = of_query ? g.dquery.view()(t, x) : g.dkey.view()(t, x);
    INFO(sample);
    CHECK(std::abs(slope - expected) < 1e-8);
  }
}

TEST_CASE("retained_mass_loss: rows that see nothing or keep nothing, and no rows at all") {
  // Queries before the first key see nothing.
  check({.n_q = 30, .n_k = 10, .pattern = {.window = 3}});
  // Without a window, one-hot rows alone in their group keep nothing: an infinite loss.
  const attention_case c = weighted({.n_q = 8,
                                     .n_k = 8,
                                     .pattern = {.window = focus::no_window},
                                     .groups = grouping::zero,
                                     .one_hot_assignment = true});
  const problem<float> p(c);
  gradients<float> g(c);
  CHECK(loss_of(p, g, {}) == infinity);
  CHECK(largest_magnitude(g.dquery.values()) == 0);
  // NaN is not hidden behind it, wherever it stands.
  for (const index_t row : {0, 3, 7}) {
    problem<float> poisoned(c);
    poisoned.q.view()(0, row, 0) = static_cast<float>(not_a_number);
    CHECK(std::isnan(loss_of(poisoned, g, {})));
  }
  for (const auto& [n_q, n_k] : std::vector<std::array<index_t, 2>>{{0, 5}, {5, 0}, {0, 0}})
    check({.n_q = n_q, .n_k = n_k});
}

TEST_CASE(
    "retained_mass_loss: the same bits for any threads, allocations, and gradients left out") {
  const attention_case c = weighted({.heads = 6, .kv_heads = 3, .n_q = 300, .n_k = 300});
  const problem<float> p(c);
  const std::vector<index_t> rows = every_third(300);
  gradients<float> one(c);
  const double loss = loss_of(p, one, rows);
  for (const int threads : {2, 3}) {
    gradients<float> more(c);
    CHECK(loss_of(p, more, rows, threads) == loss);
    CHECK(more.same_bits(one));
  }
  const call_inputs<float> in = p.inputs();
  CHECK(focus::retained_mass_loss(in.q, in.k, in.query_assignment, in.key_assignment, {}, {}, rows,
                                  in.pattern, in.score) == loss);
  focus::workspace scratch;
  gradients<float> g(c);
  const auto run = [&] {
    focus::retained_mass_loss(in.q, in.k, in.query_assignment, in.key_assignment, g.dquery.view(),
                              {}, rows, in.pattern, in.score,
                              focus::with_workspace(focus::serial_executor{}, scratch));
  };
  run();
  CHECK(allocations_of(run) == 0);
  CHECK(g.dquery.same_bits(one.dquery));
}

TEST_CASE("retained_mass_loss: bad arguments are refused by name, with nothing written") {
  const attention_case c = weighted({.n_q = 6, .n_k = 6});
  const problem<float> p(c);
  gradients<float> g(c);
  const call_inputs<float> in = p.inputs();
  const auto refuse = [&](const char* name, std::vector<index_t> rows,
                          focus::pattern_options pattern, auto dquery) {
    CHECK(refusal(name, [&] {
            focus::retained_mass_loss(in.q, in.k, in.query_assignment, in.key_assignment, dquery,
                                      g.dkey.view(), rows, pattern);
          }) == "");
    CHECK(g.untouched());
  };
  refuse("rows", {0, 6}, {}, g.dquery.view());
  refuse("rows", {-1}, {}, g.dquery.view());
  refuse("rows", {2, 2}, {}, g.dquery.view());
  refuse("rows", {3, 1}, {}, g.dquery.view());
  refuse("window", {}, {.window = -2}, g.dquery.view());
  refuse("dkey_assignment", {}, {}, g.dkey.view());
}

}  // namespace test_retained_mass
