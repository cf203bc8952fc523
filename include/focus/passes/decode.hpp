// Attention of the last tokens over a cache: which threads read which of its pages, and how what
// they found is added up.
//
// The queries of a call are cut into jobs, a job's pages into splits. A task is one split of a job
// for one kv head, or for all of them: it lists the keys that the job's queries see and attends to
// them, with all query heads that read the kv head at once. Where a job has one split, the task
// writes the output; else it leaves the running softmax of its rows, and a second loop adds these
// up in order. Jobs and splits depend on the lengths and masks alone: so do the bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "focus/cache/cached_row.hpp"
#include "focus/cache/cell_store.hpp"
#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/few_rows.hpp"
#include "focus/kernel/pack.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/query_tile.hpp"
#include "focus/kernel/rules.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kv_cache.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/passes/seen_keys.hpp"
#include "focus/passes/token_order.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// How the rows of one sequence's call are walked together.
struct decode_shape {
  index_t heads = 0, kv_heads = 0, queries = 0, head_dim = 0, value_dim = 0;
  bool few = true;               // keys are read where they are, else packed for the rows
  index_t heads_together = 1;    // query heads of a kv head
  index_t queries_together = 1;  // at most
  index_t enough_queries = 1;    // from which on a job ends where the mask changes

  [[nodiscard]] index_t group() const noexcept { return kv_heads > 0 ? heads / kv_heads : 1; }
  /// Parts of the query heads of a kv head.
  [[nodiscard]] index_t head_parts() const noexcept { return ceil_div(group(), heads_together); }
  [[nodiscard]] index_t most_jobs() const noexcept {
    return ceil_div(queries, queries_together) + queries / enough_queries;
  }
  [[nodiscard]] index_t most_rows() const noexcept { return queries_together * heads_together; }
};

template <class E>
decode_shape decode_shape_of(index_t heads, index_t kv_heads, index_t queries, index_t head_dim,
                             index_t value_dim) noexcept {
  decode_shape s{heads, kv_heads, queries, head_dim, value_dim};
  const index_t group = (std::max<index_t>)(s.group(), 1);
  s.few = queries * group <= most_few_rows<E> && queries <= most_queries_together;
  if (s.few) {
    s.heads_together = group;
    s.queries_together = s.enough_queries = (std::max<index_t>)(queries, 1);
  } else {
    // Rows of a tile from which on it is worth its keys.
    constexpr index_t enough_rows = plan_tile_rows / 3;
    s.heads_together = (std::min)(group, plan_tile_rows);
    s.queries_together = (std::min)(plan_tile_rows / s.heads_together, most_queries_together);
    s.enough_queries = ceil_div(enough_rows, s.heads_together);
  }
  return s;
}

/// Some queries of a sequence, and the pages that they walk.
struct decode_job {
  index_t sequence = 0;
  index_t first_query = 0, queries = 0;  // in the sequence's order of queries
  index_t first_run = 0, runs = 0, pages = 0;
  index_t splits = 0, split_pages = 1;
  index_t first_task = 0, first_state = 0;
};

/// One call, after its checks, of sequences that agree in everything but their lengths. E: the type
/// in which keys are packed for many rows. Sequence: has q, query_masks, cache, out and lse.
template <class E, class Sequence>
class decode_run {
  using T = typename Sequence::cached_type;
  using A = cached_accumulator_t<T>;
  /// Pages whose keys are packed at a time.
  static constexpr index_t packed_pages = tile_sizes<E>::block_keys / page_slots;
  static constexpr index_t listed_keys = (std::max)(split_pages, packed_pages) * page_slots;

