// Each public function of the library and of focus::reference once, for one storage type and one
// executor: what compiles and warns, not what comes out.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <focus/focus.hpp>
#include <focus/reference.hpp>

namespace every_function {

/// Views and spans as they are.
struct unwrapped {
  template <class View>
  View operator()(View view) const {
    return view;
  }
};

/// Calls them all, with each view and span as wrap gives it; returns the mass that the assignments
/// keep, and what else is a number.
template <class Element, class Executor, class Wrap = unwrapped>
double call(const Executor& exec, const Wrap& wrap = {}) {
  using traits = focus::scalar_traits<Element>;
  using sum = typename traits::accumulator;
  constexpr focus::index_t n = 20, d = 8, groups = 2;
  constexpr auto sized = [](focus::index_t count) {
    return static_cast<std::size_t>(count);
  };

  std::vector<Element> data(sized(n * d), traits::from_accumulator(sum(0.5))),
      outputs(sized(4 * n * d));
  const auto x = wrap(focus::tensor_view<const Element, 3>(data.data(), {1, n, d}));
  const auto output = [&](focus::index_t at) {
    return wrap(focus::tensor_view<Element, 3>(outputs.data() + at * n * d, {1, n, d}));
  };
  const auto by_group = [&]<class T>(std::vector<T>& values) {
    return wrap(focus::matrix_view<T>(values.data(), {n, groups}));
  };
  std::vector<Element> score_data(sized(n * groups)), dscore_data(sized(n * groups));
  const auto s = by_group(score_data), ds = by_group(dscore_data);
  std::vector<sum> lse_data(sized(n)), share_data(sized(n * groups)), scales(sized(groups)),
      gate_data(sized(n * groups), sum(0.5)), dgate_data(sized(n * groups));
  const auto lse = wrap(focus::matrix_view<sum>(lse_data.data(), {1, n}));
  const auto shares = by_group(share_data), gates = by_group(gate_data),
             dgates = by_group(dgate_data);
  const auto potentials = wrap(std::span<sum>(scales));
  const auto hidden = wrap(focus::matrix_view<const Element>(data.data(), {n, d}));
  const focus::centroid_params<Element> router{.projection = {data.data(), {d, 4}},
                                               .centroids = {data.data(), {groups, 4}},
                                               .bias = {data.data(), 4},
                                               .metric = focus::similarity::cosine};
  const auto dhidden = wrap(focus::matrix_view<Element>(outputs.data(), {n, d})),
             dprojection = wrap(focus::matrix_view<Element>(outputs.data() + n * d, {d, 4})),
             dcentroids =
                 wrap(focus::matrix_view<Element>(outputs.data() + 2 * n * d, {groups, 4}));

  focus::workspace scratch;
  const auto lending = focus::with_workspace(exec, scratch);
  focus::centroid_scores(hidden, router, s, lending);
  focus::centroid_scores_backward(hidden, router, ds, dhidden, dprojection, {}, dcentroids, exec);
  focus::sinkhorn(s, shares, potentials, {}, exec);
  focus::sinkhorn_backward(s, shares, potentials, shares, ds, {}, exec);
  focus::assign_groups(s, potentials, shares, {}, exec);
  focus::assign_groups_backward(s, potentials, shares, shares, ds, {}, {}, exec);
  std::vector<focus::group_mask> mask_data(sized(n));
  const auto masks = wrap(std::span<focus::group_mask>(mask_data));
  focus::top_k_groups(shares, 1, masks);
  focus::route(hidden, router, potentials, 1, masks, {}, exec);
  const focus::routing_plan plan = focus::make_routing_plan(mask_data, {.window = 2});
  double kept = static_cast<double>(plan.allowed_pairs());

  focus::attention(x, x, x, output(0), focus::full_causal, {.softcap = 9.0f}, lse, exec);
  focus::attention_backward(x, x, x, output(0), lse, x, output(1), output(2), output(3),
                            focus::full_causal, {.softcap = 9.0f}, exec);
  focus::sparse_attention(x, x, x, plan, output(0), {}, lse, exec);
  focus::sparse_attention_backward(x, x, x, plan, output(0), lse, x, output(1), output(2),
                                   output(3), {}, exec);
  focus::soft_gate_attention(x, x, x, gates, gates, {}, output(0), {}, {}, lse, exec);
  focus::soft_gate_attention_backward(x, x, x, gates, gates, {}, output(0), lse, x, lse, output(1),
                                      output(2), output(3), dgates, {}, {}, {}, exec);
  focus::merge_attention_states(output(0), lse, output(0), lse, output(1), lse, exec);
  kept += focus::retained_mass_loss(x, x, gates, gates, dgates, {}, {}, {}, {}, exec);
  focus::kv_cache<Element> cache(1, d, d, {.window = 2});
  cache.append(x, x, masks, exec);
  focus::decode_attention(x, masks, cache, output(0), {}, lse, exec);
  focus::decode_sequence<Element, Element, Element, sum> sequence;
  sequence.cache = &cache;
  sequence.q = focus::tensor_view<const Element, 3>(data.data(), {1, n, d});
  sequence.query_masks = mask_data;
  sequence.out = focus::tensor_view<Element, 3>(outputs.data(), {1, n, d});
  focus::decode_attention(std::span(&sequence, 1), {}, exec);
  cache.read(0, output(0), output(1), masks);
  cache.truncate(n - 1);
  kept += static_cast<double>(cache.size());
  kept += static_cast<double>(focus::by_head(data.data(), {n, 1, d}).extent(0));

  focus::reference::centroid_scores(hidden, router, s, exec);
  focus::reference::centroid_scores_backward(hidden, router, ds, dhidden, dprojection, {},
                                             dcentroids, exec);
  focus::reference::sinkhorn(s, shares, potentials, {}, exec);
  focus::reference::sinkhorn_backward(s, shares, potentials, shares, ds, {}, exec);
  focus::reference::assign_groups(s, potentials, shares, {}, exec);
  focus::reference::assign_groups_backward(s, potentials, shares, shares, ds, {}, {}, exec);
  focus::reference::top_k_groups(shares, 1, masks);
  focus::reference::route(hidden, router, potentials, 1, masks, {}, exec);
  focus::reference::attention(x, x, x, output(0), focus::full_causal, {}, lse, exec);
  focus::reference::attention_backward(x, x, x, output(0), lse, x, output(1), output(2), output(3),
                                       focus::full_causal, {}, exec);
  focus::reference::sparse_attention(x, x, x, plan, output(0), {}, lse, exec);
  focus::reference::sparse_attention_backward(x, x, x, plan, output(0), lse, x, output(1),
                                              output(2), output(3), {}, exec);
  focus::reference::soft_gate_attention(x, x, x, gates, gates, {}, output(0), {}, {}, lse, exec);
  focus::reference::soft_gate_attention_backward(x, x, x, gates, gates, {}, output(0), lse, x, lse,
                                                 output(1), output(2), output(3), dgates, {}, {},
                                                 {}, exec);
  cache.append(wrap(focus::tensor_view<const Element, 3>(data.data(), {1, 1, d})),
               wrap(focus::tensor_view<const Element, 3>(data.data(), {1, 1, d})),
               std::span(mask_data).first(1));
  focus::reference::decode_attention(x, masks, cache, output(0), {}, lse, exec);
  focus::reference::merge_attention_states(output(0), lse, output(0), lse, output(1), lse, exec);
  kept += focus::reference::retained_mass_loss(x, x, gates, gates, dgates, {}, {}, {}, {}, exec);
  return kept;
}

}  // namespace every_function
