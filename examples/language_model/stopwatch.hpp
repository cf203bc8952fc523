// Elapsed time.
#pragma once

#include <chrono>

namespace language_model {

class stopwatch {
 public:
  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(clock::now() - start_).count();
  }

 private:
  using clock = std::chrono::steady_clock;
  clock::time_point start_ = clock::now();
};

}  // namespace language_model
