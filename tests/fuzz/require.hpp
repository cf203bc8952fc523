// What must hold in a fuzzer, and what a parser may say.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "mapped_file.hpp"

/// Ends the program, as libFuzzer wants it, when the condition does not hold.
inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

/// Calls read(), which may throw a file_error of one line that names the file, and nothing else.
template <class Read>
void may_refuse(const std::string& path, Read&& read) {
  try {
    read();
  } catch (const language_model::file_error& error) {
    const std::string message = error.what();
    require(message.starts_with(path + ": "), "a message starts with the file's name");
    require(message.find('\n') == std::string::npos, "a message is one line");
    require(message.size() < 1000, "a message is short");
  }
}
