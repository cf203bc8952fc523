// Whether a plan was made for the lengths at hand.
#pragma once

#include <string>

#include "focus/checks/attention_arguments.hpp"
#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/routing_plan.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

inline void check_plan_lengths(const routing_plan& plan, const attention_shape& s,
                               const char* function) {
  if (plan.query_count() == s.n_q && plan.key_count() == s.n_k) return;
  fail_argument(function, "plan",
                "one for n_q = " + std::to_string(s.n_q) + ", n_k = " + std::to_string(s.n_k),
                "n_q = " + std::to_string(plan.query_count()) +
                    ", n_k = " + std::to_string(plan.key_count()));
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
