#include "router_gating.hpp"

#include <span>
#include <utility>

#include <focus/centroids.hpp>
#include <focus/centroids_backward.hpp>
#include <focus/eigen.hpp>
#include <focus/sinkhorn.hpp>
#include <focus/sinkhorn_backward.hpp>

namespace language_model {

namespace {

std::span<float> elements(row_vector& v) {
  return {v.data(), static_cast<std::size_t>(v.size())};
}

}  // namespace

void routed_tokens::assign(focus::matrix_view<const float> hidden, const token_router& by,
                           const assignment_options& options, focus::workspace& workspace,
                           thread_pool& pool) {
  auto exec = focus::with_workspace(pool, workspace);
  scores_.resize(hidden.extent(0), by.centroids.rows());
  assignment_.resizeLike(scores_);
  potentials_.resize(by.centroids.rows());
  focus::centroid_scores(hidden, by.params(options.metric), scores_, exec);
  focus::sinkhorn(scores_, assignment_, elements(potentials_), options.sinkhorn, exec);
}

void routed_tokens::backward(focus::matrix_view<const float> hidden, const token_router& by,
                             const matrix& dassignment, focus::matrix_view<float> dhidden,
                             const assignment_options& options, focus::workspace& workspace,
                             thread_pool& pool) {
  auto exec = focus::with_workspace(pool, workspace);
  dscores_.resizeLike(scores_);
  gradient_.projection.resizeLike(by.projection);
  gradient_.bias.resize(by.bias.size());
  gradient_.centroids.resizeLike(by.centroids);
  focus::sinkhorn_backward(scores_, assignment_, elements(potentials_), dassignment, dscores_,
                           options.sinkhorn, exec);
  focus::centroid_scores_backward(hidden, by.params(options.metric), dscores_, dhidden,
                                  gradient_.projection, elements(gradient_.bias),
                                  gradient_.centroids, exec);
}

router_gating::router_gating(std::vector<layer_routers> routers, const assignment_options& options,
                             thread_pool& pool)
    : routers_(std::move(routers)),
      options_(options),
      pool_(pool),
      queries_(routers_.size()),
      keys_(routers_.size()) {}

gate_assignments router_gating::assign(const attention_call& call) {
  const layer_routers& by = routers_[at(call.layer)];
  queries(call.layer).assign(call.hidden, *by.query, options_, workspace_, pool_);
  const matrix& query = queries(call.layer).assignment();
  if (by.key == nullptr) return {&query, &query};
  keys(call.layer).assign(call.hidden, *by.key, options_, workspace_, pool_);
  return {&query, &keys(call.layer).assignment()};
}

void router_gating::backward(index_t layer, const matrix& hidden, const matrix& dquery,
                             const matrix& dkey, matrix& dhidden) {
  const layer_routers& by = routers_[at(layer)];
  const focus::matrix_view<const float> states(hidden.data(), {hidden.rows(), hidden.cols()});
  dhidden_.resizeLike(hidden);
  const auto add = [&](routed_tokens& tokens, const token_router& router, const matrix& gradient) {
    tokens.backward(states, router, gradient, {dhidden_.data(), {dhidden_.rows(), dhidden_.cols()}},
                    options_, workspace_, pool_);
    dhidden += dhidden_;
  };
  if (by.key == nullptr) {
    dboth_ = dquery + dkey;
    add(queries(layer), *by.query, dboth_);
  } else {
    add(queries(layer), *by.query, dquery);
    add(keys(layer), *by.key, dkey);
  }
}

}  // namespace language_model
