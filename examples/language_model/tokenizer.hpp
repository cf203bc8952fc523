// GPT-2 style byte-level byte-pair encoding, from the vocabulary and merges of a GGUF file.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "gguf.hpp"
#include "literal_tokens.hpp"
#include "pre_tokenizer.hpp"

namespace language_model {

class tokenizer {
 public:
  /// Copies what it needs from the file. Throws file_error when the file has no tokenizer, or one
  /// of another kind.
  explicit tokenizer(const gguf_file& file);

  /// Tokens of any bytes. The text is taken as it is: nothing is normalised, no token is put before
  /// or after. The spelling of a user-defined token is that token wherever it stands; the spelling
  /// of a control token is ordinary text, as that of an unknown or unused one. Merges may give
  /// tokens of any type. Bytes that are not UTF-8 are encoded byte by byte. A byte for which the
  /// vocabulary has no token becomes the unknown token, or is left out when there is none.
  [[nodiscard]] std::vector<token_id> encode(std::string_view text) const;

  /// The bytes that a token stands for. A token id must be within the vocabulary.
  [[nodiscard]] const std::string& bytes(token_id token) const {
    return bytes_[static_cast<std::size_t>(token)];
  }
  /// The token that is spelled so; for tokens that encode never makes of a text, as those of
  /// control.
  [[nodiscard]] std::optional<token_id> find(std::string_view spelling) const;
  [[nodiscard]] std::string decode(std::span<const token_id> tokens) const;
  [[nodiscard]] std::size_t vocabulary() const noexcept { return bytes_.size(); }

 private:
  struct merge {
    std::uint32_t rank;  // lower comes first
    token_id result;
  };
  static std::uint64_t pair_key(token_id left, token_id right) {
    return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32) |
           static_cast<std::uint32_t>(right);
  }
  /// The ids of all tokens by their texts in the file, which they view.
  using id_map = std::unordered_map<std::string_view, token_id>;
  id_map read_vocabulary(const gguf_file& file);
  void read_merges(const gguf_file& file, const id_map& ids);
  /// Words that were encoded before. Views the text.
  using word_cache = std::unordered_map<std::string_view, std::vector<token_id>>;
  void encode_text(std::string_view text, word_cache& cache, std::vector<token_id>& out) const;
  void encode_word(std::string_view word, std::vector<token_id>& out) const;

  std::unique_ptr<pre_tokenizer> pre_tokenizer_;
  std::vector<std::string> bytes_;
  literal_tokens literals_;  // the user-defined ones
  std::array<std::optional<token_id>, 256> byte_tokens_;
  std::unordered_map<std::uint64_t, merge> merges_;
};

}  // namespace language_model