 public:
  /// sequences: one at least.
  decode_run(scratch_plan& scratch, std::span<const Sequence> sequences,
             const resolved_score<A>& score, index_t workers)
      : sequences_(sequences),
        score_(score),
        workers_(workers),
        needs_(need_of(sequences)),
        head_dim_(sequences[0].cache->head_dim()),
        value_dim_(sequences[0].cache->value_dim()),
        jobs_(scratch.add<decode_job>(needs_.jobs)),
        order_(scratch.add<index_t>(needs_.queries)),
        runs_(scratch.add<page_run>(needs_.runs)),
        state_acc_(scratch.add<A>(needs_.states * value_dim_ + vec<A>::width)),
        state_rest_(scratch.add<row_softmax<A>>(needs_.states)),
        few_rows_(scratch, needs_.few_rows > 0 ? workers : 0, sequences[0].cache->kv_heads(),
                  needs_.few_rows, head_dim_, value_dim_),
        tiles_(scratch, needs_.packs ? workers : 0, head_dim_, value_dim_),
        packer_(scratch, needs_.packs ? workers : 0, tile_sizes<E>::block_keys, head_dim_,
                value_dim_) {
    scratch_plan list;
    listed_rows_ = list.add<const std::byte*>(listed_keys + page_slots);
    listed_queries_ = list.add<std::uint64_t>(listed_keys + page_slots);
    if (needs_.packs && cached_row<T>::is_quantised) {
      widened_keys_ = list.add<A>(tile_sizes<E>::block_keys * head_dim_);
      widened_values_ = list.add<A>(tile_sizes<E>::block_keys * value_dim_);
    }
    lists_ = scratch.add_each(workers, list);
  }

  void run(const scratch_memory& memory, const any_executor& exec) const {
    decode_job* const jobs = memory[jobs_];
    const index_t job_count = plan_jobs(memory);
    // A short list of pages is sooner found than threads are sent for it.
    constexpr index_t enough_jobs = 16;
    const auto find_pages = [&](index_t job, index_t) {
      find_pages_of(memory, jobs[job]);
    };
    if (job_count < enough_jobs)
      for (index_t job = 0; job < job_count; ++job) find_pages(job, 0);
    else
      exec.parallel_for(job_count, find_pages);

    // All kv heads of a split share its list of keys, where there are tasks enough without them.
    constexpr index_t tasks_a_worker = 4;
    index_t splits = 0, states = 0;
    bool few = true;
    for (index_t j = 0; j < job_count; ++j) {
      splits += jobs[j].splits;
      few = few && shape_of(jobs[j].sequence).few;
    }
    const bool heads_together = few && (workers_ <= 1 || splits >= tasks_a_worker * workers_);
    index_t tasks = 0, most_parts = 0;
    for (index_t j = 0; j < job_count; ++j) {
      const decode_shape shape = shape_of(jobs[j].sequence);
      const index_t parts = shape.kv_heads * shape.head_parts();
      most_parts = (std::max)(most_parts, parts);
      jobs[j].first_task = tasks;
      tasks += (heads_together ? 1 : parts) * jobs[j].splits;
      jobs[j].first_state = states;
      if (jobs[j].splits > 1) states += parts * jobs[j].splits;
    }
    exec.parallel_for(tasks, [&](index_t task, index_t worker) {
      const decode_job& job = *job_of(jobs, job_count, task);
      const index_t part = (task - job.first_task) / job.splits;
      const index_t split = (task - job.first_task) % job.splits;
      const decode_shape shape = shape_of(job.sequence);
      if (shape.few)
        attend_few(memory, job, shape, split, heads_together ? 0 : part,
                   heads_together ? shape.kv_heads : part + 1, worker);
      else
        attend_packed(memory, job, shape, split, part, worker);
    });
    if (states == 0) return;
    exec.parallel_for(job_count * most_parts, [&](index_t task, index_t) {
      const decode_job& job = jobs[task / most_parts];
      const decode_shape shape = shape_of(job.sequence);
      const index_t part = task % most_parts;
      if (job.splits > 1 && part < shape.kv_heads * shape.head_parts())
        add_up(memory, job, shape, part);
    });
  }

