#include "thread_pool.hpp"

#include <algorithm>
#include <utility>

namespace language_model {

namespace {

/// Returns as soon as done() is true, or after some tens of microseconds.
template <class Done>
void look_a_while(Done&& done) {
  constexpr int looks = 300;
  for (int look = 0; look < looks && !done(); ++look)
    if (look % 16 == 15) std::this_thread::yield();
}

}  // namespace

thread_pool::thread_pool(index_t threads) {
  threads_.reserve(static_cast<std::size_t>(std::max<index_t>(threads - 1, 0)));
  for (index_t worker = 1; worker < threads; ++worker)
    threads_.emplace_back([this, worker] { wait_for_loops(worker); });
}

thread_pool::~thread_pool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  loop_begins_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void thread_pool::run(index_t tasks, void* context, invoke_function invoke) {
  const bool alone = threads_.empty() || tasks <= 1;
  {
    const std::lock_guard lock(mutex_);
    tasks_ = tasks;
    context_ = context;
    invoke_ = invoke;
    next_task_ = 0;
    error_ = nullptr;
    if (!alone) {
      busy_ = static_cast<index_t>(threads_.size());
      ++loop_;
    }
  }
  if (!alone) loop_begins_.notify_all();
  work(0);
  look_a_while([this] { return busy_ == 0; });
  std::unique_lock lock(mutex_);
  loop_ends_.wait(lock, [this] { return busy_ == 0; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void thread_pool::work(index_t worker) noexcept {
  for (index_t task; (task = next_task_.fetch_add(1)) < tasks_;) {
    try {
      invoke_(context_, task, worker);
    } catch (...) {
      next_task_ = tasks_;
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }
}

void thread_pool::wait_for_loops(index_t worker) {
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    lock.unlock();
    look_a_while([&] { return loop_ != seen; });
    lock.lock();
    loop_begins_.wait(lock, [&] { return stopping_ || loop_ != seen; });
    if (stopping_) return;
    seen = loop_;
    lock.unlock();
    work(worker);
    lock.lock();
    if (--busy_ == 0) loop_ends_.notify_one();
  }
}

}  // namespace language_model
