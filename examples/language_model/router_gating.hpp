// Gates the attention of a model by its routers, and takes the gradients back to their parameters.
#pragma once

#include <utility>
#include <vector>

#include <focus/options.hpp>
#include <focus/parallel.hpp>
#include <focus/tensor_view.hpp>

#include "model_gradient.hpp"
#include "routed_tokens.hpp"
#include "router_file.hpp"

namespace language_model {

class router_gating : public layer_gating {
 public:
  /// The routers of one layer. Keys without one are routed as queries are.
  struct layer_routers {
    const token_router* query;
    const token_router* key;
  };

  /// The routers and the pool are referred to.
  router_gating(std::vector<layer_routers> routers, const training_objective& objective,
                thread_pool& pool);

  /// Called with what each layer's attention is given, before it is gated.
  void on_assign(attention_function observe) { observe_ = std::move(observe); }

  gate_assignments assign(const attention_call& call) override;
  void backward(index_t layer, const matrix& hidden, const matrix& dquery, const matrix& dkey,
                matrix& dhidden) override;

  /// Of the last text: its assignments and the gradients. `keys` only where they have a router.
  [[nodiscard]] routed_tokens& queries(index_t layer) { return queries_[at(layer)]; }
  [[nodiscard]] routed_tokens& keys(index_t layer) { return keys_[at(layer)]; }

 private:
  static std::size_t at(index_t layer) { return static_cast<std::size_t>(layer); }

  std::vector<layer_routers> routers_;
  training_objective objective_;
  thread_pool& pool_;
  focus::workspace workspace_;
  std::vector<routed_tokens> queries_, keys_;
  attention_function observe_;
  matrix dboth_, dhidden_;
};

}  // namespace language_model