 private:
  struct need {
    index_t jobs = 0, queries = 0, runs = 0, states = 0;
    index_t rows = 0;      // of a state's area
    index_t few_rows = 0;  // 0: no sequence has few
    bool packs = false;
  };

  [[nodiscard]] decode_shape shape_of(index_t s) const noexcept {
    return shape_of(sequences_[static_cast<std::size_t>(s)]);
  }
  static decode_shape shape_of(const Sequence& s) noexcept {
    return decode_shape_of<E>(s.q.extent(0), s.cache->kv_heads(), s.q.extent(1),
                              s.cache->head_dim(), s.cache->value_dim());
  }
  [[nodiscard]] const Sequence& sequence(index_t s) const noexcept {
    return sequences_[static_cast<std::size_t>(s)];
  }
  [[nodiscard]] const cell_store& store_of(index_t s) const noexcept {
    return cache_access::store(*sequence(s).cache);
  }
  [[nodiscard]] resolved_pattern pattern_of(index_t s) const noexcept {
    const auto& cache = *sequence(s).cache;
    return detail::resolve(cache.pattern(), sequence(s).q.extent(1), cache.size());
  }

  /// Pages in a split, of a sequence that has so many.
  static index_t split_of(const decode_shape& shape, index_t pages) noexcept {
    if (shape.few) return split_pages;
    const index_t tasks =
        ceil_div(shape.queries, shape.queries_together) * shape.kv_heads * shape.head_parts();
    return tasks >= enough_tasks ? (std::max<index_t>)(pages, 1) : packed_split_pages;
  }

  static need need_of(std::span<const Sequence> sequences) noexcept {
    // In powers of 2: a cache that grows needs more memory now and then, not with each token.
    const auto rounded = [](index_t x) {
      return x <= 1 ? x : static_cast<index_t>(std::bit_ceil(static_cast<std::uint64_t>(x)));
    };
    need all;
    for (const Sequence& s : sequences) {
      const decode_shape shape = shape_of(s);
      const cell_store& store = cache_access::store(*s.cache);
      const index_t splits = ceil_div(store.pages(), split_of(shape, store.pages()));
      all.jobs += shape.most_jobs();
      all.queries += shape.queries;
      all.runs += shape.most_jobs() * most_page_runs(store);
      if (splits > 1)
        all.states += shape.most_jobs() * shape.kv_heads * shape.head_parts() * splits;
      all.rows = (std::max)(all.rows, shape.most_rows());
      if (shape.few)
        all.few_rows = (std::max)(all.few_rows, shape.most_rows());
      else
        all.packs = true;
    }
    all.runs = rounded(all.runs);
    all.states = rounded(all.states) * all.rows;
    return all;
  }

  /// Cuts the queries of all sequences into jobs; returns how many there are.
  index_t plan_jobs(const scratch_memory& memory) const {
    decode_job* const jobs = memory[jobs_];
    index_t* order = memory[order_];
    index_t count = 0, runs = 0, queries = 0;
    for (index_t s = 0; s < std::ssize(sequences_); ++s) {
      const decode_shape shape = shape_of(s);
      const group_mask* const masks = sequence(s).query_masks.data();
      for (index_t i = 0; i < shape.queries; ++i) order[i] = i;
      // Queries of one mask walk the same cells.
      if (!shape.few)
        std::sort(order, order + shape.queries, [masks](index_t a, index_t b) {
          return masks[a] != masks[b] ? masks[a] < masks[b] : a < b;
        });
      for (index_t first = 0, end = 0; first < shape.queries; first = end) {
        const index_t most = (std::min)(first + shape.queries_together, shape.queries);
        end = (std::min)(first + shape.enough_queries, most);
        while (end < most && masks[order[end]] == masks[order[end - 1]]) ++end;
        decode_job job;
        job.sequence = s;
        job.first_query = queries + first;
        job.queries = end - first;
        job.first_run = runs;
        runs += most_page_runs(store_of(s));
        jobs[count++] = job;
      }
      order += shape.queries;
      queries += shape.queries;
    }
    return count;
  }

