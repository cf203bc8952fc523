// The gradients of assignments: through Sinkhorn's iterations, and with the potentials held fixed.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>

#include "focus/checks/routing_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/sinkhorn.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Sums over the tokens, one for each group, while the loop over the tokens runs: those of a chunk
/// by one task, then those of the chunks in order, in double. They do not depend on the number of
/// threads.
template <class A>
class token_sums {
  static constexpr int lanes = vec<A>::width;
  static constexpr index_t chunk_tokens = 256;

 public:
  token_sums(scratch_plan& plan, index_t tokens, index_t groups)
      : tokens_(tokens),
        chunks_(ceil_div(tokens, chunk_tokens)),
        groups_(groups),
        padded_groups_(round_up(groups, lanes)) {
    sums_ = plan.add<A>(chunks_ * padded_groups_);
  }

  /// body(token, sums) adds what the token gives to sums, in whole vectors; total receives K sums.
  template <class Body>
  void run(const scratch_memory& memory, const any_executor& exec, Body&& body,
           double* total) const {
    A* const all = memory[sums_];
    exec.parallel_for(chunks_, [&](index_t chunk, index_t) {
      A sums[max_groups] = {};
      const index_t end = (std::min)((chunk + 1) * chunk_tokens, tokens_);
      for (index_t i = chunk * chunk_tokens; i < end; ++i) body(i, sums);
      copy(sums, sums + padded_groups_, all + chunk * padded_groups_);
    });
    for (index_t g = 0; g < groups_; ++g) {
      total[g] = 0;
      for (index_t chunk = 0; chunk < chunks_; ++chunk)
        total[g] += static_cast<double>(all[chunk * padded_groups_ + g]);
    }
  }

 private:
  index_t tokens_, chunks_, groups_, padded_groups_;
  scratch_array<A> sums_;  // [chunks][padded groups]
};

template <class A>
FOCUS_ALWAYS_INLINE void add_to(A* sums, vec<A> x) noexcept {
  (vec<A>::load(sums) + x).store(sums);
}

/// Whole vectors of a row with K elements: those from g on.
template <class A, class T>
FOCUS_ALWAYS_INLINE void store_groups(vec<A> x, T* row, index_t g, index_t groups) {
  detail::store_narrowed<T, A>(x, row + g, (std::min<index_t>)(groups - g, vec<A>::width));
}

/// Through the softmax of one token: x_g = q_g (dq_g - sum_h q_h dq_h) is added to sums, and
/// gradient_g = x_g / temperature.
template <class A, class Q, class DQ, class T>
void soften_row_backward(const Q* q, const DQ* dq, index_t groups, vec<A> temperature, T* gradient,
                         A* sums) {
  constexpr int lanes = vec<A>::width;
  vec<A> products = vec<A>::zero();
  for (index_t g = 0; g < groups; g += lanes)
    products = fma(detail::load_widened_up_to<Q, A>(q + g, groups - g),
                   detail::load_widened_up_to<DQ, A>(dq + g, groups - g), products);
  const vec<A> mean = vec<A>::broadcast(reduce_add(products));
  for (index_t g = 0; g < groups; g += lanes) {
    const vec<A> share = detail::load_widened_up_to<Q, A>(q + g, groups - g);
    const vec<A> x = share * (detail::load_widened_up_to<DQ, A>(dq + g, groups - g) - mean);
    store_groups(x / temperature, gradient, g, groups);
    add_to(sums + g, x);
  }
}

/// Sinkhorn's iterations backwards. With the names of column_balance, P the rows softmax(L + f) and
/// c their column sums, an iteration sets f'_g to f_g - log c_g, up to a constant. With the
/// gradient df' of f', and a_g = df'_g / c_g,
///   dL_ig -= P_ig (a_g - sum_h P_ih a_h),   df_g = sum_i P_ig sum_h P_ih a_h.
/// In the first iteration, where u = 0, f'_g is -log c_g with the column sums c of exp(L):
///   dL_ig -= exp(L_ig) / c_g df'_g.
/// The iterations are run again for f and c, which are O(K) each; P is made anew, row by row.
template <class A, class T>
class sinkhorn_gradient {
  static constexpr int lanes = vec<A>::width;

