// The tokens of one text on their way through one router to groups, and the gradients' way back.
#pragma once

#include <focus/options.hpp>
#include <focus/parallel.hpp>
#include <focus/tensor_view.hpp>

#include "layers.hpp"
#include "router_file.hpp"

namespace language_model {

/// What a router is trained for.
struct training_objective {
  focus::similarity metric = focus::similarity::cosine;
  focus::sinkhorn_options sinkhorn = {.temperature = 0.1f, .iterations = 20};
  focus::pattern_options pattern;
};

/// The tokens of one text, as queries or as keys of one layer, on their way from hidden states to
/// groups and back.
class routed_tokens {
 public:
  /// hidden: [tokens, d_model].
  void assign(focus::matrix_view<const float> hidden, const token_router& by,
              const training_objective& objective, focus::workspace& workspace, thread_pool& pool);

  /// From the assignment's gradient to those of the parameters, and to dhidden [tokens, d_model],
  /// which is overwritten, or {}. The arguments of assign are the same again.
  void backward(focus::matrix_view<const float> hidden, const token_router& by,
                const matrix& dassignment, focus::matrix_view<float> dhidden,
                const training_objective& objective, focus::workspace& workspace,
                thread_pool& pool);

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

}  // namespace language_model
