#include "program.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fcntl.h>
#include <stdexcept>
#include <string>
#include <unistd.h>

#include "commands.hpp"

namespace language_model {

namespace {

[[noreturn]] void fail_to_print(int problem) {
  throw std::runtime_error("cannot write to standard output" +
                           (problem == 0 ? "" : std::string(": ") + std::strerror(problem)));
}

/// Before hours of work, and before a file of the program's own takes the place of a closed one.
void require_output() {
  if (::fcntl(STDOUT_FILENO, F_GETFD) < 0) fail_to_print(errno);
}

/// Output that got lost, now or at an earlier flush, is an error like that of any file.
void finish_output() {
  errno = 0;
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) fail_to_print(errno);
}

void run_command(const command_line& command) {
  require_output();
  if (command.perplexity) run_perplexity(*command.perplexity);
  if (command.generate) run_generate(*command.generate);
  if (command.calibrate) run_calibrate(*command.calibrate);
  if (command.train) run_train(*command.train);
  if (command.groups) run_groups(*command.groups);
  if (command.tokens) run_tokens(*command.tokens);
}

}  // namespace

int run_program(int argc, const char* const* argv) {
  try {
    try {
      run_command(parse_command_line(argc, argv));
    } catch (const usage_message& help) {
      if (help.exit_code != 0) throw;
      std::printf("%s\n", help.text.c_str());
    }
    finish_output();
    return 0;
  } catch (const usage_message& message) {
    std::fprintf(stderr, "%s\n", message.text.c_str());
    return message.exit_code;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "language_model: %s\n", error.what());
    return 1;
  }
}

}  // namespace language_model
