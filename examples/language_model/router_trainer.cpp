#include "router_trainer.hpp"

#include <cmath>
#include <utility>

#include <focus/centroids.hpp>
#include <focus/centroids_backward.hpp>
#include <focus/eigen.hpp>
#include <focus/retained_mass.hpp>
#include <focus/sinkhorn.hpp>
#include <focus/sinkhorn_backward.hpp>

namespace language_model {

namespace {

/// Of the moving average of the potentials: the last 20 steps make up two thirds of it.
constexpr double potential_decay = 0.95;

std::span<float> elements(matrix& m) {
  return {m.data(), static_cast<std::size_t>(m.size())};
}

std::span<float> elements(row_vector& v) {
  return {v.data(), static_cast<std::size_t>(v.size())};
}

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

double router_trainer::step(const attention_call& call, std::span<const index_t> rows,
                            const adam_step& adam, trained_layer& layer) {
  const bool separate = layer.key.has_value();
  assign(call, layer.query.router, query_);
  if (separate) assign(call, layer.key->router, key_);
  const matrix& key_assignment = separate ? key_.assignment : query_.assignment;
  query_.assignment_gradient.resizeLike(query_.assignment);
  key_.assignment_gradient.resizeLike(key_assignment);
  const double loss =
      focus::retained_mass_loss(call.q, call.k, query_.assignment, key_assignment,
                                query_.assignment_gradient, key_.assignment_gradient, rows,
                                objective_.pattern, {}, focus::with_workspace(pool_, workspace_));
  if (separate)
    update(call, adam, key_, *layer.key);
  else
    query_.assignment_gradient += key_.assignment_gradient;
  update(call, adam, query_, layer.query);
  return loss;
}

void router_trainer::assign(const attention_call& call, const token_router& router, side& tokens) {
  const index_t n = call.hidden.extent(0), groups = router.centroids.rows();
  auto exec = focus::with_workspace(pool_, workspace_);
  tokens.scores.resize(n, groups);
  tokens.assignment.resize(n, groups);
  tokens.potentials.resize(groups);
  focus::centroid_scores(call.hidden, router.params(objective_.metric), tokens.scores, exec);
  focus::sinkhorn(tokens.scores, tokens.assignment, elements(tokens.potentials),
                  objective_.sinkhorn, exec);
}

void router_trainer::update(const attention_call& call, const adam_step& adam, side& tokens,
                            trained_token_router& trained) {
  token_router& router = trained.router;
  auto exec = focus::with_workspace(pool_, workspace_);
  score_gradient_.resizeLike(tokens.scores);
  gradient_.projection.resizeLike(router.projection);
  gradient_.bias.resize(router.bias.size());
  gradient_.centroids.resizeLike(router.centroids);
  focus::sinkhorn_backward(tokens.scores, tokens.assignment, elements(tokens.potentials),
                           tokens.assignment_gradient, score_gradient_, objective_.sinkhorn, exec);
  focus::centroid_scores_backward(call.hidden, router.params(objective_.metric), score_gradient_,
                                  {}, gradient_.projection, elements(gradient_.bias),
                                  gradient_.centroids, exec);

  const auto parameters = parameters_of(router), gradients = parameters_of(gradient_),
             first = parameters_of(trained.first_moment),
             second = parameters_of(trained.second_moment);
  for (std::size_t p = 0; p < parameters.size(); ++p)
    adam.update(parameters[p], gradients[p], first[p], second[p]);

  trained.potential_sum = static_cast<float>(potential_decay) * trained.potential_sum +
                          static_cast<float>(1 - potential_decay) * tokens.potentials;
  const double weights = 1 - std::pow(potential_decay, static_cast<double>(adam.number));
  router.log_group_scale = trained.potential_sum * static_cast<float>(1 / weights);
}

}  // namespace language_model
