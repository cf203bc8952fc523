// Routing in its textbook form: centroid scores, Sinkhorn balancing, top-k groups.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "focus/centroid_params.hpp"
#include "focus/checks/overlap.hpp"
#include "focus/checks/routing_arguments.hpp"
#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail::textbook {

/// A dense matrix in double.
class table {
 public:
  table(index_t rows, index_t columns)
      : rows_(rows), columns_(columns), elements_(static_cast<std::size_t>(rows * columns)) {}

  template <class T>
  explicit table(const matrix_view<const T>& x) : table(x.extent(0), x.extent(1)) {
    for (index_t i = 0; i < rows_; ++i)
      for (index_t g = 0; g < columns_; ++g)
        (*this)(i, g) = static_cast<double>(detail::widen(x(i, g)));
  }

  [[nodiscard]] index_t rows() const { return rows_; }
  [[nodiscard]] index_t columns() const { return columns_; }
  double& operator()(index_t i, index_t g) {
    return elements_[static_cast<std::size_t>(i * columns_ + g)];
  }
  double operator()(index_t i, index_t g) const {
    return elements_[static_cast<std::size_t>(i * columns_ + g)];
  }

 private:
  index_t rows_, columns_;
  std::vector<double> elements_;
};

template <class T>
void store(const table& x, const matrix_view<T>& to) {
  for (index_t i = 0; i < x.rows(); ++i)
    for (index_t g = 0; g < x.columns(); ++g)
      to(i, g) = narrow<T>(static_cast<accumulator_t<T>>(x(i, g)));
}

/// log(sum of exp(term(0)), ..., exp(term(count - 1))); nothing where no term is above -inf.
template <class Term>
std::optional<double> log_sum_exp(index_t count, Term&& term) {
  double largest = lowest<double>;
  for (index_t c = 0; c < count; ++c)
    if (term(c) > largest) largest = term(c);
  double sum = 0;
  bool empty = true;
  for (index_t c = 0; c < count; ++c) {
    const double t = term(c);
    if (is_minus_infinity(t)) continue;
    empty = false;
    sum += std::exp(t - largest);
  }
  if (empty) return std::nullopt;
  return largest + std::log(sum);
}

/// The rows of x become softmax_g(x_ig + potential_g).
inline void softmax_rows(table& x, std::span<const double> potential) {
  for (index_t i = 0; i < x.rows(); ++i) {
    const auto term = [&](index_t g) {
      return x(i, g) + potential[static_cast<std::size_t>(g)];
    };
    // A row of -inf alone is NaN.
    const double normalizer = log_sum_exp(x.columns(), term).value_or(term(0));
    for (index_t g = 0; g < x.columns(); ++g) x(i, g) = std::exp(term(g) - normalizer);
  }
}

/// x / temperature, the logarithm of the matrix that Sinkhorn balances. (A temperature below 2^-500
/// tells apart what it would tell apart there.)
inline void divide(table& x, double temperature) {
  for (index_t i = 0; i < x.rows(); ++i)
    for (index_t g = 0; g < x.columns(); ++g) x(i, g) /= (std::max)(temperature, 0x1p-500);
}

/// The k groups with the largest of the values, NaN last, the lower group first among equals.
template <class Value>
group_mask largest_groups(index_t groups, int k, Value&& value) {
  std::vector<index_t> order(static_cast<std::size_t>(groups));
  std::iota(order.begin(), order.end(), index_t{0});
  std::sort(order.begin(), order.end(), [&](index_t a, index_t b) {
    const bool a_is_nan = is_nan(value(a)), b_is_nan = is_nan(value(b));
    if (a_is_nan != b_is_nan) return b_is_nan;
    if (!a_is_nan && value(a) > value(b)) return true;
    if (!a_is_nan && value(a) < value(b)) return false;
    return a < b;
  });
  group_mask mask = 0;
  for (int r = 0; r < k; ++r) mask |= group_mask{1} << order[static_cast<std::size_t>(r)];
  return mask;
}

