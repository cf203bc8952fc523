// Adam (Kingma and Ba, arXiv 1412.6980), and its learning rate over a run.
#pragma once

#include <span>

#include <focus/tensor_view.hpp>

namespace language_model {

/// One update. first_moment and second_moment are Adam's m and v, and begin as zeros.
struct adam_step {
  float learning_rate;
  focus::index_t number;  // from 1 on: takes off the moments' bias towards their zeros

  void update(std::span<float> parameters, std::span<const float> gradient,
              std::span<float> first_moment, std::span<float> second_moment) const;
};

/// Rises in a line over the share `warm_up` of the steps, then falls along half a cosine to a
/// tenth.
struct learning_rate_schedule {
  float highest;
  float warm_up;
  focus::index_t steps;

  /// step: from 0 on.
  [[nodiscard]] float at(focus::index_t step) const;
};

}  // namespace language_model
