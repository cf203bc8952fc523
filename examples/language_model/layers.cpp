#include "layers.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "loops.hpp"

namespace language_model {

void rms_norm(const matrix& x, const row_vector& weight, float epsilon, matrix& normalised,
              thread_pool& pool) {
  normalised.resize(x.rows(), x.cols());
  for_row_chunks(x.rows(), pool, [&](index_t first, index_t rows) {
    for (index_t t = first; t < first + rows; ++t) {
      const float mean_square = x.row(t).squaredNorm() / static_cast<float>(x.cols());
      normalised.row(t) = x.row(t).cwiseProduct(weight) * (1.0f / std::sqrt(mean_square + epsilon));
    }
  });
}

void linear(const matrix& x, const matrix& weight, matrix& y, thread_pool& pool) {
  y.resize(x.rows(), weight.rows());
  for_product_tiles(x.rows(), weight.rows(), pool,
                    [&](index_t row, index_t rows, index_t output, index_t outputs) {
                      y.block(row, output, rows, outputs).noalias() =
                          x.middleRows(row, rows) * weight.middleRows(output, outputs).transpose();
                    });
}

void add_linear(const matrix& x, const matrix& weight, matrix& y, thread_pool& pool) {
  for_product_tiles(x.rows(), weight.rows(), pool,
                    [&](index_t row, index_t rows, index_t output, index_t outputs) {
                      y.block(row, output, rows, outputs).noalias() +=
                          x.middleRows(row, rows) * weight.middleRows(output, outputs).transpose();
                    });
}

void swiglu(matrix& gate, const matrix& up, thread_pool& pool) {
  for_row_chunks(gate.rows(), pool, [&](index_t first, index_t rows) {
    auto g = gate.middleRows(first, rows).array();
    g = g / (1.0f + (-g).exp()) * up.middleRows(first, rows).array();
  });
}

void rotary_embedding::prepare(index_t positions) {
  if (cosines_.rows() >= positions) return;
  // Generation asks for one position more each time.
  positions = std::max(positions, 2 * cosines_.rows());
  cosines_.resize(positions, dimensions_ / 2);
  sines_.resize(positions, dimensions_ / 2);
  for (index_t i = 0; i < dimensions_ / 2; ++i) {
    const double frequency =
        std::pow(base_, -2.0 * static_cast<double>(i) / static_cast<double>(dimensions_));
    for (index_t t = 0; t < positions; ++t) {
      cosines_(t, i) = static_cast<float>(std::cos(static_cast<double>(t) * frequency));
      sines_(t, i) = static_cast<float>(std::sin(static_cast<double>(t) * frequency));
    }
  }
}

void rotary_embedding::apply(matrix& x, index_t head_dim, thread_pool& pool, index_t first) {
  rotate(x, head_dim, 1, pool, first);
}

void rotary_embedding::apply_backward(matrix& x, index_t head_dim, thread_pool& pool) {
  rotate(x, head_dim, -1, pool, 0);
}

void rotary_embedding::rotate(matrix& x, index_t head_dim, float direction, thread_pool& pool,
                              index_t position) {
  prepare(position + x.rows());
  for_row_chunks(x.rows(), pool, [&](index_t first, index_t rows) {
    for (index_t t = first; t < first + rows; ++t)
      for (index_t head = 0; head < x.cols(); head += head_dim) {
        float* pair = &x(t, head);
        for (index_t i = 0; i < dimensions_ / 2; ++i, pair += 2) {
          const float c = cosines_(position + t, i), s = direction * sines_(position + t, i);
          const float a = pair[0], b = pair[1];
          pair[0] = a * c - b * s;
          pair[1] = a * s + b * c;
        }
      }
  });
}

double cross_entropy(const Eigen::Ref<const matrix>& x, const matrix& weight,
                     std::span<const std::int32_t> targets, thread_pool& pool) {
  constexpr index_t rows_at_once = 128, vocabulary_at_once = 4096;
  const index_t rows = x.rows(), vocabulary = weight.rows();
  std::vector<matrix> logits_of(static_cast<std::size_t>(pool.concurrency()));
  std::vector<double> losses(static_cast<std::size_t>(rows));

  pool.parallel_for(ceil_div(rows, rows_at_once), [&](index_t task, index_t worker) {
    const index_t first = task * rows_at_once, count = std::min(rows_at_once, rows - first);
    matrix& logits = logits_of[static_cast<std::size_t>(worker)];
    // Of the vocabulary so far: the largest logit, the sum of exp(logit - largest), and the
    // target's logit.
    Eigen::VectorXf largest =
        Eigen::VectorXf::Constant(count, -std::numeric_limits<float>::infinity());
    Eigen::VectorXd sum = Eigen::VectorXd::Zero(count);
    Eigen::VectorXd target_logit = Eigen::VectorXd::Zero(count);

    for (index_t v = 0; v < vocabulary; v += vocabulary_at_once) {
      const index_t width = std::min(vocabulary_at_once, vocabulary - v);
      logits.resize(count, width);
      logits.noalias() = x.middleRows(first, count) * weight.middleRows(v, width).transpose();
      for (index_t r = 0; r < count; ++r) {
        const float new_largest = std::max(largest[r], logits.row(r).maxCoeff());
        sum[r] = sum[r] * std::exp(static_cast<double>(largest[r]) - new_largest) +
                 static_cast<double>((logits.row(r).array() - new_largest).exp().sum());
        largest[r] = new_largest;
        const index_t target = targets[static_cast<std::size_t>(first + r)] - v;
        if (target >= 0 && target < width) target_logit[r] = static_cast<double>(logits(r, target));
      }
    }
    for (index_t r = 0; r < count; ++r)
      losses[static_cast<std::size_t>(first + r)] =
          std::log(sum[r]) + static_cast<double>(largest[r]) - target_logit[r];
  });

  double total = 0;
  for (const double loss : losses) total += loss;
  return total;
}

}  // namespace language_model
