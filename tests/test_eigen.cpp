// Eigen's types as arguments: what they are as views, and the library called with them.
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include <Eigen/Core>

#include "catch.hpp"
#include "focus/centroids.hpp"
#include "focus/centroids_backward.hpp"
#include "focus/eigen.hpp"
#include "focus/route.hpp"
#include "focus/sinkhorn.hpp"
#include "focus/sinkhorn_backward.hpp"
#include "focus/top_k.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"

namespace {

using focus::index_t;
using row_major = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using column_major = Eigen::MatrixXf;
using strides = std::array<index_t, 2>;

template <class X>
constexpr bool is_mutable = focus::mutable_tensor_like<X, 2>;

static_assert(focus::tensor_like<row_major, 2> && is_mutable<row_major>);
static_assert(focus::tensor_like<const row_major, 2> && !is_mutable<const row_major>);
static_assert(!focus::tensor_like<row_major, 3>);
static_assert(is_mutable<Eigen::Map<row_major>> && !is_mutable<Eigen::Map<const row_major>>);
static_assert(is_mutable<Eigen::Ref<row_major>> && !is_mutable<Eigen::Ref<const row_major>>);
static_assert(is_mutable<Eigen::Matrix<focus::bfloat16, 3, 4, Eigen::RowMajor>>);
static_assert(is_mutable<Eigen::Array<double, Eigen::Dynamic, 5, Eigen::RowMajor>>);
static_assert(focus::tensor_like<Eigen::Transpose<column_major>, 2>);
static_assert(is_mutable<Eigen::RowVectorXf> && is_mutable<Eigen::VectorXf>);
static_assert(focus::span_like<Eigen::VectorXf, float> &&
              focus::span_like<Eigen::VectorXd, double>);
static_assert(focus::scalar<Eigen::half> && focus::scalar<Eigen::bfloat16>);

template <class X>
auto view_of(X&& x) {
  return focus::detail::as_view(x);
}

}  // namespace

TEST_CASE("eigen: a matrix is a view of its elements") {
  row_major m(3, 4);
  const auto view = view_of(m);
  CHECK(view.data() == m.data());
  CHECK(view.extents() == strides{3, 4});
  CHECK(view.strides() == strides{4, 1});
  view(1, 2) = 7;
  CHECK(m(1, 2) == 7);
  const row_major& read_only = m;
  static_assert(std::is_same_v<decltype(view_of(read_only)), focus::matrix_view<const float>>);
  CHECK(view_of(read_only)(1, 2) == 7);
}

TEST_CASE("eigen: blocks, maps and references keep their outer stride") {
  row_major m = row_major::Random(6, 8);
  const auto block = view_of(m.block(1, 2, 3, 4));
  CHECK(block.data() == &m(1, 2));
  CHECK(block.extents() == strides{3, 4});
  CHECK(block.strides() == strides{8, 1});
  CHECK(view_of(m.topRows(2)).strides() == strides{8, 1});
  const Eigen::Ref<row_major> ref = m.leftCols(3);
  CHECK(view_of(ref).strides() == strides{8, 1});
  const Eigen::Map<row_major, Eigen::Unaligned, Eigen::OuterStride<>> map(m.data(), 3, 4,
                                                                          Eigen::OuterStride<>(16));
  CHECK(view_of(map).strides() == strides{16, 1});
  CHECK(view_of(m.row(2)).extents() == strides{1, 8});
  CHECK(view_of(m.row(2)).data() == &m(2, 0));
}

TEST_CASE("eigen: the transpose of a column-major matrix") {
  column_major m = column_major::Random(4, 3);
  const auto view = view_of(m.transpose());
  CHECK(view.extents() == strides{3, 4});
  for (index_t i = 0; i < 3; ++i)
    for (index_t j = 0; j < 4; ++j) CHECK(view(i, j) == m(j, i));
}