  /// What is kept of an iteration: its potentials, and its column sums before them.
  struct step {
    group_potentials<A> potentials;
    double column_sum[max_groups];
  };

 public:
  sinkhorn_gradient(scratch_plan& plan, const matrix_view<const T>& scores,
                    const sinkhorn_options& options)
      : scores_(scores),
        groups_(scores.extent(1)),
        options_(options),
        balance_(plan, scores, options.temperature),
        sums_(plan, scores.extent(0), scores.extent(1)),
        first_(scores.extent(1)) {
    steps_ = plan.add<step>(options.iterations);
  }

  /// gradient [n, K] receives d scores.
  template <class Q, class DQ>
  void run(const scratch_memory& memory, const matrix_view<const Q>& assignment,
           const matrix_view<const DQ>& dassignment, const matrix_view<A>& gradient,
           const any_executor& exec) {
    step* const steps = memory[steps_];
    balance_.run(options_.iterations, memory, exec, [&](int iteration) {
      step& s = steps[iteration];
      s.potentials = balance_.potentials();
      for (index_t g = 0; g < groups_; ++g) {
        s.column_sum[g] = balance_.column(g).sum;
        if (iteration == 0) first_[g] = static_cast<A>(-balance_.column(g).top);
      }
    });

    const vec<A> temperature = logit_divisor<A>(options_.temperature);
    double df[max_groups] = {};
    sums_.run(
        memory, exec,
        [&](index_t i, A* sums) {
          detail::soften_row_backward(assignment.row(i), dassignment.row(i), groups_, temperature,
                                      gradient.row(i), sums);
        },
        df);
    // From L = S / temperature to S once for all: what follows is linear in df.
    for (double& x : df) x /= (std::max)(options_.temperature, 0x1p-500);
    A a[max_groups] = {};
    for (int iteration = options_.iterations - 1; iteration >= 0; --iteration) {
      for (index_t g = 0; g < groups_; ++g) {
        // Of a group that no token can join the potential was left as it is.
        const double c = steps[iteration].column_sum[g];
        a[g] = is_zero(c) ? A{0} : static_cast<A>(df[g] / c);
      }
      if (iteration == 0)
        sums_.run(
            memory, exec,
            [&](index_t i, A*) { subtract_first(scores_.row(i), a, temperature, gradient.row(i)); },
            df);
      else
        sums_.run(
            memory, exec,
            [&](index_t i, A* sums) {
              subtract_later(scores_.row(i), steps[iteration - 1].potentials, a, temperature,
                             gradient.row(i), sums);
            },
            df);
    }
  }

 private:
  void subtract_first(const T* scores, const A* a, vec<A> temperature, A* gradient) const {
    const vec<A> to_log2 = vec<A>::broadcast(log2_e<A>);
    for (index_t g = 0; g < groups_; g += lanes) {
      const vec<A> share = exp2<A>(first_.logits(scores, g, temperature) * to_log2);
      const vec<A> x = detail::load_widened_up_to<A>(gradient + g, groups_ - g);
      store_groups(x - share * vec<A>::load(a + g), gradient, g, groups_);
    }
  }

  void subtract_later(const T* scores, const group_potentials<A>& f, const A* a, vec<A> temperature,
                      A* gradient, A* sums) const {
    A weights[max_groups];
    detail::soften_row(scores, f, temperature, weights);
    vec<A> products = vec<A>::zero();
    for (index_t g = 0; g < groups_; g += lanes)
      products = fma(vec<A>::load(weights + g), vec<A>::load(a + g), products);
    const vec<A> mean = vec<A>::broadcast(reduce_add(products));
    for (index_t g = 0; g < groups_; g += lanes) {
      const vec<A> weight = vec<A>::load(weights + g);
      const vec<A> x = detail::load_widened_up_to<A>(gradient + g, groups_ - g);
      store_groups(x - weight * (vec<A>::load(a + g) - mean), gradient, g, groups_);
      add_to(sums + g, weight * mean);
    }
  }

