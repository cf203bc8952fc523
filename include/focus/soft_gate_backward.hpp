// The gradient of softly gated attention: what trains the routing of a frozen model.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <type_traits>

#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/backward_arguments.hpp"
#include "focus/checks/gate_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/gradient_tile.hpp"
#include "focus/kernel/pack.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/rules.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tile.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/passes/backward.hpp"
#include "focus/passes/gradient_sums.hpp"
#include "focus/scalar.hpp"
#include "focus/soft_gate.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The gate of one tile in the backward pass. Query row r of the tile is row_of(r).
template <class A, class RowOf>
struct backward_gate {
  static constexpr bool any = true;
  static constexpr int lanes = vec<A>::width, stride = tile_sizes<A>::score_stride;

  packed_keys<A> keys;  // the key assignments, as keys and as values
  gate_kind kind;
  A sharpness;
  const resolved_pattern* pattern;
  RowOf row_of;

  /// Products p = g_i . g_j to what differentiate() takes: p itself, or exp(-sharpness p), from
  /// which both sigma and 1 - sigma come without cancellation. Local and sink pairs get an open
  /// gate; so does, or p = 0, what a row does not see: whatever its assignment holds, it stays
  /// hidden.
  template <int Rows>
  void prepare(const slot_range* limit, index_t first_row, slot_range seen, index_t base,
               index_t count, A* gates) const {
    const A open = kind == gate_kind::weight ? A{1} : A{0};
    for (index_t r = 0; r < Rows; ++r) {
      if (kind == gate_kind::score) exponentiate(count, gates + r * stride);
      if (limit[r].begin < limit[r].end)
        fill_near(*pattern, row_of(first_row + r), base, count, gates + r * stride, open);
    }
    hide_outside<Rows>(limit, seen, base, count, gates, A{0});
  }

  /// Scores to weights P, slopes from dP to dS, gates to dL/dp, for one row.
  void differentiate(index_t row, slot_range limit, index_t base, index_t count, A lse, A delta,
                     A* scores, A* slopes, A* gates) const {
    if (kind == gate_kind::weight)
      differentiate_weight(count, lse, delta, scores, slopes, gates);
    else
      differentiate_score(count, lse, delta, scores, slopes, gates);
    // Local and sink pairs have a fixed gate. A row that sees nothing need not exist.
    if (limit.begin < limit.end) fill_near(*pattern, row_of(row), base, count, gates, A{0});
  }

 private:
  /// p to exp(-sharpness p), cut off where sigma is about to leave the normal numbers.
  void exponentiate(index_t count, A* gates) const noexcept {
    constexpr A most = (std::numeric_limits<A>::max)();
    const vec<A> factor = vec<A>::broadcast(std::clamp(-sharpness * log2_e<A>, -most, most));
    const vec<A> highest = vec<A>::broadcast(exp2_highest<A> - 1);
    for (index_t j = 0; j < count; j += lanes)
      exp2<A>(minimum(highest, vec<A>::load(gates + j) * factor)).store(gates + j);
  }

  /// P = p e with e = exp(s - lse): dS = P (dP - delta), dL/dp = e (dP - delta). Where p is below
  /// the smallest normal number, e is cut off at the largest, and for dL/dp far enough below it for
  /// sums to stay finite.
  static void differentiate_weight(index_t count, A lse, A delta, A* scores, A* slopes, A* gates) {
    const vec<A> lse_v = vec<A>::broadcast(lse), delta_v = vec<A>::broadcast(delta);
    const vec<A> highest = vec<A>::broadcast(exp2_highest<A>), zero = vec<A>::zero();
    const vec<A> most = vec<A>::broadcast((std::numeric_limits<A>::max)() * A(0x1p-32));
    for (index_t j = 0; j < count; j += lanes) {
      const vec<A> p = vec<A>::load(gates + j);
      const vec<A> e = exp2<A>(minimum(highest, vec<A>::load(scores + j) - lse_v));
      const vec<A> slope = vec<A>::load(slopes + j) - delta_v;
      // p = 0 prunes exactly, whatever the key holds.
      const vec<A> weight = where_zero(p, zero, p * e);
      weight.store(scores + j);
      where_zero(weight, zero, weight * slope).store(slopes + j);
      where_zero(e, zero, minimum(most, e) * slope).store(gates + j);
    }
  }

