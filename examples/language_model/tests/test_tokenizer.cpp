#include <random>

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

using texts = std::vector<std::string>;

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
  const auto make = [](bool unknown) {
    gguf_writer writer;
    writer.string("tokenizer.ggml.model", "gpt2");
    writer.strings("tokenizer.ggml.tokens", {"<unk>", "a", "b"});
    writer.i32s("tokenizer.ggml.token_type", {2, 1, 1});
    writer.strings("tokenizer.ggml.merges", {});
    if (unknown) writer.u32("tokenizer.ggml.unknown_token_id", 0);
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
    w.strings("tokenizer.ggml.tokens", {"a", "b"});
    w.strings("tokenizer.ggml.merges", merges);
  };
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
