#include "model.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <utility>

#include "llama_metadata.hpp"

namespace language_model {

namespace {

std::string shape_text(std::span<const std::uint64_t> shape) {
  std::string text = "[";
  for (auto extent = shape.rbegin(); extent != shape.rend(); ++extent)
    text += (extent == shape.rbegin() ? "" : ", ") + std::to_string(*extent);
  return text + "]";
}

/// Takes the tensors of a file by name and shape, and remembers which.
class tensor_loader {
 public:
  explicit tensor_loader(const gguf_file& file) : file_(file) {}

  [[nodiscard]] bool has(const std::string& name) const {
    return file_.find_tensor(name) != nullptr;
  }

  matrix load(const std::string& name, index_t rows, index_t columns) {
    matrix result;
    const tensor_info& tensor =
        find(name, {static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows)});
    result.resize(rows, columns);
    fill(result, tensor);
    return result;
  }

  row_vector load(const std::string& name, index_t length) {
    row_vector result;
    const tensor_info& tensor = find(name, {static_cast<std::uint64_t>(length)});
    result.resize(length);
    fill(result, tensor);
    return result;
  }

  /// A tensor that nothing has taken is a part of the model that this program does not know.
  void expect_all_taken(index_t layers) const {
    for (const auto& [name, tensor] : file_.tensors())
      if (!taken_.contains(name))
        throw file_error(file_.path(), "tensor " + in_quotes(name) +
                                           " is no part of a plain LLaMA model of " +
                                           std::to_string(layers) +
                                           " layers (supported: no biases, no experts, no scaled "
                                           "rotary embedding)");
  }

 private:
  template <class Derived>
  void fill(Eigen::PlainObjectBase<Derived>& result, const tensor_info& tensor) const {
    dequantize(tensor.type, tensor.data, elements(result));
    if (!result.allFinite())
      throw file_error(file_.path(), "tensor " + in_quotes(tensor.name) + " is not finite");
  }

  const tensor_info& find(const std::string& name, const std::vector<std::uint64_t>& shape) {
    const tensor_info* tensor = file_.find_tensor(name);
    if (tensor == nullptr)
      throw file_error(file_.path(), "tensor " + in_quotes(name) + " is missing");
    if (tensor->shape != shape)
      throw file_error(file_.path(), "tensor " + in_quotes(name) + " has shape " +
                                         shape_text(tensor->shape) + ", expected " +
                                         shape_text(shape));
    taken_.insert(tensor->name);
    return *tensor;
  }

  const gguf_file& file_;
  std::set<std::string_view> taken_;
};

}  // namespace

model_config model_config::read(const gguf_file& file) {
  const std::string_view architecture = file.string("general.architecture");
  if (architecture != "llama")
    throw file_error(file.path(),
                     "its architecture is " + in_quotes(architecture) + " (supported: llama)");
  if (const auto type = file.find_string("general.type"); type && *type != "model")
    throw file_error(file.path(),
                     "it is no model but of type " + in_quotes(*type) + " (supported: model)");
  constexpr std::uint64_t quantization_version = 2;  // of the blocks' layouts, since before GGUF
  if (const auto version = file.find_integer("general.quantization_version");
      version && *version != quantization_version)
    throw file_error(file.path(), "metadata 'general.quantization_version' is " +
                                      std::to_string(*version) +
                                      " (supported: " + std::to_string(quantization_version) + ")");

  // Far beyond any model, and small enough that products of two do not overflow.
  constexpr std::uint64_t largest = std::uint64_t{1} << 30;
  const auto checked = [&](std::string_view key, std::uint64_t n) {
    if (n < 1 || n > largest)
      throw file_error(file.path(), "metadata " + in_quotes(key) + " is " + std::to_string(n) +
                                        " (supported: 1 to 2^30)");
    return static_cast<index_t>(n);
  };
  const auto size = [&](std::string_view key) {
    return checked(key, file.integer(key));
  };
  const auto size_or = [&](std::string_view key, index_t otherwise) {
    return checked(key, file.find_integer(key).value_or(static_cast<std::uint64_t>(otherwise)));
  };
  const auto within = [&](std::string_view key, double x, double lowest, double highest) {
    if (!(x >= lowest && x <= highest))
      throw file_error(file.path(), "metadata " + in_quotes(key) + " is " + text_of(x) +
                                        " (supported: " + text_of(lowest) + " to " +
                                        text_of(highest) + ")");
    return x;
  };

  model_config config{};
  config.layers = size("llama.block_count");
  config.d_model = size("llama.embedding_length");
  config.heads = size("llama.attention.head_count");
  config.kv_heads = size_or("llama.attention.head_count_kv", config.heads);
  config.head_dim =
      size_or("llama.attention.key_length", std::max<index_t>(config.d_model / config.heads, 1));
  config.feed_forward = size("llama.feed_forward_length");
  config.context = size("llama.context_length");
  config.rope_dimensions = size_or("llama.rope.dimension_count", config.head_dim);
  config.rope_base = within("llama.rope.freq_base",
                            file.find_real("llama.rope.freq_base").value_or(10000.0), 1, 1e30);
  config.rms_epsilon =
      static_cast<float>(within("llama.attention.layer_norm_rms_epsilon",
                                file.real("llama.attention.layer_norm_rms_epsilon"), 1e-30, 1));

  const auto refuse = [&](const std::string& problem) {
    throw file_error(file.path(), problem);
  };
  if (config.heads % config.kv_heads != 0)
    refuse("it has " + std::to_string(config.heads) + " heads, not a multiple of its " +
           std::to_string(config.kv_heads) + " key-value heads");
  if (size_or("llama.attention.value_length", config.head_dim) != config.head_dim)
    refuse("its values and keys differ in length (supported: the same length)");
  require_plain_llama(file, config);
  if (config.rope_dimensions % 2 != 0 || config.rope_dimensions > config.head_dim)
    refuse("its rotary embedding has " + std::to_string(config.rope_dimensions) +
           " dimensions (supported: an even number up to the head's " +
           std::to_string(config.head_dim) + ")");

  const tensor_info* embedding = file.find_tensor("token_embd.weight");
  if (embedding == nullptr) refuse("tensor 'token_embd.weight' is missing");
  if (embedding->shape.size() != 2 || embedding->shape[1] > largest)
    refuse("tensor 'token_embd.weight' has shape " + shape_text(embedding->shape) +
           ", expected a matrix of up to 2^30 rows");
  config.vocabulary = static_cast<index_t>(embedding->shape[1]);
  return config;
}

