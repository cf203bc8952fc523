// Sinkhorn balancing: from centroid scores to assignments in which each group has its share of the
// tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>

#include "focus/checks/overlap.hpp"
#include "focus/checks/routing_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Calls f<L>() with the type L in which logits scores / temperature are worked out, where sums are
/// of type A: double at temperatures so low that of floats (scores up to 2^63) they might leave the
/// range of float, or so high that they and the potentials beside them might vanish in it.
template <class A, class F>
void with_logit_type(double temperature, F&& f) {
  if constexpr (std::same_as<A, float>)
    if (temperature < 0x1p-64 || temperature > 0x1p64) return f.template operator()<double>();
  f.template operator()<A>();
}

/// What scores are divided by. Below 2^-500 a temperature tells apart what it would tell apart at
/// 2^-500, and double has room for the logits.
template <class A>
vec<A> logit_divisor(double temperature) noexcept {
  return vec<A>::broadcast(saturated<A>((std::max)(temperature, 0x1p-500)));
}

/// The column potentials f of up to 64 groups, as whole vectors; the lowest number in the lanes
/// that are no group, so that those weigh nothing.
template <class A>
class group_potentials {
  static constexpr int lanes = vec<A>::width;

 public:
  explicit group_potentials(index_t groups) noexcept : groups_(groups) {
    fill(value_, value_ + groups, A{0});
    fill(value_ + groups, value_ + max_groups, lowest<A>);
  }

  [[nodiscard]] index_t groups() const noexcept { return groups_; }
  [[nodiscard]] index_t padded_groups() const noexcept { return round_up(groups_, lanes); }
  [[nodiscard]] A& operator[](index_t g) noexcept { return value_[g]; }

  /// scores / temperature + f for groups [g, g + lanes) of a row of scores of any storage type.
  template <class T>
  [[nodiscard]] FOCUS_ALWAYS_INLINE vec<A> logits(const T* scores, index_t g,
                                                  vec<A> temperature) const {
    const vec<A> s = detail::load_widened_up_to<T, A>(scores + g, groups_ - g);
    return s / temperature + vec<A>::load(value_ + g);
  }

 private:
  static_assert(max_groups % lanes == 0);
  index_t groups_;
  A value_[max_groups];
};

/// weights = softmax over the groups of scores / temperature + f; weights has room for whole
/// vectors.
template <class T, class A>
void soften_row(const T* scores, const group_potentials<A>& f, vec<A> temperature, A* weights) {
  constexpr int lanes = vec<A>::width;
  const index_t padded = f.padded_groups();
  vec<A> highest = vec<A>::broadcast(lowest<A>);
  for (index_t g = 0; g < padded; g += lanes) {
    const vec<A> x = f.logits(scores, g, temperature);
    x.store(weights + g);
    highest = maximum(highest, x);
  }
  // In a row of -inf alone the lanes that are no group must not be the highest: weights of 0 / 0.
  const A most = reduce_max(highest);
  const vec<A> top = vec<A>::broadcast(most <= lowest<A> ? A{0} : most);
  const vec<A> to_log2 = vec<A>::broadcast(log2_e<A>);
  vec<A> total = vec<A>::zero();
  for (index_t g = 0; g < padded; g += lanes) {
    const vec<A> weight = exp2<A>((vec<A>::load(weights + g) - top) * to_log2);
    weight.store(weights + g);
    total = total + weight;
  }
  const vec<A> sum = vec<A>::broadcast(reduce_add(total));
  for (index_t g = 0; g < padded; g += lanes) (vec<A>::load(weights + g) / sum).store(weights + g);
}

/// Sinkhorn's iterations on the potentials f alone. With L = S / temperature and row potentials u,
/// Q_ig = exp(L_ig + u_i + f_g): dividing the columns by their sums sets f_g to
/// -log sum_i exp(L_ig + u_i), dividing the rows sets u_i to -log sum_g exp(L_ig + f_g). u follows
/// from f, so it is not kept, and scratch is O(K) for each chunk of tokens.
template <class A, class T>
class column_balance {
  static constexpr int lanes = vec<A>::width;
  /// Tokens whose column sums are added up by one task. Sums of chunks are merged in order, in
  /// double: the result does not depend on the number of threads.
  static constexpr index_t chunk_tokens = 256;

