#include "model_gradient.hpp"

#include <focus/eigen.hpp>
#include <focus/soft_gate.hpp>
#include <focus/soft_gate_backward.hpp>

#include "layer_gradients.hpp"

namespace language_model {

namespace {

constexpr focus::gate_options weight_gate{.kind = focus::gate_kind::weight};

}  // namespace

model_gradient::model_gradient(const model& model, const focus::pattern_options& pattern,
                               thread_pool& pool)
    : model_(model),
      pattern_(pattern),
      pool_(pool),
      forward_(model, pool),
      rotary_(model.config().rope_dimensions, model.config().rope_base),
      kept_(static_cast<std::size_t>(model.config().layers)) {}

double model_gradient::loss_and_gradients(std::span<const token_id> tokens, layer_gating& gating) {
  if (tokens.size() < 2) return 0;
  forward(tokens, gating);
  const double loss = head_backward(tokens);
  for (index_t l = model_.config().layers; l-- > 0;) {
    const kept_layer& kept = kept_[static_cast<std::size_t>(l)];
    feed_forward_backward(model_.layer(l), kept);
    attention_backward(l, kept, gating);
  }
  return loss;
}

void model_gradient::forward(std::span<const token_id> tokens, layer_gating& gating) {
  forward_.embed(tokens, stream_);
  for (index_t l = 0; l < model_.config().layers; ++l) {
    kept_layer& kept = kept_[static_cast<std::size_t>(l)];
    kept.input = stream_;
    forward_.layer(l, stream_, [&](const attention_call& call) {
      kept.lse.resize(call.q.extent(0), call.q.extent(1));
      kept.assignments = gating.assign(call);
      focus::soft_gate_attention(call.q, call.k, call.v, *kept.assignments.query,
                                 *kept.assignments.key, weight_gate, call.out, pattern_, {},
                                 kept.lse, focus::with_workspace(pool_, workspace_));
      // The heads of a token lie side by side.
      kept.attended = Eigen::Map<const matrix>(call.out.data(), call.out.extent(1),
                                               call.out.extent(0) * call.out.extent(2));
    });
  }
}

/// The loss, and its gradient with regard to what the last layer leaves in the stream.
double model_gradient::head_backward(std::span<const token_id> tokens) {
  const float epsilon = model_.config().rms_epsilon;
  const index_t predictions = stream_.rows() - 1;
  rms_norm(stream_, model_.output_norm(), epsilon, normalised_, pool_);
  dnormalised_.resizeLike(normalised_);
  const double sum =
      cross_entropy_and_gradient(normalised_.topRows(predictions), model_.output(),
                                 tokens.subspan(1), dnormalised_.topRows(predictions), pool_);
  // Nothing is predicted from the last token.
  dnormalised_.bottomRows(1).setZero();
  dnormalised_ *= 1.0f / static_cast<float>(predictions);
  dstream_.setZero(stream_.rows(), stream_.cols());
  add_rms_norm_backward(stream_, model_.output_norm(), epsilon, dnormalised_, dstream_, pool_);
  return sum / static_cast<double>(predictions);
}

/// dstream_ from after the feed-forward part to before it.
void model_gradient::feed_forward_backward(const layer_weights& weights, const kept_layer& kept) {
  const float epsilon = model_.config().rms_epsilon;
  stream_ = kept.input;
  add_linear(kept.attended, weights.attention_output, stream_, pool_);
  rms_norm(stream_, weights.feed_forward_norm, epsilon, normalised_, pool_);
  linear(normalised_, weights.gate, gate_, pool_);
  linear(normalised_, weights.up, up_, pool_);

  linear_backward(dstream_, weights.down, dgated_, pool_);
  swiglu_backward(dgated_, gate_, up_, pool_);
  linear_backward(gate_, weights.gate, dnormalised_, pool_);
  add_linear_backward(up_, weights.up, dnormalised_, pool_);
  add_rms_norm_backward(stream_, weights.feed_forward_norm, epsilon, dnormalised_, dstream_, pool_);
}

/// dstream_ from after the attention to before it.
void model_gradient::attention_backward(index_t l, const kept_layer& kept, layer_gating& gating) {
  const layer_weights& weights = model_.layer(l);
  const index_t head_dim = model_.config().head_dim;
  const float epsilon = model_.config().rms_epsilon;
  rms_norm(kept.input, weights.attention_norm, epsilon, normalised_, pool_);
  linear(normalised_, weights.query, query_, pool_);
  linear(normalised_, weights.key, key_, pool_);
  linear(normalised_, weights.value, value_, pool_);
  rotary_.apply(query_, head_dim, pool_);
  rotary_.apply(key_, head_dim, pool_);

  linear_backward(dstream_, weights.attention_output, dattended_, pool_);
  dquery_.resizeLike(query_);
  dkey_.resizeLike(key_);
  dvalue_.resizeLike(value_);
  dquery_assignment_.resizeLike(*kept.assignments.query);
  dkey_assignment_.resizeLike(*kept.assignments.key);
  focus::soft_gate_attention_backward(
      by_head(query_, head_dim), by_head(key_, head_dim), by_head(value_, head_dim),
      *kept.assignments.query, *kept.assignments.key, weight_gate, by_head(kept.attended, head_dim),
      kept.lse, by_head(dattended_, head_dim), {}, by_head(dquery_, head_dim),
      by_head(dkey_, head_dim), by_head(dvalue_, head_dim), dquery_assignment_, dkey_assignment_,
      pattern_, {}, focus::with_workspace(pool_, workspace_));
  rotary_.apply_backward(dquery_, head_dim, pool_);
  rotary_.apply_backward(dkey_, head_dim, pool_);

  linear_backward(dquery_, weights.query, dnormalised_, pool_);
  add_linear_backward(dkey_, weights.key, dnormalised_, pool_);
  add_linear_backward(dvalue_, weights.value, dnormalised_, pool_);
  gating.backward(l, normalised_, dquery_assignment_, dkey_assignment_, dnormalised_);
  add_rms_norm_backward(kept.input, weights.attention_norm, epsilon, dnormalised_, dstream_, pool_);
}

}  // namespace language_model