TEST_CASE("eigen: vectors are matrices of one row or one column") {
  Eigen::RowVectorXf row(5);
  CHECK(view_of(row).extents() == strides{1, 5});
  Eigen::VectorXf column(5);
  CHECK(view_of(column).extents() == strides{5, 1});
  row_major m = row_major::Random(4, 6);
  const auto strided = view_of(m.col(2));  // its inner stride is a row stride
  CHECK(strided.strides() == strides{6, 1});
  for (index_t i = 0; i < 4; ++i) CHECK(strided(i, 0) == m(i, 2));
}

TEST_CASE("eigen: an inner stride other than 1 is refused") {
  row_major m = row_major::Random(4, 6);
  using strided =
      Eigen::Map<row_major, Eigen::Unaligned, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>>;
  CHECK_THROWS_AS(
      view_of(strided(m.data(), 2, 3, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>(6, 2))),
      focus::invalid_argument);
  CHECK_NOTHROW(
      view_of(strided(m.data(), 2, 3, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>(6, 1))));
}

TEST_CASE("eigen: empty matrices") {
  row_major none(0, 4);
  CHECK(view_of(none).extents() == strides{0, 4});
  CHECK(view_of(row_major()).empty());
}

TEST_CASE("to_eigen: a map of the view's elements") {
  std::vector<float> memory(40);
  for (std::size_t x = 0; x < 40; ++x) memory[x] = static_cast<float>(x);
  const focus::matrix_view<float> view(memory.data() + 1, {3, 4}, {10, 1});
  auto map = focus::to_eigen(view);
  CHECK(map.rows() == 3);
  CHECK(map.cols() == 4);
  for (index_t i = 0; i < 3; ++i)
    for (index_t j = 0; j < 4; ++j) CHECK(map(i, j) == view(i, j));
  map(2, 3) = -1;
  CHECK(view(2, 3) == -1);
  const auto read_only = focus::to_eigen(focus::matrix_view<const float>(view));
  static_assert(!std::is_assignable_v<decltype(read_only(0, 0)), float>);
  CHECK(read_only.sum() == map.sum());
  // Any stride, and back again.
  const focus::matrix_view<float> upside_down(memory.data() + 30, {3, 4}, {-10, 1});
  const auto flipped = focus::to_eigen(upside_down);
  for (index_t i = 0; i < 3; ++i) CHECK(flipped(i, 1) == upside_down(i, 1));
  CHECK(view_of(flipped).strides() == strides{-10, 1});
  const auto repeated = focus::to_eigen(focus::matrix_view<float>(memory.data(), {3, 4}, {0, 1}));
  CHECK(repeated(2, 1) == repeated(0, 1));
}

