// Hard Focus attention: exactly the pairs of a routing plan.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
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
#include "focus/passes/list_order.hpp"
#include "focus/passes/saved_rows.hpp"
#include "focus/passes/sequences.hpp"
#include "focus/passes/token_order.hpp"
#include "focus/passes/window.hpp"
#include "focus/plan/cells.hpp"
#include "focus/routing_plan.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Attention over the cells of a plan, for run_call: local pairs and sinks in token order first,
/// whose running softmax each row goes on from.
template <class E>
class cell_order_run {
  using A = accumulator_t<E>;
  static constexpr index_t window_tiles = 4;  // of a task

 public:
  cell_order_run(scratch_plan& scratch, const attention_shape& s, index_t workers,
                 const routing_plan& plan, const resolved_pattern& pattern,
                 const resolved_score<A>& score, const left_in_place& in_place)
      : plan_(&plan),
        pattern_(pattern),
        softcap_(score.softcap),
        factor_(query_factor(score)),
        heads_at_once_(detail::heads_at_once(s, std::ssize(plan.tiles()), workers)),
        window_rows_(workers <= 1 ? s.n_q : window_tiles * tile_sizes<E>::tile_rows),
        window_(scratch, s, workers, pattern, score, in_place, window_rows_),
        packer_(scratch, heads_at_once_, std::ssize(plan.key_slots()), s.head_dim, s.value_dim),
        layout_(scratch, workers, s.head_dim, s.value_dim),
        saved_(scratch, window_.any() ? heads_at_once_ * s.queries_per_kv_head() : 0, s.n_q,
               s.value_dim, in_place.accumulators) {}

  template <class Arguments>
  void run(const Arguments& args, const scratch_memory& memory, const any_executor& exec) const {
    for_each_head_batch(args, heads_at_once_, [&](const Arguments& part) {
      if (window_.any()) run_window(part, memory, exec);
      packer_.pack(
          memory, part.k, part.v,
          [&](index_t slot) { return plan_->key_slots()[static_cast<std::size_t>(slot)]; }, exec);
      run_cells(part, memory, exec);
    });
  }

 private:
  template <class Arguments>
  void run_window(const Arguments& part, const scratch_memory& memory,
                  const any_executor& exec) const {
    const index_t n_q = part.shape.n_q, group = part.shape.queries_per_kv_head();
    const index_t ranges = ceil_div(n_q, window_rows_);
    exec.parallel_for(part.shape.heads * ranges, [&](index_t task, index_t worker) {
      const index_t head = task / ranges, first = task % ranges * window_rows_;
      query_tile<E> tile(memory, layout_, worker);
      window_.attend(
          part, one_head(head, head / group), {first, (std::min)(first + window_rows_, n_q)}, tile,
          memory, worker, [](row_prefetcher&, index_t) {},
          [&](const query_tile<E>& done, index_t, index_t row) {
            for (index_t r = 0; r < done.rows(); ++r)
              saved_.save(memory, part, done, r, head, head, row + r);
          });
    });
  }

  template <class Arguments>
  void run_cells(const Arguments& part, const scratch_memory& memory,
                 const any_executor& exec) const {
    const routing_plan& plan = *plan_;
    const index_t heads = part.shape.heads;
    exec.parallel_for(std::ssize(plan.tiles()) * heads, [&](index_t task, index_t worker) {
      const index_t head = task % heads;
      const row_tile& rows = plan.tiles()[static_cast<std::size_t>(task / heads)];
      const index_t* row = plan.query_order().data() + rows.begin;
      query_tile<E> tile(memory, layout_, worker);
      tile.take_queries(rows.rows, factor_, [&](index_t r) { return part.q.row(head, row[r]); });
      for (index_t r = 0; r < rows.rows; ++r) {
        constexpr index_t soon = 4;
        if (r + soon < rows.rows) saved_.prefetch(memory, part, head, head, row[r + soon]);
        if (window_.any())
          saved_.restore(memory, part, tile, r, head, head, row[r]);
        else
          tile.clear_row(r);
      }
      const packed_keys<E> keys = packer_.head(memory, head / part.shape.queries_per_kv_head());
      attend_distant(tile, plan, rows, pattern_,
                     [&](const auto& rules) { tile.attend(keys, softcap_, rules); });
      detail::write_rows(part, tile, head, [row](index_t r) { return row[r]; });
    });
  }

  const routing_plan* plan_;
  resolved_pattern pattern_;
  A softcap_, factor_;
  index_t heads_at_once_, window_rows_;
  // Each plans its part of the scratch memory, in this order.
  window_pass<E> window_;
  key_packer<E> packer_;
  query_tile_layout<E> layout_;
  saved_rows<E> saved_;
};

