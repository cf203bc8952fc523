// Attention over caches, a cache for each layer: what generation uses in the place of
// attention_runner.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <focus/options.hpp>
#include <focus/parallel.hpp>

#include "attention_method.hpp"
#include "model.hpp"

namespace language_model {

/// What the caches keep K and V in.
enum class cache_type { f32, bf16, f16, int8 };

/// "f32", "bf16", "f16", "int8".
cache_type parse_cache_type(const std::string& name);

/// One method as the attention of a forward pass whose calls bring the next tokens of one sequence.
class cached_attention {
 public:
  /// `method` and `pool` are referred to.
  cached_attention(const attention_method& method, const model_config& config, cache_type type,
                   thread_pool& pool);
  ~cached_attention();

  /// Appends the call's tokens to the layer's cache; they then see what is in it.
  void operator()(const attention_call& call);

  /// Tokens in the caches.
  [[nodiscard]] index_t size() const;
  /// Forgets all tokens but the first `size`.
  void truncate(index_t size);

  /// Bytes that the caches hold.
  [[nodiscard]] double memory_bytes() const;
  /// Bytes of K and V that the last token had to read, over all layers.
  [[nodiscard]] double bytes_of_last_token() const;
  /// Pairs computed, as a share of all causal pairs, if the tokens came without truncation.
  [[nodiscard]] double pairs() const;
  /// Time spent so far, routing included.
  [[nodiscard]] double seconds() const noexcept { return seconds_; }

 private:
  class layer_cache;
  template <class T>
  class typed_cache;

  const attention_method& method_;
  thread_pool& pool_;
  focus::workspace workspace_;
  token_masks masks_;
  std::vector<std::unique_ptr<layer_cache>> layers_;
  double seconds_ = 0;
};

}  // namespace language_model
