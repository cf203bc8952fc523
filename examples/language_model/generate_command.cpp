#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "chat_template.hpp"
#include "commands.hpp"
#include "generation.hpp"
#include "loaded_model.hpp"
#include "mapped_file.hpp"
#include "progress.hpp"
#include "stopwatch.hpp"

namespace language_model {

namespace {

/// The method that the options name; refers to `router`.
attention_method method_of(const generate_options& options, const model_config& config,
                           const std::optional<router>& router) {
  attention_method method;
  method.layers = parse_layers(options.layers, config.layers);
  if (options.attention == "full") return method;
  method.pattern = {.window = options.window, .sink_tokens = options.sinks};
  method.what = attention_method::kind::windowed;
  if (options.attention == "window") return method;
  method.what = attention_method::kind::focus;
  method.router = &*router;
  method.k = parse_top_k(options.top_k, router->groups()).front();
  return method;
}

std::vector<token_id> prompt_of(const generate_options& options, const gguf_file& file,
                                const tokenizer& tokenizer) {
  const std::string text =
      options.prompt_file.empty() ? options.prompt : read_file(options.prompt_file);
  std::vector<token_id> tokens;
  if (options.chat)
    tokens = chat_template(file, tokenizer)
                 .ask(text, options.system.empty() ? std::nullopt : std::optional(options.system));
  else
    tokens = tokenizer.encode(text);
  if (options.prompt_tokens > 0) {
    if (static_cast<index_t>(tokens.size()) < options.prompt_tokens)
      throw usage_message{"language_model: --prompt-tokens: the prompt has " +
                              std::to_string(tokens.size()) + " tokens",
                          2};
    tokens.resize(static_cast<std::size_t>(options.prompt_tokens));
  }
  if (tokens.empty()) throw usage_message{"language_model: --prompt: there is no token in it", 2};
  return tokens;
}

/// The tokens after which a text is over.
std::vector<token_id> ends_of(const gguf_file& file, const tokenizer& tokenizer, bool chat) {
  std::vector<token_id> ends;
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"})
    if (const auto id = file.find_integer(key); id && *id < tokenizer.vocabulary())
      ends.push_back(static_cast<token_id>(*id));
  if (chat) ends.push_back(chat_template(file, tokenizer).end_of_message());
  return ends;
}

double a_second(double count, double seconds) {
  return count / std::max(seconds, 1e-9);
}

}  // namespace

void run_generate(const generate_options& options) {
  const gguf_file file(options.common.model);
  loaded_model loaded(options.common);
  const model_config& config = loaded.model.config();
  std::optional<router> router;
  if (options.attention == "focus") router = load_router(options.router, config);
  const attention_method method = method_of(options, config, router);
  const std::vector<token_id> prompt = prompt_of(options, file, loaded.tokenizer);
  const std::vector<token_id> ends = ends_of(file, loaded.tokenizer, options.chat);
  const auto prompt_size = static_cast<index_t>(prompt.size());
  if (prompt_size + options.tokens > config.context)
    throw usage_message{"language_model: --tokens: the model takes up to " +
                            std::to_string(config.context) + " tokens, got " +
                            std::to_string(prompt_size) + " of the prompt and " +
                            std::to_string(options.tokens),
                        2};

  growing_sequence sequence(loaded.model, method, parse_cache_type(options.cache), loaded.pool);
  const stopwatch prefill;
  {
    const progress_line progress;
    sequence.extend(prompt, options.block, [&](index_t done) {
      progress.show("prompt: " + std::to_string(done) + " of " + std::to_string(prompt.size()) +
                    " tokens");
    });
  }
  const double prefill_seconds = prefill.seconds();
  const double prefill_attention = sequence.caches().seconds();

  const sampling how{.temperature = options.temperature, .top_p = options.top_p};
  std::mt19937_64 random(options.seed);
  const stopwatch decode;
  index_t made = 0;
  for (; made < options.tokens; ++made) {
    const token_id next = choose_token(sequence.logits(), how, random);
    if (!options.ignore_end && std::find(ends.begin(), ends.end(), next) != ends.end()) break;
    const std::string& bytes = loaded.tokenizer.bytes(next);
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    std::fflush(stdout);
    sequence.extend(std::span(&next, 1), 1);
  }
  const double seconds = decode.seconds();
  std::fputc('\n', stdout);
  if (options.quiet) return;
  const double full_read = static_cast<double>(sequence.caches().size() * config.layers *
                                               config.kv_heads * 2 * config.head_dim);
  constexpr double megabyte = 1e6;
  const auto element = options.cache == "f32" ? 4.0 : options.cache == "int8" ? 1.0 : 2.0;
  std::fprintf(stderr,
               "\n%lld tokens of prompt in %.2f s, %.0f a second (attention %.2f s)\n"
               "%lld tokens made in %.2f s, %.1f a second (attention %.2f s)\n"
               "the last token read %.1f MB of K and V, %.1f%% of all; the caches hold %.1f MB "
               "(%s)\n",
               static_cast<long long>(prompt_size), prefill_seconds,
               a_second(static_cast<double>(prompt_size), prefill_seconds), prefill_attention,
               static_cast<long long>(made), seconds, a_second(static_cast<double>(made), seconds),
               sequence.caches().seconds() - prefill_attention,
               sequence.caches().bytes_of_last_token() / megabyte,
               100 * sequence.caches().bytes_of_last_token() / (full_read * element),
               sequence.caches().memory_bytes() / megabyte, options.cache.c_str());
}

}  // namespace language_model
