// Whether a plan was made for the lengths at hand.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "focus/checks/attention_arguments.hpp"
#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/routing_plan.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Refuses a plan for other lengths; throws invalid_argument. element: which of several plans it
/// is, -1 for one alone.
inline void check_plan_lengths(const routing_plan& plan, const attention_shape& s,
                               const char* function, const char* argument = "plan",
                               index_t element = -1) {
  if (plan.query_count() == s.n_q && plan.key_count() == s.n_k) return;
  const auto lengths = [&](const char* before, index_t n_q, index_t n_k) {
    std::string text(before);
    if (element >= 0) text.append("[").append(std::to_string(element)).append("] ");
    text.append("n_q = ").append(std::to_string(n_q));
    return text.append(", n_k = ").append(std::to_string(n_k));
  };
  fail_argument(function, argument, lengths("one for ", s.n_q, s.n_k),
                lengths("", plan.query_count(), plan.key_count()));
}

/// The plans of a batch: one for each sequence.
inline void check_plans(std::span<const routing_plan> plans, index_t sequences,
                        const attention_shape& s, const char* function) {
  require_length(plans.size(), sequences, function, "plans");
  for (std::size_t b = 0; b < plans.size(); ++b)
    check_plan_lengths(plans[b], s, function, "plans", static_cast<index_t>(b));
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
