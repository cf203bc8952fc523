// The pass over local pairs and sinks where the window is narrow: the keys of a run of tiles are
// packed by the thread that needs them, as the tiles come to them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/kernel/pack.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/query_tile.hpp"
#include "focus/kernel/row_prefetcher.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/sinks.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/passes/token_order.hpp"
#include "focus/plan/cells.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Query heads [first, end) of a call, all of which read kv head `kv`.
struct head_group {
  index_t kv = 0;
  index_t first = 0, end = 0;
};

/// kv heads [first_kv, end_kv) of a call, and `group` query heads of each, from query head `first`
/// on.
struct head_block {
  index_t first_kv = 0, end_kv = 0;
  index_t first = 0, group = 1;

  [[nodiscard]] constexpr head_group of(index_t kv) const noexcept {
    const index_t head = first + (kv - first_kv) * group;
    return {kv, head, head + group};
  }
};

/// One query head, which reads kv head `kv`.
constexpr head_block one_head(index_t head, index_t kv) noexcept {
  return {kv, kv + 1, head, 1};
}

/// Local pairs and sinks, for runs of whole tiles: their keys, packed by each worker for itself,
/// stay in L2 from when they are packed until the last of the run's tiles has seen them.
template <class E>
class window_pass {
  using A = accumulator_t<E>;
  static constexpr index_t tile_rows = tile_sizes<E>::tile_rows, panel = tile_sizes<E>::panel;

 public:
  /// longest: the rows of the longest range that attend is called with.
  window_pass(scratch_plan& scratch, const attention_shape& s, index_t workers,
              const resolved_pattern& pattern, const resolved_score<A>& score,
              const left_in_place& in_place, index_t longest)
      : pattern_(pattern),
        softcap_(score.softcap),
        factor_(query_factor(score)),
        run_rows_(rows_of_run(s, pattern, longest)),
        values_in_place_(in_place.values),
        packer_(scratch, workers, run_slots(s) + sink_slots(), s.head_dim,
                in_place.values ? 0 : s.value_dim),
        sinks_at_(run_slots(s)) {}

  /// Whether there is anything for it to do.
  [[nodiscard]] bool any() const noexcept { return pattern_.window >= 0 || pattern_.sinks > 0; }

  /// Attends with rows [rows.begin, rows.end), from a multiple of tile_rows on, of some heads of
  /// `args`, tile by tile, and calls take(tile, head, first row) with each. All heads have a run of
  /// tiles before the next run begins. While the last tiles attend, ahead(prefetcher, how many
  /// tiles are left) may add rows that will be used afterwards.
  template <class Arguments, class Ahead, class Take>
  void attend(const Arguments& args, const head_block& heads, task_range rows, query_tile<E>& tile,
              const scratch_memory& memory, index_t worker, Ahead&& ahead, Take&& take) const {
    for (index_t first = rows.begin; first < rows.end; first += run_rows_)
      for (index_t kv = heads.first_kv; kv < heads.end_kv; ++kv)
        attend_run(args, heads, kv, {first, (std::min)(first + run_rows_, rows.end)}, rows.end,
                   tile, memory, worker, ahead, take);
  }

 private:
  /// The keys that a run sees: packed from `base` on, a multiple of panel, so far up to `packed`.
  struct run_keys {
    index_t base, end, packed;
    bool sinks_apart;  // in a place of their own
  };

  static index_t rows_of_run(const attention_shape& s, const resolved_pattern& pattern,
                             index_t longest) noexcept {
    // Each run packs its window's keys once more: they must stay the smaller part.
    const index_t again = (std::max)(pattern.window, index_t{0}) + pattern.sinks;
    const index_t row_bytes = (s.head_dim + s.value_dim) * static_cast<index_t>(sizeof(E));
    const index_t fitting = packed_bytes / (std::max<index_t>)(row_bytes, 1) - again;
    const index_t tiles = ceil_div((std::max)(fitting, again), tile_rows);
    // Runs of one length.
    const index_t all = (std::max<index_t>)(ceil_div(longest, tile_rows), 1);
    return ceil_div(all, ceil_div(all, (std::max<index_t>)(tiles, 1))) * tile_rows;
  }
  /// Keys before and behind a run's rows, what begins within a panel, and sinks that the run
  /// reaches.
  [[nodiscard]] index_t run_slots(const attention_shape& s) const noexcept {
    if (!any()) return 0;
    const index_t window = (std::max)(pattern_.window, index_t{0});
    return round_up((std::min)(run_rows_ + 2 * window + pattern_.sinks, s.n_k) + 2 * panel, panel);
  }
  [[nodiscard]] index_t sink_slots() const noexcept { return round_up(pattern_.sinks, panel); }

