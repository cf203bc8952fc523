// What decode_attention is given of a sequence.
#pragma once

#include <concepts>
#include <span>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/kv_cache.hpp"
#include "focus/options.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {

/// One of many sequences that decode_attention computes in one call: the arguments of a call for it
/// alone.
template <class T, class TQ, class TOut = TQ, class TLse = float>
struct decode_sequence {
  tensor_view<const TQ, 3> q;               ///< [heads, m, head_dim], the last m positions
  std::span<const group_mask> query_masks;  ///< [m]
  const kv_cache<T>* cache = nullptr;
  tensor_view<TOut, 3> out;    ///< [heads, m, value_dim]
  matrix_view<TLse> lse = {};  ///< [heads, m] or {}

  using cached_type = T;
  using accumulator = detail::cached_accumulator_t<T>;
  static_assert(scalar<TQ> && scalar<TOut> && std::floating_point<TLse>,
                "focus: q and out are of float, double, focus::bfloat16, focus::float16 or a type "
                "for which focus::scalar_traits is specialised; lse is of float or double.");
  static_assert(std::same_as<accumulator, accumulator_t<TQ>> &&
                    std::same_as<accumulator, accumulator_t<TOut>>,
                "focus: q, the cache and out must all be double, or all be types whose sums are "
                "float.");

  /// Everything but lse is stored in bfloat16, of whatever name, and summed in float.
  static constexpr bool all_bfloat16 = [] {
    if constexpr (scalar<T>)
      return std::same_as<accumulator, float> && detail::is_bfloat16<TQ> &&
             detail::is_bfloat16<T> && detail::is_bfloat16<TOut>;
    else
      return false;
  }();
};

}  // namespace FOCUS_ABI
}  // namespace focus
