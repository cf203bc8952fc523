// Trains the router of one layer to keep the mass of full attention, from that layer's hidden
// states, queries and keys alone: no gradient passes through the model.
#pragma once

#include <array>
#include <optional>
#include <span>

#include <focus/parallel.hpp>

#include "adam.hpp"
#include "layers.hpp"
#include "model.hpp"
#include "routed_tokens.hpp"
#include "router_file.hpp"

namespace language_model {

/// A token router on its way. Its potentials are no parameters: they are those that the balanced
/// assignment of each step's text finds, averaged over the last steps, since inference, which is
/// causal, has to do with fixed ones.
struct trained_token_router {
  token_router router;                       // as inference would use it after the last step
  token_router first_moment, second_moment;  // Adam's, of the same shapes; no potentials
  row_vector potential_sum;                  // the moving average, before its bias is taken off

  explicit trained_token_router(token_router initial);

  /// One step by the gradient of the parameters, from a text that `potentials` balance.
  void take_step(token_router& gradient, const row_vector& potentials, const adam_step& adam);
};

/// What is trained of a token router: projection, bias, centroids.
[[nodiscard]] std::array<std::span<float>, 3> parameters_of(token_router& router);

struct trained_layer {
  trained_token_router query;
  std::optional<trained_token_router> key;  // none: keys are routed as queries are

  [[nodiscard]] const token_router& for_keys() const { return key ? key->router : query.router; }
};

/// Takes the steps of any number of layers, one after another, in the same scratch memory.
class router_trainer {
 public:
  /// `pool` is referred to.
  router_trainer(const training_objective& objective, thread_pool& pool)
      : objective_(objective), pool_(pool) {}

  /// One step of one layer: hidden states -> scores -> balanced assignment -> loss over the given
  /// query rows (none: all), and back to the parameters. Returns the loss before the step, the mean
  /// of -log of the mass that the soft assignment keeps.
  double step(const attention_call& call, std::span<const index_t> rows, const adam_step& adam,
              trained_layer& layer);

 private:
  training_objective objective_;
  thread_pool& pool_;
  focus::workspace workspace_;
  routed_tokens query_, key_;
  matrix dquery_, dkey_;
};

}  // namespace language_model
