#include "mapped_file.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
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

void write_file(const std::string& path, std::string_view content) {
  const std::string temporary = path + "." + std::to_string(::getpid()) + ".part";
  const auto fail = [&] {
    const std::string problem = std::string("cannot write: ") + std::strerror(errno);
    ::unlink(temporary.c_str());
    throw file_error(path, problem);
  };
  std::FILE* file = std::fopen(temporary.c_str(), "wb");
  if (file == nullptr) fail();
  const bool written = std::fwrite(content.data(), 1, content.size(), file) == content.size();
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed) fail();
  if (std::rename(temporary.c_str(), path.c_str()) != 0) fail();
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
