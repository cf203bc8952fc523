#include "layer_gradients.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "loops.hpp"

namespace language_model {

// With r = 1 / sqrt(mean(x^2) + epsilon) and u = weight dy:  dx = r u - r^3 mean(x u) x.
void add_rms_norm_backward(const matrix& x, const row_vector& weight, float epsilon,
                           const matrix& dnormalised, matrix& dx, thread_pool& pool) {
  const auto columns = static_cast<float>(x.cols());
  for_row_chunks(x.rows(), pool, [&](index_t first, index_t rows) {
    for (index_t t = first; t < first + rows; ++t) {
      const float r = 1.0f / std::sqrt(x.row(t).squaredNorm() / columns + epsilon);
      const auto u = dnormalised.row(t).cwiseProduct(weight);
      const float along = x.row(t).cwiseProduct(u).sum() / columns * r * r * r;
      dx.row(t) += u * r - x.row(t) * along;
    }
  });
}

void linear_backward(const matrix& dy, const matrix& weight, matrix& dx, thread_pool& pool) {
  dx.resize(dy.rows(), weight.cols());
  for_product_tiles(dy.rows(), weight.cols(), pool,
                    [&](index_t row, index_t rows, index_t input, index_t inputs) {
                      dx.block(row, input, rows, inputs).noalias() =
                          dy.middleRows(row, rows) * weight.middleCols(input, inputs);
                    });
}

void add_linear_backward(const matrix& dy, const matrix& weight, matrix& dx, thread_pool& pool) {
  for_product_tiles(dy.rows(), weight.cols(), pool,
                    [&](index_t row, index_t rows, index_t input, index_t inputs) {
                      dx.block(row, input, rows, inputs).noalias() +=
                          dy.middleRows(row, rows) * weight.middleCols(input, inputs);
                    });
}

// With s = sigmoid(gate), silu = gate s and its derivative s + silu (1 - s).
void swiglu_backward(const matrix& dresult, matrix& gate, matrix& up, thread_pool& pool) {
  for_row_chunks(gate.rows(), pool, [&](index_t first, index_t rows) {
    for (index_t t = first; t < first + rows; ++t) {
      auto g = gate.row(t).array(), u = up.row(t).array();
      const auto d = dresult.row(t).array();
      const Eigen::Array<float, 1, Eigen::Dynamic> s = 1.0f / (1.0f + (-g).exp());
      const Eigen::Array<float, 1, Eigen::Dynamic> silu = g * s;
      g = d * u * (s + silu * (1.0f - s));
      u = d * silu;
    }
  });
}

double cross_entropy_and_gradient(const Eigen::Ref<const matrix>& x, const matrix& weight,
                                  std::span<const std::int32_t> targets, Eigen::Ref<matrix> dx,
                                  thread_pool& pool) {
  constexpr index_t rows_at_once = 128;
  std::vector<matrix> logits_of(static_cast<std::size_t>(pool.concurrency()));
  std::vector<double> losses(targets.size());

  pool.parallel_for(ceil_div(x.rows(), rows_at_once), [&](index_t task, index_t worker) {
    const index_t first = task * rows_at_once, count = std::min(rows_at_once, x.rows() - first);
    matrix& logits = logits_of[static_cast<std::size_t>(worker)];
    logits.resize(count, weight.rows());
    logits.noalias() = x.middleRows(first, count) * weight.transpose();
    // They become their own gradient: softmax, less 1 for the target.
    for (index_t r = 0; r < count; ++r) {
      const auto at = static_cast<std::size_t>(first + r);
      auto row = logits.row(r).array();
      const float largest = row.maxCoeff();
      const double target_logit = static_cast<double>(row[targets[at]]);
      row = (row - largest).exp();
      const double sum = row.cast<double>().sum();
      losses[at] = std::log(sum) + static_cast<double>(largest) - target_logit;
      row *= static_cast<float>(1 / sum);
      row[targets[at]] -= 1.0f;
    }
    dx.middleRows(first, count).noalias() = logits * weight;
  });

  double total = 0;
  for (const double loss : losses) total += loss;
  return total;
}

}  // namespace language_model
