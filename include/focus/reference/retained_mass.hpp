// focus::reference: the loss of a router as the textbook has it, from two logsumexps in double.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "focus/checks/attention_arguments.hpp"
#include "focus/checks/gate_arguments.hpp"
#include "focus/config.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/reference/attention.hpp"
#include "focus/reference/attention_backward.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace reference {

/// The mean of lse_full - lse_gated over `rows` (none: all) and heads, and its gradient: arguments
/// as in focus::retained_mass_loss.
template <tensor_like<3> Q, tensor_like<3> K, tensor_like<2> QueryAssignment,
          tensor_like<2> KeyAssignment,
          mutable_tensor_like<2> DqueryAssignment = matrix_view<float>,
          mutable_tensor_like<2> DkeyAssignment = matrix_view<float>, class Exec = serial_executor>
double retained_mass_loss(const Q& q, const K& k, const QueryAssignment& query_assignment,
                          const KeyAssignment& key_assignment,
                          DqueryAssignment&& dquery_assignment = {},
                          DkeyAssignment&& dkey_assignment = {}, std::span<const index_t> rows = {},
                          const pattern_options& pattern = {}, const score_options& score = {},
                          [[maybe_unused]] Exec&& exec = {}) {
  constexpr const char* function = "reference::retained_mass_loss";
  const auto args =
      detail::check_mass_arguments(function, detail::as_const_view(q), detail::as_const_view(k));
  const auto g_q = detail::as_const_view(query_assignment);
  const auto g_k = detail::as_const_view(key_assignment);
  detail::check_gate_gradients(function, args, g_q, g_k, detail::as_view(dquery_assignment),
                               detail::as_view(dkey_assignment));
  detail::check_rows(function, rows, args.shape.n_q);
  detail::validate(pattern, function);
  detail::validate(score, function);

  const detail::attention_shape& s = args.shape;
  const auto count = rows.empty() ? s.n_q : static_cast<index_t>(rows.size());
  const auto size = static_cast<std::size_t>(s.heads * s.n_q);
  std::vector<double> full_data(size), gated_data(size), dlse_data(size);
  const matrix_view<double> full(full_data.data(), {s.heads, s.n_q}),
      gated(gated_data.data(), {s.heads, s.n_q}), dlse(dlse_data.data(), {s.heads, s.n_q});
  const gate_options by_weight{.kind = gate_kind::weight};
  // Values of no width: the logsumexps are all that is asked for.
  const tensor_view<const detail::element_of<K>, 3> no_values(nullptr, {s.kv_heads, s.n_k, 0});
  const tensor_view<detail::element_of<Q>, 3> no_out(nullptr, {s.heads, s.n_q, 0});
  pattern_options dense = pattern;
  dense.window = unlimited_window;
  reference::attention(q, k, no_values, no_out, dense, score, full);
  reference::soft_gate_attention(q, k, no_values, query_assignment, key_assignment, by_weight,
                                 no_out, pattern, score, gated);

  double sum = 0;
  const double share = count * s.heads > 0 ? 1.0 / static_cast<double>(count * s.heads) : 0.0;
  for (index_t h = 0; h < s.heads; ++h)
    for (index_t r = 0; r < count; ++r) {
      const index_t i = rows.empty() ? r : rows[static_cast<std::size_t>(r)];
      if (detail::is_minus_infinity(full(h, i))) continue;
      sum += full(h, i) - gated(h, i);
      dlse(h, i) = -share;
    }
  reference::soft_gate_attention_backward(q, k, no_values, query_assignment, key_assignment,
                                          by_weight, {}, gated, {}, dlse, {}, {}, {},
                                          dquery_assignment, dkey_assignment, pattern, score);
  return sum * share;
}

}  // namespace reference
}  // namespace FOCUS_ABI
}  // namespace focus
