// Attention in its textbook form: one softmax a row over the pairs that are allowed, each decided
// by itself.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/gate_arguments.hpp"
#include "focus/checks/merge_arguments.hpp"
#include "focus/checks/plan_arguments.hpp"
#include "focus/config.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/routing_plan.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail::textbook {

/// How query i stands to key j, by their positions alone.
enum class pair_kind {
  hidden,   // a later key, and attention is causal
  nearby,   // local or sink: attended to whatever the groups are
  distant,  // attended to where the groups allow it
};

class pair_rule {
 public:
  pair_rule(const pattern_options& pattern, index_t n_q, index_t n_k)
      : pattern_(pattern), query_offset_(pattern.query_offset.value_or(n_k - n_q)) {}

  [[nodiscard]] pair_kind operator()(index_t i, index_t j) const {
    const index_t distance = i + query_offset_ - j;
    if (pattern_.causal && distance < 0) return pair_kind::hidden;
    const bool local = pattern_.window >= 0 && std::abs(distance) <= pattern_.window;
    const bool sink = j < pattern_.sink_tokens;
    return local || sink ? pair_kind::nearby : pair_kind::distant;
  }

 private:
  pattern_options pattern_;
  index_t query_offset_;
};

template <class Real = double, class TA, class TB>
Real dot(const TA* a, const TB* b, index_t n) {
  Real sum = 0;
  for (index_t c = 0; c < n; ++c)
    sum += static_cast<Real>(detail::widen(a[c])) * static_cast<Real>(detail::widen(b[c]));
  return sum;
}

/// Rounds to the storage type.
template <class T>
T rounded(double x) {
  return narrow<T>(static_cast<accumulator_t<T>>(x));
}

/// out_i = sum_j exp(t_ij) v_j / sum_j exp(t_ij), lse_i = log sum_j exp(t_ij), for each head.
///
/// `logit(i, j, s)` gives t_ij from the score s() = softcap(scale * q_i . k_j), or nothing for a
/// pair that does not enter the softmax: what that key holds then has no influence, NaN included,
/// and the score, which is most of the work, is not asked for. A row without a weight above 0 is
/// the empty state: zeros, and an lse of -inf.
template <class Arguments, class Logit>
void softmax_attention(const Arguments& a, const score_options& options, Logit&& logit) {
  struct term {
    index_t key;
    double logit;
  };
  const auto [heads, kv_heads, n_q, n_k, head_dim, value_dim] = a.shape;
  const resolved_score<double> scoring = resolve<double>(options, head_dim);
  std::vector<term> terms;
  std::vector<double> sum_v(static_cast<std::size_t>(value_dim));

  for (index_t h = 0; h < heads; ++h) {
    const index_t kv = h / a.shape.queries_per_kv_head();
    for (index_t i = 0; i < n_q; ++i) {
      terms.clear();
      for (index_t j = 0; j < n_k; ++j) {
        const auto score = [&, i, j] {
          const double s = scoring.scale * dot(a.q.row(h, i), a.k.row(kv, j), a.shape.head_dim);
          return scoring.softcap > 0 ? scoring.softcap * std::tanh(s / scoring.softcap) : s;
        };
        if (const std::optional<double> t = logit(i, j, score)) terms.push_back({j, *t});
      }

      bool empty = true;
      double largest = lowest<double>;
      for (const term& t : terms) {
        if (!is_minus_infinity(t.logit)) empty = false;  // a NaN too: it is no empty row
        if (t.logit > largest) largest = t.logit;
      }

      double sum = 0;
      sum_v.assign(sum_v.size(), 0.0);
      if (!empty)
        for (const term& t : terms) {
          const double weight = std::exp(t.logit - largest);
          sum += weight;
          const auto* v = a.v.row(kv, t.key);
          for (index_t c = 0; c < value_dim; ++c)
            sum_v[static_cast<std::size_t>(c)] += weight * static_cast<double>(detail::widen(v[c]));
        }

      using out_type = typename decltype(a.out)::value_type;
      using lse_type = typename decltype(a.lse)::value_type;
      for (index_t c = 0; c < value_dim; ++c)
        a.out(h, i, c) = rounded<out_type>(empty ? 0.0 : sum_v[static_cast<std::size_t>(c)] / sum);
      if (!a.wants_lse()) continue;
      if (empty)
        store_minus_infinity(a.lse(h, i));
      else
        a.lse(h, i) = static_cast<lse_type>(largest + std::log(sum));
    }
  }
}

