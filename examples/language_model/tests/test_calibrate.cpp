#include <random>

#include <focus/route.hpp>

#include "calibrate.hpp"
#include "catch.hpp"

namespace test_calibrate {
using namespace language_model;

namespace {

/// Points around `clusters` far apart centres, in turn.
matrix clustered(index_t points, index_t clusters, index_t d_model) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  const auto fill = [&](matrix& m, float scale) {
    for (index_t i = 0; i < m.size(); ++i) m.data()[i] = scale * normal(random);
  };
  matrix centres(clusters, d_model), result(points, d_model);
  fill(centres, 10);
  fill(result, 0.5f);
  for (index_t t = 0; t < points; ++t) result.row(t) += centres.row(t % clusters);
  return result;
}

std::vector<focus::group_mask> route_all(const matrix& hidden, const token_router& by,
                                         focus::similarity metric) {
  std::vector<focus::group_mask> masks(static_cast<std::size_t>(hidden.rows()));
  focus::route(focus::matrix_view<const float>(hidden.data(), {hidden.rows(), hidden.cols()}),
               by.params(metric), by.potentials(), 1, masks);
  return masks;
}

}  // namespace

TEST_CASE("calibrate: clusters become groups") {
  const index_t clusters = 4;
  const matrix hidden = clustered(400, clusters, 12);
  thread_pool pool(2);
  for (const auto metric : {focus::similarity::cosine, focus::similarity::dot}) {
    const token_router by =
        calibrate_layer(hidden, {.groups = clusters, .dimensions = 3, .metric = metric}, pool);
    const auto masks = route_all(hidden, by, metric);
    std::vector<focus::group_mask> of_cluster(masks.begin(), masks.begin() + clusters);
    focus::group_mask all = 0;
    for (const focus::group_mask mask : of_cluster) all |= mask;
    CHECK(all == 0b1111);
    for (std::size_t t = 0; t < masks.size(); ++t) REQUIRE(masks[t] == of_cluster[t % clusters]);
  }
}

TEST_CASE("calibrate: groups are of about the same size, projected hidden states are white") {
  const index_t n = 2000, groups = 8;
  std::mt19937 random(4);
  std::normal_distribution<float> normal;
  matrix hidden(n, 10);
  for (index_t t = 0; t < n; ++t)
    for (index_t e = 0; e < hidden.cols(); ++e)
      hidden(t, e) = 3 + normal(random) * static_cast<float>(e + 1);
  thread_pool pool(2);
  const token_router by = calibrate_layer(hidden, {.groups = groups, .dimensions = 5}, pool);
  const matrix projected = (hidden * by.projection).rowwise() + by.bias;
  CHECK(projected.colwise().mean().cwiseAbs().maxCoeff() < 1e-3f);
  const matrix covariance = projected.transpose() * projected / static_cast<float>(n);
  CHECK((covariance - matrix::Identity(5, 5)).cwiseAbs().maxCoeff() < 1e-3f);

  std::vector<index_t> sizes(static_cast<std::size_t>(groups));
  for (const focus::group_mask mask : route_all(hidden, by, focus::similarity::cosine))
    ++sizes[static_cast<std::size_t>(std::countr_zero(mask))];
  for (const index_t size : sizes) {
    CHECK(size > n / groups / 2);
    CHECK(size < n / groups * 2);
  }
}

TEST_CASE("calibrate: the same on any number of threads, another for another seed") {
  const matrix hidden = clustered(300, 20, 8);
  thread_pool one(1), three(3);
  const calibration_options options{.groups = 4, .dimensions = 6, .restarts = 1};
  const token_router a = calibrate_layer(hidden, options, one),
                     b = calibrate_layer(hidden, options, three);
  CHECK(a.projection == b.projection);
  CHECK(a.centroids == b.centroids);
  CHECK(a.log_group_scale == b.log_group_scale);
  calibration_options other = options;
  other.seed = 2;
  CHECK(calibrate_layer(hidden, other, one).centroids != a.centroids);
}

TEST_CASE("calibrate: directions in which nothing varies are left out") {
  matrix hidden = clustered(100, 4, 6);
  hidden.rightCols(4).setConstant(2);
  thread_pool pool(1);
  const token_router by = calibrate_layer(hidden, {.groups = 2, .dimensions = 4}, pool);
  CHECK(by.projection.allFinite());
  CHECK(by.centroids.allFinite());
  CHECK(by.log_group_scale.allFinite());
  CHECK(by.projection.rightCols(2).isZero());
}

}  // namespace test_calibrate