model::model(const gguf_file& file) : config_(model_config::read(file)) {
  const model_config& c = config_;
  tensor_loader loader(file);
  embedding_ = loader.load("token_embd.weight", c.vocabulary, c.d_model);
  for (index_t l = 0; l < c.layers; ++l) {
    const std::string prefix = "blk." + std::to_string(l) + ".";
    const auto vector = [&](const char* name, index_t length) {
      return loader.load(prefix + name + ".weight", length);
    };
    const auto weights = [&](const char* name, index_t outputs, index_t inputs) {
      return loader.load(prefix + name + ".weight", outputs, inputs);
    };
    layer_weights layer;
    layer.attention_norm = vector("attn_norm", c.d_model);
    layer.query = weights("attn_q", c.heads * c.head_dim, c.d_model);
    layer.key = weights("attn_k", c.kv_heads * c.head_dim, c.d_model);
    layer.value = weights("attn_v", c.kv_heads * c.head_dim, c.d_model);
    layer.attention_output = weights("attn_output", c.d_model, c.heads * c.head_dim);
    layer.feed_forward_norm = vector("ffn_norm", c.d_model);
    layer.gate = weights("ffn_gate", c.feed_forward, c.d_model);
    layer.up = weights("ffn_up", c.feed_forward, c.d_model);
    layer.down = weights("ffn_down", c.d_model, c.feed_forward);
    layers_.push_back(std::move(layer));
  }
  output_norm_ = loader.load("output_norm.weight", c.d_model);
  if (loader.has("output.weight")) output_ = loader.load("output.weight", c.vocabulary, c.d_model);
  loader.expect_all_taken(c.layers);
}

forward_pass::forward_pass(const model& model, thread_pool& pool)
    : model_(model),
      pool_(pool),
      rotary_(model.config().rope_dimensions, model.config().rope_base) {}

void forward_pass::embed(std::span<const token_id> tokens, matrix& stream) const {
  const matrix& embedding = model_.embedding();
  stream.resize(static_cast<index_t>(tokens.size()), embedding.cols());
  for (index_t t = 0; t < stream.rows(); ++t) {
    const token_id token = tokens[static_cast<std::size_t>(t)];
    if (token < 0 || token >= embedding.rows())
      throw std::out_of_range("token " + std::to_string(token) +
                              " is not in the model's vocabulary of " +
                              std::to_string(embedding.rows()));
    stream.row(t) = embedding.row(token);
  }
}

void forward_pass::layer(index_t l, matrix& stream, const attention_function& attend,
                         index_t first) {
  const layer_weights& weights = model_.layer(l);
  const model_config& config = model_.config();
  const index_t tokens = stream.rows();

  rms_norm(stream, weights.attention_norm, config.rms_epsilon, normalised_, pool_);
  linear(normalised_, weights.query, query_, pool_);
  linear(normalised_, weights.key, key_, pool_);
  linear(normalised_, weights.value, value_, pool_);
  rotary_.apply(query_, config.head_dim, pool_, first);
  rotary_.apply(key_, config.head_dim, pool_, first);
  attended_.resize(tokens, config.heads * config.head_dim);

  attend({.layer = l,
          .hidden = {normalised_.data(), {tokens, config.d_model}},
          .q = by_head(query_, config.head_dim),
          .k = by_head(key_, config.head_dim),
          .v = by_head(value_, config.head_dim),
          .out = by_head(attended_, config.head_dim)});
  add_linear(attended_, weights.attention_output, stream, pool_);

  rms_norm(stream, weights.feed_forward_norm, config.rms_epsilon, normalised_, pool_);
  linear(normalised_, weights.gate, gate_, pool_);
  linear(normalised_, weights.up, up_, pool_);
  swiglu(gate_, up_, pool_);
  add_linear(gate_, weights.down, stream, pool_);
}

void forward_pass::next_token_logits(const matrix& stream, matrix& logits) {
  const matrix last = stream.bottomRows(1);
  rms_norm(last, model_.output_norm(), model_.config().rms_epsilon, normalised_, pool_);
  linear(normalised_, model_.output(), logits, pool_);
}

double forward_pass::negative_log_likelihood(const matrix& stream,
                                             std::span<const token_id> tokens) {
  if (tokens.size() < 2) return 0;
  rms_norm(stream, model_.output_norm(), model_.config().rms_epsilon, normalised_, pool_);
  return cross_entropy(normalised_.topRows(stream.rows() - 1), model_.output(), tokens.subspan(1),
                       pool_);
}

double forward_pass::negative_log_likelihood(std::span<const token_id> tokens,
                                             const attention_function& attend) {
  embed(tokens, stream_);
  for (index_t l = 0; l < model_.config().layers; ++l) layer(l, stream_, attend);
  return negative_log_likelihood(stream_, tokens);
}

}  // namespace language_model
