// From hidden states to group masks in one pass: what an engine calls once a layer.
#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>

#include "focus/centroid_params.hpp"
#include "focus/centroids.hpp"
#include "focus/checks/overlap.hpp"
#include "focus/checks/routing_arguments.hpp"
#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/sinkhorn.hpp"
#include "focus/tensor_view.hpp"
#include "focus/top_k.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// route after its checks; logits are of type L.
template <class L, class H, class T, class F>
void run_route(const matrix_view<const H>& hidden, const centroid_params<T>& params,
               std::span<F> log_group_scale, int k, std::span<group_mask> masks,
               const sinkhorn_options& options, const any_executor& exec) {
  using A = centroid_accumulator<H, T>;
  const index_t groups = params.centroids.extent(0);
  scratch_plan plan;
  const centroid_scorer<A> scorer(plan, exec.concurrency(), hidden.extent(1),
                                  params.projection.extent(1), groups, params.metric);
  const scratch_memory memory(exec, plan);
  group_potentials<L> potentials(groups);
  for (index_t g = 0; g < groups; ++g)
    potentials[g] = saturated<L>(static_cast<double>(log_group_scale[static_cast<std::size_t>(g)]));

  scorer.pack(memory, params);
  scorer.score(memory, hidden, exec, [&](index_t token, const A* scores) {
    const vec<L> tau = logit_divisor<L>(options.temperature);
    L logits[max_groups];
    for (index_t g = 0; g < groups; g += vec<L>::width)
      potentials.logits(scores, g, tau).store(logits + g);
    masks[static_cast<std::size_t>(token)] =
        best_groups(groups, k, [&](index_t g) { return logits[g]; });
  });
}

}  // namespace detail

/// The k best groups of each token, from its hidden state: those with the largest
///
///   centroid score / tau + log_group_scale
///
/// Causal: the mask of a token depends on that token and the potentials alone, the same in a batch
/// of any size and for any number of threads. The scores have the bits that centroid_scores gives;
/// they are ranked before any exponential, so that groups which tie in a saturated assignment are
/// still told apart. Ties go to the lower group, NaN ranks last.
///
/// @param hidden           H [n, d_model], any storage type
/// @param params           W_g [d_model, d_group], C [K, d_group], bias, metric; 1 <= K <= 64
/// @param log_group_scale  [K], from sinkhorn, natural logarithm; float or double
/// @param k                1 ... K
/// @param masks            [n]: exactly k bits each. May not overlap another argument
/// @param options          tau, which must be that of the sinkhorn that gave log_group_scale (else
///                         the groups are not balanced); the iterations have no part in it
/// @param exec             where the loops run
/// @throws invalid_argument before anything is written
///
/// Memory: packed copies of W_g and C; no scores beyond those of a few tokens a thread.
template <tensor_like<2> Hidden, scalar T, class LogGroupScale, mutable_span_like<group_mask> Masks,
          class Exec = serial_executor>
requires std::floating_point<detail::span_element_of<const LogGroupScale>> &&
    executor<std::remove_reference_t<Exec>>
void route(const Hidden& hidden, const centroid_params<T>& params,
           const LogGroupScale& log_group_scale, int k, Masks&& masks,
           const sinkhorn_options& options = {}, Exec&& exec = {}) {
  constexpr const char* name = "route";
  const auto h = detail::as_const_view(hidden);
  const auto f = detail::as_span(log_group_scale);
  const auto out = detail::as_span(masks);
  detail::check_centroid_arguments(name, h, params);
  const index_t n = h.extent(0), groups = params.centroids.extent(0);
  detail::require_length(f.size(), groups, name, "log_group_scale");
  detail::require_data(detail::span_view(f), name, "log_group_scale");
  detail::require_top_k(k, groups, name);
  detail::require_length(out.size(), n, name, "masks");
  detail::require_data(detail::span_view(out), name, "masks");
  detail::require_disjoint_from_centroids(detail::span_view(out), "masks", h, params, name);
  detail::require_disjoint(detail::span_view(out), "masks", detail::span_view(f), "log_group_scale",
                           name);
  detail::validate(options, name);
  if (n == 0) return;
  using A = detail::centroid_accumulator<detail::element_of<Hidden>, T>;
  detail::with_logit_type<A>(options.temperature, [&]<class L>() {
    detail::run_route<L>(h, params, f, k, out, options, detail::any_executor(exec));
  });
}

}  // namespace FOCUS_ABI
}  // namespace focus
