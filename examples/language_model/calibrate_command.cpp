#include <cstdio>

#include "calibrate.hpp"
#include "commands.hpp"
#include "loaded_model.hpp"
#include "mapped_file.hpp"
#include "progress.hpp"
#include "stopwatch.hpp"

namespace language_model {

void run_calibrate(const calibrate_options& options) {
  require_writable(options.output);
  const stopwatch time;
  loaded_model loaded(options.common);

  constexpr index_t default_windows = 8;
  const index_t count = options.text.windows > 0 ? options.text.windows : default_windows;
  const auto texts = static_cast<index_t>(options.text.texts.size());
  std::vector<std::vector<token_id>> tokens;
  token_windows windows;
  for (index_t i = 0; i < texts; ++i) {
    const std::string& path = options.text.texts[static_cast<std::size_t>(i)];
    tokens.push_back(loaded.read_text(path, options.text));
    const index_t share = count / texts + (i < count % texts ? 1 : 0);
    if (share == 0) continue;
    const token_windows more =
        spread_windows(tokens.back(), options.text.skip, options.text.context, share, path);
    windows.insert(windows.end(), more.begin(), more.end());
  }

  const progress_line progress;
  router result = calibrate(
      loaded.model, windows,
      {.groups = options.groups,
       .dimensions = options.dimensions,
       .sink_tokens = options.sinks,
       .metric = options.similarity == "dot" ? focus::similarity::dot : focus::similarity::cosine,
       .temperature = options.temperature,
       .restarts = options.restarts,
       .seed = options.seed},
      loaded.pool, [&](index_t layer) {
        progress.show("calibrating layer " + std::to_string(layer + 1) + " of " +
                      std::to_string(loaded.model.config().layers));
      });
  progress.show("");
  result.information["method"] = "calibrated: principal components, balanced k-means";
  result.information["tokens"] = std::to_string(count * options.text.context);
  save_router(result, options.output);
  std::printf("%s: %lld groups for each of %zu layers, from %lld tokens, in %.1f s\n",
              options.output.c_str(), static_cast<long long>(result.groups()), result.layers.size(),
              static_cast<long long>(count * options.text.context), time.seconds());
}

}  // namespace language_model
