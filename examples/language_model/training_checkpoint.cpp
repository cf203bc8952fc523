#include "training_checkpoint.hpp"

#include <algorithm>
#include <charconv>
#include <functional>
#include <utility>

#include "safetensors.hpp"

namespace language_model {

namespace {

constexpr const char* step_key = "step";
constexpr const char* setting_prefix = "setting: ";

/// Calls visit(name, rows, columns, elements) for all that a token router's training changes.
template <class Trained, class Visit>
void visit_trained(const std::string& prefix, Trained& trained, Visit&& visit) {
  const auto array = [&](const std::string& name, auto& m) {
    visit(prefix + name, m.rows(), m.cols(),
          std::span(m.data(), static_cast<std::size_t>(m.size())));
  };
  const auto parameters = [&](const std::string& name, auto& router) {
    array(name + "projection", router.projection);
    array(name + "bias", router.bias);
    array(name + "centroids", router.centroids);
  };
  parameters("", trained.router);
  array("log_group_scale", trained.router.log_group_scale);
  parameters("first_moment.", trained.first_moment);
  parameters("second_moment.", trained.second_moment);
  array("potential_sum", trained.potential_sum);
}

/// The same for a whole state.
template <class State, class Visit>
void visit_state(State& state, Visit&& visit) {
  for (std::size_t r = 0; r < state.runs.size(); ++r)
    for (std::size_t l = 0; l < state.runs[r].size(); ++l) {
      auto& layer = state.runs[r][l];
      const std::string prefix = "runs." + std::to_string(r) + ".layers." + std::to_string(l) + ".";
      visit_trained(prefix, layer.query, visit);
      if (layer.key) visit_trained(prefix + "key_", *layer.key, visit);
    }
}

std::string shape_text(std::int64_t rows, std::int64_t columns) {
  return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
}

const std::string& metadata(const safetensors_file& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end())
    throw file_error(file.path(), "not a checkpoint: its metadata has no " + in_quotes(key));
  return found->second;
}

index_t read_step(const safetensors_file& file) {
  const std::string& text = metadata(file, step_key);
  index_t step = -1;
  const auto end = std::from_chars(text.data(), text.data() + text.size(), step);
  if (end.ec != std::errc{} || end.ptr != text.data() + text.size() || step < 0)
    throw file_error(file.path(), "not a checkpoint: its step is " + in_quotes(text));
  return step;
}

}  // namespace

void save_checkpoint(const training_state& state,
                     const std::map<std::string, std::string>& settings, const std::string& path) {
  safetensors_writer out;
  out.metadata(step_key, std::to_string(state.step));
  for (const auto& [name, value] : settings) out.metadata(setting_prefix + name, value);
  visit_state(state, [&](const std::string& name, index_t rows, index_t columns,
                         std::span<const float> elements) {
    out.add(name, {rows, columns}, elements);
  });
  out.write(path);
}

void load_checkpoint(training_state& state, const std::map<std::string, std::string>& settings,
                     const std::string& path) {
  const safetensors_file file(path);
  training_state loaded = state;
  std::size_t taken = 0;
  loaded.step = read_step(file);
  for (const auto& [name, value] : settings)
    if (const std::string& of_file = metadata(file, setting_prefix + name); of_file != value)
      throw file_error(path, "a checkpoint of another run, with " + name + " " +
                                 in_quotes(of_file) + "; this run has " + in_quotes(value));
  visit_state(loaded, [&](const std::string& name, index_t rows, index_t columns,
                          std::span<float> elements) {
    const std::vector<float> found = file.floats(name);
    const auto& shape = file.tensors().at(name).shape;
    if (shape != std::vector<std::int64_t>{rows, columns})
      throw file_error(path, "not a checkpoint of this run: tensor " + in_quotes(name) +
                                 " has another shape than " + shape_text(rows, columns));
    std::copy(found.begin(), found.end(), elements.begin());
    ++taken;
  });
  if (file.tensors().size() != taken)
    throw file_error(path, "not a checkpoint of this run: it has " +
                               std::to_string(file.tensors().size()) + " tensors, expected " +
                               std::to_string(taken));
  state = std::move(loaded);
}

}  // namespace language_model
