// The state of a training run in a file. Stored as safetensors, all F32: for each number of groups
// R and each layer N, in the order of the run,
//   runs.R.layers.N.[key_]{projection, bias, centroids, log_group_scale}  the router
//   ....[key_]{first, second}_moment.{projection, bias, centroids}        Adam's
//   ....[key_]potential_sum                                               the moving average
// Metadata: step, and the settings of the run.
#pragma once

#include <map>
#include <string>

#include "training.hpp"

namespace language_model {

/// Throws file_error; the name never stands for half a file.
void save_checkpoint(const training_state& state,
                     const std::map<std::string, std::string>& settings, const std::string& path);

/// Replaces the state, whose shapes the file must have, if the run had the same settings. Throws
/// file_error, which names both where they differ; the state is then as it was.
void load_checkpoint(training_state& state, const std::map<std::string, std::string>& settings,
                     const std::string& path);

}  // namespace language_model
