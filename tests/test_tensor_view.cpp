// Views: layout, strides, const-ness, and what counts as a tensor or a span.
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "catch.hpp"
#include "focus/attention.hpp"
#include "focus/error.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace test_tensor_view {
namespace {

using focus::index_t;
using focus::matrix_view;
using focus::tensor_view;

/// A matrix type of an engine's, and how it is seen as a view.
struct engine_matrix {
  std::vector<float> elements;
  index_t rows, columns;
};

static_assert(std::is_convertible_v<tensor_view<float, 3>, tensor_view<const float, 3>>);
static_assert(!std::is_convertible_v<tensor_view<const float, 3>, tensor_view<float, 3>>);
static_assert(!std::is_convertible_v<tensor_view<float, 3>, tensor_view<const double, 3>>);
static_assert(!std::is_convertible_v<tensor_view<float, 3>, tensor_view<const float, 2>>);
static_assert(std::is_trivially_copyable_v<tensor_view<float, 3>>);
static_assert(std::is_same_v<tensor_view<const float, 2>::value_type, float>);
static_assert(std::is_same_v<tensor_view<const float, 2>::element_type, const float>);

static_assert(focus::tensor_like<tensor_view<float, 3>, 3>);
static_assert(focus::tensor_like<const tensor_view<float, 3>&, 3>);
static_assert(!focus::tensor_like<tensor_view<float, 3>, 2>);
static_assert(!focus::tensor_like<std::vector<float>, 1>);
static_assert(focus::mutable_tensor_like<const tensor_view<float, 3>, 3>);
static_assert(!focus::mutable_tensor_like<tensor_view<const float, 3>, 3>);

static_assert(focus::span_like<std::vector<float>, float>);
static_assert(focus::span_like<const std::vector<float>, float>);
static_assert(focus::span_like<std::span<const float>, float>);
static_assert(focus::span_like<std::array<double, 3>, double>);
static_assert(!focus::span_like<std::vector<double>, float>);
static_assert(!focus::span_like<float*, float>);

}  // namespace
}  // namespace test_tensor_view

template <>
struct focus::tensor_traits<test_tensor_view::engine_matrix> {
  using matrix = test_tensor_view::engine_matrix;
  static matrix_view<float> view(matrix& m) { return {m.elements.data(), {m.rows, m.columns}}; }
  static matrix_view<const float> view(const matrix& m) {
    return {m.elements.data(), {m.rows, m.columns}};
  }
};

namespace test_tensor_view {

static_assert(focus::mutable_tensor_like<engine_matrix, 2>);
static_assert(focus::tensor_like<const engine_matrix, 2>);
static_assert(!focus::mutable_tensor_like<const engine_matrix, 2>);

TEST_CASE("tensor_view: a default view is empty") {
  const tensor_view<float, 3> view;
  CHECK(view.data() == nullptr);
  CHECK(view.extents() == std::array<index_t, 3>{0, 0, 0});
  CHECK(view.size() == 0);
  CHECK(view.empty());
}

TEST_CASE("tensor_view: dense is row-major") {
  std::array<int, 24> memory{};
  for (std::size_t x = 0; x < memory.size(); ++x) memory[x] = static_cast<int>(x);
  const tensor_view<int, 3> view(memory.data(), {2, 3, 4});
  CHECK(view.strides() == std::array<index_t, 3>{12, 4, 1});
  CHECK(view.size() == 24);
  CHECK(!view.empty());
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 3; ++j)
      for (int c = 0; c < 4; ++c) CHECK(view(i, j, c) == 12 * i + 4 * j + c);
  CHECK(view.row(1, 2) == memory.data() + 20);
  CHECK(view.extent(1) == 3);
  CHECK(view.stride(0) == 12);
  view(1, 2, 3) = -1;
  CHECK(memory[23] == -1);
}

