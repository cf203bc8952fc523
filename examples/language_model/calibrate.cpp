#include "calibrate.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include <Eigen/Eigenvalues>

#include <focus/attention.hpp>
#include <focus/sinkhorn.hpp>

#include "random.hpp"

namespace language_model {

namespace {

/// The projection on the leading principal components, scaled to unit variance, and the bias that
/// takes off the mean.
void fit_projection(const matrix& hidden, index_t dimensions, token_router& result) {
  const row_vector mean = hidden.colwise().mean();
  const matrix centered = hidden.rowwise() - mean;
  const Eigen::MatrixXd covariance =
      (centered.transpose() * centered).cast<double>() / static_cast<double>(hidden.rows());
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(covariance);
  if (solver.info() != Eigen::Success)
    throw std::runtime_error("calibrate: no principal components: are the hidden states finite?");
  // Eigenvalues ascend. Directions in which the sample does not vary carry nothing: they are not
  // blown up to noise.
  const Eigen::VectorXd variance = solver.eigenvalues().tail(dimensions).reverse();
  const Eigen::MatrixXd components =
      solver.eigenvectors().rightCols(dimensions).rowwise().reverse();
  const Eigen::VectorXd scale =
      (variance.array() > 1e-9 * variance[0])
          .select(variance.cwiseMax(std::numeric_limits<double>::min()).cwiseSqrt().cwiseInverse(),
                  0.0);
  result.projection = (components * scale.asDiagonal()).cast<float>();
  result.bias = -mean * result.projection;
}

/// Starting points of k-means by k-means++: each point is drawn with a probability that grows with
/// its distance from those already drawn.
matrix draw_centroids(const matrix& points, index_t groups, std::mt19937_64& random) {
  const index_t n = points.rows();
  matrix centroids(groups, points.cols());
  Eigen::VectorXd distance = Eigen::VectorXd::Ones(n);
  for (index_t g = 0; g < groups; ++g) {
    const double target = uniform(random) * distance.sum();
    index_t drawn = 0;
    for (double sum = distance[0]; sum <= target && drawn + 1 < n;) sum += distance[++drawn];
    centroids.row(g) = points.row(drawn);
    const Eigen::VectorXd from_new =
        (points.rowwise() - centroids.row(g)).rowwise().squaredNorm().cast<double>();
    distance = g == 0 ? from_new : distance.cwiseMin(from_new).eval();
  }
  return centroids;
}

/// Balanced k-means of the rows of `points`. With cosine similarity the points have length 1, and
/// so have the centroids.
class balanced_k_means {
 public:
  balanced_k_means(const matrix& points, const calibration_options& options, thread_pool& pool)
      : points_(points), options_(options), pool_(pool) {
    scores_.resize(points.rows(), options.groups);
    assignment_.resize(points.rows(), options.groups);
  }

  matrix centroids;
  row_vector log_group_scale;

  /// Runs from random starting points; returns the mean score of a point with its group, to be
  /// maximised.
  double run(std::mt19937_64& random) {
    centroids = draw_centroids(points_, options_.groups, random);
    for (int i = 0; i < options_.iterations; ++i) {
      assign(assignment_iterations);
      update_centroids();
    }
    return assign(final_iterations);
  }

 private:
  static constexpr int assignment_iterations = 10, final_iterations = 100;

  double assign(int iterations) {
    scores_.noalias() = points_ * centroids.transpose();
    log_group_scale.resize(options_.groups);
    focus::sinkhorn(view(scores_), view(assignment_),
                    std::span(log_group_scale.data(), static_cast<std::size_t>(options_.groups)),
                    {.temperature = options_.temperature, .iterations = iterations}, pool_);
    return scores_.cwiseProduct(assignment_).cast<double>().sum() /
           static_cast<double>(points_.rows());
  }

  void update_centroids() {
    const row_vector weight = assignment_.colwise().sum();
    const matrix sums = assignment_.transpose() * points_;
    for (index_t g = 0; g < options_.groups; ++g) {
      const float scale =
          options_.metric == focus::similarity::cosine ? sums.row(g).norm() : weight[g];
      if (scale > 0) centroids.row(g) = sums.row(g) / scale;
    }
  }

  static focus::matrix_view<float> view(matrix& m) { return {m.data(), {m.rows(), m.cols()}}; }

  const matrix& points_;
  const calibration_options& options_;
  thread_pool& pool_;
  matrix scores_, assignment_;
};

}  // namespace

token_router calibrate_layer(const matrix& hidden, const calibration_options& options,
                             thread_pool& pool) {
  token_router result;
  fit_projection(hidden, options.dimensions, result);
  matrix points = (hidden * result.projection).rowwise() + result.bias;
  if (options.metric == focus::similarity::cosine) points.rowwise().normalize();

  std::mt19937_64 random(options.seed);
  double best = -std::numeric_limits<double>::infinity();
  balanced_k_means k_means(points, options, pool);
  for (int restart = 0; restart < options.restarts; ++restart) {
    const double score = k_means.run(random);
    if (score <= best) continue;
    best = score;
    result.centroids = k_means.centroids;
    result.log_group_scale = k_means.log_group_scale;
  }
  return result;
}

router calibrate(const model& model, const std::vector<std::span<const token_id>>& windows,
                 const calibration_options& options, thread_pool& pool,
                 const std::function<void(index_t layer)>& progress) {
  const index_t d_model = model.config().d_model;
  index_t sample = 0;
  for (const auto& window : windows)
    sample += std::max<index_t>(static_cast<index_t>(window.size()) - options.sink_tokens, 0);
  if (sample < options.groups)
    throw std::invalid_argument("calibrate: " + std::to_string(sample) +
                                " tokens are too few for " + std::to_string(options.groups) +
                                " groups");
  if (options.dimensions > d_model)
    throw std::invalid_argument("calibrate: " + std::to_string(options.dimensions) +
                                " dimensions are more than the model's " + std::to_string(d_model));

  forward_pass pass(model, pool);
  std::vector<matrix> streams(windows.size());
  for (std::size_t w = 0; w < windows.size(); ++w) pass.embed(windows[w], streams[w]);

  router result;
  result.metric = options.metric;
  result.temperature = options.temperature;
  matrix hidden(sample, d_model);
  // Layer by layer through all windows at once, so that the hidden states of one layer only are
  // kept.
  for (index_t l = 0; l < model.config().layers; ++l) {
    progress(l);
    index_t filled = 0;
    for (matrix& stream : streams)
      pass.layer(l, stream, [&](const attention_call& call) {
        const Eigen::Map<const matrix> rows(call.hidden.data(), call.hidden.extent(0), d_model);
        const index_t kept = std::max<index_t>(rows.rows() - options.sink_tokens, 0);
        hidden.middleRows(filled, kept) = rows.bottomRows(kept);
        filled += kept;
        focus::attention(call.q, call.k, call.v, call.out, focus::full_causal, {}, {}, pool);
      });
    result.layers.push_back({.query = calibrate_layer(hidden, options, pool), .key = std::nullopt});
  }
  return result;
}

}  // namespace language_model