 public:
  column_balance(scratch_plan& plan, const matrix_view<const T>& scores, double temperature)
      : scores_(scores),
        temperature_(temperature),
        chunks_(ceil_div(scores.extent(0), chunk_tokens)),
        f_(scores.extent(1)) {
    tops_at_ = plan.add<A>(chunks_ * f_.padded_groups());
    sums_at_ = plan.add<A>(chunks_ * f_.padded_groups());
  }

  [[nodiscard]] const group_potentials<A>& potentials() const noexcept { return f_; }
  [[nodiscard]] double potential(index_t g) const noexcept { return potential_[g]; }

  /// The column sums of an iteration as sum * e^top, before the columns were divided by them; a sum
  /// of 0: no token can join the group.
  struct column_sum {
    double top = 0, sum = 0;
  };
  /// Those of the iteration that was run last.
  [[nodiscard]] const column_sum& column(index_t g) const noexcept { return column_[g]; }

  void run(int iterations, const scratch_memory& memory, const any_executor& exec) {
    run(iterations, memory, exec, [](int) {});
  }
  /// after(iteration): called when the potentials of the iteration stand.
  template <class After>
  void run(int iterations, const scratch_memory& memory, const any_executor& exec, After&& after) {
    tops_ = memory[tops_at_];
    sums_ = memory[sums_at_];
    for (int iteration = 0; iteration < iterations && chunks_ > 0; ++iteration) {
      if (iteration == 0)
        exec.parallel_for(chunks_, [&](index_t chunk, index_t) { sum_exponentials(chunk); });
      else
        exec.parallel_for(chunks_, [&](index_t chunk, index_t) { sum_weights(chunk); });
      for (index_t g = 0; g < f_.groups(); ++g) {
        column_[g] = iteration == 0 ? merged_exponentials(g) : merged_weights(g);
        // A group that no token can join is left as it is.
        if (!is_zero(column_[g].sum)) potential_[g] -= column_[g].top + std::log(column_[g].sum);
      }
      publish();
      after(iteration);
    }
  }

 private:
  /// Takes the mean off, which is free, so that potentials are small and exact, and hands them to
  /// the rows.
  void publish() noexcept {
    double mean = 0;
    for (index_t g = 0; g < f_.groups(); ++g) mean += potential_[g];
    mean /= static_cast<double>(f_.groups());
    for (index_t g = 0; g < f_.groups(); ++g) {
      potential_[g] -= mean;
      f_[g] = static_cast<A>(potential_[g]);
    }
  }
  [[nodiscard]] index_t first_token(index_t chunk) const noexcept { return chunk * chunk_tokens; }
  [[nodiscard]] index_t end_token(index_t chunk) const noexcept {
    return (std::min)((chunk + 1) * chunk_tokens, scores_.extent(0));
  }

  /// The first iteration, where u = 0: column sums of exp(L), which are kept as maximum and sum
  /// relative to it.
  void sum_exponentials(index_t chunk) const {
    const vec<A> temperature = logit_divisor<A>(temperature_);
    const vec<A> to_log2 = vec<A>::broadcast(log2_e<A>);
    for (index_t g = 0; g < f_.padded_groups(); g += lanes) {
      A* const top = tops_ + chunk * f_.padded_groups() + g;
      vec<A> highest = vec<A>::broadcast(lowest<A>);
      for (index_t i = first_token(chunk); i < end_token(chunk); ++i)
        highest = maximum(highest, f_.logits(scores_.row(i), g, temperature));
      highest.store(top);
      // In a column of -inf alone, measured from 0, the terms are 2^-inf = 0.
      for (int l = 0; l < lanes; ++l)
        if (top[l] <= lowest<A>) top[l] = 0;
      const vec<A> shift = vec<A>::load(top);
      vec<A> sum = vec<A>::zero();
      for (index_t i = first_token(chunk); i < end_token(chunk); ++i)
        sum = sum + exp2<A>((f_.logits(scores_.row(i), g, temperature) - shift) * to_log2);
      sum.store(sums_ + chunk * f_.padded_groups() + g);
    }
  }

