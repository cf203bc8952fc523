#include <random>
#include <set>

#include "files.hpp"
#include "tiny_model.hpp"
#include "tokenizer.hpp"

namespace test_tokenizer {
using namespace language_model;

namespace {

tokenizer make_tokenizer(const std::vector<std::string>& merges,
                         const std::string& kind = "gpt-2") {
  gguf_writer writer;
  add_tokenizer(writer, merges, kind);
  const temporary_file file(writer.bytes());
  return tokenizer(gguf_file(file.path()));
}

std::vector<std::string> pieces(const tokenizer& tokens, std::string_view text) {
  std::vector<std::string> result;
  for (const token_id token : tokens.encode(text)) result.push_back(tokens.bytes(token));
  return result;
}

std::vector<std::string> words(std::string_view kind, std::string_view text) {
  const auto splitter = pre_tokenizer::of_kind(kind);
  REQUIRE(splitter != nullptr);
  std::vector<std::string> result;
  for (const std::string_view word : splitter->split(text)) result.emplace_back(word);
  return result;
}

/// A code point in UTF-8.
std::string utf8(char32_t code) {
  const auto byte = [](char32_t bits) {
    return static_cast<char>(static_cast<unsigned char>(bits));
  };
  const auto rest = [&](int shift) {
    return byte(0x80 | (code >> shift & 0x3f));
  };
  if (code < 0x80) return {byte(code)};
  if (code < 0x800) return {byte(0xc0 | code >> 6), rest(0)};
  if (code < 0x10000) return {byte(0xe0 | code >> 12), rest(6), rest(0)};
  return {byte(0xf0 | code >> 18), rest(12), rest(6), rest(0)};
}

using texts = std::vector<std::string>;

/// All bytes' tokens and others of given types, with merges.
tokenizer make_typed(const std::vector<std::pair<std::string, std::int32_t>>& more,
                     const std::vector<std::string>& merges = {}) {
  std::vector<std::string> tokens;
  for (unsigned byte = 0; byte < 256; ++byte) tokens.push_back(byte_character(byte));
  std::vector<std::int32_t> types(tokens.size(), 1);
  for (const auto& [text, type] : more) {
    tokens.push_back(text);
    types.push_back(type);
  }
  gguf_writer writer;
  writer.string("tokenizer.ggml.model", "gpt2");
  writer.string("tokenizer.ggml.pre", "smollm");
  writer.strings("tokenizer.ggml.tokens", tokens);
  writer.i32s("tokenizer.ggml.token_type", types);
  writer.strings("tokenizer.ggml.merges", merges);
  const temporary_file file(writer.bytes());
  return tokenizer(gguf_file(file.path()));
}

constexpr std::int32_t unknown = 2, control = 3, user_defined = 4, unused = 5, byte_type = 6;

}  // namespace

TEST_CASE("pre-tokenizer: GPT-2's words") {
  CHECK(words("gpt-2", "").empty());
  CHECK(words("gpt-2", "It's 12  3\n\nx") == texts{"It", "'s", " 12", " ", " 3", "\n", "\n", "x"});
  CHECK(words("gpt2", "we'll  go...  ") == texts{"we", "'ll", " ", " go", "...", "  "});
  CHECK(words("gpt-2", "na\u00efve \u0434\u0430! \u00b2x") ==
        texts{"na\u00efve", " \u0434\u0430", "!", " \u00b2", "x"});
  CHECK(words("gpt-2", "a\u00a0b") ==
        texts{"a", "\u00a0", "b"});  // a no-break space is white space
}

TEST_CASE("pre-tokenizer: every code point is of the class that the reference gives it") {
  // White_Space, and the numbers of letters and numbers: of tokenizers 0.23.3, in Unicode 16.
  const std::set<char32_t> expected_spaces = {
      0x9,    0xa,    0xb,    0xc,    0xd,    0x20,   0x85,   0xa0,   0x1680,
      0x2000, 0x2001, 0x2002, 0x2003, 0x2004, 0x2005, 0x2006, 0x2007, 0x2008,
      0x2009, 0x200a, 0x2028, 0x2029, 0x202f, 0x205f, 0x3000};
  constexpr std::size_t expected_letters = 141028, expected_numbers = 1911;
  const auto splitter = pre_tokenizer::of_kind("gpt-2");
  const auto joins = [&](const char* before, const std::string& c) {
    return splitter->split(before + c).size() == 1;
  };
  std::set<char32_t> spaces;
  std::size_t letters = 0, numbers = 0;
  for (char32_t code = 0; code <= 0x10ffff; ++code) {
    if (code >= 0xd800 && code <= 0xdfff) continue;
    const std::string c = utf8(code);
    if (joins("!", c)) continue;
    const bool letter = joins("a", c), number = joins("1", c);
    letters += letter;
    numbers += number;
    if (!letter && !number) spaces.insert(code);
  }
  CHECK(spaces == expected_spaces);
  // A PCRE2 of a later Unicode knows more.
  CHECK(letters >= expected_letters);
  CHECK(numbers >= expected_numbers);
}

TEST_CASE("pre-tokenizer: characters that PCRE2 sees otherwise, or not yet") {
  CHECK(words("gpt-2", "a\u180e b") == texts{"a", "\u180e", " b"});  // no white space any more
  CHECK(words("gpt-2", "!\u180e!") == texts{"!\u180e!"});
  CHECK(words("gpt-2", "a\u0085\u2028b") == texts{"a", "\u0085", "\u2028", "b"});
  CHECK(words("gpt-2", "a\u1c89\U00016d40") == texts{"a\u1c89\U00016d40"});  // letters
  CHECK(words("gpt-2", "1\U00010d40") == texts{"1\U00010d40"});              // numbers
  CHECK(words("smollm", "1\U00010d40") == texts{"1", "\U00010d40"});
  // Unicode 17's: digits, but no numbers.
  CHECK(words("smollm", "!\U00011de0!") == texts{"!", "\U00011de0", "!"});
}

TEST_CASE("pre-tokenizer: smollm takes every digit by itself, before all else") {
  CHECK(words("smollm", "It's 12  3\n\nx") ==
        texts{"It", "'s", " ", "1", "2", "  ", "3", "\n", "\n", "x"});
  CHECK(words("smollm", "x\u00b2 1") == texts{"x", "\u00b2", " ", "1"});
}

TEST_CASE("pre-tokenizer: bytes that are not UTF-8 are pieces of their own") {
  CHECK(words("gpt-2",
              "a\xff\xfe"
              "b c") == texts{"a", "\xff", "\xfe", "b", " c"});
  CHECK(words("gpt-2", "\xc0\xaf") == texts{"\xc0", "\xaf"});              // overlong
  CHECK(words("gpt-2", "\xed\xa0\x80") == texts{"\xed", "\xa0", "\x80"});  // a surrogate
  CHECK(words("gpt-2", "\xf4\x90\x80\x80") ==
        texts{"\xf4", "\x90", "\x80", "\x80"});                      // beyond U+10FFFF
  CHECK(words("gpt-2", "x\xe2\x82") == texts{"x", "\xe2", "\x82"});  // cut
}

TEST_CASE("tokenizer: merges worked out by hand") {
  const tokenizer tokens = make_tokenizer({"h e", "\u0120 t", "\u0120t he", "i n"});
  CHECK(pieces(tokens, "the thin the") == texts{"t", "he", " t", "h", "in", " the"});
  CHECK(pieces(tokens, "").empty());
}

TEST_CASE("tokenizer: the lowest rank first, then the leftmost") {
  CHECK(pieces(make_tokenizer({"b c", "a b"}), "abc") == texts{"a", "bc"});
  CHECK(pieces(make_tokenizer({"a b", "b c"}), "abc") == texts{"ab", "c"});
  CHECK(pieces(make_tokenizer({"a a"}), "aaaaa") == texts{"aa", "aa", "a"});
  CHECK(pieces(make_tokenizer({"a a", "aa aa"}), "aaaaaa") == texts{"aaaa", "aa"});
}

TEST_CASE("tokenizer: a control token's spelling is ordinary text") {
  const tokenizer tokens = make_tokenizer({});
  CHECK(pieces(tokens, "<end>") == texts{"<", "e", "n", "d", ">"});
  CHECK(tokens.bytes(0) == "<end>");
}

TEST_CASE("tokenizer: a user-defined token is found wherever it is spelled") {
  const tokenizer tokens = make_typed({{"<think>", user_defined}, {"\u00e9 x", user_defined}});
  CHECK(pieces(tokens, "a<think>b") == texts{"a", "<think>", "b"});
  CHECK(pieces(tokens, "<think><think>") == texts{"<think>", "<think>"});
  CHECK(pieces(tokens, "<<think> <think") ==
        texts{"<", "<think>", " ", "<", "t", "h", "i", "n", "k"});
  // Spelled as in text, not in the alphabet that stands for bytes.
  CHECK(pieces(tokens, "1\u00e9 x2") == texts{"1", "\u00e9 x", "2"});
  CHECK(tokens.decode(tokens.encode("1\u00e9 x2<think>")) == "1\u00e9 x2<think>");
}

TEST_CASE("tokenizer: longer user-defined tokens come first, then those to the left") {
  const tokenizer tokens = make_typed({{"ab", user_defined},
                                       {"bcd", user_defined},
                                       {"bb", user_defined},
                                       {"", user_defined},
                                       {"ba", user_defined}});
  CHECK(pieces(tokens, "abcd") == texts{"a", "bcd"});
  CHECK(pieces(tokens, "aba") == texts{"ab", "a"});
  CHECK(pieces(tokens, "bbb") == texts{"bb", "b"});
  CHECK(pieces(tokens, "xabcdab") == texts{"x", "a", "bcd", "ab"});
}

TEST_CASE("tokenizer: a user-defined token parts words and what a word looks ahead to") {
  const tokenizer tokens =
      make_typed({{"<t>", user_defined}, {"ab", 1}, {"\u0120\u0120", 1}}, {"a b", "\u0120 \u0120"});
  CHECK(pieces(tokens, "a<t>b") == texts{"a", "<t>", "b"});
  // Without the token, the last of two spaces belongs to the next word.
  CHECK(pieces(tokens, "  <t>") == texts{"  ", "<t>"});
  CHECK(pieces(tokens, "  <") == texts{" ", " ", "<"});
}

TEST_CASE("tokenizer: other types are not found in text") {
  const tokenizer tokens =
      make_typed({{"<a>", unknown}, {"<b>", control}, {"<c>", unused}, {"<d>", byte_type}});
  for (const char* text : {"<a>", "<b>", "<c>", "<d>"}) CHECK(tokens.encode(text).size() == 3);
}

TEST_CASE("tokenizer: merges go through tokens of any type") {
  for (const std::int32_t type : {0, 1, unknown, control, unused, byte_type}) {
    INFO("type " << type);
    const tokenizer tokens = make_typed({{"ab", type}, {"abc", 1}}, {"a b", "ab c"});
    CHECK(pieces(tokens, "abcx") == texts{"abc", "x"});
    CHECK(pieces(tokens, "abx") == texts{"ab", "x"});
  }
  const tokenizer bytes = make_typed({{"\u0120a", unused}}, {"\u0120 a"});
  CHECK(pieces(bytes, "x a") == texts{"x", " a"});
  // Found as it is spelled, before any merge; reached by one, in the alphabet that stands for
  // bytes.
  const tokenizer spelled = make_typed(
      {{"ab", user_defined}, {"abc", 1}, {"\u0120b", user_defined}}, {"a b", "ab c", "\u0120 b"});
  CHECK(pieces(spelled, "abc") == texts{"ab", "c"});
  CHECK(spelled.encode(" b") == std::vector<token_id>{258});
}

TEST_CASE("tokenizer: any bytes survive a round trip") {
  for (const char* kind : {"gpt-2", "smollm"}) {
    const tokenizer tokens =
        make_tokenizer({"h e", "\u0120 t", "\u0120t he", "1 2", "\u0120 \u0120"}, kind);
    std::mt19937 random(3);
    for (int i = 0; i < 200; ++i) {
      std::string text;
      for (int n = static_cast<int>(random() % 200); n > 0; --n)
        text += i % 2 == 0 ? static_cast<char>(random()) : " the12\n\xc3\xa9"[random() % 9];
      REQUIRE(tokens.decode(tokens.encode(text)) == text);
    }
    const std::string spaces(100000, ' ');
    CHECK(tokens.decode(tokens.encode(spaces)) == spaces);
  }
}

TEST_CASE("tokenizer: a byte without a token") {
  const auto make = [](bool has_unknown) {
    gguf_writer writer;
    writer.string("tokenizer.ggml.model", "gpt2");
    writer.string("tokenizer.ggml.pre", "gpt-2");
    writer.strings("tokenizer.ggml.tokens", {"<unk>", "a", "b"});
    writer.i32s("tokenizer.ggml.token_type", {2, 1, 1});
    writer.strings("tokenizer.ggml.merges", {});
    if (has_unknown) writer.u32("tokenizer.ggml.unknown_token_id", 0);
    const temporary_file file(writer.bytes());
    return tokenizer(gguf_file(file.path()));
  };
  CHECK(make(true).encode("azb") == std::vector<token_id>{1, 0, 2});
  CHECK(make(false).encode("azb") == std::vector<token_id>{1, 2});
}

TEST_CASE("tokenizer: unsupported kinds and damaged vocabularies are named") {
  const auto refused = [](auto&& change, const std::vector<std::string>& expected) {
    gguf_writer writer;
    change(writer);
    const temporary_file file(writer.bytes());
    require_file_error([](const std::string& path) { tokenizer{gguf_file(path)}; }, file.path(),
                       expected);
  };
  refused([](gguf_writer&) {}, {"tokenizer.ggml.model", "missing"});
  refused([](gguf_writer& w) { w.string("tokenizer.ggml.model", "llama"); },
          {"'llama'", "supported: gpt2"});
  refused([](gguf_writer& w) { add_tokenizer(w, {}, "tekken"); },
          {"'tekken'", "supported: gpt-2", "smollm"});
  const auto basic = [](gguf_writer& w, const std::vector<std::string>& merges) {
    w.string("tokenizer.ggml.model", "gpt2");
    w.string("tokenizer.ggml.pre", "gpt-2");
    w.strings("tokenizer.ggml.tokens", {"a", "b"});
    w.strings("tokenizer.ggml.merges", merges);
  };
  refused([](gguf_writer& w) { w.string("tokenizer.ggml.model", "gpt2"); },
          {"tokenizer.ggml.pre", "missing"});
  refused([](gguf_writer& w) { add_tokenizer(w, {"a b", "a b"}); }, {"'ab'", "comes twice"});
  refused([&](gguf_writer& w) { basic(w, {"ab"}); }, {"'ab'", "not two tokens"});
  refused([&](gguf_writer& w) { basic(w, {"a b"}); }, {"'a b'", "vocabulary"});
  refused(
      [&](gguf_writer& w) {
        basic(w, {});
        w.i32s("tokenizer.ggml.token_type", {1});
      },
      {"2 tokens but 1"});
  refused(
      [&](gguf_writer& w) {
        basic(w, {});
        w.u32("tokenizer.ggml.unknown_token_id", 2);
      },
      {"unknown token 2"});
}

}  // namespace test_tokenizer
