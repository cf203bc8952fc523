// The trained router of one layer.
#pragma once

#include <span>

#include "focus/config.hpp"
#include "focus/options.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {

/// The trained router of one layer: all that Focus trains. T is any storage type.
template <class T>
struct centroid_params {
  /// W_g [d_model, d_group]
  matrix_view<const T> projection;
  /// C [K, d_group], 1 <= K <= 64
  matrix_view<const T> centroids;
  /// [d_group], added after the projection; empty: none
  std::span<const T> bias = {};
  /// cosine: projected tokens (with their bias) and centroids are scaled to length 1
  similarity metric = similarity::dot;
};

}  // namespace FOCUS_ABI
}  // namespace focus
