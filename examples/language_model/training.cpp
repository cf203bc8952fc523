#include "training.hpp"

#include <cmath>
#include <stdexcept>

#include <focus/attention.hpp>

#include "random.hpp"
#include "stopwatch.hpp"
#include "training_checkpoint.hpp"

namespace language_model {

namespace {

/// A generator for each step, so that there is none to keep in a checkpoint.
std::mt19937_64 random_of_step(std::uint64_t seed, index_t step) {
  const auto number = static_cast<std::uint64_t>(step);
  std::seed_seq words{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32),
                      static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(number >> 32)};
  return std::mt19937_64(words);
}

trained_layer start_from(const layer_router& initial, bool separate_keys) {
  trained_layer result{trained_token_router(initial.query), std::nullopt};
  if (separate_keys) result.key.emplace(initial.for_keys());
  return result;
}

}  // namespace

router_training::router_training(const model& model, std::vector<std::span<const token_id>> texts,
                                 const std::vector<router>& initial,
                                 const training_options& options, thread_pool& pool)
    : model_(model),
      texts_(std::move(texts)),
      options_(options),
      pool_(pool),
      pass_(model, pool),
      trainer_(options.objective(), pool) {
  for (const router& of_run : initial) {
    std::vector<trained_layer>& run = state_.runs.emplace_back();
    for (const layer_router& layer : of_run.layers)
      run.push_back(start_from(layer, options.separate_keys));
    meters_.emplace_back(options.objective(), model.config().layers, pool);
  }
}

router_training::drawn_sample router_training::draw(index_t step) const {
  std::mt19937_64 random = random_of_step(options_.seed, step);
  const auto places = [&](const std::span<const token_id>& text) {
    return static_cast<index_t>(text.size()) - options_.context + 1;
  };
  index_t all_places = 0;
  for (const auto& text : texts_) all_places += places(text);
  index_t place = uniform_below(all_places, random);
  auto text = texts_.begin();
  for (; place >= places(*text); ++text) place -= places(*text);
  return {
      text->subspan(static_cast<std::size_t>(place), static_cast<std::size_t>(options_.context)),
      sample_rising(options_.rows, options_.context, random)};
}

void router_training::step(bool measured) {
  const stopwatch time;
  double routing = 0;
  const drawn_sample sample = draw(state_.step);
  const learning_rate_schedule schedule{options_.learning_rate, options_.warm_up, options_.steps};
  const adam_step adam{schedule.at(state_.step), state_.step + 1};

  pass_.embed(sample.tokens, stream_);
  for (index_t l = 0; l < model_.config().layers; ++l)
    pass_.layer(l, stream_, [&](const attention_call& call) {
      const stopwatch routing_time;
      for (std::size_t run = 0; run < state_.runs.size(); ++run) {
        trained_layer& layer = state_.runs[run][static_cast<std::size_t>(l)];
        meters_[run].observe(call, layer, measured ? &sample.rows : nullptr);
        const double loss = trainer_.step(call, sample.rows, adam, layer);
        if (!std::isfinite(loss))
          throw std::runtime_error("training broke down at step " + std::to_string(state_.step) +
                                   ", layer " + std::to_string(l) +
                                   ": the loss is not finite; a lower learning rate may help");
        meters_[run].add_loss(loss);
      }
      routing += routing_time.seconds();
      focus::attention(call.q, call.k, call.v, call.out, focus::full_causal, {}, {},
                       focus::with_workspace(pool_, attention_workspace_));
    });
  for (routing_meter& meter : meters_) meter.end_step();
  ++state_.step;
  router_seconds_ += routing;
  forward_seconds_ += time.seconds() - routing;
}

std::vector<training_report> router_training::reports() {
  std::vector<training_report> result;
  for (routing_meter& meter : meters_) result.push_back(meter.report());
  return result;
}

router router_training::result(std::size_t run) const {
  router result;
  result.metric = options_.metric;
  result.temperature = options_.temperature;
  for (const trained_layer& layer : state_.runs[run]) {
    result.layers.push_back({layer.query.router, std::nullopt});
    if (layer.key) result.layers.back().key = layer.key->router;
  }
  return result;
}

std::map<std::string, std::string> router_training::settings() const {
  std::string groups, tokens;
  const auto append = [](std::string& list, std::int64_t number) {
    if (!list.empty()) list += ',';
    list += std::to_string(number);
  };
  for (const auto& run : state_.runs) append(groups, run.front().query.router.centroids.rows());
  for (const auto& text : texts_) append(tokens, static_cast<std::int64_t>(text.size()));
  const auto& shape = state_.runs.front().front().query.router.projection;
  return {{"model", std::to_string(model_.config().layers) + " layers, d_model " +
                        std::to_string(model_.config().d_model)},
          {"tokens of the texts", tokens},
          {"groups", groups},
          {"dimensions", std::to_string(shape.cols())},
          {"separate-keys", options_.separate_keys ? "yes" : "no"},
          {"steps", std::to_string(options_.steps)},
          {"context", std::to_string(options_.context)},
          {"rows", std::to_string(options_.rows)},
          {"learning-rate", number_text(options_.learning_rate)},
          {"warm-up", number_text(options_.warm_up)},
          {"similarity", options_.metric == focus::similarity::cosine ? "cosine" : "dot"},
          {"temperature", number_text(options_.temperature)},
          {"iterations", std::to_string(options_.iterations)},
          {"window", std::to_string(options_.window)},
          {"sinks", std::to_string(options_.sinks)},
          {"seed", std::to_string(options_.seed)}};
}

void router_training::save(const std::string& path) const {
  save_checkpoint(state_, settings(), path);
}

void router_training::load(const std::string& path) {
  load_checkpoint(state_, settings(), path);
}

}  // namespace language_model