/// Attention and sparse attention after the checks of their views.
template <class Arguments>
void attention(const char* function, const Arguments& args, const pattern_options& pattern,
               const score_options& score) {
  validate(pattern, function);
  validate(score, function);
  const pair_rule rule(pattern, args.shape.n_q, args.shape.n_k);
  for_each_sequence(args, [&](const auto& sequence, index_t) {
    softmax_attention(sequence, score,
                      [&](index_t i, index_t j, const auto& s) -> std::optional<double> {
                        if (rule(i, j) != pair_kind::nearby) return std::nullopt;
                        return s();
                      });
  });
}
/// Of one sequence.
template <class Arguments>
void sparse_attention(const Arguments& args, std::span<const group_mask> query_masks,
                      std::span<const group_mask> key_masks, const pattern_options& pattern,
                      const score_options& score) {
  const pair_rule rule(pattern, args.shape.n_q, args.shape.n_k);
  softmax_attention(args, score, [&](index_t i, index_t j, const auto& s) -> std::optional<double> {
    const pair_kind kind = rule(i, j);
    const group_mask shared =
        query_masks[static_cast<std::size_t>(i)] & key_masks[static_cast<std::size_t>(j)];
    if (kind == pair_kind::nearby || (kind == pair_kind::distant && shared != 0)) return s();
    return std::nullopt;
  });
}

}  // namespace detail::textbook

