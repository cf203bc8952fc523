#include "options.hpp"

#include <CLI/CLI.hpp>
#include <charconv>
#include <limits>
#include <sstream>
#include <type_traits>

#include "mapped_file.hpp"

namespace language_model {

namespace {

constexpr const char* program = "language_model";
constexpr index_t many = index_t{1} << 30;
constexpr int usage_error = 2;

[[noreturn]] void refuse(const std::string& problem) {
  throw usage_message{std::string(program) + ": " + problem, usage_error};
}

std::vector<std::string_view> split(std::string_view list, char separator) {
  std::vector<std::string_view> items;
  while (true) {
    const std::size_t end = list.find(separator);
    items.push_back(list.substr(0, end));
    if (end == std::string_view::npos) return items;
    list.remove_prefix(end + 1);
  }
}

/// A whole number from lowest to highest, and nothing else; -1 otherwise.
index_t parse_number(std::string_view text, index_t lowest, index_t highest) {
  index_t n = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), n);
  const bool whole = result.ec == std::errc{} && result.ptr == text.data() + text.size();
  return whole && n >= lowest && n <= highest ? n : -1;
}

template <class T>
std::string shortest_text(T x) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, x).ptr};
}

/// A number from lowest to highest, in decimal, and nothing else. Left to itself CLI11 takes 010
/// for 8, -1 for 2^64 - 1 and nan for a number within any bounds. For transform(), as what it has
/// checked it writes back as CLI11 reads it.
template <class T>
CLI::Validator number_within(T lowest, T highest) {
  constexpr bool whole = std::is_integral_v<T>;
  const std::string range = shortest_text(lowest) + " to " + shortest_text(highest);
  return CLI::Validator(
      [=](std::string& text) -> std::string {
        T x{};
        const char *begin = text.data(), *end = begin + text.size();
        const auto result = std::from_chars(begin, end, x);
        if (result.ec != std::errc{} || result.ptr != end || !(x >= lowest && x <= highest))
          return std::string("expected a ") + (whole ? "whole number" : "number") + " from " +
                 range + ", got " + in_quotes(text);
        text = shortest_text(x);
        return {};
      },
      range);
}

CLI::Option* add_model(CLI::App& command, std::string& model) {
  return command.add_option("--model", model, "Model file: GGUF, LLaMA architecture")->required();
}

void add_common(CLI::App& command, common_options& options) {
  add_model(command, options.model);
  command.add_option("--threads", options.threads, "Threads; 0: one a core")
      ->transform(number_within(index_t{0}, index_t{1024}))
      ->capture_default_str();
}

void add_windows(CLI::App& command, text_options& options, const char* windows_help) {
  command.add_option("--context", options.context, "Tokens in each window")
      ->transform(number_within(index_t{2}, many))
      ->capture_default_str();
  command.add_option("--windows", options.windows, windows_help)
      ->transform(number_within(index_t{1}, many));
  command.add_option("--skip", options.skip, "Tokens left out at the beginning of the text")
      ->transform(number_within(index_t{0}, many))
      ->capture_default_str();
}

void add_text(CLI::App& command, text_options& options) {
  command.add_option("--text", options.texts, "Text file")->required()->expected(1);
}

void add_cache(CLI::App& command, std::string& cache) {
  command.add_option("--cache", cache, "What KV caches keep: 8 bits come with a scale a row")
      ->check(CLI::IsMember({"f32", "bf16", "f16", "int8"}))
      ->capture_default_str();
}

