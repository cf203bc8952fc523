// Executors, workspaces and scratch memory.
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/parallel.hpp"

namespace test_parallel {
namespace {

using focus::index_t;
using oracle::allocations_of;

struct no_concurrency {
  template <class F>
  void parallel_for(index_t, F&&) {}
};
struct no_loop {
  index_t concurrency() const { return 1; }
};
/// A thread pool as an engine may have one: not copyable, and its loop is not const.
class pool {
 public:
  pool() = default;
  pool(const pool&) = delete;
  int concurrency() const { return 2; }
  template <class F>
  void parallel_for(index_t tasks, F&& body) {
    for (index_t task = tasks; task-- > 0;) body(task, task % 2);
    loops_ += 1;
  }
  int loops() const { return loops_; }

 private:
  int loops_ = 0;
};

static_assert(focus::executor<focus::serial_executor>);
static_assert(focus::executor<const focus::serial_executor>);
static_assert(focus::executor<pool> && !focus::executor<const pool>);
static_assert(focus::executor<oracle::thread_executor>);
static_assert(!focus::executor<no_concurrency> && !focus::executor<no_loop> &&
              !focus::executor<int>);
static_assert(focus::executor<focus::workspace_executor<pool&>>);

/// How often each task runs; the workers must be within the executor's concurrency.
template <class E>
std::vector<int> runs_of(E&& exec, index_t tasks) {
  std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
  std::atomic<bool> good_workers{true};
  const auto concurrency = static_cast<index_t>(exec.concurrency());
  exec.parallel_for(tasks, [&](index_t task, index_t worker) {
    if (worker < 0 || worker >= concurrency) good_workers = false;
    ++runs[static_cast<std::size_t>(task)];
  });
  CHECK(good_workers);
  return {runs.begin(), runs.end()};
}

template <class E>
void check_loops(E&& exec) {
  for (const index_t tasks : {0, 1, 2, 3, 100})
    CHECK(runs_of(exec, tasks) == std::vector<int>(static_cast<std::size_t>(tasks), 1));
}

bool is_aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % 64 == 0;
}

}  // namespace

TEST_CASE("executors run each task once") {
  check_loops(focus::serial_executor{});
  check_loops(pool{});
  for (const int threads : {1, 2, 3}) check_loops(oracle::thread_executor(threads));
#if defined(_OPENMP)
  for (const int threads : {0, 1, 2, 5}) check_loops(focus::openmp_executor(threads));
#endif
}

TEST_CASE("serial_executor takes the tasks in order, in the calling thread") {
  std::vector<index_t> order;
  focus::serial_executor::parallel_for(4, [&](index_t task, index_t worker) {
    CHECK(worker == 0);
    order.push_back(task);
  });
  CHECK(order == std::vector<index_t>{0, 1, 2, 3});
}

TEST_CASE("an exception in a body reaches the caller") {
  const auto body = [](index_t task, index_t) {
    if (task == 5) throw std::runtime_error("five");
  };
  CHECK_THROWS_AS(focus::serial_executor::parallel_for(9, body), std::runtime_error);
#if defined(_OPENMP)
  for (const int threads : {1, 3})
    CHECK_THROWS_AS(focus::openmp_executor(threads).parallel_for(9, body), std::runtime_error);
  CHECK_NOTHROW(focus::openmp_executor(3).parallel_for(5, body));
#endif
}

#if defined(_OPENMP)
TEST_CASE("openmp_executor: 0 threads is OpenMP's own choice") {
  CHECK(focus::openmp_executor().concurrency() == omp_get_max_threads());
  CHECK(focus::openmp_executor(3).concurrency() == 3);
}
#endif

