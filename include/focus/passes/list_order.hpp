// The pass over a plan's lists: list by list, with the list's keys packed when their turn comes.
#pragma once

#include <algorithm>
#include <iterator>
#include <span>

#include "focus/checks/attention_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/pack.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/query_tile.hpp"
#include "focus/kernel/row_prefetcher.hpp"
#include "focus/kernel/rules.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/passes/cell_order.hpp"
#include "focus/passes/saved_rows.hpp"
#include "focus/passes/token_order.hpp"
#include "focus/passes/window.hpp"
#include "focus/plan/cells.hpp"
#include "focus/routing_plan.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Attention over the lists of a plan, for run_call. Each row goes on from the running softmax that
/// local pairs, sinks and its lists so far have left.
///
/// Where there are kv heads enough, each is a task of its own: its worker goes list by list, and
/// only the list at hand is packed, into an area that stays in L2. Else all lists are packed first,
/// and a task is some rows of a query head, with all their lists: no task waits for another.
template <class E>
class list_order_run {
  using A = accumulator_t<E>;
  static constexpr index_t tile_rows = tile_sizes<E>::tile_rows;

 public:
  list_order_run(scratch_plan& scratch, const attention_shape& s, index_t workers,
                 const routing_plan& plan, const resolved_pattern& pattern,
                 const resolved_score<A>& score, const left_in_place& in_place)
      : plan_(&plan),
        pattern_(pattern),
        softcap_(score.softcap),
        factor_(query_factor(score)),
        workers_(workers),
        heads_apart_(are_heads_apart(s.kv_heads, workers)),
        kv_at_once_(heads_apart_ && in_place.heads_side_by_side
                        ? (std::max<index_t>)(ceil_div(s.kv_heads, workers), 1)
                        : 1),
        task_rows_(heads_apart_ ? s.n_q : rows_of_task(s, workers)),
        heads_at_once_(
            detail::heads_at_once(s, ceil_div(s.n_q, (std::max<index_t>)(task_rows_, 1)), workers)),
        window_(scratch, s, workers, pattern, score, in_place, task_rows_),
        packer_(scratch, heads_apart_ ? workers : heads_at_once_,
                heads_apart_ ? longest_list() : std::ssize(plan.key_slots()), s.head_dim,
                s.value_dim),
        layout_(scratch, workers, s.head_dim, s.value_dim),
        saved_(scratch,
               (heads_apart_ ? workers * kv_at_once_ : heads_at_once_) * s.queries_per_kv_head(),
               s.n_q, s.value_dim, in_place.accumulators) {}

  template <class Arguments>
  void run(const Arguments& args, const scratch_memory& memory, const any_executor& exec) const {
    const index_t group = args.shape.queries_per_kv_head();
    if (heads_apart_) {
      const index_t kv_heads = args.shape.kv_heads;
      exec.parallel_for(ceil_div(kv_heads, kv_at_once_), [&](index_t task, index_t worker) {
        const index_t kv = task * kv_at_once_;
        const head_block heads{kv, (std::min)(kv + kv_at_once_, kv_heads), kv * group, group};
        attend_rows(args, heads, {0, args.shape.n_q}, memory, worker, worker * kv_at_once_ * group);
      });
      return;
    }
    const index_t tasks_a_head = ceil_div(args.shape.n_q, task_rows_);
    for_each_head_batch(args, heads_at_once_, [&](const Arguments& part) {
      packer_.pack(memory, part.k, part.v, token_of(), exec);
      exec.parallel_for(tasks_a_head * part.shape.heads, [&](index_t task, index_t worker) {
        // Last rows first: they see the most keys, and the largest task should not come last.
        const index_t head = task % part.shape.heads;
        const index_t first = (tasks_a_head - 1 - task / part.shape.heads) * task_rows_;
        attend_rows(part, one_head(head, head / group),
                    {first, (std::min)(first + task_rows_, part.shape.n_q)}, memory, worker, head);
      });
    });
  }

