#include "router_gating.hpp"

#include <utility>

namespace language_model {

router_gating::router_gating(std::vector<layer_routers> routers,
                             const training_objective& objective, thread_pool& pool)
    : routers_(std::move(routers)),
      objective_(objective),
      pool_(pool),
      queries_(routers_.size()),
      keys_(routers_.size()) {}

gate_assignments router_gating::assign(const attention_call& call) {
  if (observe_) observe_(call);
  const layer_routers& by = routers_[at(call.layer)];
  queries(call.layer).assign(call.hidden, *by.query, objective_, workspace_, pool_);
  const matrix& query = queries(call.layer).assignment();
  if (by.key == nullptr) return {&query, &query};
  keys(call.layer).assign(call.hidden, *by.key, objective_, workspace_, pool_);
  return {&query, &keys(call.layer).assignment()};
}

void router_gating::backward(index_t layer, const matrix& hidden, const matrix& dquery,
                             const matrix& dkey, matrix& dhidden) {
  const layer_routers& by = routers_[at(layer)];
  const focus::matrix_view<const float> states(hidden.data(), {hidden.rows(), hidden.cols()});
  dhidden_.resizeLike(hidden);
  const auto add = [&](routed_tokens& tokens, const token_router& router, const matrix& gradient) {
    tokens.backward(states, router, gradient, {dhidden_.data(), {dhidden_.rows(), dhidden_.cols()}},
                    objective_, workspace_, pool_);
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
