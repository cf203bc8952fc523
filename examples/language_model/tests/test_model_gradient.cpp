// The backward pass of a whole model: gradients of all router parameters against central
// differences of an implementation in double.

#include <array>
#include <random>

#include <focus/eigen.hpp>
#include <focus/reference.hpp>

#include "attention_method.hpp"
#include "files.hpp"
#include "layer_gradients.hpp"
#include "model_gradient.hpp"
#include "reference_model.hpp"
#include "router_gating.hpp"
#include "tiny_model.hpp"

namespace test_model_gradient {
using namespace language_model;

namespace {

constexpr training_objective assignment{.metric = focus::similarity::cosine,
                                        .sinkhorn = {.temperature = 0.3f, .iterations = 20},
                                        .pattern = {}};

/// Of the largest gradient of a matrix: about 30 roundings to float in each of two layers,
/// magnified by 1 / tau on their way into the assignment.
constexpr double tolerance = 2 * 30 * 0x1p-24 / 0.3;

model tiny_model(const tiny_shape& shape) {
  gguf_writer writer;
  add_config(writer, shape);
  add_weights(writer, shape);
  const temporary_file file(writer.bytes());
  return model(gguf_file(file.path()));
}

std::vector<token_id> random_tokens(std::size_t count, token_id vocabulary) {
  std::mt19937 random(5);
  std::vector<token_id> tokens(count);
  for (token_id& token : tokens)
    token = static_cast<token_id>(random() % static_cast<unsigned>(vocabulary));
  return tokens;
}

token_router random_router(index_t d_model, index_t d_group, index_t groups, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto fill = [&](auto&& m) {
    for (index_t i = 0; i < m.size(); ++i) m.data()[i] = normal(random);
    return m;
  };
  return {.projection = fill(matrix(d_model, d_group)),
          .bias = fill(row_vector(d_group)),
          .centroids = fill(matrix(groups, d_group)),
          .log_group_scale = row_vector::Zero(groups)};
}

std::vector<layer_router> random_routers(const model_config& c, index_t groups, bool separate) {
  std::vector<layer_router> result;
  for (index_t l = 0; l < c.layers; ++l) {
    const auto seed = static_cast<unsigned>(10 * l);
    layer_router layer{.query = random_router(c.d_model, 4, groups, seed + 1), .key = std::nullopt};
    if (separate) layer.key = random_router(c.d_model, 4, groups, seed + 2);
    result.push_back(std::move(layer));
  }
  return result;
}

router_gating gating_by(const std::vector<layer_router>& routers, thread_pool& pool) {
  std::vector<router_gating::layer_routers> layers;
  for (const layer_router& layer : routers)
    layers.push_back({&layer.query, layer.key ? &*layer.key : nullptr});
  return {layers, assignment, pool};
}

/// A token router's parameters in double.
struct double_router {
  doubles projection, bias, centroids;

  explicit double_router(const token_router& by)
      : projection(by.projection.cast<double>()),
        bias(by.bias.cast<double>()),
        centroids(by.centroids.cast<double>()) {}

  [[nodiscard]] std::array<doubles*, 3> parameters() { return {&projection, &bias, &centroids}; }