void add_generate(CLI::App& app, std::optional<generate_options>& chosen, generate_options& o) {
  CLI::App* command =
      app.add_subcommand("generate", "Goes on with a text, over KV caches that Focus orders");
  add_common(*command, o.common);
  auto* const prompt = command->add_option("--prompt", o.prompt, "The text to go on with");
  auto* const file = command->add_option("--prompt-file", o.prompt_file, "A file with that text");
  prompt->excludes(file);
  command->add_option("--prompt-tokens", o.prompt_tokens, "Tokens of it that are taken; 0: all")
      ->transform(number_within(index_t{0}, many))
      ->capture_default_str();
  auto* const chat = command->add_flag(
      "--chat", o.chat, "The prompt is a message to the assistant, in the model's chat template");
  command->add_option("--system", o.system, "System message in the place of the template's own")
      ->needs(chat);
  command->add_option("--attention", o.attention, "full, window (and sinks), or focus")
      ->check(CLI::IsMember({"full", "window", "focus"}))
      ->capture_default_str();
  command->add_option("--router", o.router, "Router file, for --attention focus");
  command->add_option("--top-k", o.top_k, "Groups each token keeps; as query and as key: 2:1")
      ->capture_default_str();
  command->add_option("--window", o.window, "w: keys with i - j <= w are always visible")
      ->transform(number_within(focus::no_window, many))
      ->capture_default_str();
  command->add_option("--sinks", o.sinks, "First tokens that are always visible")
      ->transform(number_within(index_t{0}, many))
      ->capture_default_str();
  command->add_option("--layers", o.layers, "Layers that use window or Focus, as of perplexity")
      ->capture_default_str();
  add_cache(*command, o.cache);
  command->add_option("--tokens,-n", o.tokens, "Tokens to make, at most")
      ->transform(number_within(index_t{0}, many))
      ->capture_default_str();
  command->add_option("--block", o.block, "Tokens of the prompt that go in at a time")
      ->transform(number_within(index_t{1}, many))
      ->capture_default_str();
  command
      ->add_option("--temperature", o.temperature,
                   "Of the distribution that tokens are drawn from; 0: the most likely one")
      ->transform(number_within(0.0f, 100.0f))
      ->capture_default_str();
  command->add_option("--top-p", o.top_p, "Share of it that the tokens have that may be drawn")
      ->transform(number_within(0.0f, 1.0f))
      ->capture_default_str();
  command->add_option("--seed", o.seed, "Seed of what is drawn")
      ->transform(number_within(std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max()))
      ->capture_default_str();
  command->add_flag("--ignore-end", o.ignore_end, "Goes on behind the end of the text");
  command->add_flag("--quiet", o.quiet, "Says nothing about time and memory");
  command->callback([&chosen, &o] {
    if (o.prompt.empty() && o.prompt_file.empty()) refuse("--prompt or --prompt-file is needed");
    if (o.attention == "focus" && o.router.empty()) refuse("--attention focus needs --router");
    chosen = o;
  });
}

void add_perplexity(CLI::App& app, std::optional<perplexity_options>& chosen,
                    perplexity_options& o) {
  CLI::App* command = app.add_subcommand(
      "perplexity",
      "How well the model predicts a text with full attention, with window and sinks "
      "alone, and with Focus; and what each costs");
  add_common(*command, o.common);
  add_text(*command, o.text);
  add_windows(*command, o.text, "Number of windows; if not given, 4096 tokens' worth, at least 1");
  command->add_option(
      "--router", o.routers,
      "Routers, from calibrate or trained elsewhere; may be given several times. If "
      "not given, centroids are first calibrated on a later part of the text");
  command
      ->add_option("--groups", o.groups,
                   "K, number of groups; a list gives a row each; with "
                   "--router, the routers must have it  [8]")
      ->delimiter(',')
      ->transform(number_within(index_t{1}, focus::max_groups));
  command
      ->add_option(
          "--top-k", o.top_k,
          "Groups each token keeps; a list gives a row each: 1,2. As query and as key: 2:1")
      ->capture_default_str();
  command->add_option("--window", o.window, "w: keys with i - j <= w are always visible; -1: none")
      ->transform(number_within(focus::no_window, many))
      ->capture_default_str();
  command->add_option("--sinks", o.sinks, "First tokens that are always visible")
      ->transform(number_within(index_t{0}, many))
      ->capture_default_str();
  command
      ->add_option("--layers", o.layers,
                   "Layers that use window and Focus, such as 2-29 or 0,3,5-8; the others use full "
                   "attention")
      ->capture_default_str();
  command->add_option("--json", o.json, "Writes the table to this file too, for machines");
  command->add_option("--masks-out", o.masks,
                      "Writes each token's groups to this safetensors file");
  command
      ->add_option("--cached", o.cached,
                   "Tokens go through KV caches, so many at a time, as in generation; 0: no caches")
      ->transform(number_within(index_t{0}, many))
      ->capture_default_str();
  add_cache(*command, o.cache);
  command->callback([&chosen, &o] {
    if (o.cached > 0 && !o.masks.empty()) refuse("--masks-out: not with --cached");
    chosen = o;
  });
}

