// Keys of the metadata that would change what the model computes: neutral, or refused by name.

#include <cmath>
#include <functional>

#include "files.hpp"
#include "model.hpp"
#include "tiny_model.hpp"

namespace test_llama_metadata {
using namespace language_model;

namespace {

using change = std::function<void(gguf_writer&)>;

std::string model_with(const change& add) {
  gguf_writer writer;
  add_config(writer);
  add(writer);
  add_weights(writer);
  return writer.bytes();
}

void require_refused(const change& add, const std::vector<std::string>& expected) {
  const temporary_file file(model_with(add));
  require_file_error([](const std::string& path) { model{gguf_file(path)}; }, file.path(),
                     expected);
}

void require_accepted(const change& add) {
  const temporary_file file(model_with(add));
  REQUIRE_NOTHROW(model{gguf_file(file.path())});
}

}  // namespace

TEST_CASE("llama metadata: a number that changes the model is refused by name, a neutral one not") {
  struct number_case {
    const char* key;
    std::vector<float> neutral, refused;
  };
  const float usual_scale = 1 / std::sqrt(6.0f);  // of the tiny model's heads
  const std::vector<number_case> cases = {{"attention.clamp_kqv", {0}, {8}},
                                          {"attention.max_alibi_bias", {0}, {8}},
                                          {"attention.scale", {0, usual_scale}, {0.25f, 1}},
                                          {"attn_logit_softcapping", {0}, {50}},
                                          {"final_logit_softcapping", {0}, {30}},
                                          {"embedding_scale", {0, 1}, {12}},
                                          {"residual_scale", {0, 1}, {0.22f}},
                                          {"logit_scale", {0, 1}, {0.0625f, -1}},
                                          {"rope.scaling.factor", {0, 1}, {4, 0.5f}},
                                          {"rope.scale_linear", {0, 1}, {4}},
                                          {"rope.scaling.attn_factor", {1}, {0, 2}},
                                          {"expert_weights_scale", {0}, {2.5f}}};
  for (const number_case& c : cases) {
    const std::string key = std::string("llama.") + c.key;
    INFO(key);
    for (const float x : c.neutral) require_accepted([&](gguf_writer& w) { w.f32(key, x); });
    for (const float x : c.refused)
      require_refused([&](gguf_writer& w) { w.f32(key, x); },
                      {"'" + key + "' is " + text_of(double{x}), "supported: "});
    require_refused([&](gguf_writer& w) { w.string(key, "4"); }, {"'" + key + "' is '4'"});
    require_refused([&](gguf_writer& w) { w.f32(key, std::nanf("")); }, {"'" + key + "' is nan"});
  }
}

TEST_CASE("llama metadata: counts and switches") {
  for (const char* name : {"expert_count", "expert_used_count", "expert_shared_count",
                           "leading_dense_block_count", "nextn_predict_layers", "pooling_type"}) {
    const std::string key = std::string("llama.") + name;
    require_accepted([&](gguf_writer& w) { w.u32(key, 0); });
    require_refused([&](gguf_writer& w) { w.u32(key, 8); }, {"'" + key + "' is 8", "supported: 0"});
  }
  require_accepted([](gguf_writer& w) { w.boolean("llama.attention.causal", 1); });
  require_refused([](gguf_writer& w) { w.boolean("llama.attention.causal", 0); },
                  {"'llama.attention.causal' is false", "supported: true"});
  require_accepted([](gguf_writer& w) { w.boolean("llama.use_parallel_residual", 0); });
  require_refused([](gguf_writer& w) { w.boolean("llama.use_parallel_residual", 1); },
                  {"'llama.use_parallel_residual' is true", "supported: false"});
}

TEST_CASE("llama metadata: a window of the whole context hides nothing") {
  const std::string key = "llama.attention.sliding_window";
  for (const std::uint32_t window : {0u, 512u, 4096u})
    require_accepted([&](gguf_writer& w) { w.u32(key, window); });
  require_refused([&](gguf_writer& w) { w.u32(key, 511); }, {"'" + key + "' is 511", "context"});
  require_refused([&](gguf_writer& w) { w.i32s(key, {512, 64}); }, {"'" + key + "' is an array"});
}

TEST_CASE("llama metadata: the type of rotary scaling says whether its factor counts") {
  const auto scaled = [](const char* type, float factor) {
    return [=](gguf_writer& w) {
      w.string("llama.rope.scaling.type", type);
      w.f32("llama.rope.scaling.factor", factor);
      w.u32("llama.rope.scaling.original_context_length", 128);
      w.boolean("llama.rope.scaling.finetuned", 1);
    };
  };
  require_accepted(scaled("none", 4));
  require_accepted(scaled("linear", 1));
  require_refused(scaled("linear", 4), {"'llama.rope.scaling.factor' is 4"});
  require_refused(scaled("yarn", 1), {"'llama.rope.scaling.type' is 'yarn'", "'none'"});
  require_refused(scaled("longrope", 1), {"'longrope'"});
}

TEST_CASE("llama metadata: a key that is not known is refused, other prefixes are not looked at") {
  require_refused([](gguf_writer& w) { w.u32("llama.rope.dimension_sections", 0); },
                  {"'llama.rope.dimension_sections' is 0", "does not know the key"});
  require_refused([](gguf_writer& w) { w.f32("llama.attention.layer_norm_epsilon", 1e-5f); },
                  {"'llama.attention.layer_norm_epsilon' is 1e-05"});
  require_refused([](gguf_writer& w) { w.string("llama.tensor_data_layout", "transposed"); },
                  {"'llama.tensor_data_layout' is 'transposed'", "'Meta AI original pth'"});
  require_accepted([](gguf_writer& w) {
    w.string("llama.tensor_data_layout", "Meta AI original pth");
    w.u32("llama.vocab_size", 260);
    w.u32("llama.attention.key_length", 6);
    w.u32("llama.attention.value_length", 6);
    w.u32("llama.rope.dimension_count", 6);
    w.u32("gemma.attention.sliding_window", 4);
    w.string("general.type", "model");
    w.u32("general.quantization_version", 2);
    w.u32("split.count", 0);
  });
  require_refused([](gguf_writer& w) { w.u32("llama.attention.value_length", 4); },
                  {"values and keys differ"});
  require_refused([](gguf_writer& w) { w.string("general.type", "adapter"); }, {"'adapter'"});
  require_refused([](gguf_writer& w) { w.u32("general.quantization_version", 1); },
                  {"'general.quantization_version' is 1"});
}

TEST_CASE("llama metadata: constants out of range are shown as they are") {
  const auto with = [](const char* key, const std::string& value) {
    gguf_writer writer;
    writer.string("general.architecture", "llama");
    for (const char* size :
         {"block_count", "context_length", "embedding_length", "feed_forward_length"})
      writer.u32(std::string("llama.") + size, 2);
    writer.u32("llama.attention.head_count", 1);
    const std::string epsilon = "llama.attention.layer_norm_rms_epsilon";
    if (key != epsilon) writer.f32(epsilon, 1e-5f);
    writer.entry(key, 12, value);
    return writer.bytes();
  };
  for (const auto& [key, value, text] :
       {std::tuple{"llama.attention.layer_norm_rms_epsilon", -1e-9, "-1e-09"},
        std::tuple{"llama.attention.layer_norm_rms_epsilon", 1e300, "1e+300"},
        std::tuple{"llama.attention.layer_norm_rms_epsilon", 1e-300, "1e-300"},
        std::tuple{"llama.rope.freq_base", 1e-9, "1e-09"},
        std::tuple{"llama.rope.freq_base", 1e300, "1e+300"}}) {
    const temporary_file file(with(key, bytes_of(value)));
    require_file_error([](const std::string& path) { model{gguf_file(path)}; }, file.path(),
                       {std::string("'") + key + "' is " + text, "supported: "});
  }
}

TEST_CASE("llama metadata: weights that are not finite, and layers beyond the count") {
  const auto tampered = [](const std::string& name, const std::vector<std::uint64_t>& shape,
                           float last) {
    gguf_writer writer;
    add_config(writer, {.layers = 1});
    add_weights(writer, {.layers = 1});
    std::vector<float> elements(shape[0] * (shape.size() > 1 ? shape[1] : 1), 0.5f);
    elements.back() = last;
    writer.tensor(name, shape, elements);
    return writer.bytes();
  };
  const auto refused = [](const std::string& content, const std::vector<std::string>& expected) {
    const temporary_file file(content);
    require_file_error([](const std::string& path) { model{gguf_file(path)}; }, file.path(),
                       expected);
  };
  refused(tampered("output.weight", {24, 260}, std::nanf("")), {"'output.weight' is not finite"});
  refused(tampered("output.weight", {24, 260}, HUGE_VALF), {"'output.weight' is not finite"});
  refused(tampered("blk.1.attn_norm.weight", {24}, 1),
          {"'blk.1.attn_norm.weight'", "plain LLaMA model of 1 layers"});
}

}  // namespace test_llama_metadata