 private:
  /// Whether no worker has to wait long for the others when each takes a whole kv head at a time.
  static bool are_heads_apart(index_t kv_heads, index_t workers) noexcept {
    if (workers <= 1) return true;
    const index_t turns = ceil_div(kv_heads, workers);
    constexpr index_t fewest_turns = 4, most_idle = 16;  // of the workers' turns, one in so many
    return turns >= fewest_turns && (turns * workers - kv_heads) * most_idle <= turns * workers;
  }
  /// Rows of a task where heads are not: enough for tiles of most lists to be full, few enough to
  /// give each worker some tasks.
  index_t rows_of_task(const attention_shape& s, index_t workers) const noexcept {
    constexpr index_t tasks_a_worker = 6, fewest_rows = 256;
    const index_t lists = std::ssize(plan_->key_runs());
    const index_t full = (std::max)(tile_rows * (std::max<index_t>)(lists, 1), fewest_rows);
    const index_t shared_out = s.n_q * s.heads / (std::max<index_t>)(tasks_a_worker * workers, 1);
    return round_up(std::clamp(shared_out, fewest_rows, full), tile_rows);
  }
  [[nodiscard]] index_t longest_list() const noexcept {
    index_t longest = 0;
    for (const token_run& list : plan_->key_runs())
      longest = (std::max)(longest, list.end - list.begin);
    return longest;
  }
  [[nodiscard]] auto token_of() const noexcept {
    return [tokens = plan_->key_slots()](index_t slot) {
      return tokens[static_cast<std::size_t>(slot)];
    };
  }

  /// The places in query_order() of a list's queries that are among `rows`.
  [[nodiscard]] task_range queries_of(index_t list, task_range rows) const noexcept {
    const token_run& queries = plan_->list_queries(list);
    const auto order = plan_->query_order();
    const auto first_from = [&](index_t row) {
      return std::lower_bound(order.begin() + queries.begin, order.begin() + queries.end, row) -
             order.begin();
    };
    return {first_from(rows.begin), first_from(rows.end)};
  }

  /// All of some rows of some heads. area: where the first head's rows are saved.
  template <class Arguments>
  void attend_rows(const Arguments& args, const head_block& heads, task_range rows,
                   const scratch_memory& memory, index_t worker, index_t area) const {
    query_tile<E> tile(memory, layout_, worker);
    window_.attend(
        args, heads, rows, tile, memory, worker,
        [&](row_prefetcher& ahead, index_t tiles_left) {
          if (heads_apart_ && workers_ == 1) ask_for_first_list(args, heads, tiles_left, ahead);
        },
        [&](const query_tile<E>& done, index_t head, index_t first) {
          for (index_t r = 0; r < done.rows(); ++r)
            if (plan_->groups_of(first + r) == 0)
              detail::write_row(args, done, r, head, first + r);
            else
              saved_.save(memory, args, done, r, area + head - heads.first, head, first + r);
        });
    const auto lists = plan_->key_runs();
    for (index_t list = 0; list < std::ssize(lists); ++list) {
      const token_run& run = lists[static_cast<std::size_t>(list)];
      for (index_t kv = heads.first_kv; kv < heads.end_kv; ++kv) {
        packed_keys<E> keys;
        if (heads_apart_) {
          packer_.pack_slots(memory, worker, args.k, args.v, kv, run.begin, run.end, 0, token_of());
          keys = packer_.from(memory, worker, 0, run.begin);
        } else {
          keys = packer_.from(memory, kv, run.begin, run.begin);
        }
        keys.blocks_from_first = true;
        attend_list(args, heads, kv, list, rows, keys, tile, memory, area);
      }
    }
  }

  /// The rows of one list, of the query heads of one kv head.
  template <class Arguments>
  void attend_list(const Arguments& args, const head_block& block, index_t kv, index_t list,
                   task_range rows, const packed_keys<E>& keys, query_tile<E>& tile,
                   const scratch_memory& memory, index_t area) const {
    const head_group heads = block.of(kv);
    const bool last_kv = kv + 1 == block.end_kv;
    const index_t next_kv = last_kv ? block.first_kv : kv + 1,
                  next_list = last_kv ? list + 1 : list;
    const task_range queries = queries_of(list, rows);
    const index_t tiles = ceil_div(queries.end - queries.begin, tile_rows);
    const index_t steps = tiles * (heads.end - heads.first);
    row_prefetcher ahead;
    for (index_t step = 0; step < steps; ++step) {
      const index_t head = heads.first + step / tiles;
      const index_t begin = queries.begin + step % tiles * tile_rows;
      const index_t end = (std::min)(begin + tile_rows, queries.end);
      ahead.clear();
      if (step + 1 < steps) {
        const index_t next = queries.begin + (step + 1) % tiles * tile_rows;
        ask_for_queries(args, heads.first + (step + 1) / tiles, next, queries.end, ahead);
      } else {
        ask_for_next(args, block, next_kv, next_list, rows, ahead);
      }
      if (heads_apart_) ask_for_keys(args, next_kv, next_list, step, steps, ahead);
      attend_tile(args, head, list, {begin, end}, keys, ahead, tile, memory,
                  area + head - block.first);
    }
  }

