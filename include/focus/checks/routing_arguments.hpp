// What centroid scores, Sinkhorn and route check before anything is written, and their gradients.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "focus/centroid_params.hpp"
#include "focus/checks/overlap.hpp"
#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/options.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Refuses a number of groups a token that is none of 1 ... K.
inline void require_top_k(int k, index_t groups, const char* function) {
  if (k < 1 || k > groups)
    fail_argument(function, "k",
                  std::string("1 to ") + std::to_string(groups) + ", the number of groups", k);
}

/// Checks what centroid_scores and route have in common; throws invalid_argument.
template <class H, class T>
void check_centroid_arguments(const char* function, const matrix_view<const H>& hidden,
                              const centroid_params<T>& params) {
  const index_t model_dim = params.projection.extent(0), group_dim = params.projection.extent(1);
  const index_t groups = params.centroids.extent(0);
  if (hidden.extent(1) != model_dim)
    fail_argument(
        function, "hidden",
        std::string("shape [n, d_model = ") + std::to_string(model_dim) + " of params.projection]",
        describe_shape(hidden.extents()));
  require(groups >= 1 && groups <= max_groups, function, "params.centroids", "1 to 64 groups",
          groups);
  require_shape(params.centroids, {groups, group_dim}, function, "params.centroids");
  require_data(hidden, function, "hidden");
  require_data(params.projection, function, "params.projection");
  require_data(params.centroids, function, "params.centroids");
  if (!params.bias.empty()) {
    require_length(params.bias.size(), group_dim, function, "params.bias");
    detail::require_data(span_view(params.bias), function, "params.bias");
  }
}

/// Refuses an output that shares an element with the hidden states or the router.
template <class Out, int Rank, class H, class T>
void require_disjoint_from_centroids(const tensor_view<Out, Rank>& out, const char* out_name,
                                     const matrix_view<const H>& hidden,
                                     const centroid_params<T>& params, const char* function) {
  require_disjoint(out, out_name, hidden, "hidden", function);
  require_disjoint(out, out_name, params.projection, "params.projection", function);
  require_disjoint(out, out_name, params.centroids, "params.centroids", function);
  detail::require_disjoint(out, out_name, span_view(params.bias), "params.bias", function);
}

/// Checks the shapes of scores, assignment and potentials, and that they have data.
template <class T, class Q, class F>
void check_assignment_inputs(const char* function, const matrix_view<const T>& scores,
                             const matrix_view<Q>& assignment, std::span<F> log_group_scale) {
  const index_t groups = scores.extent(1);
  require(groups >= 1 && groups <= max_groups, function, "scores", "1 to 64 groups", groups);
  require_data(scores, function, "scores");
  require_shape(assignment, scores.extents(), function, "assignment");
  require_data(assignment, function, "assignment");
  require_length(log_group_scale.size(), groups, function, "log_group_scale");
  detail::require_data(span_view(log_group_scale), function, "log_group_scale");
}

/// Checks what sinkhorn and assign_groups have in common; throws invalid_argument.
template <class T, class TOut, class F>
void check_assignment_arguments(const char* function, const matrix_view<const T>& scores,
                                const matrix_view<TOut>& assignment, std::span<F> log_group_scale,
                                const sinkhorn_options& options) {
  const auto f = span_view(log_group_scale);
  detail::check_assignment_inputs(function, scores, assignment, log_group_scale);
  require_distinct_elements(assignment, "assignment", function);
  require_disjoint(assignment, "assignment", scores, "scores", function);
  require_disjoint(assignment, "assignment", f, "log_group_scale", function);
  validate(options, function);
}

/// Checks what sinkhorn_backward and assign_groups_backward have in common; throws
/// invalid_argument.
template <class T, class F, class Q, class DQ, class DS>
void check_assignment_gradient_arguments(const char* function, const matrix_view<const T>& scores,
                                         std::span<F> log_group_scale,
                                         const matrix_view<const Q>& assignment,
                                         const matrix_view<const DQ>& dassignment,
                                         const matrix_view<DS>& dscores,
                                         const sinkhorn_options& options) {
  const auto f = span_view(log_group_scale);
  detail::check_assignment_inputs(function, scores, assignment, log_group_scale);
  require_shape(dassignment, scores.extents(), function, "dassignment");
  require_data(dassignment, function, "dassignment");
  require_shape(dscores, scores.extents(), function, "dscores");
  require_data(dscores, function, "dscores");
  require_distinct_elements(dscores, "dscores", function);
  require_disjoint(dscores, "dscores", scores, "scores", function);
  require_disjoint(dscores, "dscores", assignment, "assignment", function);
  require_disjoint(dscores, "dscores", f, "log_group_scale", function);
  require_disjoint(dscores, "dscores", dassignment, "dassignment", function);
  validate(options, function);
}

