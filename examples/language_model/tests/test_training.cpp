#include <cmath>
#include <filesystem>
#include <random>

#include <focus/attention.hpp>
#include <focus/centroids.hpp>
#include <focus/sinkhorn.hpp>

#include "adam.hpp"
#include "attention_method.hpp"
#include "calibrate.hpp"
#include "commands.hpp"
#include "files.hpp"
#include "loaded_model.hpp"
#include "random.hpp"
#include "tiny_model.hpp"
#include "training.hpp"
#include "training_checkpoint.hpp"

namespace test_training {
using namespace language_model;

namespace {

/// Words drawn at random, some of them often.
std::string made_up_text(std::size_t bytes) {
  const char* const words[] = {"the ", "hen ", "saw ", "a ", "red ", "fox, ", "then ", "ran. "};
  std::mt19937_64 random(3);
  std::string text;
  while (text.size() < bytes)
    text += words[uniform_below(8, random) * uniform_below(8, random) / 7];
  return text;
}

/// A tiny model, two texts, and routers to start from.
struct workshop {
  temporary_file file{tiny_model_file()};
  model tiny{gguf_file(file.path())};
  thread_pool pool{2};
  std::vector<token_id> first = tokens(3000), second = tokens(900);
  training_options options{
      .steps = 40, .context = 96, .rows = 40, .learning_rate = 0.03f, .window = 4};

