// A sequence that grows: tokens go in, the next one's logits come out.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <span>

#include "cached_attention.hpp"
#include "model.hpp"
#include "thread_pool.hpp"

namespace language_model {

/// One sequence on its way through a model, in blocks of tokens.
class growing_sequence {
 public:
  /// `model`, `method` and `pool` are referred to.
  growing_sequence(const language_model::model& model, const attention_method& method,
                   cache_type type, thread_pool& pool);

  /// Takes the next tokens, at most `block` at a time. Called after each block: progress(tokens
  /// taken so far of these).
  using progress_function = std::function<void(index_t done)>;
  void extend(std::span<const token_id> tokens, index_t block,
              const progress_function& progress = {});

  /// The logits of the token that comes next, [1, vocabulary].
  const matrix& logits();
  /// The sum over the tokens of one whole sequence, but for the first, of their negative
  /// log-likelihood (natural logarithm): a sequence that is still empty takes them by blocks.
  double negative_log_likelihood(std::span<const token_id> tokens, index_t block);

  [[nodiscard]] const cached_attention& caches() const noexcept { return attention_; }

 private:
  void extend_block(std::span<const token_id> tokens);

  const language_model::model& model_;
  forward_pass pass_;
  cached_attention attention_;
  matrix stream_, logits_;
};

/// How the next token is chosen.
struct sampling {
  float temperature = 0;  // 0: the most likely one
  float top_p = 1;        // of the most likely ones, as many as have this share together
};

/// logits: [1, vocabulary]. Of equally likely tokens the lowest number comes first.
token_id choose_token(const matrix& logits, const sampling& how, std::mt19937_64& random);

}  // namespace language_model
