// Threads of this program's own, on which the dense algebra and Focus both run.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include <focus/parallel.hpp>

namespace language_model {

using focus::index_t;

/// A fixed set of threads that hand out the tasks of one loop at a time, one by one. Between loops
/// they look for the next one a while before they sleep: generation has hundreds of short ones a
/// token. It is an
/// executor in the sense of focus/parallel.hpp. Loops are not nested: a body does not call
/// parallel_for.
class thread_pool {
 public:
  /// threads: at least 1, the calling thread included.
  explicit thread_pool(index_t threads);
  ~thread_pool();
  thread_pool(const thread_pool&) = delete;
  thread_pool& operator=(const thread_pool&) = delete;

  [[nodiscard]] index_t concurrency() const noexcept {
    return static_cast<index_t>(threads_.size()) + 1;
  }

  /// Calls body(task, worker) for each task in [0, tasks), worker < concurrency(), and returns when
  /// all are done. The first exception of a body reaches the caller; tasks not yet begun are then
  /// left out.
  template <class F>
  void parallel_for(index_t tasks, F&& body) {
    auto call = [&body](index_t task, index_t worker) {
      body(task, worker);
    };
    run(tasks, &call, [](void* context, index_t task, index_t worker) {
      (*static_cast<decltype(call)*>(context))(task, worker);
    });
  }

 private:
  using invoke_function = void (*)(void* context, index_t task, index_t worker);
  void run(index_t tasks, void* context, invoke_function invoke);
  void work(index_t worker) noexcept;
  void wait_for_loops(index_t worker);

  // One loop: set under the mutex before loop_ moves on, read by the workers after they have seen
  // that it did.
  index_t tasks_ = 0;
  void* context_ = nullptr;
  invoke_function invoke_ = nullptr;
  std::atomic<index_t> next_task_ = 0;

  std::mutex mutex_;
  std::condition_variable loop_begins_, loop_ends_;
  std::atomic<std::uint64_t> loop_ = 0;
  std::atomic<index_t> busy_ = 0;
  bool stopping_ = false;
  std::exception_ptr error_;

  std::vector<std::thread> threads_;
};

}  // namespace language_model
