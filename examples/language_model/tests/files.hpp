// Files made by the tests.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <unistd.h>
#include <vector>

#include "catch.hpp"
#include "gguf_writer.hpp"
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