  [[nodiscard]] std::vector<token_id> tokens(std::size_t bytes) const {
    return tokenizer(gguf_file(file.path())).encode(made_up_text(bytes));
  }
  router initial(index_t groups) {
    return calibrate(tiny, {std::span(first).first(200)},
                     {.groups = groups, .dimensions = 6, .restarts = 1}, pool, [](index_t) {});
  }
  router_training start(thread_pool& threads) {
    return {tiny, {first, second}, {initial(4), initial(3)}, options, threads};
  }
  router_training start() { return start(pool); }
};

void check_equal(const token_router& a, const token_router& b) {
  CHECK(a.projection == b.projection);
  CHECK(a.bias == b.bias);
  CHECK(a.centroids == b.centroids);
  CHECK(a.log_group_scale == b.log_group_scale);
}

void check_equal(const router& a, const router& b) {
  REQUIRE(a.layers.size() == b.layers.size());
  for (std::size_t l = 0; l < a.layers.size(); ++l) {
    check_equal(a.layers[l].query, b.layers[l].query);
    REQUIRE(a.layers[l].key.has_value() == b.layers[l].key.has_value());
    if (a.layers[l].key) check_equal(*a.layers[l].key, *b.layers[l].key);
  }
}

}  // namespace

TEST_CASE("adam: the first two steps, worked out by hand") {
  std::vector<float> x = {1, 1}, m(2), v(2);
  // Without bias the first step is the learning rate against the sign of the gradient.
  adam_step{0.1f, 1}.update(x, std::vector<float>{4, -0.5f}, m, v);
  CHECK(x[0] == Approx(0.9f));
  CHECK(x[1] == Approx(1.1f));
  CHECK(m[0] == Approx(0.4f));
  CHECK(v[0] == Approx(0.016f));
  // m = 0.9 * 0.4 + 0.1 * 2 = 0.56, over 0.19; v = 0.999 * 0.016 + 0.001 * 4, over 0.001999.
  adam_step{0.1f, 2}.update(x, std::vector<float>{2, 0}, m, v);
  CHECK(x[0] == Approx(0.9 - 0.1 * (0.56 / 0.19) / std::sqrt(0.019984 / 0.001999)));
}

TEST_CASE("adam: the learning rate rises, and falls to a tenth") {
  const learning_rate_schedule schedule{2, 0.1f, 100};
  CHECK(schedule.at(0) == Approx(0.2));
  CHECK(schedule.at(4) == Approx(1.0));
  CHECK(schedule.at(9) == Approx(2.0));
  CHECK(schedule.at(10) == Approx(2.0));
  CHECK(schedule.at(55) == Approx(1.1));
  CHECK(schedule.at(99) == Approx(0.2).epsilon(0.01));
  CHECK(learning_rate_schedule{2, 0, 1}.at(0) == Approx(2.0));
}

TEST_CASE("random: samples rise, are of the size that is asked for, and take in everything") {
  std::mt19937_64 random(1);
  std::vector<index_t> seen(10);
  for (int i = 0; i < 200; ++i) {
    const auto sample = sample_rising(4, 10, random);
    REQUIRE(sample.size() == 4);
    for (std::size_t j = 1; j < 4; ++j) REQUIRE(sample[j - 1] < sample[j]);
    for (const index_t x : sample) ++seen.at(static_cast<std::size_t>(x));
  }
  for (const index_t count : seen) CHECK(count > 40);
  CHECK(sample_rising(5, 3, random) == std::vector<index_t>{0, 1, 2});
}

TEST_CASE("training: the loss falls for every number of groups, and groups stay balanced") {
  for (const bool separate : {false, true}) {
    workshop w;
    w.options.separate_keys = separate;
    router_training training = w.start();
    std::vector<training_report> before, after;
    for (index_t s = 0; s < w.options.steps; ++s) {
      training.step(true);
      if (s == 9) before = training.reports();
      if (s == w.options.steps - 11) static_cast<void>(training.reports());
    }
    after = training.reports();
    REQUIRE(after.size() == 2);
    for (std::size_t run = 0; run < 2; ++run) {
      CHECK(after[run].loss > 0);
      CHECK(after[run].loss < 0.95 * before[run].loss);
      CHECK(after[run].hard_loss > 0);  // not what is trained: on random models it may well rise
      CHECK(after[run].mean_imbalance >= 1);
      CHECK(after[run].worst_imbalance >= after[run].mean_imbalance);
      CHECK(after[run].worst_imbalance < 2);
      CHECK(after[run].pairs < 0.8);
    }
    CHECK(training.result(0).groups() == 4);
    CHECK(training.result(1).groups() == 3);
    CHECK(training.result(0).layers[1].key.has_value() == separate);
  }
}

TEST_CASE("training: the same on any number of threads, another for another seed") {
  workshop w;
  thread_pool one(1), three(3);
  router_training a = w.start(one), b = w.start(three);
  w.options.seed = 2;
  router_training other = w.start(one);
  for (int s = 0; s < 3; ++s)
    for (router_training* training : {&a, &b, &other}) training->step(false);
  check_equal(a.result(0), b.result(0));
  check_equal(a.result(1), b.result(1));
  CHECK(a.result(0).layers[0].query.projection != other.result(0).layers[0].query.projection);
}

TEST_CASE("training: routers of one run do not depend on those trained beside them") {
  workshop w;
  router_training both = w.start();
  router_training alone(w.tiny, {w.first, w.second}, {w.initial(3)}, w.options, w.pool);
  for (int s = 0; s < 3; ++s) both.step(false), alone.step(s == 1);
  check_equal(both.result(1), alone.result(0));
}

TEST_CASE("training: a run that was broken off ends as one that was not, bit for bit") {
  for (const bool separate : {false, true}) {
    workshop w;
    w.options.separate_keys = separate;
    const temporary_file checkpoint;
    router_training unbroken = w.start(), broken_off = w.start();
    for (int s = 0; s < 7; ++s) unbroken.step(s == 2);
    for (int s = 0; s < 4; ++s) broken_off.step(false);
    broken_off.save(checkpoint.path());

    router_training continued = w.start();
    continued.load(checkpoint.path());
    CHECK(continued.steps_done() == 4);
    for (int s = 4; s < 7; ++s) continued.step(true);
    check_equal(continued.result(0), unbroken.result(0));
    check_equal(continued.result(1), unbroken.result(1));
  }
}

TEST_CASE("training: a checkpoint of another run is refused, with both settings named") {
  workshop w;
  const temporary_file checkpoint;
  router_training training = w.start();
  training.step(false);
  training.save(checkpoint.path());
  const auto refused = [&](std::vector<std::string> expected) {
    router_training other = w.start();
    require_file_error([&](const std::string& path) { other.load(path); }, checkpoint.path(),
                       expected);
    CHECK(other.steps_done() == 0);
  };
  w.options.steps = 41;
  refused({"steps", "'40'", "'41'"});
  w.options.steps = 40;
  w.options.separate_keys = true;
  refused({"separate-keys", "'no'", "'yes'"});
  w.options.separate_keys = false;
  w.second.pop_back();
  refused({"tokens of the texts"});
  w.second = w.tokens(900);
  checkpoint.write(read_file(checkpoint.path()).substr(0, 5000));
  refused({"damaged"});
}

TEST_CASE("training: a checkpoint of more layers than the run has is refused") {
  const token_router router{.projection = matrix::Ones(3, 2),
                            .bias = row_vector::Ones(2),
                            .centroids = matrix::Ones(4, 2),
                            .log_group_scale = row_vector::Zero(4)};
  const trained_layer layer{.query = trained_token_router(router), .key = std::nullopt};
  const temporary_file file;
  save_checkpoint({.step = 3, .runs = {{layer, layer}}}, {}, file.path());
  training_state same{.runs = {{layer, layer}}}, fewer{.runs = {{layer}}};
  load_checkpoint(same, {}, file.path());
  CHECK(same.step == 3);
  require_file_error([&](const std::string& path) { load_checkpoint(fewer, {}, path); },
                     file.path(), {"not a checkpoint of this run", "22 tensors, expected 11"});
}

TEST_CASE("training: potentials are those of the last texts' balanced assignments") {
  workshop w;
  w.options.learning_rate = 0;
  w.options.context = 200;
  w.options.rows = 1;
  const router initial = w.initial(4);
  // One text of the length of a step: every step sees it whole.
  w.first.resize(200);
  router_training training(w.tiny, {w.first}, {initial}, w.options, w.pool);
  for (int s = 0; s < 3; ++s) training.step(false);
  const router result = training.result(0);

  forward_pass pass(w.tiny, w.pool);
  std::vector<row_vector> expected;
  pass.negative_log_likelihood(w.first, [&](const attention_call& call) {
    matrix scores(200, 4), assignment(200, 4);
    row_vector& potentials = expected.emplace_back(4);
    const token_router& by = initial.layers[static_cast<std::size_t>(call.layer)].query;
    const focus::matrix_view<float> s(scores.data(), {200, 4}), a(assignment.data(), {200, 4});
    focus::centroid_scores(call.hidden, by.params(initial.metric), s);
    focus::sinkhorn(s, a, std::span<float>(potentials.data(), 4),
                    {.temperature = 0.1f, .iterations = w.options.iterations});
    focus::attention(call.q, call.k, call.v, call.out, focus::full_causal, {}, {}, w.pool);
  });
  for (std::size_t l = 0; l < expected.size(); ++l) {
    const row_vector difference = result.layers[l].query.log_group_scale - expected[l];
    CHECK(difference.cwiseAbs().maxCoeff() < 1e-5f);
    CHECK(result.layers[l].query.projection == initial.layers[l].query.projection);
  }
}

TEST_CASE("training: a report is what inference with the routers computes") {
  workshop w;
  w.options.separate_keys = true;
  w.options.learning_rate = 0;
  w.options.context = 200;
  w.options.steps = 2;
  w.first.resize(200);
  router_training training(w.tiny, {w.first}, {w.initial(4)}, w.options, w.pool);
  training.step(false);
  static_cast<void>(training.reports());
  const router routers = training.result(0);
  training.step(true);
  const training_report report = training.reports().front();

  const attention_method method{.what = attention_method::kind::focus,
                                .pattern = {.window = 4, .sink_tokens = 1},
                                .layers = {true, false},
                                .router = &routers};
  // Layer by layer on the hidden states of full attention, as training sees them.
  double pairs = 0;
  for (std::size_t l = 0; l < 2; ++l) {
    attention_method of_layer = method;
    of_layer.layers = {l == 0, l == 1};
    attention_runner runner(of_layer, w.pool);
    forward_pass pass(w.tiny, w.pool);
    pass.negative_log_likelihood(w.first, [&](const attention_call& call) {
      if (call.layer == static_cast<index_t>(l)) runner(call);
      focus::attention(call.q, call.k, call.v, call.out, focus::full_causal, {}, {}, w.pool);
    });
    pairs += runner.pairs() / 2;
  }
  CHECK(report.pairs == Approx(pairs));
}

TEST_CASE("train: from a model file and a text to routers, and on from a checkpoint") {
  const temporary_file tiny(tiny_model_file()), text(made_up_text(3000)), output;
  const auto with = [&](const std::string& suffix) {
    return output.path() + suffix;
  };
  train_options options;
  options.common = {.model = tiny.path(), .threads = 2};
  options.text = {.texts = {text.path()}, .context = 64, .skip = 5};
  options.groups = {2, 4};
  options.dimensions = 6;
  options.training = {.steps = 6, .rows = 30, .separate_keys = true, .window = 4};
  options.checkpoint_every = 4;
  options.output = output.path() + ".safetensors";
  run_train(options);
  const std::string k2 = read_file(with(".k2.safetensors")),
                    k4 = read_file(with(".k4.safetensors"));
  CHECK_FALSE(std::filesystem::exists(options.output + ".checkpoint"));
  const model_config config = model_config::read(gguf_file(tiny.path()));
  const router loaded = load_router(with(".k4.safetensors"), config);
  CHECK(loaded.groups() == 4);
  CHECK(loaded.metric == focus::similarity::cosine);
  CHECK(loaded.layers[1].key);

  // Breaks off where the first router cannot be written: the checkpoint of step 4 is left.
  std::filesystem::remove(with(".k2.safetensors"));
  std::filesystem::create_directory(with(".k2.safetensors"));
  CHECK_THROWS_AS(run_train(options), file_error);
  CHECK(std::filesystem::exists(options.output + ".checkpoint"));
  std::filesystem::remove(with(".k2.safetensors"));
  std::filesystem::remove(with(".k4.safetensors"));
  run_train(options);
  CHECK(read_file(with(".k2.safetensors")) == k2);
  CHECK(read_file(with(".k4.safetensors")) == k4);

  SECTION("from routers that are there") {
    options.groups.clear();
    options.initial = {with(".k4.safetensors")};
    options.training.separate_keys = false;
    run_train(options);
    CHECK(load_router(options.output, config).groups() == 4);
    CHECK_FALSE(load_router(options.output, config).layers[0].key);
    options.groups = {8};
    require_file_error([&](const std::string&) { run_train(options); }, options.initial[0],
                       {"2 layers, d_model 24, 4 groups", "8 groups of 2 layers, d_model 24"});
  }
  SECTION("from a router for another model") {
    const temporary_file deeper(tiny_model_file({.layers = 3}));
    options.common.model = deeper.path();
    options.initial = {with(".k4.safetensors")};
    require_file_error([&](const std::string&) { run_train(options); }, options.initial[0],
                       {"2 layers, d_model 24, 4 groups", "3 layers, d_model 24"});
  }
  for (const char* suffix : {".safetensors", ".k2.safetensors", ".k4.safetensors"})
    std::filesystem::remove(with(suffix));
}

}  // namespace test_training
