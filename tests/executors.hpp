// Executors that no sane program would use: what does not depend on threads and order is the same
// with them.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "focus/tensor_view.hpp"

namespace oracle {

using focus::index_t;

/// Real threads. One thread takes the tasks in order, two from the last to the first, more from
/// both ends by turns.
class thread_executor {
 public:
  explicit thread_executor(int threads) : threads_(threads) {}

  index_t concurrency() const { return threads_; }

  template <class F>
  void parallel_for(index_t tasks, F&& body) const {
    std::atomic<index_t> next{0};
    std::exception_ptr error;
    std::mutex guard;
    const auto work = [&](index_t worker) {
      try {
        for (index_t r = next++; r < tasks; r = next++) body(task(r, tasks), worker);
      } catch (...) {
        const std::lock_guard lock(guard);
        if (!error) error = std::current_exception();
      }
    };
    std::vector<std::thread> helpers;
    for (int worker = 1; worker < threads_; ++worker) helpers.emplace_back(work, index_t{worker});
    work(index_t{0});
    for (std::thread& helper : helpers) helper.join();
    if (error) std::rethrow_exception(error);
  }

 private:
  index_t task(index_t r, index_t tasks) const {
    if (threads_ == 1) return r;
    if (threads_ == 2) return tasks - 1 - r;
    return r % 2 == 0 ? r / 2 : tasks - 1 - r / 2;
  }

  int threads_;
};

/// Throws from a body when the task with the given number comes.
struct throwing_executor {
  struct error {};
  index_t at = 0;
  index_t concurrency() const { return 1; }
  template <class F>
  void parallel_for(index_t tasks, F&& body) const {
    for (index_t task = 0; task < tasks; ++task) {
      if (task == at) throw error{};
      body(task, index_t{0});
    }
  }
};

}  // namespace oracle
