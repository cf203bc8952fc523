// AMX tiles of bfloat16 without such a processor, for tests only: part of emulate_avx512.hpp. The
// tiles are arrays, and whatever the processor would answer with a fault ends the program: tiles
// that the operating system was not asked for, that are not configured, or that do not fit
// together.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace focus_test::amx {

inline std::atomic<bool> permitted = false;

/// The one call of the operating system that the library makes; others are the standard library's.
template <class... Arguments>
long system_call(long number, Arguments... arguments) {
  if (number != SYS_arch_prctl) return ::syscall(number, arguments...);
  const long given[] = {(long)arguments...};
  if (sizeof...(arguments) != 2 || given[0] != 0x1023 || given[1] != 18) return -1;
  permitted = true;
  return 0;
}

struct tile {
  int rows = 0, row_bytes = 0;  // none: not configured
  std::uint8_t data[16][64] = {};
};
inline thread_local tile tiles[8];

/// Instructions of the calling thread so far: what a kernel costs where no processor tells.
struct tile_counts {
  std::int64_t zeros = 0, loads = 0, stream_loads = 0, stores = 0, products = 0;
};
inline thread_local tile_counts counts;

[[noreturn]] inline void fault(const char* what) {
  std::fprintf(stderr, "emulated AMX: %s\n", what);
  std::abort();
}

inline tile& configured(int number) {
  if (number < 0 || number >= 8 || tiles[number].rows == 0) fault("a tile is not configured");
  return tiles[number];
}

inline void release() {
  for (tile& t : tiles) t = tile{};
}

inline void load_config(const void* from) {
  if (!permitted) fault("the operating system was not asked for tiles");
  std::uint8_t bytes[64];
  std::memcpy(bytes, from, sizeof bytes);
  if (reinterpret_cast<std::uintptr_t>(from) % 64 != 0) fault("a configuration is not aligned");
  for (int at = 2; at < 64; ++at) {
    const bool used = (at >= 16 && at < 32) || (at >= 48 && at < 56);
    if (!used && bytes[at] != 0) fault("a reserved byte of a configuration is not 0");
  }
  if (bytes[0] != 1 || bytes[1] != 0) fault("not palette 1 from row 0 on");
  release();
  for (int number = 0; number < 8; ++number) {
    tile& t = tiles[number];
    t.row_bytes = bytes[16 + 2 * number] + 256 * bytes[17 + 2 * number];
    t.rows = bytes[48 + number];
    if (t.rows > 16 || t.row_bytes > 64 || (t.rows == 0) != (t.row_bytes == 0))
      fault("a tile has no such shape");
  }
}

inline void clear(int number) {
  std::memset(configured(number).data, 0, sizeof tile::data);
}

inline void zero(int number) {
  ++counts.zeros;
  clear(number);
}

inline void fill(int number, const void* from, long stride) {
  clear(number);
  tile& t = configured(number);
  for (int r = 0; r < t.rows; ++r)
    std::memcpy(t.data[r], static_cast<const char*>(from) + r * stride,
                static_cast<std::size_t>(t.row_bytes));
}

inline void load(int number, const void* from, long stride) {
  ++counts.loads;
  fill(number, from, stride);
}

inline void stream_load(int number, const void* from, long stride) {
  ++counts.stream_loads;
  fill(number, from, stride);
}

inline void store(int number, void* to, long stride) {
  ++counts.stores;
  const tile& t = configured(number);
  for (int r = 0; r < t.rows; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, t.data[r],
                static_cast<std::size_t>(t.row_bytes));
}

/// MXCSR: to nearest, subnormal numbers are zeros, no exceptions.
constexpr unsigned arithmetic_of_tiles = 0x1f80 | 0x8000 | 0x0040;

