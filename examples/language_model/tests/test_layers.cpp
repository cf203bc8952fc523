#include <cmath>
#include <random>

#include "catch.hpp"
#include "layers.hpp"

namespace test_layers {
using namespace language_model;

namespace {

matrix random_matrix(index_t rows, index_t columns, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  matrix m(rows, columns);
  for (index_t i = 0; i < m.size(); ++i) m.data()[i] = normal(random);
  return m;
}

}  // namespace

TEST_CASE("rms_norm: by hand") {
  thread_pool pool(1);
  matrix x(2, 2), y;
  x << 3, 4, 0, 0;
  row_vector weight(2);
  weight << 1, 2;
  rms_norm(x, weight, 0.0f, y, pool);
  CHECK(y(0, 0) == Approx(3 / std::sqrt(12.5)));
  CHECK(y(0, 1) == Approx(2 * 4 / std::sqrt(12.5)));
  rms_norm(x, weight, 12.5f, y, pool);
  CHECK(y(0, 0) == Approx(3.0 / 5.0));
  CHECK(y(1, 0) == 0);
}

TEST_CASE("rotary_embedding: interleaved pairs, by hand") {
  thread_pool pool(1);
  // Two heads of 6 elements, of which 4 are rotated: pair 0 by position, pair 1 by position / 10.
  matrix x(3, 12);
  for (index_t t = 0; t < 3; ++t) x.row(t) << 1, 0, 0, 2, 5, 6, 3, 4, 1, 1, 7, 8;
  rotary_embedding(4, 100.0).apply(x, 6, pool);
  CHECK(x(0, 0) == 1);
  CHECK(x(0, 3) == 2);
  for (index_t t = 1; t < 3; ++t) {
    const double a = static_cast<double>(t), b = a / 10;
    CHECK(x(t, 0) == Approx(std::cos(a)));
    CHECK(x(t, 1) == Approx(std::sin(a)));
    CHECK(x(t, 2) == Approx(-2 * std::sin(b)));
    CHECK(x(t, 3) == Approx(2 * std::cos(b)));
    CHECK(x(t, 4) == 5);
    CHECK(x(t, 5) == 6);
    CHECK(x(t, 6) == Approx(3 * std::cos(a) - 4 * std::sin(a)));
    CHECK(x(t, 7) == Approx(3 * std::sin(a) + 4 * std::cos(a)));
    CHECK(x(t, 10) == 7);
  }
}

TEST_CASE("swiglu: by hand") {
  thread_pool pool(1);
  matrix gate(1, 3), up(1, 3);
  gate << 0, 1, -200;
  up << 5, 3, 2;
  swiglu(gate, up, pool);
  CHECK(gate(0, 0) == 0);
  CHECK(gate(0, 1) == Approx(3 / (1 + std::exp(-1.0))));
  CHECK(gate(0, 2) == Approx(0).margin(1e-30));
}

TEST_CASE("linear: sizes beyond one tile, the same bits on any number of threads") {
  const matrix x = random_matrix(300, 37, 1), weight = random_matrix(530, 37, 2);
  matrix first, first_sum;
  for (const index_t threads : {1, 2, 3}) {
    thread_pool pool(threads);
    matrix y, sum = matrix::Ones(300, 530);
    linear(x, weight, y, pool);
    add_linear(x, weight, sum, pool);
    if (threads == 1) {
      first = y;
      first_sum = sum;
      const Eigen::MatrixXd expected = x.cast<double>() * weight.cast<double>().transpose();
      CHECK((y.cast<double>() - expected).cwiseAbs().maxCoeff() < 1e-4);
      CHECK((sum.cast<double>() - expected).cwiseAbs().maxCoeff() < 1 + 1e-4);
    }
    CHECK(y == first);
    CHECK(sum == first_sum);
  }
}

TEST_CASE("cross_entropy: a vocabulary and rows beyond one block") {
  const index_t rows = 131, vocabulary = 5000;
  const matrix x = random_matrix(rows, 8, 3), weight = random_matrix(vocabulary, 8, 4);
  std::vector<std::int32_t> targets;
  for (index_t r = 0; r < rows; ++r)
    targets.push_back(static_cast<std::int32_t>((r * 4999) % vocabulary));
  const Eigen::MatrixXd logits = x.cast<double>() * weight.cast<double>().transpose();
  double expected = 0;
  for (index_t r = 0; r < rows; ++r) {
    const double largest = logits.row(r).maxCoeff();
    expected += largest + std::log((logits.row(r).array() - largest).exp().sum()) -
                logits(r, targets[static_cast<std::size_t>(r)]);
  }
  double first = 0;
  for (const index_t threads : {1, 3}) {
    thread_pool pool(threads);
    const double loss = cross_entropy(x, weight, targets, pool);
    CHECK(loss == Approx(expected).epsilon(1e-5));
    if (threads == 1) first = loss;
    CHECK(loss == first);
  }
}

}  // namespace test_layers
