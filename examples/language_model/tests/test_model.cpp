// The forward pass against a straightforward implementation in double, with the attention of each
// method.

#include <cmath>
#include <functional>
#include <random>

#include "attention_method.hpp"
#include "calibrate.hpp"
#include "files.hpp"
#include "model.hpp"
#include "reference_model.hpp"
#include "tiny_model.hpp"

namespace test_model {
using namespace language_model;

namespace {

/// Whether query i attends to key j <= i in a layer.
using visible_function = std::function<bool(index_t layer, index_t i, index_t j)>;

double reference_loss(const model& m, std::span<const token_id> tokens,
                      const visible_function& visible) {
  const model_config& c = m.config();
  return ::reference_loss(m, tokens, [&](const reference_call& call) {
    doubles attended = doubles::Zero(call.q.rows(), call.q.cols());
    for (index_t head = 0; head < c.heads; ++head) {
      const index_t at = head * c.head_dim, kv_at = head / (c.heads / c.kv_heads) * c.head_dim;
      for (index_t i = 0; i < call.q.rows(); ++i) {
        double sum = 0;
        for (index_t j = 0; j <= i; ++j) {
          if (!visible(call.layer, i, j)) continue;
          const double score =
              call.q.row(i).segment(at, c.head_dim).dot(call.k.row(j).segment(kv_at, c.head_dim));
          const double weight = std::exp(score / std::sqrt(static_cast<double>(c.head_dim)));
          attended.row(i).segment(at, c.head_dim) +=
              weight * call.v.row(j).segment(kv_at, c.head_dim);
          sum += weight;
        }
        attended.row(i).segment(at, c.head_dim) /= sum;
      }
    }
    return attended;
  });
}

model load(const std::string& content) {
  const temporary_file file(content);
  return model(gguf_file(file.path()));
}

std::vector<token_id> random_tokens(std::size_t count) {
  std::mt19937 random(11);
  std::vector<token_id> tokens(count);
  for (token_id& token : tokens) token = static_cast<token_id>(random() % 260);
  return tokens;
}

const std::vector<bool> both_layers = {true, true};

}  // namespace

TEST_CASE("model: the loss agrees with a double implementation, output tied or separate") {
  const auto tokens = random_tokens(90);
  for (const bool separate : {false, true}) {
    const model m = load(tiny_model_file({.separate_output = separate}));
    CHECK((&m.output() == &m.embedding()) == !separate);
    thread_pool pool(2);
    forward_pass pass(m, pool);
    const attention_method full{.layers = both_layers};
    attention_runner runner(full, pool);
    const double loss = pass.negative_log_likelihood(tokens, std::ref(runner));
    CHECK(loss == Approx(reference_loss(m, tokens, [](index_t, index_t, index_t) {
                    return true;
                  })).epsilon(1e-5));
    CHECK(runner.pairs() == 1);
  }
}

TEST_CASE("model: window and sinks, in some layers only") {
  const auto tokens = random_tokens(90);
  const model m = load(tiny_model_file());
  thread_pool pool(2);
  forward_pass pass(m, pool);
  const attention_method windowed{.what = attention_method::kind::windowed,
                                  .pattern = {.window = 7, .sink_tokens = 2},
                                  .layers = {false, true}};
  attention_runner runner(windowed, pool);
  index_t pairs = 0;
  const auto visible = [&](index_t layer, index_t i, index_t j) {
    return layer == 0 || i - j <= 7 || j < 2;
  };
  const double expected = reference_loss(m, tokens, visible);
  CHECK(pass.negative_log_likelihood(tokens, std::ref(runner)) == Approx(expected).epsilon(1e-5));
  for (index_t l = 0; l < 2; ++l)
    for (index_t i = 0; i < 90; ++i)
      for (index_t j = 0; j <= i; ++j) pairs += visible(l, i, j);
  CHECK(runner.pairs() == Approx(static_cast<double>(pairs) / (90 * 91)));
}

TEST_CASE("model: Focus computes the pairs that its masks allow") {
  const auto tokens = random_tokens(120);
  const model m = load(tiny_model_file());
  thread_pool pool(2);
  const router routers = calibrate(
      m, {std::span(tokens)}, {.groups = 4, .dimensions = 8, .restarts = 1}, pool, [](index_t) {});
  for (const top_k k : {top_k{1, 1}, top_k{2, 2}, top_k{2, 1}, top_k{4, 4}}) {
    INFO("top-" << k.query << ", keys top-" << k.key);
    const attention_method method{.what = attention_method::kind::focus,
                                  .pattern = {.window = 5, .sink_tokens = 1},
                                  .layers = both_layers,
                                  .router = &routers,
                                  .k = k};
    std::vector<std::vector<focus::group_mask>> query(2), key(2);
    attention_runner runner(method, pool, [&](index_t layer, auto query_masks, auto key_masks) {
      query[static_cast<std::size_t>(layer)].assign(query_masks.begin(), query_masks.end());
      key[static_cast<std::size_t>(layer)].assign(key_masks.begin(), key_masks.end());
    });
    forward_pass pass(m, pool);
    const double loss = pass.negative_log_likelihood(tokens, std::ref(runner));
    index_t pairs = 0;
    const auto visible = [&](index_t layer, index_t i, index_t j) {
      const auto l = static_cast<std::size_t>(layer);
      return i - j <= 5 || j < 1 ||
             (query[l][static_cast<std::size_t>(i)] & key[l][static_cast<std::size_t>(j)]) != 0;
    };
    CHECK(loss == Approx(reference_loss(m, tokens, visible)).epsilon(1e-5));
    for (index_t l = 0; l < 2; ++l)
      for (index_t i = 0; i < 120; ++i) {
        CHECK(std::popcount(query[static_cast<std::size_t>(l)][static_cast<std::size_t>(i)]) ==
              k.query);
        CHECK(std::popcount(key[static_cast<std::size_t>(l)][static_cast<std::size_t>(i)]) ==
              k.key);
        for (index_t j = 0; j <= i; ++j) pairs += visible(l, i, j);
      }
    CHECK(runner.pairs() == Approx(static_cast<double>(pairs) / (120 * 121)));
  }
}

TEST_CASE("model: the same bits on any number of threads") {
  const auto tokens = random_tokens(300);
  const model m = load(tiny_model_file());
  double first = 0;
  for (const index_t threads : {1, 2, 3}) {
    thread_pool pool(threads);
    forward_pass pass(m, pool);
    const attention_method full{.layers = both_layers};
    attention_runner runner(full, pool);
    const double loss = pass.negative_log_likelihood(tokens, std::ref(runner));
    if (threads == 1) first = loss;
    CHECK(loss == first);
  }
}

TEST_CASE("model: short sequences and tokens that are none") {
  const model m = load(tiny_model_file());
  thread_pool pool(1);
  forward_pass pass(m, pool);
  const attention_method full{.layers = both_layers};
  attention_runner runner(full, pool);
  CHECK(pass.negative_log_likelihood(std::vector<token_id>{}, std::ref(runner)) == 0);
  CHECK(pass.negative_log_likelihood(std::vector<token_id>{5}, std::ref(runner)) == 0);
  CHECK_THROWS_AS(pass.negative_log_likelihood(std::vector<token_id>{5, 260}, std::ref(runner)),
                  std::out_of_range);
}

TEST_CASE("model: what is not a plain LLaMA model is named") {
  const auto refused = [](auto&& change, const std::vector<std::string>& expected) {
    gguf_writer writer;
    change(writer);
    const temporary_file file(writer.bytes());
    require_file_error([](const std::string& path) { model{gguf_file(path)}; }, file.path(),
                       expected);
  };
  refused([](gguf_writer& w) { w.string("general.architecture", "gpt2"); },
          {"'gpt2'", "supported: llama"});
  refused([](gguf_writer& w) { add_config(w); }, {"token_embd.weight", "missing"});
  refused([](gguf_writer& w) { add_config(w, {.heads = 3}); }, {"3 heads", "2 key-value heads"});
  refused([](gguf_writer& w) { add_config(w, {.layers = 0}); }, {"llama.block_count", "0"});
  refused([](gguf_writer& w) { add_config(w, {.heads = 4000000000}); },
          {"llama.attention.head_count", "4000000000"});
  refused(
      [](gguf_writer& w) {
        add_config(w, {.layers = 3});
        add_weights(w);
      },
      {"blk.2.attn_norm.weight", "missing"});
  refused(
      [](gguf_writer& w) {
        add_config(w);
        add_weights(w, {.feed_forward = 41});
      },
      {"blk.0.ffn_gate.weight", "[41, 24]", "[40, 24]"});
  refused(
      [](gguf_writer& w) {
        add_config(w);
        w.string("llama.rope.scaling.type", "yarn");
      },
      {"'yarn'"});
  refused(
      [](gguf_writer& w) {
        add_config(w);
        w.u32("llama.rope.dimension_count", 5);
      },
      {"5 dimensions"});
  refused(
      [](gguf_writer& w) {
        add_config(w);
        add_weights(w);
        w.tensor("blk.0.attn_q.bias", {1}, {0.0f});
      },
      {"blk.0.attn_q.bias", "plain LLaMA"});
}

TEST_CASE("windowed_pairs: counted one by one") {
  for (const index_t window : {-1, 0, 3, 20, 1000})
    for (const index_t sinks : {0, 1, 4, 50}) {
      index_t pairs = 0;
      for (index_t i = 0; i < 30; ++i)
        for (index_t j = 0; j <= i; ++j) pairs += i - j <= window || j < sinks;
      CHECK(windowed_pairs(30, {.window = window, .sink_tokens = sinks}) ==
            static_cast<double>(pairs));
    }
}

}  // namespace test_model