  [[nodiscard]] query_chunk queries_of(const scratch_memory& memory,
                                       const decode_job& job) const noexcept {
    const Sequence& s = sequence(job.sequence);
    return {s.query_masks.data(), memory[order_] + job.first_query, job.queries,
            s.cache->size() - s.q.extent(1)};
  }

  void find_pages_of(const scratch_memory& memory, decode_job& job) const noexcept {
    page_run* const runs = memory[runs_] + job.first_run;
    job.runs = find_page_runs(store_of(job.sequence), pattern_of(job.sequence),
                              queries_of(memory, job), runs);
    job.pages = 0;
    for (index_t r = 0; r < job.runs; ++r) job.pages += runs[r].end - runs[r].begin;
    job.split_pages = split_of(shape_of(job.sequence), store_of(job.sequence).pages());
    // One where nothing is seen, too: its rows are to be written.
    job.splits = (std::max<index_t>)(ceil_div(job.pages, job.split_pages), 1);
  }

  /// The last job that begins with `task` or before.
  static const decode_job* job_of(const decode_job* jobs, index_t count, index_t task) noexcept {
    while (count > 1) {
      const index_t half = count / 2;
      if (jobs[half].first_task <= task) {
        jobs += half;
        count -= half;
      } else {
        count = half;
      }
    }
    return jobs;
  }

  /// Lists the keys of pages [begin, end) of a job's.
  [[nodiscard]] seen_keys list_keys(const scratch_memory& memory, const decode_job& job,
                                    const query_chunk& queries, index_t begin, index_t end,
                                    index_t worker) const noexcept {
    const scratch_block own = lists_.of(memory, worker);
    seen_keys list{own[listed_rows_], own[listed_queries_]};
    const page_run* const runs = memory[runs_] + job.first_run;
    index_t first = 0;  // of the run's pages among the job's
    for (index_t r = 0; r < job.runs && first < end; ++r) {
      const page_run& run = runs[r];
      const index_t from = (std::max)(begin - first, index_t{0}) + run.begin;
      const index_t to = (std::min)(end - first + run.begin, run.end);
      if (from < to)
        list_seen_keys(store_of(job.sequence), pattern_of(job.sequence), queries,
                       {run.cell, from, to}, list);
      first += run.end - run.begin;
    }
    return list;
  }

  /// A task: one split for kv heads [first_head, end_head), whose keys are read where they are.
  void attend_few(const scratch_memory& memory, const decode_job& job, const decode_shape& shape,
                  index_t split, index_t first_head, index_t end_head, index_t worker) const {
    const Sequence& s = sequence(job.sequence);
    const query_chunk queries = queries_of(memory, job);
    const seen_keys list = list_keys(memory, job, queries, split * job.split_pages,
                                     (std::min)((split + 1) * job.split_pages, job.pages), worker);
    const index_t group = shape.group(), rows_a_head = job.queries * group;
    const auto head_of = [&](index_t r) {
      return (first_head + r / rows_a_head) * group + r % group;
    };
    const auto query_of = [&](index_t r) {
      return queries.order[r % rows_a_head / group];
    };
    few_rows<A> rows(memory, few_rows_, worker);
    rows.begin((end_head - first_head) * rows_a_head, query_factor(score_),
               [&](index_t r) { return s.q.row(head_of(r), query_of(r)); });
    // The heads of a page lie side by side: all have a block of keys before the next one comes.
    constexpr index_t most = few_rows_sizes<A>::block_keys;
    const auto block_of = [&](index_t first, index_t kv) -> key_rows<cached_row<T>> {
      return {&cache_access::row(*s.cache), list.rows + first,
              std::clamp<index_t>(list.size - first, 0, most),
              kv * store_of(job.sequence).head_bytes()};
    };
    for (index_t first = 0; first < list.size; first += most)
      for (index_t kv = first_head; kv < end_head; ++kv)
        rows.part((kv - first_head) * rows_a_head, rows_a_head)
            .attend(
                block_of(first, kv),
                kv + 1 < end_head ? block_of(first, kv + 1) : block_of(first + most, first_head),
                list.all_see_all ? nullptr : list.queries + first, group, score_.softcap);
    for (index_t r = 0; r < rows.rows(); ++r)
      finish(memory, job, first_head + r / rows_a_head, split, r % rows_a_head, rows.accumulator(r),
             rows.softmax(r), head_of(r), query_of(r));
  }

