// How much of full attention a routing keeps, and the gradient of that: the loss that trains a
// router from the frozen model's activations alone, layer by layer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <type_traits>

#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/gate_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/gradient_tile.hpp"
#include "focus/kernel/operand.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/query_tile.hpp"
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
#include "focus/passes/token_order.hpp"
#include "focus/soft_gate.hpp"
#include "focus/soft_gate_backward.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The pass over some of the query rows, with all keys in token order.
struct row_list_pass : rows_once {
  std::span<const index_t> list;  // empty: all rows
  const resolved_pattern* pattern;
  index_t pairs_a_row;  // about so many

  [[nodiscard]] index_t slot_count() const noexcept { return pattern->n_k; }
  [[nodiscard]] index_t token_of(index_t slot) const noexcept {
    return slot < pattern->n_k ? slot : -1;
  }
  [[nodiscard]] index_t row(index_t tile, index_t r) const noexcept {
    const index_t at = tile * plan_tile_rows + r;
    return list.empty() ? at : list[static_cast<std::size_t>(at)];
  }
  template <walked_tile Tile, class Attend>
  void walk(Tile& state, index_t tile, Attend&& attend) const {
    for (index_t r = 0; r < state.rows(); ++r)
      state.limit(r) = {0, pattern->visible_end(row(tile, r))};
    attend(no_rules{});
  }
};

static_assert(backward_pass<row_list_pass>);

/// Gates whose rows find out their lse themselves: of all visible pairs, and of those that the gate
/// lets through. The gradient of the loss with regard to the latter is -1 / (rows x heads).
template <class A, class GQ, class GK, class DGQ, class DGK>
struct retained_mass_gates : backward_gates<A, GQ, GK, DGQ, DGK> {
  using gates = backward_gates<A, GQ, GK, DGQ, DGK>;

  query_tile_layout<A> gated_layout, full_layout;
  gate_layout<A> products;
  scratch_array<A> row_losses;
  resolved_score<A> score;
  index_t heads, n_q, terms;  // terms: rows that are asked for, times heads
  double* loss;

  retained_mass_gates(scratch_plan& plan, index_t workers, const attention_shape& s, gates base,
                      const resolved_score<A>& scoring, index_t rows, double& result)
      : gates(base),
        gated_layout(plan, workers, s.head_dim, 0),
        full_layout(plan, workers, 0, 0),
        products(plan, workers, base.groups),
        row_losses(plan.add<A>(s.heads * s.n_q)),
        score(scoring),
        heads(s.heads),
        n_q(s.n_q),
        terms(rows * s.heads),
        loss(&result) {}

  void pack(const scratch_memory& memory, const any_executor& exec) const {
    gates::pack(memory, exec);
    fill(losses(memory, 0), losses(memory, heads), A{0});
  }

  template <class Arguments, class RowOf>
  [[nodiscard]] auto row_states(const tile_location<A>& site, const Arguments& args, index_t head,
                                index_t rows, RowOf row) const {
    query_tile<A> gated(site.memory, gated_layout, site.worker);
    query_tile<A> full(site.memory, full_layout, site.worker);
    const auto query_of = [&](index_t r) {
      return args.q.row(head, row(r));
    };
    gated.begin(rows, query_factor(score), query_of);
    full.begin(rows, A{1}, query_of);
    A* const query_gates = products.queries(site.memory, site.worker);
    operand<A>::pack_queries(
        rows, this->groups, A{1}, [&](index_t r) { return this->query_assignment.row(row(r)); },
        query_gates);
    for (index_t r = 0; r < rows; ++r) gated.limit(r) = {0, this->pattern->visible_end(row(r))};
    const packed_keys<A> key_gates = this->packer.head(site.memory, 0);
    gated.attend_strips(
        site.keys, [&](auto strip, const strip_state<A>& state, index_t first, slot_range block) {
          strip_state<A> all = full.state_of(first);
          all.limit = state.limit;
          sum_block<strip()>(
              state, all, site.keys, block, query_gates + first * tile_sizes<A>::depth_chunk,
              key_gates, [&](index_t r) { return row(first + r); }, gated.scores(), full.scores(),
              products.products(site.memory, site.worker));
        });

    A* const losses_of_head = losses(site.memory, site.head);
    for (index_t r = 0; r < rows; ++r) {
      if (full.sees_nothing(r)) continue;
      A& of_row = losses_of_head[row(r)];
      of_row = gated.sees_nothing(r) ? full.logsumexp(r) : full.logsumexp_above(gated, r);
      if (gated.sees_nothing(r) && !is_nan(of_row)) of_row = keeps_nothing;
    }
    // dL / dlse of the gated sum is -1 / terms, and delta its negative.
    return [gated, delta = A{1} / static_cast<A>(terms)](index_t r) {
      if (gated.sees_nothing(r)) return row_state<A>{true, 0, 0};
      return row_state<A>{false, gated.logsumexp(r), delta};
    };
  }

