// focus::reference: the gradients of attention as the textbook has them, pair by pair in double.
//
// Weights are computed anew from Q, K and V, so the truth does not depend on the out and lse that
// the caller hands over; their shapes are checked only.
#pragma once

#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/backward_arguments.hpp"
#include "focus/checks/gate_arguments.hpp"
#include "focus/checks/plan_arguments.hpp"
#include "focus/config.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/reference/attention.hpp"
#include "focus/routing_plan.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail::textbook {

/// How a pair enters the softmax: with weight a exp(t), and how a and t depend on the score s and
/// on the product p of the assignments.
template <class Real>
struct gated_pair {
  Real t, a = 1, dt_ds = 1, dt_dp = 0, da_dp = 0;
};

/// Rows of sums, zeros at first.
template <class Real>
class sum_rows {
 public:
  sum_rows(index_t rows, index_t width)
      : width_(width), data_(static_cast<std::size_t>(rows * width)) {}
  Real* row(index_t r) { return data_.data() + r * width_; }

 private:
  index_t width_;
  std::vector<Real> data_;
};

/// to += factor * from.
template <class Real, class T>
void add_scaled(Real factor, const T* from, index_t n, Real* to) {
  for (index_t c = 0; c < n; ++c) to[c] += factor * static_cast<Real>(detail::widen(from[c]));
}

template <class Real, class T>
void round_row(const Real* from, T* to, index_t n) {
  for (index_t c = 0; c < n; ++c) to[c] = detail::narrow<T>(static_cast<accumulator_t<T>>(from[c]));
}

/// All gradients of out_i = sum_j P_ij v_j and lse_i = log sum_j a_ij exp(t_ij), P_ij = a_ij
/// exp(t_ij - lse_i):
///
///   dL/dt_ij = P_ij (dout_i . (v_j - out_i) + dlse_i),   dL/da_ij = dL/dt_ij / a_ij
///
/// pair(i, j, s): nothing for a pair that has no part in the softmax, else what it makes of the
/// score s(). add_dp(i, j, dL/dp_ij). All sums are of type Real: double for the truth; tests
/// measure by it what float can do, and what is left where P and dL/ds are rounded to Weight before
/// they are multiplied.
template <class Real, class Weight = Real, class Arguments, class Pair, class AddDp>
void softmax_gradients(const Arguments& a, const score_options& options, Pair&& pair,
                       AddDp&& add_dp) {
  struct term {
    index_t key;
    gated_pair<Real> entry;
    Real ds_dz;
  };
  const attention_shape& s = a.shape;
  const resolved_score<Real> scoring = resolve<Real>(options, s.head_dim);
  std::vector<term> terms;
  const auto rounded = [](Real x) {
    if constexpr (std::is_same_v<Real, Weight>)
      return x;
    else
      return static_cast<Real>(detail::widen(detail::narrow<Weight>(x)));
  };
  for (index_t kv = 0; kv < s.kv_heads; ++kv) {
    sum_rows<Real> dk(s.n_k, s.head_dim), dv(s.n_k, s.value_dim);
    for (index_t h = kv * s.queries_per_kv_head(); h < (kv + 1) * s.queries_per_kv_head(); ++h)
      for (index_t i = 0; i < s.n_q; ++i) {
        sum_rows<Real> dq(1, s.head_dim), out(1, s.value_dim);
        terms.clear();
        Real largest = lowest<Real>;
        for (index_t j = 0; j < s.n_k; ++j) {
          Real ds_dz = 1;
          const auto score = [&, h, i, j] {
            const Real z = scoring.scale *
                           detail::textbook::dot<Real>(a.q.row(h, i), a.k.row(kv, j), s.head_dim);
            if (!(scoring.softcap > 0)) return z;
            const Real tanh = std::tanh(z / scoring.softcap);
            ds_dz = 1 - tanh * tanh;
            return scoring.softcap * tanh;
          };
          if (const std::optional<gated_pair<Real>> entry = pair(i, j, score)) {
            terms.push_back({j, *entry, ds_dz});
            if (entry->t > largest && entry->a > 0) largest = entry->t;
          }
        }
        Real sum = 0;
        for (const term& t : terms)
          if (!is_zero(t.entry.a)) sum += t.entry.a * std::exp(t.entry.t - largest);
        if (!is_zero(sum)) {  // else the row is empty
          for (const term& t : terms)
            if (!is_zero(t.entry.a))
              add_scaled(t.entry.a * std::exp(t.entry.t - largest) / sum, a.v.row(kv, t.key),
                         s.value_dim, out.row(0));
          for (const term& t : terms) {
            const Real by_a = std::exp(t.entry.t - largest) / sum, p = t.entry.a * by_a;
            Real slope = is_given(a.dlse) ? static_cast<Real>(a.dlse(h, i)) : Real{0};
            if (is_given(a.dout))
              for (index_t c = 0; c < s.value_dim; ++c)
                slope += static_cast<Real>(detail::widen(a.dout(h, i, c))) *
                         (static_cast<Real>(detail::widen(a.v(kv, t.key, c))) - out.row(0)[c]);
            add_dp(i, t.key, slope * (p * t.entry.dt_dp + by_a * t.entry.da_dp));
            if (is_zero(t.entry.a)) continue;
            const Real dz = rounded(slope * p * t.entry.dt_ds * t.ds_dz) * scoring.scale;
            add_scaled(dz, a.k.row(kv, t.key), s.head_dim, dq.row(0));
            add_scaled(dz, a.q.row(h, i), s.head_dim, dk.row(t.key));
            if (is_given(a.dout))
              add_scaled(rounded(p), a.dout.row(h, i), s.value_dim, dv.row(t.key));
          }
        }
        if (is_given(a.dq)) detail::textbook::round_row(dq.row(0), a.dq.row(h, i), s.head_dim);
      }
    for (index_t j = 0; j < s.n_k; ++j) {
      if (is_given(a.dk)) detail::textbook::round_row(dk.row(j), a.dk.row(kv, j), s.head_dim);
      if (is_given(a.dv)) detail::textbook::round_row(dv.row(j), a.dv.row(kv, j), s.value_dim);
    }
  }
}

