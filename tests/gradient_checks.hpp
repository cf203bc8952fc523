// What the tests of the backward passes share: gradients of one attention_case, their truth in
// double, the naive form that gives the tolerance, and central differences.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "attention_checks.hpp"
#include "executors.hpp"
#include "focus/attention.hpp"
#include "focus/attention_backward.hpp"
#include "focus/config.hpp"
#include "focus/reference.hpp"
#include "focus/routing_plan.hpp"
#include "focus/scalar.hpp"
#include "focus/soft_gate.hpp"
#include "focus/soft_gate_backward.hpp"
#include "focus/sparse_attention.hpp"
#include "focus/sparse_attention_backward.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"

namespace oracle {

/// The names of the gradients, in the order in which they are kept.
inline constexpr std::array gradient_names{"dq", "dk", "dv", "dquery_assignment",
                                           "dkey_assignment"};

/// What a backward pass writes. Those of the assignments are for operation::soft_gate.
template <class T>
struct gradients {
  using real = focus::accumulator_t<T>;
  guarded_tensor<T, 3> dq, dk, dv;
  guarded_tensor<real, 2> dquery, dkey;

  FOCUS_NOINLINE explicit gradients(const attention_case& c)
      : dq({c.heads, c.n_q, c.d}, c.memory),
        dk({c.kv_heads, c.n_k, c.d}, c.memory),
        dv({c.kv_heads, c.n_k, c.d_v}, c.memory),
        dquery({c.n_q, c.group_count}, c.memory),
        dkey({c.n_k, c.group_count}, c.memory) {}

  FOCUS_NOINLINE std::array<std::vector<double>, 5> values() const {
    return {dq.values(), dk.values(), dv.values(), dquery.values(), dkey.values()};
  }
  bool guards_hold() const {
    return dq.guards_hold() && dk.guards_hold() && dv.guards_hold() && dquery.guards_hold() &&
           dkey.guards_hold();
  }
  bool untouched() const {
    return dq.untouched() && dk.untouched() && dv.untouched() && dquery.untouched() &&
           dkey.untouched();
  }
  bool same_bits(const gradients& other) const {
    return dq.same_bits(other.dq) && dk.same_bits(other.dk) && dv.same_bits(other.dv) &&
           dquery.same_bits(other.dquery) && dkey.same_bits(other.dkey);
  }
};

/// A problem with what a loss hands back. The forward pass's out is kept in the type of the sums,
/// so that the gradients' errors are their own.
template <class T>
struct gradient_problem : problem<T> {
  using real = focus::accumulator_t<T>;
  guarded_tensor<T, 3> dout;
  guarded_tensor<real, 2> dlse;
  guarded_tensor<real, 3> out;
  guarded_tensor<real, 2> lse;
  focus::routing_plan plan;

  FOCUS_NOINLINE explicit gradient_problem(const attention_case& c)
      : problem<T>(c),
        dout({c.heads, c.n_q, c.d_v}, c.memory),
        dlse({c.heads, c.n_q}, c.memory),
        out({c.heads, c.n_q, c.d_v}, c.memory),
        lse({c.heads, c.n_q}, c.memory) {
    generator random(c.seed + 77);
    dout.fill([&] { return random.normal(); });
    dlse.fill([&] { return random.normal(); });
    plan.rebuild(std::span<const group_mask>(this->query_masks), this->key_masks, c.pattern);
  }

