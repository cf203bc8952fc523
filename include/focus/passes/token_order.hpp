// The pass over keys in token order: dense attention, the window and the sinks.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "focus/checks/attention_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/amx.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/pack.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/query_tile.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// What the packed queries are multiplied by, so that scores come in units of log2, or, where they
/// are capped, as the argument of tanh.
template <class A>
A query_factor(const resolved_score<A>& score) noexcept {
  constexpr A highest = (std::numeric_limits<A>::max)();
  const A factor = score.softcap > 0 ? score.scale / score.softcap : score.scale * log2_e<A>;
  // A finite scale stays finite: 0 times it is 0.
  return score.scale >= -highest && score.scale <= highest ? std::clamp(factor, -highest, highest)
                                                           : factor;
}

/// A loop over heads and tiles of query rows, last rows first: they see the most keys, and the
/// largest task should not come last. body(head, first row, rows, worker).
template <class E, class F>
void for_each_query_tile(index_t heads, index_t n_q, const any_executor& exec, F&& body) {
  constexpr index_t tile_rows = tile_sizes<E>::tile_rows;
  const index_t tiles = ceil_div(n_q, tile_rows);
  exec.parallel_for(heads * tiles, [&](index_t task, index_t worker) {
    const index_t first = (tiles - 1 - task / heads) * tile_rows;
    body(task % heads, first, (std::min)(tile_rows, n_q - first), worker);
  });
}

/// How many kv heads to pack and attend to at a time: few, so that what was packed is still in the
/// cache when it is used; enough to give each thread several tasks. tasks_a_head: those of a query
/// head.
inline index_t heads_at_once(const attention_shape& shape, index_t tasks_a_head,
                             index_t threads) noexcept {
  constexpr index_t tasks_a_thread = 8;
  if (threads <= 1) return (std::min<index_t>)(shape.kv_heads, 1);
  const index_t tasks = (std::max<index_t>)(tasks_a_head * shape.queries_per_kv_head(), 1);
  return (std::min)(ceil_div(tasks_a_thread * threads, tasks), shape.kv_heads);
}

/// Calls body(the arguments of some kv heads and their query heads) until all have had their turn.
template <class Arguments, class F>
void for_each_head_batch(const Arguments& args, index_t heads_at_once, F&& body) {
  for (index_t first = 0; first < args.shape.kv_heads; first += heads_at_once)
    body(args.heads_of(first, (std::min)(heads_at_once, args.shape.kv_heads - first)));
}

/// The pass over keys in token order: local pairs and sinks, which with an unlimited window is
/// dense attention. Sets the limits of the tile's rows and calls attend() for the window, and again
/// for sinks that lie apart from it.
template <walked_tile Tile, class Attend>
void attend_local(Tile& tile, const resolved_pattern& pattern, index_t first_row, Attend&& attend) {
  bool apart = false;
  for (index_t r = 0; r < tile.rows(); ++r) {
    const key_range local = pattern.local(first_row + r);
    const index_t sink_end = pattern.sink_end(first_row + r);
    apart |= !local.empty() && sink_end > 0 && sink_end < local.begin;
    // Where sinks and window meet they are one range.
    const bool meet = local.empty() || sink_end >= local.begin;
    tile.limit(r) =
        meet ? slot_range{sink_end > 0 ? 0 : local.begin, (std::max)(sink_end, local.end)}
             : slot_range{local.begin, local.end};
  }
  attend();
  if (!apart) return;
  for (index_t r = 0; r < tile.rows(); ++r) {
    const key_range local = pattern.local(first_row + r);
    const index_t sink_end = pattern.sink_end(first_row + r);
    tile.limit(r) =
        local.empty() || sink_end >= local.begin ? slot_range{} : slot_range{0, sink_end};
  }
  attend();
}

/// Whether bfloat16 may be multiplied as it is: AMX asks the operating system.
inline bool bfloat16_products_permitted() noexcept {
#if FOCUS_HAS_AMX
  return amx_permitted();
#else
  return FOCUS_HAS_BFLOAT16_PRODUCTS;
#endif
}