  void write(const scratch_memory& memory, const gradient_sums<A>& sums,
             const any_executor& exec) const {
    gates::write(memory, sums, exec);
    double sum = 0;
    bool infinite = false;
    for (const A* x = losses(memory, 0); x != losses(memory, heads); ++x) {
      const bool keeps_none = is_equal(*x, keeps_nothing);
      infinite |= keeps_none;
      if (!keeps_none) sum += static_cast<double>(*x);
    }
    *loss = terms == 0 ? 0.0 : sum / static_cast<double>(terms);
    if (infinite && !is_nan(sum)) store_infinity(*loss);
  }

 private:
  /// The loss of a row that sees keys but keeps none of them: infinite.
  static constexpr A keeps_nothing = (std::numeric_limits<A>::max)();

  [[nodiscard]] A* losses(const scratch_memory& memory, index_t head) const noexcept {
    return memory[row_losses] + head * n_q;
  }

  /// Adds a block of keys to both sums of one strip.
  template <int Rows, class RowOf>
  void sum_block(const strip_state<A>& gated, const strip_state<A>& full,
                 const packed_keys<A>& keys, slot_range block, const A* query_gates,
                 const packed_keys<A>& key_gates, RowOf&& row, A* gated_scores, A* scores,
                 A* factors) const {
    constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel,
                  stride = tile_sizes<A>::score_stride;
    const slot_range seen = visible_slots<Rows>(gated.limit, block);
    if (seen.begin >= seen.end) return;
    const index_t base = seen.begin / panel * panel;
    const index_t count = round_up(seen.end - base, lanes);
    operand<A>::template score_slots<Rows>(gated.query, keys, base, seen.end, scores);
    if (score.softcap > 0) cap_scores<Rows>(scores, count, score.softcap);
    hide_outside<Rows>(gated.limit, seen, base, count, scores);
    operand<A>::template score_slots<Rows>(query_gates, key_gates, base, seen.end, factors);
    hide_outside<Rows>(gated.limit, seen, base, count, factors, A{0});
    for (index_t r = 0; r < Rows; ++r) {
      copy(scores + r * stride, scores + r * stride + count, gated_scores + r * stride);
      if (gated.limit[r].begin < gated.limit[r].end)
        fill_near(*this->pattern, row(r), base, count, factors + r * stride, A{1});
      split_gates(count, factors + r * stride, gated_scores + r * stride);
    }
    A rescale[tile_sizes<A>::strip_rows + lanes];
    update_softmax<Rows>(full, scores, base, count, rescale);
    update_softmax<Rows>(gated, gated_scores, base, count, rescale, A{1}, factors);
  }
};

static_assert(gates_of<retained_mass_gates<float, float, float, float, float>, float>);

