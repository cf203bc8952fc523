// Each function of the library once, on three threads, against focus::reference, without a test
// framework: what compiles and holds under any flags, and what the thread sanitizer sees. Finite
// inputs and empty rows only: -ffast-math promises no more. Some values by hand, since the flags
// are the reference's, too.
#include <cstdio>
#include <cstdlib>

#if !defined(__cpp_exceptions)
// Bad arguments end here when exceptions are off.
[[noreturn]] inline void focus_test_panic(const char* text) {
  std::printf("panic: %s\n", text);
  std::exit(EXIT_SUCCESS);
}
#define FOCUS_PANIC(text) focus_test_panic(text)
#endif

#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

#include <focus/focus.hpp>
#include <focus/reference.hpp>

namespace {

using focus::index_t;

constexpr index_t heads = 2, kv_heads = 1, tokens = 600, head_dim = 20, value_dim = 12;
constexpr index_t d_model = 24, d_group = 5, groups = 4;

/// Three threads, for all that is checked.
struct thread_executor {
  static constexpr index_t concurrency() { return 3; }
  template <class F>
  static void parallel_for(index_t tasks, F&& body) {
    std::atomic<index_t> next{0};
    const auto work = [&](index_t worker) {
      for (index_t task = next++; task < tasks; task = next++) body(task, worker);
    };
    std::thread second(work, index_t{1}), third(work, index_t{2});
    work(index_t{0});
    second.join();
    third.join();
  }
};
constexpr thread_executor threads;

int failures = 0;

void check(bool good, const char* what) {
  if (good) return;
  std::printf("failed: %s\n", what);
  ++failures;
}

/// The values of one tensor, in [-1, 1).
template <int Rank>
class tensor {
  using shape = std::array<index_t, static_cast<std::size_t>(Rank)>;

 public:
  explicit tensor(shape extents, bool fill = true) : extents_(extents) {
    index_t size = 1;
    for (index_t e : extents) size *= e;
    values_.resize(static_cast<std::size_t>(size), 7.0f);
    if (!fill) return;
    static std::uint32_t state = 1;
    for (float& x : values_) {
      state = state * 1664525u + 1013904223u;
      x = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
    }
  }
  focus::tensor_view<float, Rank> view() { return {values_.data(), extents_}; }

  bool close_to(const tensor& other) const {
    for (std::size_t i = 0; i < values_.size(); ++i)
      if (!(std::abs(values_[i] - other.values_[i]) <= 2e-5f * (1 + std::abs(other.values_[i]))))
        return false;
    return true;
  }
  std::vector<float>& values() { return values_; }

 private:
  shape extents_;
  std::vector<float> values_;
};

/// By reference: a compiler that is told that there are no infinities passes none by value.
bool is_minus_infinity(const float& x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits == 0xff800000u;
}

/// The gradients with regard to Q, K, V and the assignments.
struct gradients {
  tensor<3> dq{{heads, tokens, head_dim}, false}, dk{{kv_heads, tokens, head_dim}, false},
      dv{{kv_heads, tokens, value_dim}, false};
  tensor<2> dquery{{tokens, groups}, false}, dkey{{tokens, groups}, false};

