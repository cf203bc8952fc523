// One function for each instruction set, each in a translation unit of its own.
#pragma once

#include <vector>

namespace focus_test {

struct attended {
  int vector_width = 0;
  std::vector<float> dense, sparse;
};

attended attend_generic();
attended attend_avx2();

}  // namespace focus_test
