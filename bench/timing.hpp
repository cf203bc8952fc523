// How time is taken on a machine that others use too.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <ctime>
#include <vector>

namespace bench {

/// The processor time that the program has taken, in seconds.
inline double cpu_seconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

/// Seconds since its making: processor time for one thread, so that other programs on the machine
/// do not count; the wall clock's for more.
class stopwatch {
 public:
  explicit stopwatch(bool one_thread) : one_thread_(one_thread), start_(now()) {}
  double seconds() const { return now() - start_; }

 private:
  double now() const {
    if (one_thread_) return cpu_seconds();
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(time).count();
  }

  bool one_thread_;
  double start_;
};

/// Seconds that each of `calls` calls takes.
template <class F>
double seconds_a_call(long calls, bool one_thread, F&& call) {
  const stopwatch time(one_thread);
  for (long c = 0; c < calls; ++c) call();
  return time.seconds() / static_cast<double>(calls);
}

/// Calls to be timed together, so that they take so many seconds.
template <class F>
long calls_to_time(bool one_thread, double seconds, F&& call) {
  for (long calls = 1;; calls *= 2)
    if (seconds_a_call(calls, one_thread, call) * static_cast<double>(calls) >= seconds)
      return calls;
}

/// The middle value, or the mean of the two in the middle.
inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return 0.5 * (values[(n - 1) / 2] + values[n / 2]);
}

}  // namespace bench
