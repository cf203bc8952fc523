// Made-up inputs of one attention call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include <focus/centroids.hpp>
#include <focus/options.hpp>
#include <focus/scalar.hpp>
#include <focus/tensor_view.hpp>

namespace bench {

using focus::index_t;

/// Normally distributed numbers, rounded to T.
template <class T = float>
std::vector<T> made_up(index_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<T> values;
  values.reserve(static_cast<std::size_t>(size));
  for (index_t i = 0; i < size; ++i)
    values.push_back(focus::scalar_traits<T>::from_accumulator(normal(random)));
  return values;
}

/// Q, K, V and out as [heads, tokens, head_dim], K and V with kv_heads.
template <class T = float>
class attention_inputs {
 public:
  attention_inputs(index_t heads, index_t kv_heads, index_t tokens, index_t head_dim)
      : q_extents_{heads, tokens, head_dim},
        kv_extents_{kv_heads, tokens, head_dim},
        q_(made_up<T>(heads * tokens * head_dim, 1)),
        k_(made_up<T>(kv_heads * tokens * head_dim, 2)),
        v_(made_up<T>(kv_heads * tokens * head_dim, 3)),
        out_(q_.size()) {}
  attention_inputs(index_t heads, index_t tokens, index_t head_dim)
      : attention_inputs(heads, heads, tokens, head_dim) {}

  focus::tensor_view<const T, 3> q() const { return {q_.data(), q_extents_}; }
  focus::tensor_view<const T, 3> k() const { return {k_.data(), kv_extents_}; }
  focus::tensor_view<const T, 3> v() const { return {v_.data(), kv_extents_}; }
  focus::tensor_view<T, 3> out() { return {out_.data(), q_extents_}; }

 private:
  std::array<index_t, 3> q_extents_, kv_extents_;
  std::vector<T> q_, k_, v_, out_;
};

/// The same with what the gradient of attention reads and writes.
template <class T = float>
class gradient_inputs : public attention_inputs<T> {
 public:
  gradient_inputs(index_t heads, index_t tokens, index_t head_dim)
      : attention_inputs<T>(heads, tokens, head_dim),
        extents_{heads, tokens, head_dim},
        dout_(made_up<T>(heads * tokens * head_dim, 4)),
        dq_(dout_.size()),
        dk_(dout_.size()),
        dv_(dout_.size()),
        lse_(static_cast<std::size_t>(heads * tokens)) {}

  focus::tensor_view<const T, 3> dout() const { return {dout_.data(), extents_}; }
  focus::tensor_view<T, 3> dq() { return {dq_.data(), extents_}; }
  focus::tensor_view<T, 3> dk() { return {dk_.data(), extents_}; }
  focus::tensor_view<T, 3> dv() { return {dv_.data(), extents_}; }
  focus::matrix_view<float> lse() { return {lse_.data(), {extents_[0], extents_[1]}}; }

 private:
  std::array<index_t, 3> extents_;
  std::vector<T> dout_, dq_, dk_, dv_;
  std::vector<float> lse_;
};

/// What the router of one layer reads: hidden states of storage type T and its own weights, in
/// float, for any number of groups; the potentials are zero.
template <class T = float>
class router_inputs {
 public:
  router_inputs(index_t tokens, index_t d_model, index_t d_group)
      : tokens_(tokens),
        d_model_(d_model),
        d_group_(d_group),
        hidden_(made_up<T>(tokens * d_model, 1)),
        projection_(made_up(d_model * d_group, 2)),
        centroids_(made_up(focus::max_groups * d_group, 3)) {}

  focus::matrix_view<const T> hidden() const { return {hidden_.data(), {tokens_, d_model_}}; }
  focus::matrix_view<const float> projection() const {
    return {projection_.data(), {d_model_, d_group_}};
  }
  focus::centroid_params<float> params(index_t groups) const {
    return {.projection = projection(),
            .centroids = {centroids_.data(), {groups, d_group_}},
            .metric = focus::similarity::cosine};
  }
  std::span<const float> potentials(index_t groups) const {
    return std::span(potentials_).first(static_cast<std::size_t>(groups));
  }
  index_t tokens() const { return tokens_; }

 private:
  index_t tokens_, d_model_, d_group_;
  std::vector<T> hidden_;
  std::vector<float> projection_, centroids_;
  std::array<float, focus::max_groups> potentials_{};
};

/// Pairs (i, j) with j <= i.
inline double causal_pairs(index_t tokens) {
  return 0.5 * static_cast<double>(tokens) * static_cast<double>(tokens + 1);
}

/// Floating-point operations of one (query, key) pair in one head: q . k and the weight times v.
inline double flops_per_pair(index_t head_dim) {
  return 4.0 * static_cast<double>(head_dim);
}

}  // namespace bench