/// Calls f<E>() with the type E in which operands are packed: bfloat16 where all storage types are
/// that, the instruction set multiplies it as it is, and `permitted` agrees; else that of the sums.
template <class Arguments, class Permitted, class F>
void with_operands([[maybe_unused]] Permitted&& permitted, F&& f) {
  if constexpr (FOCUS_HAS_BFLOAT16_PRODUCTS && Arguments::all_bfloat16)
    if (permitted()) return f.template operator()<bfloat16>();
  f.template operator()<typename Arguments::accumulator>();
}
template <class Arguments, class F>
void with_operands(F&& f) {
  with_operands<Arguments>(bfloat16_products_permitted, std::forward<F>(f));
}

/// How a call's tensors lie: whether accumulators can lie in the output rows, and values be read
/// where they are, whole vectors of them; and whether a token's rows of all heads lie side by side
/// ([tokens, heads, head_dim], as engines have them). Then heads are best taken together: a page of
/// memory has few rows of one head.
struct left_in_place {
  bool accumulators = false, values = false;
  bool heads_side_by_side = false;
};

/// Whether all of T are of the type of the sums.
template <class Arguments, class T>
inline constexpr bool is_summed_as_stored =
    std::is_same_v<std::remove_cv_t<T>, typename Arguments::accumulator>;

/// Whether the rows of a window, which a tile goes through panel by panel, do not crowd into a few
/// sets of the L1 cache: those of heads side by side, a power of two apart, do.
inline bool spreads_over_cache(index_t stride_bytes) noexcept {
  constexpr index_t all_sets = 4096, row_bytes = 256;
  return std::gcd(stride_bytes, all_sets) <= row_bytes;
}

/// What can be left in place in a call with operands of type E.
template <class E, class Arguments>
left_in_place can_be_left(const Arguments& args) noexcept {
  using out_type = typename decltype(args.out)::value_type;
  using values_type = typename decltype(args.v)::value_type;
  constexpr bool same = is_summed_as_stored<Arguments, E>;
  const index_t stride = args.v.stride(Arguments::rank - 2);
  const auto magnitude = [](index_t x) {
    return x < 0 ? -x : x;
  };
  return {same && is_summed_as_stored<Arguments, out_type>,
          same && is_summed_as_stored<Arguments, values_type> &&
              args.shape.value_dim % tile_sizes<E>::lanes == 0 &&
              spreads_over_cache(stride * static_cast<index_t>(sizeof(E))),
          magnitude(args.k.stride(Arguments::rank - 3)) <
              magnitude(args.k.stride(Arguments::rank - 2))};
}

/// Attention with all keys in token order, for run_call. Walk: walk(tile, keys, first row), that of
/// a tile over the keys.
template <class E, class Walk>
class token_order_run {
  using A = accumulator_t<E>;

 public:
  token_order_run(scratch_plan& scratch, const attention_shape& s, index_t workers,
                  const resolved_score<A>& score, const Walk& walk)
      : heads_at_once_(
            detail::heads_at_once(s, ceil_div(s.n_q, tile_sizes<E>::tile_rows), workers)),
        packer_(scratch, heads_at_once_, s.n_k, s.head_dim, s.value_dim),
        layout_(scratch, workers, s.head_dim, s.value_dim),
        factor_(query_factor(score)),
        walk_(walk) {}

  template <class Arguments>
  void run(const Arguments& args, const scratch_memory& memory, const any_executor& exec) const {
    const attention_shape& s = args.shape;
    for_each_head_batch(args, heads_at_once_, [&](const Arguments& part) {
      packer_.pack_in_token_order(memory, part.k, part.v, exec);
      for_each_query_tile<E>(
          part.shape.heads, s.n_q, exec,
          [&](index_t head, index_t first, index_t rows, index_t worker) {
            query_tile<E> tile(memory, layout_, worker);
            tile.begin(rows, factor_, [&](index_t r) { return part.q.row(head, first + r); });
            walk_(tile, packer_.head(memory, head / s.queries_per_kv_head()), first);
            detail::write_rows(part, tile, head, [first](index_t r) { return first + r; });
          });
    });
  }

 private:
  index_t heads_at_once_;
  key_packer<E> packer_;
  query_tile_layout<E> layout_;
  A factor_;
  Walk walk_;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
