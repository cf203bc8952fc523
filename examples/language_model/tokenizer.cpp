#include "tokenizer.hpp"

#include <limits>
#include <queue>

namespace language_model {

namespace {

/// GGUF's tokenizer.ggml.token_type. Of the types that are not here, and of bytes, the texts are
/// written as those of normal tokens are.
enum token_type : std::int64_t { normal = 1, unknown = 2, control = 3, user_defined = 4 };

/// GPT-2 writes tokens as text by standing a printable character for every byte: the printable ones
/// of Latin-1 for themselves, and the others, in order, for U+0100 on. Gives each byte's code
/// point.
std::array<char32_t, 256> byte_alphabet() {
  std::array<char32_t, 256> result{};
  char32_t next = 0x100;
  for (std::size_t byte = 0; byte < result.size(); ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    result[byte] = printable ? static_cast<char32_t>(byte) : next++;
  }
  return result;
}

/// A code point of that alphabet: of one or two bytes.
std::string utf8(char32_t code) {
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
}

/// The bytes that a token's text stands for; nothing when a character of it stands for no byte.
class byte_decoder {
 public:
  byte_decoder() {
    const auto alphabet = byte_alphabet();
    for (std::size_t byte = 0; byte < alphabet.size(); ++byte)
      bytes_[alphabet[byte]] = static_cast<char>(static_cast<unsigned char>(byte));
  }

  [[nodiscard]] std::optional<std::string> operator()(std::string_view text) const {
    std::string result;
    for (std::size_t i = 0; i < text.size();) {
      // The alphabet ends at U+0143: one or two bytes a character in UTF-8.
      const auto lead = static_cast<unsigned char>(text[i]);
      char32_t code = lead;
      if (lead >= 0x80) {
        if (i + 1 == text.size() || lead < 0xc2 || lead > 0xdf) return std::nullopt;
        code = static_cast<char32_t>((lead & 0x1f) << 6 |
                                     (static_cast<unsigned char>(text[i + 1]) & 0x3f));
        ++i;
      }
      ++i;
      const auto found = bytes_.find(code);
      if (found == bytes_.end()) return std::nullopt;
      result += found->second;
    }
    return result;
  }

 private:
  std::unordered_map<char32_t, char> bytes_;
};

}  // namespace

tokenizer::tokenizer(const gguf_file& file) {
  const std::string_view model = file.string("tokenizer.ggml.model");
  if (model != "gpt2")
    throw file_error(file.path(),
                     "its tokenizer is of kind " + in_quotes(model) + " (supported: gpt2)");
  // There are files from before the key existed; they do not tell in which way theirs splits words.
  const std::string_view kind = file.string("tokenizer.ggml.pre");
  pre_tokenizer_ = pre_tokenizer::of_kind(kind);
  if (!pre_tokenizer_)
    throw file_error(file.path(), "its pre-tokenizer is of kind " + in_quotes(kind) +
                                      " (supported: " + pre_tokenizer::kinds() + ")");
  read_merges(file, read_vocabulary(file));
}

tokenizer::id_map tokenizer::read_vocabulary(const gguf_file& file) {
  const auto& texts = file.strings("tokenizer.ggml.tokens");
  const auto* types = file.find_integers("tokenizer.ggml.token_type");
  if (texts.size() > static_cast<std::size_t>(std::numeric_limits<token_id>::max()))
    throw file_error(file.path(), "its vocabulary has more than 2^31 tokens");
  if (types != nullptr && types->size() != texts.size())
    throw file_error(file.path(), "it has " + std::to_string(texts.size()) + " tokens but " +
                                      std::to_string(types->size()) + " token types");

  const byte_decoder decode;
  id_map ids;
  bytes_.reserve(texts.size());
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto id = static_cast<token_id>(i);
    const std::int64_t type = types == nullptr ? normal : (*types)[i];
    const bool literal = type == unknown || type == control || type == user_defined;
    const auto bytes = literal ? std::nullopt : decode(texts[i]);
    bytes_.push_back(bytes ? *bytes : std::string(texts[i]));
    if (type == user_defined) literals_.add(texts[i], id);
    // Tokens without a text fill gaps.
    if (!texts[i].empty() && !ids.try_emplace(texts[i], id).second)
      throw file_error(file.path(), "its token " + in_quotes(texts[i]) + " comes twice");
  }

  std::optional<token_id> unknown_id;
  if (const auto id = file.find_integer("tokenizer.ggml.unknown_token_id")) {
    if (*id >= bytes_.size())
      throw file_error(file.path(), "its unknown token " + std::to_string(*id) +
                                        " is not in its vocabulary of " +
                                        std::to_string(bytes_.size()));
    unknown_id = static_cast<token_id>(*id);
  }
  const auto alphabet = byte_alphabet();
  for (std::size_t byte = 0; byte < byte_tokens_.size(); ++byte) {
    const auto found = ids.find(utf8(alphabet[byte]));
    byte_tokens_[byte] = found == ids.end() ? unknown_id : std::optional(found->second);
  }
  return ids;
}