  bool close_to(const gradients& other) const {
    return dq.close_to(other.dq) && dk.close_to(other.dk) && dv.close_to(other.dv) &&
           dquery.close_to(other.dquery) && dkey.close_to(other.dkey);
  }
};

/// Calls f for the library and then for its reference form, with outputs of their own, and
/// compares.
template <class F, class G>
void compare(const char* what, F&& f, G&& g) {
  tensor<3> out({heads, tokens, value_dim}, false), expected({heads, tokens, value_dim}, false);
  tensor<2> lse({heads, tokens}, false), expected_lse({heads, tokens}, false);
  f(out.view(), lse.view());
  g(expected.view(), expected_lse.view());
  check(out.close_to(expected), what);
  check(lse.close_to(expected_lse), what);
}

void check_routing(std::vector<focus::group_mask>& masks, tensor<2>& assignment) {
  tensor<2> hidden({tokens, d_model}), projection({d_model, d_group}), centroids({groups, d_group});
  const focus::centroid_params<float> router{.projection = projection.view(),
                                             .centroids = centroids.view(),
                                             .metric = focus::similarity::cosine};
  tensor<2> scores({tokens, groups}, false), expected({tokens, groups}, false);
  focus::centroid_scores(hidden.view(), router, scores.view(), threads);
  focus::reference::centroid_scores(hidden.view(), router, expected.view());
  check(scores.close_to(expected), "centroid_scores");

  std::vector<float> potentials(groups), expected_potentials(groups);
  focus::sinkhorn(scores.view(), assignment.view(), potentials, {}, threads);
  focus::reference::sinkhorn(scores.view(), expected.view(), expected_potentials);
  check(assignment.close_to(expected), "sinkhorn");

  focus::assign_groups(scores.view(), potentials, assignment.view(), {}, threads);
  focus::reference::assign_groups(scores.view(), potentials, expected.view());
  check(assignment.close_to(expected), "assign_groups");

  std::vector<focus::group_mask> routed(masks.size());
  focus::top_k_groups(assignment.view(), 2, masks);
  focus::route(hidden.view(), router, potentials, 2, routed, {}, threads);
  check(masks == routed, "route, top_k_groups");

  // And all the way back.
  tensor<2> dassignment({tokens, groups}), dscores({tokens, groups}, false);
  focus::assign_groups_backward(scores.view(), potentials, assignment.view(), dassignment.view(),
                                dscores.view(), {}, {}, threads);
  focus::reference::assign_groups_backward(scores.view(), potentials, assignment.view(),
                                           dassignment.view(), expected.view(), {});
  check(dscores.close_to(expected), "assign_groups_backward");
  focus::sinkhorn_backward(scores.view(), assignment.view(), potentials, dassignment.view(),
                           dscores.view(), {}, threads);
  focus::reference::sinkhorn_backward(scores.view(), assignment.view(), potentials,
                                      dassignment.view(), expected.view());
  check(dscores.close_to(expected), "sinkhorn_backward");
  tensor<2> dhidden({tokens, d_model}, false), expected_dhidden({tokens, d_model}, false),
      dprojection({d_model, d_group}, false), expected_dprojection({d_model, d_group}, false);
  focus::centroid_scores_backward(hidden.view(), router, dassignment.view(), dhidden.view(),
                                  dprojection.view(), {}, {}, threads);
  focus::reference::centroid_scores_backward(hidden.view(), router, dassignment.view(),
                                             expected_dhidden.view(), expected_dprojection.view(),
                                             {}, {});
  check(dhidden.close_to(expected_dhidden), "centroid_scores_backward: dhidden");
  check(dprojection.close_to(expected_dprojection), "centroid_scores_backward: dprojection");
}

void check_attention(const std::vector<focus::group_mask>& masks, tensor<2>& assignment) {
  tensor<3> q({heads, tokens, head_dim}), k({kv_heads, tokens, head_dim}),
      v({kv_heads, tokens, value_dim});
  const focus::pattern_options pattern{.window = 9, .sink_tokens = 2};

  compare(
      "attention",
      [&](auto out, auto lse) {
        focus::attention(q.view(), k.view(), v.view(), out, pattern, {}, lse, threads);
      },
      [&](auto out, auto lse) {
        focus::reference::attention(q.view(), k.view(), v.view(), out, pattern, {}, lse);
      });

  const auto plan = focus::make_routing_plan(masks, pattern);
  compare(
      "sparse_attention",
      [&](auto out, auto lse) {
        focus::sparse_attention(q.view(), k.view(), v.view(), plan, out, {}, lse, threads);
      },
      [&](auto out, auto lse) {
        focus::reference::sparse_attention(q.view(), k.view(), v.view(), masks, masks, pattern, out,
                                           {}, lse);
      });

  for (const auto kind : {focus::gate_kind::score, focus::gate_kind::weight})
    compare(
        "soft_gate_attention",
        [&](auto out, auto lse) {
          focus::soft_gate_attention(q.view(), k.view(), v.view(), assignment.view(),
                                     assignment.view(), {.kind = kind}, out, pattern, {}, lse,
                                     threads);
        },
        [&](auto out, auto lse) {
          focus::reference::soft_gate_attention(q.view(), k.view(), v.view(), assignment.view(),
                                                assignment.view(), {.kind = kind}, out, pattern, {},
                                                lse);
        });

  // All rows over a cache of all tokens, then the last of them, as a step of generation has it.
  focus::kv_cache<float> cache(kv_heads, head_dim, value_dim, pattern);
  cache.append(k.view(), v.view(), masks, threads);
  compare(
      "decode_attention",
      [&](auto out, auto lse) {
        focus::decode_attention(q.view(), masks, cache, out, {}, lse, threads);
      },
      [&](auto out, auto lse) {
        focus::reference::sparse_attention(q.view(), k.view(), v.view(), masks, masks, pattern, out,
                                           {}, lse);
      });
  tensor<3> last({heads, 2, head_dim}), step({heads, 2, value_dim}, false),
      expected_step({heads, 2, value_dim}, false);
  const auto last_masks = std::span(masks).last(2);
  focus::decode_attention(last.view(), last_masks, cache, step.view(), {}, {}, threads);
  focus::reference::decode_attention(last.view(), last_masks, cache, expected_step.view());
  check(step.close_to(expected_step), "decode_attention of two tokens");

  // Rows that see nothing: zeros and -infinity, to the bit, and neutral when merged.
  tensor<3> empty({heads, tokens, value_dim}, false), other({heads, tokens, value_dim}, false),
      merged({heads, tokens, value_dim}, false);
  tensor<2> empty_lse({heads, tokens}, false), other_lse({heads, tokens}, false),
      merged_lse({heads, tokens}, false);
  focus::attention(q.view(), k.view(), v.view(), empty.view(), {.window = focus::no_window}, {},
                   empty_lse.view());
  bool zero = true;
  for (float x : empty.values()) zero = zero && std::bit_cast<std::uint32_t>(x) == 0u;
  for (const float& x : empty_lse.values()) zero = zero && is_minus_infinity(x);
  check(zero, "empty rows");
  focus::attention(q.view(), k.view(), v.view(), other.view(), pattern, {}, other_lse.view());
  focus::merge_attention_states(empty.view(), empty_lse.view(), other.view(), other_lse.view(),
                                merged.view(), merged_lse.view(), threads);
  check(merged.values() == other.values() && merged_lse.values() == other_lse.values(),
        "merge_attention_states");
}

/// Equal scores: row i is the mean of the values 0 ... i, and its lse log(i + 1).
void check_by_hand() {
  constexpr index_t n = 70, d = 8;
  tensor<3> q({1, n, d}, false), k({1, n, d}), v({1, n, d}, false), out({1, n, d}, false);
  tensor<2> lse({1, n}, false);
  for (float& x : q.values()) x = 0;
  for (index_t j = 0; j < n; ++j)
    for (index_t c = 0; c < d; ++c) v.view()(0, j, c) = static_cast<float>(j);
  const auto holds = [&](const char* what) {
    bool good = true;
    for (index_t i = 0; i < n; ++i) {
      const auto row = static_cast<float>(i);
      good = good && std::abs(out.view()(0, i, d - 1) - row / 2) < 1e-4f &&
             std::abs(lse.view()(0, i) - std::log(row + 1)) < 1e-5f;
    }
    check(good, what);
  };
  focus::attention(q.view(), k.view(), v.view(), out.view(), focus::full_causal, {}, lse.view());
  holds("attention by hand");
  const std::vector<focus::group_mask> one_group(n, 1);
  const auto plan = focus::make_routing_plan(one_group, {.window = 3});
  focus::sparse_attention(q.view(), k.view(), v.view(), plan, out.view(), {}, lse.view());
  holds("sparse_attention by hand");
  focus::reference::attention(q.view(), k.view(), v.view(), out.view(), focus::full_causal, {},
                              lse.view());
  holds("reference::attention by hand");

  tensor<2> scores({n, 5}), assignment({n, 5}, false);
  std::vector<float> potentials(5);
  focus::sinkhorn(scores.view(), assignment.view(), potentials);
  bool sums_to_1 = true;
  for (index_t i = 0; i < n; ++i) {
    float sum = 0;
    for (index_t g = 0; g < 5; ++g) sum += assignment.view()(i, g);
    sums_to_1 = sums_to_1 && std::abs(sum - 1) < 1e-5f;
  }
  check(sums_to_1, "rows of sinkhorn sum to 1");
}

/// Stored in bfloat16, and multiplied as it is where the instruction set does that.
void check_bfloat16(const std::vector<focus::group_mask>& masks, tensor<2>& assignment) {
  using traits = focus::scalar_traits<focus::bfloat16>;
  using narrow_view = focus::tensor_view<focus::bfloat16, 3>;
  tensor<3> q({heads, tokens, head_dim}), k({kv_heads, tokens, head_dim}),
      v({kv_heads, tokens, value_dim}), dout({heads, tokens, value_dim}),
      expected({heads, tokens, value_dim}, false);
  const auto narrowed = [](tensor<3>& x) {
    std::vector<focus::bfloat16> bits;
    for (float& value : x.values()) {
      bits.push_back(traits::from_accumulator(value));
      value = traits::to_accumulator(bits.back());
    }
    return bits;
  };
  std::vector<focus::bfloat16> narrow_q = narrowed(q), narrow_k = narrowed(k),
                               narrow_v = narrowed(v), narrow_dout = narrowed(dout),
                               narrow_out = narrowed(expected);
  const narrow_view q_view(narrow_q.data(), q.view().extents()),
      k_view(narrow_k.data(), k.view().extents()), v_view(narrow_v.data(), v.view().extents()),
      dout_view(narrow_dout.data(), dout.view().extents()),
      out(narrow_out.data(), expected.view().extents());
  const auto close_to = [](const std::vector<focus::bfloat16>& got, tensor<3>& truth) {
    bool good = true;
    for (std::size_t i = 0; i < got.size(); ++i)
      good = good && std::abs(traits::to_accumulator(got[i]) - truth.values()[i]) < 0x1p-6f;
    return good;
  };
  const auto close = [&] {
    return close_to(narrow_out, expected);
  };
  focus::attention(q_view, k_view, v_view, out, {.window = 70}, {}, {}, threads);
  focus::reference::attention(q.view(), k.view(), v.view(), expected.view(), {.window = 70});
  check(close(), "attention in bfloat16");
  const focus::pattern_options pattern{.window = 9, .sink_tokens = 2};
  focus::sparse_attention(q_view, k_view, v_view, focus::make_routing_plan(masks, pattern), out, {},
                          {}, threads);
  focus::reference::sparse_attention(q.view(), k.view(), v.view(), masks, masks, pattern,
                                     expected.view());
  check(close(), "sparse_attention in bfloat16");
  const focus::gate_options gate{.kind = focus::gate_kind::weight};
  focus::soft_gate_attention(q_view, k_view, v_view, assignment.view(), assignment.view(), gate,
                             out, pattern, {}, {}, threads);
  focus::reference::soft_gate_attention(q.view(), k.view(), v.view(), assignment.view(),
                                        assignment.view(), gate, expected.view(), pattern);
  check(close(), "soft_gate_attention in bfloat16");

  gradients truth;
  std::vector<focus::bfloat16> dq(narrow_q.size()), dk(narrow_k.size()), dv(narrow_v.size());
  const narrow_view dq_view(dq.data(), q.view().extents()), dk_view(dk.data(), k.view().extents()),
      dv_view(dv.data(), v.view().extents());
  tensor<2> lse({heads, tokens}, false), dlse({heads, tokens});
  const auto check_gradients = [&](const char* what) {
    check(close_to(dq, truth.dq) && close_to(dk, truth.dk) && close_to(dv, truth.dv), what);
  };
  focus::attention(q_view, k_view, v_view, out, pattern, {}, lse.view());
  focus::attention_backward(q_view, k_view, v_view, out, lse.view(), dout_view, dq_view, dk_view,
                            dv_view, pattern, {}, threads);
  focus::reference::attention_backward(q.view(), k.view(), v.view(), expected.view(), lse.view(),
                                       dout.view(), truth.dq.view(), truth.dk.view(),
                                       truth.dv.view(), pattern);
  check_gradients("attention_backward in bfloat16");
  const auto plan = focus::make_routing_plan(masks, pattern);
  focus::sparse_attention(q_view, k_view, v_view, plan, out, {}, lse.view());
  focus::sparse_attention_backward(q_view, k_view, v_view, plan, out, lse.view(), dout_view,
                                   dq_view, dk_view, dv_view, {}, threads);
  focus::reference::sparse_attention_backward(q.view(), k.view(), v.view(), plan, expected.view(),
                                              lse.view(), dout.view(), truth.dq.view(),
                                              truth.dk.view(), truth.dv.view());
  check_gradients("sparse_attention_backward in bfloat16");
  focus::soft_gate_attention(q_view, k_view, v_view, assignment.view(), assignment.view(), gate,
                             out, pattern, {}, lse.view());
  gradients got;
  focus::soft_gate_attention_backward(q_view, k_view, v_view, assignment.view(), assignment.view(),
                                      gate, out, lse.view(), dout_view, dlse.view(), dq_view,
                                      dk_view, dv_view, got.dquery.view(), got.dkey.view(), pattern,
                                      {}, threads);
  focus::reference::soft_gate_attention_backward(
      q.view(), k.view(), v.view(), assignment.view(), assignment.view(), gate, expected.view(),
      lse.view(), dout.view(), dlse.view(), truth.dq.view(), truth.dk.view(), truth.dv.view(),
      truth.dquery.view(), truth.dkey.view(), pattern);
  check_gradients("soft_gate_attention_backward in bfloat16");
}

void check_gradients(const std::vector<focus::group_mask>& masks, tensor<2>& assignment) {
  tensor<3> q({heads, tokens, head_dim}), k({kv_heads, tokens, head_dim}),
      v({kv_heads, tokens, value_dim}), out({heads, tokens, value_dim}, false),
      dout({heads, tokens, value_dim});
  tensor<2> lse({heads, tokens}, false), dlse({heads, tokens});
  const focus::pattern_options pattern{.window = 9, .sink_tokens = 2};
  {
    gradients got, expected;
    focus::attention(q.view(), k.view(), v.view(), out.view(), pattern, {}, lse.view());
    focus::attention_backward(q.view(), k.view(), v.view(), out.view(), lse.view(), dout.view(),
                              got.dq.view(), got.dk.view(), got.dv.view(), pattern, {}, threads);
    focus::reference::attention_backward(q.view(), k.view(), v.view(), out.view(), lse.view(),
                                         dout.view(), expected.dq.view(), expected.dk.view(),
                                         expected.dv.view(), pattern);
    check(got.close_to(expected), "attention_backward");
    focus::attention_backward(q.view(), k.view(), v.view(), out.view(), lse.view(), dout.view(),
                              dlse.view(), got.dq.view(), got.dk.view(), got.dv.view(), pattern, {},
                              threads);
    focus::reference::attention_backward(q.view(), k.view(), v.view(), out.view(), lse.view(),
                                         dout.view(), dlse.view(), expected.dq.view(),
                                         expected.dk.view(), expected.dv.view(), pattern);
    check(got.close_to(expected), "attention_backward with dlse");
  }
  {
    gradients got, expected;
    const auto plan = focus::make_routing_plan(masks, pattern);
    focus::sparse_attention(q.view(), k.view(), v.view(), plan, out.view(), {}, lse.view());
    focus::sparse_attention_backward(q.view(), k.view(), v.view(), plan, out.view(), lse.view(),
                                     dout.view(), got.dq.view(), got.dk.view(), got.dv.view(), {},
                                     threads);
    focus::reference::sparse_attention_backward(q.view(), k.view(), v.view(), plan, out.view(),
                                                lse.view(), dout.view(), expected.dq.view(),
                                                expected.dk.view(), expected.dv.view());
    check(got.close_to(expected), "sparse_attention_backward");
    focus::sparse_attention_backward(q.view(), k.view(), v.view(), plan, {}, lse.view(), {},
                                     dlse.view(), got.dq.view(), got.dk.view(), got.dv.view(), {},
                                     threads);
    focus::reference::sparse_attention_backward(q.view(), k.view(), v.view(), plan, {}, lse.view(),
                                                {}, dlse.view(), expected.dq.view(),
                                                expected.dk.view(), expected.dv.view());
    check(got.close_to(expected), "sparse_attention_backward of lse alone");
  }
  for (const auto kind : {focus::gate_kind::score, focus::gate_kind::weight}) {
    gradients got, expected;
    const focus::gate_options gate{.kind = kind, .sharpness = 2.0};
    focus::soft_gate_attention(q.view(), k.view(), v.view(), assignment.view(), assignment.view(),
                               gate, out.view(), pattern, {}, lse.view());
    focus::soft_gate_attention_backward(
        q.view(), k.view(), v.view(), assignment.view(), assignment.view(), gate, out.view(),
        lse.view(), dout.view(), dlse.view(), got.dq.view(), got.dk.view(), got.dv.view(),
        got.dquery.view(), got.dkey.view(), pattern, {}, threads);
    focus::reference::soft_gate_attention_backward(
        q.view(), k.view(), v.view(), assignment.view(), assignment.view(), gate, out.view(),
        lse.view(), dout.view(), dlse.view(), expected.dq.view(), expected.dk.view(),
        expected.dv.view(), expected.dquery.view(), expected.dkey.view(), pattern);
    check(got.close_to(expected), "soft_gate_attention_backward");
  }
  // The mass that an open gate keeps is all of it.
  gradients unused;
  const double loss =
      focus::retained_mass_loss(q.view(), k.view(), assignment.view(), assignment.view(),
                                unused.dquery.view(), {}, {}, focus::full_causal, {}, threads);
  check(std::abs(loss) < 1e-5, "retained_mass_loss");
}

/// The tokens as a batch of that many sequences: two, which the threads share one after the other,
/// or as many as make each a task.
void check_batch(index_t batch, const std::vector<focus::group_mask>& masks) {
  const index_t each = tokens / batch;
  tensor<4> q({batch, heads, each, head_dim}), k({batch, kv_heads, each, head_dim}),
      v({batch, kv_heads, each, value_dim}), dout({batch, heads, each, value_dim}),
      out({batch, heads, each, value_dim}, false),
      expected_out({batch, heads, each, value_dim}, false),
      dq({batch, heads, each, head_dim}, false), expected_dq({batch, heads, each, head_dim}, false),
      dk({batch, kv_heads, each, head_dim}, false),
      expected_dk({batch, kv_heads, each, head_dim}, false),
      dv({batch, kv_heads, each, value_dim}, false),
      expected_dv({batch, kv_heads, each, value_dim}, false);
  tensor<3> lse({batch, heads, each}, false), expected_lse({batch, heads, each}, false),
      dlse({batch, heads, each});
  const focus::pattern_options pattern{.window = 9, .sink_tokens = 2};
  std::vector<focus::routing_plan> plans;
  for (index_t b = 0; b < batch; ++b)
    plans.push_back(
        focus::make_routing_plan(std::span(masks).subspan(static_cast<std::size_t>(b * each),
                                                          static_cast<std::size_t>(each)),
                                 pattern));
  const auto check_all = [&](const char* what) {
    check(out.close_to(expected_out) && lse.close_to(expected_lse) && dq.close_to(expected_dq) &&
              dk.close_to(expected_dk) && dv.close_to(expected_dv),
          what);
  };

  focus::attention(q.view(), k.view(), v.view(), out.view(), pattern, {}, lse.view(), threads);
  focus::reference::attention(q.view(), k.view(), v.view(), expected_out.view(), pattern, {},
                              expected_lse.view());
  focus::attention_backward(q.view(), k.view(), v.view(), out.view(), lse.view(), dout.view(),
                            dq.view(), dk.view(), dv.view(), pattern, {}, threads);
  focus::reference::attention_backward(q.view(), k.view(), v.view(), out.view(), lse.view(),
                                       dout.view(), expected_dq.view(), expected_dk.view(),
                                       expected_dv.view(), pattern);
  check_all("attention of a batch");

  focus::sparse_attention(q.view(), k.view(), v.view(), plans, out.view(), {}, lse.view(), threads);
  focus::reference::sparse_attention(q.view(), k.view(), v.view(), plans, expected_out.view(), {},
                                     expected_lse.view());
  focus::sparse_attention_backward(q.view(), k.view(), v.view(), plans, out.view(), lse.view(),
                                   dout.view(), dlse.view(), dq.view(), dk.view(), dv.view(), {},
                                   threads);
  focus::reference::sparse_attention_backward(
      q.view(), k.view(), v.view(), plans, out.view(), lse.view(), dout.view(), dlse.view(),
      expected_dq.view(), expected_dk.view(), expected_dv.view());
  check_all("sparse_attention of a batch, with dlse");
}

void check_bad_argument() {
  tensor<3> q({heads, tokens, head_dim}), out({heads, tokens, head_dim}, false);
  const auto misuse = [&] {
    focus::attention(q.view(), q.view(), q.view(), out.view(), {.window = -7});
  };
#if defined(__cpp_exceptions)
  try {
    misuse();
    check(false, "a bad argument was accepted");
  } catch (const focus::invalid_argument&) {
  }
#else
  if (failures == 0) misuse();
  check(false, "a bad argument was accepted");
#endif
}

}  // namespace

int main() {
  std::vector<focus::group_mask> masks(tokens);
  tensor<2> assignment({tokens, groups}, false);
  check_routing(masks, assignment);
  check_attention(masks, assignment);
  check_by_hand();
  check_bfloat16(masks, assignment);
  check_gradients(masks, assignment);
  for (const index_t batch : {2, 6}) check_batch(batch, masks);
  check_bad_argument();
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
