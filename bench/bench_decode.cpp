// A step of generation over a full cache, one token, one thread, and what append costs.
//
//   GB/s        bytes of K and V that are allowed, once for each kv head, a second
//   allocations  in one step, once warm, with a workspace
//
// Against the rate of the memory, with threads and many sequences: see decode.cpp.
#include <cstddef>
#include <cstdint>
#include <span>

#include <benchmark/benchmark.h>

#include <focus/focus.hpp>

#include "allocations.hpp"
#include "decode_setting.hpp"
#include "workload.hpp"

namespace {

using focus::index_t;

template <class T>
void decode(benchmark::State& state) {
  const bench::decode_setting s{.tokens = state.range(0),
                                .heads = state.range(1),
                                .kv_heads = 8,
                                .head_dim = 64,
                                .queries = state.range(3),
                                .groups = state.range(2)};
  bench::decode_workload<T> work(s);
  focus::workspace scratch;
  focus::serial_executor serial;
  auto exec = focus::with_workspace(serial, scratch);
  work.step(exec);
  long allocations = 0;
  for (auto _ : state) {
    const long before = bench::allocations;
    work.step(exec);
    allocations += bench::allocations - before;
  }
  state.counters["GB/s"] =
      benchmark::Counter(work.bytes_read() / 1e9, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["allocations"] =
      static_cast<double>(allocations) / static_cast<double>(state.iterations());
}
#define FOCUS_BENCH_DECODE(type)                           \
  BENCHMARK_TEMPLATE(decode, type)                         \
      ->ArgNames({"tokens", "heads", "K", "queries"})      \
      ->ArgsProduct({{4096, 32768}, {8, 32}, {0, 8}, {1}}) \
      ->ArgsProduct({{4096}, {32}, {0}, {4, 64}})          \
      ->Unit(benchmark::kMicrosecond)
FOCUS_BENCH_DECODE(float);
FOCUS_BENCH_DECODE(focus::bfloat16);
FOCUS_BENCH_DECODE(focus::float16);
FOCUS_BENCH_DECODE(std::int8_t);

/// Blocks of `range(0)` tokens, up to 4096 tokens and from there back to none.
template <class T>
void append(benchmark::State& state) {
  const index_t block = state.range(0), tokens = 4096, kv_heads = 8, head_dim = 64;
  const auto rows = bench::made_up(kv_heads * block * head_dim, 1);
  const auto masks = bench::balanced_masks(tokens, 8, 1);
  const focus::tensor_view<const float, 3> view(rows.data(), {kv_heads, block, head_dim});
  focus::kv_cache<T> cache(kv_heads, head_dim, head_dim);
  for (auto _ : state) {
    if (cache.size() + block > tokens) cache.truncate(0);
    cache.append(view, view,
                 std::span(masks).subspan(static_cast<std::size_t>(cache.size()),
                                          static_cast<std::size_t>(block)));
  }
  state.counters["tokens/s"] =
      benchmark::Counter(static_cast<double>(block), benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK_TEMPLATE(append, float)->Arg(1)->Arg(512)->Unit(benchmark::kMicrosecond);
BENCHMARK_TEMPLATE(append, focus::bfloat16)->Arg(1)->Arg(512)->Unit(benchmark::kMicrosecond);
BENCHMARK_TEMPLATE(append, std::int8_t)->Arg(1)->Arg(512)->Unit(benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