  FOCUS_NOINLINE void attend(operation op) {
    const call_inputs<T> in = this->inputs();
    if (op == operation::attention)
      focus::attention(in.q, in.k, in.v, out.view(), in.pattern, in.score, lse.view());
    else if (op == operation::sparse)
      focus::sparse_attention(in.q, in.k, in.v, plan, out.view(), in.score, lse.view());
    else
      focus::soft_gate_attention(in.q, in.k, in.v, in.query_assignment, in.key_assignment, in.gate,
                                 out.view(), in.pattern, in.score, lse.view());
  }
};

/// The library's gradients.
template <operation Op, class T>
FOCUS_NOINLINE gradients<T> differentiate(const gradient_problem<T>& p, int threads = 1) {
  gradients<T> g(p.spec);
  const call_inputs<T> in = p.inputs();
  thread_executor exec(threads);
  const auto dlse = p.dlse.view();
  using upstream = focus::tensor_view<const T, 3>;
  using output = focus::tensor_view<const focus::accumulator_t<T>, 3>;
  const upstream dout = p.spec.dout ? p.dout.view() : upstream{};
  const output out = p.spec.dout ? p.out.view() : output{};
  if constexpr (Op == operation::attention) {
    if (p.spec.dlse)
      focus::attention_backward(in.q, in.k, in.v, out, p.lse.view(), dout, dlse, g.dq.view(),
                                g.dk.view(), g.dv.view(), in.pattern, in.score, exec);
    else
      focus::attention_backward(in.q, in.k, in.v, out, p.lse.view(), dout, g.dq.view(), g.dk.view(),
                                g.dv.view(), in.pattern, in.score, exec);
  } else if constexpr (Op == operation::sparse) {
    if (p.spec.dlse)
      focus::sparse_attention_backward(in.q, in.k, in.v, p.plan, out, p.lse.view(), dout, dlse,
                                       g.dq.view(), g.dk.view(), g.dv.view(), in.score, exec);
    else
      focus::sparse_attention_backward(in.q, in.k, in.v, p.plan, out, p.lse.view(), dout,
                                       g.dq.view(), g.dk.view(), g.dv.view(), in.score, exec);
  } else {
    focus::soft_gate_attention_backward(in.q, in.k, in.v, in.query_assignment, in.key_assignment,
                                        in.gate, out, p.lse.view(), dout, dlse, g.dq.view(),
                                        g.dk.view(), g.dv.view(), g.dquery.view(), g.dkey.view(),
                                        in.pattern, in.score, exec);
  }
  return g;
}

/// The truth with Real = double; with float, what anyone would write in it, and with weights in
/// bfloat16 what the instruction set's products are good for. Zeros for the assignments of other
/// operations.
template <class Real, class Weight = Real>
std::array<std::vector<double>, 5> textbook_gradients(const dense_problem& p, operation op,
                                                      const std::vector<double>& dout,
                                                      const std::vector<double>& dlse) {
  const attention_case& c = p.spec;
  std::array<std::vector<Real>, 9> inputs;
  const std::array<const std::vector<double>*, 7> from{
      &p.q, &p.k, &p.v, &p.query_assignment, &p.key_assignment, &dout, &dlse};
  for (std::size_t x = 0; x < from.size(); ++x) inputs[x].assign(from[x]->begin(), from[x]->end());
  std::array<std::vector<Real>, 5> sums;
  for (std::size_t x = 0; x < sums.size(); ++x) sums[x].resize(from[x]->size());

  focus::detail::backward_arguments<Real, Real, Real, Real, Real, Real, Real, Real, Real, Real> a;
  const auto tensor = [](auto& data, index_t heads, index_t n, index_t width) {
    return focus::tensor_view<Real, 3>(data.data(), {heads, n, width});
  };
  a.q = tensor(inputs[0], c.heads, c.n_q, c.d);
  a.k = tensor(inputs[1], c.kv_heads, c.n_k, c.d);
  a.v = tensor(inputs[2], c.kv_heads, c.n_k, c.d_v);
  if (c.dout) a.dout = tensor(inputs[5], c.heads, c.n_q, c.d_v);
  if (c.has_dlse(op)) a.dlse = {inputs[6].data(), {c.heads, c.n_q}};
  a.dq = tensor(sums[0], c.heads, c.n_q, c.d);
  a.dk = tensor(sums[1], c.kv_heads, c.n_k, c.d);
  a.dv = tensor(sums[2], c.kv_heads, c.n_k, c.d_v);
  a.shape = {c.heads, c.kv_heads, c.n_q, c.n_k, c.d, c.d_v};

  using namespace focus::detail::textbook;
  const pair_rule rule(c.pattern, c.n_q, c.n_k);
  const auto none = [](index_t, index_t, Real) {
  };
  if (op == operation::attention) {
    softmax_gradients<Real, Weight>(a, c.score, local_pairs<Real>(rule), none);
  } else if (op == operation::sparse) {
    softmax_gradients<Real, Weight>(a, c.score,
                                    grouped_pairs<Real>(rule, p.query_masks, p.key_masks), none);
  } else {
    const index_t groups = c.group_count;
    const focus::matrix_view<const Real> g_q(inputs[3].data(), {c.n_q, groups}),
        g_k(inputs[4].data(), {c.n_k, groups});
    softmax_gradients<Real, Weight>(
        a, c.score, gated_pairs<Real>(rule, c.gate, g_q, g_k), [&](index_t i, index_t j, Real dp) {
          add_scaled(dp, g_k.row(j), groups, sums[3].data() + i * groups);
          add_scaled(dp, g_q.row(i), groups, sums[4].data() + j * groups);
        });
  }
  std::array<std::vector<double>, 5> all;
  for (std::size_t x = 0; x < all.size(); ++x) all[x].assign(sums[x].begin(), sums[x].end());
  return all;
}

/// The type to which the library rounds P and dS of what is stored as T.
template <class T>
using gradient_weight =
    std::conditional_t<FOCUS_HAS_BFLOAT16_PRODUCTS && focus::detail::is_bfloat16<T>,
                       focus::bfloat16, focus::accumulator_t<T>>;

/// The library's gradients are right: twice the error of the naive form, and a few epsilons of the
/// storage type, and of scores and logsumexps as large as they are here, at their magnitude.
template <operation Op, class T>
FOCUS_NOINLINE std::string compare_gradients(const gradient_problem<T>& p, const gradients<T>& g) {
  using real = focus::accumulator_t<T>;
  if (!g.guards_hold()) return "memory outside the extents was written";
  const dense_problem dense = p.dense();
  const auto dout = p.dout.values(), dlse = p.dlse.values();
  const auto expected = textbook_gradients<double>(dense, Op, dout, dlse);
  const auto naive = textbook_gradients<real, gradient_weight<T>>(dense, Op, dout, dlse);
  const double largest_score = naive_form<real>(dense, Op).largest_score;
  const double of_scores =
      epsilon<real>() * (8 + 4 * largest_score + 4 * largest_magnitude(p.lse.values()));
  // dout . v - delta cancels: its error is one of the products, whatever is left of them.
  double largest_product = largest_magnitude(dlse);
  for (index_t h = 0; p.spec.dout && h < p.spec.heads; ++h)
    for (index_t i = 0; i < p.spec.n_q; ++i)
      for (index_t j = 0; j < p.spec.n_k; ++j)
        largest_product =
            (std::max)(largest_product,
                       std::abs(focus::detail::textbook::dot(
                           p.dout.view().row(h, i),
                           p.v.view().row(h * p.spec.kv_heads / p.spec.heads, j), p.spec.d_v)));
  const double of_cancellation = 4 * epsilon<real>() * largest_product;
  const double scale = std::abs(static_cast<double>(
      p.spec.score.scale.value_or(1 / std::sqrt(static_cast<float>(p.spec.d)))));
  const double of_gate = static_cast<double>(p.spec.heads) *
                         (1 + largest_score * std::abs(static_cast<double>(p.spec.gate.sharpness)));
  const std::array factors{scale * largest_magnitude(dense.k), scale * largest_magnitude(dense.q),
                           0.0, of_gate, of_gate};
  const auto got = g.values();
  for (std::size_t x = 0; x < (Op == operation::soft_gate ? 5 : 3); ++x) {
    const double storage = x < 3 ? epsilon<T>() : epsilon<real>();
    const double tolerance = 2 * largest_error(naive[x], expected[x]) +
                             (storage + of_scores) * largest_magnitude(expected[x]) +
                             of_cancellation * factors[x];
    const std::string wrong = compare_values(gradient_names[x], got[x], expected[x], tolerance);
    if (!wrong.empty()) return wrong;
  }
  return {};
}

/// The gradients of a case are right, stored as T.
template <operation Op, class T>
std::string check_gradients_of(const attention_case& c) {
  gradient_problem<T> p(c);
  p.attend(Op);
  return compare_gradients<Op>(p, differentiate<Op>(p));
}

/// The gradients of a case are right, in its storage type.
template <operation Op>
std::string check_gradients(const attention_case& c) {
  std::string wrong;
  with_main_storage(c.type, [&]<class T>() { wrong = check_gradients_of<Op, T>(c); });
  return wrong;
}

/// The case for a loss of lse alone, and for one of out and lse.
inline std::vector<attention_case> with_dlse(attention_case c) {
  c.dlse = true;
  std::vector<attention_case> cases{c, c};
  cases[0].dout = false;
  return cases;
}

/// A row that sees no key (lse -inf) has no gradient and gives none, whatever dlse holds for it:
/// NaN in dlse there changes no bit of what zeros give.
template <operation Op, class T = float>
std::string check_dlse_of_empty_rows(attention_case c) {
  for (const attention_case& with : with_dlse(c)) {
    gradient_problem<T> zeros(with), poisoned(with);
    zeros.attend(Op), poisoned.attend(Op);
    index_t empty_rows = 0;
    for (index_t h = 0; h < c.heads; ++h)
      for (index_t i = 0; i < c.n_q; ++i) {
        if (zeros.lse.view()(h, i) != -infinity) continue;
        ++empty_rows;
        zeros.dlse.view()(h, i) = 0;
        poisoned.dlse.view()(h, i) = static_cast<float>(i % 3 == 0   ? not_a_number
                                                        : i % 3 == 1 ? infinity
                                                                     : 1e30);
      }
    if (empty_rows == 0) return "no row is empty";
    const gradients<T> expected = differentiate<Op>(zeros), got = differentiate<Op>(poisoned);
    if (!got.same_bits(expected)) return "an empty row's dlse has an effect";
    for (index_t h = 0; h < c.heads; ++h)
      for (index_t i = 0; i < c.n_q; ++i)
        for (index_t x = 0; zeros.lse.view()(h, i) == -infinity && x < c.d; ++x)
          if (widened(got.dq.view()(h, i, x)) != 0) return "an empty row has a gradient";
    const std::string wrong = compare_gradients<Op>(zeros, expected);
    if (!wrong.empty()) return wrong;
  }
  return {};
}

/// The same bits with two and three threads.
template <operation Op, class T = float>
std::string check_gradient_bits(const attention_case& c) {
  gradient_problem<T> p(c);
  p.attend(Op);
  const gradients<T> one = differentiate<Op>(p);
  for (const int threads : {2, 3})
    if (!differentiate<Op>(p, threads).same_bits(one))
      return std::to_string(threads) + " threads differ";
  return {};
}

/// The textbook gradients against central differences of the textbook's forward pass, in double:
/// the largest error of `samples` elements of each input, relative to the largest gradient.
inline double largest_difference(const attention_case& c, operation op, int samples) {
  problem<double> p(c);
  generator random(c.seed + 5);
  std::vector<double> dout, dlse;
  for (index_t x = 0; x < c.heads * c.n_q * c.d_v; ++x)
    dout.push_back(c.dout ? random.normal() : 0.0);
  for (index_t x = 0; x < c.heads * c.n_q; ++x)
    dlse.push_back(c.has_dlse(op) ? random.normal() : 0.0);
  dense_problem dense = p.dense();
  const auto loss = [&] {
    const attention_state s = truth(dense, op);
    double sum = 0;
    for (std::size_t x = 0; x < dout.size(); ++x) sum += dout[x] * s.out[x];
    for (std::size_t x = 0; x < dlse.size(); ++x)
      if (dlse[x] != 0 && std::isfinite(s.lse[x])) sum += dlse[x] * s.lse[x];
    return sum;
  };
  const auto gradient = textbook_gradients<double>(dense, op, dout, dlse);
  const std::array<std::vector<double>*, 5> inputs{&dense.q, &dense.k, &dense.v,
                                                   &dense.query_assignment, &dense.key_assignment};
  double worst = 0;
  for (std::size_t x = 0; x < (op == operation::soft_gate ? 5 : 3); ++x)
    for (int s = 0; s < samples && !inputs[x]->empty(); ++s) {
      const auto at =
          static_cast<std::size_t>(random.below(static_cast<index_t>(inputs[x]->size())));
      double& value = (*inputs[x])[at];
      const double before = value;
      // An assignment of 0 must not become negative: its pair would leave the domain.
      const double step = 1e-5;
      const auto at_offset = [&](double offset) {
        value = before + offset;
        return loss();
      };
      double slope = 0;
      if (x >= 3 && before < 2 * step)  // one-sided, of second order
        slope = (-3 * at_offset(0) + 4 * at_offset(step) - at_offset(2 * step)) / (2 * step);
      else
        slope = (at_offset(step) - at_offset(-step)) / (2 * step);
      value = before;
      worst = (std::max)(worst,
                         std::abs(slope - gradient[x][at]) / (1 + largest_magnitude(gradient[x])));
    }
  return worst;
}

}  // namespace oracle