void tokenizer::read_merges(const gguf_file& file, const id_map& ids) {
  std::uint32_t rank = 0;
  for (const std::string_view text : file.strings("tokenizer.ggml.merges")) {
    const std::size_t space = text.find(' ');
    if (space == std::string_view::npos)
      throw file_error(file.path(), "its merge " + in_quotes(text) + " is not two tokens");
    const std::string_view left = text.substr(0, space), right = text.substr(space + 1);
    const auto left_id = ids.find(left), right_id = ids.find(right),
               result = ids.find(std::string(left) + std::string(right));
    if (left_id == ids.end() || right_id == ids.end() || result == ids.end())
      throw file_error(file.path(),
                       "its merge " + in_quotes(text) + " is not of tokens in its vocabulary");
    merges_.try_emplace(pair_key(left_id->second, right_id->second), merge{rank++, result->second});
  }
}

std::vector<token_id> tokenizer::encode(std::string_view text) const {
  word_cache cache;
  std::vector<token_id> tokens;
  for (const literal_tokens::piece& piece : literals_.split(text)) {
    if (piece.token)
      tokens.push_back(*piece.token);
    else
      encode_text(piece.text, cache, tokens);
  }
  return tokens;
}

/// Words repeat: most are found in the cache. Long pieces (runs of white space, say) rarely do.
void tokenizer::encode_text(std::string_view text, word_cache& cache,
                            std::vector<token_id>& out) const {
  constexpr std::size_t longest_cached = 64, most_cached = 1 << 16;
  for (const std::string_view word : pre_tokenizer_->split(text)) {
    const auto found = cache.find(word);
    if (found != cache.end()) {
      out.insert(out.end(), found->second.begin(), found->second.end());
      continue;
    }
    const std::size_t begin = out.size();
    encode_word(word, out);
    if (word.size() <= longest_cached && cache.size() < most_cached)
      cache.emplace(word, std::vector(out.begin() + static_cast<std::ptrdiff_t>(begin), out.end()));
  }
}

/// Merges the pair of lowest rank, leftmost first, until no pair has a merge: a linked list of
/// symbols and a heap of the pairs that may be merged, where pairs whose symbols have changed since
/// are skipped.
void tokenizer::encode_word(std::string_view word, std::vector<token_id>& out) const {
  struct symbol {
    token_id id;
    std::size_t previous, next;
    bool alive;
  };
  struct candidate {
    std::uint32_t rank;
    std::size_t left, right;
    token_id left_id, right_id, result;
    bool operator>(const candidate& other) const {
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  constexpr std::size_t none = std::numeric_limits<std::size_t>::max();

  std::vector<symbol> symbols;
  symbols.reserve(word.size());
  for (const char c : word)
    if (const auto id = byte_tokens_[static_cast<unsigned char>(c)]) {
      const std::size_t i = symbols.size();
      symbols.push_back({*id, i == 0 ? none : i - 1, i + 1, true});
    }
  if (symbols.empty()) return;
  symbols.back().next = none;

  std::priority_queue<candidate, std::vector<candidate>, std::greater<>> heap;
  const auto consider = [&](std::size_t left, std::size_t right) {
    if (left == none || right == none) return;
    const token_id left_id = symbols[left].id, right_id = symbols[right].id;
    const auto found = merges_.find(pair_key(left_id, right_id));
    if (found != merges_.end())
      heap.push({found->second.rank, left, right, left_id, right_id, found->second.result});
  };
  for (std::size_t i = 0; i + 1 < symbols.size(); ++i) consider(i, i + 1);

  while (!heap.empty()) {
    const candidate best = heap.top();
    heap.pop();
    symbol &left = symbols[best.left], &right = symbols[best.right];
    if (!left.alive || !right.alive || left.id != best.left_id || right.id != best.right_id)
      continue;
    left.id = best.result;
    left.next = right.next;
    right.alive = false;
    if (right.next != none) symbols[right.next].previous = best.left;
    consider(left.previous, best.left);
    consider(best.left, left.next);
  }
  for (std::size_t i = 0; i != none; i = symbols[i].next) out.push_back(symbols[i].id);
}

std::optional<token_id> tokenizer::find(std::string_view spelling) const {
  for (std::size_t i = 0; i < bytes_.size(); ++i)
    if (bytes_[i] == spelling) return static_cast<token_id>(i);
  return std::nullopt;
}

std::string tokenizer::decode(std::span<const token_id> tokens) const {
  std::string text;
  for (const token_id token : tokens) text += bytes(token);
  return text;
}

}  // namespace language_model
