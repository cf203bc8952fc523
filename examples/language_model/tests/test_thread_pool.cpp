#include <atomic>
#include <stdexcept>

#include <focus/parallel.hpp>

#include "catch.hpp"
#include "thread_pool.hpp"

namespace test_thread_pool {
using language_model::index_t;
using language_model::thread_pool;

static_assert(focus::executor<thread_pool>);

TEST_CASE("thread_pool: every task runs once, by a worker that does nothing else meanwhile") {
  for (const index_t threads : {1, 2, 3, 8}) {
    thread_pool pool(threads);
    REQUIRE(pool.concurrency() == threads);
    for (int repeat = 0; repeat < 200; ++repeat) {
      const index_t tasks = repeat % 20;
      std::vector<std::atomic<int>> ran(static_cast<std::size_t>(tasks)),
          busy(static_cast<std::size_t>(threads));
      std::atomic<bool> alone = true;
      pool.parallel_for(tasks, [&](index_t task, index_t worker) {
        if (++busy[static_cast<std::size_t>(worker)] != 1) alone = false;
        ++ran[static_cast<std::size_t>(task)];
        --busy[static_cast<std::size_t>(worker)];
      });
      CHECK(alone);
      for (const auto& count : ran) CHECK(count == 1);
    }
  }
}

TEST_CASE("thread_pool: an exception reaches the caller, and the pool goes on") {
  for (const index_t threads : {1, 3}) {
    thread_pool pool(threads);
    std::atomic<index_t> ran = 0;
    const auto body = [&](index_t task, index_t) {
      ++ran;
      if (task == 5) throw std::runtime_error("task 5");
    };
    CHECK_THROWS_AS(pool.parallel_for(100000, body), std::runtime_error);
    CHECK(ran < 100000);
    ran = 0;
    pool.parallel_for(3, body);
    CHECK(ran == 3);
  }
}

}  // namespace test_thread_pool