void add_calibrate(CLI::App& app, std::optional<calibrate_options>& chosen, calibrate_options& o) {
  CLI::App* command = app.add_subcommand(
      "calibrate",
      "Finds centroids for every layer from the hidden states of some text, with no training");
  add_common(*command, o.common);
  command->add_option("--text", o.text.texts, "Text files; windows are taken from each in turn")
      ->required();
  add_windows(*command, o.text, "Number of windows, spread over the texts  [8]");
  command->add_option("--groups", o.groups, "K, number of groups")
      ->transform(number_within(index_t{1}, focus::max_groups))
      ->capture_default_str();
  command->add_option("--dimensions", o.dimensions, "Principal components that are kept")
      ->transform(number_within(index_t{1}, many))
      ->capture_default_str();
  command->add_option("--sinks", o.sinks, "First tokens of each window that are left out")
      ->transform(number_within(index_t{0}, many))
      ->capture_default_str();
  command->add_option("--similarity", o.similarity, "How tokens are compared with centroids")
      ->check(CLI::IsMember({"cosine", "dot"}))
      ->capture_default_str();
  command->add_option("--temperature", o.temperature, "tau of the Sinkhorn iterations")
      ->transform(number_within(1e-3f, 1e3f))
      ->capture_default_str();
  command->add_option("--restarts", o.restarts, "Runs of k-means, of which the best is kept")
      ->transform(number_within(1, 1000))
      ->capture_default_str();
  command->add_option("--seed", o.seed, "Seed of the runs")
      ->transform(number_within(std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max()))
      ->capture_default_str();
  command->add_option("--output,-o", o.output, "Router file to write, safetensors")->required();
  command->callback([&chosen, &o] { chosen = o; });
}

void add_training(CLI::App& command, training_options& o) {
  const auto count = [&](const char* names, index_t& n, index_t lowest, const char* help) {
    command.add_option(names, n, help)
        ->transform(number_within(lowest, many))
        ->capture_default_str();
  };
  const auto real = [&](const char* names, float& x, float lowest, float highest,
                        const char* help) {
    command.add_option(names, x, help)
        ->transform(number_within(lowest, highest))
        ->capture_default_str();
  };
  command.add_flag("--separate-keys", o.separate_keys,
                   "Keys get a projection and centroids of their own");
  count("--steps", o.steps, 1, "Steps, each of one window of text");
  count("--rows", o.rows, 1, "Query rows of a window, drawn at random, that the kept mass is over");
  real("--learning-rate", o.learning_rate, 1e-8f, 1e3f, "Highest learning rate, of Adam");
  real("--warm-up", o.warm_up, 0, 1, "Share of the steps in which the learning rate rises");
  real("--temperature", o.temperature, 1e-3f, 1e3f, "tau of the Sinkhorn iterations");
  command.add_option("--iterations", o.iterations, "Sinkhorn iterations")
      ->transform(number_within(0, 100000))
      ->capture_default_str();
  count("--window", o.window, focus::no_window, "w: keys with i - j <= w are always visible");
  count("--sinks", o.sinks, 0, "First tokens that are always visible");
  command.add_option("--seed", o.seed, "Seed of all that is drawn")
      ->transform(number_within(std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max()))
      ->capture_default_str();
}

void add_train(CLI::App& app, std::optional<train_options>& chosen, train_options& o) {
  CLI::App* command = app.add_subcommand(
      "train",
      "Trains the routers of all layers, the model being frozen, from passes over text; a run that "
      "was broken off continues from its checkpoint");
  add_common(*command, o.common);
  command->add_option("--text,--texts", o.text.texts, "Text files; windows are drawn from all")
      ->required();
  command->add_option("--context,--tokens", o.text.context, "Tokens in each window")
      ->transform(number_within(index_t{2}, many))
      ->capture_default_str();
  command->add_option("--skip", o.text.skip, "Tokens left out at the beginning of each text")
      ->transform(number_within(index_t{0}, many))
      ->capture_default_str();
  command
      ->add_option("--groups", o.groups,
                   "K, number of groups; a list trains routers of each from the same forward "
                   "passes  [8]")
      ->delimiter(',')
      ->transform(number_within(index_t{1}, focus::max_groups));
  command->add_option("--dimensions,--d-group", o.dimensions, "d_group, width of the projections")
      ->transform(number_within(index_t{1}, many))
      ->capture_default_str();
  command->add_option("--initial", o.initial,
                      "Router to start from, whose groups, width and similarity are then kept; may "
                      "be given several times. If not given, centroids are first calibrated");
  command->add_option("--similarity", o.similarity, "How tokens are compared with centroids")
      ->check(CLI::IsMember({"cosine", "dot"}))
      ->capture_default_str();
  command
      ->add_option("--objective", o.objective,
                   "mass: each layer keeps the mass of full attention. lm: the next-token loss "
                   "through the model with softly gated attention, from --initial routers of the "
                   "former on; a learning rate of 2e-3 suits it")
      ->check(CLI::IsMember({"mass", "lm"}))
      ->capture_default_str();
  add_training(*command, o.training);
  command
      ->add_option("--output,-o", o.output,
                   "Router file to write, safetensors; with several K, r.safetensors becomes "
                   "r.k8.safetensors and so on")
      ->required();
  command->add_option("--checkpoint", o.checkpoint,
                      "Checkpoint file, removed at the end  [the output's name and .checkpoint]");
  command
      ->add_option("--checkpoint-every", o.checkpoint_every, "Steps from checkpoint to checkpoint")
      ->transform(number_within(index_t{1}, many))
      ->capture_default_str();
  command->add_option("--report-every", o.report_every, "Steps from line to line")
      ->transform(number_within(index_t{1}, many))
      ->capture_default_str();
  command->callback([&chosen, &o] { chosen = o; });
}

