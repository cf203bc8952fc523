// Makes GGUF files, good and bad ones alike.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

template <class T>
void append(std::string& bytes, T value) {
  char raw[sizeof value];
  std::memcpy(raw, &value, sizeof value);
  bytes.append(raw, sizeof value);
}

/// The bytes of any values, one after another.
template <class... T>
std::string bytes_of(T... values) {
  std::string result;
  (append(result, values), ...);
  return result;
}

/// Collects what a file is to hold.
class gguf_writer {
 public:
  std::uint32_t version = 3;
  std::uint64_t alignment = 32;

  void string(const std::string& key, std::string_view value) { entry(key, 8, text(value)); }
  void u32(const std::string& key, std::uint32_t value) { entry(key, 4, bytes_of(value)); }
  void u64(const std::string& key, std::uint64_t value) { entry(key, 10, bytes_of(value)); }
  void i32(const std::string& key, std::int32_t value) { entry(key, 5, bytes_of(value)); }
  void f32(const std::string& key, float value) { entry(key, 6, bytes_of(value)); }
  void boolean(const std::string& key, std::uint8_t value) { entry(key, 7, bytes_of(value)); }
  void strings(const std::string& key, const std::vector<std::string>& values) {
    std::string all = bytes_of(std::uint32_t{8}, std::uint64_t{values.size()});
    for (const std::string& value : values) all += text(value);
    entry(key, 9, all);
  }
  void i32s(const std::string& key, const std::vector<std::int32_t>& values) {
    std::string all = bytes_of(std::uint32_t{5}, std::uint64_t{values.size()});
    for (const std::int32_t value : values) append(all, value);
    entry(key, 9, all);
  }
  void entry(const std::string& key, std::uint32_t type, const std::string& value) {
    metadata_ += text(key) + bytes_of(type) + value;
    ++entries_;
  }

  /// shape: innermost first.
  void tensor(const std::string& name, const std::vector<std::uint64_t>& shape, std::uint32_t type,
              const std::string& data) {
    infos_ += text(name) + bytes_of(static_cast<std::uint32_t>(shape.size()));
    for (const std::uint64_t extent : shape) append(infos_, extent);
    infos_ += bytes_of(type, std::uint64_t{data_.size()});
    data_ += data;
    ++tensors_;
    last_padding_ = padding(data_.size());
    data_.append(last_padding_, '\0');
  }
  void tensor(const std::string& name, const std::vector<std::uint64_t>& shape,
              const std::vector<float>& elements) {
    std::string data;
    for (const float x : elements) append(data, x);
    tensor(name, shape, 0, data);
  }

  /// The file, which ends with the last tensor's last byte.
  [[nodiscard]] std::string bytes() const {
    std::string result = "GGUF" + bytes_of(version, tensors_, entries_) + metadata_ + infos_;
    result.append(padding(result.size()), '\0');
    return result + data_.substr(0, data_.size() - last_padding_);
  }

 private:
  static std::string text(std::string_view value) {
    return bytes_of(std::uint64_t{value.size()}) + std::string(value);
  }
  [[nodiscard]] std::size_t padding(std::size_t size) const {
    return (alignment - size % alignment) % alignment;
  }

  std::string metadata_, infos_, data_;
  std::uint64_t entries_ = 0, tensors_ = 0;
  std::size_t last_padding_ = 0;
};
