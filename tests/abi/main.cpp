// Prints a line for each instruction set in the program: its vector width and a hash of the bits of
// its results.
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "attend.hpp"

namespace {

std::uint64_t hash(const std::vector<float>& values) {
  std::uint64_t h = 14695981039346656037u;
  for (float x : values) h = (h ^ std::bit_cast<std::uint32_t>(x)) * 1099511628211u;
  return h;
}

void print(const char* name, const focus_test::attended& a) {
  std::printf("%s %d %016llx %016llx\n", name, a.vector_width,
              static_cast<unsigned long long>(hash(a.dense)),
              static_cast<unsigned long long>(hash(a.sparse)));
}

[[maybe_unused]] bool close(const std::vector<float>& a, const std::vector<float>& b) {
  bool good = a.size() == b.size() && !a.empty();
  for (std::size_t r = 0; good && r < a.size(); ++r) good = std::abs(a[r] - b[r]) <= 1e-5f;
  return good;
}

}  // namespace

int main() {
#if defined(FOCUS_TEST_WITH_GENERIC)
  const focus_test::attended generic = focus_test::attend_generic();
  print("generic", generic);
#endif
#if defined(FOCUS_TEST_WITH_AVX2)
  const focus_test::attended avx2 = focus_test::attend_avx2();
  print("avx2", avx2);
#endif
#if defined(FOCUS_TEST_WITH_GENERIC) && defined(FOCUS_TEST_WITH_AVX2)
  if (!close(generic.dense, avx2.dense) || !close(generic.sparse, avx2.sparse)) {
    std::puts("the two instruction sets differ by more than rounding");
    return 1;
  }
#endif
  return 0;
}
