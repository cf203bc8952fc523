#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <utility>

#include "calibrate.hpp"
#include "commands.hpp"
#include "loaded_model.hpp"
#include "mapped_file.hpp"
#include "progress.hpp"
#include "stopwatch.hpp"
#include "training.hpp"

namespace language_model {

namespace {

/// Above this, one group takes so much that routing saves little: the training has cheated.
constexpr double worrying_imbalance = 1.5;

/// r.safetensors for K = 8: r.k8.safetensors.
std::string name_with_groups(const std::string& output, index_t groups) {
  std::filesystem::path path(output);
  const std::string extension = path.extension().string();
  path.replace_extension(".k" + std::to_string(groups) + extension);
  return path.string();
}

class train_run {
 public:
  explicit train_run(const train_options& options)
      : options_(options), settings_(options.training), loaded_(options.common) {
    settings_.context = options.text.context;
    settings_.metric =
        options.similarity == "dot" ? focus::similarity::dot : focus::similarity::cosine;
    settings_.loss =
        options.objective == "lm" ? training_loss::next_token : training_loss::retained_mass;
    checkpoint_ = options.checkpoint.empty() ? options.output + ".checkpoint" : options.checkpoint;
    require_writable(options.output);
    require_writable(checkpoint_);
    for (const std::string& path : options.text.texts) {
      tokens_.push_back(loaded_.read_text(path, options.text));
      // One window at least, or the text is refused by name.
      consecutive_windows(tokens_.back(), options.text.skip, options.text.context, 1, path);
      texts_.push_back(std::span<const token_id>(tokens_.back())
                           .subspan(static_cast<std::size_t>(options.text.skip)));
    }
  }

  void run() {
    const bool continues = std::filesystem::exists(checkpoint_);
    const std::vector<router> initial = initial_routers(continues);
    for (const router& router : initial) {
      if (std::find(groups_.begin(), groups_.end(), router.groups()) != groups_.end())
        throw usage_message{"language_model: two routers of " + std::to_string(router.groups()) +
                                " groups would be written to one file",
                            2};
      groups_.push_back(router.groups());
      worrying_.push_back(false);
    }
    router_training training(loaded_.model, texts_, initial, settings_, loaded_.pool);
    if (continues) {
      training.load(checkpoint_);
      std::printf("continuing from step %lld of %s\n",
                  static_cast<long long>(training.steps_done()), checkpoint_.c_str());
    }
    const index_t first = steps_reported_ = training.steps_done();
    std::printf(
        "                  %s   kept,   pairs,  imbalance\n"
        " step   K    loss %s   top-1   top-1   mean  worst  s a step\n",
        by_next_token() ? " per- " : " kept,", by_next_token() ? "plexity" : "  soft ");
    while (training.steps_done() < settings_.steps) {
      const index_t next = training.steps_done() + 1;
      const bool reports =
          next == first + 1 || next % options_.report_every == 0 || next == settings_.steps;
      progress_.show("step " + std::to_string(next) + " of " + std::to_string(settings_.steps));
      training.step(reports);
      progress_.show("");
      if (reports) report(training);
      if (next % options_.checkpoint_every == 0) training.save(checkpoint_);
    }
    save_routers(training);
    std::filesystem::remove(checkpoint_);
    if (by_next_token()) return;
    std::printf("model %.1f s, routers %.1f s: a step takes %.2f times the forward pass\n",
                training.forward_seconds(), training.router_seconds(),
                1 + training.router_seconds() / std::max(training.forward_seconds(), 1e-9));
  }

 private:
  [[nodiscard]] bool by_next_token() const { return settings_.loss == training_loss::next_token; }

  /// The routers to start from; only their shapes count where a checkpoint will replace them.
  std::vector<router> initial_routers(bool shapes_alone) {
    std::vector<router> result;
    for (const std::string& path : options_.initial) {
      result.push_back(load_router(path, loaded_.model.config()));
      const router& loaded = result.back();
      check_groups(loaded, path);
      if (result.size() == 1) {
        settings_.metric = loaded.metric;
        settings_.temperature = loaded.temperature;
      } else if (loaded.metric != settings_.metric || loaded.temperature != settings_.temperature) {
        throw file_error(path,
                         "its similarity or temperature is not that of " + options_.initial[0]);
      }
    }
    if (!result.empty()) return result;
    for (const index_t groups : options_.groups.empty() ? std::vector<index_t>{8} : options_.groups)
      result.push_back(shapes_alone ? empty_router(groups) : calibrated(groups));
    return result;
  }

  void check_groups(const router& router, const std::string& path) const {
    const auto& wanted = options_.groups;
    if (wanted.empty() || std::find(wanted.begin(), wanted.end(), router.groups()) != wanted.end())
      return;
    std::string list;
    for (const index_t groups : wanted) {
      if (!list.empty()) list += ", ";
      list += std::to_string(groups);
    }
    throw file_error(
        path, "a router for another model: it is for " + std::to_string(router.layers.size()) +
                  " layers, d_model " + std::to_string(router.d_model()) + ", " +
                  std::to_string(router.groups()) + " groups; --groups asks for " + list +
                  " groups of " + std::to_string(loaded_.model.config().layers) +
                  " layers, d_model " + std::to_string(loaded_.model.config().d_model));
  }