/// Sparse attention, for run_call. plans: of each sequence.
template <class E>
struct sparse_attention_call {
  std::span<const routing_plan> plans;
  resolved_score<accumulator_t<E>> score;
  left_in_place in_place = {};

  template <class F>
  void operator()(index_t sequence, scratch_plan& scratch, const attention_shape& shape,
                  index_t workers, F&& f) const {
    const routing_plan& plan = plans[static_cast<std::size_t>(sequence)];
    const resolved_pattern pattern = detail::resolve(plan, shape);
    if (plan.layout() == plan_layout::pair_by_pair) {
      const auto walk = [&](query_tile<E>& tile, const packed_keys<E>& keys, index_t first) {
        attend_pair_by_pair(tile, plan, pattern, first,
                            [&](const keys_without_shared_group& rules) {
                              tile.attend(keys, score.softcap, rules);
                            });
      };
      f(token_order_run<E, decltype(walk)>(scratch, shape, workers, score, walk));
    } else if (plan.tiles().empty()) {
      attention_call<E>{pattern, score, in_place}(sequence, scratch, shape, workers, f);
    } else if (plan.layout() == plan_layout::groups) {
      f(list_order_run<E>(scratch, shape, workers, plan, pattern, score, in_place));
    } else {
      f(cell_order_run<E>(scratch, shape, workers, plan, pattern, score, in_place));
    }
  }
};

/// Sparse attention after its checks.
template <class Arguments>
void run_sparse_attention(const Arguments& args, std::span<const routing_plan> plans,
                          const score_options& score, const any_executor& exec) {
  using A = typename Arguments::accumulator;
  const auto scoring = detail::resolve<A>(score, args.shape.head_dim);
  detail::with_operands<Arguments>([&]<class E>() {
    detail::run_call(args, exec, sparse_attention_call<E>{plans, scoring, can_be_left<E>(args)});
  });
}

}  // namespace detail

/// Softmax attention over exactly the pairs that `plan` allows (the top-k selection of arXiv
/// 2604.03260): local pairs, sinks, and pairs with a group in common. Pruned pairs never enter the
/// softmax.
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
/// as attention says. On the way, rows of `out` may hold sums. Memory: for each thread the packed
/// keys of a run of tiles, and those of the longest list, where there are four kv heads or more a
/// thread; else a packed copy of K and V (of a key for each of its groups, at most four, where
/// lists are walked); and the running softmax of each query row where `out` cannot hold it:
/// O((n_q + n_k) d) a head.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<3> V, mutable_tensor_like<3> Out,
          mutable_tensor_like<2> Lse = matrix_view<float>, class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void sparse_attention(const Q& q, const K& k, const V& v, const routing_plan& plan, Out&& out,
                      const score_options& score = {}, Lse&& lse = {}, Exec&& exec = {}) {
  constexpr const char* name = "sparse_attention";
  const auto args = detail::check_attention_arguments(name, q, k, v, out, lse);
  detail::validate(score, name);
  detail::check_plan_lengths(plan, args.shape, name);
  detail::run_sparse_attention(args, std::span(&plan, 1), score, detail::any_executor(exec));
}

/// The same for a batch of sequences of one length each, and one call for all of them: the same
/// bits as a loop of calls, but threads share out sequences and heads, where a short sequence alone
/// has little to share.
///
/// @param q     [batch, heads, n_q, head_dim], any strides but the last
/// @param k     [batch, kv_heads, n_k, head_dim]
/// @param v     [batch, kv_heads, n_k, value_dim]
/// @param plans batch of them (std::span, std::vector, std::array, ...), that of each sequence;
///              each made for n_q and n_k
/// @param out   [batch, heads, n_q, value_dim]. May not overlap another argument; slices of one
///              fused buffer may interleave.
/// @param lse   [batch, heads, n_q] or {}
///
/// The rest is as above. Memory: for each thread that of one kv head, of the sequence that needs
/// most; in a batch of fewer than twice as many kv heads as there are threads, that of a call for
/// one sequence.
template <tensor_like<4> Q, tensor_like<4> K, tensor_like<4> V, span_like<routing_plan> Plans,
          mutable_tensor_like<4> Out, mutable_tensor_like<3> Lse = tensor_view<float, 3>,
          class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void sparse_attention(const Q& q, const K& k, const V& v, const Plans& plans, Out&& out,
                      const score_options& score = {}, Lse&& lse = {}, Exec&& exec = {}) {
  constexpr const char* name = "sparse_attention";
  const auto args = detail::check_attention_arguments(name, q, k, v, out, lse);
  const std::span<const routing_plan> plan_span = detail::as_span(plans);
  detail::validate(score, name);
  detail::check_plans(plan_span, args.q.extent(0), args.shape, name);
  detail::run_sparse_attention(args, plan_span, score, detail::any_executor(exec));
}

}  // namespace FOCUS_ABI
}  // namespace focus
