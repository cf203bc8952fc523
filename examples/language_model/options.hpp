// The command line.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention_method.hpp"
#include "training.hpp"

namespace language_model {

/// Options that most commands share.
struct common_options {
  std::string model;
  index_t threads = 0;  // 0: one a core
};

/// Which windows of which text: windows follow each other without a gap, the first begins at token
/// `skip`.
struct text_options {
  std::vector<std::string> texts;
  index_t context = 1024;
  index_t windows = 0;  // 0: the command's own choice
  index_t skip = 2000;
};

struct calibrate_options {
  common_options common;
  text_options text;
  index_t groups = 8;
  index_t dimensions = 16;
  index_t sinks = 1;
  std::string similarity = "cosine";
  float temperature = 0.1f;
  int restarts = 4;
  std::uint64_t seed = 1;
  std::string output;
};

struct perplexity_options {
  common_options common;
  text_options text;
  std::vector<std::string> routers;
  std::vector<index_t> groups;
  std::string top_k = "1";
  index_t window = 128;
  index_t sinks = 1;
  std::string layers = "all";
  std::string json;
  std::string masks;
  index_t cached = 0;  // tokens a block; 0: no caches
  std::string cache = "f32";
};

struct generate_options {
  common_options common;
  std::string prompt, prompt_file;
  index_t prompt_tokens = 0;  // 0: all
  bool chat = false;
  std::string system;  // empty: the template's
  std::string attention = "full";
  std::string router;
  std::string top_k = "1";
  index_t window = 128;
  index_t sinks = 1;
  std::string layers = "all";
  std::string cache = "f32";
  index_t tokens = 128;
  index_t block = 512;
  float temperature = 0;
  float top_p = 1;
  std::uint64_t seed = 1;
  bool ignore_end = false, quiet = false;
};

struct train_options {
  common_options common;
  text_options text;
  std::vector<index_t> groups;  // none: 8, or those of the initial routers
  index_t dimensions = 16;
  std::vector<std::string> initial;
  training_options training;  // context: that of text
  std::string objective = "mass";
  std::string similarity = "cosine";
  std::string output;
  std::string checkpoint;         // empty: named after the output
  index_t checkpoint_every = 20;  // steps
  index_t report_every = 10;
};

struct groups_options {
  common_options common;
  text_options text;
  std::string router;
  index_t layer = 0;
  index_t tokens = 12;
};

struct tokens_options {
  std::string model;
  std::string text;
};

/// The command that was asked for: one of the members is set.
struct command_line {
  std::optional<perplexity_options> perplexity;
  std::optional<generate_options> generate;
  std::optional<calibrate_options> calibrate;
  std::optional<train_options> train;
  std::optional<groups_options> groups;
  std::optional<tokens_options> tokens;
};

/// What the user typed is wrong, or asks for help: the text to print, and the exit code (2, or 0
/// for help).
struct usage_message {
  std::string text;
  int exit_code;
};

/// Throws usage_message.
command_line parse_command_line(int argc, const char* const* argv);

/// "1,2" or "2:1" (query:key), comma separated. Throws usage_message when it is not that, or beyond
/// 1 to groups.
std::vector<top_k> parse_top_k(const std::string& list, index_t groups);

/// "all", "2-29", "0,3,5-8": one entry a layer. Throws usage_message.
std::vector<bool> parse_layers(const std::string& list, index_t layers);

}  // namespace language_model
