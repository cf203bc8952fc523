// Attention of any shape and pattern against focus::reference.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "shapes.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string what;
  const std::string wrong = shapes::fault(data, size, what);
  if (wrong.empty()) return 0;
  std::fprintf(stderr, "%s\n  %s\n", what.c_str(), wrong.c_str());
  std::abort();
}
