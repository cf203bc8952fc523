// How well inference would do with routers that are still in training.
#pragma once

#include <vector>

#include <focus/parallel.hpp>
#include <focus/routing_plan.hpp>

#include "router_trainer.hpp"

namespace language_model {

/// Means over the steps since the last report.
struct training_report {
  double loss = 0;       // of the objective
  double hard_loss = 0;  // of the steps measured in full: -log of the mass kept by top-1 routing
  double pairs = 0;      // computed by top-1 routing, as a share of all causal pairs
  /// The largest group's tokens over those of an even share, queries and keys taken apart: 1 at
  /// best. Mean over the layers, and of the worst of them.
  double mean_imbalance = 0, worst_imbalance = 0;
  index_t worst_layer = 0;
};

/// Routes each step's text as inference does: token by token with fixed potentials, by top-1. Keeps
/// account of it for the routers of all layers of one number of groups.
class routing_meter {
 public:
  /// `pool` is referred to.
  routing_meter(const training_objective& objective, index_t layers, thread_pool& pool);

  /// Of one layer, before its step. Where `rows` is given, the mass that is kept of those query
  /// rows is measured too.
  void observe(const attention_call& call, const trained_layer& layer,
               const std::vector<index_t>* rows);
  /// To be called after the last layer of each step, with the step's loss.
  void end_step(double loss) {
    loss_ += loss;
    ++steps_;
  }

  /// Of the steps since the last call.
  [[nodiscard]] training_report report();

 private:
  /// Tokens in each group.
  using counts = std::vector<double>;

  void route(const attention_call& call, const token_router& router,
             std::vector<focus::group_mask>& masks, counts& sizes);
  void measure_mass(const attention_call& call, const std::vector<index_t>& rows, index_t groups,
                    bool separate);

  training_objective objective_;
  thread_pool& pool_;
  focus::workspace workspace_;
  focus::routing_plan plan_;
  std::vector<focus::group_mask> query_masks_, key_masks_;
  matrix query_groups_, key_groups_;  // one-hot

  std::vector<counts> query_sizes_, key_sizes_;  // of each layer
  double loss_ = 0, hard_loss_ = 0, measured_layers_ = 0, pairs_ = 0, causal_pairs_ = 0;
  index_t steps_ = 0;
};

}  // namespace language_model
