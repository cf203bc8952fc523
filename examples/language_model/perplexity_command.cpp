#include <algorithm>
#include <cmath>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>

#include <nlohmann/json.hpp>

#include "calibrate.hpp"
#include "commands.hpp"
#include "generation.hpp"
#include "loaded_model.hpp"
#include "progress.hpp"
#include "safetensors.hpp"
#include "stopwatch.hpp"

namespace language_model {

namespace {

std::string file_name(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

/// A router and where it came from.
struct named_router {
  std::string path;  // empty: calibrated here
  language_model::router router;
};

/// One line of the table: what is measured, and what came out.
struct row {
  std::string name;
  attention_method method;
  std::string router_path = {};
  double perplexity = 0;
  double pairs = 0;  // share of all causal pairs
  double attention_seconds = 0;
  double total_seconds = 0;
};

/// All masks of one row: for each layer [windows, context], once for queries and once for keys.
struct recorded_masks {
  std::vector<std::vector<std::uint64_t>> query, key;
};

class perplexity_table {
 public:
  explicit perplexity_table(const perplexity_options& options)
      : options_(options), loaded_(options.common), path_(options.text.texts.front()) {
    constexpr index_t default_tokens = 4096;
    tokens_ = loaded_.read_text(path_, options.text);
    count_ = options.text.windows > 0 ? options.text.windows
                                      : std::max<index_t>(default_tokens / options.text.context, 1);
    windows_ = consecutive_windows(tokens_, options.text.skip, options.text.context, count_, path_);
    layers_ = parse_layers(options.layers, loaded_.model.config().layers);
    pattern_ = {.window = options.window, .sink_tokens = options.sinks};
  }

  void run() {
    require_writable(options_.json);
    require_writable(options_.masks);
    load_routers();
    plan_rows();
    std::printf(
        "%s reads %s: %lld x %lld tokens from token %lld on, %lld threads\n"
        "window %lld, sinks %lld, layers %s%s\n\n",
        file_name(options_.common.model).c_str(), file_name(path_).c_str(),
        static_cast<long long>(count_), static_cast<long long>(options_.text.context),
        static_cast<long long>(options_.text.skip),
        static_cast<long long>(loaded_.pool.concurrency()), static_cast<long long>(options_.window),
        static_cast<long long>(options_.sinks), options_.layers.c_str(),
        options_.routers.empty() ? "; centroids calibrated on a later part of the text" : "");
    std::size_t width = 0;
    for (const row& r : rows_) width = std::max(width, r.name.size());
    const int name_width = static_cast<int>(width);
    std::printf("%-*s  perplexity   pairs  attention  speedup      total\n", name_width,
                "attention");
    for (row& r : rows_) {
      measure(r);
      std::printf("%-*s  %10.2f  %5.1f%%  %7.2f s  %6.2fx  %7.2f s\n", name_width, r.name.c_str(),
                  r.perplexity, 100 * r.pairs, r.attention_seconds, speedup(r), r.total_seconds);
      std::fflush(stdout);
    }
    if (!options_.json.empty()) write_file(options_.json, json().dump(2) + "\n");
    if (!options_.masks.empty()) write_masks();
  }

 private:
  void load_routers() {
    for (const std::string& path : options_.routers) {
      auto named = std::make_unique<named_router>(
          named_router{path, load_router(path, loaded_.model.config())});
      const index_t groups = named->router.groups();
      if (!options_.groups.empty() && std::find(options_.groups.begin(), options_.groups.end(),
                                                groups) == options_.groups.end())
        throw file_error(path, "it has " + std::to_string(groups) +
                                   " groups, not the number that --groups asks for");
      routers_.push_back(std::move(named));
    }
    if (!routers_.empty()) {
      for (const index_t groups : options_.groups)
        if (std::none_of(routers_.begin(), routers_.end(),
                         [&](const auto& named) { return named->router.groups() == groups; }))
          throw usage_message{"language_model: --groups: no router of " + std::to_string(groups) +
                                  " groups is given",
                              2};
      return;
    }
    for (const index_t groups : options_.groups.empty() ? std::vector<index_t>{8} : options_.groups)
      routers_.push_back(std::make_unique<named_router>(named_router{"", calibrate_here(groups)}));
  }

  /// Centroids from the part of the text that comes after the windows that are measured.
  router calibrate_here(index_t groups) {
    constexpr index_t windows = 8, longest_context = 1024;
    const index_t context = std::min(longest_context, options_.text.context);
    const index_t after = options_.text.skip + count_ * options_.text.context;
    const token_windows sample = spread_windows(tokens_, after, context, windows, path_,
                                                ", to calibrate centroids (--router gives others)");
    return calibrate(loaded_.model, sample, {.groups = groups}, loaded_.pool, [&](index_t layer) {
      progress_.show("calibrating " + std::to_string(groups) + " groups, layer " +
                     std::to_string(layer + 1) + " of " +
                     std::to_string(loaded_.model.config().layers));
    });
  }

  void plan_rows() {
    using kind = attention_method::kind;
    rows_.push_back({.name = "full", .method = {.what = kind::full, .layers = layers_}});
    rows_.push_back({.name = "window and sinks",
                     .method = {.what = kind::windowed, .pattern = pattern_, .layers = layers_}});
    for (const auto& named : routers_) {
      const router& router = named->router;
      for (const top_k k : parse_top_k(options_.top_k, router.groups())) {
        std::string name =
            "Focus, K = " + std::to_string(router.groups()) + ", top-" + std::to_string(k.query);
        if (k.key != k.query) name += " (keys top-" + std::to_string(k.key) + ")";
        if (options_.routers.size() > 1) name += ", " + file_name(named->path);
        rows_.push_back({.name = name,
                         .method = {.what = kind::focus,
                                    .pattern = pattern_,
                                    .layers = layers_,
                                    .router = &router,
                                    .k = k},
                         .router_path = named->path});
      }
    }
  }

  void measure(row& r) {
    attention_runner::masks_function record;
    if (!options_.masks.empty() && r.method.router != nullptr)
      record = recorder(masks_.emplace_back());
    attention_runner runner(r.method, loaded_.pool, record);
    forward_pass pass(loaded_.model, loaded_.pool);
    const stopwatch time;
    double loss = 0;
    index_t predictions = 0;
    for (std::size_t w = 0; w < windows_.size(); ++w) {
      progress_.show(r.name + ": window " + std::to_string(w + 1) + " of " +
                     std::to_string(windows_.size()));
      loss += options_.cached > 0 ? cached_likelihood(r, windows_[w])
                                  : pass.negative_log_likelihood(windows_[w], std::ref(runner));
      predictions += static_cast<index_t>(windows_[w].size()) - 1;
    }
    progress_.show("");
    r.total_seconds = time.seconds();
    r.perplexity = std::exp(loss / static_cast<double>(predictions));
    if (options_.cached > 0) {
      r.pairs /= static_cast<double>(windows_.size());
      return;
    }
    r.pairs = runner.pairs();
    r.attention_seconds = runner.seconds();
  }

  /// That of a window whose tokens go through caches; adds its pairs and its time to the row.
  double cached_likelihood(row& r, std::span<const token_id> window) {
    growing_sequence sequence(loaded_.model, r.method, parse_cache_type(options_.cache),
                              loaded_.pool);
    const double loss = sequence.negative_log_likelihood(window, options_.cached);
    r.pairs += sequence.caches().pairs();
    r.attention_seconds += sequence.caches().seconds();
    return loss;
  }

  attention_runner::masks_function recorder(recorded_masks& masks) const {
    const auto layers = static_cast<std::size_t>(loaded_.model.config().layers);
    masks.query.resize(layers);
    masks.key.resize(layers);
    return [&masks](index_t layer, std::span<const focus::group_mask> query,
                    std::span<const focus::group_mask> key) {
      const auto append = [&](std::vector<std::vector<std::uint64_t>>& all, auto more) {
        auto& of_layer = all[static_cast<std::size_t>(layer)];
        of_layer.insert(of_layer.end(), more.begin(), more.end());
      };
      append(masks.query, query);
      append(masks.key, key);
    };
  }

  [[nodiscard]] double speedup(const row& r) const {
    return rows_.front().attention_seconds / r.attention_seconds;
  }

  [[nodiscard]] nlohmann::ordered_json json() const {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const row& r : rows_) {
      nlohmann::ordered_json entry = {
          {"attention", r.name},   {"perplexity", r.perplexity},
          {"pairs", r.pairs},      {"attention_seconds", r.attention_seconds},
          {"speedup", speedup(r)}, {"total_seconds", r.total_seconds}};
      if (r.method.router != nullptr) {
        entry["groups"] = r.method.router->groups();
        entry["top_k"] = r.method.k.query;
        entry["key_top_k"] = r.method.k.key;
        if (!r.router_path.empty()) entry["router"] = r.router_path;
      }
      rows.push_back(entry);
    }
    return {{"model", options_.common.model},
            {"text", path_},
            {"tokens", tokens_.size()},
            {"context", options_.text.context},
            {"windows", count_},
            {"skip", options_.text.skip},
            {"window", options_.window},
            {"sinks", options_.sinks},
            {"layers", options_.layers},
            {"threads", loaded_.pool.concurrency()},
            {"rows", rows}};
  }

  /// rows.R.layers.N.query_masks and .key_masks, [windows, context], R counting the table's Focus
  /// rows from 0.
  void write_masks() const {
    safetensors_writer out;
    out.metadata("window", std::to_string(options_.window));
    out.metadata("sinks", std::to_string(options_.sinks));
    const std::vector<std::int64_t> shape = {count_, options_.text.context};
    for (std::size_t r = 0; r < masks_.size(); ++r) {
      const std::string prefix = "rows." + std::to_string(r);
      out.metadata(prefix, rows_[rows_.size() - masks_.size() + r].name);
      for (std::size_t l = 0; l < layers_.size(); ++l) {
        if (!layers_[l]) continue;
        const std::string name = prefix + ".layers." + std::to_string(l);
        out.add(name + ".query_masks", shape, std::span<const std::uint64_t>(masks_[r].query[l]));
        out.add(name + ".key_masks", shape, std::span<const std::uint64_t>(masks_[r].key[l]));
      }
    }
    out.write(options_.masks);
  }

  const perplexity_options& options_;
  loaded_model loaded_;
  std::string path_;
  std::vector<token_id> tokens_;
  index_t count_ = 0;
  token_windows windows_;
  std::vector<bool> layers_;
  focus::pattern_options pattern_;
  std::vector<std::unique_ptr<named_router>> routers_;  // rows point to them
  std::vector<row> rows_;
  std::deque<recorded_masks> masks_;
  progress_line progress_;
};

}  // namespace

void run_perplexity(const perplexity_options& options) {
  perplexity_table(options).run();
}

}  // namespace language_model
