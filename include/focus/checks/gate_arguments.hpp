// What soft gates and the retained mass check before anything is written.
#pragma once

#include <limits>
#include <span>
#include <type_traits>

#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/backward_arguments.hpp"
#include "focus/checks/overlap.hpp"
#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/options.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

inline void validate(const gate_options& gate, const char* function) {
  require(gate.kind == gate_kind::score || gate.kind == gate_kind::weight, function, "gate",
          "gate_kind::score or gate_kind::weight", static_cast<int>(gate.kind));
  constexpr double most = (std::numeric_limits<double>::max)();
  require(gate.sharpness >= -most && gate.sharpness <= most, function, "sharpness",
          "a finite number", gate.sharpness);
}

/// Checks the assignments; returns the number of groups.
template <class A, class GQ, class GK>
index_t check_assignments(const char* function, const attention_shape& shape,
                          const matrix_view<const GQ>& query_assignment,
                          const matrix_view<const GK>& key_assignment) {
  static_assert((std::is_same_v<GQ, float> || std::is_same_v<GQ, A>)&&(std::is_same_v<GK, float> ||
                                                                       std::is_same_v<GK, A>),
                "focus: assignments must be float, or double when q, k and v are double.");
  // Where there are no tokens there need not be an assignment.
  const bool no_queries = shape.n_q == 0 && query_assignment.empty();
  const bool no_keys = shape.n_k == 0 && key_assignment.empty();
  const index_t groups = no_keys ? query_assignment.extent(1) : key_assignment.extent(1);
  if (!no_keys || !no_queries)
    require(groups >= 1 && groups <= max_groups, function,
            no_keys ? "query_assignment" : "key_assignment", "1 to 64 groups", groups);
  if (!no_queries)
    require_shape(query_assignment, {shape.n_q, groups}, function, "query_assignment");
  if (!no_keys) require_shape(key_assignment, {shape.n_k, groups}, function, "key_assignment");
  require_data(query_assignment, function, "query_assignment");
  require_data(key_assignment, function, "key_assignment");
  return groups;
}

/// The same, and overlap with the outputs.
template <class Arguments, class GQ, class GK>
index_t check_gate_arguments(const char* function, const Arguments& args,
                             const matrix_view<const GQ>& query_assignment,
                             const matrix_view<const GK>& key_assignment) {
  const index_t groups = check_assignments<typename Arguments::accumulator>(
      function, args.shape, query_assignment, key_assignment);
  require_disjoint(args.out, "out", query_assignment, "query_assignment", function);
  require_disjoint(args.out, "out", key_assignment, "key_assignment", function);
  require_disjoint(args.lse, "lse", query_assignment, "query_assignment", function);
  require_disjoint(args.lse, "lse", key_assignment, "key_assignment", function);
  return groups;
}

/// Views of the assignments and of where their gradients go, after their checks.
template <class GQ, class GK, class DGQ, class DGK>
struct assignment_arguments {
  matrix_view<const GQ> query;
  matrix_view<const GK> key;
  matrix_view<DGQ> dquery;
  matrix_view<DGK> dkey;
  index_t groups;
};

/// Checks the assignments and their gradients.
template <class Arguments, class GQ, class GK, class DGQ, class DGK>
assignment_arguments<GQ, GK, DGQ, DGK> check_gate_gradients(
    const char* function, const Arguments& args, const matrix_view<const GQ>& query_assignment,
    const matrix_view<const GK>& key_assignment, const matrix_view<DGQ>& dquery_assignment,
    const matrix_view<DGK>& dkey_assignment) {
  using A = typename Arguments::accumulator;
  const index_t groups =
      check_assignments<A>(function, args.shape, query_assignment, key_assignment);
  require_tensor(dquery_assignment, {args.shape.n_q, groups}, true, function, "dquery_assignment");
  require_tensor(dkey_assignment, {args.shape.n_k, groups}, true, function, "dkey_assignment");
  const named_view g_q{query_assignment, "query_assignment"};
  const named_view g_k{key_assignment, "key_assignment"};
  const named_view dg_q{dquery_assignment, "dquery_assignment"};
  const named_view dq{args.dq, "dq"};
  const named_view dk{args.dk, "dk"};
  const named_view dv{args.dv, "dv"};
  detail::require_apart(function, dq, g_q, g_k);
  detail::require_apart(function, dk, g_q, g_k);
  detail::require_apart(function, dv, g_q, g_k);
  const auto apart_from_all = [&](const auto& view, const auto&... others) {
    detail::require_apart(function, view, named_view{args.q, "q"}, named_view{args.k, "k"},
                          named_view{args.v, "v"}, named_view{args.out, "out"},
                          named_view{args.lse, "lse"}, named_view{args.dout, "dout"},
                          named_view{args.dlse, "dlse"}, g_q, g_k, dq, dk, dv, others...);
  };
  apart_from_all(dg_q);
  apart_from_all(named_view{dkey_assignment, "dkey_assignment"}, dg_q);
  return {query_assignment, key_assignment, dquery_assignment, dkey_assignment, groups};
}

/// Q and K as the arguments of a backward pass that has nothing else.
template <class TQ, class TK>
auto check_mass_arguments(const char* function, const tensor_view<const TQ, 3>& q,
                          const tensor_view<const TK, 3>& k) {
  static_assert(std::is_same_v<accumulator_t<TQ>, accumulator_t<TK>>,
                "focus: q and k must both be double, or both be types whose sums are float.");
  const tensor_view<const float, 3> no_values(nullptr, {k.extent(0), k.extent(1), 0});
  backward_arguments<TQ, TK, float, float, float, float, float, float, float, float> args{};
  args.q = q, args.k = k, args.v = no_values;
  args.shape = detail::check_attention_inputs(function, q, k, no_values);
  return args;
}

inline void check_rows(const char* function, std::span<const index_t> rows, index_t n_q) {
  index_t last = -1;
  for (const index_t row : rows) {
    require(row > last, function, "rows", "rising row numbers", row);
    require(row < n_q, function, "rows", "row numbers below n_q", row);
    last = row;
  }
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
