#include "routing_meter.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include <focus/eigen.hpp>
#include <focus/retained_mass.hpp>
#include <focus/route.hpp>

#include "attention_method.hpp"

namespace language_model {

namespace {

/// A row for each token: 1 at its group.
void one_hot(std::span<const focus::group_mask> masks, index_t groups, matrix& result) {
  result.setZero(static_cast<index_t>(masks.size()), groups);
  for (std::size_t t = 0; t < masks.size(); ++t)
    result(static_cast<index_t>(t), std::countr_zero(masks[t])) = 1;
}

/// The largest over the mean.
double imbalance(const std::vector<double>& sizes) {
  double sum = 0, largest = 0;
  for (const double size : sizes) sum += size, largest = std::max(largest, size);
  return sum > 0 ? largest * static_cast<double>(sizes.size()) / sum : 0;
}

}  // namespace

routing_meter::routing_meter(const training_objective& objective, index_t layers, thread_pool& pool)
    : objective_(objective),
      pool_(pool),
      query_sizes_(static_cast<std::size_t>(layers)),
      key_sizes_(static_cast<std::size_t>(layers)) {}

void routing_meter::observe(const attention_call& call, const trained_layer& layer,
                            const std::vector<index_t>* rows) {
  const auto l = static_cast<std::size_t>(call.layer);
  const bool separate = layer.key.has_value();
  route(call, layer.query.router, query_masks_, query_sizes_[l]);
  if (separate) {
    route(call, layer.key->router, key_masks_, key_sizes_[l]);
    plan_.rebuild(query_masks_, key_masks_, objective_.pattern);
  } else {
    plan_.rebuild(query_masks_, objective_.pattern);
  }
  pairs_ += static_cast<double>(plan_.allowed_pairs());
  causal_pairs_ += windowed_pairs(call.hidden.extent(0), focus::full_causal);
  if (rows != nullptr) measure_mass(call, *rows, layer.query.router.centroids.rows(), separate);
}

void routing_meter::route(const attention_call& call, const token_router& router,
                          std::vector<focus::group_mask>& masks, counts& sizes) {
  masks.resize(static_cast<std::size_t>(call.hidden.extent(0)));
  focus::route(call.hidden, router.params(objective_.metric), router.potentials(), 1, masks,
               objective_.sinkhorn, focus::with_workspace(pool_, workspace_));
  sizes.resize(static_cast<std::size_t>(router.centroids.rows()));
  for (const focus::group_mask mask : masks)
    sizes[static_cast<std::size_t>(std::countr_zero(mask))] += 1;
}

void routing_meter::measure_mass(const attention_call& call, const std::vector<index_t>& rows,
                                 index_t groups, bool separate) {
  one_hot(query_masks_, groups, query_groups_);
  if (separate) one_hot(key_masks_, groups, key_groups_);
  measured_layers_ += 1;
  hard_loss_ += focus::retained_mass_loss(
      call.q, call.k, query_groups_, separate ? key_groups_ : query_groups_, {}, {}, rows,
      objective_.pattern, {}, focus::with_workspace(pool_, workspace_));
}

training_report routing_meter::report() {
  const auto layers = static_cast<double>(query_sizes_.size());
  training_report result;
  result.loss = loss_ / static_cast<double>(std::max<index_t>(steps_, 1));
  result.hard_loss = hard_loss_ / std::max(measured_layers_, 1.0);
  result.pairs = causal_pairs_ > 0 ? pairs_ / causal_pairs_ : 0;
  for (std::size_t l = 0; l < query_sizes_.size(); ++l) {
    const double worst = std::max(imbalance(query_sizes_[l]), imbalance(key_sizes_[l]));
    result.mean_imbalance += worst / layers;
    if (worst <= result.worst_imbalance) continue;
    result.worst_imbalance = worst;
    result.worst_layer = static_cast<index_t>(l);
  }
  for (auto* sizes : {&query_sizes_, &key_sizes_})
    for (counts& of_layer : *sizes) of_layer.clear();
  loss_ = hard_loss_ = measured_layers_ = pairs_ = causal_pairs_ = 0;
  steps_ = 0;
  return result;
}

}  // namespace language_model
