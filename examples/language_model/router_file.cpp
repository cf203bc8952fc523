#include "router_file.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <set>

#include "safetensors.hpp"

namespace language_model {

namespace {

constexpr const char* format_name = "focus-router";
constexpr const char* similarity_names[] = {"dot", "cosine"};

std::string layer_prefix(std::size_t l) {
  return "layers." + std::to_string(l) + ".";
}

std::string shape_text(index_t layers, index_t d_model, index_t groups) {
  return std::to_string(layers) + " layers, d_model " + std::to_string(d_model) + ", " +
         std::to_string(groups) + " groups";
}

/// Reads tensors by name, with shapes that must agree with each other, and remembers which.
class router_loader {
 public:
  explicit router_loader(const safetensors_file& file) : file_(file) {}

  [[nodiscard]] bool has(const std::string& name) const { return file_.tensors().contains(name); }

  /// One token router; what it does not name of its own is taken from `shared`.
  token_router load(const std::string& prefix, const token_router* shared) {
    token_router result;
    result.projection = load_matrix(prefix + "projection");
    const index_t d_group = result.projection.cols();
    if (has(prefix + "bias")) result.bias = load_vector(prefix + "bias", d_group);
    result.centroids = shared != nullptr && !has(prefix + "centroids")
                           ? shared->centroids
                           : load_matrix(prefix + "centroids");
    if (result.centroids.cols() != d_group)
      refuse(prefix + "centroids have " + std::to_string(result.centroids.cols()) +
             " columns, the projection has " + std::to_string(d_group));
    result.log_group_scale = shared != nullptr && !has(prefix + "log_group_scale")
                                 ? shared->log_group_scale
                                 : load_vector(prefix + "log_group_scale", result.centroids.rows());
    if (result.log_group_scale.size() != result.centroids.rows())
      refuse(prefix + "log_group_scale has length " +
             std::to_string(result.log_group_scale.size()) + ", there are " +
             std::to_string(result.centroids.rows()) + " centroids");
    return result;
  }

  [[nodiscard]] const std::string& metadata(const std::string& key) const {
    const auto found = file_.metadata().find(key);
    if (found == file_.metadata().end()) refuse("its metadata has no '" + key + "'");
    return found->second;
  }

  /// A tensor that nothing has taken would be of no effect, which nobody means who puts it there.
  void expect_all_taken(std::size_t layers) const {
    for (const auto& [name, tensor] : file_.tensors())
      if (!taken_.contains(name))
        refuse("tensor " + in_quotes(name) + " is no part of one of " + std::to_string(layers) +
               " layers");
  }

  [[noreturn]] void refuse(const std::string& problem) const {
    throw file_error(file_.path(), "not a router: " + problem);
  }

 private:
  const std::vector<std::int64_t>& shape(const std::string& name, std::size_t rank) const {
    const auto found = file_.tensors().find(name);
    if (found == file_.tensors().end()) refuse("tensor '" + name + "' is missing");
    const auto& extents = found->second.shape;
    if (extents.size() != rank)
      refuse("tensor '" + name + "' has " + std::to_string(extents.size()) +
             " dimensions, expected " + std::to_string(rank));
    for (const std::int64_t extent : extents)
      if (extent == 0) refuse("tensor '" + name + "' is empty");
    return extents;
  }

  matrix load_matrix(const std::string& name) {
    const auto& extents = shape(name, 2);
    const std::vector<float> elements = finite(name);
    return Eigen::Map<const matrix>(elements.data(), extents[0], extents[1]);
  }

  row_vector load_vector(const std::string& name, index_t length) {
    if (shape(name, 1)[0] != length)
      refuse("tensor '" + name + "' has length " + std::to_string(shape(name, 1)[0]) +
             ", expected " + std::to_string(length));
    const std::vector<float> elements = finite(name);
    return Eigen::Map<const row_vector>(elements.data(), length);
  }

  std::vector<float> finite(const std::string& name) {
    taken_.insert(name);
    std::vector<float> elements = file_.floats(name);
    for (const float x : elements)
      if (!std::isfinite(x)) refuse("tensor '" + name + "' is not finite");
    return elements;
  }

