// The options of a benchmark program: declared once, parsed and explained from the declaration.
#pragma once

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <focus/tensor_view.hpp>

namespace bench {

using focus::index_t;
using number_list = std::vector<index_t>;
using word_list = std::vector<std::string>;

/// Options of the form --name value, --name list,of,values or, for a bool, --name. What a target
/// holds when it is added is its default. Numbers may end in K (x 1024). A wrong command line ends
/// the program with status 2 and one sentence; --help ends it with status 0.
class command_line {
 public:
  using target = std::variant<bool*, index_t*, number_list*, std::string*, word_list*>;

  command_line(std::string program, std::string purpose)
      : program_(std::move(program)), purpose_(std::move(purpose)) {}

  /// @param help     one sentence
  /// @param lowest   numbers below it are refused
  /// @param choices  words that are not among them are refused; empty: any
  void add(std::string name, target value, std::string help, index_t lowest = 0,
           word_list choices = {}) {
    options_.push_back({std::move(name), value, std::move(help), lowest, std::move(choices)});
  }

  void parse(int argc, char** argv) const {
    for (int a = 1; a < argc; ++a) {
      const std::string_view name = argv[a];
      if (name == "--help" || name == "-h") print_help();
      const option& chosen = find(name);
      if (bool* const* flag = std::get_if<bool*>(&chosen.value)) {
        **flag = true;
        continue;
      }
      if (++a == argc) refuse(chosen.name + " needs a value");
      assign(chosen, argv[a]);
    }
  }

  /// Ends the program: what was asked for cannot be.
  [[noreturn]] void refuse(const std::string& problem) const {
    std::fprintf(stderr, "%s: %s (--help lists the options)\n", program_.c_str(), problem.c_str());
    std::exit(2);
  }

 private:
  struct option {
    std::string name;
    target value;
    std::string help;
    index_t lowest;
    word_list choices;
  };

  const option& find(std::string_view name) const {
    for (const option& o : options_)
      if (o.name == name) return o;
    refuse("no such option: " + std::string(name));
  }

  static word_list split(std::string_view list) {
    word_list items;
    while (true) {
      const std::size_t comma = list.find(',');
      items.emplace_back(list.substr(0, comma));
      if (comma == std::string_view::npos) return items;
      list.remove_prefix(comma + 1);
    }
  }

  index_t number(const option& o, std::string_view text) const {
    index_t n = 0;
    const char* const end = text.data() + text.size();
    auto [stop, error] = std::from_chars(text.data(), end, n);
    if (error == std::errc{} && stop != end && *stop == 'K') ++stop, n *= 1024;
    if (error != std::errc{} || stop != end || n < o.lowest)
      refuse(o.name + ": not a whole number from " + std::to_string(o.lowest) +
             " on: " + std::string(text));
    return n;
  }

  const std::string& word(const option& o, const std::string& text) const {
    bool known = o.choices.empty();
    for (const std::string& choice : o.choices) known |= choice == text;
    if (!known) refuse(o.name + ": " + text + " is none of " + joined(o.choices));
    return text;
  }

  void assign(const option& o, const std::string& text) const {
    if (index_t* const* n = std::get_if<index_t*>(&o.value)) {
      **n = number(o, text);
    } else if (std::string* const* s = std::get_if<std::string*>(&o.value)) {
      **s = word(o, text);
    } else if (number_list* const* numbers = std::get_if<number_list*>(&o.value)) {
      (*numbers)->clear();
      for (const std::string& item : split(text)) (*numbers)->push_back(number(o, item));
    } else if (word_list* const* words = std::get_if<word_list*>(&o.value)) {
      (*words)->clear();
      for (const std::string& item : split(text)) (*words)->push_back(word(o, item));
    }
  }

  static std::string joined(const word_list& words) {
    std::string text;
    for (const std::string& w : words) text += (text.empty() ? "" : ",") + w;
    return text;
  }
  static std::string text_of(bool) { return {}; }
  static std::string text_of(index_t n) { return std::to_string(n); }
  static std::string text_of(const std::string& s) { return s; }
  static std::string text_of(const word_list& words) { return joined(words); }
  static std::string text_of(const number_list& numbers) {
    word_list words;
    for (const index_t n : numbers) words.push_back(std::to_string(n));
    return joined(words);
  }

  [[noreturn]] void print_help() const {
    std::printf("%s: %s\n\n", program_.c_str(), purpose_.c_str());
    for (const option& o : options_) {
      std::string text = o.help;
      if (!o.choices.empty()) text += ": " + joined(o.choices);
      const std::string now =
          std::visit([](const auto* value) { return text_of(*value); }, o.value);
      if (!now.empty()) text += " [" + now + "]";
      std::printf("  %-14s %s\n", o.name.c_str(), text.c_str());
    }
    std::exit(0);
  }

  std::string program_, purpose_;
  std::vector<option> options_;
};

}  // namespace bench