/// S_ig = z_i . c_g with z_i = h_i W_g + bias; both of length 1 for the cosine.
template <class H, class T>
table centroid_scores(const matrix_view<const H>& hidden, const centroid_params<T>& params) {
  const index_t n = hidden.extent(0), model_dim = hidden.extent(1);
  const index_t group_dim = params.projection.extent(1), groups = params.centroids.extent(0);
  const auto as_double = [](const auto& x) {
    return static_cast<double>(detail::widen(x));
  };

  table projected(n, group_dim);
  for (index_t i = 0; i < n; ++i)
    for (index_t c = 0; c < group_dim; ++c) {
      double z = params.bias.empty() ? 0.0 : as_double(params.bias[static_cast<std::size_t>(c)]);
      for (index_t m = 0; m < model_dim; ++m)
        z += as_double(hidden(i, m)) * as_double(params.projection(m, c));
      projected(i, c) = z;
    }

  table scores(n, groups);
  for (index_t i = 0; i < n; ++i)
    for (index_t g = 0; g < groups; ++g) {
      double dot = 0, z_squared = 0, c_squared = 0;
      for (index_t c = 0; c < group_dim; ++c) {
        const double z = projected(i, c), centroid = as_double(params.centroids(g, c));
        dot += z * centroid;
        z_squared += z * z;
        c_squared += centroid * centroid;
      }
      if (params.metric == similarity::dot)
        scores(i, g) = dot;
      else  // a vector of length 0 has no direction: its cosine is 0
        scores(i, g) = is_zero(z_squared) || is_zero(c_squared)
                           ? 0.0
                           : dot / (std::sqrt(z_squared) * std::sqrt(c_squared));
    }
  return scores;
}

}  // namespace detail::textbook

