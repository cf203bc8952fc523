// The next-token loss of a frozen model whose attention is gated by routers, and its gradient with
// regard to their assignments: the backward pass of all that lies between.
#pragma once

#include <span>
#include <vector>

#include <focus/options.hpp>
#include <focus/parallel.hpp>

#include "layers.hpp"
#include "model.hpp"
#include "thread_pool.hpp"

namespace language_model {

/// How much each token belongs to each group, as a query and as a key: [tokens, K]. Both may be one
/// matrix.
struct gate_assignments {
  const matrix* query;
  const matrix* key;
};

/// What gates the attention of each layer.
class layer_gating {
 public:
  virtual ~layer_gating() = default;

  /// In the forward pass, first layer first: the assignments, from call.hidden. They stay as they
  /// are until their gradients come back; call.out is not yet written.
  virtual gate_assignments assign(const attention_call& call) = 0;

  /// In the backward pass, last layer first: takes the assignments' gradients, two even where the
  /// assignments are one, and adds what they give to the gradient of the hidden states
  /// [tokens, d_model], through which a layer's routers move those of the layers before it.
  virtual void backward(index_t layer, const matrix& hidden, const matrix& dquery,
                        const matrix& dkey, matrix& dhidden) = 0;
};

/// Runs a model forwards and backwards, with the `weight` gate in every layer: the expected hard
/// mask. Between the passes a layer keeps its input, what its attention gave, and that one's lse:
/// 4 tokens (d_model + heads (head_dim + 1)) bytes. All else is computed again in the backward
/// pass, which costs about 0.6 forward passes and needs room for one layer at a time.
class model_gradient {
 public:
  /// `pattern`: the pairs that are visible whatever their routing. Model and pool are referred to.
  model_gradient(const model& model, const focus::pattern_options& pattern, thread_pool& pool);

  /// The mean over tokens 1 to n - 1 of -log of the probability that the model gives the token
  /// after those before it (natural logarithm). The gradients of this mean reach `gating`, of every
  /// layer. Of fewer than two tokens the loss is 0, and there are no gradients. Throws
  /// std::out_of_range for a token the model lacks.
  double loss_and_gradients(std::span<const token_id> tokens, layer_gating& gating);

 private:
  /// What a layer leaves for the backward pass.
  struct kept_layer {
    matrix input, attended, lse;
    gate_assignments assignments;
  };

  void forward(std::span<const token_id> tokens, layer_gating& gating);
  double head_backward(std::span<const token_id> tokens);
  void feed_forward_backward(const layer_weights& weights, const kept_layer& kept);
  void attention_backward(index_t l, const kept_layer& kept, layer_gating& gating);

  const model& model_;
  focus::pattern_options pattern_;
  thread_pool& pool_;
  focus::workspace workspace_;
  forward_pass forward_;
  rotary_embedding rotary_;
  std::vector<kept_layer> kept_;
  matrix stream_, normalised_, query_, key_, value_, gate_, up_;
  matrix dstream_, dnormalised_, dquery_, dkey_, dvalue_, dattended_, dgated_;
  matrix dquery_assignment_, dkey_assignment_;
};

}  // namespace language_model
