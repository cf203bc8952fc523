// The steps that come before attention, in fp32, one thread, against the one product that cannot be
// avoided: H W_g, hidden [tokens, d_model] times projection [d_model, d_group], by Eigen.
#include <cstddef>
#include <type_traits>
#include <vector>

#include <Eigen/Core>
#include <benchmark/benchmark.h>

#include <focus/focus.hpp>

#include "allocations.hpp"
#include "masks.hpp"
#include "workload.hpp"

namespace {

using focus::index_t;
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr index_t d_model = 768, d_group = 16, groups = 8;

bench::router_inputs<float> make_inputs(index_t tokens) {
  return {tokens, d_model, d_group};
}

/// The allocations of a call, once warm, with a workspace.
template <class F>
void run(benchmark::State& state, F&& call) {
  call();
  long allocations = 0;
  for (auto _ : state) {
    const long before = bench::allocations;
    call();
    allocations += bench::allocations - before;
  }
  state.counters["allocations"] =
      static_cast<double>(allocations) / static_cast<double>(state.iterations());
  state.counters["tokens/s"] = benchmark::Counter(static_cast<double>(state.range(0)),
                                                  benchmark::Counter::kIsIterationInvariantRate);
}

void eigen_projection(benchmark::State& state) {
  const auto in = make_inputs(state.range(0));
  const Eigen::Map<const matrix> hidden(in.hidden().data(), in.tokens(), d_model);
  const Eigen::Map<const matrix> projection(in.projection().data(), d_model, d_group);
  matrix projected(in.tokens(), d_group);
  run(state, [&] {
    projected.noalias() = hidden * projection;
    benchmark::DoNotOptimize(projected.data());
    benchmark::ClobberMemory();
  });
}

void centroid_scores(benchmark::State& state) {
  const auto in = make_inputs(state.range(0));
  std::vector<float> scores(static_cast<std::size_t>(in.tokens() * groups));
  focus::workspace scratch;
  focus::serial_executor serial;
  auto exec = focus::with_workspace(serial, scratch);
  run(state, [&] {
    focus::centroid_scores(in.hidden(), in.params(groups),
                           focus::matrix_view<float>(scores.data(), {in.tokens(), groups}), exec);
  });
}

void route(benchmark::State& state) {
  const auto in = make_inputs(state.range(0));
  std::vector<focus::group_mask> masks(static_cast<std::size_t>(in.tokens()));
  focus::workspace scratch;
  focus::serial_executor serial;
  auto exec = focus::with_workspace(serial, scratch);
  run(state, [&] {
    focus::route(in.hidden(), in.params(groups), in.potentials(groups), 1, masks, {}, exec);
  });
}

void sinkhorn(benchmark::State& state) {
  const index_t tokens = state.range(0);
  const std::vector<float> scores = bench::made_up(tokens * groups, 1);
  std::vector<float> assignment(scores.size()), potentials(static_cast<std::size_t>(groups));
  focus::workspace scratch;
  focus::serial_executor serial;
  auto exec = focus::with_workspace(serial, scratch);
  run(state, [&] {
    focus::sinkhorn(focus::matrix_view<const float>(scores.data(), {tokens, groups}),
                    focus::matrix_view<float>(assignment.data(), {tokens, groups}), potentials, {},
                    exec);
  });
}

/// All four gradients: the forward product once more, and two of its size.
void centroid_scores_backward(benchmark::State& state) {
  const auto in = make_inputs(state.range(0));
  const std::vector<float> dscores = bench::made_up(in.tokens() * groups, 4);
  std::vector<float> dhidden(static_cast<std::size_t>(in.hidden().size())),
      dprojection(static_cast<std::size_t>(in.projection().size())),
      dbias(static_cast<std::size_t>(d_group)),
      dcentroids(static_cast<std::size_t>(groups * d_group));
  focus::workspace scratch;
  focus::serial_executor serial;
  auto exec = focus::with_workspace(serial, scratch);
  run(state, [&] {
    focus::centroid_scores_backward(
        in.hidden(), in.params(groups),
        focus::matrix_view<const float>(dscores.data(), {in.tokens(), groups}),
        focus::matrix_view<float>(dhidden.data(), {in.tokens(), d_model}),
        focus::matrix_view<float>(dprojection.data(), {d_model, d_group}), dbias,
        focus::matrix_view<float>(dcentroids.data(), {groups, d_group}), exec);
  });
}

/// Without dhidden: what training the router alone needs.
void centroid_scores_backward_parameters(benchmark::State& state) {
  const auto in = make_inputs(state.range(0));
  const std::vector<float> dscores = bench::made_up(in.tokens() * groups, 4);
  std::vector<float> dprojection(static_cast<std::size_t>(in.projection().size())),
      dbias(static_cast<std::size_t>(d_group)),
      dcentroids(static_cast<std::size_t>(groups * d_group));
  focus::workspace scratch;
  focus::serial_executor serial;
  auto exec = focus::with_workspace(serial, scratch);
  run(state, [&] {
    focus::centroid_scores_backward(
        in.hidden(), in.params(groups),
        focus::matrix_view<const float>(dscores.data(), {in.tokens(), groups}), {},
        focus::matrix_view<float>(dprojection.data(), {d_model, d_group}), dbias,
        focus::matrix_view<float>(dcentroids.data(), {groups, d_group}), exec);
  });
}

void sinkhorn_backward(benchmark::State& state) {
  const index_t tokens = state.range(0);
  const std::vector<float> scores = bench::made_up(tokens * groups, 1);
  const std::vector<float> dassignment = bench::made_up(tokens * groups, 2);
  std::vector<float> assignment(scores.size()), potentials(static_cast<std::size_t>(groups)),
      dscores(scores.size());
  const auto view = [&](auto& x) {
    return focus::tensor_view<std::remove_reference_t<decltype(*x.data())>, 2>(x.data(),
                                                                               {tokens, groups});
  };
  focus::sinkhorn(view(scores), view(assignment), potentials);
  focus::workspace scratch;
  focus::serial_executor serial;
  auto exec = focus::with_workspace(serial, scratch);
  run(state, [&] {
    focus::sinkhorn_backward(view(scores), view(assignment), potentials, view(dassignment),
                             view(dscores), {}, exec);
  });
}

void plan_rebuild(benchmark::State& state) {
  const index_t tokens = state.range(0);
  const auto masks = bench::balanced_masks(tokens, groups, state.range(1));
  focus::routing_plan plan;
  run(state, [&] { plan.rebuild(masks, {.window = 128, .sink_tokens = 1}); });
}

constexpr benchmark::TimeUnit unit = benchmark::kMicrosecond;
BENCHMARK(eigen_projection)->ArgName("tokens")->Arg(1024)->Arg(4096)->Unit(unit);
BENCHMARK(centroid_scores)->ArgName("tokens")->Arg(1024)->Arg(4096)->Unit(unit);
BENCHMARK(route)->ArgName("tokens")->Arg(1024)->Arg(4096)->Unit(unit);
BENCHMARK(sinkhorn)->ArgName("tokens")->Arg(1024)->Arg(4096)->Unit(unit);
BENCHMARK(centroid_scores_backward)->ArgName("tokens")->Arg(1024)->Arg(4096)->Unit(unit);
BENCHMARK(centroid_scores_backward_parameters)->ArgName("tokens")->Arg(1024)->Arg(4096)->Unit(unit);
BENCHMARK(sinkhorn_backward)->ArgName("tokens")->Arg(1024)->Arg(4096)->Unit(unit);
BENCHMARK(plan_rebuild)
    ->ArgNames({"tokens", "top_k"})
    ->ArgsProduct({{1024, 4096}, {1, 2}})
    ->Unit(unit);

}  // namespace

BENCHMARK_MAIN();
