// Non-owning strided views, and what makes a user's own matrix type acceptable as one.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#if __has_include(<version>)
#include <version>
#endif
#if defined(__cpp_lib_mdspan)
#include <mdspan>
#endif

#include "focus/config.hpp"
#include "focus/error.hpp"

namespace focus {
inline namespace FOCUS_VERSION_NAMESPACE {
/// Extents, strides and positions: 64 bits, so that products of extents do not overflow.
using index_t = std::int64_t;
}  // namespace FOCUS_VERSION_NAMESPACE
}  // namespace focus

namespace focus {
inline namespace FOCUS_ABI {

template <class T, int Rank>
class tensor_view;
template <class T>
using matrix_view = tensor_view<T, 2>;

namespace detail {

template <std::size_t Rank>
std::string describe_shape(const std::array<index_t, Rank>& extents) {
  std::string text = "[";
  for (std::size_t r = 0; r < Rank; ++r) text += (r ? ", " : "") + std::to_string(extents[r]);
  return text + "]";
}

}  // namespace detail

/// A non-owning view of a tensor in memory: a pointer, an extent and a stride (in elements) for
/// each dimension.
///
/// The last dimension is contiguous (stride 1); the others may have any stride, zero and negative
/// included, so that [tokens, heads, d] storage is viewed as [heads, tokens, d] without a copy. The
/// stride of a dimension of extent 0 or 1 has no meaning, nor has any of an empty view. A view of T
/// converts to a view of const T.
template <class T, int Rank>
class tensor_view {
  static_assert(Rank >= 1, "tensor_view: the rank must be at least 1.");
  static constexpr std::size_t rank_size = static_cast<std::size_t>(Rank);

 public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;
  using extents_type = std::array<index_t, rank_size>;
  static constexpr int rank = Rank;

  /// The empty view: null, all extents 0.
  constexpr tensor_view() noexcept = default;

  /// A dense row-major tensor. Throws invalid_argument when an extent is negative.
  constexpr tensor_view(T* data, std::array<index_t, rank_size> extents)
      : tensor_view(data, extents, dense_strides(extents)) {}

  /// Any strides (in elements), of which the last must be 1 if it means anything. Throws
  /// invalid_argument for another last stride or a negative extent.
  constexpr tensor_view(T* data, std::array<index_t, rank_size> extents,
                        std::array<index_t, rank_size> strides)
      : data_(data), extents_(extents), strides_(strides) {
    for (index_t e : extents)
      if (e < 0)
        detail::fail_argument("tensor_view", "extents", "no negative extent",
                              detail::describe_shape(extents));
    if (strides.back() != 1 && extents.back() > 1 && !empty())
      detail::fail_argument("tensor_view", "strides", "a last stride of 1",
                            detail::describe_shape(strides));
    strides_.back() = 1;
  }

  /// A view of T is a view of const T.
  template <class U>
  requires(!std::same_as<U, T> && std::same_as<const U, T>) constexpr tensor_view(
      const tensor_view<U, Rank>& other) noexcept
      : data_(other.data()), extents_(other.extents()), strides_(other.strides()) {}

  [[nodiscard]] constexpr T* data() const noexcept { return data_; }
  [[nodiscard]] constexpr index_t extent(int r) const noexcept {
    return extents_[static_cast<std::size_t>(r)];
  }
  [[nodiscard]] constexpr index_t stride(int r) const noexcept {
    return strides_[static_cast<std::size_t>(r)];
  }
  [[nodiscard]] constexpr const extents_type& extents() const noexcept { return extents_; }
  [[nodiscard]] constexpr const extents_type& strides() const noexcept { return strides_; }

  /// The number of elements.
  [[nodiscard]] constexpr index_t size() const noexcept {
    index_t n = 1;
    for (index_t e : extents_) n *= e;
    return n;
  }
  [[nodiscard]] constexpr bool empty() const noexcept {
    return std::find(extents_.begin(), extents_.end(), index_t{0}) != extents_.end();
  }

  /// The element at (i, j, ...); not checked.
  template <std::convertible_to<index_t>... Index>
  requires(sizeof...(Index) == rank_size) [[nodiscard]] constexpr T& operator()(
      Index... index) const noexcept {
    return data_[offset(index...)];
  }

  /// Pointer to the first element of the row with the given leading indices; not checked.
  template <std::convertible_to<index_t>... Index>
  requires(sizeof...(Index) == rank_size - 1)
      [[nodiscard]] constexpr T* row(Index... index) const noexcept {
    return data_ + offset(index...);
  }

 private:
  template <class... Index>
  constexpr index_t offset(Index... index) const noexcept {
    index_t sum = 0;
    std::size_t r = 0;
    ((sum += static_cast<index_t>(index) * strides_[r++]), ...);
    return sum;
  }

  static constexpr extents_type dense_strides(const extents_type& extents) noexcept {
    extents_type strides{};
    strides[rank_size - 1] = 1;
    for (std::size_t r = rank_size - 1; r > 0; --r)
      strides[r - 1] = strides[r] * std::max<index_t>(extents[r], 0);
    return strides;
  }

  T* data_ = nullptr;
  extents_type extents_{};
  extents_type strides_ = dense_strides({});
};

/// [tokens, heads, head_dim] in memory, any strides but the last, seen as the [heads, tokens,
/// head_dim] that the attention functions take. Nothing is copied.
template <class T>
[[nodiscard]] constexpr tensor_view<T, 3> by_head(const tensor_view<T, 3>& x) {
  return {
      x.data(), {x.extent(1), x.extent(0), x.extent(2)}, {x.stride(1), x.stride(0), x.stride(2)}};
}
/// The same of a dense tensor: extents are those in memory, {tokens, heads, head_dim}. Throws
/// invalid_argument when one is negative.
template <class T>
[[nodiscard]] constexpr tensor_view<T, 3> by_head(T* data, std::array<index_t, 3> extents) {
  return focus::by_head(tensor_view<T, 3>(data, extents));
}
/// The same of a batch of sequences: [batch, tokens, heads, head_dim] in memory as [batch, heads,
/// tokens, head_dim].
template <class T>
[[nodiscard]] constexpr tensor_view<T, 4> by_head(const tensor_view<T, 4>& x) {
  return {x.data(),
          {x.extent(0), x.extent(2), x.extent(1), x.extent(3)},
          {x.stride(0), x.stride(2), x.stride(1), x.stride(3)}};
}

/// How a type of the user's is seen as a tensor_view: specialise it with a static `view(x)` that
/// returns one. focus/eigen.hpp does so for Eigen's row-major matrices.
template <class X>
struct tensor_traits;

template <class T, int Rank>
struct tensor_traits<tensor_view<T, Rank>> {
  static constexpr tensor_view<T, Rank> view(const tensor_view<T, Rank>& x) noexcept { return x; }
};

#if defined(__cpp_lib_mdspan)
template <class T, class Extents, class Layout>
struct tensor_traits<std::mdspan<T, Extents, Layout>> {
  static constexpr auto view(const std::mdspan<T, Extents, Layout>& x) {
    constexpr std::size_t rank = Extents::rank();
    std::array<index_t, rank> extents{}, strides{};
    for (std::size_t r = 0; r < rank; ++r) {
      extents[r] = static_cast<index_t>(x.extent(r));
      strides[r] = static_cast<index_t>(x.stride(r));
    }
    return tensor_view<T, static_cast<int>(rank)>(x.data_handle(), extents, strides);
  }
};
#endif

namespace detail {

template <class X>
using view_type = decltype(tensor_traits<std::remove_cvref_t<X>>::view(std::declval<X&>()));

template <class X>
concept viewable = requires {
  typename view_type<X>;
};

}  // namespace detail

/// Anything that can be seen as a tensor of the given rank: a tensor_view, a std::mdspan, an Eigen
/// matrix, ...
template <class X, int Rank>
concept tensor_like = detail::viewable<X> &&(detail::view_type<X>::rank == Rank);

/// The same, with elements that may be written.
template <class X, int Rank>
concept mutable_tensor_like =
    tensor_like<X, Rank> && !std::is_const_v<typename detail::view_type<X>::element_type>;

/// A contiguous range (std::vector, std::array, std::span, a C array, an Eigen vector, ...) of
/// elements of type T or const T.
template <class X, class T>
concept span_like = requires(X& x) {
  { std::size(x) } -> std::convertible_to<std::size_t>;
  requires std::same_as<std::remove_cvref_t<decltype(*std::data(x))>, T>;
};

/// The same, with elements that may be written.
template <class X, class T>
concept mutable_span_like = span_like<X, T> && requires(X& x, T value) {
  *std::data(x) = value;
};

namespace detail {

/// The element type of a tensor-like argument, without const.
template <class X>
using element_of = typename view_type<X>::value_type;

template <class X>
constexpr auto as_view(X&& x) {
  return tensor_traits<std::remove_cvref_t<X>>::view(x);
}

/// As as_view, read-only.
template <class X>
constexpr auto as_const_view(X&& x) {
  using view = view_type<X>;
  return tensor_view<const typename view::value_type, view::rank>(detail::as_view(x));
}

template <class X>
using span_element_of = std::remove_cvref_t<decltype(*std::data(std::declval<X&>()))>;

template <class X>
constexpr auto as_span(X&& x) {
  // A column of a row-major Eigen matrix has data() and size() too.
  if constexpr (requires { x.innerStride(); })
    require(x.innerStride() == 1 || x.size() <= 1, "span", "stride", "contiguous elements",
            x.innerStride());
  return std::span(std::data(x), static_cast<std::size_t>(std::size(x)));
}

/// Whether a tensor that may be left out with {} is there.
template <class T, int Rank>
constexpr bool is_given(const tensor_view<T, Rank>& view) noexcept {
  return view.data() != nullptr || !view.empty();
}

/// Whether equal indices name equal offsets in both, which have the same extents.
template <class A, class B, int Rank>
constexpr bool same_offsets(const tensor_view<A, Rank>& a, const tensor_view<B, Rank>& b) noexcept {
  for (int r = 0; r < Rank; ++r)
    if (a.extent(r) > 1 && a.stride(r) != b.stride(r)) return false;
  return true;
}

template <int Rank, class T>
void require_shape(
    const tensor_view<T, Rank>& view,
    const std::type_identity_t<std::array<index_t, static_cast<std::size_t>(Rank)>>& expected,
    const char* function, const char* argument) {
  if (view.extents() != expected)
    fail_argument(function, argument, std::string("shape ") + describe_shape(expected),
                  describe_shape(view.extents()));
}

template <int Rank, class T>
void require_data(const tensor_view<T, Rank>& view, const char* function, const char* argument) {
  require(view.data() != nullptr || view.empty(), function, argument, "data", "a null pointer");
}

inline void require_length(std::size_t length, index_t expected, const char* function,
                           const char* argument) {
  if (static_cast<index_t>(length) != expected)
    fail_argument(function, argument, std::string("length ") + std::to_string(expected), length);
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