  /// One tile of a list's queries; places: in query_order().
  template <class Arguments>
  void attend_tile(const Arguments& args, index_t head, index_t list, task_range places,
                   const packed_keys<E>& keys, row_prefetcher& ahead, query_tile<E>& tile,
                   const scratch_memory& memory, index_t area) const {
    const index_t rows = places.end - places.begin;
    const index_t* row = plan_->query_order().data() + places.begin;
    const token_run& run = plan_->key_runs()[static_cast<std::size_t>(list)];
    tile.take_queries(rows, factor_, [&](index_t r) { return args.q.row(head, row[r]); });
    tile.prefetch(ahead);
    for (index_t r = 0; r < rows; ++r) {
      constexpr index_t soon = 4;
      if (r + soon < rows) saved_.prefetch(memory, args, area, head, row[r + soon]);
      if (window_.any() || (plan_->groups_of(row[r]) & (run.mask - 1)) != 0)
        saved_.restore(memory, args, tile, r, area, head, row[r]);
      else
        tile.clear_row(r);
    }
    detail::attend_list(tile, *plan_, list, places.begin,
                        [&](const auto& rules) { tile.attend(keys, softcap_, rules); });
    for (index_t r = 0; r < rows; ++r)
      if ((plan_->groups_of(row[r]) & ~(run.mask | (run.mask - 1))) == 0)
        detail::write_row(args, tile, r, head, row[r]);
      else
        saved_.save(memory, args, tile, r, area, head, row[r]);
  }

  // What is to come, so that it is on its way to L2: queries and output rows of the next tile, and
  // a tile's share of the next list's keys.

  template <class Arguments>
  void ask_for_queries(const Arguments& args, index_t head, index_t place, index_t end,
                       row_prefetcher& ahead) const noexcept {
    const index_t rows = (std::min)(tile_rows, end - place);
    ahead.add(args.q, head, place, rows, plan_->query_order().data());
    ahead.add(args.out, head, place, rows, plan_->query_order().data());
  }
  template <class Arguments>
  void ask_for_keys(const Arguments& args, index_t kv, index_t list, index_t step, index_t steps,
                    row_prefetcher& ahead) const noexcept {
    if (list >= std::ssize(plan_->key_runs())) return;
    const token_run& run = plan_->key_runs()[static_cast<std::size_t>(list)];
    const index_t count = run.end - run.begin;
    const index_t row_bytes =
        (args.shape.head_dim + args.shape.value_dim) * static_cast<index_t>(sizeof(E));
    if (count * row_bytes > packed_bytes) return;
    const index_t first = run.begin + count * step / steps;
    const index_t share = run.begin + count * (step + 1) / steps - first;
    ahead.add(args.k, kv, first, share, plan_->key_slots().data());
    ahead.add(args.v, kv, first, share, plan_->key_slots().data());
  }
  /// Behind the last tile of a list: the first of the next, or of the next kv head.
  template <class Arguments>
  void ask_for_next(const Arguments& args, const head_block& block, index_t kv, index_t list,
                    task_range rows, row_prefetcher& ahead) const noexcept {
    if (list < std::ssize(plan_->key_runs())) {
      const task_range queries = queries_of(list, rows);
      ask_for_queries(args, block.of(kv).first, queries.begin, queries.end, ahead);
    } else if (heads_apart_ && workers_ == 1 && block.end_kv < args.shape.kv_heads) {
      const index_t count = (std::min)(tile_rows, args.shape.n_q);
      const index_t head = block.of(block.end_kv).first;
      ahead.add(args.q, head, 0, count);
      ahead.add(args.out, head, 0, count);
      const index_t keys = (std::min)(count + pattern_.query_offset, args.shape.n_k);
      ahead.add(args.k, block.end_kv, 0, keys);
      ahead.add(args.v, block.end_kv, 0, keys);
    }
  }
  template <class Arguments>
  void ask_for_first_list(const Arguments& args, const head_block& heads, index_t tiles_left,
                          row_prefetcher& ahead) const noexcept {
    constexpr index_t last_tiles = 4;
    if (tiles_left >= last_tiles || plan_->key_runs().empty()) return;
    ask_for_keys(args, heads.first_kv, 0, last_tiles - 1 - tiles_left, last_tiles, ahead);
    if (tiles_left > 0) return;
    const task_range queries = queries_of(0, {0, args.shape.n_q});
    ask_for_queries(args, heads.first, queries.begin, queries.end, ahead);
  }

  const routing_plan* plan_;
  resolved_pattern pattern_;
  A softcap_, factor_;
  index_t workers_;
  bool heads_apart_;
  index_t kv_at_once_;
  index_t task_rows_, heads_at_once_;
  // Each plans its part of the scratch memory, in this order.
  window_pass<E> window_;
  key_packer<E> packer_;  // of each worker the list at hand, or of each kv head all lists
  query_tile_layout<E> layout_;
  saved_rows<E> saved_;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
