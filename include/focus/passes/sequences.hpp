// One call of attention, for one sequence or for a batch of them: where its scratch memory comes
// from, and what its threads share out.
//
// Call: what is computed, of any sequence,
//
//   call(sequence, scratch plan, shape, workers, f)   calls f(run)
//
// run has planned its scratch memory for that shape, which may be that of some of the heads, and
// for loops of so many workers; run.run(arguments, memory, exec) computes it in such memory, as
// often as it is called, for one worker or many to the same bits.
#pragma once

#include "focus/checks/attention_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/parallel.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The loop over a batch of sequences. Its scratch memory is allocated once, for the sequence that
/// needs most.
///
/// Where there are kv heads enough for all workers, each is a task of its own, computed in its
/// worker's part of the memory without further loops: short sequences have no others worth sharing
/// out. Else the workers share one sequence after the other.
template <class Arguments, class Call>
void run_batch(const Arguments& args, const any_executor& exec, const Call& call) {
  constexpr index_t tasks_a_worker = 2;
  const index_t workers = exec.concurrency(), sequences = args.q.extent(0);
  const index_t kv_heads = args.shape.kv_heads, tasks = sequences * kv_heads;
  const bool apart = tasks >= tasks_a_worker * workers;

  scratch_plan largest, all;
  for (index_t b = 0; b < sequences; ++b) {
    scratch_plan scratch;
    const attention_shape shape = apart ? args.shape.of_kv_heads(1) : args.shape;
    call(b, scratch, shape, apart ? 1 : workers, [](const auto&) {});
    largest.cover(scratch);
  }
  const worker_scratch parts = all.add_each(apart ? workers : 1, largest);
  const scratch_memory memory(exec, all);
  const auto run_part = [&](index_t sequence, const auto& part, index_t worker,
                            const any_executor& loops) {
    const scratch_memory own(parts.of(memory, worker));
    scratch_plan as_before;
    call(sequence, as_before, part.shape, loops.concurrency(),
         [&](const auto& run) { run.run(part, own, loops); });
  };
  if (!apart) {
    for (index_t b = 0; b < sequences; ++b) run_part(b, args.sequence(b), 0, exec);
    return;
  }
  exec.parallel_for(tasks, [&](index_t task, index_t worker) {
    serial_executor serial;
    const index_t b = task / kv_heads;
    run_part(b, args.sequence(b).heads_of(task % kv_heads, 1), worker, any_executor(serial));
  });
}

/// A call after its checks.
template <class Arguments, class Call>
void run_call(const Arguments& args, const any_executor& exec, const Call& call) {
  if constexpr (Arguments::rank == 4) {
    detail::run_batch(args, exec, call);
  } else {
    scratch_plan scratch;
    call(index_t{0}, scratch, args.shape, exec.concurrency(), [&](const auto& run) {
      const scratch_memory memory(exec, scratch);
      run.run(args, memory, exec);
    });
  }
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
