// Made-up tokens and routers, for the tests of what comes before the attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "focus/centroids.hpp"
#include "focus/options.hpp"
#include "focus/reference/routing.hpp"
#include "focus/tensor_view.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"

namespace oracle {

struct router_case {
  index_t n = 40, d_model = 24, d_group = 16, groups = 8;
  focus::similarity metric = focus::similarity::dot;
  bool with_bias = false;
  layout memory = layout::heads_first;
  double magnitude = 1;  // of the hidden states
  std::uint64_t seed = 1;
};

inline std::string describe(const router_case& c) {
  std::ostringstream text;
  text << "n " << c.n << ", d_model " << c.d_model << ", d_group " << c.d_group << ", K "
       << c.groups << (c.metric == focus::similarity::cosine ? ", cosine" : ", dot")
       << (c.with_bias ? ", bias" : "") << ", layout " << static_cast<int>(c.memory)
       << ", magnitude " << c.magnitude << ", seed " << c.seed;
  return text.str();
}

/// The shapes at which tiles, strips and vectors end, whatever the instruction set.
inline std::vector<router_case> router_cases() {
  std::vector<router_case> all;
  const auto add = [&](router_case c) {
    for (const focus::similarity metric : {focus::similarity::dot, focus::similarity::cosine})
      for (const bool with_bias : {false, true}) {
        c.metric = metric, c.with_bias = with_bias;
        c.seed = all.size() + 1;
        all.push_back(c);
      }
  };
  for (const index_t n : {0, 1, 2, 3, 5, 6, 7, 14, 15, 97, 200}) add({.n = n});
  for (const index_t d_model : {1, 7, 255, 257, 576}) add({.n = 20, .d_model = d_model});
  for (const index_t d_group : {1, 5, 15, 17, 33})
    add({.n = 20, .d_group = d_group, .memory = layout::padded});
  for (const index_t groups : {1, 2, 7, 9, 16, 17, 33, 63, 64})
    add({.n = 20, .groups = groups, .memory = layout::misaligned});
  return all;
}

/// Hidden states of type H and a router of type T.
template <class H, class T>
struct router_problem {
  router_case spec;
  guarded_tensor<H, 2> hidden;
  guarded_tensor<T, 2> projection, centroids;
  std::vector<T> bias;

  explicit router_problem(const router_case& c)
      : spec(c),
        hidden({c.n, c.d_model}, c.memory),
        projection({c.d_model, c.d_group}, c.memory),
        centroids({c.groups, c.d_group}, c.memory) {
    generator random(c.seed);
    hidden.fill([&] { return c.magnitude * random.normal(); });
    const double scale = 1 / std::sqrt(static_cast<double>(c.d_model));
    projection.fill([&] { return scale * random.normal(); });
    centroids.fill([&] { return random.normal(); });
    for (index_t x = 0; c.with_bias && x < c.d_group; ++x)
      bias.push_back(narrowed<T>(random.normal()));
  }

  focus::centroid_params<T> params() const {
    return {projection.view(), centroids.view(), bias, spec.metric};
  }
};

/// focus::reference::centroid_scores in double, on what is stored, [n, K]; and what the rounding of
/// sums as long as these may amount to: the sum of the magnitudes of all terms.
struct true_scores {
  std::vector<double> scores, magnitudes;
};

template <class H, class T>
true_scores score_in_double(const router_problem<H, T>& p) {
  const router_case& c = p.spec;
  const std::vector<double> h = p.hidden.values(), w = p.projection.values(),
                            centroids = p.centroids.values();
  std::vector<double> bias;
  for (const T& x : p.bias) bias.push_back(widened(x));
  true_scores truth;
  truth.scores.assign(static_cast<std::size_t>(c.n * c.groups), not_a_number);
  focus::centroid_params<double> params{{w.data(), {c.d_model, c.d_group}},
                                        {centroids.data(), {c.groups, c.d_group}},
                                        bias,
                                        c.metric};
  focus::reference::centroid_scores(
      focus::matrix_view<const double>(h.data(), {c.n, c.d_model}), params,
      focus::matrix_view<double>(truth.scores.data(), {c.n, c.groups}));

  const auto at = [](const std::vector<double>& x, index_t i) {
    return x[static_cast<std::size_t>(i)];
  };
  for (index_t i = 0; i < c.n; ++i) {
    std::vector<double> z, z_magnitude;
    double z_length = 0;
    for (index_t x = 0; x < c.d_group; ++x) {
      double sum = bias.empty() ? 0 : at(bias, x), magnitude = std::abs(sum);
      for (index_t t = 0; t < c.d_model; ++t) {
        const double term = at(h, i * c.d_model + t) * at(w, t * c.d_group + x);
        sum += term, magnitude += std::abs(term);
      }
      z.push_back(sum), z_magnitude.push_back(magnitude);
      z_length += sum * sum;
    }
    z_length = std::sqrt(z_length);
    for (index_t g = 0; g < c.groups; ++g) {
      double magnitude = 0, c_length = 0, z_error = 0;
      for (index_t x = 0; x < c.d_group; ++x) {
        const double centroid = at(centroids, g * c.d_group + x);
        magnitude += at(z_magnitude, x) * std::abs(centroid);
        z_error += at(z_magnitude, x);
        c_length += centroid * centroid;
      }
      // A relative error of the projected token's length changes its cosines by as much.
      if (c.metric == focus::similarity::cosine)
        magnitude =
            z_length > 0 ? magnitude / (z_length * std::sqrt(c_length)) + z_error / z_length : 0;
      truth.magnitudes.push_back(magnitude);
    }
  }
  return truth;
}

}  // namespace oracle
