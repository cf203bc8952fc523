// Files made by the tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <unistd.h>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "mapped_file.hpp"

/// A file of its own name, removed with the object.
class temporary_file {
 public:
  explicit temporary_file(std::string_view content = {}) {
    static int counter = 0;
    path_ =
        (std::filesystem::temp_directory_path() /
         ("language_model_test." + std::to_string(::getpid()) + "." + std::to_string(counter++)))
            .string();
    write(content);
  }
  ~temporary_file() { std::filesystem::remove(path_); }
  temporary_file(const temporary_file&) = delete;
  temporary_file& operator=(const temporary_file&) = delete;

  void write(std::string_view content) const { std::ofstream(path_, std::ios::binary) << content; }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

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

/// Makes GGUF files, good and bad ones alike.
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

/// Calls read(path), which must throw a file_error of one line that names the file and holds all
/// `expected` texts.
template <class Read>
void require_file_error(Read&& read, const std::string& path,
                        const std::vector<std::string>& expected = {}) {
  std::string message;
  try {
    read(path);
  } catch (const language_model::file_error& error) {
    message = error.what();
  }
  INFO(message);
  REQUIRE(message.starts_with(path + ": "));
  REQUIRE(message.find('\n') == std::string::npos);
  for (const std::string& text : expected) {
    INFO("expected: " << text);
    REQUIRE(message.find(text) != std::string::npos);
  }
}

/// Cuts the content at every byte, and damages every byte in several ways. Cut files must give a
/// file_error; damaged ones may be read, or give one.
template <class Read>
void damage_everywhere(const std::string& content, Read&& read) {
  const temporary_file file;
  for (std::size_t length = 0; length < content.size(); ++length) {
    file.write(std::string_view(content).substr(0, length));
    require_file_error(read, file.path());
  }
  for (std::size_t at = 0; at < content.size(); ++at)
    for (const unsigned flip : {0x01u, 0x80u, 0xffu}) {
      std::string damaged = content;
      damaged[at] = static_cast<char>(static_cast<unsigned char>(damaged[at]) ^ flip);
      file.write(damaged);
      try {
        read(file.path());
      } catch (const language_model::file_error& error) {
        const std::string message = error.what();
        INFO(message);
        REQUIRE(message.starts_with(file.path() + ": "));
        REQUIRE(message.find('\n') == std::string::npos);
      }
    }
}
