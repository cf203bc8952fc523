// Eigen's matrices as arguments, and views as Eigen's matrices. Include it beside focus.hpp where
// Eigen is used; no other header needs Eigen.
//
//   Eigen::Matrix<float, Dynamic, Dynamic, RowMajor> scores(n, K), assignment(n, K);
//   Eigen::VectorXf log_group_scale(K);
//   focus::sinkhorn(scores, assignment, log_group_scale);
#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <type_traits>

#include <Eigen/Core>

#include "focus/config.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// A dense expression of Eigen's: Matrix, Array, Map, Ref, Block, Transpose, ...
template <class X>
concept eigen_dense = std::derived_from<X, Eigen::DenseBase<X>>;

/// The elements of an Eigen expression, as they lie in memory.
template <class T, class X>
matrix_view<T> view_eigen(T* data, const X& x) {
  // A column has one element a row, so that any inner stride of it is a row stride.
  constexpr bool column = X::ColsAtCompileTime == 1;
  const index_t row_stride = column ? x.innerStride() : x.outerStride();
  const index_t column_stride = x.innerStride();  // of a single column it has no meaning
  return matrix_view<T>(data, {x.rows(), x.cols()}, {row_stride, column_stride});
}

}  // namespace detail

/// Eigen's row-major matrices with elements in memory (Matrix, Array, Map, Ref, blocks of them, the
/// transpose of a column-major one), with any outer stride, as [rows, columns]. Vectors of either
/// kind are matrices of one row or column. Throws invalid_argument for an inner stride other
/// than 1.
template <detail::eigen_dense X>
struct tensor_traits<X> {
  template <class Self>
  requires std::same_as<std::remove_const_t<Self>, X>
  static auto view(Self& x) {
    static_assert(
        (X::Flags & Eigen::DirectAccessBit) != 0,
        "focus: an Eigen expression without memory of its own must be evaluated first (.eval()).");
    static_assert(
        (X::Flags & Eigen::DirectAccessBit) == 0 || X::IsRowMajor || X::ColsAtCompileTime == 1,
        "focus: an Eigen matrix must be row-major; use Eigen::Matrix<..., Eigen::RowMajor> or pass "
        "its transpose.");
    if constexpr ((X::Flags & Eigen::DirectAccessBit) != 0)
      return detail::view_eigen(x.data(), x);
    else
      return matrix_view<const typename X::Scalar>();
  }
};

/// A view as an Eigen matrix that shares its elements: row-major, with the view's row stride.
template <class T>
auto to_eigen(const matrix_view<T>& view) {
  using matrix =
      Eigen::Matrix<std::remove_const_t<T>, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using qualified = std::conditional_t<std::is_const_v<T>, const matrix, matrix>;
  return Eigen::Map<qualified, Eigen::Unaligned, Eigen::OuterStride<>>(
      view.data(), view.extent(0), view.extent(1), Eigen::OuterStride<>(view.stride(0)));
}

/// Eigen's own 16-bit types are storage types.
template <>
struct scalar_traits<Eigen::bfloat16> {
  using accumulator = float;
  static constexpr storage_format format = storage_format::bfloat16;
  static float to_accumulator(Eigen::bfloat16 x) noexcept { return static_cast<float>(x); }
  static Eigen::bfloat16 from_accumulator(float x) noexcept { return Eigen::bfloat16(x); }
};
template <>
struct scalar_traits<Eigen::half> {
  using accumulator = float;
  static constexpr storage_format format = storage_format::float16;
  static float to_accumulator(Eigen::half x) noexcept { return static_cast<float>(x); }
  static Eigen::half from_accumulator(float x) noexcept { return Eigen::half(x); }
};

}  // namespace FOCUS_ABI
}  // namespace focus