  /// The later iterations: column sums of the rows that were normalised last. The columns were
  /// normalised just before, so that each has an element of at least 1 / n whose row sums to at
  /// most K: no sum is below 1 / (n K), and nothing that underflows is missed.
  void sum_weights(index_t chunk) const {
    const vec<A> temperature = logit_divisor<A>(temperature_);
    A weights[max_groups], sums[max_groups] = {};
    for (index_t i = first_token(chunk); i < end_token(chunk); ++i) {
      detail::soften_row(scores_.row(i), f_, temperature, weights);
      for (index_t g = 0; g < f_.padded_groups(); g += lanes)
        (vec<A>::load(sums + g) + vec<A>::load(weights + g)).store(sums + g);
    }
    copy(sums, sums + f_.padded_groups(), sums_ + chunk * f_.padded_groups());
  }

  [[nodiscard]] column_sum merged_exponentials(index_t g) const noexcept {
    const index_t stride = f_.padded_groups();
    column_sum merged;
    for (index_t chunk = 0; chunk < chunks_; ++chunk) {
      const double chunk_sum = static_cast<double>(sums_[chunk * stride + g]);
      if (is_zero(chunk_sum)) continue;
      const double chunk_top = static_cast<double>(tops_[chunk * stride + g]);
      if (is_zero(merged.sum)) merged.top = chunk_top;  // of nothing yet
      const double new_top = chunk_top > merged.top ? chunk_top : merged.top;
      merged.sum =
          merged.sum * std::exp(merged.top - new_top) + chunk_sum * std::exp(chunk_top - new_top);
      merged.top = new_top;
    }
    return merged;
  }

  [[nodiscard]] column_sum merged_weights(index_t g) const noexcept {
    column_sum merged;
    for (index_t chunk = 0; chunk < chunks_; ++chunk)
      merged.sum += static_cast<double>(sums_[chunk * f_.padded_groups() + g]);
    return merged;
  }

  matrix_view<const T> scores_;
  double temperature_;
  index_t chunks_;
  group_potentials<A> f_;
  double potential_[max_groups] = {};
  column_sum column_[max_groups] = {};
  scratch_array<A> tops_at_, sums_at_;  // [chunks][padded groups]
  A *tops_ = nullptr, *sums_ = nullptr;
};

/// assignment_i = softmax over the groups of scores_i / temperature + f, for each token by itself.
template <class T, class TOut, class A>
void soften_rows(const matrix_view<const T>& scores, const group_potentials<A>& f,
                 double temperature, const matrix_view<TOut>& assignment,
                 const any_executor& exec) {
  constexpr index_t task_tokens = 256;
  const index_t n = scores.extent(0);
  const vec<A> tau = logit_divisor<A>(temperature);
  exec.parallel_for(ceil_div(n, task_tokens), [&](index_t task, index_t) {
    A weights[max_groups];
    const index_t end = (std::min)((task + 1) * task_tokens, n);
    for (index_t i = task * task_tokens; i < end; ++i) {
      detail::soften_row(scores.row(i), f, tau, weights);
      TOut* const out = assignment.row(i);
      for (index_t g = 0; g < f.groups(); ++g) out[g] = static_cast<TOut>(weights[g]);
    }
  });
}

/// The type of sums, where scores and assignment have these types.
template <class T, class TOut>
using assignment_accumulator = std::common_type_t<accumulator_t<T>, TOut>;

/// sinkhorn after its checks.
template <class A, class T, class TOut>
void run_sinkhorn(const matrix_view<const T>& scores, const matrix_view<TOut>& assignment,
                  std::span<TOut> log_group_scale, const sinkhorn_options& options,
                  const any_executor& exec) {
  scratch_plan plan;
  column_balance<A, T> balance(plan, scores, options.temperature);
  const scratch_memory memory(exec, plan);
  balance.run(options.iterations, memory, exec);
  detail::soften_rows(scores, balance.potentials(), options.temperature, assignment, exec);
  for (index_t g = 0; g < scores.extent(1); ++g)
    log_group_scale[static_cast<std::size_t>(g)] = saturated<TOut>(balance.potential(g));
}

/// assign_groups after its checks.
template <class A, class T, class F, class TOut>
void run_assign_groups(const matrix_view<const T>& scores, std::span<F> log_group_scale,
                       const matrix_view<TOut>& assignment, const sinkhorn_options& options,
                       const any_executor& exec) {
  group_potentials<A> potentials(scores.extent(1));
  for (index_t g = 0; g < scores.extent(1); ++g)
    potentials[g] = saturated<A>(static_cast<double>(log_group_scale[static_cast<std::size_t>(g)]));
  detail::soften_rows(scores, potentials, options.temperature, assignment, exec);
}

}  // namespace detail

