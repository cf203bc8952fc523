// The text of a refusal: function, argument, what was expected, what came.
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "catch.hpp"
#include "focus/error.hpp"

namespace test_error {
namespace {

template <class Expected, class Got>
std::string text_of(const Expected& expected, const Got& got) {
  try {
    focus::detail::require(false, "attention", "window", expected, got);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "nothing was thrown";
}

}  // namespace

TEST_CASE("invalid_argument is a std::invalid_argument") {
  static_assert(std::is_base_of_v<std::invalid_argument, focus::invalid_argument>);
  CHECK_THROWS_AS(focus::detail::fail_argument("f", "x", "1", 2), focus::invalid_argument);
}

TEST_CASE("a refusal names function, argument, what was expected and what came") {
  CHECK(text_of("at least -1", -7) == "focus::attention: window: expected at least -1, got -7");
  CHECK(text_of(std::string("shape ") + "[1]", "a null pointer") ==
        "focus::attention: window: expected shape [1], got a null pointer");
  CHECK(text_of(3, 4u) == "focus::attention: window: expected 3, got 4");
  CHECK(text_of("above 0", -0.5f) == "focus::attention: window: expected above 0, got -0.5");
  CHECK(text_of("above 0", 1e-300) == "focus::attention: window: expected above 0, got 1e-300");
  CHECK(text_of("a number", std::numeric_limits<double>::infinity()) ==
        "focus::attention: window: expected a number, got inf");
  CHECK(text_of("at most", (std::numeric_limits<long long>::max)()) ==
        "focus::attention: window: expected at most, got 9223372036854775807");
}

TEST_CASE("what holds is not refused") {
  CHECK_NOTHROW(focus::detail::require(true, "attention", "window", "at least -1", -1));
}

}  // namespace test_error
