#include "mapped_file.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace language_model {

mapped_file::mapped_file(const std::string& path) : path_(path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) throw file_error(path, std::string("cannot open: ") + std::strerror(errno));
  struct stat status {};
  const char* problem = nullptr;
  if (::fstat(descriptor, &status) != 0) {
    problem = std::strerror(errno);
  } else if (!S_ISREG(status.st_mode)) {
    problem = "not a regular file";
  } else if (status.st_size > 0) {
    const auto size = static_cast<std::size_t>(status.st_size);
    void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (address == MAP_FAILED)
      problem = std::strerror(errno);
    else
      bytes_ = {static_cast<const std::byte*>(address), size};
  }
  ::close(descriptor);
  if (problem != nullptr) throw file_error(path, std::string("cannot read: ") + problem);
}

mapped_file::~mapped_file() {
  // munmap takes a pointer to non-const, though it writes nothing.
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

mapped_file::mapped_file(mapped_file&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

mapped_file& mapped_file::operator=(mapped_file&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

std::string read_file(const std::string& path) {
  const mapped_file file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

namespace {

[[noreturn]] void fail_to_write(const std::string& path) {
  throw file_error(path, std::string("cannot write: ") + std::strerror(errno));
}

bool write_through(const char* path, std::string_view content) {
  std::FILE* file = std::fopen(path, "wb");
  if (file == nullptr) return false;
  const bool written = std::fwrite(content.data(), 1, content.size(), file) == content.size();
  return (std::fclose(file) == 0) && written;
}

/// Where a new file of that name would go: behind symbolic links, if the file is there.
std::string target_of(const std::string& path) {
  char* const resolved = ::realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return path;
  const std::string target = resolved;
  std::free(resolved);
  return target;
}

bool is_special(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode);
}

std::string temporary_name(const std::string& target) {
  return target + "." + std::to_string(::getpid()) + ".part";
}

}  // namespace

void write_file(const std::string& path, std::string_view content) {
  // A device or a pipe is written to, not replaced.
  if (is_special(path)) {
    if (!write_through(path.c_str(), content)) fail_to_write(path);
    return;
  }
  const std::string target = target_of(path), temporary = temporary_name(target);
  if (!write_through(temporary.c_str(), content) ||
      std::rename(temporary.c_str(), target.c_str()) != 0) {
    const int problem = errno;
    ::unlink(temporary.c_str());
    errno = problem;
    fail_to_write(path);
  }
}

void require_writable(const std::string& path) {
  if (path.empty() || is_special(path)) return;
  const std::string temporary = temporary_name(target_of(path));
  if (!write_through(temporary.c_str(), {})) fail_to_write(path);
  ::unlink(temporary.c_str());
}

std::string in_quotes(std::string_view text) {
  constexpr std::size_t longest = 80;
  std::string result = "'";
  for (const char c : text.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      result += c;
    } else {
      char escape[5];
      std::snprintf(escape, sizeof escape, "\\x%02x", unsigned{byte});
      result += escape;
    }
  }
  return result + (text.size() > longest ? "...'" : "'");
}

}  // namespace language_model
