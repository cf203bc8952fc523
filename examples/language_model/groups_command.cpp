#include <algorithm>
#include <cstdio>
#include <map>

#include <focus/attention.hpp>
#include <focus/route.hpp>

#include "commands.hpp"
#include "loaded_model.hpp"
#include "progress.hpp"
#include "utf8.hpp"

namespace language_model {

namespace {

/// A token as it can be shown: in quotes, with what no terminal shows as an escape.
std::string printable(std::string_view bytes) {
  std::string result = "'";
  while (!bytes.empty()) {
    const std::size_t length = character_length(bytes);
    const auto byte = static_cast<unsigned char>(bytes.front());
    if (bytes.front() == '\n') {
      result += "\\n";
    } else if (length == 0 || byte < 0x20 || byte == 0x7f) {
      char escape[5];
      std::snprintf(escape, sizeof escape, "\\x%02x", unsigned{byte});
      result += escape;
    } else {
      result += bytes.substr(0, length);
    }
    bytes.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return result + "'";
}

/// How often each token was seen in each group.
class group_counts {
 public:
  explicit group_counts(index_t groups) : of_group_(static_cast<std::size_t>(groups)) {}

  void add(token_id token, index_t group) {
    auto& counts = of_token_[token];
    counts.resize(of_group_.size());
    counts[static_cast<std::size_t>(group)] += 1;
    of_group_[static_cast<std::size_t>(group)] += 1;
    total_ += 1;
  }

  [[nodiscard]] double share(index_t group) const {
    return of_group_[static_cast<std::size_t>(group)] / total_;
  }

  struct typical_token {
    token_id token;
    double lift;
  };
  /// The tokens that come in the group more often than elsewhere: by lift, the token's frequency in
  /// the group over its frequency in the text. Each count is taken together with a few
  /// pseudo-counts at the base rate, so that rare tokens do not lead by chance.
  [[nodiscard]] std::vector<typical_token> typical(index_t group, std::size_t count) const {
    constexpr double pseudo_count = 5;
    std::vector<typical_token> result;
    for (const auto& [token, counts] : of_token_) {
      double everywhere = 0;
      for (const double n : counts) everywhere += n;
      const double here = counts[static_cast<std::size_t>(group)];
      const double base = share(group);
      if (here > 0)
        result.push_back(
            {token, (here + pseudo_count * base) / ((everywhere + pseudo_count) * base)});
    }
    std::stable_sort(
        result.begin(), result.end(),
        [](const typical_token& a, const typical_token& b) { return a.lift > b.lift; });
    result.resize(std::min(result.size(), count));
    return result;
  }

 private:
  std::map<token_id, std::vector<double>> of_token_;
  std::vector<double> of_group_;
  double total_ = 0;
};

index_t group_of(focus::group_mask mask) {
  return std::countr_zero(mask);
}

}  // namespace

void run_groups(const groups_options& options) {
  loaded_model loaded(options.common);
  const model_config& config = loaded.model.config();
  const router router = load_router(options.router, config);
  if (options.layer >= config.layers)
    throw usage_message{"language_model: --layer: the model has layers 0 to " +
                            std::to_string(config.layers - 1) + ", got " +
                            std::to_string(options.layer),
                        2};
  constexpr index_t default_windows = 8;
  const std::string& path = options.text.texts.front();
  const std::vector<token_id> tokens = loaded.read_text(path, options.text);
  const token_windows windows =
      spread_windows(tokens, options.text.skip, options.text.context,
                     options.text.windows > 0 ? options.text.windows : default_windows, path);

  const token_router& by = router.layers[static_cast<std::size_t>(options.layer)].query;
  group_counts counts(router.groups());
  forward_pass pass(loaded.model, loaded.pool);
  matrix stream;
  const progress_line progress;
  for (std::size_t w = 0; w < windows.size(); ++w) {
    progress.show("window " + std::to_string(w + 1) + " of " + std::to_string(windows.size()));
    std::vector<focus::group_mask> masks(windows[w].size());
    pass.embed(windows[w], stream);
    for (index_t l = 0; l <= options.layer; ++l)
      pass.layer(l, stream, [&](const attention_call& call) {
        focus::attention(call.q, call.k, call.v, call.out, focus::full_causal, {}, {}, loaded.pool);
        if (l == options.layer)
          focus::route(call.hidden, by.params(router.metric), by.potentials(), 1, masks,
                       {.temperature = router.temperature}, loaded.pool);
      });
    for (std::size_t t = 0; t < masks.size(); ++t) counts.add(windows[w][t], group_of(masks[t]));
  }
  progress.show("");

  std::printf(
      "Layer %lld: share of tokens in each group, and the tokens most typical of it (times as "
      "frequent as in the text)\n",
      static_cast<long long>(options.layer));
  for (index_t g = 0; g < router.groups(); ++g) {
    std::printf("\ngroup %2lld  %5.1f%% ", static_cast<long long>(g), 100 * counts.share(g));
    for (const auto& [token, lift] : counts.typical(g, static_cast<std::size_t>(options.tokens)))
      std::printf(" %s %.1f", printable(loaded.tokenizer.bytes(token)).c_str(), lift);
  }
  std::printf("\n");
}

void run_tokens(const tokens_options& options) {
  const tokenizer tokenizer{gguf_file(options.model)};
  std::printf("%zu\n", tokenizer.encode(read_file(options.text)).size());
}

}  // namespace language_model