  matrix_view<const T> scores_;
  index_t groups_;
  sinkhorn_options options_;
  column_balance<A, T> balance_;
  token_sums<A> sums_;
  group_potentials<A> first_;  // what exp(L) is measured from in the first iteration, negated
  scratch_array<step> steps_;  // [iterations]
};

/// The type of the sums: double where any of the types is.
template <class... T>
using gradient_accumulator = std::common_type_t<accumulator_t<T>...>;

/// sinkhorn_backward after its checks.
template <class A, class T, class Q, class DQ, class TOut>
void run_sinkhorn_backward(const matrix_view<const T>& scores,
                           const matrix_view<const Q>& assignment,
                           const matrix_view<const DQ>& dassignment,
                           const matrix_view<TOut>& dscores, const sinkhorn_options& options,
                           const any_executor& exec) {
  scratch_plan plan;
  sinkhorn_gradient<A, T> gradient(plan, scores, options);
  if constexpr (std::same_as<TOut, A>) {
    const scratch_memory memory(exec, plan);
    gradient.run(memory, assignment, dassignment, dscores, exec);
  } else {
    const auto [n, groups] = scores.extents();
    const scratch_array<A> planned_sums = plan.add<A>(n * groups);
    const scratch_memory memory(exec, plan);
    const matrix_view<A> sums(memory[planned_sums], {n, groups});
    gradient.run(memory, assignment, dassignment, sums, exec);
    for (index_t i = 0; i < n; ++i)
      for (index_t g = 0; g < groups; ++g)
        dscores(i, g) = detail::narrow<TOut>(static_cast<accumulator_t<TOut>>(sums(i, g)));
  }
}

/// assign_groups_backward after its checks.
template <class A, class Q, class DQ, class TOut, class TPotential>
void run_assign_groups_backward(const matrix_view<const Q>& assignment,
                                const matrix_view<const DQ>& dassignment,
                                const matrix_view<TOut>& dscores,
                                std::span<TPotential> dlog_group_scale,
                                const sinkhorn_options& options, const any_executor& exec) {
  const index_t groups = assignment.extent(1);
  scratch_plan plan;
  const token_sums<A> sums(plan, assignment.extent(0), groups);
  const scratch_memory memory(exec, plan);
  const vec<A> temperature = logit_divisor<A>(options.temperature);
  double total[max_groups];
  sums.run(
      memory, exec,
      [&](index_t i, A* token) {
        detail::soften_row_backward(assignment.row(i), dassignment.row(i), groups, temperature,
                                    dscores.row(i), token);
      },
      total);
  for (std::size_t g = 0; g < dlog_group_scale.size(); ++g)
    dlog_group_scale[g] = static_cast<TPotential>(total[g]);
}

}  // namespace detail

/// The gradient of sinkhorn: from that of the assignment to that of the scores, through all
/// iterations that were run.
///
/// With 0 iterations it stays within each token. With more, each token's scores move the potentials
/// and thereby all tokens; so does a NaN or an infinity in dassignment. A score of -inf has a
/// gradient of 0.
///
/// @param scores           S [n, K], as sinkhorn had them, any storage type, 1 <= K <= 64
/// @param assignment       Q [n, K], as sinkhorn left it, float or double
/// @param log_group_scale  [K], as sinkhorn left it. Its values are not read: the potentials of all
///                         iterations are needed, and those are found again
/// @param dassignment      dQ [n, K], float or double
/// @param dscores          dS [n, K], any storage type. May not overlap another argument
/// @param options          tau and N, as sinkhorn had them
/// @param exec             where the loops run
/// @throws invalid_argument before anything is written
///
/// Sums are in float, or in double where one of the matrices is double. Memory: O(K) for each
/// iteration and for 256 tokens; the size of dscores too where its type is not that of the sums.
template <tensor_like<2> Scores, tensor_like<2> Assignment, class LogGroupScale,
          tensor_like<2> DAssignment, mutable_tensor_like<2> DScores, class Exec = serial_executor>
requires std::floating_point<detail::element_of<Assignment>> &&
    std::floating_point<detail::span_element_of<const LogGroupScale>> &&
    std::floating_point<detail::element_of<DAssignment>> && executor<std::remove_reference_t<Exec>>
