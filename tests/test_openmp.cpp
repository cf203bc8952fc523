// The library on OpenMP's threads: the same bits as in one thread, and exceptions that arrive.
#include <cstddef>
#include <cstdint>
#include <vector>

#include <focus/focus.hpp>

#include "catch.hpp"
#include "oracle.hpp"

namespace {

using focus::index_t;

constexpr index_t heads = 3, tokens = 200, head_dim = 16, d_model = 20, d_group = 6, groups = 4;

std::vector<float> made_up(index_t size, std::uint64_t seed) {
  oracle::generator random(seed);
  std::vector<float> values(static_cast<std::size_t>(size));
  for (float& x : values) x = static_cast<float>(random.normal());
  return values;
}

struct results {
  std::vector<float> dense, sparse, soft, assignment, potentials;
  std::vector<focus::group_mask> masks;
  bool operator==(const results&) const = default;
};

template <class Exec>
results compute(Exec&& exec) {
  const std::vector<float> hidden = made_up(tokens * d_model, 1),
                           projection = made_up(d_model * d_group, 2),
                           centroids = made_up(groups * d_group, 3),
                           q = made_up(heads * tokens * head_dim, 4),
                           k = made_up(heads * tokens * head_dim, 5),
                           v = made_up(heads * tokens * head_dim, 6);
  const focus::matrix_view<const float> hidden_view(hidden.data(), {tokens, d_model});
  const focus::centroid_params<float> router{.projection = {projection.data(), {d_model, d_group}},
                                             .centroids = {centroids.data(), {groups, d_group}}};
  const auto input = [](const std::vector<float>& x) {
    return focus::tensor_view<const float, 3>(x.data(), {heads, tokens, head_dim});
  };
  const auto output = [](std::vector<float>& x) {
    x.resize(static_cast<std::size_t>(heads * tokens * head_dim));
    return focus::tensor_view<float, 3>(x.data(), {heads, tokens, head_dim});
  };

  results r;
  std::vector<float> scores_data(static_cast<std::size_t>(tokens * groups));
  r.assignment.resize(scores_data.size());
  r.potentials.resize(static_cast<std::size_t>(groups));
  r.masks.resize(static_cast<std::size_t>(tokens));
  const focus::matrix_view<float> scores(scores_data.data(), {tokens, groups});
  const focus::matrix_view<float> assignment(r.assignment.data(), {tokens, groups});
  focus::centroid_scores(hidden_view, router, scores, exec);
  focus::sinkhorn(scores, assignment, r.potentials, {.temperature = 5.0f}, exec);
  focus::route(hidden_view, router, r.potentials, 2, r.masks, {.temperature = 5.0f}, exec);

  const focus::pattern_options pattern{.window = 9, .sink_tokens = 1};
  focus::attention(input(q), input(k), input(v), output(r.dense), focus::full_causal, {}, {}, exec);
  focus::sparse_attention(input(q), input(k), input(v), focus::make_routing_plan(r.masks, pattern),
                          output(r.sparse), {}, {}, exec);
  focus::soft_gate_attention(input(q), input(k), input(v), assignment, assignment, {},
                             output(r.soft), pattern, {}, {}, exec);
  return r;
}

}  // namespace

TEST_CASE("openmp_executor: the same bits for any number of threads") {
  const results expected = compute(focus::serial_executor{});
  for (int threads : {1, 2, 3, 7}) {
    CAPTURE(threads);
    CHECK(compute(focus::openmp_executor(threads)) == expected);
    focus::workspace scratch;
    const focus::openmp_executor exec(threads);
    CHECK(compute(focus::with_workspace(exec, scratch)) == expected);
  }
}

TEST_CASE("openmp_executor: OpenMP's own choice of threads is at least one") {
  CHECK(focus::openmp_executor().concurrency() >= 1);
  CHECK(focus::openmp_executor(5).concurrency() == 5);
}

TEST_CASE("openmp_executor: each task runs once, with a worker below concurrency") {
  const focus::openmp_executor exec(3);
  std::vector<int> runs(1000), workers(1000, -1);
  exec.parallel_for(1000, [&](index_t task, index_t worker) {
    ++runs[static_cast<std::size_t>(task)];
    workers[static_cast<std::size_t>(task)] = static_cast<int>(worker);
  });
  for (int r : runs) REQUIRE(r == 1);
  for (int w : workers) REQUIRE((w >= 0 && w < 3));
}

TEST_CASE("openmp_executor: an exception of a body reaches the caller") {
  struct error {};
  for (int threads : {1, 3})
    CHECK_THROWS_AS(focus::openmp_executor(threads).parallel_for(
                        50, [](index_t task, index_t) { task == 17 ? throw error{} : void(); }),
                    error);
}