void add_groups(CLI::App& app, std::optional<groups_options>& chosen, groups_options& o) {
  CLI::App* command = app.add_subcommand(
      "groups", "The most typical tokens of each group of a layer, and the group's share");
  add_common(*command, o.common);
  add_text(*command, o.text);
  add_windows(*command, o.text, "Number of windows  [8]");
  command->add_option("--router", o.router, "Router file")->required();
  command->add_option("--layer", o.layer, "Layer, from 0 on")
      ->transform(number_within(index_t{0}, many))
      ->capture_default_str();
  command->add_option("--tokens", o.tokens, "Tokens to show for each group")
      ->transform(number_within(index_t{1}, many))
      ->capture_default_str();
  command->callback([&chosen, &o] { chosen = o; });
}

void add_tokens(CLI::App& app, std::optional<tokens_options>& chosen, tokens_options& o) {
  CLI::App* command = app.add_subcommand("tokens", "The number of tokens in a text");
  add_model(*command, o.model);
  command->add_option("--text", o.text, "Text file")->required();
  command->callback([&chosen, &o] { chosen = o; });
}

}  // namespace

command_line parse_command_line(int argc, const char* const* argv) {
  command_line result;
  perplexity_options perplexity;
  generate_options generate;
  calibrate_options calibrate;
  train_options train;
  groups_options groups;
  tokens_options tokens;
  CLI::App app("A language model that reads text with full attention and with Focus attention.",
               program);
  app.require_subcommand(1);
  add_perplexity(app, result.perplexity, perplexity);
  add_generate(app, result.generate, generate);
  add_calibrate(app, result.calibrate, calibrate);
  add_train(app, result.train, train);
  add_groups(app, result.groups, groups);
  add_tokens(app, result.tokens, tokens);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    std::ostringstream text, unused;
    app.exit(help, text, unused);
    throw usage_message{text.str(), 0};
  } catch (const CLI::ParseError& error) {
    refuse(std::string(error.what()) + " (see --help)");
  }
  return result;
}

std::vector<top_k> parse_top_k(const std::string& list, index_t groups) {
  std::vector<top_k> result;
  for (const std::string_view item : split(list, ',')) {
    const auto sides = split(item, ':');
    const index_t query = parse_number(sides.front(), 1, groups),
                  key = parse_number(sides.back(), 1, groups);
    if (sides.size() > 2 || query < 0 || key < 0)
      refuse("--top-k: expected numbers from 1 to " + std::to_string(groups) +
             " as in 1,2,2:1, got '" + list + "'");
    result.push_back({static_cast<int>(query), static_cast<int>(key)});
  }
  return result;
}

std::vector<bool> parse_layers(const std::string& list, index_t layers) {
  if (list == "all") return std::vector<bool>(static_cast<std::size_t>(layers), true);
  std::vector<bool> result(static_cast<std::size_t>(layers));
  for (const std::string_view item : split(list, ',')) {
    const auto ends = split(item, '-');
    const index_t first = parse_number(ends.front(), 0, layers - 1),
                  last = parse_number(ends.back(), 0, layers - 1);
    if (ends.size() > 2 || first < 0 || last < first)
      refuse("--layers: expected layers from 0 to " + std::to_string(layers - 1) +
             " as in all, 2-5 or 0,3,5-8, got '" + list + "'");
    for (index_t l = first; l <= last; ++l) result[static_cast<std::size_t>(l)] = true;
  }
  return result;
}

}  // namespace language_model