void sinkhorn_backward(const Scores& scores, const Assignment& assignment,
                       const LogGroupScale& log_group_scale, const DAssignment& dassignment,
                       DScores&& dscores, const sinkhorn_options& options = {}, Exec&& exec = {}) {
  constexpr const char* name = "sinkhorn_backward";
  const auto s = detail::as_const_view(scores);
  const auto q = detail::as_const_view(assignment);
  const auto f = detail::as_span(log_group_scale);
  const auto dq = detail::as_const_view(dassignment);
  const auto ds = detail::as_view(dscores);
  detail::check_assignment_gradient_arguments(name, s, f, q, dq, ds, options);
  if (s.extent(0) == 0) return;
  using A =
      detail::gradient_accumulator<detail::element_of<Scores>, detail::element_of<Assignment>,
                                   detail::element_of<DAssignment>, detail::element_of<DScores>>;
  detail::with_logit_type<A>(options.temperature, [&]<class L>() {
    detail::run_sinkhorn_backward<L>(s, q, dq, ds, options, detail::any_executor(exec));
  });
}

/// The gradient of assign_groups, whose potentials are parameters: each token by itself.
///
///   dS_ig = x_ig / tau,   dlog_group_scale_g = sum_i x_ig,
///   x_ig = Q_ig (dQ_ig - sum_h Q_ih dQ_ih)
///
/// @param scores            S [n, K], as assign_groups had them, any storage type, 1 <= K <= 64.
///                          Its values are not read: the assignment says all
/// @param log_group_scale   [K], as assign_groups had it, float or double; not read either
/// @param assignment        Q [n, K], as assign_groups left it, float or double
/// @param dassignment       dQ [n, K], float or double. A NaN or an infinity in it reaches its own
///                          token's dscores, and dlog_group_scale
/// @param dscores           dS [n, K], any storage type. May not overlap another argument
/// @param dlog_group_scale  [K] or {}: float or double; zeros where n is 0. May not overlap another
///                          argument
/// @param options           tau; the iterations have no part in it
/// @param exec              where the loops run
/// @throws invalid_argument before anything is written
///
/// Sums are in float, or in double where one of the matrices is double. Memory: O(K) for 256
/// tokens.
template <tensor_like<2> Scores, class LogGroupScale, tensor_like<2> Assignment,
          tensor_like<2> DAssignment, mutable_tensor_like<2> DScores,
          class DLogGroupScale = std::span<float>, class Exec = serial_executor>
requires std::floating_point<detail::span_element_of<const LogGroupScale>> &&
    std::floating_point<detail::element_of<Assignment>> &&
    std::floating_point<detail::element_of<DAssignment>> &&
    std::floating_point<detail::span_element_of<DLogGroupScale>> &&
    mutable_span_like<DLogGroupScale, detail::span_element_of<DLogGroupScale>> &&
    executor<std::remove_reference_t<Exec>>
void assign_groups_backward(const Scores& scores, const LogGroupScale& log_group_scale,
                            const Assignment& assignment, const DAssignment& dassignment,
                            DScores&& dscores, DLogGroupScale&& dlog_group_scale,
                            const sinkhorn_options& options = {}, Exec&& exec = {}) {
  constexpr const char* name = "assign_groups_backward";
  const auto s = detail::as_const_view(scores);
  const auto f = detail::as_span(log_group_scale);
  const auto q = detail::as_const_view(assignment);
  const auto dq = detail::as_const_view(dassignment);
  const auto ds = detail::as_view(dscores);
  const auto df = detail::as_span(dlog_group_scale);
  detail::check_assignment_gradient_arguments(name, s, f, q, dq, ds, options);
  detail::check_potential_gradient(name, df, s, f, q, dq, ds);

  using A =
      detail::gradient_accumulator<detail::element_of<Scores>, detail::element_of<Assignment>,
                                   detail::element_of<DAssignment>, detail::element_of<DScores>>;
  detail::with_logit_type<A>(options.temperature, [&]<class L>() {
    detail::run_assign_groups_backward<L>(q, dq, ds, df, options, detail::any_executor(exec));
  });
}

}  // namespace FOCUS_ABI
}  // namespace focus
