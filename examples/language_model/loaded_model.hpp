// What every command begins with: a model and its tokenizer from one file, and windows of a text's
// tokens.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "model.hpp"
#include "options.hpp"
#include "thread_pool.hpp"
#include "tokenizer.hpp"

namespace language_model {

using token_windows = std::vector<std::span<const token_id>>;

class loaded_model {
 public:
  /// Throws file_error.
  explicit loaded_model(const common_options& options);

  language_model::tokenizer tokenizer;
  language_model::model model;
  thread_pool pool;

  /// Throws file_error when the file cannot be read, and usage_message when the context is longer
  /// than the model's.
  [[nodiscard]] std::vector<token_id> read_text(const std::string& path,
                                                const text_options& options) const;

 private:
  loaded_model(const gguf_file& file, index_t threads);
};

/// `count` windows that follow one another from token `skip` on. Throws file_error, naming `path`,
/// when the text is short.
token_windows consecutive_windows(std::span<const token_id> tokens, index_t skip, index_t context,
                                  index_t count, const std::string& path);

/// `count` windows spread evenly over the tokens from `skip` on, without overlap. Throws as
/// consecutive_windows does; `purpose` ends the message.
token_windows spread_windows(std::span<const token_id> tokens, index_t skip, index_t context,
                             index_t count, const std::string& path,
                             const std::string& purpose = "");

}  // namespace language_model
