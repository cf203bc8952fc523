// A LLaMA-architecture language model from a GGUF file, and its forward pass around any attention.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <focus/tensor_view.hpp>

#include "gguf.hpp"
#include "layers.hpp"
#include "thread_pool.hpp"
#include "tokenizer.hpp"

namespace language_model {

/// The sizes and constants of a model, from the file's metadata (llama.*).
struct model_config {
  index_t layers;
  index_t d_model;
  index_t heads;
  index_t kv_heads;  // heads is a multiple of it: grouped-query attention
  index_t head_dim;
  index_t feed_forward;
  index_t vocabulary;
  index_t context;  // the longest sequence the model was trained for
  index_t rope_dimensions;
  double rope_base;
  float rms_epsilon;

  /// Throws file_error for another architecture, or values that this program does not support.
  static model_config read(const gguf_file& file);
};

/// The weights of one layer; matrices are [outputs, inputs].
struct layer_weights {
  row_vector attention_norm, feed_forward_norm;
  matrix query, key, value, attention_output;
  matrix gate, up, down;
};

/// A model in memory, all weights in float.
class model {
 public:
  /// Throws file_error when a tensor is missing, of another shape, or not known to this program.
  explicit model(const gguf_file& file);

  [[nodiscard]] const model_config& config() const noexcept { return config_; }
  [[nodiscard]] const matrix& embedding() const noexcept { return embedding_; }
  [[nodiscard]] const layer_weights& layer(index_t l) const {
    return layers_[static_cast<std::size_t>(l)];
  }
  [[nodiscard]] const row_vector& output_norm() const noexcept { return output_norm_; }
  /// The rows that give the logits: a matrix of their own, or the embedding again ("tied").
  [[nodiscard]] const matrix& output() const noexcept { return output_ ? *output_ : embedding_; }

 private:
  model_config config_;
  matrix embedding_;  // [vocabulary, d_model]
  std::vector<layer_weights> layers_;
  row_vector output_norm_;
  std::optional<matrix> output_;
};

/// What the attention of one layer is given. All are views of the forward pass's buffers, whose
/// storage is [tokens, heads, head_dim].
struct attention_call {
  index_t layer;
  focus::matrix_view<const float>
      hidden;  // [tokens, d_model], after the attention norm: the router's input
  focus::tensor_view<const float, 3> q;     // [heads, tokens, head_dim], rotated
  focus::tensor_view<const float, 3> k, v;  // [kv_heads, tokens, head_dim], k rotated
  focus::tensor_view<float, 3> out;         // [heads, tokens, head_dim]
};
using attention_function = std::function<void(const attention_call&)>;

/// Runs a model over one sequence at a time. Its buffers are kept from one call to the next.
class forward_pass {
 public:
  /// Both are referred to.
  forward_pass(const model& model, thread_pool& pool);

  /// stream [tokens, d_model] = the embeddings of the tokens. Throws std::out_of_range for a token
  /// the model lacks.
  void embed(std::span<const token_id> tokens, matrix& stream) const;

  /// Adds one layer's attention and feed-forward part to the residual stream, whose row t stands at
  /// position first + t.
  void layer(index_t l, matrix& stream, const attention_function& attend, index_t first = 0);

  /// logits [vocabulary] of the token that follows the residual stream's last row.
  void next_token_logits(const matrix& stream, matrix& logits);

  /// Sum over t of the negative log-likelihood (natural logarithm) of tokens[t + 1] after the
  /// residual stream's row t.
  double negative_log_likelihood(const matrix& stream, std::span<const token_id> tokens);

  /// All of the above: the sum of tokens.size() - 1 predictions, each from the tokens before it.
  double negative_log_likelihood(std::span<const token_id> tokens,
                                 const attention_function& attend);

 private:
  const model& model_;
  thread_pool& pool_;
  rotary_embedding rotary_;
  matrix stream_, normalised_, query_, key_, value_, attended_, gate_, up_;
};

}  // namespace language_model
