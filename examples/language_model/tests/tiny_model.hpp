// A small random model with a complete byte-level tokenizer.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "gguf_writer.hpp"

/// The character that stands for a byte in GPT-2's vocabularies, in UTF-8.
inline std::string byte_character(unsigned byte) {
  const auto printable = [](unsigned b) {
    return (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b != 0xad);
  };
  unsigned code = byte;
  if (!printable(byte)) {
    code = 0x100;
    for (unsigned b = 0; b < byte; ++b) code += printable(b) ? 0 : 1;
  }
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
}

/// A tokenizer of all bytes, of the results of the merges ("a b" makes "ab"), and of one control
/// token, <end>.
inline void add_tokenizer(gguf_writer& file, const std::vector<std::string>& merges,
                          const std::string& kind = "gpt-2") {
  std::vector<std::string> tokens = {"<end>"};
  std::vector<std::int32_t> types = {3};
  for (unsigned byte = 0; byte < 256; ++byte) tokens.push_back(byte_character(byte));
  for (std::string merge : merges) tokens.push_back(merge.erase(merge.find(' '), 1));
  types.resize(tokens.size(), 1);
  file.string("tokenizer.ggml.model", "gpt2");
  file.string("tokenizer.ggml.pre", kind);
  file.strings("tokenizer.ggml.tokens", tokens);
  file.i32s("tokenizer.ggml.token_type", types);
  file.strings("tokenizer.ggml.merges", merges);
}

struct tiny_shape {
  std::uint32_t layers = 2, d_model = 24, heads = 4, kv_heads = 2, head_dim = 6, feed_forward = 40,
                vocabulary = 260;
  bool separate_output = false;
};

inline void add_config(gguf_writer& file, const tiny_shape& shape = {}) {
  file.string("general.architecture", "llama");
  file.u32("llama.block_count", shape.layers);
  file.u32("llama.context_length", 512);
  file.u32("llama.embedding_length", shape.d_model);
  file.u32("llama.feed_forward_length", shape.feed_forward);
  file.u32("llama.attention.head_count", shape.heads);
  file.u32("llama.attention.head_count_kv", shape.kv_heads);
  file.f32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  file.f32("llama.rope.freq_base", 100.0f);
}

inline void add_weights(gguf_writer& file, const tiny_shape& s = {}) {
  std::mt19937 random(7);
  const auto add = [&](const std::string& name, const std::vector<std::uint64_t>& shape, float mean,
                       float deviation) {
    std::normal_distribution<float> normal(mean, deviation);
    std::size_t count = 1;
    for (const std::uint64_t extent : shape) count *= extent;
    std::vector<float> elements(count);
    for (float& x : elements) x = normal(random);
    file.tensor(name + ".weight", shape, elements);
  };
  const std::uint64_t d = s.d_model, q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
  add("token_embd", {d, s.vocabulary}, 0, 1);
  for (std::uint32_t l = 0; l < s.layers; ++l) {
    const std::string blk = "blk." + std::to_string(l) + ".";
    add(blk + "attn_norm", {d}, 1, 0.1f);
    add(blk + "attn_q", {d, q}, 0, 0.4f);
    add(blk + "attn_k", {d, kv}, 0, 0.4f);
    add(blk + "attn_v", {d, kv}, 0, 0.2f);
    add(blk + "attn_output", {q, d}, 0, 0.2f);
    add(blk + "ffn_norm", {d}, 1, 0.1f);
    add(blk + "ffn_gate", {d, s.feed_forward}, 0, 0.2f);
    add(blk + "ffn_up", {d, s.feed_forward}, 0, 0.2f);
    add(blk + "ffn_down", {s.feed_forward, d}, 0, 0.2f);
  }
  add("output_norm", {d}, 1, 0.1f);
  if (s.separate_output) add("output", {d, s.vocabulary}, 0, 0.3f);
}

inline std::string tiny_model_file(const tiny_shape& shape = {}) {
  gguf_writer file;
  add_config(file, shape);
  add_tokenizer(file, {"h e", "t he"});
  add_weights(file, shape);
  return file.bytes();
}
