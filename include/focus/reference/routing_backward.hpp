// The gradients of routing in their textbook form: each step of the forward pass, differentiated as
// it is written.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "focus/centroid_params.hpp"
#include "focus/checks/routing_arguments.hpp"
#include "focus/config.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/reference/routing.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail::textbook {

/// Through Q = softmax over the rows of X: dX_ig = Q_ig (dQ_ig - sum_h Q_ih dQ_ih).
inline table softmax_rows_backward(const table& q, const table& dq) {
  table dx(q.rows(), q.columns());
  for (index_t i = 0; i < q.rows(); ++i) {
    double mean = 0;
    for (index_t g = 0; g < q.columns(); ++g) mean += q(i, g) * dq(i, g);
    for (index_t g = 0; g < q.columns(); ++g) dx(i, g) = q(i, g) * (dq(i, g) - mean);
  }
  return dx;
}

inline std::vector<double> column_sums(const table& x) {
  std::vector<double> sums(static_cast<std::size_t>(x.columns()));
  for (index_t i = 0; i < x.rows(); ++i)
    for (index_t g = 0; g < x.columns(); ++g) sums[static_cast<std::size_t>(g)] += x(i, g);
  return sums;
}

/// X Y.
inline table product(const table& x, const table& y) {
  table z(x.rows(), y.columns());
  for (index_t i = 0; i < x.rows(); ++i)
    for (index_t c = 0; c < y.columns(); ++c)
      for (index_t t = 0; t < x.columns(); ++t) z(i, c) += x(i, t) * y(t, c);
  return z;
}

inline table transposed(const table& x) {
  table y(x.columns(), x.rows());
  for (index_t i = 0; i < x.rows(); ++i)
    for (index_t c = 0; c < x.columns(); ++c) y(c, i) = x(i, c);
  return y;
}

inline double row_length(const table& x, index_t i) {
  double squares = 0;
  for (index_t c = 0; c < x.columns(); ++c) squares += x(i, c) * x(i, c);
  return std::sqrt(squares);
}

/// The rows of x scaled to length 1; a row of zeros stays as it is.
inline table directions(const table& x) {
  table u = x;
  for (index_t i = 0; i < x.rows(); ++i) {
    const double length = row_length(x, i);
    for (index_t c = 0; !is_zero(length) && c < x.columns(); ++c) u(i, c) /= length;
  }
  return u;
}

/// Through u = x / |x|, row by row: dx = (du - u (u . du)) / |x|; 0 for a row of zeros.
inline table directions_backward(const table& x, const table& du) {
  const table u = directions(x);
  table dx(x.rows(), x.columns());
  for (index_t i = 0; i < x.rows(); ++i) {
    const double length = row_length(x, i);
    if (is_zero(length)) continue;
    double along = 0;
    for (index_t c = 0; c < x.columns(); ++c) along += u(i, c) * du(i, c);
    for (index_t c = 0; c < x.columns(); ++c) dx(i, c) = (du(i, c) - u(i, c) * along) / length;
  }
  return dx;
}

/// Sinkhorn's iterations one by one, all of their potentials kept, and then backwards.
class sinkhorn_history {
 public:
  sinkhorn_history(table log_q, int iterations) : log_q_(std::move(log_q)) {
    const index_t n = log_q_.rows(), groups = log_q_.columns();
    u_.emplace_back(static_cast<std::size_t>(n), 0.0);
    f_.emplace_back(static_cast<std::size_t>(groups), 0.0);
    for (int iteration = 0; iteration < iterations; ++iteration) {
      std::vector<double> u = u_.back(), f = f_.back();
      for (index_t g = 0; g < groups; ++g) {
        const std::optional<double> log_sum = log_sum_exp(
            n, [&](index_t i) { return log_q_(i, g) + u[static_cast<std::size_t>(i)]; });
        if (log_sum) f[static_cast<std::size_t>(g)] = -*log_sum;
      }
      for (index_t i = 0; i < n; ++i)
        u[static_cast<std::size_t>(i)] = -log_sum_exp(groups, [&](index_t g) {
                                            return log_q_(i, g) + f[static_cast<std::size_t>(g)];
                                          }).value_or(log_q_(i, 0));
      u_.push_back(std::move(u));
      f_.push_back(std::move(f));
    }
  }

