// How bad arguments are reported: before anything is written, with the argument's name, what was
// expected and what came.
#pragma once

#include <concepts>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "focus/config.hpp"

namespace focus {
inline namespace FOCUS_ABI {

/// Thrown for every bad argument. what() reads "focus::attention: window: expected at least -1, got
/// -7".
class invalid_argument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

namespace detail {

/// Throws invalid_argument, or hands the text to FOCUS_PANIC when exceptions are off.
[[noreturn]] FOCUS_NOINLINE inline void raise_invalid_argument(const std::string& text) {
#if FOCUS_HAS_EXCEPTIONS
  throw invalid_argument(text);
#else
#if defined(FOCUS_PANIC)
  FOCUS_PANIC(text.c_str());
#else
  std::fprintf(stderr, "%s\n", text.c_str());
#endif
  std::abort();
#endif
}

inline std::string describe(const std::string& text) {
  return text;
}
inline std::string describe(const char* text) {
  return text;
}
template <std::integral Integer>
std::string describe(Integer value) {
  return std::to_string(value);
}
template <std::floating_point F>
std::string describe(F value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", static_cast<double>(value));
  return text;
}

/// Composes the message. Kept out of line: the good path pays for one comparison only.
template <class Expected, class Got>
[[noreturn]] FOCUS_NOINLINE void fail_argument(const char* function, const char* argument,
                                               const Expected& expected, const Got& got) {
  raise_invalid_argument(std::string("focus::") + function + ": " + argument + ": expected " +
                         describe(expected) + ", got " + describe(got));
}

template <class Expected, class Got>
FOCUS_ALWAYS_INLINE void require(bool holds, const char* function, const char* argument,
                                 const Expected& expected, const Got& got) {
  if (!holds) fail_argument(function, argument, expected, got);
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