/// Products of even elements and of odd ones are summed up apart, each in one chain of fused
/// multiply-adds from 0; then both are added up, and that to the sum so far. MXCSR is that of the
/// tiles. Two halves of eight sums each.
__attribute__((noinline)) inline void multiply(tile& c, const tile& a, const tile& b) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  for (int r = 0; r < c.rows; ++r)
    for (int half = 0; half < 64; half += 32) {
      __m256 even = _mm256_setzero_ps(), odd = even;
      for (int k = 0; k < b.rows; ++k) {
        std::uint32_t x;
        std::memcpy(&x, a.data[r] + 4 * k, sizeof x);
        const __m256i x_pair = _mm256_set1_epi32(static_cast<int>(x));
        const __m256i y_pair =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b.data[k] + half));
        even = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x_pair, 16)),
                               _mm256_castsi256_ps(_mm256_slli_epi32(y_pair, 16)), even);
        odd = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x_pair, upper)),
                              _mm256_castsi256_ps(_mm256_and_si256(y_pair, upper)), odd);
      }
      float* sum = reinterpret_cast<float*>(c.data[r] + half);
      _mm256_storeu_ps(sum, _mm256_add_ps(_mm256_loadu_ps(sum), _mm256_add_ps(even, odd)));
    }
}

inline void dot_products(int to, int left, int right) {
  ++counts.products;
  tile &c = configured(to), &a = configured(left), &b = configured(right);
  if (to == left || to == right || left == right) fault("a tile is used twice");
  if (c.rows != a.rows || c.row_bytes != b.row_bytes || a.row_bytes != 4 * b.rows ||
      c.row_bytes != 64)
    fault("tiles do not fit together");
  const unsigned before = _mm_getcsr();
  _mm_setcsr(arithmetic_of_tiles);
  multiply(c, a, b);
  _mm_setcsr(before);
}

/// The 16 floats of `low`, then those of `high`, rounded to nearest, ties to even; subnormal
/// numbers are zeros.
template <class V>
__m512bh round_to_bfloat16(const V& high, const V& low) {
  std::uint32_t from[32];
  std::memcpy(from, &low, 64);
  std::memcpy(from + 16, &high, 64);
  std::uint16_t to[32];
  for (int i = 0; i < 32; ++i) {
    std::uint32_t x = from[i];
    if ((x & 0x7f800000u) == 0)
      x &= 0x80000000u;
    else if ((x & 0x7fffffffu) > 0x7f800000u)
      x |= 0x00400000u;
    else
      x += 0x7fffu + (x >> 16 & 1u);
    to[i] = static_cast<std::uint16_t>(x >> 16);
  }
  __m512bh v;
  std::memcpy(&v, to, sizeof v);
  return v;
}

/// Adds the products of odd elements, then those of even ones, to the sums, in the arithmetic of
/// tiles.
template <class V>
__attribute__((noinline)) V add_dot_products(const V& sums, const __m512bh& left,
                                             const __m512bh& right) {
  float sum[16];
  std::uint16_t x[32], y[32];
  std::memcpy(sum, &sums, sizeof sum);
  std::memcpy(x, &left, sizeof x);
  std::memcpy(y, &right, sizeof y);
  const auto widen = [](std::uint16_t bits) {
    return _mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(std::uint32_t{bits} << 16)));
  };
  const unsigned before = _mm_getcsr();
  _mm_setcsr(arithmetic_of_tiles);
  for (int i = 0; i < 16; ++i) {
    __m128 total = _mm_set_ss(sum[i]);
    for (const int at : {2 * i + 1, 2 * i}) total = _mm_fmadd_ss(widen(x[at]), widen(y[at]), total);
    sum[i] = _mm_cvtss_f32(total);
  }
  _mm_setcsr(before);
  V v;
  std::memcpy(&v, sum, sizeof v);
  return v;
}

}  // namespace focus_test::amx

#define syscall(...) focus_test::amx::system_call(__VA_ARGS__)
#define _tile_loadconfig(from) focus_test::amx::load_config(from)
#define _tile_release() focus_test::amx::release()
#undef _tile_zero
#define _tile_zero(number) focus_test::amx::zero(number)
#undef _tile_loadd
#define _tile_loadd(number, from, stride) focus_test::amx::load(number, from, stride)
#undef _tile_stream_loadd
#define _tile_stream_loadd(number, from, stride) focus_test::amx::stream_load(number, from, stride)
#undef _tile_stored
#define _tile_stored(number, to, stride) focus_test::amx::store(number, to, stride)
#undef _tile_dpbf16ps
#define _tile_dpbf16ps(to, left, right) focus_test::amx::dot_products(to, left, right)
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh(high, low) focus_test::amx::round_to_bfloat16(high, low)
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sums, left, right) focus_test::amx::add_dot_products(sums, left, right)

#define FOCUS_TEST_COUNTS_TILES 1
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AVX512BF16__ 1