  /// From d assignment to d log_q.
  [[nodiscard]] table backward(const table& dassignment) const {
    table q = log_q_;
    softmax_rows(q, f_.back());
    table dl = softmax_rows_backward(q, dassignment);
    std::vector<double> df = column_sums(dl);
    for (std::size_t t = f_.size() - 1; t > 0; --t) {
      // f_g = -log sum_i exp(L_ig + u_i), with the row potentials of the iteration before.
      std::vector<double> du(u_[t - 1].size());
      for_each([&](index_t i, index_t g, std::size_t row, std::size_t column) {
        const double share = std::exp(log_q_(i, g) + u_[t - 1][row] + f_[t][column]) * df[column];
        dl(i, g) -= share;
        du[row] -= share;
      });
      // u_i = -log sum_g exp(L_ig + f_g); in the beginning u is 0.
      df.assign(df.size(), 0.0);
      if (t == 1) break;
      for_each([&](index_t i, index_t g, std::size_t row, std::size_t column) {
        const double share = std::exp(log_q_(i, g) + u_[t - 1][row] + f_[t - 1][column]) * du[row];
        dl(i, g) -= share;
        df[column] -= share;
      });
    }
    return dl;
  }

 private:
  template <class F>
  void for_each(F&& f) const {
    for (index_t i = 0; i < log_q_.rows(); ++i)
      for (index_t g = 0; g < log_q_.columns(); ++g)
        f(i, g, static_cast<std::size_t>(i), static_cast<std::size_t>(g));
  }

  table log_q_;
  std::vector<std::vector<double>> u_, f_;  // [iterations + 1]: of nothing yet, of the first, ...
};

}  // namespace detail::textbook

