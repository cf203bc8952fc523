// 2^(n / 8) for whole n, the coarse part of exp2 where a vector can be looked up in a register.
#pragma once

#include <cstdint>

#include "focus/config.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// A number rounded to eighths, and 2 to the power of it.
template <class Vector>
struct power_of_eighth {
  Vector rounded, power;
};

/// Added to a small float, it leaves a sum whose last bit is worth an eighth: the number is rounded
/// to n / 8, and the last bits are those of the integer n.
inline constexpr float eighths_offset = 0x1.8p20f;

/// 2^(i / 8), i = 0 ... 7. n << 20 adds whole powers to the exponent field, and what is left of n,
/// its last three bits, to the mantissa: that much is taken off here.
inline constexpr std::uint32_t powers_of_eighths[8] = {0x3f800000,
                                                       0x3f8b95c2 - 0x100000,
                                                       0x3f9837f0 - 0x200000,
                                                       0x3fa5fed7 - 0x300000,
                                                       0x3fb504f3 - 0x400000,
                                                       0x3fc5672a - 0x500000,
                                                       0x3fd744fd - 0x600000,
                                                       0x3feac0c7 - 0x700000};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
