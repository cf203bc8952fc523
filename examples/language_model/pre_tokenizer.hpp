// Splits text into the pieces ("words") inside which a byte-pair tokenizer merges.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace language_model {

/// The regular expressions of one kind of pre-tokenizer, run by PCRE2 with Unicode classes.
class pre_tokenizer {
 public:
  /// The kinds that `tokenizer.ggml.pre` of a GGUF file may name. Null when it is none of them.
  static std::unique_ptr<pre_tokenizer> of_kind(std::string_view kind);
  /// Names of all kinds, for messages.
  static std::string kinds();

  /// Consecutive pieces that together are the whole text. A byte that belongs to no valid UTF-8
  /// character is a piece of its own, so that no byte is lost.
  [[nodiscard]] std::vector<std::string_view> split(std::string_view text) const;

 private:
  class pattern;
  explicit pre_tokenizer(std::vector<std::shared_ptr<const pattern>> stages)
      : stages_(std::move(stages)) {}
  void split(std::string_view text, std::size_t stage, std::vector<std::string_view>& out) const;

  std::vector<std::shared_ptr<const pattern>> stages_;
};

}  // namespace language_model