/// The same for the potentials' gradient, which may be left out.
template <class T, class F, class Q, class DQ, class DS, class DF>
void check_potential_gradient(const char* function, std::span<DF> dlog_group_scale,
                              const matrix_view<const T>& scores, std::span<F> log_group_scale,
                              const matrix_view<const Q>& assignment,
                              const matrix_view<const DQ>& dassignment,
                              const matrix_view<DS>& dscores) {
  if (dlog_group_scale.empty()) return;
  constexpr const char* argument = "dlog_group_scale";
  const auto df = span_view(dlog_group_scale);
  require_length(dlog_group_scale.size(), scores.extent(1), function, argument);
  require_data(df, function, argument);
  require_disjoint(df, argument, scores, "scores", function);
  require_disjoint(df, argument, span_view(log_group_scale), "log_group_scale", function);
  require_disjoint(df, argument, assignment, "assignment", function);
  require_disjoint(df, argument, dassignment, "dassignment", function);
  require_disjoint(df, argument, dscores, "dscores", function);
}

/// The outputs of centroid_scores_backward; null: not wanted.
template <class TH, class TW, class TB, class TC>
struct centroid_gradient_views {
  matrix_view<TH> hidden;
  matrix_view<TW> projection;
  std::span<TB> bias;
  matrix_view<TC> centroids;

  template <class T>
  [[nodiscard]] static bool wants(const matrix_view<T>& x) noexcept {
    return x.data() != nullptr || x.extent(0) != 0 || x.extent(1) != 0;
  }
  [[nodiscard]] bool wants_projected() const noexcept {
    return wants(hidden) || wants(projection) || !bias.empty();
  }
  [[nodiscard]] bool wants_any() const noexcept { return wants_projected() || wants(centroids); }
};

template <class DH, class DW, class DB, class DC>
auto view_centroid_gradients(DH&& dhidden, DW&& dprojection, DB&& dbias, DC&& dcentroids) {
  return centroid_gradient_views<element_of<DH>, element_of<DW>, span_element_of<DB>,
                                 element_of<DC>>{
      detail::as_view(dhidden), detail::as_view(dprojection), detail::as_span(dbias),
      detail::as_view(dcentroids)};
}

/// Checks the outputs against the inputs and each other; throws invalid_argument.
template <class H, class T, class DS, class Views>
void check_centroid_gradient_arguments(const char* function, const matrix_view<const H>& hidden,
                                       const centroid_params<T>& params,
                                       const matrix_view<const DS>& dscores, const Views& to) {
  check_centroid_arguments(function, hidden, params);
  require_shape(dscores, {hidden.extent(0), params.centroids.extent(0)}, function, "dscores");
  require_data(dscores, function, "dscores");
  const auto check = [&](const auto& out, const char* name) {
    require_data(out, function, name);
    require_distinct_elements(out, name, function);
    require_disjoint_from_centroids(out, name, hidden, params, function);
    require_disjoint(out, name, dscores, "dscores", function);
  };
  const auto dbias = span_view(to.bias);
  if (to.wants(to.hidden)) {
    require_shape(to.hidden, hidden.extents(), function, "dhidden");
    check(to.hidden, "dhidden");
  }
  if (to.wants(to.projection)) {
    require_shape(to.projection, params.projection.extents(), function, "dprojection");
    check(to.projection, "dprojection");
    require_disjoint(to.projection, "dprojection", to.hidden, "dhidden", function);
  }
  if (!to.bias.empty()) {
    require_length(to.bias.size(), params.projection.extent(1), function, "dbias");
    check(dbias, "dbias");
    require_disjoint(dbias, "dbias", to.hidden, "dhidden", function);
    require_disjoint(dbias, "dbias", to.projection, "dprojection", function);
  }
  if (to.wants(to.centroids)) {
    require_shape(to.centroids, params.centroids.extents(), function, "dcentroids");
    check(to.centroids, "dcentroids");
    require_disjoint(to.centroids, "dcentroids", to.hidden, "dhidden", function);
    require_disjoint(to.centroids, "dcentroids", to.projection, "dprojection", function);
    require_disjoint(to.centroids, "dcentroids", dbias, "dbias", function);
  }
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
