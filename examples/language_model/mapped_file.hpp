// A file mapped into memory for reading, and what is thrown about files.
#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace language_model {

/// A file that cannot be read, or does not hold what it should. what() is one line that starts with
/// the file's name.
class file_error : public std::runtime_error {
 public:
  file_error(const std::string& path, const std::string& problem)
      : std::runtime_error(path + ": " + problem) {}
};

/// Read-only mapping of a whole file, released with the object.
class mapped_file {
 public:
  /// Throws file_error when the file cannot be opened or is not a regular file.
  explicit mapped_file(const std::string& path);
  ~mapped_file();
  mapped_file(mapped_file&& other) noexcept;
  mapped_file& operator=(mapped_file&& other) noexcept;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
};

/// The whole content of a file. Throws file_error.
std::string read_file(const std::string& path);

/// Writes a file through a temporary one beside it, so that the name never stands for half a file;
/// straight into what is a device or a pipe. Throws file_error.
void write_file(const std::string& path, std::string_view content);

/// Throws file_error where write_file(path, ...) would: to be asked before hours of work. An empty
/// path is none.
void require_writable(const std::string& path);

/// Text from a file, fit to be shown in a message: quoted, shortened, with unprintable bytes as
/// \xNN.
std::string in_quotes(std::string_view text);

}  // namespace language_model
