// Softly gated attention (Eq. 2): all pairs are computed, and their routing decides how much each
// counts. For training.
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/gate_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/operand.hpp"
#include "focus/kernel/pack.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/query_tile.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tile.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/passes/token_order.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Packs the key assignments, once for all heads, as the keys of one: the products g_i . g_j are
/// then scores. width: how many of their elements to pack as values too.
template <class A, class G>
void pack_assignment(const key_packer<A>& packer, const scratch_memory& memory,
                     const matrix_view<const G>& assignment, index_t width,
                     const any_executor& exec) {
  const auto [n_k, groups] = assignment.extents();
  if (n_k == 0) return;
  const std::array<index_t, 3> strides{0, assignment.stride(0), 1};
  const tensor_view<const G, 3> keys(assignment.data(), {1, n_k, groups}, strides);
  const tensor_view<const G, 3> values(assignment.data(), {1, n_k, width}, strides);
  packer.pack_in_token_order(memory, keys, values, exec);
}

/// Each worker's scratch memory for the gates of a tile of operands E: its queries' assignments,
/// and the products g_i . g_j of a strip.
template <class E>
class gate_layout {
  using A = accumulator_t<E>;

 public:
  gate_layout(scratch_plan& plan, index_t workers, index_t groups) {
    scratch_plan one;
    queries_ = one.add<A>(query_rows_size<A>(groups));
    products_ = one.add<A>(tile_sizes<E>::strip_rows * tile_sizes<E>::score_stride);
    gates_ = plan.add_each(workers, one);
  }

  [[nodiscard]] A* queries(const scratch_memory& memory, index_t worker) const noexcept {
    return gates_.of(memory, worker)[queries_];
  }
  [[nodiscard]] A* products(const scratch_memory& memory, index_t worker) const noexcept {
    return gates_.of(memory, worker)[products_];
  }

 private:
  scratch_array<A> queries_, products_;
  worker_scratch gates_;
};

/// Sets the gates of a row's local and sink keys to `value`, in slots [base, base + count).
template <class A>
void fill_near(const resolved_pattern& pattern, index_t row, index_t base, index_t count, A* gates,
               A value) noexcept {
  const auto fill_range = [&](key_range keys) {
    const index_t begin = std::clamp(keys.begin, base, base + count);
    const index_t end = std::clamp(keys.end, begin, base + count);
    fill(gates + (begin - base), gates + (end - base), value);
  };
  fill_range(pattern.local(row));
  fill_range({0, pattern.sink_end(row)});
}

/// sigmoid(sharpness * p), in place.
template <class A>
void sigmoid_gates(index_t count, A sharpness, A* gates) noexcept {
  const vec<A> factor = vec<A>::broadcast(sharpness);
  for (index_t j = 0; j < count; j += vec<A>::width)
    sigmoid<A>(vec<A>::load(gates + j) * factor).store(gates + j);
}

template <class A>
void multiply_scores(index_t count, const A* gates, A* scores) noexcept {
  for (index_t j = 0; j < count; j += vec<A>::width)
    (vec<A>::load(scores + j) * vec<A>::load(gates + j)).store(scores + j);
}

/// Splits p = m 2^e so that p 2^s = m 2^(s + e): s takes the exponent and gates keep the mantissa.
/// The running maximum then bounds the gated weights, however small p is, at no cost of a
/// logarithm. p = 0 hides the pair.
template <class A>
void split_gates(index_t count, A* gates, A* scores) noexcept {
  const vec<A> hidden = vec<A>::broadcast(lowest<A>);
  // Subnormal products are lifted into the normal range first.
  const vec<A> lowest_normal = vec<A>::broadcast(sizeof(A) == 4 ? A(0x1p-62) : A(0x1p-900));
  const vec<A> lift = vec<A>::broadcast(A(0x1p64) - 1), lift_exponent = vec<A>::broadcast(A{64});
  for (index_t j = 0; j < count; j += vec<A>::width) {
    const vec<A> p = vec<A>::load(gates + j);
    const vec<A> lifted = fma(p, zero_where_less(lift, lowest_normal, p), p);
    const vec<A> e = exponent(lifted) - zero_where_less(lift_exponent, lowest_normal, p);
    where_zero(p, hidden, vec<A>::load(scores + j) + e).store(scores + j);
    // NaN and infinite p have no mantissa: 0 * p makes them NaN.
    where_zero(p, p, fma(p, vec<A>::zero(), mantissa(lifted))).store(gates + j);
  }
}