/// The pairs of each operation, as softmax_gradients wants them.
template <class Real>
auto local_pairs(const pair_rule& rule) {
  return [rule](index_t i, index_t j, const auto& s) -> std::optional<gated_pair<Real>> {
    if (rule(i, j) != pair_kind::nearby) return std::nullopt;
    return gated_pair<Real>{s()};
  };
}
template <class Real>
auto grouped_pairs(const pair_rule& rule, std::span<const group_mask> query_masks,
                   std::span<const group_mask> key_masks) {
  return [=](index_t i, index_t j, const auto& s) -> std::optional<gated_pair<Real>> {
    const pair_kind kind = rule(i, j);
    const group_mask shared =
        query_masks[static_cast<std::size_t>(i)] & key_masks[static_cast<std::size_t>(j)];
    if (kind == pair_kind::hidden || (kind == pair_kind::distant && shared == 0))
      return std::nullopt;
    return gated_pair<Real>{s()};
  };
}
template <class Real, class GQ, class GK>
auto gated_pairs(const pair_rule& rule, const gate_options& gate, const matrix_view<const GQ>& g_q,
                 const matrix_view<const GK>& g_k) {
  return [=](index_t i, index_t j, const auto& s) -> std::optional<gated_pair<Real>> {
    const pair_kind kind = rule(i, j);
    if (kind == pair_kind::hidden) return std::nullopt;
    if (kind == pair_kind::nearby) return gated_pair<Real>{s()};
    const Real p = detail::textbook::dot<Real>(g_q.row(i), g_k.row(j), g_q.extent(1));
    if (gate.kind == gate_kind::weight) return gated_pair<Real>{.t = s(), .a = p, .da_dp = 1};
    const Real sharpness = static_cast<Real>(gate.sharpness);
    const Real sigmoid = 1 / (1 + std::exp(-sharpness * p));
    const Real rest = 1 / (1 + std::exp(sharpness * p));  // 1 - sigmoid would cancel
    const Real score = s();
    return gated_pair<Real>{
        .t = score * sigmoid, .dt_ds = sigmoid, .dt_dp = score * sharpness * sigmoid * rest};
  };
}

