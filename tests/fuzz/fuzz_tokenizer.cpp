// Any text, with a tokenizer whose vocabulary and merges are made of the same input.

#include <algorithm>
#include <cstdint>
#include <fuzzer/FuzzedDataProvider.h>
#include <set>
#include <string>
#include <vector>

#include "gguf.hpp"
#include "gguf_writer.hpp"
#include "memory_file.hpp"
#include "require.hpp"
#include "tiny_model.hpp"
#include "tokenizer.hpp"

namespace {

/// Whether a token stands for the same bytes wherever it comes from: one of these types is shown as
/// it is spelled, but merges reach it in the alphabet that stands for bytes.
bool unambiguous(const std::string& token, std::int32_t type) {
  return type < 2 || type > 4 ||
         std::all_of(token.begin(), token.end(), [](char c) { return c > ' ' && c <= '~'; });
}

struct vocabulary_file {
  std::string bytes;
  bool unambiguous = true;
};

/// All bytes' tokens, and a few of the input's; merges of any two of them.
vocabulary_file tokenizer_file(FuzzedDataProvider& input) {
  constexpr const char* kinds[] = {"gpt-2", "smollm"};
  std::vector<std::string> tokens, merges;
  std::vector<std::int32_t> types;
  for (unsigned byte = 0; byte < 256; ++byte) tokens.push_back(byte_character(byte));
  types.resize(tokens.size(), 1);
  const auto kind = input.PickValueInArray(kinds);
  std::set<std::string> known(tokens.begin(), tokens.end());
  for (auto count = input.ConsumeIntegralInRange(0, 4); count > 0; --count) {
    const std::string token = input.ConsumeRandomLengthString(8);
    const auto type = input.ConsumeIntegralInRange(0, 7);
    if (!known.insert(token).second) continue;
    tokens.push_back(token);
    types.push_back(type);
  }
  const auto any = [&] {
    return tokens[input.ConsumeIntegralInRange<std::size_t>(0, tokens.size() - 1)];
  };
  for (auto count = input.ConsumeIntegralInRange(0, 8); count > 0; --count) {
    const std::string left = any(), right = any();
    merges.push_back(left + " " + right);
    if (!known.insert(left + right).second) continue;
    tokens.push_back(left + right);
    types.push_back(input.ConsumeIntegralInRange(1, 6));
  }
  gguf_writer file;
  file.string("tokenizer.ggml.model", "gpt2");
  file.string("tokenizer.ggml.pre", kind);
  file.strings("tokenizer.ggml.tokens", tokens);
  file.i32s("tokenizer.ggml.token_type", types);
  file.strings("tokenizer.ggml.merges", merges);
  vocabulary_file result{.bytes = file.bytes()};
  for (std::size_t i = 0; i < tokens.size(); ++i)
    result.unambiguous = result.unambiguous && unambiguous(tokens[i], types[i]);
  return result;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace language_model;
  FuzzedDataProvider input(data, size);
  const vocabulary_file file = tokenizer_file(input);
  const std::string text = input.ConsumeRemainingBytesAsString();
  const memory_file content(
      {reinterpret_cast<const std::uint8_t*>(file.bytes.data()), file.bytes.size()});
  may_refuse(content.path(), [&] {
    const tokenizer tokens{gguf_file(content.path())};
    const std::vector<token_id> encoded = tokens.encode(text);
    for (const token_id token : encoded)
      require(token >= 0 && static_cast<std::size_t>(token) < tokens.vocabulary(),
              "tokens are of the vocabulary");
    if (file.unambiguous) require(tokens.decode(encoded) == text, "tokens stand for the text");
  });
  return 0;
}
