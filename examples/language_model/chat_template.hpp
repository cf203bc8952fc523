// A chat as the text that a model was tuned on: ChatML, found in the template of its file.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gguf.hpp"
#include "tokenizer.hpp"

namespace language_model {

/// <|im_start|>role\ncontent<|im_end|>\n for each message, and a beginning of the assistant's.
/// Templates are programs (Jinja); those that come to this form are recognised by the two tokens
/// and what stands between them. A system message that such a template gives when there is none is
/// taken over.
class chat_template {
 public:
  /// Throws file_error when the file has no template, or one of another form.
  chat_template(const gguf_file& file, const tokenizer& tokenizer);

  /// One message of the user's, and the beginning of the answer. system: none is the template's
  /// own.
  [[nodiscard]] std::vector<token_id> ask(const std::string& message,
                                          const std::optional<std::string>& system) const;

  /// The token that ends an answer.
  [[nodiscard]] token_id end_of_message() const noexcept { return end_; }

 private:
  const tokenizer* tokenizer_;
  token_id start_, end_;
  std::optional<std::string> default_system_;
};

}  // namespace language_model