  const safetensors_file& file_;
  std::set<std::string> taken_;
};

void add_weights(safetensors_writer& out, const std::string& name, std::vector<std::int64_t> shape,
                 std::span<const float> elements, router_precision precision) {
  constexpr float largest_half = 65504;
  const bool fit = std::all_of(elements.begin(), elements.end(),
                               [](float x) { return std::abs(x) <= largest_half; });
  if (precision == router_precision::f32 || !fit) {
    out.add(name, std::move(shape), elements);
    return;
  }
  std::vector<focus::float16> halves;
  for (const float x : elements)
    halves.push_back(focus::scalar_traits<focus::float16>::from_accumulator(x));
  out.add(name, std::move(shape), std::span<const focus::float16>(halves));
}

void add_token_router(safetensors_writer& out, const std::string& prefix,
                      const token_router& router, router_precision precision) {
  const auto add = [&](const char* name, std::vector<std::int64_t> shape, const auto& m,
                       router_precision as) {
    add_weights(out, prefix + name, std::move(shape),
                std::span(m.data(), static_cast<std::size_t>(m.size())), as);
  };
  const matrix &projection = router.projection, &centroids = router.centroids;
  add("projection", {projection.rows(), projection.cols()}, projection, precision);
  if (router.bias.size() > 0) add("bias", {router.bias.size()}, router.bias, precision);
  add("centroids", {centroids.rows(), centroids.cols()}, centroids, precision);
  add("log_group_scale", {router.log_group_scale.size()}, router.log_group_scale,
      router_precision::f32);
}

}  // namespace

std::string number_text(float x) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, x).ptr;
  return {text, end};
}

focus::centroid_params<float> token_router::params(focus::similarity metric) const {
  return {.projection = {projection.data(), {projection.rows(), projection.cols()}},
          .centroids = {centroids.data(), {centroids.rows(), centroids.cols()}},
          .bias = {bias.data(), static_cast<std::size_t>(bias.size())},
          .metric = metric};
}

router load_router(const std::string& path, const model_config& config) {
  const safetensors_file file(path);
  router_loader loader(file);
  router result;
  result.information = file.metadata();

  const std::string& metric = loader.metadata("similarity");
  if (metric == similarity_names[0])
    result.metric = focus::similarity::dot;
  else if (metric == similarity_names[1])
    result.metric = focus::similarity::cosine;
  else
    loader.refuse("its similarity is " + in_quotes(metric) + " (supported: dot, cosine)");
  const std::string& temperature = loader.metadata("temperature");
  const auto parsed = std::from_chars(temperature.data(), temperature.data() + temperature.size(),
                                      result.temperature);
  if (parsed.ec != std::errc{} || parsed.ptr != temperature.data() + temperature.size() ||
      !(result.temperature > 0) || !std::isfinite(result.temperature))
    loader.refuse("its temperature is " + in_quotes(temperature) + ", not a number above 0");

  for (std::size_t l = 0; loader.has(layer_prefix(l) + "projection"); ++l) {
    layer_router layer{.query = loader.load(layer_prefix(l), nullptr), .key = std::nullopt};
    if (loader.has(layer_prefix(l) + "key_projection"))
      layer.key = loader.load(layer_prefix(l) + "key_", &layer.query);
    else
      for (const char* part : {"key_bias", "key_centroids", "key_log_group_scale"})
        if (loader.has(layer_prefix(l) + part))
          loader.refuse("tensor '" + layer_prefix(l) + part + "' is there without '" +
                        layer_prefix(l) + "key_projection'");
    result.layers.push_back(std::move(layer));
  }
  if (result.layers.empty()) loader.refuse("tensor 'layers.0.projection' is missing");
  loader.expect_all_taken(result.layers.size());

  if (result.groups() > focus::max_groups)
    loader.refuse("it has " + std::to_string(result.groups()) + " groups (supported: up to " +
                  std::to_string(focus::max_groups) + ")");
  const auto layers = static_cast<index_t>(result.layers.size());
  if (layers != config.layers || result.d_model() != config.d_model)
    throw file_error(path, "a router for another model: it is for " +
                               shape_text(layers, result.d_model(), result.groups()) +
                               "; the model has " + std::to_string(config.layers) +
                               " layers, d_model " + std::to_string(config.d_model));
  for (std::size_t l = 0; l < result.layers.size(); ++l)
    for (const auto& side :
         {std::cref(result.layers[l].query), std::cref(result.layers[l].for_keys())})
      if (side.get().projection.rows() != result.d_model() ||
          side.get().centroids.rows() != result.groups())
        loader.refuse(
            "its layers differ: layer " + std::to_string(l) + " is for " +
            shape_text(layers, side.get().projection.rows(), side.get().centroids.rows()) +
            ", layer 0 for " + shape_text(layers, result.d_model(), result.groups()));
  return result;
}

void save_router(const router& router, const std::string& path, router_precision precision) {
  safetensors_writer out;
  for (const auto& [key, value] : router.information) out.metadata(key, value);
  out.metadata("format", format_name);
  out.metadata("similarity", similarity_names[router.metric == focus::similarity::cosine]);
  out.metadata("temperature", number_text(router.temperature));
  out.metadata("groups", std::to_string(router.groups()));
  out.metadata("layers", std::to_string(router.layers.size()));
  for (std::size_t l = 0; l < router.layers.size(); ++l) {
    add_token_router(out, layer_prefix(l), router.layers[l].query, precision);
    if (router.layers[l].key)
      add_token_router(out, layer_prefix(l) + "key_", *router.layers[l].key, precision);
  }
  out.write(path);
}

}  // namespace language_model