/// The retained mass after the checks.
template <class Arguments, class A, class GQ, class GK, class DGQ, class DGK>
double run_retained_mass(const Arguments& args,
                         const assignment_arguments<GQ, GK, DGQ, DGK>& assignments,
                         std::span<const index_t> rows, const resolved_pattern& pattern,
                         const resolved_score<A>& score, const any_executor& exec) {
  const attention_shape& s = args.shape;
  const row_list_pass pass{{rows.empty() ? s.n_q : static_cast<index_t>(rows.size())},
                           rows,
                           &pattern,
                           pattern.visible_end(s.n_q / 2)};
  double loss = 0;
  const auto make_gates = [&](scratch_plan& plan, index_t workers) {
    const auto gates = plan_gates<A>(plan, assignments, {.kind = gate_kind::weight}, pattern);
    return retained_mass_gates<A, GQ, GK, DGQ, DGK>(plan, workers, s, gates, score, pass.count,
                                                    loss);
  };
  detail::run_backward<A>(args, score, make_gates, pass, no_pass{}, exec);
  return loss;
}

}  // namespace detail

/// The attention mass that a soft routing keeps of full attention, as a loss with its gradient.
/// With p_ij = g_i . g_j, and p = 1 for local and sink pairs:
///
///   L = mean over rows i and heads of -log m_i,   m_i = sum_j p_ij exp(s_ij) / sum_j exp(s_ij)
///     = mean of lse_full - lse_gated              (lse_gated: soft_gate_attention's, `weight`)
///
/// With one-hot assignments m_i is the share of the full softmax that falls on the pairs which
/// sparse_attention computes, and L the mean of KL(sparse || full). The loss of one layer needs
/// that layer's Q and K alone: no gradient passes through the model. Keep the assignments balanced
/// while they are trained: one group for everything keeps all mass. Sinkhorn does so as long as it
/// converges, hence cosine scores (similarity::cosine); unbounded dot products grow until its
/// iterations no longer balance them, and one group takes most of the tokens.
///
/// @param q    [heads, n_q, head_dim], any strides but the last
/// @param k    [kv_heads, n_k, head_dim]
/// @param query_assignment   g of the queries, [n_q, K], not negative: float, or double where q is
/// @param key_assignment     g of the keys, [n_k, K]; may come from another projection
/// @param dquery_assignment  [n_q, K] or {}: dL / dg of the queries (0 for rows not in `rows`)
/// @param dkey_assignment    [n_k, K] or {}. No output may overlap another argument.
/// @param rows  the query rows that the mean is over, in rising order; none: all. Some hundred at
///              random are enough for a step of training, and cost in proportion.
/// @param pattern  which pairs are visible and which of them local or sinks
/// @param score    scale and softcap
/// @param exec  where the loops run; the same bits for any number of threads
/// @returns L in natural units; +inf where a row keeps nothing (such a row gives no gradient); a
///          row that sees no key counts as 0
/// @throws invalid_argument before anything is written
///
/// Memory is O(n (d + K)).
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<2> QueryAssignment,
          tensor_like<2> KeyAssignment,
          mutable_tensor_like<2> DqueryAssignment = matrix_view<float>,
          mutable_tensor_like<2> DkeyAssignment = matrix_view<float>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
double retained_mass_loss(const Q& q, const K& k, const QueryAssignment& query_assignment,
                          const KeyAssignment& key_assignment,
                          DqueryAssignment&& dquery_assignment = {},
                          DkeyAssignment&& dkey_assignment = {}, std::span<const index_t> rows = {},
                          const pattern_options& pattern = {}, const score_options& score = {},
                          Exec&& exec = {}) {
  constexpr const char* name = "retained_mass_loss";
  const auto args =
      detail::check_mass_arguments(name, detail::as_const_view(q), detail::as_const_view(k));
  const auto assignments = detail::check_gate_gradients(
      name, args, detail::as_const_view(query_assignment), detail::as_const_view(key_assignment),
      detail::as_view(dquery_assignment), detail::as_view(dkey_assignment));
  detail::check_rows(name, rows, args.shape.n_q);
  detail::validate(pattern, name);
  detail::validate(score, name);
  using A = typename decltype(args)::accumulator;
  const detail::attention_shape& s = args.shape;
  return detail::run_retained_mass(args, assignments, rows, detail::resolve(pattern, s.n_q, s.n_k),
                                   detail::resolve<A>(score, s.head_dim),
                                   detail::any_executor(exec));
}

}  // namespace FOCUS_ABI
}  // namespace focus
