// Trains the routers of all layers of a model at once, from passes over text.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "model.hpp"
#include "model_gradient.hpp"
#include "router_file.hpp"
#include "router_trainer.hpp"
#include "routing_meter.hpp"

namespace language_model {

/// What is minimised.
enum class training_loss {
  /// -log of the mass of full attention that a layer's soft assignment keeps, layer by layer: needs
  /// forward passes alone, which routers of several numbers of groups share.
  retained_mass,
  /// The next-token loss of the model with its attention softly gated, as in the paper: the
  /// gradient passes through the frozen model.
  next_token
};

struct training_options {
  training_loss loss = training_loss::retained_mass;
  index_t steps = 120;
  index_t context = 1024;  // tokens of text in a step
  index_t rows = 256;      // query rows, drawn at random, over which the retained mass is taken
  float learning_rate = 1e-2f;
  float warm_up = 0.05f;       // share of the steps
  bool separate_keys = false;  // keys get a projection, bias and centroids of their own
  focus::similarity metric = focus::similarity::cosine;
  float temperature = 0.1f;
  int iterations = 20;  // of Sinkhorn
  index_t window = 128;
  index_t sinks = 1;
  std::uint64_t seed = 1;

  [[nodiscard]] training_objective objective() const {
    return {metric,
            {.temperature = temperature, .iterations = iterations},
            {.window = window, .sink_tokens = sinks}};
  }
};

/// All that training changes.
struct training_state {
  index_t step = 0;                              // steps that are done
  std::vector<std::vector<trained_layer>> runs;  // of each number of groups, of each layer
};

class router_training {
 public:
  /// texts: each at least a step's tokens long. initial: the routers to start from, one for each
  /// number of groups, made for the model; with separate keys, routers without begin with the keys
  /// as a copy of the queries. Model, texts and pool are referred to.
  router_training(const model& model, std::vector<std::span<const token_id>> texts,
                  const std::vector<router>& initial, const training_options& options,
                  thread_pool& pool);

  /// A random piece of the texts through the model, and a step of every router. `measured`: the
  /// reports are to hold the hard loss. What is drawn depends on the seed and the number of the
  /// step alone. Throws std::runtime_error when a loss is not finite: the routers are then of no
  /// more use, but a checkpoint is.
  void step(bool measured);

  /// Of the steps since the last call, for each number of groups.
  [[nodiscard]] std::vector<training_report> reports();
  /// Time spent so far in the model's passes, and in the routers' steps and measurements; for the
  /// next token, in measurements alone.
  [[nodiscard]] double forward_seconds() const noexcept { return forward_seconds_; }
  [[nodiscard]] double router_seconds() const noexcept { return router_seconds_; }

  [[nodiscard]] index_t steps_done() const noexcept { return state_.step; }
  /// The routers of one number of groups as they are now.
  [[nodiscard]] router result(std::size_t run) const;

  /// Writes all that a broken-off run continues from, through a temporary file. Throws file_error.
  void save(const std::string& path) const;
  /// Goes on from there, to the same bits as a run that was not broken off. Throws file_error when
  /// the file is damaged, or belongs to a run with another model, text or options: both are named.
  void load(const std::string& path);

 private:
  struct drawn_sample {
    std::span<const token_id> tokens;
    std::vector<index_t> rows;
  };
  [[nodiscard]] drawn_sample draw(index_t step) const;
  void retained_mass_step(const drawn_sample& sample, const adam_step& adam, bool measured);
  void next_token_step(const drawn_sample& sample, const adam_step& adam, bool measured);
  /// What must be the same when a run continues, by the options' names.
  [[nodiscard]] std::map<std::string, std::string> settings() const;

  const model& model_;
  std::vector<std::span<const token_id>> texts_;
  training_options options_;
  thread_pool& pool_;
  forward_pass pass_;
  matrix stream_;
  focus::workspace attention_workspace_;
  router_trainer trainer_;   // for the retained mass
  model_gradient gradient_;  // for the next token
  training_state state_;
  std::vector<routing_meter> meters_;
  double forward_seconds_ = 0, router_seconds_ = 0;
};

}  // namespace language_model