  [[nodiscard]] doubles assign(const doubles& hidden) const {
    doubles scores(hidden.rows(), centroids.rows()), result(hidden.rows(), centroids.rows());
    std::vector<double> potentials(static_cast<std::size_t>(centroids.rows()));
    const focus::centroid_params<double> params{
        .projection = {projection.data(), {projection.rows(), projection.cols()}},
        .centroids = {centroids.data(), {centroids.rows(), centroids.cols()}},
        .bias = {bias.data(), static_cast<std::size_t>(bias.size())},
        .metric = assignment.metric};
    focus::reference::centroid_scores(hidden, params, scores);
    focus::reference::sinkhorn(scores, result, potentials, assignment.sinkhorn);
    return result;
  }
};

focus::tensor_view<const double, 3> heads_of(const doubles& x, index_t head_dim) {
  return {x.data(), {x.cols() / head_dim, x.rows(), head_dim}, {head_dim, x.cols(), 1}};
}

/// The mean loss, with `keys` empty where keys are routed as queries are.
double double_loss(const model& m, std::span<const token_id> tokens,
                   const std::vector<double_router>& queries,
                   const std::vector<double_router>& keys, const focus::pattern_options& pattern) {
  const index_t head_dim = m.config().head_dim;
  const auto attend = [&](const reference_call& call) {
    const auto l = static_cast<std::size_t>(call.layer);
    const doubles query = queries[l].assign(call.hidden);
    const doubles key = keys.empty() ? query : keys[l].assign(call.hidden);
    doubles out(call.q.rows(), call.q.cols());
    focus::reference::soft_gate_attention(
        heads_of(call.q, head_dim), heads_of(call.k, head_dim), heads_of(call.v, head_dim), query,
        key, {.kind = focus::gate_kind::weight},
        focus::tensor_view<double, 3>(out.data(), {out.cols() / head_dim, out.rows(), head_dim},
                                      {head_dim, out.cols(), 1}),
        pattern);
    return out;
  };
  return reference_loss(m, tokens, attend) / static_cast<double>(tokens.size() - 1);
}

}  // namespace

TEST_CASE("model_gradient: every router parameter against central differences in double") {
  const focus::pattern_options pattern{.window = 2, .sink_tokens = 1};
  for (const bool separate_output : {false, true})
    for (const bool separate_keys : {false, true}) {
      INFO("separate output: " << separate_output << ", separate keys: " << separate_keys);
      const model m = tiny_model({.d_model = 16,
                                  .head_dim = 4,
                                  .feed_forward = 24,
                                  .vocabulary = 40,
                                  .separate_output = separate_output});
      const auto tokens = random_tokens(20, 40);
      const auto routers = random_routers(m.config(), 3, separate_keys);
      thread_pool pool(2);
      router_gating gating = gating_by(routers, pool);
      model_gradient gradient(m, pattern, pool);
      const double loss = gradient.loss_and_gradients(tokens, gating);

      std::vector<double_router> queries, keys;
      for (const layer_router& layer : routers) {
        queries.emplace_back(layer.query);
        if (layer.key) keys.emplace_back(*layer.key);
      }
      CHECK(loss == Approx(double_loss(m, tokens, queries, keys, pattern)).epsilon(1e-6));

      const auto check = [&](double_router& router, const token_router& found) {
        const std::array<doubles, 3> gradients = {found.projection.cast<double>(),
                                                  found.bias.cast<double>(),
                                                  found.centroids.cast<double>()};
        for (std::size_t p = 0; p < 3; ++p) {
          doubles& x = *router.parameters()[p];
          doubles expected(x.rows(), x.cols());
          for (index_t i = 0; i < x.size(); ++i) {
            constexpr double step = 1e-5;
            const double at = x.data()[i];
            x.data()[i] = at + step;
            const double above = double_loss(m, tokens, queries, keys, pattern);
            x.data()[i] = at - step;
            const double below = double_loss(m, tokens, queries, keys, pattern);
            x.data()[i] = at;
            expected.data()[i] = (above - below) / (2 * step);
          }
          INFO("parameter " << p << " of 3");
          const double largest = expected.cwiseAbs().maxCoeff();
          CHECK(largest > 1e-5);
          CHECK((gradients[p] - expected).cwiseAbs().maxCoeff() < tolerance * largest);
        }
      };
      for (index_t l = 0; l < m.config().layers; ++l) {
        INFO("layer " << l);
        check(queries[static_cast<std::size_t>(l)], gating.queries(l).gradient());
        if (separate_keys) check(keys[static_cast<std::size_t>(l)], gating.keys(l).gradient());
      }
    }
}

TEST_CASE("model_gradient: with all gates open the loss is that of full attention") {
  const model m = tiny_model({});
  const auto tokens = random_tokens(150, 260);
  thread_pool pool(2);
  forward_pass pass(m, pool);
  const attention_method full{.layers = {true, true}};
  attention_runner runner(full, pool);
  const double expected = pass.negative_log_likelihood(tokens, std::ref(runner)) /
                          static_cast<double>(tokens.size() - 1);

  const auto check = [&](index_t groups, const focus::pattern_options& pattern) {
    const auto routers = random_routers(m.config(), groups, false);
    router_gating gating = gating_by(routers, pool);
    model_gradient gradient(m, pattern, pool);
    CHECK(gradient.loss_and_gradients(tokens, gating) == Approx(expected).epsilon(1e-6));
    // The assignments then do not count.
    for (index_t l = 0; l < 2; ++l)
      CHECK(gating.queries(l).gradient().projection.cwiseAbs().maxCoeff() < 1e-7f);
  };
  check(4, focus::full_causal);
  check(1, {.window = focus::no_window});  // one group, which all belong to
}

TEST_CASE("model_gradient: the same bits on any number of threads, and a second time") {
  const model m = tiny_model({});
  const auto tokens = random_tokens(300, 260);
  const auto routers = random_routers(m.config(), 4, true);
  double first_loss = 0;
  std::vector<token_router> first;
  for (const index_t threads : {1, 2, 3}) {
    thread_pool pool(threads);
    router_gating gating = gating_by(routers, pool);
    model_gradient gradient(m, {.window = 7, .sink_tokens = 1}, pool);
    for (int repeat = 0; repeat < 2; ++repeat) {
      const double loss = gradient.loss_and_gradients(tokens, gating);
      std::vector<token_router> found;
      for (index_t l = 0; l < 2; ++l) {
        found.push_back(gating.queries(l).gradient());
        found.push_back(gating.keys(l).gradient());
      }
      if (first.empty()) first = found, first_loss = loss;
      CHECK(loss == first_loss);
      for (std::size_t r = 0; r < found.size(); ++r) {
        CHECK(found[r].projection == first[r].projection);
        CHECK(found[r].bias == first[r].bias);
        CHECK(found[r].centroids == first[r].centroids);
      }
    }
  }
}

TEST_CASE("model_gradient: short sequences and tokens that are none") {
  const model m = tiny_model({});
  thread_pool pool(1);
  const auto routers = random_routers(m.config(), 4, false);
  router_gating gating = gating_by(routers, pool);
  model_gradient gradient(m, {}, pool);
  CHECK(gradient.loss_and_gradients(std::vector<token_id>{}, gating) == 0);
  CHECK(gradient.loss_and_gradients(std::vector<token_id>{5}, gating) == 0);
  CHECK_THROWS_AS(gradient.loss_and_gradients(std::vector<token_id>{5, 260}, gating),
                  std::out_of_range);
}

}  // namespace test_model_gradient
