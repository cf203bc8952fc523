// The choice of an instruction set. Compiled for any processor.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "focus_dispatch.h"

namespace {
using kernel = int(const focus_problem*, const float*, const float*, const float*,
                   const std::uint64_t*, const std::uint64_t*, float*, float*, char*, std::size_t);
}  // namespace

extern "C" kernel focus_kernel_generic, focus_kernel_avx2, focus_kernel_avx512;

namespace {

struct instruction_set {
  const char* name;
  kernel* run;
  bool (*is_here)();
};

// Best first. What a set is compiled for and what is asked here are to be the same.
constexpr instruction_set sets[] = {
    {"avx512", focus_kernel_avx512,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
     }},
    {"avx2", focus_kernel_avx2,
     [] {
       return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
     }},
    {"generic", focus_kernel_generic,
     [] {
       return true;
     }},
};

}  // namespace

extern "C" const char* focus_instruction_set(int index) {
  for (const instruction_set& set : sets)
    if (set.is_here() && index-- == 0) return set.name;
  return nullptr;
}

extern "C" int focus_sparse_attention(const char* set, const focus_problem* problem, const float* q,
                                      const float* k, const float* v,
                                      const std::uint64_t* query_masks,
                                      const std::uint64_t* key_masks, float* out, float* lse,
                                      char* message, std::size_t message_size) {
  if (message == nullptr) message_size = 0;
  if (problem == nullptr) {
    if (message_size > 0) std::snprintf(message, message_size, "problem: expected one, got NULL");
    return focus_invalid_argument;
  }
  for (const instruction_set& s : sets)
    if (s.is_here() && (set == nullptr || std::strcmp(s.name, set) == 0))
      return s.run(problem, q, k, v, query_masks, key_masks, out, lse, message, message_size);
  if (message_size > 0)
    std::snprintf(message, message_size,
                  "set: \"%.40s\" is not in this library, or not in this processor", set);
  return focus_invalid_argument;
}
