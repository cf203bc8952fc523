// A user's namespace whose function templates take anything, with a storage type in it: unqualified
// calls inside the library would be ambiguous, or go there.
#include <cstdint>
#include <cstdio>
#include <type_traits>
#include <vector>

#include <focus/focus.hpp>

namespace engine {

struct half_precision {
  std::uint16_t bits = 0;
};

#define ENGINE_TAKES_ANYTHING(name) \
  template <class... T>             \
  void name(T&&...) = delete;
ENGINE_TAKES_ANYTHING(as_view)
ENGINE_TAKES_ANYTHING(as_const_view)
ENGINE_TAKES_ANYTHING(as_span)
ENGINE_TAKES_ANYTHING(widen)
ENGINE_TAKES_ANYTHING(narrow)
ENGINE_TAKES_ANYTHING(load_widened)
ENGINE_TAKES_ANYTHING(load_widened_partial)
ENGINE_TAKES_ANYTHING(load_widened_up_to)
ENGINE_TAKES_ANYTHING(store_narrowed)
ENGINE_TAKES_ANYTHING(load_bfloat16)
ENGINE_TAKES_ANYTHING(load_float16)
ENGINE_TAKES_ANYTHING(dot)
ENGINE_TAKES_ANYTHING(dot_rows)
ENGINE_TAKES_ANYTHING(write_scaled)
ENGINE_TAKES_ANYTHING(prefetch_row)
ENGINE_TAKES_ANYTHING(spread_over_panels)
ENGINE_TAKES_ANYTHING(is_given)
ENGINE_TAKES_ANYTHING(fill)
ENGINE_TAKES_ANYTHING(copy)
ENGINE_TAKES_ANYTHING(require)
ENGINE_TAKES_ANYTHING(validate)
ENGINE_TAKES_ANYTHING(resolve)
ENGINE_TAKES_ANYTHING(check_attention_views)
ENGINE_TAKES_ANYTHING(check_backward_views)
ENGINE_TAKES_ANYTHING(check_gate_gradients)
ENGINE_TAKES_ANYTHING(check_mass_arguments)
ENGINE_TAKES_ANYTHING(heads_slice)
ENGINE_TAKES_ANYTHING(require_apart)
ENGINE_TAKES_ANYTHING(require_data)
ENGINE_TAKES_ANYTHING(require_disjoint)
ENGINE_TAKES_ANYTHING(require_distinct_elements)
ENGINE_TAKES_ANYTHING(require_length)
ENGINE_TAKES_ANYTHING(require_shape)
ENGINE_TAKES_ANYTHING(require_tensor)
ENGINE_TAKES_ANYTHING(span_view)
ENGINE_TAKES_ANYTHING(write_row)
ENGINE_TAKES_ANYTHING(write_rows)
ENGINE_TAKES_ANYTHING(run_attention)
ENGINE_TAKES_ANYTHING(run_sparse_attention)
ENGINE_TAKES_ANYTHING(run_soft_gate)
ENGINE_TAKES_ANYTHING(run_backward)
ENGINE_TAKES_ANYTHING(run_sparse_backward)
ENGINE_TAKES_ANYTHING(run_attention_backward)
ENGINE_TAKES_ANYTHING(run_call)
ENGINE_TAKES_ANYTHING(run_batch)
ENGINE_TAKES_ANYTHING(sequence_slice)
ENGINE_TAKES_ANYTHING(shape_beside)
ENGINE_TAKES_ANYTHING(for_each_sequence)
ENGINE_TAKES_ANYTHING(check_attention_inputs)
ENGINE_TAKES_ANYTHING(wanted_of)
ENGINE_TAKES_ANYTHING(run_soft_gate_backward)
ENGINE_TAKES_ANYTHING(run_retained_mass)
ENGINE_TAKES_ANYTHING(run_centroid_scores)
ENGINE_TAKES_ANYTHING(run_route)
ENGINE_TAKES_ANYTHING(run_merge)
ENGINE_TAKES_ANYTHING(run_sinkhorn)
ENGINE_TAKES_ANYTHING(run_assign_groups)
ENGINE_TAKES_ANYTHING(run_sinkhorn_backward)
ENGINE_TAKES_ANYTHING(run_centroid_gradient)
ENGINE_TAKES_ANYTHING(plan_gates)
ENGINE_TAKES_ANYTHING(query_factor)
ENGINE_TAKES_ANYTHING(local_pass)
ENGINE_TAKES_ANYTHING(pack_assignment)
ENGINE_TAKES_ANYTHING(pack_rows_as_columns)
ENGINE_TAKES_ANYTHING(pack_row_pair)
ENGINE_TAKES_ANYTHING(load_bits)
ENGINE_TAKES_ANYTHING(for_each_head_batch)
ENGINE_TAKES_ANYTHING(for_each_query_tile)
ENGINE_TAKES_ANYTHING(attend_local)
ENGINE_TAKES_ANYTHING(attend_distant)
ENGINE_TAKES_ANYTHING(with_operands)
#undef ENGINE_TAKES_ANYTHING

/// An executor from the same namespace.
struct executor {
  static focus::index_t concurrency() { return 1; }
  template <class F>
  void parallel_for(focus::index_t tasks, F&& body) const {
    for (focus::index_t task = 0; task < tasks; ++task) body(task, focus::index_t{0});
  }
};

}  // namespace engine

