// What a file's metadata (llama.*) may say besides a model's sizes.
#pragma once

#include "gguf.hpp"

namespace language_model {

struct model_config;

/// Throws file_error, which names the key and its value, where the metadata ask for what this
/// program does not compute: a value that is not neutral, or a key that is not known here, for it
/// may change the numbers. `config` is what was read from the same file.
void require_plain_llama(const gguf_file& file, const model_config& config);

}  // namespace language_model
