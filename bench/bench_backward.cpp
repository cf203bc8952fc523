// Gradients of dense, sparse and softly gated attention, fp32, causal, 8 heads, one thread: forward
// and backward.
//
//   peak_share   of the FMA peak that is measured in this run, at 4 head_dim operations a pair and
//                head forward, 10 backward (the scores made again among them)
//   pairs_share  pairs computed / causal pairs
//   allocations  in one call, once warm, with a workspace
#include <benchmark/benchmark.h>

#include <focus/focus.hpp>

#include "masks.hpp"
#include "meter.hpp"
#include "workload.hpp"

namespace {

using focus::index_t;

constexpr index_t heads = 8, groups = 8;
constexpr focus::pattern_options local{.window = 128, .sink_tokens = 1};

/// One layer's tensors, its assignments, and their gradients.
struct layer : bench::gradient_inputs<float> {
  std::vector<float> assignment_data, dquery_data, dkey_data;
  index_t tokens, head_dim;
  focus::workspace scratch;

  layer(index_t n, index_t d)
      : bench::gradient_inputs<float>(heads, n, d),
        assignment_data(static_cast<std::size_t>(n * groups), 1.0f / static_cast<float>(groups)),
        dquery_data(assignment_data.size()),
        dkey_data(assignment_data.size()),
        tokens(n),
        head_dim(d) {}

  focus::matrix_view<float> assignment() { return shares(assignment_data); }
  focus::matrix_view<float> dquery() { return shares(dquery_data); }
  focus::matrix_view<float> dkey() { return shares(dkey_data); }
  auto exec() { return focus::with_workspace(focus::serial_executor{}, scratch); }

 private:
  focus::matrix_view<float> shares(std::vector<float>& data) const {
    return {data.data(), {tokens, groups}};
  }
};

/// Measures call() after one to warm up.
template <class F>
void measure(benchmark::State& state, const layer& x, double pairs, double operations, F&& call) {
  call();
  bench::meter measured;
  measured.run(state, call);
  measured.report(state, pairs, heads, operations * static_cast<double>(x.head_dim), x.tokens);
}

void attention_backward(benchmark::State& state) {
  layer x(state.range(0), state.range(1));
  focus::attention(x.q(), x.k(), x.v(), x.out(), focus::full_causal, {}, x.lse());
  measure(state, x, bench::causal_pairs(x.tokens), 10, [&] {
    focus::attention_backward(x.q(), x.k(), x.v(), x.out(), x.lse(), x.dout(), x.dq(), x.dk(),
                              x.dv(), focus::full_causal, {}, x.exec());
  });
}

void sparse_attention_backward(benchmark::State& state) {
  layer x(state.range(0), state.range(1));
  const auto plan =
      focus::make_routing_plan(bench::balanced_masks(x.tokens, groups, /*top_k=*/1), local);
  focus::sparse_attention(x.q(), x.k(), x.v(), plan, x.out(), {}, x.lse());
  measure(state, x, static_cast<double>(plan.allowed_pairs()), 10, [&] {
    focus::sparse_attention_backward(x.q(), x.k(), x.v(), plan, x.out(), x.lse(), x.dout(), x.dq(),
                                     x.dk(), x.dv(), {}, x.exec());
  });
}

constexpr focus::gate_options by_weight{.kind = focus::gate_kind::weight};

void soft_gate_attention(benchmark::State& state) {
  layer x(state.range(0), state.range(1));
  measure(state, x, bench::causal_pairs(x.tokens), 4, [&] {
    focus::soft_gate_attention(x.q(), x.k(), x.v(), x.assignment(), x.assignment(), by_weight,
                               x.out(), local, {}, x.lse(), x.exec());
  });
}

void soft_gate_attention_backward(benchmark::State& state) {
  layer x(state.range(0), state.range(1));
  focus::soft_gate_attention(x.q(), x.k(), x.v(), x.assignment(), x.assignment(), by_weight,
                             x.out(), local, {}, x.lse());
  measure(state, x, bench::causal_pairs(x.tokens), 10, [&] {
    focus::soft_gate_attention_backward(x.q(), x.k(), x.v(), x.assignment(), x.assignment(),
                                        by_weight, x.out(), x.lse(), x.dout(), {}, x.dq(), x.dk(),
                                        x.dv(), x.dquery(), x.dkey(), local, {}, x.exec());
  });
}

void each_size(benchmark::internal::Benchmark* b) {
  b->ArgNames({"tokens", "head_dim"})
      ->ArgsProduct({{1024, 4096}, {64, 128}})
      ->Unit(benchmark::kMillisecond);
}
BENCHMARK(attention_backward)->Apply(each_size);
BENCHMARK(sparse_attention_backward)->Apply(each_size);
BENCHMARK(soft_gate_attention)->Apply(each_size);
BENCHMARK(soft_gate_attention_backward)->Apply(each_size);

}  // namespace

BENCHMARK_MAIN();