template <>
struct focus::scalar_traits<engine::half_precision> {
  using accumulator = float;
  static constexpr focus::storage_format format = focus::storage_format::bfloat16;
  static float to_accumulator(engine::half_precision x) {
    return focus::scalar_traits<focus::bfloat16>::to_accumulator({x.bits});
  }
  static engine::half_precision from_accumulator(float x) {
    return {focus::scalar_traits<focus::bfloat16>::from_accumulator(x).bits};
  }
};

int main() {
  constexpr focus::index_t n = 20, d = 8, groups = 2;
  using element = engine::half_precision;
  std::vector<element> data(n * d), outputs(4 * n * d);
  for (auto& x : data) x = focus::scalar_traits<element>::from_accumulator(0.5f);
  const focus::tensor_view<const element, 3> x(data.data(), {1, n, d});
  const auto output = [&](focus::index_t at) {
    return focus::tensor_view<element, 3>(outputs.data() + at * n * d, {1, n, d});
  };
  std::vector<float> lse_data(n), dlse_data(n), scores(n * groups), shares(n * groups, 0.5f),
      slopes(n * groups), potentials(groups);
  const focus::matrix_view<float> lse(lse_data.data(), {1, n}), dlse(dlse_data.data(), {1, n}),
      s(scores.data(), {n, groups}), g(shares.data(), {n, groups}), dg(slopes.data(), {n, groups});
  const engine::executor exec;

  const focus::matrix_view<const element> hidden(data.data(), {n, d});
  const focus::centroid_params<element> router{.projection = {data.data(), {d, 4}},
                                               .centroids = {data.data(), {groups, 4}}};
  focus::centroid_scores(hidden, router, s, exec);
  focus::sinkhorn(s, g, potentials, {}, exec);
  focus::sinkhorn_backward(s, g, potentials, g, dg, {}, exec);
  focus::assign_groups_backward(s, potentials, g, g, dg, {}, {}, exec);
  focus::centroid_scores_backward(hidden, router, dg, {}, {}, {}, {}, exec);
  std::vector<focus::group_mask> masks(n);
  focus::route(hidden, router, potentials, 1, masks, {}, exec);
  const focus::routing_plan plan = focus::make_routing_plan(masks, {.window = 2});

  focus::attention(x, x, x, output(0), focus::full_causal, {}, lse, exec);
  focus::attention_backward(x, x, x, output(0), lse, x, output(1), output(2), output(3),
                            focus::full_causal, {}, exec);
  focus::attention_backward(x, x, x, output(0), lse, x, dlse, output(1), output(2), output(3),
                            focus::full_causal, {}, exec);
  focus::sparse_attention(x, x, x, plan, output(0), {}, lse, exec);
  focus::sparse_attention_backward(x, x, x, plan, output(0), lse, x, output(1), output(2),
                                   output(3), {}, exec);
  focus::sparse_attention_backward(x, x, x, plan, output(0), lse, x, dlse, output(1), output(2),
                                   output(3), {}, exec);
  // A batch of one sequence.
  const auto batch = [](const auto& view) {
    using stored = typename std::remove_cvref_t<decltype(view)>::element_type;
    return focus::tensor_view<stored, 4>(view.data(), {1, 1, n, d});
  };
  const auto b = batch(x);
  const focus::tensor_view<float, 3> batch_lse(lse.data(), {1, 1, n});
  const std::vector<focus::routing_plan> plans{plan};
  focus::attention(b, b, b, batch(output(0)), focus::full_causal, {}, batch_lse, exec);
  focus::attention_backward(b, b, b, batch(output(0)), batch_lse, b, batch(output(1)), {}, {},
                            focus::full_causal, {}, exec);
  focus::sparse_attention(b, b, b, plans, batch(output(0)), {}, batch_lse, exec);
  focus::sparse_attention_backward(b, b, b, plans, batch(output(0)), batch_lse, b, batch_lse,
                                   batch(output(1)), {}, {}, {}, exec);
  focus::reference::sparse_attention(b, b, b, plans, batch(output(0)));
  focus::reference::attention_backward(b, b, b, batch(output(0)), batch_lse, b, batch(output(1)),
                                       {}, {});
  focus::soft_gate_attention(x, x, x, g, g, {}, output(0), {}, {}, lse, exec);
  focus::soft_gate_attention_backward(x, x, x, g, g, {}, output(0), lse, x, {}, output(1),
                                      output(2), output(3), dg, {}, {}, {}, exec);
  focus::merge_attention_states(output(0), lse, output(0), lse, output(1), lse, exec);
  focus::reference::attention_backward(x, x, x, output(0), lse, x, output(1), output(2), output(3));
  const double loss = focus::retained_mass_loss(x, x, g, g, dg, {}, {}, {}, {}, exec);
  std::printf("%g\n", loss);
  return loss == loss ? 0 : 1;
}
