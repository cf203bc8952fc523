// The ways in which a layer's attention is computed here: full, window and sinks alone, or Focus.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <focus/options.hpp>
#include <focus/parallel.hpp>
#include <focus/routing_plan.hpp>

#include "model.hpp"
#include "router_file.hpp"
#include "token_masks.hpp"

namespace language_model {

struct attention_method {
  enum class kind { full, windowed, focus };
  kind what = kind::full;
  focus::pattern_options pattern = focus::full_causal;
  /// Layers that use the method; the others use full attention. One entry a layer.
  std::vector<bool> layers;
  const language_model::router* router = nullptr;  // for focus, as is k
  top_k k = {};
};

/// Runs one method as the attention of a forward pass, and keeps account of it.
class attention_runner {
 public:
  /// Called with each layer's masks, [tokens], when the method is focus.
  using masks_function = std::function<void(index_t layer, std::span<const focus::group_mask> query,
                                            std::span<const focus::group_mask> key)>;

  /// `method` and `pool` are referred to.
  attention_runner(const attention_method& method, thread_pool& pool, masks_function on_masks = {})
      : method_(method), pool_(pool), on_masks_(std::move(on_masks)) {}

  void operator()(const attention_call& call);

  /// Time spent so far, routing and planning included.
  [[nodiscard]] double seconds() const noexcept { return seconds_; }
  /// Pairs computed so far, as a share of all causal pairs.
  [[nodiscard]] double pairs() const noexcept { return pairs_ / causal_pairs_; }

 private:
  void run_focus(const attention_call& call);

  const attention_method& method_;
  thread_pool& pool_;
  masks_function on_masks_;
  focus::workspace workspace_;
  focus::routing_plan plan_;
  token_masks masks_;
  double seconds_ = 0, pairs_ = 0, causal_pairs_ = 0;
};

/// The number of pairs that window and sinks make visible among n tokens.
double windowed_pairs(index_t n, const focus::pattern_options& pattern);

}  // namespace language_model
