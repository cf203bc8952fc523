#include "adam.hpp"

#include <cmath>
#include <cstddef>
#include <numbers>

namespace language_model {

namespace {

constexpr double first_decay = 0.9, second_decay = 0.999;
constexpr float tiny = 1e-8f;
/// Of the highest learning rate, what is left at the end of a run.
constexpr double last_share = 0.1;

}  // namespace

void adam_step::update(std::span<float> parameters, std::span<const float> gradient,
                       std::span<float> first_moment, std::span<float> second_moment) const {
  constexpr auto b1 = static_cast<float>(first_decay), b2 = static_cast<float>(second_decay);
  constexpr auto c1 = static_cast<float>(1 - first_decay),
                 c2 = static_cast<float>(1 - second_decay);
  const auto t = static_cast<double>(number);
  const auto first_scale = static_cast<float>(1 / (1 - std::pow(first_decay, t)));
  const auto second_scale = static_cast<float>(1 / (1 - std::pow(second_decay, t)));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const float g = gradient[i];
    first_moment[i] = b1 * first_moment[i] + c1 * g;
    second_moment[i] = b2 * second_moment[i] + c2 * g * g;
    parameters[i] -= learning_rate * first_moment[i] * first_scale /
                     (std::sqrt(second_moment[i] * second_scale) + tiny);
  }
}

float learning_rate_schedule::at(focus::index_t step) const {
  const double warm_steps = static_cast<double>(warm_up) * static_cast<double>(steps);
  const auto now = static_cast<double>(step);
  double share = 0;
  if (now < warm_steps) {
    share = std::fmin((now + 1) / warm_steps, 1.0);
  } else {
    const double done = (now - warm_steps) / std::fmax(static_cast<double>(steps) - warm_steps, 1);
    share = last_share + (1 - last_share) * (1 + std::cos(std::numbers::pi * done)) / 2;
  }
  return static_cast<float>(share * static_cast<double>(highest));
}

}  // namespace language_model
