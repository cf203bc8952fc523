#include "routed_tokens.hpp"

#include <span>

#include <focus/centroids.hpp>
#include <focus/centroids_backward.hpp>
#include <focus/eigen.hpp>
#include <focus/sinkhorn.hpp>
#include <focus/sinkhorn_backward.hpp>

namespace language_model {

void routed_tokens::assign(focus::matrix_view<const float> hidden, const token_router& by,
                           const training_objective& objective, focus::workspace& workspace,
                           thread_pool& pool) {
  auto exec = focus::with_workspace(pool, workspace);
  scores_.resize(hidden.extent(0), by.centroids.rows());
  assignment_.resizeLike(scores_);
  potentials_.resize(by.centroids.rows());
  focus::centroid_scores(hidden, by.params(objective.metric), scores_, exec);
  focus::sinkhorn(scores_, assignment_, elements(potentials_), objective.sinkhorn, exec);
}

void routed_tokens::backward(focus::matrix_view<const float> hidden, const token_router& by,
                             const matrix& dassignment, focus::matrix_view<float> dhidden,
                             const training_objective& objective, focus::workspace& workspace,
                             thread_pool& pool) {
  auto exec = focus::with_workspace(pool, workspace);
  dscores_.resizeLike(scores_);
  gradient_.projection.resizeLike(by.projection);
  gradient_.bias.resize(by.bias.size());
  gradient_.centroids.resizeLike(by.centroids);
  focus::sinkhorn_backward(scores_, assignment_, elements(potentials_), dassignment, dscores_,
                           objective.sinkhorn, exec);
  focus::centroid_scores_backward(hidden, by.params(objective.metric), dscores_, dhidden,
                                  gradient_.projection, elements(gradient_.bias),
                                  gradient_.centroids, exec);
}

}  // namespace language_model
