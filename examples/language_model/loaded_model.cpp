#include "loaded_model.hpp"

#include <algorithm>
#include <thread>

namespace language_model {

namespace {

void require_tokens(std::span<const token_id> tokens, index_t skip, index_t context, index_t count,
                    const std::string& path, const std::string& purpose) {
  const auto available = static_cast<index_t>(tokens.size());
  if (available >= skip && (available - skip) / context >= count) return;
  throw file_error(path, "too short: it has " + std::to_string(available) + " tokens; " +
                             std::to_string(count) + (count == 1 ? " window of " : " windows of ") +
                             std::to_string(context) + (count == 1 ? " tokens is" : " tokens are") +
                             " needed from token " + std::to_string(skip) + " on" + purpose);
}

}  // namespace

loaded_model::loaded_model(const common_options& options)
    : loaded_model(gguf_file(options.model), options.threads) {}

loaded_model::loaded_model(const gguf_file& file, index_t threads)
    : tokenizer(file),
      model(file),
      pool(threads > 0 ? threads : std::max<index_t>(std::thread::hardware_concurrency(), 1)) {
  if (static_cast<index_t>(tokenizer.vocabulary()) > model.config().vocabulary)
    throw file_error(file.path(), "its vocabulary has " + std::to_string(tokenizer.vocabulary()) +
                                      " tokens, its embedding " +
                                      std::to_string(model.config().vocabulary) + " rows");
}

std::vector<token_id> loaded_model::read_text(const std::string& path,
                                              const text_options& options) const {
  if (options.context > model.config().context)
    throw usage_message{"language_model: --context: the model takes up to " +
                            std::to_string(model.config().context) + " tokens, got " +
                            std::to_string(options.context),
                        2};
  return tokenizer.encode(read_file(path));
}

token_windows consecutive_windows(std::span<const token_id> tokens, index_t skip, index_t context,
                                  index_t count, const std::string& path) {
  require_tokens(tokens, skip, context, count, path, "");
  token_windows windows;
  for (index_t w = 0; w < count; ++w)
    windows.push_back(tokens.subspan(static_cast<std::size_t>(skip + w * context),
                                     static_cast<std::size_t>(context)));
  return windows;
}

token_windows spread_windows(std::span<const token_id> tokens, index_t skip, index_t context,
                             index_t count, const std::string& path, const std::string& purpose) {
  require_tokens(tokens, skip, context, count, path, purpose);
  const index_t gap = (static_cast<index_t>(tokens.size()) - skip - count * context) / count;
  token_windows windows;
  for (index_t w = 0; w < count; ++w)
    windows.push_back(tokens.subspan(static_cast<std::size_t>(skip + w * (context + gap)),
                                     static_cast<std::size_t>(context)));
  return windows;
}

}  // namespace language_model