/// Adds a block of keys to the running softmax of one strip, gated. gates: where the strip's
/// products g_i . g_j are made, of assignments in the type of the sums whatever E is.
template <int Rows, class E, class A = accumulator_t<E>>
void attend_gated_block(const strip_state<E>& strip, const packed_keys<E>& keys, slot_range block,
                        A softcap, const gate_options& gate, const A* query_gates,
                        const packed_keys<A>& key_gates, const resolved_pattern& pattern,
                        index_t first_row, A* scores, A* gates) {
  constexpr int lanes = vec<A>::width, panel = tile_sizes<E>::panel,
                step = tile_sizes<E>::slot_step, stride = tile_sizes<E>::score_stride;
  const slot_range seen = visible_slots<Rows>(strip.limit, block);
  if (seen.begin >= seen.end) return;
  const index_t base = seen.begin / panel * panel;
  const index_t count = round_up(seen.end - base, (std::max)(lanes, step));
  const slot_range taken{seen.begin / step * step, round_up(seen.end, step)};
  const bool by_weight = gate.kind == gate_kind::weight;

  operand<E>::template score_slots<Rows>(strip.query, keys, base, seen.end, scores);
  // An exponent is added to scores in units of log2, a sigmoid may be multiplied by before the
  // factor.
  const A factor = strip.factor.template apply<Rows>(scores, count, softcap > 0 || by_weight);
  if (softcap > 0) cap_scores<Rows>(scores, count, softcap);
  score_strip<Rows>(query_gates, key_gates, base, base + count, gates);
  // A gate factor of NaN would outlast the weight of 0 that a hidden pair gets.
  if (by_weight) hide_outside<Rows>(strip.limit, taken, base, count, gates, A{0});
  for (int r = 0; r < Rows; ++r) {
    A* row_gates = gates + r * stride;
    A* row_scores = scores + r * stride;
    if (!by_weight) sigmoid_gates(count, saturated<A>(gate.sharpness), row_gates);
    fill_near(pattern, first_row + r, base, count, row_gates, A{1});
    if (by_weight)
      split_gates(count, row_gates, row_scores);
    else
      multiply_scores(count, row_gates, row_scores);
  }
  const bool partial = hide_outside<Rows>(strip.limit, taken, base, count, scores) || by_weight;
  A rescale[tile_sizes<E>::strip_rows + lanes];
  update_softmax<Rows>(strip, scores, base, count, rescale, factor, by_weight ? gates : nullptr);

  const A* weights = scores + (taken.begin - base);
  if (!partial || !keys.may_be_nonfinite(seen.begin, seen.end)) {
    operand<E>::template accumulate<Rows>(strip, keys, taken, weights, rescale);
  } else {
    operand<E>::template accumulate_seen<Rows>(
        strip, keys, taken, weights, rescale, [&](int r, index_t slot) {
          return slot >= strip.limit[r].begin && slot < strip.limit[r].end &&
                 (!by_weight || !is_zero(gates[r * stride + slot - base]));
        });
  }
}

/// Softly gated attention after its checks.
template <class E, class Arguments, class A, class GQ, class GK>
void run_soft_gate(const Arguments& args, const matrix_view<const GQ>& query_assignment,
                   const matrix_view<const GK>& key_assignment, index_t groups,
                   const gate_options& gate, const resolved_pattern& pattern,
                   const resolved_score<A>& score, const any_executor& exec) {
  const attention_shape& s = args.shape;
  const index_t batch =
      heads_at_once(s, ceil_div(s.n_q, tile_sizes<E>::tile_rows), exec.concurrency());
  scratch_plan plan;
  const key_packer<E> packer(plan, batch, s.n_k, s.head_dim, s.value_dim);
  const query_tile_layout<E> layout(plan, exec.concurrency(), s.head_dim, s.value_dim);
  const key_packer<A> gate_packer(plan, 1, s.n_k, groups, 0);
  const gate_layout<E> gates(plan, exec.concurrency(), groups);
  const scratch_memory memory(exec, plan);

  pack_assignment(gate_packer, memory, key_assignment, 0, exec);
  const packed_keys<A> key_gates = gate_packer.head(memory, 0);
  for_each_head_batch(args, batch, [&](const Arguments& part) {
    packer.pack_in_token_order(memory, part.k, part.v, exec);
    for_each_query_tile<E>(
        part.shape.heads, s.n_q, exec,
        [&](index_t head, index_t first, index_t rows, index_t worker) {
          query_tile<E> tile(memory, layout, worker);
          tile.begin(rows, query_factor(score),
                     [&](index_t r) { return part.q.row(head, first + r); });
          A* const query_gates = gates.queries(memory, worker);
          detail::pack_queries_of_strips<E>(
              rows, groups, [&](index_t r) { return query_assignment.row(first + r); },
              query_gates);
          for (index_t r = 0; r < rows; ++r) tile.limit(r) = {0, pattern.visible_end(first + r)};
          const packed_keys<E> keys = packer.head(memory, head / s.queries_per_kv_head());
          tile.attend_strips(keys, [&](auto strip, const strip_state<E>& state, index_t strip_first,
                                       slot_range block) {
            attend_gated_block<strip()>(state, keys, block, score.softcap, gate,
                                        query_gates + strip_first * tile_sizes<A>::depth_chunk,
                                        key_gates, pattern, first + strip_first, tile.scores(),
                                        gates.products(memory, worker));
          });
          detail::write_rows(part, tile, head, [first](index_t r) { return first + r; });
        });
  });
}

}  // namespace detail

