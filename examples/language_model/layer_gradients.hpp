// The gradients of the operations of layers.hpp with regard to their inputs; the weights are
// frozen and have none.
#pragma once

#include <span>

#include "layers.hpp"

namespace language_model {

/// dx += the gradient of rms_norm's x, from that of its result.
void add_rms_norm_backward(const matrix& x, const row_vector& weight, float epsilon,
                           const matrix& dnormalised, matrix& dx, thread_pool& pool);

/// dx = dy weight: the gradient of linear's x. dx is resized.
void linear_backward(const matrix& dy, const matrix& weight, matrix& dx, thread_pool& pool);

/// dx += dy weight.
void add_linear_backward(const matrix& dy, const matrix& weight, matrix& dx, thread_pool& pool);

/// gate and up, as swiglu is given them, become their own gradients.
void swiglu_backward(const matrix& dresult, matrix& gate, matrix& up, thread_pool& pool);

/// Returns what cross_entropy returns, and sets dx, of x's shape, to the gradient of that sum. The
/// logits of 128 rows exist at a time for each thread.
double cross_entropy_and_gradient(const Eigen::Ref<const matrix>& x, const matrix& weight,
                                  std::span<const std::int32_t> targets, Eigen::Ref<matrix> dx,
                                  thread_pool& pool);

}  // namespace language_model