/// Balanced soft assignment of a whole sequence (arXiv 2604.03260; Sinkhorn and Knopp 1967,
/// Cuturi, arXiv 1306.0895).
///
/// Q = exp(S / tau); N times: each column (group) is divided by its sum over the tokens, then each
/// row (token) by its sum over the groups. In logarithms throughout, so that no temperature
/// overflows (scores of float up to 2^63 in magnitude, of double up to 2^500). Rows sum to 1,
/// columns tend to n / K. It looks at the whole sequence, so it is for training and for calibrating
/// log_group_scale; assign_groups and route are causal.
///
/// @param scores           S [n, K], any storage type, 1 <= K <= 64
/// @param assignment       Q [n, K], float or double: softmax_g(S / tau + log_group_scale). May not
///                         overlap another argument
/// @param log_group_scale  [K], of the type of assignment: the column potentials f, natural
///                         logarithm, mean 0; zeros where iterations are 0. The potential of a
///                         group whose scores are all -inf is left as it is; one beyond the type
///                         is its largest number. May not overlap another argument
/// @param options          tau and N
/// @param exec             where the loops run
/// @throws invalid_argument before anything is written
///
/// Sums are in float, or in double where scores or assignment are double. Memory: O(K) for 256
/// tokens.
template <tensor_like<2> Scores, mutable_tensor_like<2> Assignment, class LogGroupScale,
          class Exec = serial_executor>
requires std::floating_point<detail::element_of<Assignment>> &&
    mutable_span_like<LogGroupScale, detail::element_of<Assignment>> &&
    executor<std::remove_reference_t<Exec>>
void sinkhorn(const Scores& scores, Assignment&& assignment, LogGroupScale&& log_group_scale,
              const sinkhorn_options& options = {}, Exec&& exec = {}) {
  constexpr const char* name = "sinkhorn";
  const auto s = detail::as_const_view(scores);
  const auto q = detail::as_view(assignment);
  const auto f = detail::as_span(log_group_scale);
  detail::check_assignment_arguments(name, s, q, f, options);
  detail::require_disjoint(detail::span_view(f), "log_group_scale", s, "scores", name);

  using A =
      detail::assignment_accumulator<detail::element_of<Scores>, detail::element_of<Assignment>>;
  detail::with_logit_type<A>(options.temperature, [&]<class L>() {
    detail::run_sinkhorn<L>(s, q, f, options, detail::any_executor(exec));
  });
}

/// The assignment of tokens one by one, with the column potentials held fixed:
/// softmax over the groups of scores / tau + log_group_scale.
///
/// Causal: the assignment of a token depends on its scores and the potentials alone, with the same
/// bits in a batch of any size, so that prefill and decode agree. With the potentials that sinkhorn
/// found it gives sinkhorn's assignment.
///
/// @param scores           S [n, K], any storage type, 1 <= K <= 64
/// @param log_group_scale  [K], from sinkhorn, natural logarithm; float or double
/// @param assignment       [n, K], float or double. May not overlap another argument
/// @param options          tau; the iterations have no part in it
/// @param exec             where the loops run
/// @throws invalid_argument before anything is written
///
/// Sums are in float, or in double where scores or assignment are double.
template <tensor_like<2> Scores, class LogGroupScale, mutable_tensor_like<2> Assignment,
          class Exec = serial_executor>
requires std::floating_point<detail::element_of<Assignment>> &&
    std::floating_point<detail::span_element_of<const LogGroupScale>> &&
    executor<std::remove_reference_t<Exec>>
void assign_groups(const Scores& scores, const LogGroupScale& log_group_scale,
                   Assignment&& assignment, const sinkhorn_options& options = {},
                   Exec&& exec = {}) {
  constexpr const char* name = "assign_groups";
  const auto s = detail::as_const_view(scores);
  const auto q = detail::as_view(assignment);
  const auto f = detail::as_span(log_group_scale);
  detail::check_assignment_arguments(name, s, q, f, options);

  using A =
      detail::assignment_accumulator<detail::element_of<Scores>, detail::element_of<Assignment>>;
  detail::with_logit_type<A>(options.temperature, [&]<class L>() {
    detail::run_assign_groups<L>(s, f, q, options, detail::any_executor(exec));
  });
}

}  // namespace FOCUS_ABI
}  // namespace focus
