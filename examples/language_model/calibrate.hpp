// Finds the routers of a model with no training: from the hidden states of some text alone.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model.hpp"
#include "router_file.hpp"

namespace language_model {

struct calibration_options {
  index_t groups = 8;
  index_t dimensions = 16;  // d_group: principal components kept
  /// Leading tokens of each window that are left out: attention sinks, whose hidden states are
  /// unlike all others.
  index_t sink_tokens = 1;
  focus::similarity metric = focus::similarity::cosine;
  float temperature = 0.1f;
  int restarts = 4;     // runs of k-means, of which the best is kept
  int iterations = 30;  // of k-means
  std::uint64_t seed = 1;
};

/// The router of one layer from a sample of its hidden states [tokens, d_model]: a projection on
/// the principal components, whitened, with the mean taken off by the bias; centroids by k-means
/// whose assignment step is balanced by Sinkhorn iterations; and the potentials of the last
/// assignment. There must be at least as many tokens as groups.
token_router calibrate_layer(const matrix& hidden, const calibration_options& options,
                             thread_pool& pool);

/// The routers of all layers, from windows of tokens of one text or several. `progress` is called
/// before each layer.
router calibrate(const model& model, const std::vector<std::span<const token_id>>& windows,
                 const calibration_options& options, thread_pool& pool,
                 const std::function<void(index_t layer)>& progress);

}  // namespace language_model
