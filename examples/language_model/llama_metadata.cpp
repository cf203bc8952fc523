#include "llama_metadata.hpp"

#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "model.hpp"

namespace language_model {

namespace {

constexpr std::string_view llama_prefix = "llama.";

/// Read elsewhere, or of no influence on a plain LLaMA model. Scaling that is none or linear has no
/// use for the context from which it scales.
const std::set<std::string_view> free_keys = {"attention.head_count",
                                              "attention.head_count_kv",
                                              "attention.key_length",
                                              "attention.layer_norm_rms_epsilon",
                                              "attention.sliding_window_pattern",
                                              "attention.value_length",
                                              "block_count",
                                              "context_length",
                                              "embedding_length",
                                              "feed_forward_length",
                                              "rope.dimension_count",
                                              "rope.freq_base",
                                              "rope.scaling.finetuned",
                                              "rope.scaling.original_context_length",
                                              "vocab_size"};

/// The values with which a key changes nothing; booleans are 0 and 1. A scale of 0 is one that is
/// not set.
const std::map<std::string_view, std::vector<double>> neutral_numbers = {
    {"attention.causal", {1}},
    {"attention.clamp_kqv", {0}},
    {"attention.max_alibi_bias", {0}},
    {"attn_logit_softcapping", {0}},
    {"embedding_scale", {0, 1}},
    {"expert_count", {0}},
    {"expert_feed_forward_length", {0}},
    {"expert_gating_func", {0}},
    {"expert_shared_count", {0}},
    {"expert_shared_feed_forward_length", {0}},
    {"expert_used_count", {0}},
    {"expert_weights_norm", {0}},
    {"expert_weights_scale", {0}},
    {"final_logit_softcapping", {0}},
    {"interleave_moe_layer_step", {0}},
    {"leading_dense_block_count", {0}},
    {"logit_scale", {0, 1}},
    {"nextn_predict_layers", {0}},
    {"pooling_type", {0}},
    {"residual_scale", {0, 1}},
    {"rope.scaling.attn_factor", {1}},
    {"router_logit_softcapping", {0}},
    {"swin_norm", {0}},
    {"token_shift_count", {0}},
    {"use_parallel_residual", {0}}};

/// The same for texts. Queries and keys in the order of rotary pairs that lie side by side are
/// what either name of the layout stands for in this architecture.
const std::map<std::string_view, std::vector<std::string_view>> neutral_texts = {
    {"rope.scaling.type", {"none", "linear"}},
    {"tensor_data_layout", {"reference", "Meta AI original pth"}}};

std::optional<double> number_of(const gguf_file::value& value) {
  if (const auto* n = std::get_if<std::uint64_t>(&value)) return static_cast<double>(*n);
  if (const auto* n = std::get_if<std::int64_t>(&value)) return static_cast<double>(*n);
  if (const auto* x = std::get_if<double>(&value)) return *x;
  if (const auto* b = std::get_if<bool>(&value)) return *b ? 1 : 0;
  return std::nullopt;
}

class checker {
 public:
  checker(const gguf_file& file, const model_config& config) : file_(file), config_(config) {}

  void check(std::string_view key, const gguf_file::value& value) const {
    const std::string_view name = key.substr(llama_prefix.size());
    if (free_keys.contains(name)) return;
    if (const auto texts = neutral_texts.find(name); texts != neutral_texts.end()) {
      const auto* text = std::get_if<std::string_view>(&value);
      std::string list;
      for (const std::string_view neutral : texts->second) {
        if (text != nullptr && *text == neutral) return;
        list += (list.empty() ? "" : " or ") + in_quotes(neutral);
      }
      refuse(key, value, list);
    }
    if (const auto numbers = neutral_numbers.find(name); numbers != neutral_numbers.end()) {
      std::string list;
      for (const double neutral : numbers->second) {
        if (number_of(value) == neutral) return;
        const gguf_file::value shown = std::holds_alternative<bool>(value)
                                           ? gguf_file::value(neutral != 0)
                                           : gguf_file::value(neutral);
        list += (list.empty() ? "" : " or ") + text_of(shown);
      }
      refuse(key, value, list);
    }
    const double x = number_of(value).value_or(std::nan(""));
    if (name == "attention.scale")
      check_scale(key, value, x);
    else if (name == "attention.sliding_window")
      check_window(key, value, x);
    else if (name == "rope.scaling.factor" || name == "rope.scale_linear")
      check_rope_factor(key, value, x);
    else
      refuse(key, value, "");
  }

 private:
  void check_scale(std::string_view key, const gguf_file::value& value, double x) const {
    const double usual = 1 / std::sqrt(static_cast<double>(config_.head_dim));
    if (x != 0 && !(std::abs(x - usual) <= 1e-6 * usual))
      refuse(key, value, text_of(static_cast<double>(static_cast<float>(usual))));
  }

  /// A window of the whole context hides nothing.
  void check_window(std::string_view key, const gguf_file::value& value, double x) const {
    if (x != 0 && !(x >= static_cast<double>(config_.context)))
      refuse(key, value, "0, or the whole context");
  }

  /// Without a type, scaling is linear.
  void check_rope_factor(std::string_view key, const gguf_file::value& value, double x) const {
    if (x == 0 || x == 1 || file_.find_string("llama.rope.scaling.type") == "none") return;
    refuse(key, value, "1");
  }

  [[noreturn]] void refuse(std::string_view key, const gguf_file::value& value,
                           const std::string& supported) const {
    throw file_error(file_.path(), "metadata " + in_quotes(key) + " is " + text_of(value) +
                                       (supported.empty() ? ": this program does not know the key"
                                                          : " (supported: " + supported + ")"));
  }

  const gguf_file& file_;
  const model_config& config_;
};

}  // namespace

void require_plain_llama(const gguf_file& file, const model_config& config) {
  const checker checker(file, config);
  for (const auto& [key, value] : file.metadata())
    if (key.starts_with(llama_prefix)) checker.check(key, value);
}

}  // namespace language_model
