// A LLaMA-style model in double, as straightforward as it can be, around any attention.
#pragma once

#include <cmath>
#include <functional>
#include <span>

#include <Eigen/Core>

#include "model.hpp"

using doubles = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

/// What the attention of one layer is given: [tokens, heads * head_dim], q and k rotated; hidden is
/// what the router sees.
struct reference_call {
  language_model::index_t layer;
  const doubles &hidden, &q, &k, &v;
};
/// Returns the attention's result, of q's shape.
using reference_attention = std::function<doubles(const reference_call&)>;

inline doubles norm(const doubles& x, const language_model::row_vector& weight, double epsilon) {
  doubles y = x;
  for (language_model::index_t t = 0; t < x.rows(); ++t)
    y.row(t) =
        x.row(t) / std::sqrt(x.row(t).squaredNorm() / static_cast<double>(x.cols()) + epsilon);
  return y.array().rowwise() * weight.cast<double>().array();
}

inline doubles apply(const doubles& x, const language_model::matrix& weight) {
  return x * weight.cast<double>().transpose();
}

inline void rotate(doubles& x, const language_model::model_config& c) {
  for (language_model::index_t t = 0; t < x.rows(); ++t)
    for (language_model::index_t head = 0; head < x.cols(); head += c.head_dim)
      for (language_model::index_t i = 0; i < c.rope_dimensions; i += 2) {
        const double angle =
            static_cast<double>(t) *
            std::pow(c.rope_base, -static_cast<double>(i) / static_cast<double>(c.rope_dimensions));
        const double a = x(t, head + i), b = x(t, head + i + 1);
        x(t, head + i) = a * std::cos(angle) - b * std::sin(angle);
        x(t, head + i + 1) = a * std::sin(angle) + b * std::cos(angle);
      }
}

/// The sum of the negative log-likelihoods of tokens 1 to n - 1.
inline double reference_loss(const language_model::model& m,
                             std::span<const language_model::token_id> tokens,
                             const reference_attention& attend) {
  using language_model::index_t;
  const language_model::model_config& c = m.config();
  const auto n = static_cast<index_t>(tokens.size());
  doubles x(n, c.d_model);
  for (index_t t = 0; t < n; ++t)
    x.row(t) = m.embedding().row(tokens[static_cast<std::size_t>(t)]).cast<double>();
  for (index_t l = 0; l < c.layers; ++l) {
    const language_model::layer_weights& w = m.layer(l);
    doubles h = norm(x, w.attention_norm, double{c.rms_epsilon});
    doubles q = apply(h, w.query), k = apply(h, w.key);
    const doubles v = apply(h, w.value);
    rotate(q, c);
    rotate(k, c);
    x += apply(attend({l, h, q, k, v}), w.attention_output);
    h = norm(x, w.feed_forward_norm, double{c.rms_epsilon});
    const doubles gate = apply(h, w.gate);
    const doubles silu = gate.array() / (1 + (-gate.array()).exp());
    x += apply(silu.cwiseProduct(apply(h, w.up)), w.down);
  }
  const doubles logits = apply(norm(x, m.output_norm(), double{c.rms_epsilon}), m.output());
  double loss = 0;
  for (index_t t = 0; t + 1 < n; ++t)
    loss += std::log(logits.row(t).array().exp().sum()) -
            logits(t, tokens[static_cast<std::size_t>(t + 1)]);
  return loss;
}
