// Routers, one a layer: what puts each token into its groups. Stored as safetensors.
//
// Tensors, of type F32, F16 or BF16, for each layer N from 0 on:
//   layers.N.projection       [d_model, d_group]  W_g
//   layers.N.bias             [d_group]           added after the projection; optional
//   layers.N.centroids        [groups, d_group]   C
//   layers.N.log_group_scale  [groups]            the column potentials
// and, optionally, layers.N.key_projection: then keys are routed by a projection of their own, with
// key_bias (optional), and key_centroids and key_log_group_scale where given, else those above. A
// tensor of another name is refused.
// Metadata, as strings: similarity ("dot" or "cosine") and temperature are needed; anything else is
// information.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <focus/centroids.hpp>
#include <focus/options.hpp>

#include "layers.hpp"
#include "model.hpp"

namespace language_model {

/// Scores tokens against the groups of one layer.
struct token_router {
  matrix projection;           // [d_model, d_group]
  row_vector bias;             // [d_group], or empty
  matrix centroids;            // [groups, d_group]
  row_vector log_group_scale;  // [groups]

  /// As the library takes it; the result views this object.
  [[nodiscard]] focus::centroid_params<float> params(focus::similarity metric) const;
  [[nodiscard]] std::span<const float> potentials() const {
    return {log_group_scale.data(), static_cast<std::size_t>(log_group_scale.size())};
  }
};

struct layer_router {
  token_router query;
  std::optional<token_router> key;  // none: keys are routed as queries are

  [[nodiscard]] const token_router& for_keys() const { return key ? *key : query; }
};

/// The routers of a whole model.
struct router {
  focus::similarity metric = focus::similarity::dot;
  float temperature = 0.1f;
  std::vector<layer_router> layers;
  std::map<std::string, std::string> information;  // further metadata

  [[nodiscard]] index_t groups() const { return layers.front().query.centroids.rows(); }
  [[nodiscard]] index_t d_model() const { return layers.front().query.projection.rows(); }
};

/// Throws file_error when the file is damaged, or is not made for the model; then both shapes are
/// named.
router load_router(const std::string& path, const model_config& config);

/// The shortest text that reads back as the same number.
std::string number_text(float x);

/// How weights are stored. Half precision rounds them to 11 bits; potentials, which are few, stay
/// in F32, and so does a tensor with an element that F16 cannot hold.
enum class router_precision { f32, f16 };
/// Throws file_error.
void save_router(const router& router, const std::string& path,
                 router_precision precision = router_precision::f32);

}  // namespace language_model
