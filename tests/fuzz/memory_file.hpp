// A file of given content that lies in memory, for parsers that take a path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

/// Linux only. Gone with the object.
class memory_file {
 public:
  explicit memory_file(std::span<const std::uint8_t> content)
      : descriptor_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    if (descriptor_ < 0) std::abort();
    for (std::size_t done = 0; done < content.size();) {
      const auto written = ::write(descriptor_, content.data() + done, content.size() - done);
      if (written <= 0) std::abort();
      done += static_cast<std::size_t>(written);
    }
    path_ = "/proc/self/fd/" + std::to_string(descriptor_);
  }
  ~memory_file() { ::close(descriptor_); }
  memory_file(const memory_file&) = delete;
  memory_file& operator=(const memory_file&) = delete;

  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  int descriptor_;
  std::string path_;
};
