// Executors, workspaces and scratch memory.
#include <algorithm>
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
#include "focus/kernel/scratch.hpp"
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
  const auto bytes = plan.add<std::uint8_t>(3);
  const auto none = plan.add<double>(0);
  const auto doubles = plan.add<double>(9);
  const auto floats = plan.add<float>(16);
  CHECK(plan.bytes() == 64 + 128 + 64);
  focus::serial_executor exec;
  CHECK(allocations_of([&] {
          const focus::detail::scratch_memory memory(focus::detail::any_executor(exec), plan);
          CHECK(memory[none] == memory[doubles]);
          CHECK(is_aligned(memory[doubles]));
          CHECK(is_aligned(memory[floats]));
          std::fill_n(memory[bytes], 3, std::uint8_t{1});
          std::fill_n(memory[doubles], 9, 2.0);
          std::fill_n(memory[floats], 16, 3.0f);
          CHECK(memory[bytes][2] == 1);
          CHECK(memory[doubles][8] == 2.0);
        }) == 1);
}

TEST_CASE("scratch memory: each worker has arrays of its own") {
  focus::detail::scratch_plan plan, one;
  const auto before = plan.add<float>(1);
  const auto ints = one.add<int>(20);
  const auto doubles = one.add<double>(3);
  const auto each = plan.add_each(3, one);
  const auto behind = plan.add<float>(1);
  CHECK(plan.bytes() == 64 + 3 * (128 + 64) + 64);
  focus::serial_executor exec;
  const focus::detail::scratch_memory memory(focus::detail::any_executor(exec), plan);
  *memory[before] = *memory[behind] = 7.0f;
  for (int worker = 0; worker < 3; ++worker) {
    const auto own = each.of(memory, worker);
    CHECK(is_aligned(own[ints]));
    CHECK(is_aligned(own[doubles]));
    std::fill_n(own[ints], 20, worker);
    std::fill_n(own[doubles], 3, 0.5 + worker);
  }
  for (int worker = 0; worker < 3; ++worker) {
    const auto own = each.of(memory, worker);
    CHECK(std::count(own[ints], own[ints] + 20, worker) == 20);
    CHECK(std::count(own[doubles], own[doubles] + 3, 0.5 + worker) == 3);
  }
  CHECK(*memory[before] == 7.0f);
  CHECK(*memory[behind] == 7.0f);
}

TEST_CASE("scratch memory comes from the workspace where there is one") {
  focus::detail::scratch_plan plan;
  const auto floats = plan.add<float>(100);
  focus::workspace ws;
  auto exec = focus::with_workspace(focus::serial_executor{}, ws);
  const auto use = [&] {
    const focus::detail::scratch_memory memory(focus::detail::any_executor(exec), plan);
    CHECK(reinterpret_cast<std::byte*>(memory[floats]) == ws.reserve(0));
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
