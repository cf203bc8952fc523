// Writes the seeds of the language model's fuzzers: make_seeds FOLDER. Small files that are right,
// for the fuzzers to damage.

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "gguf_writer.hpp"
#include "mapped_file.hpp"
#include "router_file.hpp"
#include "tiny_model.hpp"

namespace {

using namespace language_model;

class folder {
 public:
  explicit folder(const std::filesystem::path& path) : path_(path) {
    std::filesystem::create_directories(path);
  }
  [[nodiscard]] std::string file(const std::string& name) const { return (path_ / name).string(); }
  void write(const std::string& name, const std::string& content) const {
    write_file(file(name), content);
  }

 private:
  std::filesystem::path path_;
};

/// A tokenizer of a few tokens, of all types.
void add_few_tokens(gguf_writer& file) {
  file.string("tokenizer.ggml.model", "gpt2");
  file.string("tokenizer.ggml.pre", "smollm");
  file.strings("tokenizer.ggml.tokens", {"a", "b", "ab", "<unk>", "<end>", "<think>", "\u0120"});
  file.i32s("tokenizer.ggml.token_type", {1, 6, 5, 2, 3, 4, 1});
  file.strings("tokenizer.ggml.merges", {"a b"});
  file.u32("tokenizer.ggml.unknown_token_id", 3);
}

void write_gguf_seeds(const folder& seeds) {
  const tiny_shape shape = {.layers = 1,
                            .d_model = 2,
                            .heads = 1,
                            .kv_heads = 1,
                            .head_dim = 2,
                            .feed_forward = 1,
                            .vocabulary = 7};
  gguf_writer model;
  add_config(model, shape);
  add_few_tokens(model);
  add_weights(model, shape);
  seeds.write("model", model.bytes());

  gguf_writer types;
  types.version = 2;
  types.u32("general.alignment", 32);
  types.u64("u64", 1);
  types.boolean("boolean", 1);
  types.entry("f64s", 9, bytes_of(12u, std::uint64_t{1}, 0.5));
  constexpr std::uint32_t formats[] = {1, 2, 3, 8, 30};
  constexpr std::size_t bytes[] = {64, 18, 20, 34, 64};
  for (std::size_t i = 0; i < std::size(formats); ++i)
    types.tensor("t" + std::to_string(i), {32}, formats[i], std::string(bytes[i], '\1'));
  seeds.write("types", types.bytes());
}

token_router small_router() {
  return {.projection = matrix::Ones(2, 1),
          .bias = row_vector::Ones(1),
          .centroids = matrix::Ones(2, 1),
          .log_group_scale = row_vector::Zero(2)};
}

void write_safetensors_seeds(const folder& seeds) {
  router routers;
  routers.layers.push_back({small_router(), std::nullopt});
  save_router(routers, seeds.file("router"));
  routers.layers.front().key = small_router();
  save_router(routers, seeds.file("keys"), router_precision::f16);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_seeds FOLDER\n");
    return 2;
  }
  const std::filesystem::path corpus = argv[1];
  write_gguf_seeds(folder(corpus / "fuzz_gguf"));
  write_safetensors_seeds(folder(corpus / "fuzz_safetensors"));

  const folder texts(corpus / "fuzz_tokenizer");
  texts.write("words", "It's 12  o'clock\n\n\tna\u00efve \u0434\u0430! \u3000x\xff\xe2\x82<think>");
  texts.write("merges", std::string("\x01\x02\x03\x04") + "abab <end> ab" + "\x05\x03\x02\x61\x62");

  const folder lines(corpus / "fuzz_options");
  const std::string common = "\n--model\nm\n--text\nt\n";
  lines.write("perplexity", "perplexity" + common +
                                "--groups\n4,8\n--top-k\n1,2:1\n--layers\n0,2-5\n--window\n-1\n");
  lines.write("train", "train" + common + "-o\nr\n--learning-rate\n1e-3\n--seed\n7\n--steps=9\n");
  lines.write("calibrate", "calibrate" + common + "-o\nr\n--similarity\ndot\n--temperature\n.1\n");
  lines.write("help", "groups\n--help\n");
  return 0;
}