/// The gradients of attention and of sparse attention after the checks of their views.
template <class Arguments>
void attention_gradients(const char* function, const Arguments& args,
                         const pattern_options& pattern, const score_options& score) {
  validate(pattern, function);
  validate(score, function);
  const pair_rule rule(pattern, args.shape.n_q, args.shape.n_k);
  for_each_sequence(args, [&](const auto& sequence, index_t) {
    softmax_gradients<double>(sequence, score, local_pairs<double>(rule),
                              [](index_t, index_t, double) {});
  });
}
/// plans: of each sequence.
template <class Arguments>
void sparse_attention_gradients(const Arguments& args, std::span<const routing_plan> plans,
                                const score_options& score) {
  for_each_sequence(args, [&](const auto& sequence, index_t b) {
    const routing_plan& plan = plans[static_cast<std::size_t>(b)];
    const pair_rule rule(plan.pattern(), args.shape.n_q, args.shape.n_k);
    softmax_gradients<double>(sequence, score,
                              grouped_pairs<double>(rule, plan.query_masks(), plan.key_masks()),
                              [](index_t, index_t, double) {});
  });
}

}  // namespace detail::textbook

namespace reference {

/// The gradient of attention: arguments as in focus::attention_backward. Throws invalid_argument as
/// it does.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, tensor_like<3> Out,
          tensor_like<2> Lse, tensor_like<3> Dout,
          mutable_tensor_like<3> Dq = tensor_view<float, 3>,
          mutable_tensor_like<3> Dk = tensor_view<float, 3>,
          mutable_tensor_like<3> Dv = tensor_view<float, 3>, class Exec = serial_executor>
void attention_backward(const Q& q, const K& k, const V& v, const Out& out, const Lse& lse,
                        const Dout& dout, Dq&& dq, Dk&& dk, Dv&& dv,
                        const pattern_options& pattern = full_causal,
                        const score_options& score = {}, [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::attention_backward";
  const auto args = detail::check_backward_arguments(function, false, q, k, v, out, lse, dout,
                                                     matrix_view<const float>{}, dq, dk, dv);
  detail::textbook::attention_gradients(function, args, pattern, score);
}

/// The same with dlse [heads, n_q]; out and dout may both be {}.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V,
          tensor_like<3> Out = tensor_view<const float, 3>, tensor_like<2> Lse,
          tensor_like<3> Dout = tensor_view<const float, 3>, tensor_like<2> Dlse,
          mutable_tensor_like<3> Dq = tensor_view<float, 3>,
          mutable_tensor_like<3> Dk = tensor_view<float, 3>,
          mutable_tensor_like<3> Dv = tensor_view<float, 3>, class Exec = serial_executor>
void attention_backward(const Q& q, const K& k, const V& v, const Out& out, const Lse& lse,
                        const Dout& dout, const Dlse& dlse, Dq&& dq, Dk&& dk, Dv&& dv,
                        const pattern_options& pattern = full_causal,
                        const score_options& score = {}, [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::attention_backward";
  const auto args =
      detail::check_backward_arguments(function, true, q, k, v, out, lse, dout, dlse, dq, dk, dv);
  detail::textbook::attention_gradients(function, args, pattern, score);
}

/// The same for a batch of sequences, as focus::attention_backward.
template <tensor_like<4> Q, tensor_like<4> K, tensor_like<4> V, tensor_like<4> Out,
          tensor_like<3> Lse, tensor_like<4> Dout,
          mutable_tensor_like<4> Dq = tensor_view<float, 4>,
          mutable_tensor_like<4> Dk = tensor_view<float, 4>,
          mutable_tensor_like<4> Dv = tensor_view<float, 4>, class Exec = serial_executor>
void attention_backward(const Q& q, const K& k, const V& v, const Out& out, const Lse& lse,
                        const Dout& dout, Dq&& dq, Dk&& dk, Dv&& dv,
                        const pattern_options& pattern = full_causal,
                        const score_options& score = {}, [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::attention_backward";
  const auto args = detail::check_backward_arguments(function, false, q, k, v, out, lse, dout,
                                                     tensor_view<const float, 3>{}, dq, dk, dv);
  detail::textbook::attention_gradients(function, args, pattern, score);
}

/// The same for a batch of sequences, as focus::attention_backward, with dlse.
template <tensor_like<4> Q, tensor_like<4> K, tensor_like<4> V,
          tensor_like<4> Out = tensor_view<const float, 4>, tensor_like<3> Lse,
          tensor_like<4> Dout = tensor_view<const float, 4>, tensor_like<3> Dlse,
          mutable_tensor_like<4> Dq = tensor_view<float, 4>,
          mutable_tensor_like<4> Dk = tensor_view<float, 4>,
          mutable_tensor_like<4> Dv = tensor_view<float, 4>, class Exec = serial_executor>
void attention_backward(const Q& q, const K& k, const V& v, const Out& out, const Lse& lse,
                        const Dout& dout, const Dlse& dlse, Dq&& dq, Dk&& dk, Dv&& dv,
                        const pattern_options& pattern = full_causal,
                        const score_options& score = {}, [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::attention_backward";
  const auto args =
      detail::check_backward_arguments(function, true, q, k, v, out, lse, dout, dlse, dq, dk, dv);
  detail::textbook::attention_gradients(function, args, pattern, score);
}

/// The gradient of sparse_attention with the masks and the pattern that `plan` was made of:
/// arguments as in focus::sparse_attention_backward.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, tensor_like<3> Out,
          tensor_like<2> Lse, tensor_like<3> Dout,
          mutable_tensor_like<3> Dq = tensor_view<float, 3>,
          mutable_tensor_like<3> Dk = tensor_view<float, 3>,
          mutable_tensor_like<3> Dv = tensor_view<float, 3>, class Exec = serial_executor>
void sparse_attention_backward(const Q& q, const K& k, const V& v, const routing_plan& plan,
                               const Out& out, const Lse& lse, const Dout& dout, Dq&& dq, Dk&& dk,
                               Dv&& dv, const score_options& score = {},
                               [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::sparse_attention_backward";
  const auto args = detail::check_backward_arguments(function, false, q, k, v, out, lse, dout,
                                                     matrix_view<const float>{}, dq, dk, dv);
  detail::validate(score, function);
  detail::check_plan_lengths(plan, args.shape, function);
  detail::textbook::sparse_attention_gradients(args, std::span(&plan, 1), score);
}

/// The same with dlse [heads, n_q]; out and dout may both be {}.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V,
          tensor_like<3> Out = tensor_view<const float, 3>, tensor_like<2> Lse,
          tensor_like<3> Dout = tensor_view<const float, 3>, tensor_like<2> Dlse,
          mutable_tensor_like<3> Dq = tensor_view<float, 3>,
          mutable_tensor_like<3> Dk = tensor_view<float, 3>,
          mutable_tensor_like<3> Dv = tensor_view<float, 3>, class Exec = serial_executor>
void sparse_attention_backward(const Q& q, const K& k, const V& v, const routing_plan& plan,
                               const Out& out, const Lse& lse, const Dout& dout, const Dlse& dlse,
                               Dq&& dq, Dk&& dk, Dv&& dv, const score_options& score = {},
                               [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::sparse_attention_backward";
  const auto args =
      detail::check_backward_arguments(function, true, q, k, v, out, lse, dout, dlse, dq, dk, dv);
  detail::validate(score, function);
  detail::check_plan_lengths(plan, args.shape, function);
  detail::textbook::sparse_attention_gradients(args, std::span(&plan, 1), score);
}

/// The same for a batch of sequences, as focus::sparse_attention_backward: a plan for each.
template <tensor_like<4> Q, tensor_like<4> K, tensor_like<4> V, span_like<routing_plan> Plans,
          tensor_like<4> Out, tensor_like<3> Lse, tensor_like<4> Dout,
          mutable_tensor_like<4> Dq = tensor_view<float, 4>,
          mutable_tensor_like<4> Dk = tensor_view<float, 4>,
          mutable_tensor_like<4> Dv = tensor_view<float, 4>, class Exec = serial_executor>
void sparse_attention_backward(const Q& q, const K& k, const V& v, const Plans& plans,
                               const Out& out, const Lse& lse, const Dout& dout, Dq&& dq, Dk&& dk,
                               Dv&& dv, const score_options& score = {},
                               [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::sparse_attention_backward";
  const auto args = detail::check_backward_arguments(function, false, q, k, v, out, lse, dout,
                                                     tensor_view<const float, 3>{}, dq, dk, dv);
  const std::span<const routing_plan> plan_span = detail::as_span(plans);
  detail::validate(score, function);
  detail::check_plans(plan_span, args.q.extent(0), args.shape, function);
  detail::textbook::sparse_attention_gradients(args, plan_span, score);
}

/// The same for a batch of sequences, as focus::sparse_attention_backward, with dlse.
template <tensor_like<4> Q, tensor_like<4> K, tensor_like<4> V, span_like<routing_plan> Plans,
          tensor_like<4> Out = tensor_view<const float, 4>, tensor_like<3> Lse,
          tensor_like<4> Dout = tensor_view<const float, 4>, tensor_like<3> Dlse,
          mutable_tensor_like<4> Dq = tensor_view<float, 4>,
          mutable_tensor_like<4> Dk = tensor_view<float, 4>,
          mutable_tensor_like<4> Dv = tensor_view<float, 4>, class Exec = serial_executor>
void sparse_attention_backward(const Q& q, const K& k, const V& v, const Plans& plans,
                               const Out& out, const Lse& lse, const Dout& dout, const Dlse& dlse,
                               Dq&& dq, Dk&& dk, Dv&& dv, const score_options& score = {},
                               [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::sparse_attention_backward";
  const auto args =
      detail::check_backward_arguments(function, true, q, k, v, out, lse, dout, dlse, dq, dk, dv);
  const std::span<const routing_plan> plan_span = detail::as_span(plans);
  detail::validate(score, function);
  detail::check_plans(plan_span, args.q.extent(0), args.shape, function);
  detail::textbook::sparse_attention_gradients(args, plan_span, score);
}

/// The gradient of soft_gate_attention: arguments as in focus::soft_gate_attention_backward.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, tensor_like<2> QueryAssignment,
          tensor_like<2> KeyAssignment, tensor_like<3> Out = tensor_view<const float, 3>,
          tensor_like<2> Lse = matrix_view<const float>,
          tensor_like<3> Dout = tensor_view<const float, 3>,
          tensor_like<2> Dlse = matrix_view<const float>,
          mutable_tensor_like<3> Dq = tensor_view<float, 3>,
          mutable_tensor_like<3> Dk = tensor_view<float, 3>,
          mutable_tensor_like<3> Dv = tensor_view<float, 3>,
          mutable_tensor_like<2> DqueryAssignment = matrix_view<float>,
          mutable_tensor_like<2> DkeyAssignment = matrix_view<float>, class Exec = serial_executor>
void soft_gate_attention_backward(
    const Q& q, const K& k, const V& v, const QueryAssignment& query_assignment,
    const KeyAssignment& key_assignment, const gate_options& gate, const Out& out, const Lse& lse,
    const Dout& dout, const Dlse& dlse, Dq&& dq, Dk&& dk, Dv&& dv,
    DqueryAssignment&& dquery_assignment, DkeyAssignment&& dkey_assignment,
    const pattern_options& pattern = {}, const score_options& score = {},
    [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::soft_gate_attention_backward";
  const auto args =
      detail::check_backward_arguments(function, true, q, k, v, out, lse, dout, dlse, dq, dk, dv);
  const auto g_q = detail::as_const_view(query_assignment);
  const auto g_k = detail::as_const_view(key_assignment);
  const auto dg_q = detail::as_view(dquery_assignment);
  const auto dg_k = detail::as_view(dkey_assignment);
  const index_t groups = detail::check_gate_gradients(function, args, g_q, g_k, dg_q, dg_k).groups;
  detail::validate(gate, function);
  detail::validate(pattern, function);
  detail::validate(score, function);
  using namespace detail::textbook;
  const pair_rule rule(pattern, args.shape.n_q, args.shape.n_k);
  sum_rows<double> sum_q(args.shape.n_q, groups), sum_k(args.shape.n_k, groups);
  softmax_gradients<double>(args, score, gated_pairs<double>(rule, gate, g_q, g_k),
                            [&](index_t i, index_t j, double dp) {
                              add_scaled(dp, g_k.row(j), groups, sum_q.row(i));
                              add_scaled(dp, g_q.row(i), groups, sum_k.row(j));
                            });
  if (detail::is_given(dg_q))
    for (index_t i = 0; i < args.shape.n_q; ++i)
      detail::textbook::round_row(sum_q.row(i), dg_q.row(i), groups);
  if (detail::is_given(dg_k))
    for (index_t j = 0; j < args.shape.n_k; ++j)
      detail::textbook::round_row(sum_k.row(j), dg_k.row(j), groups);
}

}  // namespace reference
}  // namespace FOCUS_ABI
}  // namespace focus