namespace reference {

/// The gradient of sinkhorn, through all iterations.
///
/// @param scores           S [n, K]
/// @param assignment       [n, K]; not read, it is worked out again
/// @param log_group_scale  [K]; not read either
/// @param dassignment      [n, K]
/// @param dscores          [n, K]
template <tensor_like<2> Scores, tensor_like<2> Assignment, class LogGroupScale,
          tensor_like<2> DAssignment, mutable_tensor_like<2> DScores, class Exec = serial_executor>
requires std::floating_point<detail::element_of<Assignment>> &&
    std::floating_point<detail::span_element_of<const LogGroupScale>> &&
    std::floating_point<detail::element_of<DAssignment>>
void sinkhorn_backward(const Scores& scores, const Assignment& assignment,
                       const LogGroupScale& log_group_scale, const DAssignment& dassignment,
                       DScores&& dscores, const sinkhorn_options& options = {},
                       [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::sinkhorn_backward";
  const auto s = detail::as_const_view(scores);
  const auto dq = detail::as_const_view(dassignment);
  const auto out = detail::as_view(dscores);
  detail::check_assignment_gradient_arguments(function, s, detail::as_span(log_group_scale),
                                              detail::as_const_view(assignment), dq, out, options);
  detail::textbook::table log_q(s);
  detail::textbook::divide(log_q, options.temperature);
  const detail::textbook::sinkhorn_history history(std::move(log_q), options.iterations);
  detail::textbook::table ds = history.backward(detail::textbook::table(dq));
  detail::textbook::divide(ds, options.temperature);
  detail::textbook::store(ds, out);
}

/// The gradient of assign_groups, whose potentials are parameters.
///
/// @param scores            S [n, K]
/// @param log_group_scale   [K]
/// @param assignment        [n, K]; not read, it is worked out again
/// @param dassignment       [n, K]
/// @param dscores           [n, K]
/// @param dlog_group_scale  [K] or {}
template <tensor_like<2> Scores, class LogGroupScale, tensor_like<2> Assignment,
          tensor_like<2> DAssignment, mutable_tensor_like<2> DScores,
          class DLogGroupScale = std::span<float>, class Exec = serial_executor>
requires std::floating_point<detail::span_element_of<const LogGroupScale>> &&
    std::floating_point<detail::element_of<Assignment>> &&
    std::floating_point<detail::element_of<DAssignment>> &&
    std::floating_point<detail::span_element_of<DLogGroupScale>> &&
    mutable_span_like<DLogGroupScale, detail::span_element_of<DLogGroupScale>>
void assign_groups_backward(const Scores& scores, const LogGroupScale& log_group_scale,
                            const Assignment& assignment, const DAssignment& dassignment,
                            DScores&& dscores, DLogGroupScale&& dlog_group_scale,
                            const sinkhorn_options& options = {},
                            [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::assign_groups_backward";
  const auto s = detail::as_const_view(scores);
  const auto potentials = detail::as_span(log_group_scale);
  const auto q = detail::as_const_view(assignment);
  const auto dq = detail::as_const_view(dassignment);
  const auto out = detail::as_view(dscores);
  const auto df = detail::as_span(dlog_group_scale);
  detail::check_assignment_gradient_arguments(function, s, potentials, q, dq, out, options);
  detail::check_potential_gradient(function, df, s, potentials, q, dq, out);

  const std::vector<double> f(potentials.begin(), potentials.end());
  detail::textbook::table exact(s);
  detail::textbook::divide(exact, options.temperature);
  detail::textbook::softmax_rows(exact, f);
  detail::textbook::table dx =
      detail::textbook::softmax_rows_backward(exact, detail::textbook::table(dq));
  const std::vector<double> sums = detail::textbook::column_sums(dx);
  for (std::size_t g = 0; g < df.size(); ++g)
    df[g] = static_cast<detail::span_element_of<DLogGroupScale>>(sums[g]);
  detail::textbook::divide(dx, options.temperature);
  detail::textbook::store(dx, out);
}

/// The gradients of centroid_scores.
///
/// @param hidden       H [n, d_model]
/// @param params       W_g, C, bias and the similarity
/// @param dscores      [n, K]
/// @param dhidden      [n, d_model] or {}
/// @param dprojection  [d_model, d_group] or {}
/// @param dbias        [d_group] or {}
/// @param dcentroids   [K, d_group] or {}
template <tensor_like<2> Hidden, scalar T, tensor_like<2> DScores,
          mutable_tensor_like<2> DHidden = matrix_view<float>,
          mutable_tensor_like<2> DProjection = matrix_view<float>, class DBias = std::span<float>,
          mutable_tensor_like<2> DCentroids = matrix_view<float>, class Exec = serial_executor>
requires scalar<detail::span_element_of<DBias>> &&
    mutable_span_like<DBias, detail::span_element_of<DBias>>
void centroid_scores_backward(const Hidden& hidden, const centroid_params<T>& params,
                              const DScores& dscores, DHidden&& dhidden, DProjection&& dprojection,
                              DBias&& dbias, DCentroids&& dcentroids,
                              [[maybe_unused]] Exec&& exec = {}) {
  using detail::textbook::table;
  constexpr const char* function = "reference::centroid_scores_backward";
  const auto h_view = detail::as_const_view(hidden);
  const auto ds_view = detail::as_const_view(dscores);
  const auto to = detail::view_centroid_gradients(dhidden, dprojection, dbias, dcentroids);
  detail::check_centroid_gradient_arguments(function, h_view, params, ds_view, to);

  const table h(h_view), w(params.projection), c(params.centroids), ds(ds_view);
  table z = detail::textbook::product(h, w);
  for (index_t i = 0; i < z.rows(); ++i)
    for (index_t x = 0; x < z.columns() && !params.bias.empty(); ++x)
      z(i, x) += static_cast<double>(detail::widen(params.bias[static_cast<std::size_t>(x)]));

  const bool cosine = params.metric == similarity::cosine;
  const table left = cosine ? detail::textbook::directions(z) : z;
  const table right = cosine ? detail::textbook::directions(c) : c;
  table dz = detail::textbook::product(ds, right);
  table dc = detail::textbook::product(detail::textbook::transposed(ds), left);
  if (cosine) {
    dz = detail::textbook::directions_backward(z, dz);
    dc = detail::textbook::directions_backward(c, dc);
  }

  const auto store = [&](const table& from, const auto& view) {
    if (to.wants(view)) detail::textbook::store(from, view);
  };
  store(detail::textbook::product(dz, detail::textbook::transposed(w)), to.hidden);
  store(detail::textbook::product(detail::textbook::transposed(h), dz), to.projection);
  store(dc, to.centroids);
  const std::vector<double> sums = detail::textbook::column_sums(dz);
  using bias_type = detail::span_element_of<DBias>;
  for (std::size_t x = 0; x < to.bias.size(); ++x)
    to.bias[x] = detail::narrow<bias_type>(static_cast<accumulator_t<bias_type>>(sums[x]));
}

}  // namespace reference
}  // namespace FOCUS_ABI
}  // namespace focus
