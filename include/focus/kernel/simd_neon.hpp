// The vector layer with NEON on 64-bit Arm: 4 floats or 2 doubles.
#pragma once

#include <arm_neon.h>
#include <cstdint>
#include <cstring>

#include "focus/config.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/scalar.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

template <class A>
struct neon_vector;

template <>
struct neon_vector<float> {
  static constexpr int width = 4;
  float32x4_t v;

  static neon_vector zero() noexcept { return {vdupq_n_f32(0)}; }
  static neon_vector broadcast(float x) noexcept { return {vdupq_n_f32(x)}; }
  static neon_vector load(const float* p) noexcept { return {vld1q_f32(p)}; }
  void store(float* p) const noexcept { vst1q_f32(p, v); }
  friend neon_vector operator+(neon_vector a, neon_vector b) noexcept {
    return {vaddq_f32(a.v, b.v)};
  }
  friend neon_vector operator-(neon_vector a, neon_vector b) noexcept {
    return {vsubq_f32(a.v, b.v)};
  }
  friend neon_vector operator*(neon_vector a, neon_vector b) noexcept {
    return {vmulq_f32(a.v, b.v)};
  }
  friend neon_vector operator/(neon_vector a, neon_vector b) noexcept {
    return {vdivq_f32(a.v, b.v)};
  }
};

template <>
struct neon_vector<double> {
  static constexpr int width = 2;
  float64x2_t v;

  static neon_vector zero() noexcept { return {vdupq_n_f64(0)}; }
  static neon_vector broadcast(double x) noexcept { return {vdupq_n_f64(x)}; }
  static neon_vector load(const double* p) noexcept { return {vld1q_f64(p)}; }
  void store(double* p) const noexcept { vst1q_f64(p, v); }
  friend neon_vector operator+(neon_vector a, neon_vector b) noexcept {
    return {vaddq_f64(a.v, b.v)};
  }
  friend neon_vector operator-(neon_vector a, neon_vector b) noexcept {
    return {vsubq_f64(a.v, b.v)};
  }
  friend neon_vector operator*(neon_vector a, neon_vector b) noexcept {
    return {vmulq_f64(a.v, b.v)};
  }
  friend neon_vector operator/(neon_vector a, neon_vector b) noexcept {
    return {vdivq_f64(a.v, b.v)};
  }
};

using neon_float = neon_vector<float>;
using neon_double = neon_vector<double>;

inline neon_float fma(neon_float a, neon_float b, neon_float c) noexcept {
  return {vfmaq_f32(c.v, a.v, b.v)};
}
inline neon_double fma(neon_double a, neon_double b, neon_double c) noexcept {
  return {vfmaq_f64(c.v, a.v, b.v)};
}

// FMAX and FMIN give NaN where either operand is NaN; a comparison and a selection give b.
inline neon_float maximum(neon_float a, neon_float b) noexcept {
  return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)};
}
inline neon_double maximum(neon_double a, neon_double b) noexcept {
  return {vbslq_f64(vcgtq_f64(a.v, b.v), a.v, b.v)};
}
inline neon_float minimum(neon_float a, neon_float b) noexcept {
  return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)};
}
inline neon_double minimum(neon_double a, neon_double b) noexcept {
  return {vbslq_f64(vcltq_f64(a.v, b.v), a.v, b.v)};
}

inline neon_float zero_where_less(neon_float x, neon_float a, neon_float b) noexcept {
  return {vbslq_f32(vcltq_f32(a.v, b.v), vdupq_n_f32(0), x.v)};
}
inline neon_double zero_where_less(neon_double x, neon_double a, neon_double b) noexcept {
  return {vbslq_f64(vcltq_f64(a.v, b.v), vdupq_n_f64(0), x.v)};
}

inline neon_float round(neon_float x) noexcept {
  return {vrndnq_f32(x.v)};
}
inline neon_double round(neon_double x) noexcept {
  return {vrndnq_f64(x.v)};
}

// n goes straight into the exponent field; of a NaN the conversion leaves 0. The sum is one of
// unsigned numbers: beside a NaN that hid a row's maximum, n may be anything.
inline neon_float scale_by_power(neon_float x, neon_float n) noexcept {
  const uint32x4_t shifted = vshlq_n_u32(vreinterpretq_u32_s32(vcvtq_s32_f32(n.v)), 23);
  return {vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(x.v), shifted))};
}
inline neon_double scale_by_power(neon_double x, neon_double n) noexcept {
  const uint64x2_t shifted = vshlq_n_u64(vreinterpretq_u64_s64(vcvtq_s64_f64(n.v)), 52);
  return {vreinterpretq_f64_u64(vaddq_u64(vreinterpretq_u64_f64(x.v), shifted))};
}