namespace reference {

/// Dense or windowed attention (and sinks): out_i = sum_j softmax_j(s_ij) v_j over the keys j that
/// are local to i (i - j <= w) or sinks.
///
/// @param q        [heads, n_q, d]
/// @param k        [kv_heads, n_k, d]
/// @param v        [kv_heads, n_k, d_v]
/// @param out      [heads, n_q, d_v]; may not overlap q, k, v or lse
/// @param pattern  window, sinks, causality; every causal pair by default
/// @param score    scale and softcap
/// @param lse      [heads, n_q], natural logarithm of the softmax's denominator; {} when not wanted
/// Throws invalid_argument, as focus::attention does, before anything is written.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, mutable_tensor_like<3> Out,
          mutable_tensor_like<2> Lse = matrix_view<float>, class Exec = serial_executor>
void attention(const Q& q, const K& k, const V& v, Out&& out,
               const pattern_options& pattern = full_causal, const score_options& score = {},
               Lse&& lse = {}, [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::attention";
  const auto arguments = detail::check_attention_arguments(function, q, k, v, out, lse);
  detail::textbook::attention(function, arguments, pattern, score);
}

/// The same for a batch of sequences, as focus::attention.
template <tensor_like<4> Q, tensor_like<4> K, tensor_like<4> V, mutable_tensor_like<4> Out,
          mutable_tensor_like<3> Lse = tensor_view<float, 3>, class Exec = serial_executor>
void attention(const Q& q, const K& k, const V& v, Out&& out,
               const pattern_options& pattern = full_causal, const score_options& score = {},
               Lse&& lse = {}, [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::attention";
  const auto arguments = detail::check_attention_arguments(function, q, k, v, out, lse);
  detail::textbook::attention(function, arguments, pattern, score);
}

/// Focus attention with hard groups: as attention, over the keys that are local to i, or sinks, or
/// share a group with i. Each pair is decided from the two masks.
///
/// @param query_masks  [n_q], the groups of each query
/// @param key_masks    [n_k], the groups of each key
/// The rest is as in attention.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, span_like<group_mask> QueryMasks,
          span_like<group_mask> KeyMasks, mutable_tensor_like<3> Out,
          mutable_tensor_like<2> Lse = matrix_view<float>, class Exec = serial_executor>
void sparse_attention(const Q& q, const K& k, const V& v, const QueryMasks& query_masks,
                      const KeyMasks& key_masks, const pattern_options& pattern, Out&& out,
                      const score_options& score = {}, Lse&& lse = {},
                      [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::sparse_attention";
  const auto arguments = detail::check_attention_arguments(function, q, k, v, out, lse);
  detail::validate(pattern, function);
  detail::validate(score, function);
  const std::span query_groups = detail::as_span(query_masks);
  const std::span key_groups = detail::as_span(key_masks);
  detail::require_length(query_groups.size(), arguments.shape.n_q, function, "query_masks");
  detail::require_length(key_groups.size(), arguments.shape.n_k, function, "key_masks");
  detail::textbook::sparse_attention(arguments, query_groups, key_groups, pattern, score);
}

/// The same, with the masks and the pattern that `plan` was made of. Its cells are not looked at.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, mutable_tensor_like<3> Out,
          mutable_tensor_like<2> Lse = matrix_view<float>, class Exec = serial_executor>
void sparse_attention(const Q& q, const K& k, const V& v, const routing_plan& plan, Out&& out,
                      const score_options& score = {}, Lse&& lse = {},
                      [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::sparse_attention";
  const auto arguments = detail::check_attention_arguments(function, q, k, v, out, lse);
  detail::validate(score, function);
  detail::check_plan_lengths(plan, arguments.shape, function);
  detail::textbook::sparse_attention(arguments, plan.query_masks(), plan.key_masks(),
                                     plan.pattern(), score);
}

/// The same for a batch of sequences with a plan for each, as focus::sparse_attention.
template <tensor_like<4> Q, tensor_like<4> K, tensor_like<4> V, span_like<routing_plan> Plans,
          mutable_tensor_like<4> Out, mutable_tensor_like<3> Lse = tensor_view<float, 3>,
          class Exec = serial_executor>
void sparse_attention(const Q& q, const K& k, const V& v, const Plans& plans, Out&& out,
                      const score_options& score = {}, Lse&& lse = {},
                      [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::sparse_attention";
  const auto arguments = detail::check_attention_arguments(function, q, k, v, out, lse);
  const std::span<const routing_plan> plan_span = detail::as_span(plans);
  detail::validate(score, function);
  detail::check_plans(plan_span, arguments.q.extent(0), arguments.shape, function);
  detail::for_each_sequence(arguments, [&](const auto& sequence, index_t b) {
    const routing_plan& plan = plan_span[static_cast<std::size_t>(b)];
    detail::textbook::sparse_attention(sequence, plan.query_masks(), plan.key_masks(),
                                       plan.pattern(), score);
  });
}

/// Focus attention with the soft gate, over all pairs that causality allows. With p_ij = g_i . g_j
/// of two assignments and p = 1, sigmoid = 1 for local and sink pairs:
///   gate_kind::score (Eq. 2)  softmax of s_ij * sigmoid(sharpness * p_ij);
///   gate_kind::weight         weights proportional to p_ij exp(s_ij), none for p_ij = 0.
///
/// @param query_assignment  [n_q, K], the share of each query in each group, not negative
/// @param key_assignment    [n_k, K]
/// The rest is as in attention; lse is the logarithm of the gated sum.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, tensor_like<2> QueryAssignment,
          tensor_like<2> KeyAssignment, mutable_tensor_like<3> Out,
          mutable_tensor_like<2> Lse = matrix_view<float>, class Exec = serial_executor>
void soft_gate_attention(const Q& q, const K& k, const V& v,
                         const QueryAssignment& query_assignment,
                         const KeyAssignment& key_assignment, const gate_options& gate, Out&& out,
                         const pattern_options& pattern = {}, const score_options& score = {},
                         Lse&& lse = {}, [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::soft_gate_attention";
  const auto arguments = detail::check_attention_arguments(function, q, k, v, out, lse);
  detail::validate(pattern, function);
  detail::validate(score, function);
  const auto g_q = detail::as_const_view(query_assignment);
  const auto g_k = detail::as_const_view(key_assignment);
  detail::check_gate_arguments(function, arguments, g_q, g_k);
  detail::validate(gate, function);
  const index_t groups = g_q.extent(1);

  using detail::textbook::pair_kind;
  const detail::textbook::pair_rule rule(pattern, arguments.shape.n_q, arguments.shape.n_k);
  detail::textbook::softmax_attention(
      arguments, score, [&](index_t i, index_t j, const auto& s) -> std::optional<double> {
        const pair_kind kind = rule(i, j);
        if (kind == pair_kind::hidden) return std::nullopt;
        if (kind == pair_kind::nearby) return s();
        const double p = detail::textbook::dot(g_q.row(i), g_k.row(j), groups);
        if (gate.kind == gate_kind::score)
          return s() / (1 + std::exp(-static_cast<double>(gate.sharpness) * p));
        if (detail::is_zero(p)) return std::nullopt;
        return s() + std::log(p);
      });
}

/// The attention state over the union of two disjoint key sets, from the states over each:
/// lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b. An
/// empty state (lse = -inf) leaves the other one as it is; two of them give the empty state.
///
/// @param out_a, out_b  [heads, n, d_v]
/// @param lse_a, lse_b  [heads, n], natural logarithms
/// @param out           [heads, n, d_v]; may be out_a or out_b itself
/// @param lse           [heads, n]; may be lse_a or lse_b itself
/// Throws invalid_argument for shapes that differ and for overlapping memory, before anything is
/// written.
template <tensor_like<3> OutA, tensor_like<2> LseA, tensor_like<3> OutB, tensor_like<2> LseB,
          mutable_tensor_like<3> Out, mutable_tensor_like<2> Lse, class Exec = serial_executor>
void merge_attention_states(const OutA& out_a, const LseA& lse_a, const OutB& out_b,
                            const LseB& lse_b, Out&& out, Lse&& lse,
                            [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::merge_attention_states";
  const auto o_a = detail::as_const_view(out_a), o_b = detail::as_const_view(out_b);
  const auto l_a = detail::as_const_view(lse_a), l_b = detail::as_const_view(lse_b);
  const auto o = detail::as_view(out);
  const auto l = detail::as_view(lse);
  detail::check_merge_arguments(function, o_a, l_a, o_b, l_b, o, l);
  const auto [heads, n, value_dim] = o_a.extents();

  using out_type = detail::element_of<Out>;
  using lse_type = detail::element_of<Lse>;
  const auto as_double = [](const auto& x) {
    return static_cast<double>(detail::widen(x));
  };
  for (index_t h = 0; h < heads; ++h)
    for (index_t i = 0; i < n; ++i) {
      const bool a_empty = detail::is_minus_infinity(l_a(h, i));
      const bool b_empty = detail::is_minus_infinity(l_b(h, i));
      // Of an empty state nothing is used: 0 times what it holds could be NaN.
      if (a_empty && b_empty) {
        for (index_t c = 0; c < value_dim; ++c)
          o(h, i, c) = detail::textbook::rounded<out_type>(0.0);
        detail::store_minus_infinity(l(h, i));
      } else if (a_empty || b_empty) {
        for (index_t c = 0; c < value_dim; ++c)
          o(h, i, c) = detail::textbook::rounded<out_type>(a_empty ? as_double(o_b(h, i, c))
                                                                   : as_double(o_a(h, i, c)));
        if (a_empty)
          l(h, i) = static_cast<lse_type>(l_b(h, i));
        else
          l(h, i) = static_cast<lse_type>(l_a(h, i));
      } else {
        const auto a = static_cast<double>(l_a(h, i)), b = static_cast<double>(l_b(h, i));
        const double largest = a < b ? b : a;
        const double weight_a = std::exp(a - largest), weight_b = std::exp(b - largest);
        for (index_t c = 0; c < value_dim; ++c)
          o(h, i, c) = detail::textbook::rounded<out_type>(
              (weight_a * as_double(o_a(h, i, c)) + weight_b * as_double(o_b(h, i, c))) /
              (weight_a + weight_b));
        l(h, i) = static_cast<lse_type>(largest + std::log(weight_a + weight_b));
      }
    }
}

}  // namespace reference
}  // namespace FOCUS_ABI
}  // namespace focus
