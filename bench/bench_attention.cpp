// Dense and sparse attention, fp32, causal, 8 heads, one thread.
//
//   GFLOP/s      4 head_dim operations a pair and head
//   peak_share   their share of the FMA peak that is measured in this run
//   pairs_share  pairs computed / causal pairs
//   plan_share   share of the time that goes into building the routing plan
//   allocations  in one call, once warm, with a workspace
//
// How much faster sparse is than dense: see speedup.cpp, which alternates the two.
#include <benchmark/benchmark.h>

#include <focus/focus.hpp>

#include "masks.hpp"
#include "meter.hpp"
#include "workload.hpp"

namespace {

using focus::index_t;

constexpr index_t heads = 8;

void dense(benchmark::State& state) {
  const index_t tokens = state.range(0), head_dim = state.range(1);
  bench::attention_inputs<float> in(heads, tokens, head_dim);
  focus::workspace scratch;
  focus::serial_executor serial;
  auto exec = focus::with_workspace(serial, scratch);
  const auto call = [&] {
    focus::attention(in.q(), in.k(), in.v(), in.out(), focus::full_causal, {}, {}, exec);
  };
  call();
  bench::meter measured;
  measured.run(state, call);
  measured.report(state, bench::causal_pairs(tokens), heads, bench::flops_per_pair(head_dim),
                  tokens);
}
BENCHMARK(dense)
    ->ArgNames({"tokens", "head_dim"})
    ->ArgsProduct({{1024, 4096}, {64, 128}})
    ->Unit(benchmark::kMillisecond);

/// With the plan built anew in each call, as prefill does in each layer.
void sparse(benchmark::State& state) {
  const index_t tokens = state.range(0), head_dim = state.range(1);
  bench::attention_inputs<float> in(heads, tokens, head_dim);
  const auto masks = bench::balanced_masks(tokens, state.range(2), state.range(3));
  const focus::pattern_options pattern{.window = state.range(4), .sink_tokens = 1};
  focus::workspace scratch;
  focus::serial_executor serial;
  auto exec = focus::with_workspace(serial, scratch);
  auto plan = focus::make_routing_plan(masks, pattern);
  double plan_seconds = 0;
  const auto call = [&] {
    const double start = bench::cpu_seconds();
    plan.rebuild(masks, pattern);
    plan_seconds += bench::cpu_seconds() - start;
    focus::sparse_attention(in.q(), in.k(), in.v(), plan, in.out(), {}, {}, exec);
  };
  call();
  plan_seconds = 0;
  bench::meter measured;
  measured.run(state, call);
  state.counters["plan_share"] = plan_seconds / measured.seconds();
  measured.report(state, static_cast<double>(plan.allowed_pairs()), heads,
                  bench::flops_per_pair(head_dim), tokens);
}
BENCHMARK(sparse)
    ->ArgNames({"tokens", "head_dim", "groups", "top_k", "window"})
    ->ArgsProduct({{1024, 4096}, {64, 128}, {8}, {1, 2}, {128}})
    ->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
