// The program's commands. Each prints its result to standard output, and throws when it cannot give
// one.
#pragma once

#include "options.hpp"

namespace language_model {

void run_perplexity(const perplexity_options& options);
void run_generate(const generate_options& options);
void run_calibrate(const calibrate_options& options);
void run_train(const train_options& options);
void run_groups(const groups_options& options);
void run_tokens(const tokens_options& options);

}  // namespace language_model