  /// Behind the last key that row `row` of a run sees; goes up with the row.
  [[nodiscard]] index_t end_of(const run_keys& keys, index_t row) const noexcept {
    const index_t window = pattern_.window < 0 ? index_t{0} : pattern_.window_end(row);
    return keys.sinks_apart ? window : (std::max)(window, pattern_.sink_end(row));
  }
  [[nodiscard]] run_keys keys_of(task_range rows) const noexcept {
    run_keys keys{0, 0, 0, false};
    if (pattern_.window >= 0) keys.base = pattern_.window_begin(rows.begin) / panel * panel;
    keys.sinks_apart = keys.base >= pattern_.sinks;
    if (!keys.sinks_apart) keys.base = 0;
    keys.end = (std::max)(keys.base, end_of(keys, rows.end - 1));
    keys.packed = keys.base;
    return keys;
  }

  /// The keys from `first` on, which a worker has packed from `place` on.
  template <class Arguments>
  packed_keys<E> keys_from(const Arguments& args, index_t kv_head, index_t first, index_t place,
                           const scratch_memory& memory, index_t worker) const noexcept {
    packed_keys<E> keys = packer_.from(memory, worker, place, first);
    if constexpr (is_summed_as_stored<Arguments, E> &&
                  is_summed_as_stored<Arguments, typename decltype(args.v)::value_type>)
      if (values_in_place_)
        keys.read_values(args.v.row(kv_head, first), args.v.stride(1), args.shape.value_dim);
    return keys;
  }

  template <class Arguments, class Ahead, class Take>
  void attend_run(const Arguments& args, const head_block& block, index_t kv, task_range rows,
                  index_t last, query_tile<E>& tile, const scratch_memory& memory, index_t worker,
                  Ahead&& ahead, Take&& take) const {
    const head_group heads = block.of(kv);
    const auto same = [](index_t token) {
      return token;
    };
    run_keys keys = keys_of(rows);
    const packed_keys<E> packed = keys_from(args, heads.kv, keys.base, 0, memory, worker);
    if (sinks_packed(keys))
      packer_.pack_slots(memory, worker, args.k, args.v, heads.kv, 0, pattern_.sinks, sinks_at_,
                         same);
    row_prefetcher prefetcher;
    for (index_t head = heads.first; head < heads.end; ++head)
      for (index_t first = rows.begin; first < rows.end; first += tile_rows) {
        const index_t count = (std::min)(tile_rows, rows.end - first), behind = first + count;
        const index_t needed =
            behind == rows.end
                ? keys.end
                : std::clamp(round_up(end_of(keys, behind - 1), panel), keys.packed, keys.end);
        packer_.pack_slots(memory, worker, args.k, args.v, heads.kv, keys.packed, needed,
                           keys.packed - keys.base, same);
        keys.packed = (std::max)(keys.packed, needed);

        prefetcher.clear();
        const bool last_head = head + 1 == heads.end, last_kv = kv + 1 == block.end_kv;
        if (behind < rows.end)
          ask_for(args, head, kv, behind, keys.packed, prefetcher);
        else if (!last_head)
          ask_for(args, head + 1, kv, rows.begin, keys.packed, prefetcher);
        else if (!last_kv)
          ask_for(args, heads.end, kv + 1, rows.begin, keys.base, prefetcher);
        else if (behind < last)
          ask_for(args, block.first, block.first_kv, behind, keys.packed, prefetcher);
        if (last_head && last_kv) ahead(prefetcher, ceil_div(last - behind, tile_rows));
        tile.take_queries(count, factor_, [&](index_t r) { return args.q.row(head, first + r); });
        tile.prefetch(prefetcher);
        attend_tile(args, heads.kv, first, keys, packed, tile, memory, worker);
        take(tile, head, first);
      }
  }

  /// What the tile takes that begins with row `first`: queries and output rows, and keys that are
  /// not yet packed, from first_key on.
  template <class Arguments>
  void ask_for(const Arguments& args, index_t head, index_t kv_head, index_t first,
               index_t first_key, row_prefetcher& prefetcher) const noexcept {
    const index_t count = (std::min)(tile_rows, args.shape.n_q - first);
    prefetcher.add(args.q, head, first, count);
    prefetcher.add(args.out, head, first, count);
    const index_t end = pattern_.window_end(first + count - 1);
    prefetcher.add(args.k, kv_head, first_key, end - first_key);
    prefetcher.add(args.v, kv_head, first_key, end - first_key);
  }

  /// Whether all rows from `first` on see all sinks, and apart from their windows.
  [[nodiscard]] bool sinks_before(index_t first) const noexcept {
    return pattern_.window >= 0 && pattern_.window_begin(first) >= pattern_.sinks;
  }
  static constexpr bool sees_sinks_first = std::is_same_v<E, A>;
  /// Whether some tile of a run needs the sinks packed in a place of their own.
  [[nodiscard]] bool sinks_packed(const run_keys& keys) const noexcept {
    return keys.sinks_apart && pattern_.sinks > (sees_sinks_first ? most_sinks : 0);
  }

