// Where parallel loops run, and where scratch memory comes from.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "focus/config.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {

/// Where the parallel loops of a call run: `parallel_for(tasks, body)` calls body(task, worker)
/// once for each task in [0, tasks), with worker in [0, concurrency()) and no two calls at a time
/// with the same worker, and returns when all are done. Results never depend on which worker runs
/// what. Tasks differ in size: hand them out one by one, in order. concurrency() stays the same
/// while a call of the library runs.
template <class E>
concept executor = requires(E& e, index_t tasks, void (&body)(index_t, index_t)) {
  { std::as_const(e).concurrency() } -> std::convertible_to<index_t>;
  e.parallel_for(tasks, body);
};

/// Runs everything in the calling thread. The default.
struct serial_executor {
  [[nodiscard]] static constexpr index_t concurrency() noexcept { return 1; }
  template <class F>
  static constexpr void parallel_for(index_t tasks, F&& body) {
    for (index_t task = 0; task < tasks; ++task) body(task, index_t{0});
  }
};

#if defined(_OPENMP)
/// Runs the loops on OpenMP's threads; there when the translation unit is compiled with OpenMP.
/// An exception thrown in a body reaches the caller; the tasks not yet begun are then left out.
class openmp_executor {
 public:
  /// threads: 0 is OpenMP's own choice (OMP_NUM_THREADS).
  explicit openmp_executor(int threads = 0)
      : threads_(threads > 0 ? threads : omp_get_max_threads()) {}

  [[nodiscard]] index_t concurrency() const noexcept { return threads_; }

  template <class F>
  void parallel_for(index_t tasks, F&& body) const {
    if (tasks <= 1 || threads_ == 1) return serial_executor::parallel_for(tasks, body);
#if FOCUS_HAS_EXCEPTIONS
    std::exception_ptr error;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_) shared(error)
    for (index_t task = 0; task < tasks; ++task) {
      bool failed = false;
#pragma omp critical(focus_openmp_executor_error)
      failed = error != nullptr;
      if (failed) continue;
      try {
        body(task, static_cast<index_t>(omp_get_thread_num()));
      } catch (...) {
#pragma omp critical(focus_openmp_executor_error)
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
#else
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads_)
    for (index_t task = 0; task < tasks; ++task)
      body(task, static_cast<index_t>(omp_get_thread_num()));
#endif
  }

 private:
  int threads_;
};
#endif

/// Scratch memory that outlives a call: it grows to the largest need seen and is then reused, so
/// that further calls of the same shapes allocate nothing. One workspace serves one call at a time.
class workspace {
 public:
  workspace() noexcept = default;

  /// Bytes held.
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }

  /// At least `bytes` bytes, aligned to a cache line; earlier contents are lost when it grows.
  /// Throws std::bad_alloc.
  std::byte* reserve(std::size_t bytes) {
    if (bytes > capacity_) {
      memory_.reset();
      capacity_ = 0;
      memory_.reset(static_cast<std::byte*>(::operator new(bytes, alignment)));
      capacity_ = bytes;
    }
    return memory_.get();
  }

  /// Gives the memory back.
  void release() noexcept {
    memory_.reset();
    capacity_ = 0;
  }

 private:
  static constexpr std::align_val_t alignment{64};
  struct deleter {
    void operator()(std::byte* p) const noexcept { ::operator delete(p, alignment); }
  };
  std::unique_ptr<std::byte, deleter> memory_;
  std::size_t capacity_ = 0;
};

/// An executor that also lends a workspace; made by with_workspace.
template <class E>
class workspace_executor {
 public:
  constexpr workspace_executor(E exec, focus::workspace& scratch) noexcept
      : exec_(static_cast<E&&>(exec)), scratch_(&scratch) {}
  [[nodiscard]] constexpr index_t concurrency() const {
    return static_cast<index_t>(std::as_const(exec_).concurrency());
  }
  template <class F>
  constexpr void parallel_for(index_t tasks, F&& body) {
    exec_.parallel_for(tasks, body);
  }
  template <class F>
  constexpr void parallel_for(index_t tasks, F&& body) const {
    exec_.parallel_for(tasks, body);
  }
  [[nodiscard]] constexpr focus::workspace& workspace() const noexcept { return *scratch_; }

 private:
  E exec_;  // a reference for an lvalue, the executor itself for a temporary
  focus::workspace* scratch_;
};

/// Lends `scratch` to each call made with the returned executor, which refers to both arguments (it
/// keeps a temporary executor itself).
template <class E>
requires executor<std::remove_cvref_t<E>>
constexpr workspace_executor<E> with_workspace(E&& exec, workspace& scratch) noexcept {
  return {std::forward<E>(exec), scratch};
}

namespace detail {

/// The body of a parallel loop, of whatever type: what executors are given to call.
class loop_body {
 public:
  template <class F>
  requires(!std::same_as<F, loop_body>) explicit loop_body(F& body) noexcept
      : body_(const_cast<void*>(static_cast<const void*>(std::addressof(body)))),
        call_([](void* f, index_t task, index_t worker) { (*static_cast<F*>(f))(task, worker); }) {}
  void operator()(index_t task, index_t worker) const { call_(body_, task, worker); }

 private:
  void* body_;
  void (*call_)(void*, index_t, index_t);
};

/// An executor of whatever type, and the workspace that it may lend: all that is behind the checks
/// of a public function is then compiled once, and not once for each type of executor. Refers to
/// the executor.
class any_executor {
 public:
  template <class E>
  requires(!std::same_as<std::remove_const_t<E>, any_executor>) explicit any_executor(E& exec)
      : exec_(const_cast<void*>(static_cast<const void*>(std::addressof(exec)))),
        loop_([](void* e, index_t tasks, const loop_body& body) {
          static_cast<E*>(e)->parallel_for(tasks, body);
        }),
        concurrency_(static_cast<index_t>(std::as_const(exec).concurrency())) {
    if constexpr (requires {
                    { exec.workspace() } -> std::same_as<workspace&>;
                  })
      scratch_ = std::addressof(exec.workspace());
  }

  [[nodiscard]] index_t concurrency() const noexcept { return concurrency_; }
  template <class F>
  void parallel_for(index_t tasks, F&& body) const {
    loop_(exec_, tasks, loop_body(body));
  }
  /// Null where none is lent.
  [[nodiscard]] workspace* scratch() const noexcept { return scratch_; }

 private:
  void* exec_;
  void (*loop_)(void*, index_t, const loop_body&);
  index_t concurrency_;
  workspace* scratch_ = nullptr;
};

constexpr index_t ceil_div(index_t a, index_t b) noexcept {
  return (a + b - 1) / b;
}
constexpr index_t round_up(index_t a, index_t b) noexcept {
  return ceil_div(a, b) * b;
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
