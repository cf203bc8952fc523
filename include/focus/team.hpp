// An engine's threads that arrive together, once for each operation, as an executor.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>

#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/parallel.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {

class team;

/// The executor of one call of team::run: what its leader gives to functions of the library.
class team_executor {
 public:
  [[nodiscard]] index_t concurrency() const noexcept { return threads_; }

  /// body(task, worker) for each task in [0, tasks), worker being the `ith` of the thread that runs
  /// it. The first exception of a body, of whichever thread, is thrown here once no thread is in a
  /// body; tasks not yet begun are then left out. Not to be nested.
  template <class F>
  void parallel_for(index_t tasks, F&& body) const;

 private:
  friend class team;
  team_executor(team& owner, index_t threads) noexcept : team_(&owner), threads_(threads) {}

  team* team_;
  index_t threads_;
};

/// For engines whose thread pool calls an operation once in each of its threads, with
/// (ith, nth), as ggml's does: the thread with ith = 0 leads and calls the library, the others take
/// tasks of its loops until it is done.
///
///   team.run(ith, nth, [&](auto& exec) { focus::sparse_attention(..., exec); });
///
/// One object serves one operation at a time, is shared by all threads, outlives its calls, and
/// allocates nothing. Waiting threads look for a while and then yield at each look; they never
/// sleep. A thread that comes late holds nobody up until the end of the call: tasks are taken by
/// who is there. Results have the bits of the serial call.
class team {
 public:
  team() noexcept = default;
  team(const team&) = delete;
  team& operator=(const team&) = delete;

  /// To be called by nth threads, each with another ith in [0, nth). leader(exec) is called in the
  /// thread with ith = 0 alone, with an executor of nth workers. No thread returns before leader
  /// has: what it wrote is then seen by all; and the leader returns when all have come. What leader
  /// throws, or a body on any thread, is thrown by the leader's run; the others' return, and the
  /// team can be used again.
  ///
  /// nth, and which thread has which ith, may change from call to call. A thread may begin the next
  /// call at once; one that had no part in this call may not before some thread has returned from
  /// it (an engine's barrier between operations sees to that).
  ///
  /// Throws invalid_argument in each thread that brings nth < 1 or an ith outside [0, nth), and
  /// does not wait then.
  template <class F>
  void run(index_t ith, index_t nth, F&& leader) {
    detail::require(nth >= 1, "team::run", "nth", "at least 1", nth);
    detail::require(ith >= 0 && ith < nth, "team::run", "ith", "from 0 to nth - 1", ith);
    if (ith > 0) return help(ith);
    const call_end release(*this, nth - 1);  // also when leader throws
    team_executor exec(*this, nth);
    std::forward<F>(leader)(exec);
  }

 private:
  friend class team_executor;

  // gate_: how many helpers are in the loop, whether it is open, and its number. A helper enters by
  // one exchange that also finds the loop open, so that after it is closed none can enter, and
  // the leader waits for those inside alone.
  static constexpr std::uint64_t open = std::uint64_t{1} << 32, one_loop = open << 1,
                                 helpers_inside = open - 1;

  // About a microsecond of looks, the time in which a loop of the library's is begun; from then on
  // the processor is given to who can use it, such as a leader that shares it with its helpers.
  static constexpr int looks = 64;

  template <class Done>
  static void wait_until(Done&& done) {
    for (int look = 0; !done(); ++look) {
      if (look < looks) continue;
      look = looks;
      std::this_thread::yield();
    }
  }

  // Lets the helpers go, once all have come: one that is yet to come would take this call's end for
  // that of its own next.
  class call_end {
   public:
    call_end(team& owner, index_t helpers) noexcept : team_(owner), helpers_(helpers) {}
    call_end(const call_end&) = delete;
    call_end& operator=(const call_end&) = delete;
    ~call_end() {
      wait_until([&] { return team_.arrived_.load(std::memory_order_acquire) == helpers_; });
      team_.arrived_.store(0, std::memory_order_relaxed);
      team_.calls_ended_.fetch_add(1, std::memory_order_release);
    }

   private:
    team& team_;
    index_t helpers_;
  };

  void help(index_t worker) noexcept {
    // Stays as it is until the leader has seen this thread arrive.
    const std::uint64_t call = calls_ended_.load(std::memory_order_acquire);
    arrived_.fetch_add(1, std::memory_order_acq_rel);
    std::uint64_t done_loop = ~std::uint64_t{0};
    wait_until([&] {
      if (calls_ended_.load(std::memory_order_acquire) != call) return true;
      std::uint64_t gate = gate_.load(std::memory_order_relaxed);
      if ((gate & open) == 0 || gate / one_loop == done_loop) return false;
      if (!gate_.compare_exchange_strong(gate, gate + 1, std::memory_order_acquire,
                                         std::memory_order_relaxed))
        return false;
      // The loop may be the next call's, in which this thread has another number or none.
      const bool ended = calls_ended_.load(std::memory_order_acquire) != call;
      if (!ended) {
        done_loop = gate / one_loop;
        take_tasks(worker);
      }
      gate_.fetch_sub(1, std::memory_order_release);
      return ended;
    });
  }

  void take_tasks(index_t worker) noexcept {
    const index_t tasks = tasks_;
    for (index_t task; (task = next_task_.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
#if FOCUS_HAS_EXCEPTIONS
      try {
        call_(body_, task, worker);
      } catch (...) {
        next_task_.store(tasks, std::memory_order_relaxed);
        if (!failed_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
      }
#else
      call_(body_, task, worker);
#endif
    }
  }

  void run_loop(index_t tasks, void* body, void (*call)(void*, index_t, index_t)) {
    tasks_ = tasks;
    body_ = body;
    call_ = call;
    next_task_.store(0, std::memory_order_relaxed);
    // No helper is inside, and the loop before is closed: the leader alone writes.
    gate_.fetch_add(one_loop + open, std::memory_order_release);
    take_tasks(0);
    gate_.fetch_sub(open, std::memory_order_relaxed);
    wait_until([&] { return (gate_.load(std::memory_order_acquire) & helpers_inside) == 0; });
#if FOCUS_HAS_EXCEPTIONS
    if (failed_.load(std::memory_order_relaxed)) {
      failed_.store(false, std::memory_order_relaxed);
      std::rethrow_exception(std::exchange(error_, nullptr));
    }
#endif
  }

  // Apart, on cache lines of their own: all threads take tasks while others look at the gate.
  alignas(64) std::atomic<std::uint64_t> gate_{0};
  alignas(64) std::atomic<index_t> next_task_{0};
  alignas(64) std::atomic<std::uint64_t> calls_ended_{0};
  std::atomic<index_t> arrived_{0};  // helpers of this call
  // The open loop, written while the gate is closed.
  index_t tasks_ = 0;
  void* body_ = nullptr;
  void (*call_)(void*, index_t, index_t) = nullptr;
#if FOCUS_HAS_EXCEPTIONS
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;  // of the helper or leader that set failed_
#endif
};

template <class F>
void team_executor::parallel_for(index_t tasks, F&& body) const {
  if (tasks <= 1 || threads_ == 1) return serial_executor::parallel_for(tasks, body);
  using callable = std::remove_reference_t<F>;
  team_->run_loop(
      tasks, const_cast<void*>(static_cast<const void*>(std::addressof(body))),
      [](void* f, index_t task, index_t worker) { (*static_cast<callable*>(f))(task, worker); });
}

}  // namespace FOCUS_ABI
}  // namespace focus
