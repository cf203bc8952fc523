// Reader for GGUF, the container of model files: metadata, tensors and their dequantisation.
//
// Nothing in the file is trusted: every count, length and offset is checked against the file's size
// before it is used, so that a damaged file costs one file_error and never a crash or a large
// allocation.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "mapped_file.hpp"

namespace language_model {

/// Element formats that can be dequantised. The numbers are GGUF's.
enum class tensor_type : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q8_0 = 8,
  bf16 = 30
};

/// How one format stores its elements: in blocks of `elements` elements that take `bytes` bytes.
struct block_layout {
  const char* name;
  std::uint64_t elements;
  std::uint64_t bytes;
};
block_layout layout_of(tensor_type type);

/// Writes the elements of `blocks`, whole blocks of the given type, to `out`.
void dequantize(tensor_type type, std::span<const std::byte> blocks, std::span<float> out);

/// A tensor of the file. GGUF counts dimensions from the innermost: a matrix [rows, columns] has
/// shape {columns, rows}.
struct tensor_info {
  std::string_view name;
  tensor_type type;
  std::vector<std::uint64_t> shape;
  std::uint64_t elements;
  std::span<const std::byte> data;
};

class gguf_file {
 public:
  using value =
      std::variant<std::uint64_t, std::int64_t, double, bool, std::string_view,
                   std::vector<std::int64_t>, std::vector<double>, std::vector<std::string_view>>;

  /// Maps and checks the whole file, apart from the tensors' contents. Throws file_error, also for
  /// a part of a split file.
  explicit gguf_file(const std::string& path);

  [[nodiscard]] const std::string& path() const noexcept { return file_.path(); }

  /// Metadata, which view the mapped file. A value of another type throws file_error; an absent
  /// one too, except from the find_ functions.
  [[nodiscard]] const std::map<std::string_view, value>& metadata() const noexcept {
    return metadata_;
  }
  [[nodiscard]] std::string_view string(std::string_view key) const;
  [[nodiscard]] std::uint64_t integer(std::string_view key) const;
  [[nodiscard]] double real(std::string_view key) const;
  [[nodiscard]] const std::vector<std::string_view>& strings(std::string_view key) const;
  [[nodiscard]] std::optional<std::string_view> find_string(std::string_view key) const;
  [[nodiscard]] std::optional<std::uint64_t> find_integer(std::string_view key) const;
  [[nodiscard]] std::optional<double> find_real(std::string_view key) const;
  /// Null when there is no such key.
  [[nodiscard]] const std::vector<std::int64_t>* find_integers(std::string_view key) const;

  /// All tensors by name.
  [[nodiscard]] const std::map<std::string_view, tensor_info>& tensors() const noexcept {
    return tensors_;
  }
  /// Null when there is no such tensor.
  [[nodiscard]] const tensor_info* find_tensor(std::string_view name) const;

 private:
  const value* find(std::string_view key) const;
  const value& get(std::string_view key) const;
  void require_whole() const;
  [[noreturn]] void fail(const std::string& problem) const;
  [[noreturn]] void fail_type(std::string_view key, const char* expected) const;

  mapped_file file_;
  std::map<std::string_view, value> metadata_;
  std::map<std::string_view, tensor_info> tensors_;
};

/// A value as a message can show it: short, of one line.
std::string text_of(const gguf_file::value& value);

}  // namespace language_model
