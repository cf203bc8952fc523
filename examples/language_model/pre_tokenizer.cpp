#define PCRE2_CODE_UNIT_WIDTH 8
#include "pre_tokenizer.hpp"

#include <array>
#include <cstdint>
#include <stdexcept>

#include <pcre2.h>

#include "unicode_classes.hpp"
#include "utf8.hpp"

namespace language_model {

namespace {

/// GPT-2's words: English contractions, then letters, numbers or other signs, each with at most one
/// space before, then white space. White space before a word leaves its last character to that
/// word.
std::string gpt2_words() {
  using namespace unicode_classes;
  const std::string spaces = std::string("[") + space + "]+", not_space = std::string("[^") + space;
  return std::string("'s|'t|'re|'ve|'m|'ll|'d| ?[") + letter + "]+| ?[" + number + "]+| ?" +
         not_space + letter + number + "]+|" + spaces + "(?!" + not_space + "])|" + spaces;
}

std::string single_digits() {
  return std::string("[") + unicode_classes::number + unicode_classes::late_digit + "]";
}

struct kind_entry {
  std::string_view name;
  std::vector<std::string (*)()> stages;
};

const std::array<kind_entry, 4>& kind_table() {
  static const std::array<kind_entry, 4> table{{{"gpt-2", {gpt2_words}},
                                                {"gpt2", {gpt2_words}},
                                                {"smollm", {single_digits, gpt2_words}},
                                                {"starcoder", {single_digits, gpt2_words}}}};
  return table;
}

}  // namespace

class pre_tokenizer::pattern {
 public:
  explicit pattern(const std::string& expression) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                              PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr));
    if (!code_) throw std::runtime_error(message("cannot compile an expression", error));
    // Without just-in-time compilation (no support on this processor) the interpreter is used.
    pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE);
  }

  /// Calls matched(begin, end) for each match in the text, which must be valid UTF-8.
  template <class F>
  void for_each_match(std::string_view text, F&& matched) const {
    const std::unique_ptr<pcre2_match_data, match_data_deleter> data(
        pcre2_match_data_create_from_pattern(code_.get(), nullptr));
    if (!data) throw std::bad_alloc();
    const PCRE2_SIZE* range = pcre2_get_ovector_pointer(data.get());
    for (std::size_t at = 0; at < text.size(); at = range[1]) {
      const int result = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                     text.size(), at, PCRE2_NO_UTF_CHECK, data.get(), nullptr);
      if (result == PCRE2_ERROR_NOMATCH) return;
      if (result < 0) throw std::runtime_error(message("cannot match", result));
      matched(range[0], range[1]);
    }
  }

 private:
  struct code_deleter {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  };
  struct match_data_deleter {
    void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
  };

  static std::string message(const char* what, int error) {
    std::array<PCRE2_UCHAR, 256> text{};
    pcre2_get_error_message(error, text.data(), text.size());
    return std::string("pre-tokenizer: ") + what + ": " +
           reinterpret_cast<const char*>(text.data());
  }

  std::unique_ptr<pcre2_code, code_deleter> code_;
};

std::unique_ptr<pre_tokenizer> pre_tokenizer::of_kind(std::string_view kind) {
  for (const kind_entry& entry : kind_table()) {
    if (entry.name != kind) continue;
    std::vector<std::shared_ptr<const pattern>> stages;
    for (const auto expression : entry.stages)
      stages.push_back(std::make_shared<const pattern>(expression()));
    return std::unique_ptr<pre_tokenizer>(new pre_tokenizer(std::move(stages)));
  }
  return nullptr;
}

std::string pre_tokenizer::kinds() {
  std::string names;
  for (const kind_entry& entry : kind_table())
    names += (names.empty() ? "" : ", ") + std::string(entry.name);
  return names;
}

std::vector<std::string_view> pre_tokenizer::split(std::string_view text) const {
  std::vector<std::string_view> pieces;
  while (!text.empty()) {
    std::size_t valid = 0;
    while (valid < text.size()) {
      const std::size_t length = character_length(text.substr(valid));
      if (length == 0) break;
      valid += length;
    }
    split(text.substr(0, valid), 0, pieces);
    text.remove_prefix(valid);
    if (!text.empty()) {
      pieces.push_back(text.substr(0, 1));
      text.remove_prefix(1);
    }
  }
  return pieces;
}

/// Each stage splits what the stage before left into its matches and what lies between them. A
/// piece is matched as a text of its own: looking ahead, a later stage does not see beyond it.
void pre_tokenizer::split(std::string_view text, std::size_t stage,
                          std::vector<std::string_view>& out) const {
  if (text.empty()) return;
  if (stage == stages_.size()) {
    out.push_back(text);
    return;
  }
  std::size_t done = 0;
  stages_[stage]->for_each_match(text, [&](std::size_t begin, std::size_t end) {
    split(text.substr(done, begin - done), stage + 1, out);
    split(text.substr(begin, end - begin), stage + 1, out);
    done = end;
  });
  split(text.substr(done), stage + 1, out);
}

}  // namespace language_model