  template <class Arguments>
  void attend_tile(const Arguments& args, index_t kv_head, index_t first, const run_keys& keys,
                   const packed_keys<E>& packed, query_tile<E>& tile, const scratch_memory& memory,
                   index_t worker) const {
    const bool apart = pattern_.sinks == 0 || sinks_before(first);
    if constexpr (sees_sinks_first)
      if (apart && pattern_.sinks > 0 && pattern_.sinks <= most_sinks) {
        see_sinks(
            tile, args.shape.head_dim, args.shape.value_dim, pattern_.sinks,
            [&](index_t j) { return args.k.row(kv_head, j); },
            [&](index_t j) { return args.v.row(kv_head, j); }, softcap_);
        return attend_windows(tile, first, packed);
      }
    for (index_t r = 0; r < tile.rows(); ++r) tile.clear_row(r);
    if (!apart || !keys.sinks_apart)
      return attend_local(tile, pattern_, first, [&] { tile.attend(packed, softcap_); });
    attend_windows(tile, first, packed);
    if (pattern_.sinks == 0) return;
    for (index_t r = 0; r < tile.rows(); ++r) tile.limit(r) = {0, pattern_.sink_end(first + r)};
    tile.attend(keys_from(args, kv_head, 0, sinks_at_, memory, worker), softcap_);
  }
  void attend_windows(query_tile<E>& tile, index_t first, const packed_keys<E>& packed) const {
    if (pattern_.window < 0) return;
    for (index_t r = 0; r < tile.rows(); ++r)
      tile.limit(r) = {pattern_.window_begin(first + r), pattern_.window_end(first + r)};
    tile.attend(packed, softcap_);
  }

  resolved_pattern pattern_;
  A softcap_, factor_;
  index_t run_rows_;
  bool values_in_place_;
  // Of each worker: the keys of its run, and behind them sinks that lie apart.
  key_packer<E> packer_;
  index_t sinks_at_;
};

/// Attention with a window, for run_call: nothing but that pass.
template <class E>
class window_run {
  using A = accumulator_t<E>;
  static constexpr index_t task_tiles = 4;

 public:
  window_run(scratch_plan& scratch, const attention_shape& s, index_t workers,
             const resolved_pattern& pattern, const resolved_score<A>& score,
             const left_in_place& in_place)
      : alone_(workers <= 1),
        task_rows_(alone_ ? (std::max<index_t>)(s.n_q, 1) : task_tiles * tile_sizes<E>::tile_rows),
        kv_at_once_(in_place.heads_side_by_side ? (std::max<index_t>)(s.kv_heads, 1) : 1),
        window_(scratch, s, workers, pattern, score, in_place, task_rows_),
        layout_(scratch, workers, s.head_dim, s.value_dim) {}

  template <class Arguments>
  void run(const Arguments& args, const scratch_memory& memory, const any_executor& exec) const {
    const attention_shape& s = args.shape;
    const index_t group = s.queries_per_kv_head();
    if (alone_) {
      exec.parallel_for(ceil_div(s.kv_heads, kv_at_once_), [&](index_t task, index_t worker) {
        const index_t kv = task * kv_at_once_, end = (std::min)(kv + kv_at_once_, s.kv_heads);
        attend(args, {kv, end, kv * group, group}, {0, s.n_q}, memory, worker);
      });
      return;
    }
    const index_t ranges = ceil_div(s.n_q, task_rows_);
    exec.parallel_for(s.heads * ranges, [&](index_t task, index_t worker) {
      const index_t head = task % s.heads, first = task / s.heads * task_rows_;
      attend(args, one_head(head, head / group), {first, (std::min)(first + task_rows_, s.n_q)},
             memory, worker);
    });
  }

 private:
  template <class Arguments>
  void attend(const Arguments& args, const head_block& heads, task_range rows,
              const scratch_memory& memory, index_t worker) const {
    query_tile<E> tile(memory, layout_, worker);
    window_.attend(
        args, heads, rows, tile, memory, worker, [](row_prefetcher&, index_t) {},
        [&](const query_tile<E>& done, index_t head, index_t first) {
          detail::write_rows(args, done, head, [first](index_t r) { return first + r; });
        });
  }

  bool alone_;
  index_t task_rows_, kv_at_once_;
  window_pass<E> window_;
  query_tile_layout<E> layout_;
};

/// Dense and windowed attention, for run_call: the local pairs and the sinks.
template <class E>
struct attention_call {
  resolved_pattern pattern;
  resolved_score<accumulator_t<E>> score;
  left_in_place in_place = {};

  template <class F>
  void operator()(index_t, scratch_plan& scratch, const attention_shape& shape, index_t workers,
                  F&& f) const {
    if (is_narrow(shape)) {
      f(window_run<E>(scratch, shape, workers, pattern, score, in_place));
      return;
    }
    const auto walk = [this](query_tile<E>& tile, const packed_keys<E>& keys, index_t first) {
      attend_local(tile, pattern, first, [&] { tile.attend(keys, score.softcap); });
    };
    f(token_order_run<E, decltype(walk)>(scratch, shape, workers, score, walk));
  }

 private:
  /// Whether keys that tasks pack once more are the smaller part of what they pack.
  [[nodiscard]] bool is_narrow(const attention_shape& shape) const noexcept {
    constexpr index_t share = 4;
    return pattern.window >= 0 && pattern.window + pattern.sinks <= shape.n_k / share;
  }
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
