// Sparse against dense attention: both in turn in each round, so that a machine that slows down
// slows both.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <deque>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <focus/focus.hpp>

#include "allocations.hpp"
#include "masks.hpp"
#include "timing.hpp"
#include "workload.hpp"

namespace bench {

#if defined(_OPENMP)
using executor = focus::openmp_executor;
inline executor make_executor(index_t threads) {
  return executor(static_cast<int>(threads));
}
#else
using executor = focus::serial_executor;
inline executor make_executor(index_t) {
  return {};
}
#endif

/// What dense and sparse attention have in common.
struct attention_setting {
  index_t tokens, heads, kv_heads, head_dim, threads;
  index_t d_model, d_group;  // of the router
};

/// What sparse attention is asked to do.
struct sparse_case {
  std::string masks;  // what they are called
  index_t groups, top_k;
  mask_list query, key;  // key empty: those of the queries
  focus::pattern_options pattern;
};

/// Medians over the rounds, in seconds a call; counts of a call once warm, with a workspace.
struct comparison {
  double dense, route, plan, sparse;
  double speedup;        // dense / (route + plan + sparse)
  double without_route;  // (plan + sparse) / dense
  index_t pairs;         // computed, for one head
  long allocations;
  std::size_t dense_scratch, sparse_scratch;  // peak bytes of a first call, plan included
  index_t rounds;
};

/// One sparse case and what its calls need. The masks that the router finds are not used: the
/// time that it takes does not depend on them.
template <class T>
class sparse_subject {
 public:
  sparse_subject(const sparse_case& what, const router_inputs<T>& router)
      : case_(what), router_(router), found_(static_cast<std::size_t>(router.tokens())) {}

  template <class Exec>
  void route(Exec& exec) {
    for (int side = 0; side < (case_.key.empty() ? 1 : 2); ++side)
      focus::route(router_.hidden(), router_.params(case_.groups), router_.potentials(case_.groups),
                   static_cast<int>(case_.top_k), found_, {}, exec);
  }
  void plan() {
    plan_.rebuild(case_.query, case_.key.empty() ? case_.query : case_.key, case_.pattern);
  }
  template <class Exec>
  void attend(attention_inputs<T>& in, Exec& exec) {
    focus::sparse_attention(in.q(), in.k(), in.v(), plan_, in.out(), {}, {}, exec);
  }

  /// Times one round of `calls` calls.
  template <class Exec>
  void measure(attention_inputs<T>& in, Exec& exec, long calls, bool one_thread) {
    const long before = allocations;
    const double routing = seconds_a_call(calls, one_thread, [&] { route(exec); });
    const double planning = seconds_a_call(calls, one_thread, [&] { plan(); });
    const double attending = seconds_a_call(calls, one_thread, [&] { attend(in, exec); });
    allocations_ = (std::max)(allocations_, (allocations - before) / calls);
    route_.push_back(routing), plan_seconds_.push_back(planning), attend_.push_back(attending);
  }
  /// Room for the times of so many rounds: pushing them back is then no allocation.
  void reserve(index_t rounds) {
    for (auto* seconds : {&route_, &plan_seconds_, &attend_})
      seconds->reserve(static_cast<std::size_t>(rounds));
  }

  /// dense: the seconds before the first round, between rounds, and after the last.
  comparison compare(const std::vector<double>& dense) const {
    std::vector<double> speedup, without_route;
    for (std::size_t r = 0; r < attend_.size(); ++r) {
      const double around = 0.5 * (dense[r] + dense[r + 1]);
      speedup.push_back(around / (route_[r] + plan_seconds_[r] + attend_[r]));
      without_route.push_back((plan_seconds_[r] + attend_[r]) / around);
    }
    return {.dense = median(dense),
            .route = median(route_),
            .plan = median(plan_seconds_),
            .sparse = median(attend_),
            .speedup = median(speedup),
            .without_route = median(without_route),
            .pairs = plan_.allowed_pairs(),
            .allocations = allocations_,
            .dense_scratch = 0,
            .sparse_scratch = scratch_,
            .rounds = std::ssize(attend_)};
  }

  /// The first call, with memory of its own; returns what a workspace needs.
  std::size_t measure_scratch(attention_inputs<T>& in, executor& exec) {
    std::size_t needed = 0;
    scratch_ = peak_of([&] {
      focus::workspace own;
      auto lending = focus::with_workspace(exec, own);
      route(lending), plan(), attend(in, lending);
      needed = own.capacity();
    });
    return needed;
  }

 private:
  const sparse_case& case_;
  const router_inputs<T>& router_;
  mask_list found_;
  focus::routing_plan plan_;
  std::vector<double> route_, plan_seconds_, attend_;
  long allocations_ = 0;
  std::size_t scratch_ = 0;
};

/// All cases against one dense call, which is timed before and after each round of them.
/// @param rounds   at most
/// @param seconds  no new round is begun after so many; at least one is
template <class T>
std::vector<comparison> compare_with_dense(const attention_setting& s,
                                           const std::vector<sparse_case>& cases, index_t rounds,
                                           double seconds) {
  attention_inputs<T> in(s.heads, s.kv_heads, s.tokens, s.head_dim);
  const router_inputs<T> router(s.tokens, s.d_model, s.d_group);
  executor own = make_executor(s.threads);
  focus::workspace scratch;
  auto exec = focus::with_workspace(own, scratch);
  const bool one_thread = s.threads == 1;
  constexpr double time_to_see = 2e-3;
  const auto dense = [&] {
    focus::attention(in.q(), in.k(), in.v(), in.out(), focus::full_causal, {}, {}, exec);
  };

  const stopwatch first(one_thread);
  const std::size_t dense_scratch = peak_of(dense);
  const long calls =
      first.seconds() > time_to_see ? 1 : calls_to_time(one_thread, time_to_see, dense);
  std::deque<sparse_subject<T>> subjects;  // deque: they stay where they are
  for (const sparse_case& c : cases) {
    sparse_subject<T>& subject = subjects.emplace_back(c, router);
    scratch.reserve(subject.measure_scratch(in, own));
    subject.reserve(rounds);
  }

  const stopwatch since(one_thread);
  std::vector<double> dense_seconds = {seconds_a_call(calls, one_thread, dense)};
  for (index_t r = 0; r < rounds && (r == 0 || since.seconds() < seconds); ++r) {
    for (auto& subject : subjects) subject.measure(in, exec, calls, one_thread);
    dense_seconds.push_back(seconds_a_call(calls, one_thread, dense));
  }

  std::vector<comparison> results;
  for (const auto& subject : subjects) {
    results.push_back(subject.compare(dense_seconds));
    results.back().dense_scratch = dense_scratch;
  }
  return results;
}

}  // namespace bench