  /// A task: one split for some query heads of a kv head, whose keys are packed block by block.
  void attend_packed(const scratch_memory& memory, const decode_job& job, const decode_shape& shape,
                     index_t split, index_t part, index_t worker) const {
    const Sequence& s = sequence(job.sequence);
    const query_chunk queries = queries_of(memory, job);
    const index_t kv = part / shape.head_parts();
    const index_t first_head = part % shape.head_parts() * shape.heads_together;
    const index_t heads = (std::min)(shape.heads_together, shape.group() - first_head);
    const auto head_of = [&](index_t r) {
      return kv * shape.group() + first_head + r % heads;
    };
    query_tile<E> tile(memory, tiles_, worker);
    tile.begin(job.queries * heads, query_factor(score_),
               [&](index_t r) { return s.q.row(head_of(r), queries.order[r / heads]); });
    const index_t end = (std::min)((split + 1) * job.split_pages, job.pages);
    for (index_t page = split * job.split_pages; page < end; page += packed_pages) {
      const seen_keys list =
          list_keys(memory, job, queries, page, (std::min)(page + packed_pages, end), worker);
      if (list.size == 0) continue;
      pack(memory,
           {&cache_access::row(*s.cache), list.rows, list.size,
            kv * store_of(job.sequence).head_bytes()},
           worker);
      for (index_t r = 0; r < tile.rows(); ++r) tile.limit(r) = {0, list.size};
      const packed_keys<E> keys = packer_.head(memory, worker);
      if (list.all_see_all)
        tile.attend(keys, score_.softcap);
      else
        tile.attend(keys, score_.softcap, keys_of_other_queries{list.queries, heads});
    }
    for (index_t r = 0; r < tile.rows(); ++r)
      finish(memory, job, part, split, r, tile.accumulator(r), tile.softmax(r), head_of(r),
             queries.order[r / heads]);
  }

  void pack(const scratch_memory& memory, const key_rows<cached_row<T>>& keys,
            index_t worker) const {
    const index_t count = keys.count;
    if constexpr (cached_row<T>::is_quantised) {
      const scratch_block own = lists_.of(memory, worker);
      A *const k = own[widened_keys_], *const v = own[widened_values_];
      for (index_t j = 0; j < count; ++j)
        keys.format->read(keys.row(j), k + j * head_dim_, v + j * value_dim_);
      packer_.pack_rows(
          memory, worker, 0, count, 0,
          [&](index_t slot) -> const A* { return k + slot * head_dim_; },
          [&](index_t slot) -> const A* { return v + slot * value_dim_; });
    } else {
      packer_.pack_rows(
          memory, worker, 0, count, 0, [&](index_t slot) { return keys.key(slot); },
          [&](index_t slot) { return keys.value(slot); });
    }
  }

  /// What row r of a task has found: written, or left to be added up.
  void finish(const scratch_memory& memory, const decode_job& job, index_t part, index_t split,
              index_t r, const A* acc, const row_softmax<A>& rest, index_t head,
              index_t query) const {
    if (job.splits <= 1) return write(sequence(job.sequence), head, query, acc, rest);
    const index_t at = state_at(job, part, split) + r;
    copy_elements(acc, value_dim_, memory[state_acc_] + at * value_dim_);
    memory[state_rest_][at] = rest;
  }
  [[nodiscard]] index_t state_at(const decode_job& job, index_t part,
                                 index_t split) const noexcept {
    return (job.first_state + part * job.splits + split) * needs_.rows;
  }

