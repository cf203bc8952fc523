// Causal attention out of another library's matrix products: query blocks times key blocks, each
// S = Q K^T, online softmax, O = O + P V (FlashAttention, arXiv 2205.14135), as one would write it
// around a BLAS.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <focus/kernel/exp2.hpp>
#include <focus/kernel/simd.hpp>
#include <focus/tensor_view.hpp>

namespace bench {

using focus::index_t;

/// A row-major matrix product's operand: rows are `stride` elements apart.
struct block {
  const float* data;
  index_t rows, columns, stride;
};

/// Sizes of the blocks: what suits one library need not suit another, so each gets its best.
struct block_sizes {
  index_t queries, keys;
};

/// The scores of a block become weights in place, row by row; the running maxima, sums and outputs
/// of its rows go along. Vectorised by this library's own layer, so that all peers have the same
/// exponential.
class online_softmax {
 public:
  /// o [rows, value_dim], zeroed here.
  void begin(index_t rows, float* o, index_t value_dim) {
    o_ = o, value_dim_ = value_dim;
    const auto size = static_cast<std::size_t>(rows);
    maxima_.assign(size, -std::numeric_limits<float>::infinity());
    sums_.assign(size, 0.0f);
    std::fill(o, o + rows * value_dim, 0.0f);
  }

  /// One row of scores in units of log2, of which the first `visible` of `size` count.
  void weigh(index_t row, float* scores, index_t visible, index_t size) {
    using vec = focus::detail::vec<float>;
    constexpr index_t lanes = vec::width;
    if (visible == 0) return std::fill(scores, scores + size, 0.0f);
    std::fill(scores + visible, scores + size, -std::numeric_limits<float>::infinity());
    const auto r = static_cast<std::size_t>(row);
    float largest = maxima_[r];
    index_t j = 0;
    if (size >= lanes) {
      vec most = vec::load(scores);
      for (j = lanes; j + lanes <= size; j += lanes) most = maximum(most, vec::load(scores + j));
      largest = (std::max)(largest, reduce_max(most));
    }
    for (; j < size; ++j) largest = (std::max)(largest, scores[j]);

    const vec shift = vec::broadcast(largest);
    vec total = vec::zero();
    for (j = 0; j + lanes <= size; j += lanes) {
      const vec weight = focus::detail::exp2<float>(vec::load(scores + j) - shift);
      weight.store(scores + j);
      total = total + weight;
    }
    float sum = reduce_add(total);
    for (; j < size; ++j) sum += scores[j] = std::exp2(scores[j] - largest);

    const float keep = std::exp2(maxima_[r] - largest);
    sums_[r] = sums_[r] * keep + sum;
    maxima_[r] = largest;
    if (keep != 1.0f) scale(row, keep);
  }

  void finish(index_t rows) {
    for (index_t r = 0; r < rows; ++r) scale(r, 1.0f / sums_[static_cast<std::size_t>(r)]);
  }

 private:
  void scale(index_t row, float factor) {
    float* const o = o_ + row * value_dim_;
    for (index_t c = 0; c < value_dim_; ++c) o[c] *= factor;
  }

  float* o_ = nullptr;
  index_t value_dim_ = 0;
  std::vector<float> maxima_, sums_;
};

/// Products is the library: transposed(alpha, a, b, c): C = alpha A B^T, c [a.rows, b.rows] with
/// rows c_stride apart; add(a, b, c): C = C + A B, c [a.rows, b.columns] dense.
template <class Products>
class blocked_attention {
 public:
  explicit blocked_attention(block_sizes sizes) : sizes_(sizes) {}

  void operator()(const focus::tensor_view<const float, 3>& q,
                  const focus::tensor_view<const float, 3>& k,
                  const focus::tensor_view<const float, 3>& v,
                  const focus::tensor_view<float, 3>& out) {
    scores_.resize(static_cast<std::size_t>(sizes_.queries * sizes_.keys));
    for (index_t h = 0; h < q.extent(0); ++h) attend(q, k, v, out, h);
  }

 private:
  void attend(const focus::tensor_view<const float, 3>& q,
              const focus::tensor_view<const float, 3>& k,
              const focus::tensor_view<const float, 3>& v, const focus::tensor_view<float, 3>& out,
              index_t h) {
    const index_t tokens = q.extent(1), head_dim = q.extent(2), value_dim = v.extent(2);
    const float scale = focus::detail::log2_e<float> / std::sqrt(static_cast<float>(head_dim));
    for (index_t i = 0; i < tokens; i += sizes_.queries) {
      const index_t rows = (std::min)(sizes_.queries, tokens - i);
      const block queries{&q(h, i, 0), rows, head_dim, head_dim};
      float* const o = &out(h, i, 0);
      softmax_.begin(rows, o, value_dim);
      for (index_t j = 0; j < i + rows; j += sizes_.keys) {  // up to the last row's own key
        const index_t keys = (std::min)(sizes_.keys, i + rows - j);
        Products::transposed(scale, queries, {&k(h, j, 0), keys, head_dim, head_dim},
                             scores_.data(), sizes_.keys);
        for (index_t r = 0; r < rows; ++r)
          softmax_.weigh(r, scores_.data() + r * sizes_.keys,
                         std::clamp<index_t>(i + r + 1 - j, 0, keys), keys);
        Products::add({scores_.data(), rows, keys, sizes_.keys},
                      {&v(h, j, 0), keys, value_dim, value_dim}, o);
      }
      softmax_.finish(rows);
    }
  }

  block_sizes sizes_;
  std::vector<float> scores_;
  online_softmax softmax_;
};

}  // namespace bench
