// The operations of a LLaMA-style transformer around its attention. Matrices are row-major, one row
// a token.
#pragma once

#include <span>
#include <vector>

#include <Eigen/Core>

#include <focus/tensor_view.hpp>

#include "thread_pool.hpp"

namespace language_model {

using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using row_vector = Eigen::Matrix<float, 1, Eigen::Dynamic>;

/// The elements of a matrix or a vector, one after the other.
template <class Derived>
std::span<float> elements(Eigen::PlainObjectBase<Derived>& m) {
  return {m.data(), static_cast<std::size_t>(m.size())};
}

/// The heads of a matrix [tokens, heads * head_dim], as a view [heads, tokens, head_dim].
inline focus::tensor_view<float, 3> by_head(matrix& x, index_t head_dim) {
  return focus::by_head(x.data(), {x.rows(), x.cols() / head_dim, head_dim});
}
inline focus::tensor_view<const float, 3> by_head(const matrix& x, index_t head_dim) {
  return focus::by_head(x.data(), {x.rows(), x.cols() / head_dim, head_dim});
}

/// normalised[t] = x[t] / sqrt(mean(x[t]^2) + epsilon) * weight.
void rms_norm(const matrix& x, const row_vector& weight, float epsilon, matrix& normalised,
              thread_pool& pool);

/// y = x weight^T, with weight [outputs, inputs] as model files hold it. y is resized.
void linear(const matrix& x, const matrix& weight, matrix& y, thread_pool& pool);

/// y += x weight^T.
void add_linear(const matrix& x, const matrix& weight, matrix& y, thread_pool& pool);

/// gate = silu(gate) * up, element by element, with silu(x) = x / (1 + exp(-x)).
void swiglu(matrix& gate, const matrix& up, thread_pool& pool);

/// Rotary position embedding with interleaved pairs: within each head, elements (2i, 2i + 1), i <
/// dimensions / 2, are rotated by the angle position * base^(-2i / dimensions); elements from
/// `dimensions` on stay as they are.
class rotary_embedding {
 public:
  rotary_embedding(index_t dimensions, double base) : dimensions_(dimensions), base_(base) {}

  /// Rotates the rows of x, [tokens, heads * head_dim]; row t stands at position first + t.
  void apply(matrix& x, index_t head_dim, thread_pool& pool, index_t first = 0);
  /// The gradient on its way back, in place: the same by the negative angle.
  void apply_backward(matrix& x, index_t head_dim, thread_pool& pool);

 private:
  void rotate(matrix& x, index_t head_dim, float direction, thread_pool& pool, index_t position);
  void prepare(index_t positions);

  index_t dimensions_;
  double base_;
  matrix cosines_, sines_;  // [positions, dimensions / 2]
};

/// Sum over the rows t of -log softmax(x[t] weight^T)[targets[t]], with weight [vocabulary,
/// d_model]; the logits exist for some rows and some of the vocabulary at a time only. x has as
/// many rows as there are targets.
double cross_entropy(const Eigen::Ref<const matrix>& x, const matrix& weight,
                     std::span<const std::int32_t> targets, thread_pool& pool);

}  // namespace language_model