  static void write(const Sequence& s, index_t head, index_t query, const A* acc,
                    const row_softmax<A>& rest) {
    detail::finish_row(acc, rest, s.out.extent(2), s.out.row(head, query));
    if (s.lse.data() == nullptr) return;
    auto& lse = s.lse(head, query);
    if (is_zero(rest.sum))
      store_minus_infinity(lse);
    else
      lse = static_cast<typename decltype(s.lse)::value_type>(detail::logsumexp(rest));
  }

  /// Adds up what the splits of a job have found for some heads.
  void add_up(const scratch_memory& memory, const decode_job& job, const decode_shape& shape,
              index_t part) const {
    constexpr int lanes = vec<A>::width;
    const index_t kv = part / shape.head_parts();
    const index_t first_head = part % shape.head_parts() * shape.heads_together;
    const index_t heads = (std::min)(shape.heads_together, shape.group() - first_head);
    const query_chunk queries = queries_of(memory, job);
    for (index_t r = 0; r < job.queries * heads; ++r) {
      const index_t first = state_at(job, part, 0) + r;
      A* const acc = memory[state_acc_] + first * value_dim_;
      row_softmax<A>& sum = memory[state_rest_][first];
      for (index_t split = 1; split < job.splits; ++split) {
        const index_t at = state_at(job, part, split) + r;
        const row_softmax<A>& more = memory[state_rest_][at];
        const A* const more_acc = memory[state_acc_] + at * value_dim_;
        const A top = more.top > sum.top ? more.top : sum.top;
        const A shift = top > lowest<A> ? top : A{0};
        array_of<A, lanes> drops = {sum.top - shift, more.top - shift};
        exp2<A>(vec<A>::load(drops)).store(drops);
        for (index_t c = 0; c < value_dim_; ++c)
          acc[c] = acc[c] * drops[0] + more_acc[c] * drops[1];
        sum = {top, sum.sum * drops[0] + more.sum * drops[1],
               sum.norm * drops[0] + more.norm * drops[1]};
      }
      write(sequence(job.sequence), kv * shape.group() + first_head + r % heads,
            queries.order[r / heads], acc, sum);
    }
  }

  std::span<const Sequence> sequences_;
  resolved_score<A> score_;
  index_t workers_;
  need needs_;
  index_t head_dim_, value_dim_;
  // Each plans its part of the scratch memory, in this order.
  scratch_array<decode_job> jobs_;
  scratch_array<index_t> order_;
  scratch_array<page_run> runs_;
  scratch_array<A> state_acc_;  // [states][rows][value_dim]
  scratch_array<row_softmax<A>> state_rest_;
  few_rows_layout<A> few_rows_;
  query_tile_layout<E> tiles_;
  key_packer<E> packer_;
  // Of each worker.
  scratch_array<const std::byte*> listed_rows_;
  scratch_array<std::uint64_t> listed_queries_;
  scratch_array<A> widened_keys_, widened_values_;
  worker_scratch lists_;
};

/// A call after its checks. Sequence::all_bfloat16, its accumulator: as attention_arguments has
/// them.
template <class Sequence>
void run_decode(std::span<const Sequence> sequences, const score_options& score,
                const any_executor& exec) {
  if (sequences.empty()) return;
  const auto scoring =
      detail::resolve<typename Sequence::accumulator>(score, sequences[0].cache->head_dim());
  detail::with_operands<Sequence>([&]<class E>() {
    scratch_plan scratch;
    const decode_run<E, Sequence> run(scratch, sequences, scoring, exec.concurrency());
    const scratch_memory memory(exec, scratch);
    run.run(memory, exec);
  });
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
