#include "chat_template.hpp"

namespace language_model {

namespace {

constexpr std::string_view start_text = "<|im_start|>", end_text = "<|im_end|>";

/// What a string literal of the template stands for.
std::string unescaped(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 1 < text.size() && text[i + 1] == 'n') {
      result += '\n';
      ++i;
    } else {
      result += text[i];
    }
  }
  return result;
}

}  // namespace

chat_template::chat_template(const gguf_file& file, const tokenizer& tokenizer)
    : tokenizer_(&tokenizer) {
  const auto text = file.find_string("tokenizer.chat_template");
  if (!text) throw file_error(file.path(), "it has no chat template");
  const auto start = tokenizer.find(start_text), end = tokenizer.find(end_text);
  if (!start || !end || text->find(start_text) == std::string_view::npos ||
      text->find(end_text) == std::string_view::npos)
    throw file_error(file.path(),
                     "its chat template is not ChatML (supported: messages between "
                     "<|im_start|> and <|im_end|>)");
  start_ = *start;
  end_ = *end;
  for (const std::string_view opening : {"<|im_start|>system\\n", "<|im_start|>system\n"}) {
    const std::size_t begin = text->find(opening);
    if (begin == std::string_view::npos) continue;
    const std::string_view rest = text->substr(begin + opening.size());
    const std::size_t stop = rest.find(end_text);
    const std::string_view message = rest.substr(0, stop);
    // Not a literal text, but one with a quote in it: the message that was given.
    if (stop == std::string_view::npos || message.find_first_of("'\"{}") != std::string_view::npos)
      continue;
    default_system_ = unescaped(message);
    break;
  }
}

std::vector<token_id> chat_template::ask(const std::string& message,
                                         const std::optional<std::string>& system) const {
  std::vector<token_id> tokens;
  const auto text = [&](const std::string& words) {
    const auto more = tokenizer_->encode(words);
    tokens.insert(tokens.end(), more.begin(), more.end());
  };
  const auto add = [&](const std::string& role, const std::string& content) {
    tokens.push_back(start_);
    text(role + "\n" + content);
    tokens.push_back(end_);
    text("\n");
  };
  if (system)
    add("system", *system);
  else if (default_system_)
    add("system", *default_system_);
  add("user", message);
  tokens.push_back(start_);
  text("assistant\n");
  return tokens;
}

}  // namespace language_model
