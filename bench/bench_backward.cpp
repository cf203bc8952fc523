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

/// One layer's tensors, and a loss's gradient with regard to out.
struct layer {
  bench::attention_inputs<float> in;
  std::vector<float> lse_data, dout_data, dq_data, dk_data, dv_data, assignment_data, dquery_data,
      dkey_data;
  index_t tokens, head_dim;
  focus::workspace scratch;

  layer(index_t n, index_t d)
      : in(heads, n, d),
        lse_data(static_cast<std::size_t>(heads * n)),
        dout_data(bench::made_up(heads * n * d, 5)),
        dq_data(dout_data.size()),
        dk_data(dout_data.size()),
        dv_data(dout_data.size()),
        assignment_data(static_cast<std::size_t>(n * groups), 1.0f / static_cast<float>(groups)),
        dquery_data(assignment_data.size()),
        dkey_data(assignment_data.size()),
        tokens(n),
        head_dim(d) {}

  focus::tensor_view<float, 3> tensor(std::vector<float>& data) const {
    return {data.data(), {heads, tokens, head_dim}};
  }
  focus::matrix_view<float> lse() { return {lse_data.data(), {heads, tokens}}; }
  focus::matrix_view<float> shares(std::vector<float>& data) const {
    return {data.data(), {tokens, groups}};
  }
  auto exec() { return focus::with_workspace(focus::serial_executor{}, scratch); }
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
  focus::attention(x.in.q(), x.in.k(), x.in.v(), x.in.out(), focus::full_causal, {}, x.lse());
  measure(state, x, bench::causal_pairs(x.tokens), 10, [&] {
    focus::attention_backward(x.in.q(), x.in.k(), x.in.v(), x.in.out(), x.lse(),
                              x.tensor(x.dout_data), x.tensor(x.dq_data), x.tensor(x.dk_data),
                              x.tensor(x.dv_data), focus::full_causal, {}, x.exec());
  });
}

void sparse_attention_backward(benchmark::State& state) {
  layer x(state.range(0), state.range(1));
  const auto plan =
      focus::make_routing_plan(bench::balanced_masks(x.tokens, groups, /*top_k=*/1), local);
  focus::sparse_attention(x.in.q(), x.in.k(), x.in.v(), plan, x.in.out(), {}, x.lse());
  measure(state, x, static_cast<double>(plan.allowed_pairs()), 10, [&] {
    focus::sparse_attention_backward(x.in.q(), x.in.k(), x.in.v(), plan, x.in.out(), x.lse(),
                                     x.tensor(x.dout_data), x.tensor(x.dq_data),
                                     x.tensor(x.dk_data), x.tensor(x.dv_data), {}, x.exec());
  });
}

constexpr focus::gate_options by_weight{.kind = focus::gate_kind::weight};

void soft_gate_attention(benchmark::State& state) {
  layer x(state.range(0), state.range(1));
  measure(state, x, bench::causal_pairs(x.tokens), 4, [&] {
    focus::soft_gate_attention(x.in.q(), x.in.k(), x.in.v(), x.shares(x.assignment_data),
                               x.shares(x.assignment_data), by_weight, x.in.out(), local, {},
                               x.lse(), x.exec());
  });
}

void soft_gate_attention_backward(benchmark::State& state) {
  layer x(state.range(0), state.range(1));
  focus::soft_gate_attention(x.in.q(), x.in.k(), x.in.v(), x.shares(x.assignment_data),
                             x.shares(x.assignment_data), by_weight, x.in.out(), local, {},
                             x.lse());
  measure(state, x, bench::causal_pairs(x.tokens), 10, [&] {
    focus::soft_gate_attention_backward(
        x.in.q(), x.in.k(), x.in.v(), x.shares(x.assignment_data), x.shares(x.assignment_data),
        by_weight, x.in.out(), x.lse(), x.tensor(x.dout_data), {}, x.tensor(x.dq_data),
        x.tensor(x.dk_data), x.tensor(x.dv_data), x.shares(x.dquery_data), x.shares(x.dkey_data),
        local, {}, x.exec());
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
