// Gates the attention of a model by its routers, and takes the gradients back to their parameters.
#pragma once

#include <optional>
#include <vector>

#include <focus/options.hpp>
#include <focus/parallel.hpp>
#include <focus/tensor_view.hpp>

#include "model_gradient.hpp"
#include "router_file.hpp"

namespace language_model {

/// How a text's tokens are assigned to groups while routers are trained: all at once, and balanced.
struct assignment_options {
  focus::similarity metric = focus::similarity::cosine;
  focus::sinkhorn_options sinkhorn = {.temperature = 0.1f, .iterations = 20};
};

/// The tokens of one text, as queries or as keys of one layer, on their way from hidden states to
/// groups and back.
class routed_tokens {
 public:
  /// hidden: [tokens, d_model].
  void assign(focus::matrix_view<const float> hidden, const token_router& by,
              const assignment_options& options, focus::workspace& workspace, thread_pool& pool);

  /// From the assignment's gradient to those of the parameters, and to dhidden [tokens, d_model],
  /// which is overwritten, or {}. The arguments of assign are the same again.
  void backward(focus::matrix_view<const float> hidden, const token_router& by,
                const matrix& dassignment, focus::matrix_view<float> dhidden,
                const assignment_options& options, focus::workspace& workspace, thread_pool& pool);

  [[nodiscard]] const matrix& assignment() const noexcept { return assignment_; }  // [tokens, K]
  /// The column potentials that balance the assignment, [K].
  [[nodiscard]] const row_vector& potentials() const noexcept { return potentials_; }
  /// Of projection, bias and centroids, in a router's form without potentials.
  [[nodiscard]] token_router& gradient() noexcept { return gradient_; }

 private:
  matrix scores_, assignment_, dscores_;
  row_vector potentials_;
  token_router gradient_;
};

class router_gating : public layer_gating {
 public:
  /// The routers of one layer. Keys without one are routed as queries are.
  struct layer_routers {
    const token_router* query;
    const token_router* key;
  };

  /// The routers and the pool are referred to.
  router_gating(std::vector<layer_routers> routers, const assignment_options& options,
                thread_pool& pool);

  gate_assignments assign(const attention_call& call) override;
  void backward(index_t layer, const matrix& hidden, const matrix& dquery, const matrix& dkey,
                matrix& dhidden) override;

  /// Of the last text: its assignments and the gradients. `keys` only where they have a router.
  [[nodiscard]] routed_tokens& queries(index_t layer) { return queries_[at(layer)]; }
  [[nodiscard]] routed_tokens& keys(index_t layer) { return keys_[at(layer)]; }

 private:
  static std::size_t at(index_t layer) { return static_cast<std::size_t>(layer); }

  std::vector<layer_routers> routers_;
  assignment_options options_;
  thread_pool& pool_;
  focus::workspace workspace_;
  std::vector<routed_tokens> queries_, keys_;
  matrix dboth_, dhidden_;
};

}  // namespace language_model