TEST_CASE("eigen: the library called with Eigen's types gives what it gives with views") {
  const index_t n = 37, d_model = 12, groups = 5;
  const row_major hidden = row_major::Random(n, d_model),
                  projection = row_major::Random(d_model, 4),
                  centroids = row_major::Random(groups, 4);
  const Eigen::VectorXf bias = Eigen::VectorXf::Random(4);
  const focus::centroid_params<float> params{
      {projection.data(), {d_model, 4}}, {centroids.data(), {groups, 4}}, {bias.data(), 4}};
  row_major scores(n, groups), assignment(n, groups), again(n, groups);
  Eigen::VectorXf potentials(groups);
  focus::centroid_scores(hidden, params, scores);
  CHECK((((hidden * projection).rowwise() + bias.transpose()) * centroids.transpose() - scores)
            .cwiseAbs()
            .maxCoeff() < 1e-5f);
  focus::sinkhorn(scores, assignment, potentials);
  CHECK((assignment.rowwise().sum().array() - 1).abs().maxCoeff() < 1e-6f);
  CHECK(std::abs(potentials.sum()) < 1e-5f);
  focus::assign_groups(Eigen::Ref<row_major>(scores), potentials,
                       Eigen::Map<row_major>(again.data(), n, groups));
  CHECK(again == assignment);
  std::vector<focus::group_mask> masks(static_cast<std::size_t>(n)), by_views(masks);
  focus::top_k_groups(assignment, 2, masks);
  focus::route(hidden, params, potentials, 2, masks);
  focus::route(focus::matrix_view<const float>(hidden.data(), {n, d_model}), params,
               std::span<const float>(potentials.data(), static_cast<std::size_t>(groups)), 2,
               by_views);
  CHECK(masks == by_views);

  // And back; where scores are products, the gradients are products too.
  const row_major dassignment = row_major::Random(n, groups);
  row_major dscores(n, groups), assigned(n, groups), dhidden(n, d_model), dprojection(d_model, 4),
      dcentroids(groups, 4);
  Eigen::VectorXf dbias(4), dpotentials(groups);
  focus::sinkhorn_backward(scores, assignment, potentials, dassignment, dscores);
  CHECK(dscores.colwise().sum().cwiseAbs().maxCoeff() < 1e-4f);
  focus::assign_groups_backward(scores, potentials, assignment, dassignment, assigned, dpotentials);
  CHECK((assigned.colwise().sum() * 0.1f - dpotentials.transpose()).cwiseAbs().maxCoeff() < 1e-4f);
  focus::centroid_scores_backward(hidden, params, dassignment, dhidden, dprojection, dbias,
                                  dcentroids);
  const row_major dprojected = dassignment * centroids;
  CHECK((dhidden - dprojected * projection.transpose()).cwiseAbs().maxCoeff() < 1e-4f);
  CHECK((dprojection - hidden.transpose() * dprojected).cwiseAbs().maxCoeff() < 1e-4f);
  CHECK((dbias.transpose() - dprojected.colwise().sum()).cwiseAbs().maxCoeff() < 1e-4f);
  CHECK((dcentroids -
         dassignment.transpose() * ((hidden * projection).rowwise() + bias.transpose()).matrix())
            .cwiseAbs()
            .maxCoeff() < 1e-4f);

  // Into a part of a larger matrix.
  row_major all = row_major::Constant(n, groups + 2, 99.0f);
  focus::centroid_scores(hidden, params, all.middleCols(1, groups));
  CHECK(all.middleCols(1, groups) == scores);
  CHECK((all.col(0).array() == 99.0f).all());
  CHECK((all.col(groups + 1).array() == 99.0f).all());

  // Tokens as the columns of a column-major matrix.
  const column_major tokens = hidden.transpose();
  focus::centroid_scores(tokens.transpose(), params, again);
  CHECK(again == scores);
}

TEST_CASE("eigen: its 16-bit types are storage types") {
  const auto check = []<class T>(T) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const auto pattern = static_cast<std::uint16_t>(bits);
      const T x = Eigen::numext::bit_cast<T>(pattern);
      const float widened = focus::scalar_traits<T>::to_accumulator(x);
      const T back = focus::scalar_traits<T>::from_accumulator(widened);
      const bool same = std::isnan(widened)
                            ? std::isnan(static_cast<float>(back))
                            : Eigen::numext::bit_cast<std::uint16_t>(back) == pattern;
      if (!same) FAIL("pattern " << bits);
    }
  };
  check(Eigen::half{});
  check(Eigen::bfloat16{});
  using half_matrix = Eigen::Matrix<Eigen::half, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const half_matrix hidden = half_matrix::Random(9, 20);
  const row_major projection = row_major::Random(20, 4), centroids = row_major::Random(3, 4);
  const focus::centroid_params<float> params{{projection.data(), {20, 4}},
                                             {centroids.data(), {3, 4}}};
  row_major scores(9, 3), expected(9, 3);
  focus::centroid_scores(hidden, params, scores);
  const row_major widened = hidden.cast<float>();
  focus::centroid_scores(widened, params, expected);
  CHECK(scores == expected);
}
