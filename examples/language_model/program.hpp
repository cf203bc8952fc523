// The whole program: a command line in, an exit code out.
#pragma once

namespace language_model {

/// Exit codes: 0, 1 (a file is missing or damaged, standard output cannot be written, ...: one line
/// on standard error), 2 (wrong usage).
int run_program(int argc, const char* const* argv);

}  // namespace language_model
