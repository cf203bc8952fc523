// A line that tells how far a long command is, shown on a terminal only.
#pragma once

#include <cstdio>
#include <string>
#include <unistd.h>

namespace language_model {

class progress_line {
 public:
  progress_line() = default;
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;
  ~progress_line() { show(""); }

  /// Replaces the line.
  void show(const std::string& text) const {
    if (on_terminal_) std::fprintf(stderr, "\r\033[K%s", text.c_str());
  }

 private:
  bool on_terminal_ = ::isatty(STDERR_FILENO) == 1;
};

}  // namespace language_model