namespace reference {

/// Eq. 1: S = (H W_g + bias) C^T, or the cosines.
///
/// @param hidden  H [n, d_model]
/// @param params  W_g, C, bias and the similarity
/// @param scores  S [n, K]
template <tensor_like<2> Hidden, scalar T, mutable_tensor_like<2> Scores,
          class Exec = serial_executor>
void centroid_scores(const Hidden& hidden, const centroid_params<T>& params, Scores&& scores,
                     [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::centroid_scores";
  const auto h = detail::as_const_view(hidden);
  const auto out = detail::as_view(scores);
  detail::check_centroid_arguments(function, h, params);
  detail::require_shape(out, {h.extent(0), params.centroids.extent(0)}, function, "scores");
  detail::require_data(out, function, "scores");
  detail::require_distinct_elements(out, "scores", function);
  detail::require_disjoint_from_centroids(out, "scores", h, params, function);
  detail::textbook::store(detail::textbook::centroid_scores(h, params), out);
}

/// Balanced soft assignment of a whole sequence. Q = exp(S / temperature); as many times as
/// `iterations` says: each column divided by its sum over the tokens, then each row by its sum over
/// the groups; in logarithms throughout.
///
/// @param scores           S [n, K]
/// @param assignment       Q [n, K] = softmax_g(S / temperature + log_group_scale): rows sum to 1
/// @param log_group_scale  [K], the logarithm of what the columns were scaled by, with mean zero
template <tensor_like<2> Scores, mutable_tensor_like<2> Assignment, class LogGroupScale,
          class Exec = serial_executor>
requires std::floating_point<detail::element_of<Assignment>> &&
    span_like<LogGroupScale, detail::element_of<Assignment>>
void sinkhorn(const Scores& scores, Assignment&& assignment, LogGroupScale&& log_group_scale,
              const sinkhorn_options& options = {}, [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::sinkhorn";
  using out_type = detail::element_of<Assignment>;
  const auto s = detail::as_const_view(scores);
  const auto out = detail::as_view(assignment);
  const auto potentials = detail::as_span(log_group_scale);
  const index_t n = s.extent(0), groups = s.extent(1);
  detail::check_assignment_arguments(function, s, out, potentials, options);
  detail::require_disjoint(detail::span_view(potentials), "log_group_scale", s, "scores", function);

  // With row potentials u and column potentials f, Q_ig = exp(L_ig + u_i + f_g), L = S /
  // temperature: dividing a column by its sum sets f_g to -log sum_i exp(L_ig + u_i), and dividing
  // a row sets u_i likewise.
  detail::textbook::table log_q(s);
  detail::textbook::divide(log_q, options.temperature);
  std::vector<double> u(static_cast<std::size_t>(n)), f(static_cast<std::size_t>(groups));
  const auto row = [&](index_t i) -> double& {
    return u[static_cast<std::size_t>(i)];
  };
  const auto column = [&](index_t g) -> double& {
    return f[static_cast<std::size_t>(g)];
  };
  for (int iteration = 0; iteration < options.iterations; ++iteration) {
    for (index_t g = 0; g < groups; ++g) {
      const std::optional<double> log_sum =
          detail::textbook::log_sum_exp(n, [&](index_t i) { return log_q(i, g) + row(i); });
      if (log_sum) column(g) = -*log_sum;  // else no token can join g
    }
    for (index_t i = 0; i < n; ++i)
      row(i) = -detail::textbook::log_sum_exp(groups, [&](index_t g) {
                  return log_q(i, g) + column(g);
                }).value_or(log_q(i, 0));
  }
  // A constant added to all of f is taken up by u: the mean is free.
  const double mean = std::accumulate(f.begin(), f.end(), 0.0) / static_cast<double>(groups);
  for (double& x : f) x -= mean;

  detail::textbook::softmax_rows(log_q, f);
  detail::textbook::store(log_q, out);
  for (index_t g = 0; g < groups; ++g)
    potentials[static_cast<std::size_t>(g)] = detail::saturated<out_type>(column(g));
}

/// The assignment of tokens one by one, with the column potentials held fixed.
///
/// @param scores           S [n, K]
/// @param log_group_scale  [K], from sinkhorn
/// @param assignment       [n, K], softmax_g(S / temperature + log_group_scale)
template <tensor_like<2> Scores, class LogGroupScale, mutable_tensor_like<2> Assignment,
          class Exec = serial_executor>
requires std::floating_point<detail::element_of<Assignment>> &&
    std::floating_point<detail::span_element_of<const LogGroupScale>>
void assign_groups(const Scores& scores, const LogGroupScale& log_group_scale,
                   Assignment&& assignment, const sinkhorn_options& options = {},
                   [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::assign_groups";
  const auto s = detail::as_const_view(scores);
  const auto out = detail::as_view(assignment);
  const auto potentials = detail::as_span(log_group_scale);
  detail::check_assignment_arguments(function, s, out, potentials, options);

  const std::vector<double> f(potentials.begin(), potentials.end());
  detail::textbook::table log_q(s);
  detail::textbook::divide(log_q, options.temperature);
  detail::textbook::softmax_rows(log_q, f);
  detail::textbook::store(log_q, out);
}

/// The k best groups of each token: exactly k bits, ties to the lower group, NaN last.
///
/// @param assignment  [n, K], K <= 64
/// @param k           1 ... K
/// @param masks       [n]
template <tensor_like<2> Assignment, span_like<group_mask> Masks>
void top_k_groups(const Assignment& assignment, int k, Masks&& masks) {
  constexpr const char* function = "reference::top_k_groups";
  const auto a = detail::as_const_view(assignment);
  const auto out = detail::as_span(masks);
  const index_t groups = a.extent(1);
  detail::require_data(a, function, "assignment");
  detail::require(groups >= 1 && groups <= max_groups, function, "assignment", "1 to 64 groups",
                  groups);
  detail::require_top_k(k, groups, function);
  detail::require_length(out.size(), a.extent(0), function, "masks");
  detail::require_data(detail::span_view(out), function, "masks");
  detail::require_disjoint(detail::span_view(out), "masks", a, "assignment", function);
  for (index_t i = 0; i < a.extent(0); ++i)
    out[static_cast<std::size_t>(i)] = detail::textbook::largest_groups(
        groups, k, [&](index_t g) { return detail::widen(a(i, g)); });
}

/// Hidden states to masks: the k groups with the largest scores / temperature + log_group_scale.
///
/// @param hidden           H [n, d_model]
/// @param params           W_g, C, bias and the similarity
/// @param log_group_scale  [K]
/// @param k                1 ... K
/// @param masks            [n]
template <tensor_like<2> Hidden, scalar T, class LogGroupScale, span_like<group_mask> Masks,
          class Exec = serial_executor>
requires std::floating_point<detail::span_element_of<const LogGroupScale>>
void route(const Hidden& hidden, const centroid_params<T>& params,
           const LogGroupScale& log_group_scale, int k, Masks&& masks,
           const sinkhorn_options& options = {}, [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::route";
  const auto h = detail::as_const_view(hidden);
  const auto potentials = detail::as_span(log_group_scale);
  const auto out = detail::as_span(masks);
  detail::check_centroid_arguments(function, h, params);
  const index_t groups = params.centroids.extent(0);
  detail::require_length(potentials.size(), groups, function, "log_group_scale");
  detail::require_data(detail::span_view(potentials), function, "log_group_scale");
  detail::require_top_k(k, groups, function);
  detail::require_length(out.size(), h.extent(0), function, "masks");
  detail::require_data(detail::span_view(out), function, "masks");
  detail::require_disjoint_from_centroids(detail::span_view(out), "masks", h, params, function);
  detail::require_disjoint(detail::span_view(out), "masks", detail::span_view(potentials),
                           "log_group_scale", function);
  detail::validate(options, function);

  detail::textbook::table logits = detail::textbook::centroid_scores(h, params);
  detail::textbook::divide(logits, options.temperature);
  for (index_t i = 0; i < h.extent(0); ++i)
    out[static_cast<std::size_t>(i)] = detail::textbook::largest_groups(groups, k, [&](index_t g) {
      return logits(i, g) + static_cast<double>(potentials[static_cast<std::size_t>(g)]);
    });
}

}  // namespace reference
}  // namespace FOCUS_ABI
}  // namespace focus
