// Random numbers that are the same on every platform for a seed; the standard library's
// distributions do not promise that.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include <focus/tensor_view.hpp>

namespace language_model {

/// Uniform in [0, 1).
inline double uniform(std::mt19937_64& random) {
  return static_cast<double>(random() >> 11) * 0x1p-53;
}

/// A whole number in [0, n), n >= 1.
inline focus::index_t uniform_below(focus::index_t n, std::mt19937_64& random) {
  return std::min(static_cast<focus::index_t>(uniform(random) * static_cast<double>(n)), n - 1);
}

/// `count` of the numbers 0 to n - 1, each set of them equally likely, in rising order; all of them
/// where there are no more.
inline std::vector<focus::index_t> sample_rising(focus::index_t count, focus::index_t n,
                                                 std::mt19937_64& random) {
  std::vector<focus::index_t> result;
  for (focus::index_t i = 0, wanted = std::min(count, n); i < n && wanted > 0; ++i)
    if (uniform(random) * static_cast<double>(n - i) < static_cast<double>(wanted)) {
      result.push_back(i);
      --wanted;
    }
  return result;
}

}  // namespace language_model
