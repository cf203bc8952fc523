// A team: threads that arrive together, once for each operation.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "catch.hpp"
#include "focus/error.hpp"
#include "focus/routing_plan.hpp"
#include "focus/sparse_attention.hpp"
#include "focus/team.hpp"

namespace test_team {
namespace {

using focus::index_t;

static_assert(focus::executor<focus::team_executor>);
static_assert(focus::executor<const focus::team_executor>);

/// An engine: calls f(ith) on each of its threads.
template <class F>
void on_threads(index_t threads, F&& f) {
  std::vector<std::thread> others;
  for (index_t ith = 1; ith < threads; ++ith) others.emplace_back([&f, ith] { f(ith); });
  f(index_t{0});
  for (std::thread& other : others) other.join();
}

struct problem {
  static constexpr index_t heads = 2, tokens = 200, head_dim = 8;
  std::vector<float> values = std::vector<float>(std::size_t{heads * tokens * head_dim});
  focus::routing_plan plan;

  problem() {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>((i * i + 3 * i) % 17) / 8 - 1;
    std::vector<focus::group_mask> masks(std::size_t{tokens});
    for (std::size_t i = 0; i < masks.size(); ++i) masks[i] = focus::group_mask{1} << (i * i % 4);
    plan = focus::make_routing_plan(masks, {.window = 6, .sink_tokens = 1});
  }
  template <class E>
  void attend(std::vector<float>& to, E& exec) const {
    const focus::tensor_view<const float, 3> x(values.data(), {heads, tokens, head_dim});
    const focus::tensor_view<float, 3> out(to.data(), {heads, tokens, head_dim});
    focus::sparse_attention(x, x, x, plan, out, {}, {}, exec);
  }
  std::vector<float> serial() const {
    std::vector<float> out(values.size());
    focus::serial_executor exec;
    attend(out, exec);
    return out;
  }
};

TEST_CASE("team: each task once, by workers below nth, for any number of threads") {
  focus::team team;
  for (const index_t nth : {1, 2, 3, 5, 8}) {
    CAPTURE(nth);
    for (const index_t tasks : {0, 1, 2, 3, 100}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
      std::vector<std::atomic<int>> busy(static_cast<std::size_t>(nth));
      std::atomic<bool> good{true};
      on_threads(nth, [&](index_t ith) {
        team.run(ith, nth, [&](auto& exec) {
          if (ith != 0 || exec.concurrency() != nth) good = false;
          exec.parallel_for(tasks, [&](index_t task, index_t worker) {
            if (worker < 0 || worker >= nth) {
              good = false;
              return;
            }
            if (busy[static_cast<std::size_t>(worker)]++ != 0) good = false;
            ++runs[static_cast<std::size_t>(task)];
            --busy[static_cast<std::size_t>(worker)];
          });
        });
      });
      CHECK(good);
      CHECK(std::all_of(runs.begin(), runs.end(), [](const auto& r) { return r == 1; }));
    }
  }
}

TEST_CASE("team: sparse attention has the bits of the serial call, call after call") {
  const problem p;
  const std::vector<float> serial = p.serial();
  focus::team team;
  for (index_t nth = 1; nth <= 8; ++nth) {
    CAPTURE(nth);
    constexpr int calls = 10;
    std::vector<std::vector<float>> outs(calls, std::vector<float>(serial.size()));
    std::atomic<int> seen_whole{0};
    on_threads(nth, [&](index_t ith) {
      for (std::vector<float>& out : outs) {
        team.run(ith, nth, [&](auto& exec) { p.attend(out, exec); });
        // What the leader wrote is there for each thread that returns.
        if (out == serial) ++seen_whole;
      }
    });
    CHECK(seen_whole == calls * nth);
  }
}

TEST_CASE("team: nth and the numbers of threads change between calls") {
  constexpr index_t threads = 5;
  constexpr int calls = 400;
  focus::team team;
  std::atomic<int> arrived{0};  // the engine's own barrier between operations
  std::atomic<index_t> sum{0};
  std::atomic<bool> good{true};
  on_threads(threads, [&](index_t thread) {
    for (int call = 0; call < calls; ++call) {
      const index_t nth = 1 + call * 3 % threads, ith = (thread + call) % threads;
      if (ith < nth) {
        team.run(ith, nth, [&](auto& exec) {
          for (int loop = 0; loop < 2; ++loop)
            exec.parallel_for(9, [&](index_t task, index_t worker) {
              if (worker >= nth) good = false;
              sum += task;
            });
        });
      }
      ++arrived;
      while (arrived < threads * (call + 1)) std::this_thread::yield();
    }
  });
  CHECK(good);
  CHECK(sum == 36 * 2 * calls);
}

TEST_CASE("team: no barrier is needed between calls of the same threads, whoever leads") {
  constexpr index_t threads = 4;
  constexpr int calls = 500;
  focus::team team;
  std::array<int, 2> done{};  // written by leaders only: each call sees what the ones before wrote
  std::atomic<bool> good{true};
  on_threads(threads, [&](index_t thread) {
    for (int call = 0; call < calls; ++call) {
      team.run((thread + call) % threads, threads, [&](auto& exec) {
        if (done[0] != call) good = false;
        exec.parallel_for(3, [](index_t, index_t) {});
        done[0] = call + 1;
      });
      if (done[0] < call + 1) good = false;
      // Read by all before the next leader writes: that call's leader is its own reader.
      team.run(thread, threads, [](auto&) {});
    }
  });
  CHECK(good);
  CHECK(done[0] == calls);
}

TEST_CASE("team: what the leader throws reaches its caller, and the others return") {
  const problem p;
  const std::vector<float> serial = p.serial();
  for (const index_t nth : {1, 2, 5, 8}) {
    CAPTURE(nth);
    focus::team team;
    std::atomic<int> thrown{0}, returned{0};
    std::vector<float> out(serial.size());
    on_threads(nth, [&](index_t ith) {
      for (int call = 0; call < 20; ++call) {
        try {
          team.run(ith, nth, [](auto& exec) {
            exec.parallel_for(4, [](index_t, index_t) {});
            throw std::runtime_error("leader");
          });
          ++returned;
        } catch (const std::runtime_error&) {
          if (ith == 0) ++thrown;
        }
      }
      team.run(ith, nth, [&](auto& exec) { p.attend(out, exec); });
    });
    CHECK(thrown == 20);
    CHECK(returned == 20 * (nth - 1));
    CHECK(out == serial);
  }
}

TEST_CASE("team: what a body throws, on any thread, reaches the leader") {
  for (const index_t nth : {2, 3, 8}) {
    CAPTURE(nth);
    focus::team team;
    std::atomic<int> by_helper{0}, thrown{0}, returned{0};
    std::atomic<int> runs{0};
    on_threads(nth, [&](index_t ith) {
      for (int call = 0; call < 20; ++call) {
        try {
          team.run(ith, nth, [&](auto& exec) {
            // The leader's own tasks last until a helper has come, so that it is one that throws.
            std::atomic<bool> came{false};
            exec.parallel_for(1000, [&](index_t, index_t worker) {
              if (worker > 0) {
                came = true;
                ++by_helper;
                throw std::runtime_error("helper");
              }
              while (!came) std::this_thread::yield();
            });
          });
          ++returned;
        } catch (const std::runtime_error&) {
          if (ith == 0) ++thrown;
        }
      }
      team.run(ith, nth,
               [&](auto& exec) { exec.parallel_for(100, [&](index_t, index_t) { ++runs; }); });
    });
    CHECK(by_helper >= 20);
    CHECK(thrown == 20);
    CHECK(returned == 20 * (nth - 1));
    CHECK(runs == 100);
  }
}

TEST_CASE("team: a bad number of a thread is refused at once") {
  focus::team team;
  const auto nothing = [](auto&) {
  };
  for (const index_t nth : {0, -1})
    CHECK_THROWS_AS(team.run(0, nth, nothing), focus::invalid_argument);
  for (const index_t ith : {-1, 2, 3})
    CHECK_THROWS_AS(team.run(ith, 2, nothing), focus::invalid_argument);
  bool led = false;
  team.run(0, 1, [&](auto&) { led = true; });
  CHECK(led);
}

}  // namespace
}  // namespace test_team
