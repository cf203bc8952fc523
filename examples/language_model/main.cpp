// language_model: reads text with a pretrained language model, whose attention is full or Focus.
//
// Exit codes: 0, 1 (a file is missing or damaged, ...: one line on standard error), 2 (wrong
// usage).

#include <cstdio>
#include <exception>

#include "commands.hpp"

int main(int argc, char** argv) {
  using namespace language_model;
  try {
    const command_line command = parse_command_line(argc, argv);
    if (command.perplexity) run_perplexity(*command.perplexity);
    if (command.calibrate) run_calibrate(*command.calibrate);
    if (command.train) run_train(*command.train);
    if (command.groups) run_groups(*command.groups);
    if (command.tokens) run_tokens(*command.tokens);
    return 0;
  } catch (const usage_message& message) {
    std::fprintf(message.exit_code == 0 ? stdout : stderr, "%s\n", message.text.c_str());
    return message.exit_code;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "language_model: %s\n", error.what());
    return 1;
  }
}
