#include "router_trainer.hpp"

#include <cmath>
#include <utility>

#include <focus/eigen.hpp>
#include <focus/retained_mass.hpp>

namespace language_model {

namespace {

/// Of the moving average of the potentials: the last 20 steps make up two thirds of it.
constexpr double potential_decay = 0.95;

/// The parameters' shapes, with zeros.
token_router zeros_like(const token_router& router) {
  return {.projection = matrix::Zero(router.projection.rows(), router.projection.cols()),
          .bias = row_vector::Zero(router.bias.size()),
          .centroids = matrix::Zero(router.centroids.rows(), router.centroids.cols()),
          .log_group_scale = {}};
}

}  // namespace

trained_token_router::trained_token_router(token_router initial)
    : router(std::move(initial)),
      first_moment(zeros_like(router)),
      second_moment(first_moment),
      potential_sum(row_vector::Zero(router.log_group_scale.size())) {}

std::array<std::span<float>, 3> parameters_of(token_router& router) {
  return {elements(router.projection), elements(router.bias), elements(router.centroids)};
}

void trained_token_router::take_step(token_router& gradient, const row_vector& potentials,
                                     const adam_step& adam) {
  const auto parameters = parameters_of(router), gradients = parameters_of(gradient),
             first = parameters_of(first_moment), second = parameters_of(second_moment);
  for (std::size_t p = 0; p < parameters.size(); ++p)
    adam.update(parameters[p], gradients[p], first[p], second[p]);

  potential_sum = static_cast<float>(potential_decay) * potential_sum +
                  static_cast<float>(1 - potential_decay) * potentials;
  const double weights = 1 - std::pow(potential_decay, static_cast<double>(adam.number));
  router.log_group_scale = potential_sum * static_cast<float>(1 / weights);
}

double router_trainer::step(const attention_call& call, std::span<const index_t> rows,
                            const adam_step& adam, trained_layer& layer) {
  const bool separate = layer.key.has_value();
  query_.assign(call.hidden, layer.query.router, objective_, workspace_, pool_);
  if (separate) key_.assign(call.hidden, layer.key->router, objective_, workspace_, pool_);
  const matrix& key_assignment = separate ? key_.assignment() : query_.assignment();
  dquery_.resizeLike(query_.assignment());
  dkey_.resizeLike(key_assignment);
  const double loss = focus::retained_mass_loss(call.q, call.k, query_.assignment(), key_assignment,
                                                dquery_, dkey_, rows, objective_.pattern, {},
                                                focus::with_workspace(pool_, workspace_));
  const auto update = [&](routed_tokens& tokens, const matrix& dassignment,
                          trained_token_router& trained) {
    tokens.backward(call.hidden, trained.router, dassignment, {}, objective_, workspace_, pool_);
    trained.take_step(tokens.gradient(), tokens.potentials(), adam);
  };
  if (separate)
    update(key_, dkey_, *layer.key);
  else
    dquery_ += dkey_;
  update(query_, dquery_, layer.query);
  return loss;
}

}  // namespace language_model
