// Tokens that are found in raw text as they are spelled, before it is split into words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace language_model {

using token_id = std::int32_t;

/// As llama.cpp finds them: the longest token wherever it stands, from left to right, then the next
/// longest in what is left, and so on. (So "bcd" is found in "abcd" though "ab" begins before it.)
class literal_tokens {
 public:
  void add(std::string_view spelling, token_id id);

  /// A token, or text between tokens.
  struct piece {
    std::string_view text;
    std::optional<token_id> token;
  };
  /// Pieces that together are the text; none of them is empty.
  [[nodiscard]] std::vector<piece> split(std::string_view text) const;

 private:
  /// All spellings of one length, and the bytes with which they begin.
  struct of_length {
    std::map<std::string, token_id, std::less<>> ids;
    std::array<bool, 256> begins{};
  };
  std::map<std::size_t, of_length, std::greater<>> lengths_;
};

}  // namespace language_model
