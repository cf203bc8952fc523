// Training routers by the next-token loss; what it shares with the other objective is in
// test_training.cpp.

#include <filesystem>

#include "calibrate.hpp"
#include "commands.hpp"
#include "files.hpp"
#include "loaded_model.hpp"
#include "tiny_model.hpp"
#include "training.hpp"

namespace test_next_token_training {
using namespace language_model;

namespace {

/// A tiny model, a text of just one step's tokens, and routers to start from.
struct workshop {
  temporary_file file{tiny_model_file()};
  model tiny{gguf_file(file.path())};
  thread_pool pool{2};
  std::vector<token_id> text = tokens();
  training_options options{.loss = training_loss::next_token,
                           .steps = 20,
                           .context = 96,
                           .rows = 10,
                           .learning_rate = 0.02f,
                           .window = 4};

  static std::vector<token_id> tokens() {
    std::mt19937 random(4);
    std::vector<token_id> result(96);
    for (token_id& token : result) token = static_cast<token_id>(random() % 260);
    return result;
  }
  router initial(index_t groups) {
    return calibrate(tiny, {std::span(text)}, {.groups = groups, .dimensions = 6, .restarts = 1},
                     pool, [](index_t) {});
  }
  router_training start(thread_pool& threads) {
    return {tiny, {text}, {initial(4), initial(3)}, options, threads};
  }
};

void check_equal(const token_router& a, const token_router& b) {
  CHECK(a.projection == b.projection);
  CHECK(a.bias == b.bias);
  CHECK(a.centroids == b.centroids);
  CHECK(a.log_group_scale == b.log_group_scale);
}

void check_equal(const router_training& a, const router_training& b) {
  for (std::size_t run = 0; run < 2; ++run) {
    const router x = a.result(run), y = b.result(run);
    for (std::size_t l = 0; l < x.layers.size(); ++l) {
      check_equal(x.layers[l].query, y.layers[l].query);
      REQUIRE(x.layers[l].key.has_value() == y.layers[l].key.has_value());
      if (x.layers[l].key) check_equal(*x.layers[l].key, *y.layers[l].key);
    }
  }
}

}  // namespace

TEST_CASE("training, next token: the loss falls for every number of groups") {
  for (const bool separate : {false, true}) {
    workshop w;
    w.options.separate_keys = separate;
    router_training training = w.start(w.pool);
    training.step(true);
    const auto before = training.reports();
    while (training.steps_done() < w.options.steps - 1) training.step(false);
    static_cast<void>(training.reports());
    training.step(true);
    const auto after = training.reports();
    for (std::size_t run = 0; run < 2; ++run) {
      CHECK(after[run].loss < before[run].loss - 0.01);
      CHECK(after[run].worst_imbalance >= 1);
      CHECK(after[run].hard_loss > 0);
      CHECK(after[run].pairs < 0.9);
    }
    CHECK(training.result(0).layers[1].key.has_value() == separate);
  }
}

TEST_CASE("training, next token: the same on any number of threads, and on from a checkpoint") {
  workshop w;
  w.options.separate_keys = true;
  thread_pool one(1), three(3);
  const temporary_file checkpoint;
  router_training a = w.start(one), b = w.start(three), continued = w.start(three);
  for (int s = 0; s < 2; ++s) a.step(s == 0), b.step(false);
  check_equal(a, b);
  b.save(checkpoint.path());
  continued.load(checkpoint.path());
  a.step(false);
  continued.step(true);
  check_equal(a, continued);

  w.options.loss = training_loss::retained_mass;
  router_training other = w.start(one);
  require_file_error([&](const std::string& path) { other.load(path); }, checkpoint.path(),
                     {"objective", "'lm'", "'mass'"});
}

TEST_CASE("train: by the next-token loss, from a model file and a text to routers") {
  std::string letters;
  for (int i = 0; i < 400; ++i) letters += static_cast<char>('a' + i * i % 23);
  const temporary_file tiny(tiny_model_file()), text(letters), output;
  train_options options;
  options.common = {.model = tiny.path(), .threads = 2};
  options.text = {.texts = {text.path()}, .context = 64, .skip = 5};
  options.groups = {4};
  options.dimensions = 6;
  options.objective = "lm";
  options.training = {.steps = 3, .rows = 30, .learning_rate = 2e-3f, .window = 4};
  options.output = output.path();
  run_train(options);
  const router routers = load_router(output.path(), model_config::read(gguf_file(tiny.path())));
  CHECK(routers.groups() == 4);
  CHECK(routers.information.at("method") == "trained: next-token loss through the frozen model");
}

}  // namespace test_next_token_training
