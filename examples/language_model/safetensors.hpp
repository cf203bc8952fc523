// Reader and writer for safetensors: a JSON header that names tensors, then their data.
//
// As with gguf.hpp, nothing in a file is trusted before it is checked.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <focus/scalar.hpp>

#include "mapped_file.hpp"

namespace language_model {

class safetensors_file {
 public:
  struct tensor {
    std::string dtype;  // "F32", ...
    std::vector<std::int64_t> shape;
    std::span<const std::byte> data;
  };

  /// Maps and checks the whole file, apart from the tensors' contents: its header is one JSON
  /// object from the first byte on, then spaces, and the tensors' data follow one another without a
  /// hole, an overlap or a rest. Throws file_error.
  explicit safetensors_file(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return file_.path(); }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept {
    return metadata_;
  }
  [[nodiscard]] const std::map<std::string, tensor>& tensors() const noexcept { return tensors_; }

  /// The elements of a tensor of type F32, F16 or BF16. Throws file_error for another type.
  [[nodiscard]] std::vector<float> floats(const std::string& name) const;

 private:
  mapped_file file_;
  std::map<std::string, std::string> metadata_;
  std::map<std::string, tensor> tensors_;
};

/// Collects tensors, and writes them all at once.
class safetensors_writer {
 public:
  void metadata(const std::string& key, const std::string& value) { metadata_[key] = value; }
  void add(const std::string& name, std::vector<std::int64_t> shape,
           std::span<const float> elements);
  void add(const std::string& name, std::vector<std::int64_t> shape,
           std::span<const focus::float16> elements);
  void add(const std::string& name, std::vector<std::int64_t> shape,
           std::span<const std::uint64_t> elements);

  /// Throws file_error.
  void write(const std::string& path) const;

 private:
  struct entry {
    const char* dtype;
    std::vector<std::int64_t> shape;
    std::string data;
  };
  std::map<std::string, std::string> metadata_;
  std::map<std::string, entry> entries_;
};

}  // namespace language_model