  /// P = exp(s sigma - lse), sigma = sigmoid(sharpness p): dS = P (dP - delta) sigma, dL/dp = P (dP
  /// - delta) s sharpness sigma (1 - sigma).
  void differentiate_score(index_t count, A lse, A delta, A* scores, A* slopes, A* gates) const {
    const vec<A> lse_v = vec<A>::broadcast(lse), delta_v = vec<A>::broadcast(delta);
    const vec<A> highest = vec<A>::broadcast(exp2_highest<A>), zero = vec<A>::zero();
    const vec<A> one = vec<A>::broadcast(A{1});
    const vec<A> factor = vec<A>::broadcast(sharpness * ln_2<A>);  // scores are in units of log2
    for (index_t j = 0; j < count; j += lanes) {
      const vec<A> s = vec<A>::load(scores + j), y = vec<A>::load(gates + j);
      const vec<A> sigma = one / (one + y);
      const vec<A> weight = exp2<A>(minimum(highest, s * sigma - lse_v));
      const vec<A> dt = weight * (vec<A>::load(slopes + j) - delta_v) * sigma;
      weight.store(scores + j);
      where_zero(weight, zero, dt).store(slopes + j);
      where_zero(weight, zero, dt * s * (y * sigma) * factor).store(gates + j);
    }
  }
};

/// The gates of a backward pass: packed key assignments, and where the assignments' gradients go.
template <class A, class GQ, class GK, class DGQ, class DGK>
struct backward_gates : given_row_states {
  matrix_view<const GQ> query_assignment;
  matrix_view<const GK> key_assignment;
  matrix_view<DGQ> dquery_assignment;
  matrix_view<DGK> dkey_assignment;
  gate_options gate;
  const resolved_pattern* pattern;
  key_packer<A> packer;
  index_t groups;
  bool wants_dquery, wants_dkey;

  void pack(const scratch_memory& memory, const any_executor& exec) const {
    pack_assignment(packer, memory, key_assignment, wants_dquery ? groups : 0, exec);
  }
  template <class E, class RowOf>
  [[nodiscard]] backward_gate<A, RowOf> begin_tile(const scratch_memory& memory,
                                                   gradient_tile<E>& tile, RowOf row_of) const {
    tile.set_gates([&](index_t r) { return query_assignment.row(row_of(r)); });
    return {packer.head(memory, 0), gate.kind, saturated<A>(gate.sharpness), pattern, row_of};
  }
  void write(const scratch_memory& memory, const gradient_sums<A>& sums,
             const any_executor&) const {
    for (index_t i = 0; wants_dquery && i < dquery_assignment.extent(0); ++i)
      detail::write_scaled(sums.all_dquery_gates(memory, i), A{1}, dquery_assignment.row(i),
                           groups);
    for (index_t j = 0; wants_dkey && j < dkey_assignment.extent(0); ++j)
      detail::write_scaled(sums.all_dkey_gates(memory, j), A{1}, dkey_assignment.row(j), groups);
  }
};

static_assert(gates_of<backward_gates<float, float, float, float, float>, float>);
#if FOCUS_HAS_BFLOAT16_PRODUCTS
static_assert(gates_of<backward_gates<float, float, float, float, float>, bfloat16>);
#endif

/// Plans the gates of a backward pass.
template <class A, class GQ, class GK, class DGQ, class DGK>
backward_gates<A, GQ, GK, DGQ, DGK> plan_gates(
    scratch_plan& plan, const assignment_arguments<GQ, GK, DGQ, DGK>& assignments,
    const gate_options& gate, const resolved_pattern& pattern) {
  const bool wants_dquery = detail::is_given(assignments.dquery);
  const bool wants_dkey = detail::is_given(assignments.dkey);
  const index_t groups = assignments.groups;
  return {{},
          assignments.query,
          assignments.key,
          assignments.dquery,
          assignments.dkey,
          gate,
          &pattern,
          key_packer<A>(plan, 1, pattern.n_k, groups, wants_dquery ? groups : 0),
          groups,
          wants_dquery,
          wants_dkey};
}

/// The gradient of softly gated attention after the checks.
template <class E, class Arguments, class Assignments, class A>
void run_soft_gate_backward(const Arguments& args, const Assignments& assignments,
                            const gate_options& gate, const resolved_pattern& pattern,
                            const resolved_score<A>& score, const any_executor& exec) {
  detail::run_backward<E>(
      args, score,
      [&](scratch_plan& plan, index_t) { return plan_gates<A>(plan, assignments, gate, pattern); },
      token_order_pass{{args.shape.n_q},
                       args.shape.n_k,
                       pattern.visible_end(args.shape.n_q / 2),
                       [&](auto& tile, index_t first, auto&& attend) {
                         for (index_t r = 0; r < tile.rows(); ++r)
                           tile.limit(r) = {0, pattern.visible_end(first + r)};
                         attend(no_rules{});
                       }},
      no_pass{}, exec);
}

}  // namespace detail