  [[nodiscard]] router empty_router(index_t groups) const {
    const model_config& config = loaded_.model.config();
    const token_router zeros{.projection = matrix::Zero(config.d_model, options_.dimensions),
                             .bias = row_vector::Zero(options_.dimensions),
                             .centroids = matrix::Zero(groups, options_.dimensions),
                             .log_group_scale = row_vector::Zero(groups)};
    router result;
    result.layers.assign(static_cast<std::size_t>(config.layers), {zeros, std::nullopt});
    return result;
  }

  router calibrated(index_t groups) {
    constexpr index_t windows = 8;
    const index_t window_tokens = options_.text.context, skip = options_.text.skip;
    const auto room = (static_cast<index_t>(tokens_.front().size()) - skip) / window_tokens;
    const auto sample = spread_windows(tokens_.front(), skip, window_tokens,
                                       std::min(windows, room), options_.text.texts.front());
    router result =
        calibrate(loaded_.model, sample,
                  {.groups = groups,
                   .dimensions = options_.dimensions,
                   .sink_tokens = settings_.sinks,
                   .metric = settings_.metric,
                   .temperature = settings_.temperature,
                   .seed = settings_.seed},
                  loaded_.pool, [&](index_t layer) {
                    progress_.show("calibrating " + std::to_string(groups) + " groups, layer " +
                                   std::to_string(layer + 1) + " of " +
                                   std::to_string(loaded_.model.config().layers));
                  });
    progress_.show("");
    return result;
  }

  void report(router_training& training) {
    const std::vector<training_report> reports = training.reports();
    const double step_seconds =
        (training.forward_seconds() + training.router_seconds() - seconds_reported_) /
        static_cast<double>(training.steps_done() - steps_reported_);
    for (std::size_t run = 0; run < reports.size(); ++run) {
      const training_report& r = reports[run];
      // exp(-loss) is the mass that the soft assignment keeps.
      const double meaning = by_next_token() ? std::exp(r.loss) : 100 * std::exp(-r.loss);
      std::printf("%5lld  %2lld  %6.4f  %5.1f%c  %5.1f%%  %5.1f%%  %5.2f  %5.2f  %8.2f\n",
                  static_cast<long long>(training.steps_done()),
                  static_cast<long long>(groups_[run]), r.loss, meaning,
                  by_next_token() ? ' ' : '%', 100 * std::exp(-r.hard_loss), 100 * r.pairs,
                  r.mean_imbalance, r.worst_imbalance, step_seconds);
      std::fflush(stdout);
      warn_of_imbalance(r, run, training.steps_done() == settings_.steps);
    }
    seconds_reported_ = training.forward_seconds() + training.router_seconds();
    steps_reported_ = training.steps_done();
  }

  /// Once when it rises above what is to be expected, and at the end.
  void warn_of_imbalance(const training_report& r, std::size_t run, bool at_end) {
    const bool worrying = r.worst_imbalance > worrying_imbalance;
    if (worrying && (at_end || !worrying_[run]))
      std::fprintf(stderr,
                   "language_model: warning: K = %lld: the largest group of layer %lld has %.2f "
                   "times an even share (above %.1f)\n",
                   static_cast<long long>(groups_[run]), static_cast<long long>(r.worst_layer),
                   r.worst_imbalance, worrying_imbalance);
    worrying_[run] = worrying;
  }

  void save_routers(const router_training& training) const {
    for (std::size_t run = 0; run < groups_.size(); ++run) {
      router result = training.result(run);
      result.information["method"] = by_next_token()
                                         ? "trained: next-token loss through the frozen model"
                                         : "trained: retained attention mass";
      result.information["steps"] = std::to_string(settings_.steps);
      result.information["context"] = std::to_string(settings_.context);
      result.information["window"] = std::to_string(settings_.window);
      result.information["sinks"] = std::to_string(settings_.sinks);
      const std::string path =
          groups_.size() == 1 ? options_.output : name_with_groups(options_.output, groups_[run]);
      save_router(result, path, router_precision::f16);
      std::printf("%s: %lld groups for each of %zu layers\n", path.c_str(),
                  static_cast<long long>(groups_[run]), result.layers.size());
    }
  }

  const train_options& options_;
  training_options settings_;
  loaded_model loaded_;
  std::string checkpoint_;
  std::vector<std::vector<token_id>> tokens_;
  std::vector<std::span<const token_id>> texts_;
  std::vector<index_t> groups_;
  std::vector<bool> worrying_;  // of each number of groups, at the last report
  double seconds_reported_ = 0;
  index_t steps_reported_ = 0;
  progress_line progress_;
};

}  // namespace

void run_train(const train_options& options) {
  train_run(options).run();
}

}  // namespace language_model
