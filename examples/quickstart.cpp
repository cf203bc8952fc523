// Focus attention around made-up hidden states, queries, keys and values.
#include <cstddef>
#include <cstdio>
#include <random>
#include <vector>

#include <focus/focus.hpp>

int main() {
  using focus::index_t;
  constexpr index_t tokens = 2048, d_model = 256, heads = 8, kv_heads = 2, head_dim = 64;
  constexpr index_t groups = 8, d_group = 16;
  std::mt19937 random(1);
  const auto made_up = [&](index_t rows, index_t columns) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>(rows * columns));
    for (float& x : values) x = normal(random);
    return values;
  };

  // The model's, at one layer: Q, K and V as [tokens, heads, head_dim].
  const auto hidden_data = made_up(tokens, d_model);
  const auto q = made_up(tokens, heads * head_dim);
  const auto k = made_up(tokens, kv_heads * head_dim), v = made_up(tokens, kv_heads * head_dim);
  // The layer's router, trained or calibrated beforehand.
  const auto projection = made_up(d_model, d_group), centroids = made_up(groups, d_group);

  const focus::matrix_view<const float> hidden(hidden_data.data(), {tokens, d_model});
  const focus::centroid_params<float> router{.projection = {projection.data(), {d_model, d_group}},
                                             .centroids = {centroids.data(), {groups, d_group}},
                                             .metric = focus::similarity::cosine};

  // Once a layer, on some text: the potentials that balance its groups.
  std::vector<float> scores_data(tokens * groups), assignment(tokens * groups), potentials(groups);
  const focus::matrix_view<float> scores(scores_data.data(), {tokens, groups});
  focus::centroid_scores(hidden, router, scores);
  focus::sinkhorn(scores, focus::matrix_view<float>(assignment.data(), {tokens, groups}),
                  potentials);

  // For each text, once a layer: a group for each token, and from the groups the plan.
  std::vector<focus::group_mask> masks(tokens);
  focus::route(hidden, router, potentials, /*k=*/1, masks);
  const auto plan = focus::make_routing_plan(masks, {.window = 128, .sink_tokens = 1});

  // All heads at once. by_head shows [tokens, heads, head_dim] as [heads, tokens, head_dim].
  std::vector<float> out(q.size());
  focus::sparse_attention(focus::by_head(q.data(), {tokens, heads, head_dim}),
                          focus::by_head(k.data(), {tokens, kv_heads, head_dim}),
                          focus::by_head(v.data(), {tokens, kv_heads, head_dim}), plan,
                          focus::by_head(out.data(), {tokens, heads, head_dim}));

  const double causal_pairs = 0.5 * tokens * (tokens + 1);
  std::printf("%.1f%% of the causal pairs were computed\n",
              100.0 * static_cast<double>(plan.allowed_pairs()) / causal_pairs);
}