TEST_CASE("workspace grows to the largest need, is aligned, and is reused") {
  focus::workspace ws;
  CHECK(ws.capacity() == 0);
  std::byte* const first = ws.reserve(100);
  CHECK(is_aligned(first));
  CHECK(ws.capacity() >= 100);
  CHECK(allocations_of([&] {
          CHECK(ws.reserve(100) == first);
          CHECK(ws.reserve(1) == first);
          CHECK(ws.reserve(0) == first);
        }) == 0);
  CHECK(is_aligned(ws.reserve(100000)));
  CHECK(ws.capacity() >= 100000);
  focus::workspace moved = std::move(ws);
  CHECK(moved.capacity() >= 100000);
  moved.release();
  CHECK(moved.capacity() == 0);
  CHECK(is_aligned(moved.reserve(7)));
}

TEST_CASE("with_workspace refers to an executor that has a name, and keeps one that has none") {
  focus::workspace ws;
  pool engine_pool;
  auto named = focus::with_workspace(engine_pool, ws);
  named.parallel_for(3, [](index_t, index_t) {});
  CHECK(engine_pool.loops() == 1);
  CHECK(named.concurrency() == 2);
  CHECK(&named.workspace() == &ws);
  auto kept = focus::with_workspace(oracle::thread_executor(3), ws);
  CHECK(kept.concurrency() == 3);
  check_loops(kept);
  const focus::serial_executor constant;
  check_loops(focus::with_workspace(constant, ws));
  // A constant result of it, around an executor that is not constant.
  const auto constant_result = focus::with_workspace(engine_pool, ws);
  static_assert(focus::executor<const focus::workspace_executor<oracle::thread_executor>>);
  CHECK(constant_result.concurrency() == 2);
  constant_result.parallel_for(3, [](index_t, index_t) {});
  CHECK(engine_pool.loops() == 2);
}

TEST_CASE("scratch memory: each array on cache lines of its own, in one allocation") {
  focus::detail::scratch_plan plan;
  const std::size_t bytes_at = plan.add<std::uint8_t>(3), none_at = plan.add<double>(0),
                    doubles_at = plan.add<double>(9), floats_at = plan.add<float>(16);
  CHECK(none_at == doubles_at);
  CHECK(plan.bytes() == 64 + 128 + 64);
  focus::serial_executor exec;
  CHECK(allocations_of([&] {
          const focus::detail::scratch_memory memory(focus::detail::any_executor(exec), plan);
          CHECK(is_aligned(memory.at<double>(doubles_at)));
          CHECK(is_aligned(memory.at<float>(floats_at)));
          std::fill_n(memory.at<std::uint8_t>(bytes_at), 3, std::uint8_t{1});
          std::fill_n(memory.at<double>(doubles_at), 9, 2.0);
          std::fill_n(memory.at<float>(floats_at), 16, 3.0f);
          CHECK(memory.at<std::uint8_t>(bytes_at)[2] == 1);
          CHECK(memory.at<double>(doubles_at)[8] == 2.0);
        }) == 1);
}

TEST_CASE("scratch memory comes from the workspace where there is one") {
  focus::detail::scratch_plan plan;
  plan.add<float>(100);
  focus::workspace ws;
  auto exec = focus::with_workspace(focus::serial_executor{}, ws);
  const auto use = [&] {
    const focus::detail::scratch_memory memory(focus::detail::any_executor(exec), plan);
    CHECK(reinterpret_cast<std::byte*>(memory.at<float>(0)) == ws.reserve(0));
  };
  CHECK(allocations_of(use) == 1);
  CHECK(ws.capacity() == plan.bytes());
  CHECK(allocations_of(use) == 0);
}

TEST_CASE("nothing planned, nothing allocated") {
  focus::serial_executor exec;
  CHECK(allocations_of([&] {
          const focus::detail::scratch_memory memory{focus::detail::any_executor(exec),
                                                     focus::detail::scratch_plan()};
        }) == 0);
}

TEST_CASE("ceil_div and round_up") {
  CHECK(focus::detail::ceil_div(0, 4) == 0);
  CHECK(focus::detail::ceil_div(1, 4) == 1);
  CHECK(focus::detail::ceil_div(8, 4) == 2);
  CHECK(focus::detail::round_up(0, 4) == 0);
  CHECK(focus::detail::round_up(9, 4) == 12);
}

}  // namespace test_parallel