/// Attention over all visible pairs, with the pairs that are neither local nor sinks gated by p_ij
/// = g_i . g_j.
///
///   gate_kind::score (Eq. 2)   out_i = sum_j softmax_j(s_ij sigmoid(sharpness p_ij)) v_j
///   gate_kind::weight          out_i = sum_j p_ij exp(s_ij) v_j / sum_j p_ij exp(s_ij)
///
/// Local and sink pairs are not gated: their score stands, and their p is 1. The `weight` gate is
/// the expected hard mask: with one-hot assignments it computes what sparse_attention computes, and
/// p_ij = 0 prunes exactly, NaN in that key included. As printed, the `score` gate halves the score
/// of an unrelated pair (sigmoid(0) = 1/2) and prunes nothing. Where sums are in float, so is p:
/// shares whose product is below about 1e-38 prune the pair.
///
/// @param q    [heads, n_q, head_dim], any strides but the last
/// @param k    [kv_heads, n_k, head_dim]; query head h reads kv head h / (heads / kv_heads)
/// @param v    [kv_heads, n_k, value_dim]
/// @param query_assignment  g of the queries, [n_q, K], not negative, 1 <= K <= 64: float, or
///             double with double q, k, v
/// @param key_assignment    g of the keys, [n_k, K]; may be the same as query_assignment
/// @param gate what is gated, and lambda
/// @param out  [heads, n_q, value_dim]; a row that sees no key is zeros. May not overlap another
///             argument; slices of one fused buffer may interleave.
/// @param pattern  which pairs are visible at all (causality) and which of them are local or sinks
/// @param score    scale and softcap (capped before gating)
/// @param lse  [heads, n_q] or {}: log of the sum of exp(gated score), or of p exp(s), natural
///             logarithm; -inf for a row that sees no key
/// @param exec where the loops run
/// @throws invalid_argument before anything is written
///
/// bfloat16 products: as attention says; the gated weights are what is rounded. The gates are in
/// float all the same.
///
/// Memory: packed copies of K, V and the key assignments, O(n_k (d + K)); nothing of size n_q n_k.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, tensor_like<2> QueryAssignment,
          tensor_like<2> KeyAssignment, mutable_tensor_like<3> Out,
          mutable_tensor_like<2> Lse = matrix_view<float>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void soft_gate_attention(const Q& q, const K& k, const V& v,
                         const QueryAssignment& query_assignment,
                         const KeyAssignment& key_assignment, const gate_options& gate, Out&& out,
                         const pattern_options& pattern = {}, const score_options& score = {},
                         Lse&& lse = {}, Exec&& exec = {}) {
  constexpr const char* name = "soft_gate_attention";
  const auto args = detail::check_attention_arguments(name, q, k, v, out, lse);
  const auto g_q = detail::as_const_view(query_assignment);
  const auto g_k = detail::as_const_view(key_assignment);
  const index_t groups = detail::check_gate_arguments(name, args, g_q, g_k);
  detail::validate(gate, name);
  detail::validate(pattern, name);
  detail::validate(score, name);
  using A = typename decltype(args)::accumulator;
  const detail::attention_shape& s = args.shape;
  const auto resolved = detail::resolve(pattern, s.n_q, s.n_k);
  const auto scoring = detail::resolve<A>(score, s.head_dim);
  detail::with_operands<decltype(args)>([&]<class E>() {
    detail::run_soft_gate<E>(args, g_q, g_k, groups, gate, resolved, scoring,
                             detail::any_executor(exec));
  });
}

}  // namespace FOCUS_ABI
}  // namespace focus
