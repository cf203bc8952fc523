// The gradient of hard Focus attention, on the plan.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <type_traits>

#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/backward_arguments.hpp"
#include "focus/checks/plan_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/passes/backward.hpp"
#include "focus/passes/cell_order.hpp"
#include "focus/passes/sequences.hpp"
#include "focus/passes/token_order.hpp"
#include "focus/plan/cells.hpp"
#include "focus/routing_plan.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The backward pass over the tiles of a plan's query cells.
struct cell_pass {
  const routing_plan* plan;
  resolved_pattern pattern;
  index_t pairs_a_row;  // about so many

  [[nodiscard]] index_t slot_count() const noexcept {
    return static_cast<index_t>(plan->key_slots().size());
  }
  [[nodiscard]] index_t token_of(index_t slot) const noexcept {
    return plan->key_slots()[static_cast<std::size_t>(slot)];
  }
  [[nodiscard]] index_t tiles() const noexcept {
    return static_cast<index_t>(plan->tiles().size());
  }
  [[nodiscard]] index_t rounds() const noexcept { return plan->rounds(); }
  [[nodiscard]] task_range round(index_t r) const noexcept { return plan->round(r); }
  [[nodiscard]] bool is_last_tile_of(index_t t, index_t r) const noexcept {
    return plan->is_last_tile_of(tile(t), row(t, r));
  }
  [[nodiscard]] const row_tile& tile(index_t t) const noexcept {
    return plan->tiles()[static_cast<std::size_t>(t)];
  }
  [[nodiscard]] index_t rows(index_t t) const noexcept { return tile(t).rows; }
  [[nodiscard]] index_t row(index_t t, index_t r) const noexcept {
    return plan->query_order()[static_cast<std::size_t>(tile(t).begin + r)];
  }
  template <walked_tile Tile, class Attend>
  void walk(Tile& state, index_t t, Attend&& attend) const {
    attend_distant(state, *plan, tile(t), pattern, attend);
  }
};

static_assert(backward_pass<cell_pass>);

/// The keys that an average row meets in its cells, causality aside.
inline index_t met_keys_a_row(const routing_plan& plan) noexcept {
  index_t pairs = 0;
  for (const row_tile& tile : plan.tiles())
    for (const token_run& c : plan.key_runs())
      if ((c.mask & plan.tile_mask(tile)) != 0) pairs += tile.rows * (c.end - c.begin);
  return pairs / (std::max<index_t>)(plan.query_count(), 1);
}

/// The gradient of sparse attention, for run_call. plans: of each sequence.
template <class E>
struct sparse_backward_call {
  std::span<const routing_plan> plans;
  backward_options<E, make_ungated> options;

  template <class F>
  void operator()(index_t sequence, scratch_plan& scratch, const attention_shape& part,
                  index_t workers, F&& f) const {
    const routing_plan& plan = plans[static_cast<std::size_t>(sequence)];
    const resolved_pattern pattern = detail::resolve(plan, part);
    const auto with_passes = [&](const auto& first_pass, const auto& second_pass) {
      options.plan(scratch, part, workers, first_pass, second_pass, f);
    };
    if (plan.layout() == plan_layout::pair_by_pair)
      with_passes(token_order_pass{{part.n_q},
                                   part.n_k,
                                   pattern.visible_end(part.n_q / 2),
                                   [&](auto& tile, index_t first, auto&& attend) {
                                     attend_pair_by_pair(tile, plan, pattern, first, attend);
                                   }},
                  no_pass{});
    else if (plan.tiles().empty())
      with_passes(local_pass(pattern, part.n_q), no_pass{});
    else
      with_passes(local_pass(pattern, part.n_q), cell_pass{&plan, pattern, met_keys_a_row(plan)});
  }
};

/// The gradient of sparse attention after its checks.
template <class Arguments>
void run_sparse_backward(const Arguments& args, std::span<const routing_plan> plans,
                         const score_options& score, const any_executor& exec) {
  using A = typename Arguments::accumulator;
  const auto scoring = detail::resolve<A>(score, args.shape.head_dim);
  detail::with_gradient_operands(args, [&]<class E>(const auto& stored) {
    const sparse_backward_call<E> call{plans, {args.shape, scoring, detail::wanted_of(args), {}}};
    detail::run_call(stored, exec, call);
  });
}

}  // namespace detail

/// The gradient of sparse_attention: that of attention_backward over the pairs that `plan` allows.
///
///   P_ij = exp(s_ij - lse_i),   delta_i = dout_i . out_i,   dS_ij = P_ij (dout_i . v_j - delta_i)
///   dq_i = scale sum_j dS_ij k_j,   dk_j = scale sum_i dS_ij q_i,   dv_j = sum_i P_ij dout_i
///
/// @param q, k, v, plan, score  as given to sparse_attention
/// @param out   [heads, n_q, value_dim], what sparse_attention wrote
/// @param lse   [heads, n_q], what sparse_attention wrote; natural logarithm
/// @param dout  [heads, n_q, value_dim]
/// @param dq    [heads, n_q, head_dim] or {}: left out; overwritten
/// @param dk    [kv_heads, n_k, head_dim] or {}
/// @param dv    [kv_heads, n_k, value_dim] or {}. No output may overlap another argument; slices of
///              one fused buffer may interleave.
/// @param exec  where the loops run; the same bits for any number of threads
/// @throws invalid_argument before anything is written
///
/// bfloat16 products: as attention_backward says.
///
/// Pairs that the plan leaves out are not computed. The plan itself has no gradient: routers are
/// trained with soft_gate_attention_backward or retained_mass_loss. Memory is O(n d): as for
/// attention_backward, and a second copy of K and V.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, tensor_like<3> Out,
          tensor_like<2> Lse, tensor_like<3> Dout,
          mutable_tensor_like<3> Dq = tensor_view<float, 3>,
          mutable_tensor_like<3> Dk = tensor_view<float, 3>,
          mutable_tensor_like<3> Dv = tensor_view<float, 3>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void sparse_attention_backward(const Q& q, const K& k, const V& v, const routing_plan& plan,
                               const Out& out, const Lse& lse, const Dout& dout, Dq&& dq, Dk&& dk,
                               Dv&& dv, const score_options& score = {}, Exec&& exec = {}) {
  constexpr const char* name = "sparse_attention_backward";
  const auto args = detail::check_backward_arguments(name, false, q, k, v, out, lse, dout,
                                                     matrix_view<const float>{}, dq, dk, dv);
  detail::validate(score, name);
  detail::check_plan_lengths(plan, args.shape, name);
  detail::run_sparse_backward(args, std::span(&plan, 1), score, detail::any_executor(exec));
}

