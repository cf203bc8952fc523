// Masks of real text: the file that the example's `language_model perplexity --masks-out` writes.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <focus/options.hpp>

#include "masks.hpp"

namespace bench {

/// The masks of one layer in one row of the example's table, of the first window of the text.
struct layer_masks {
  std::string name;  // rows.R.layers.N
  mask_list query, key;
};

/// A safetensors file of which only what the example writes is understood: U64 tensors
/// rows.R.layers.N.query_masks and .key_masks, [windows, context], little-endian. Throws
/// std::runtime_error with the file's name.
class mask_file {
 public:
  explicit mask_file(const std::string& path) : path_(path), in_(path, std::ios::binary) {
    std::uint64_t length = 0;
    if (!in_.read(reinterpret_cast<char*>(&length), sizeof length)) fail("cannot be read");
    if (length > longest_header) fail("is not a safetensors file");
    header_.resize(length);
    if (!in_.read(header_.data(), static_cast<std::streamsize>(length))) fail("ends early");
    data_begin_ = sizeof length + length;
  }

  /// Of each row of the table the layers in the file: the first, the middle and the last.
  std::vector<layer_masks> read() {
    std::vector<layer_masks> all;
    for (int row = 0;; ++row) {
      const std::vector<std::string> layers = layers_of("rows." + std::to_string(row));
      if (layers.empty()) break;
      std::vector<std::size_t> chosen = {0, layers.size() / 2, layers.size() - 1};
      chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
      for (const std::size_t l : chosen)
        all.push_back(
            {layers[l], tensor(layers[l] + ".query_masks"), tensor(layers[l] + ".key_masks")});
    }
    if (all.empty()) fail("has no masks");
    return all;
  }

 private:
  static constexpr std::uint64_t longest_header = 100'000'000;
  static constexpr int most_layers = 1000;

  [[noreturn]] void fail(const std::string& problem) const {
    throw std::runtime_error(path_ + " " + problem);
  }

  std::vector<std::string> layers_of(const std::string& row) const {
    std::vector<std::string> layers;
    for (int l = 0; l < most_layers; ++l) {
      const std::string name = row + ".layers." + std::to_string(l);
      if (header_.find('"' + name + ".query_masks\"") != std::string::npos) layers.push_back(name);
    }
    return layers;
  }

  /// The two numbers of `"name":[a,b]` behind `at`.
  std::pair<index_t, index_t> two_numbers(std::size_t at, const std::string& name) const {
    at = header_.find('[', header_.find('"' + name + '"', at));
    index_t a = -1, b = -1;
    const char* const end = header_.data() + header_.size();
    if (at != std::string::npos) {
      const char* const comma = std::from_chars(header_.data() + at + 1, end, a).ptr;
      if (comma != end && *comma == ',') std::from_chars(comma + 1, end, b);
    }
    if (a < 0 || b < 0) fail("has no two numbers in " + name);
    return {a, b};
  }

  /// The first window of a tensor.
  mask_list tensor(const std::string& name) {
    const std::size_t at = header_.find('"' + name + '"');
    if (at == std::string::npos) fail("lacks " + name);
    if (header_.find("\"dtype\":\"U64\"", at) > header_.find('}', at))
      fail("has another type than U64 in " + name);
    const auto [windows, context] = two_numbers(at, "shape");
    const auto [begin, end] = two_numbers(at, "data_offsets");
    if (end - begin != 8 * windows * context || windows < 1)
      fail("does not fit its shape: " + name);
    mask_list masks(static_cast<std::size_t>(context));
    in_.seekg(static_cast<std::streamoff>(data_begin_) + begin);
    if (!in_.read(reinterpret_cast<char*>(masks.data()), 8 * context)) fail("ends early");
    return masks;
  }

  std::string path_;
  std::ifstream in_;
  std::string header_;
  std::uint64_t data_begin_ = 0;
};

}  // namespace bench