inline neon_float exponent(neon_float x) noexcept {
  const uint32x4_t field =
      vandq_u32(vshrq_n_u32(vreinterpretq_u32_f32(x.v), 23), vdupq_n_u32(0xff));
  return {vsubq_f32(vcvtq_f32_u32(field), vdupq_n_f32(127))};
}
inline neon_double exponent(neon_double x) noexcept {
  const uint64x2_t field =
      vandq_u64(vshrq_n_u64(vreinterpretq_u64_f64(x.v), 52), vdupq_n_u64(0x7ff));
  return {vsubq_f64(vcvtq_f64_u64(field), vdupq_n_f64(1023))};
}
inline neon_float mantissa(neon_float x) noexcept {
  const uint32x4_t kept = vandq_u32(vreinterpretq_u32_f32(x.v), vdupq_n_u32(0x807fffffu));
  return {vreinterpretq_f32_u32(vorrq_u32(kept, vdupq_n_u32(0x3f800000u)))};
}
inline neon_double mantissa(neon_double x) noexcept {
  const uint64x2_t kept = vandq_u64(vreinterpretq_u64_f64(x.v), vdupq_n_u64(0x800fffffffffffffu));
  return {vreinterpretq_f64_u64(vorrq_u64(kept, vdupq_n_u64(0x3ff0000000000000u)))};
}
inline neon_float where_zero(neon_float x, neon_float a, neon_float b) noexcept {
  return {vbslq_f32(vceqzq_f32(x.v), a.v, b.v)};
}
inline neon_double where_zero(neon_double x, neon_double a, neon_double b) noexcept {
  return {vbslq_f64(vceqzq_f64(x.v), a.v, b.v)};
}

/// All bits of each of two 64-bit lanes: sets[l] & with is empty.
inline uint64x2_t disjoint(const std::uint64_t* sets, std::uint64_t with) noexcept {
  return vceqzq_u64(vandq_u64(vld1q_u64(sets), vdupq_n_u64(with)));
}
inline neon_float where_disjoint(const std::uint64_t* sets, std::uint64_t with, neon_float a,
                                 neon_float b) noexcept {
  const uint32x4_t mask =
      vcombine_u32(vmovn_u64(disjoint(sets, with)), vmovn_u64(disjoint(sets + 2, with)));
  return {vbslq_f32(mask, a.v, b.v)};
}
inline neon_double where_disjoint(const std::uint64_t* sets, std::uint64_t with, neon_double a,
                                  neon_double b) noexcept {
  return {vbslq_f64(disjoint(sets, with), a.v, b.v)};
}

inline float reduce_add(neon_float x) noexcept {
  return vaddvq_f32(x.v);
}
inline double reduce_add(neon_double x) noexcept {
  return vaddvq_f64(x.v);
}
inline float reduce_max(neon_float x) noexcept {
  return vmaxvq_f32(x.v);
}
inline double reduce_max(neon_double x) noexcept {
  return vmaxvq_f64(x.v);
}

/// Square transposition of 4 vectors of 4 floats in place.
FOCUS_ALWAYS_INLINE void transpose(neon_float (&r)[4]) noexcept {
  const float32x4x2_t low = vtrnq_f32(r[0].v, r[1].v), high = vtrnq_f32(r[2].v, r[3].v);
  r[0].v = vcombine_f32(vget_low_f32(low.val[0]), vget_low_f32(high.val[0]));
  r[1].v = vcombine_f32(vget_low_f32(low.val[1]), vget_low_f32(high.val[1]));
  r[2].v = vcombine_f32(vget_high_f32(low.val[0]), vget_high_f32(high.val[0]));
  r[3].v = vcombine_f32(vget_high_f32(low.val[1]), vget_high_f32(high.val[1]));
}
/// Square transposition of 2 vectors of 2 doubles in place.
FOCUS_ALWAYS_INLINE void transpose(neon_double (&r)[2]) noexcept {
  const float64x2_t low = vzip1q_f64(r[0].v, r[1].v);
  r[1].v = vzip2q_f64(r[0].v, r[1].v);
  r[0].v = low;
}

/// The sum of each of 4 vectors, in the lane of its number.
FOCUS_ALWAYS_INLINE neon_float add_lanes(const neon_float (&x)[4]) noexcept {
  return {vpaddq_f32(vpaddq_f32(x[0].v, x[1].v), vpaddq_f32(x[2].v, x[3].v))};
}

/// 4 numbers of 8 bits as floats; not one byte more is read.
inline neon_float load_int8(const void* p, neon_float*) noexcept {
  std::uint32_t bits;
  std::memcpy(&bits, p, sizeof bits);
  const int16x8_t words = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bits)));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)))};
}
/// 4 bfloat16 patterns as floats.
inline neon_float load_bfloat16(const void* p, neon_float*) noexcept {
  return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(static_cast<const std::uint16_t*>(p)), 16))};
}
/// 4 floats as bfloat16 patterns, the bits of float_to_bfloat16_bits.
inline void store_bfloat16(neon_float x, void* p) noexcept {
  const uint32x4_t bits = vreinterpretq_u32_f32(x.v);
  const uint32x4_t magnitude = vandq_u32(bits, vdupq_n_u32(0x7fffffff));
  const uint32x4_t nan = vcgtq_u32(magnitude, vdupq_n_u32(0x7f800000));
  const uint32x4_t is_odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), is_odd);
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  vst1_u16(static_cast<std::uint16_t*>(p), vshrn_n_u32(vbslq_u32(nan, quiet, rounded), 16));
}
/// 4 float16 patterns as floats.
inline neon_float load_float16(const void* p, neon_float*) noexcept {
  return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(static_cast<const std::uint16_t*>(p))))};
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