/// The gradient of soft_gate_attention, for both gates. With P_ij the weights, p_ij = g_i . g_j,
/// and dout, dlse the gradients of a loss with regard to out and lse:
///
///   delta_i = dout_i . out_i - dlse_i,   e_ij = dout_i . v_j - delta_i
///
///   gate_kind::score   ds_ij = P_ij e_ij sigma_ij
///                      dp_ij = P_ij e_ij s_ij lambda sigma_ij (1 - sigma_ij)
///
///   gate_kind::weight  ds_ij = P_ij e_ij
///                      dp_ij = exp(s_ij - lse_i) e_ij
///
///   dq_i = scale sum_j ds_ij k_j,   dk_j = scale sum_i ds_ij q_i,   dv_j = sum_i P_ij dout_i
///
///   dg_i = sum over heads and j of dp_ij g_j, and likewise for the keys
///
/// over distant pairs for dp: the gates of local and sink pairs are fixed. Nothing is divided by p:
/// a pruned pair (p_ij = 0, `weight`) has a finite gradient dp_ij, and can come back; exp(s - lse)
/// is cut off 2^32 below the largest number, for pairs that far above all that is kept.
///
/// @param q, k, v, query_assignment, key_assignment, gate, pattern, score  as given to
///              soft_gate_attention
/// @param out   [heads, n_q, value_dim], what soft_gate_attention wrote; {} where dout is {}
/// @param lse   [heads, n_q], what it wrote; natural logarithm
/// @param dout  [heads, n_q, value_dim], or {}: the loss depends on lse alone (v is then not read)
/// @param dlse  [heads, n_q], or {}: the loss does not depend on lse
/// @param dq    [heads, n_q, head_dim] or {}: left out, with the work for it; overwritten
/// @param dk    [kv_heads, n_k, head_dim] or {}
/// @param dv    [kv_heads, n_k, value_dim] or {}
/// @param dquery_assignment  [n_q, K] or {}, summed over all heads
/// @param dkey_assignment    [n_k, K] or {}; one assignment for both has the sum of the two as its
///              gradient. No output may overlap another argument.
/// @param exec  where the loops run; the same bits for any number of threads
/// @throws invalid_argument before anything is written
///
/// bfloat16 products: as attention_backward says, of ds for dS; where only the assignments'
/// gradients are asked for, of q . k and dout . v alone. The assignments, and dp, are not rounded.
///
/// A row that sees no key (lse -inf) has no gradient and gives none. Memory is O(n (d + K)):
/// as for attention_backward, and sums of the assignments' gradients.
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
requires executor<std::remove_reference_t<Exec>>
void soft_gate_attention_backward(
    const Q& q, const K& k, const V& v, const QueryAssignment& query_assignment,
    const KeyAssignment& key_assignment, const gate_options& gate, const Out& out, const Lse& lse,
    const Dout& dout, const Dlse& dlse, Dq&& dq, Dk&& dk, Dv&& dv,
    DqueryAssignment&& dquery_assignment, DkeyAssignment&& dkey_assignment,
    const pattern_options& pattern = {}, const score_options& score = {}, Exec&& exec = {}) {
  constexpr const char* name = "soft_gate_attention_backward";
  const auto args =
      detail::check_backward_arguments(name, true, q, k, v, out, lse, dout, dlse, dq, dk, dv);
  const auto assignments = detail::check_gate_gradients(
      name, args, detail::as_const_view(query_assignment), detail::as_const_view(key_assignment),
      detail::as_view(dquery_assignment), detail::as_view(dkey_assignment));
  detail::validate(gate, name);
  detail::validate(pattern, name);
  detail::validate(score, name);
  using A = typename decltype(args)::accumulator;
  const detail::attention_shape& s = args.shape;
  const auto resolved = detail::resolve(pattern, s.n_q, s.n_k);
  const auto scoring = detail::resolve<A>(score, s.head_dim);
  detail::with_gradient_operands(args, [&]<class E>(const auto& stored) {
    detail::run_soft_gate_backward<E>(stored, assignments, gate, resolved, scoring,
                                      detail::any_executor(exec));
  });
}

}  // namespace FOCUS_ABI
}  // namespace focus