TEST_CASE("tensor_view: any strides but the last") {
  std::array<int, 24> memory{};
  for (std::size_t x = 0; x < memory.size(); ++x) memory[x] = static_cast<int>(x);
  // [tokens 3, heads 2, d 4] seen as [heads, tokens, d]
  const tensor_view<const int, 3> turned(memory.data(), {2, 3, 4}, {4, 8, 1});
  CHECK(turned(1, 2, 3) == 2 * 8 + 4 + 3);
  // the last row first
  const matrix_view<const int> backwards(memory.data() + 20, {6, 4}, {-4, 1});
  CHECK(backwards(0, 0) == 20);
  CHECK(backwards(5, 3) == 3);
  // one row for all
  const matrix_view<const int> repeated(memory.data() + 8, {100, 4}, {0, 1});
  CHECK(repeated(99, 1) == 9);
  CHECK(repeated.size() == 400);
}

TEST_CASE("tensor_view: extents of more than 32 bits") {
  const index_t large = index_t{1} << 33;
  const tensor_view<char, 2> view(nullptr, {large, 4});
  CHECK(view.size() == large * 4);
  CHECK(view.stride(0) == 4);
  char byte = 0;
  const tensor_view<char, 3> one(&byte, {large, large, 1}, {0, 0, 1});
  CHECK(&one(large - 1, large - 1, 0) == &byte);
}

TEST_CASE("tensor_view: an extent of 0 makes it empty, whatever the others are") {
  CHECK(tensor_view<float, 3>(nullptr, {0, 3, 4}).empty());
  CHECK(tensor_view<float, 3>(nullptr, {2, 3, 0}).empty());
  CHECK(tensor_view<float, 3>(nullptr, {2, 0, 4}, {0, 0, 1}).size() == 0);
}

TEST_CASE("tensor_view: negative extents and other last strides are refused") {
  float x = 0;
  CHECK_THROWS_AS((tensor_view<float, 2>(&x, {-1, 2})), focus::invalid_argument);
  CHECK_THROWS_AS((tensor_view<float, 2>(&x, {1, -2}, {1, 1})), focus::invalid_argument);
  for (const index_t stride : {-1, 0, 2})
    CHECK_THROWS_AS((tensor_view<float, 2>(&x, {1, 2}, {1, stride})), focus::invalid_argument);
  try {
    const tensor_view<float, 2> bad(&x, {3, 2}, {2, 4});
  } catch (const focus::invalid_argument& e) {
    CHECK(std::string(e.what()) ==
          "focus::tensor_view: strides: expected a last stride of 1, got [2, 4]");
  }
}

// Of a dimension of extent 1 no second element is looked for; of an empty view none at all.
TEST_CASE("tensor_view: the strides of extents 0 and 1 have no meaning") {
  std::array<float, 320> memory{};
  for (std::size_t x = 0; x < memory.size(); ++x) memory[x] = static_cast<float>(x);
  const tensor_view<const float, 3> head_dim_1(memory.data(), {1, 40, 1}, {320, 8, 8});
  CHECK(head_dim_1(0, 39, 0) == 312);
  CHECK(head_dim_1.stride(2) == 1);
  for (const index_t stride : {-1, 0, 2, 40}) {
    CHECK(matrix_view<const float>(memory.data(), {40, 1}, {8, stride})(3, 0) == 24);
    CHECK(matrix_view<const float>(nullptr, {0, 5}, {8, stride}).empty());
    CHECK(matrix_view<const float>(nullptr, {5, 0}, {8, stride}).empty());
    CHECK(tensor_view<const float, 3>(nullptr, {2, 0, 4}, {stride, stride, stride}).empty());
  }
  // Head_dim 1 and value_dim 1 in attention, as columns of wider rows.
  std::vector<float> out(40 * 3);
  focus::attention(head_dim_1, head_dim_1, head_dim_1,
                   tensor_view<float, 3>(out.data(), {1, 40, 1}, {7, 3, 3}));
  CHECK(out[0] == 0);  // the first token sees itself
  CHECK(out[3] == Approx(8).epsilon(0.01));
}

TEST_CASE("tensor_view: can be made at compile time") {
  static constexpr std::array<int, 6> memory{0, 1, 2, 3, 4, 5};
  constexpr matrix_view<const int> view(memory.data(), {2, 3});
  static_assert(view(1, 1) == 4);
  static_assert(view.size() == 6);
}

