// Each public function for each storage type: nothing is left for which no compiler has been asked
// what it thinks of it.
#include <cstdio>

#include "every_function.hpp"

int main() {
  const focus::serial_executor exec;
  const double kept = every_function::call<float>(exec) + every_function::call<double>(exec) +
                      every_function::call<focus::bfloat16>(exec) +
                      every_function::call<focus::float16>(exec);
  std::printf("%g\n", kept);
  return kept > 0 ? 0 : 1;
}
