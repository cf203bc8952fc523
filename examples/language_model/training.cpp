#include "training.hpp"

#include <cmath>
#include <stdexcept>

#include <focus/attention.hpp>

#include "random.hpp"
#include "router_gating.hpp"
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

void check_finite(double loss, index_t step, const std::string& where) {
  if (std::isfinite(loss)) return;
  throw std::runtime_error("training broke down at step " + std::to_string(step) + where +
                           ": the loss is not finite; a lower learning rate may help");
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
      trainer_(options.objective(), pool),
      gradient_(model, options.objective().pattern, pool) {
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
  const double routing_before = router_seconds_;
  const drawn_sample sample = draw(state_.step);
  const learning_rate_schedule schedule{options_.learning_rate, options_.warm_up, options_.steps};
  const adam_step adam{schedule.at(state_.step), state_.step + 1};
  if (options_.loss == training_loss::retained_mass)
    retained_mass_step(sample, adam, measured);
  else
    next_token_step(sample, adam, measured);
  ++state_.step;
  forward_seconds_ += time.seconds() - (router_seconds_ - routing_before);
}

void router_training::retained_mass_step(const drawn_sample& sample, const adam_step& adam,
                                         bool measured) {
  std::vector<double> losses(state_.runs.size());
  pass_.embed(sample.tokens, stream_);
  for (index_t l = 0; l < model_.config().layers; ++l)
    pass_.layer(l, stream_, [&](const attention_call& call) {
      const stopwatch routing_time;
      for (std::size_t run = 0; run < state_.runs.size(); ++run) {
        trained_layer& layer = state_.runs[run][static_cast<std::size_t>(l)];
        meters_[run].observe(call, layer, measured ? &sample.rows : nullptr);
        const double loss = trainer_.step(call, sample.rows, adam, layer);
        check_finite(loss, state_.step, ", layer " + std::to_string(l));
        losses[run] += loss;
      }
      router_seconds_ += routing_time.seconds();
      focus::attention(call.q, call.k, call.v, call.out, focus::full_causal, {}, {},
                       focus::with_workspace(pool_, attention_workspace_));
    });
  for (std::size_t run = 0; run < losses.size(); ++run)
    meters_[run].end_step(losses[run] / static_cast<double>(model_.config().layers));
}

void router_training::next_token_step(const drawn_sample& sample, const adam_step& adam,
                                      bool measured) {
  for (std::size_t run = 0; run < state_.runs.size(); ++run) {
    std::vector<trained_layer>& layers = state_.runs[run];
    std::vector<router_gating::layer_routers> routers;
    for (const trained_layer& layer : layers)
      routers.push_back({&layer.query.router, layer.key ? &layer.key->router : nullptr});
    router_gating gating(std::move(routers), options_.objective(), pool_);
    gating.on_assign([&](const attention_call& call) {
      const stopwatch measuring_time;
      meters_[run].observe(call, layers[static_cast<std::size_t>(call.layer)],
                           measured ? &sample.rows : nullptr);
      router_seconds_ += measuring_time.seconds();
    });
    const double loss = gradient_.loss_and_gradients(sample.tokens, gating);
    check_finite(loss, state_.step, "");
    for (index_t l = 0; l < model_.config().layers; ++l) {
      trained_layer& layer = layers[static_cast<std::size_t>(l)];
      const auto take_step = [&](trained_token_router& trained, routed_tokens& tokens) {
        trained.take_step(tokens.gradient(), tokens.potentials(), adam);
      };
      take_step(layer.query, gating.queries(l));
      if (layer.key) take_step(*layer.key, gating.keys(l));
    }
    meters_[run].end_step(loss);
  }
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
          {"objective", options_.loss == training_loss::next_token ? "lm" : "mass"},
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
