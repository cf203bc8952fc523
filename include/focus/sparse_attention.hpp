// Hard Focus attention: exactly the pairs of a routing plan.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <string>

#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/plan_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/pack.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/query_tile.hpp"
#include "focus/kernel/rules.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/passes/cell_order.hpp"
#include "focus/passes/token_order.hpp"
#include "focus/plan/cells.hpp"
#include "focus/routing_plan.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Sparse attention after its checks.
template <class E, class Arguments>
void run_sparse_attention(const Arguments& args, const routing_plan& plan,
                          const resolved_pattern& pattern,
                          const resolved_score<accumulator_t<E>>& score, const any_executor& exec) {
  using A = accumulator_t<E>;
  if (plan.layout() == plan_layout::pair_by_pair)
    return run_in_token_order<E>(
        args, score, exec, [&](query_tile<E>& tile, const packed_keys<E>& keys, index_t first) {
          attend_pair_by_pair(tile, plan, pattern, first,
                              [&](const keys_without_shared_group& rules) {
                                tile.attend(keys, score.softcap, rules);
                              });
        });
  if (plan.tiles().empty()) return run_attention<E>(args, pattern, score, exec);

  const attention_shape& s = args.shape;
  const bool any_local = pattern.window >= 0 || pattern.sinks > 0;
  const index_t saved_size = query_tile<E>::saved_size(s.value_dim);
  const auto slots = static_cast<index_t>(plan.key_slots().size());
  // All rows are in the first round.
  const index_t batch =
      heads_at_once(s, plan.round(0).end - plan.round(0).begin, exec.concurrency());
  // The keys in token order are done with when those of the cells are packed.
  scratch_plan scratch, same_scratch;
  const key_packer<E> local_packer(scratch, batch, any_local ? s.n_k : 0, s.head_dim, s.value_dim);
  const key_packer<E> cell_packer(same_scratch, batch, slots, s.head_dim, s.value_dim);
  scratch.cover(same_scratch);
  const query_tile_layout<E> layout(scratch, exec.concurrency(), s.head_dim, s.value_dim);
  const scratch_array<A> saved_rows = scratch.add<A>(
      any_local || plan.rounds() > 1 ? batch * s.queries_per_kv_head() * s.n_q * saved_size : 0);
  const scratch_memory memory(exec, scratch);
  const auto saved_row = [&](index_t head, index_t i) {
    return memory[saved_rows] + (head * s.n_q + i) * saved_size;
  };
  const A factor = query_factor(score);

  for_each_head_batch(args, batch, [&](const Arguments& part) {
    const index_t heads = part.shape.heads;
    if (any_local) {
      local_packer.pack_in_token_order(memory, part.k, part.v, exec);
      for_each_query_tile<E>(
          heads, s.n_q, exec, [&](index_t head, index_t first, index_t rows, index_t worker) {
            query_tile<E> tile(memory, layout, worker);
            tile.begin(rows, factor, [&](index_t r) { return part.q.row(head, first + r); });
            const packed_keys<E> keys = local_packer.head(memory, head / s.queries_per_kv_head());
            attend_local(tile, pattern, first, [&] { tile.attend(keys, score.softcap); });
            for (index_t r = 0; r < rows; ++r) tile.save_row(r, saved_row(head, first + r));
          });
    }
    cell_packer.pack(
        memory, part.k, part.v,
        [&](index_t slot) { return plan.key_slots()[static_cast<std::size_t>(slot)]; }, exec);
    for (index_t round = 0; round < plan.rounds(); ++round) {
      const task_range tiles = plan.round(round);
      const bool goes_on = any_local || round > 0;
      exec.parallel_for((tiles.end - tiles.begin) * heads, [&](index_t task, index_t worker) {
        const index_t head = task % heads;
        const row_tile& rows = plan.tiles()[static_cast<std::size_t>(tiles.begin + task / heads)];
        const index_t* row = plan.query_order().data() + rows.begin;
        query_tile<E> tile(memory, layout, worker);
        tile.begin(rows.rows, factor, [&](index_t r) { return part.q.row(head, row[r]); });
        for (index_t r = 0; r < rows.rows; ++r) {
          // Where the tile will write, rows apart from one another.
          if (plan.is_last_tile_of(rows, row[r]))
            detail::prefetch_row(part.out.row(head, row[r]), s.value_dim);
          if (!goes_on) continue;
          if (r + 4 < rows.rows) prefetch_row(saved_row(head, row[r + 4]), saved_size);
          tile.restore_row(r, saved_row(head, row[r]));
        }
        const packed_keys<E> keys = cell_packer.head(memory, head / s.queries_per_kv_head());
        attend_distant(tile, plan, rows, pattern,
                       [&](const auto& rules) { tile.attend(keys, score.softcap, rules); });
        for (index_t r = 0; r < rows.rows; ++r)
          if (plan.is_last_tile_of(rows, row[r]))
            detail::write_row(part, tile, r, head, row[r]);
          else
            tile.save_row(r, saved_row(head, row[r]));
      });
    }
  });
}

}  // namespace detail

/// Softmax attention over exactly the pairs that `plan` allows (section 1, step 4 of the method):
/// local pairs, sinks, and pairs with a group in common. Pruned pairs never enter the softmax.
///
///   out_i = sum_j softmax_j(s_ij) v_j,   s_ij = softcap(scale * q_i . k_j),   (i, j) allowed
///
/// @param q    [heads, n_q, head_dim], any strides but the last; n_q and n_k are those of the plan
/// @param k    [kv_heads, n_k, head_dim]; query head h reads kv head h / (heads / kv_heads)
/// @param v    [kv_heads, n_k, value_dim]
/// @param plan from make_routing_plan; the same for all heads
/// @param out  [heads, n_q, value_dim]; a row that sees no key is zeros. May not overlap another
///             argument; slices of one fused buffer may interleave.
/// @param score  scale and softcap
/// @param lse  [heads, n_q] or {}: log sum_j exp(s_ij), natural logarithm; -inf for a row that sees
///             no key
/// @param exec where the loops run
/// @throws invalid_argument before anything is written
///
/// Local pairs and sinks are a window pass in token order; distant pairs are walked by cells, or by
/// the lists of a query's groups one after the other, and go on from the running softmax of what
/// went before, so that nothing is computed twice and nothing has to be merged. bfloat16 products:
/// as attention says. Memory: a packed copy of K and V (of a key for each of its groups, at most
/// four, where lists are walked), and the running softmax of each query row: O((n_q + n_k) d) a
/// head.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, mutable_tensor_like<3> Out,
          mutable_tensor_like<2> Lse = matrix_view<float>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void sparse_attention(const Q& q, const K& k, const V& v, const routing_plan& plan, Out&& out,
                      const score_options& score = {}, Lse&& lse = {}, Exec&& exec = {}) {
  constexpr const char* name = "sparse_attention";
  const auto args = detail::check_attention_arguments(name, q, k, v, out, lse);
  detail::validate(score, name);
  detail::check_plan_lengths(plan, args.shape, name);
  using A = typename decltype(args)::accumulator;
  detail::with_operands<decltype(args)>([&]<class E>() {
    detail::run_sparse_attention<E>(args, plan, detail::resolve(plan, args.shape),
                                    detail::resolve<A>(score, args.shape.head_dim),
                                    detail::any_executor(exec));
  });
}

}  // namespace FOCUS_ABI
}  // namespace focus
