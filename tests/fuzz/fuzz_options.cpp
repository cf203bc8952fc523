// Any command line, one argument a line; and its arguments as lists of top-k and of layers.

#include <cstdint>
#include <string>
#include <vector>

#include "options.hpp"
#include "require.hpp"

namespace {

/// Calls parse(), which may throw a usage_message of code 2, or of 0 for help.
template <class Parse>
void may_be_wrong(Parse&& parse) {
  try {
    parse();
  } catch (const language_model::usage_message& message) {
    require(message.exit_code == 0 || message.exit_code == 2, "the exit code is 0 or 2");
    require(!message.text.empty(), "a message says something");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace language_model;
  std::vector<std::string> arguments = {"language_model"};
  std::string argument;
  for (std::size_t i = 0; i < size; ++i) {
    if (data[i] != '\n' && data[i] != '\0') {
      argument += static_cast<char>(data[i]);
      continue;
    }
    arguments.push_back(argument);
    argument.clear();
  }
  if (!argument.empty()) arguments.push_back(argument);
  std::vector<const char*> pointers;
  for (const std::string& a : arguments) pointers.push_back(a.c_str());
  may_be_wrong([&] { parse_command_line(static_cast<int>(pointers.size()), pointers.data()); });
  for (const std::string& list : arguments) {
    may_be_wrong([&] { parse_top_k(list, 64); });
    may_be_wrong([&] { parse_layers(list, 30); });
  }
  return 0;
}