/// The same for a loss that depends on lse too: delta_i = dout_i . out_i - dlse_i.
///
/// @param dlse  dL / dlse, [heads, n_q], or an empty view: zeros. What it holds for a row that sees
///              no key does not count.
/// @param out, dout  {} for both: all gradients come from dlse
///
/// The rest is as above.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V,
          tensor_like<3> Out = tensor_view<const float, 3>, tensor_like<2> Lse,
          tensor_like<3> Dout = tensor_view<const float, 3>, tensor_like<2> Dlse,
          mutable_tensor_like<3> Dq = tensor_view<float, 3>,
          mutable_tensor_like<3> Dk = tensor_view<float, 3>,
          mutable_tensor_like<3> Dv = tensor_view<float, 3>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void sparse_attention_backward(const Q& q, const K& k, const V& v, const routing_plan& plan,
                               const Out& out, const Lse& lse, const Dout& dout, const Dlse& dlse,
                               Dq&& dq, Dk&& dk, Dv&& dv, const score_options& score = {},
                               Exec&& exec = {}) {
  constexpr const char* name = "sparse_attention_backward";
  const auto args =
      detail::check_backward_arguments(name, true, q, k, v, out, lse, dout, dlse, dq, dk, dv);
  detail::validate(score, name);
  detail::check_plan_lengths(plan, args.shape, name);
  detail::run_sparse_backward(args, std::span(&plan, 1), score, detail::any_executor(exec));
}

/// The same for a batch of sequences of one length each, and one call for all of them: the same
/// bits as a loop of calls, but threads share out sequences and heads.
///
/// @param q, dout, ...  [batch, ...], what they are above
/// @param plans         batch of them, that of each sequence
/// @param lse           [batch, heads, n_q]
///
/// The rest is as above. Memory: for each thread that of one kv head; in a batch of fewer than
/// twice as many kv heads as there are threads, that of a call for one sequence.
template <tensor_like<4> Q, tensor_like<4> K, tensor_like<4> V, span_like<routing_plan> Plans,
          tensor_like<4> Out, tensor_like<3> Lse, tensor_like<4> Dout,
          mutable_tensor_like<4> Dq = tensor_view<float, 4>,
          mutable_tensor_like<4> Dk = tensor_view<float, 4>,
          mutable_tensor_like<4> Dv = tensor_view<float, 4>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void sparse_attention_backward(const Q& q, const K& k, const V& v, const Plans& plans,
                               const Out& out, const Lse& lse, const Dout& dout, Dq&& dq, Dk&& dk,
                               Dv&& dv, const score_options& score = {}, Exec&& exec = {}) {
  constexpr const char* name = "sparse_attention_backward";
  const auto args = detail::check_backward_arguments(name, false, q, k, v, out, lse, dout,
                                                     tensor_view<const float, 3>{}, dq, dk, dv);
  const std::span<const routing_plan> plan_span = detail::as_span(plans);
  detail::validate(score, name);
  detail::check_plans(plan_span, args.q.extent(0), args.shape, name);
  detail::run_sparse_backward(args, plan_span, score, detail::any_executor(exec));
}

/// The same for a batch of sequences, with dlse [batch, heads, n_q].
template <tensor_like<4> Q, tensor_like<4> K, tensor_like<4> V, span_like<routing_plan> Plans,
          tensor_like<4> Out = tensor_view<const float, 4>, tensor_like<3> Lse,
          tensor_like<4> Dout = tensor_view<const float, 4>, tensor_like<3> Dlse,
          mutable_tensor_like<4> Dq = tensor_view<float, 4>,
          mutable_tensor_like<4> Dk = tensor_view<float, 4>,
          mutable_tensor_like<4> Dv = tensor_view<float, 4>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void sparse_attention_backward(const Q& q, const K& k, const V& v, const Plans& plans,
                               const Out& out, const Lse& lse, const Dout& dout, const Dlse& dlse,
                               Dq&& dq, Dk&& dk, Dv&& dv, const score_options& score = {},
                               Exec&& exec = {}) {
  constexpr const char* name = "sparse_attention_backward";
  const auto args =
      detail::check_backward_arguments(name, true, q, k, v, out, lse, dout, dlse, dq, dk, dv);
  const std::span<const routing_plan> plan_span = detail::as_span(plans);
  detail::validate(score, name);
  detail::check_plans(plan_span, args.q.extent(0), args.shape, name);
  detail::run_sparse_backward(args, plan_span, score, detail::any_executor(exec));
}

}  // namespace FOCUS_ABI
}  // namespace focus