TEST_CASE("by_head: tokens and heads change places, nothing is copied") {
  constexpr index_t tokens = 3, heads = 2, head_dim = 4;
  std::vector<float> data(tokens * heads * head_dim);
  std::iota(data.begin(), data.end(), 0.0f);
  const tensor_view<float, 3> x = focus::by_head(data.data(), {tokens, heads, head_dim});
  CHECK(x.extents() == std::array<index_t, 3>{heads, tokens, head_dim});
  CHECK(x.strides() == std::array<index_t, 3>{head_dim, heads * head_dim, 1});
  CHECK(&x(1, 2, 3) == data.data() + 2 * heads * head_dim + head_dim + 3);

  // Of a buffer in which a token has Q, K and V one after the other: K.
  const std::vector<float> fused(tokens * 3 * heads * head_dim);
  const tensor_view<const float, 3> k(fused.data() + heads * head_dim, {tokens, heads, head_dim},
                                      {3 * heads * head_dim, head_dim, 1});
  CHECK(&focus::by_head(k)(1, 2, 3) == &k(2, 1, 3));
  CHECK(focus::by_head<float>(nullptr, {0, heads, head_dim}).empty());

  // Of a batch.
  const tensor_view<const float, 4> batch(fused.data(), {tokens, 3, heads, head_dim});
  CHECK(focus::by_head(batch).extents() == std::array<index_t, 4>{tokens, heads, 3, head_dim});
  CHECK(&focus::by_head(batch)(2, 1, 0, 3) == &batch(2, 0, 1, 3));
  CHECK_THROWS_AS(focus::by_head(data.data(), {-1, heads, head_dim}), focus::invalid_argument);
}

TEST_CASE("tensor_traits: a type of the user's is seen as a view") {
  engine_matrix m{{1, 2, 3, 4, 5, 6}, 2, 3};
  CHECK(focus::detail::as_view(m)(1, 0) == 4);
  const engine_matrix& read_only = m;
  const auto view = focus::detail::as_const_view(read_only);
  static_assert(std::is_same_v<decltype(view), const matrix_view<const float>>);
  CHECK(view(0, 2) == 3);
}

TEST_CASE("as_span: contiguous ranges, with their const-ness") {
  std::vector<float> v{1, 2, 3};
  const std::vector<float>& read_only = v;
  static_assert(std::is_same_v<decltype(focus::detail::as_span(v)), std::span<float>>);
  static_assert(
      std::is_same_v<decltype(focus::detail::as_span(read_only)), std::span<const float>>);
  CHECK(focus::detail::as_span(v).size() == 3);
  CHECK(focus::detail::as_span(std::span(v).subspan(1)).data() == v.data() + 1);
}

TEST_CASE("require_shape, require_data and require_length say what they expected") {
  const auto text_of = [](auto&& f) {
    try {
      f();
    } catch (const focus::invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  std::array<float, 6> memory{};
  const matrix_view<const float> view(memory.data(), {2, 3});
  CHECK(text_of([&] { focus::detail::require_shape(view, {2, 3}, "f", "x"); }).empty());
  CHECK(text_of([&] {
          focus::detail::require_shape(view, {3, 2}, "f", "x");
        }) == "focus::f: x: expected shape [3, 2], got [2, 3]");
  CHECK(text_of([&] { focus::detail::require_data(view, "f", "x"); }).empty());
  CHECK(text_of([&] { focus::detail::require_data(matrix_view<float>(), "f", "x"); }).empty());
  CHECK(text_of([&] {
          focus::detail::require_data(matrix_view<float>(nullptr, {1, 1}), "f", "x");
        }) == "focus::f: x: expected data, got a null pointer");
  CHECK(text_of([&] { focus::detail::require_length(4, 4, "f", "x"); }).empty());
  CHECK(text_of([&] { focus::detail::require_length(3, 4, "f", "x"); }) ==
        "focus::f: x: expected length 4, got 3");
}

}  // namespace test_tensor_view
