// Each public function, for an object of one version of the library.
#include "../compile/every_function.hpp"

double focus_test_one_version() {
  return every_function::call<float>(focus::serial_executor{});
}
