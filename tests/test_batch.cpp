// Batches of sequences: the bits of a loop of calls for one sequence, for any threads; memory,
// exceptions, refusals.
#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "allocations.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/attention.hpp"
#include "focus/attention_backward.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/reference.hpp"
#include "focus/routing_plan.hpp"
#include "focus/scalar.hpp"
#include "focus/sparse_attention.hpp"
#include "focus/sparse_attention_backward.hpp"
#include "focus/tensor_view.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"

namespace test_batch {
namespace {

using namespace oracle;

/// Says that it has many workers, and lets one at a time do a task, in turns.
struct many_workers {
  static index_t concurrency() { return 16; }
  template <class F>
  void parallel_for(index_t tasks, F&& body) const {
    for (index_t task = tasks; task-- > 0;) body(task, (5 * task + 3) % 16);
  }
};

/// attention_case: of each sequence, but for its groups.
struct batch_case {
  index_t batch = 3;
  attention_case each = {};
  bool dout = true, dlse = false;
  std::vector<grouping> groups = {grouping::balanced};  // of the sequences, by turns
};

std::string describe(const batch_case& c) {
  return "batch " + std::to_string(c.batch) + (c.dout ? "" : ", no dout") +
         (c.dlse ? ", dlse" : "") + ", first grouping " +
         std::to_string(static_cast<int>(c.groups[0])) + ": " + oracle::describe(c.each);
}

/// Sequence b of a batch.
template <class T, int Rank>
focus::tensor_view<T, Rank - 1> sequence(const focus::tensor_view<T, Rank>& x, index_t b) {
  std::array<index_t, static_cast<std::size_t>(Rank - 1)> extents, strides;
  std::copy(x.extents().begin() + 1, x.extents().end(), extents.begin());
  std::copy(x.strides().begin() + 1, x.strides().end(), strides.begin());
  return {x.data() == nullptr ? nullptr : x.data() + b * x.stride(0), extents, strides};
}

/// What the functions read.
template <class T>
struct inputs {
  using real = focus::accumulator_t<T>;
  batch_case spec;
  guarded_tensor<T, 4> q, k, v, dout;
  guarded_tensor<real, 4> out;
  guarded_tensor<real, 3> lse, dlse;
  std::vector<focus::routing_plan> plans;

  FOCUS_NOINLINE explicit inputs(const batch_case& b)
      : spec(b),
        q({b.batch, b.each.heads, b.each.n_q, b.each.d}, b.each.memory),
        k({b.batch, b.each.kv_heads, b.each.n_k, b.each.d}, b.each.memory),
        v({b.batch, b.each.kv_heads, b.each.n_k, b.each.d_v}, b.each.memory),
        dout({b.batch, b.each.heads, b.each.n_q, b.each.d_v}, b.each.memory),
        out({b.batch, b.each.heads, b.each.n_q, b.each.d_v}, b.each.memory),
        lse({b.batch, b.each.heads, b.each.n_q}, b.each.memory),
        dlse({b.batch, b.each.heads, b.each.n_q}, b.each.memory) {
    generator random(b.each.seed);
    const auto normal = [&] {
      return random.normal();
    };
    q.fill(normal), k.fill(normal), v.fill(normal), dout.fill(normal), dlse.fill(normal);
    for (index_t s = 0; s < b.batch; ++s) {
      const grouping groups = b.groups[static_cast<std::size_t>(s) % b.groups.size()];
      const auto masks = [&](index_t n, std::uint64_t seed) {
        return make_masks(n, groups, b.each.group_count, b.each.top_k, seed);
      };
      const auto seed = static_cast<std::uint64_t>(100 + s);
      plans.push_back(focus::make_routing_plan(masks(b.each.n_q, seed),
                                               masks(b.each.n_k, seed + 50), b.each.pattern));
    }
  }
};

/// What they write.
template <class T>
struct outputs {
  guarded_tensor<T, 4> out, dq, dk, dv;
  guarded_tensor<float, 3> lse;

  FOCUS_NOINLINE explicit outputs(const batch_case& b)
      : out({b.batch, b.each.heads, b.each.n_q, b.each.d_v}, b.each.memory),
        dq({b.batch, b.each.heads, b.each.n_q, b.each.d}, b.each.memory),
        dk({b.batch, b.each.kv_heads, b.each.n_k, b.each.d}, b.each.memory),
        dv({b.batch, b.each.kv_heads, b.each.n_k, b.each.d_v}, b.each.memory),
        lse({b.batch, b.each.heads, b.each.n_q}, b.each.memory) {}

  bool guards_hold() const {
    return out.guards_hold() && dq.guards_hold() && dk.guards_hold() && dv.guards_hold() &&
           lse.guards_hold();
  }
  bool untouched() const {
    return out.untouched() && dq.untouched() && dk.untouched() && dv.untouched() && lse.untouched();
  }
  bool same_bits(const outputs& other) const {
    return out.same_bits(other.out) && dq.same_bits(other.dq) && dk.same_bits(other.dk) &&
           dv.same_bits(other.dv) && lse.same_bits(other.lse);
  }
};

/// The functions under test, on tensors of either rank: `plans` is a plan, or those of a batch.
struct library {
  template <class... Arguments>
  static void attend(const Arguments&... x) {
    focus::attention(x...);
  }
  template <class... Arguments>
  static void attend_sparsely(const Arguments&... x) {
    focus::sparse_attention(x...);
  }
  template <class... Arguments>
  static void differentiate(const Arguments&... x) {
    focus::attention_backward(x...);
  }
  template <class... Arguments>
  static void differentiate_sparsely(const Arguments&... x) {
    focus::sparse_attention_backward(x...);
  }
};
struct textbook {
  template <class... Arguments>
  static void attend(const Arguments&... x) {
    focus::reference::attention(x...);
  }
  template <class... Arguments>
  static void attend_sparsely(const Arguments&... x) {
    focus::reference::sparse_attention(x...);
  }
  template <class... Arguments>
  static void differentiate(const Arguments&... x) {
    focus::reference::attention_backward(x...);
  }
  template <class... Arguments>
  static void differentiate_sparsely(const Arguments&... x) {
    focus::reference::sparse_attention_backward(x...);
  }
};

template <class Functions, operation Op, class Q, class K, class V, class Plans, class Out,
          class Lse, class Exec>
void attend(const batch_case& c, const Q& q, const K& k, const V& v, const Plans& plans,
            const Out& out, const Lse& lse, Exec&& exec) {
  if constexpr (Op == operation::attention)
    Functions::attend(q, k, v, out, c.each.pattern, c.each.score, lse, exec);
  else
    Functions::attend_sparsely(q, k, v, plans, out, c.each.score, lse, exec);
}

template <class Functions, operation Op, class Q, class K, class V, class Plans, class Out,
          class Lse, class Dout, class Dlse, class Dq, class Dk, class Dv, class Exec>
void differentiate(const batch_case& c, const Q& q, const K& k, const V& v, const Plans& plans,
                   const Out& out, const Lse& lse, const Dout& dout, const Dlse& dlse, const Dq& dq,
                   const Dk& dk, const Dv& dv, Exec&& exec) {
  const Out given_out = c.dout ? out : Out{};
  const Dout given_dout = c.dout ? dout : Dout{};
  if constexpr (Op == operation::attention) {
    if (c.dlse)
      Functions::differentiate(q, k, v, given_out, lse, given_dout, dlse, dq, dk, dv,
                               c.each.pattern, c.each.score, exec);
    else
      Functions::differentiate(q, k, v, out, lse, dout, dq, dk, dv, c.each.pattern, c.each.score,
                               exec);
  } else {
    if (c.dlse)
      Functions::differentiate_sparsely(q, k, v, plans, given_out, lse, given_dout, dlse, dq, dk,
                                        dv, c.each.score, exec);
    else
      Functions::differentiate_sparsely(q, k, v, plans, out, lse, dout, dq, dk, dv, c.each.score,
                                        exec);
  }
}

/// A loop of calls, on one thread. Also makes the out and lse that the backward pass reads.
template <class Functions, operation Op, class T>
FOCUS_NOINLINE outputs<T> one_by_one(inputs<T>& x) {
  outputs<T> y(x.spec);
  for (index_t b = 0; b < x.spec.batch; ++b) {
    const auto q = sequence(x.q.view(), b), k = sequence(x.k.view(), b),
               v = sequence(x.v.view(), b);
    const focus::routing_plan& plan = x.plans[static_cast<std::size_t>(b)];
    const focus::serial_executor exec;
    attend<Functions, Op>(x.spec, q, k, v, plan, sequence(x.out.view(), b),
                          sequence(x.lse.view(), b), exec);
    attend<Functions, Op>(x.spec, q, k, v, plan, sequence(y.out.view(), b),
                          sequence(y.lse.view(), b), exec);
    differentiate<Functions, Op>(x.spec, q, k, v, plan, sequence(x.out.view(), b),
                                 sequence(x.lse.view(), b), sequence(x.dout.view(), b),
                                 sequence(x.dlse.view(), b), sequence(y.dq.view(), b),
                                 sequence(y.dk.view(), b), sequence(y.dv.view(), b), exec);
  }
  return y;
}

/// One call for the batch.
template <class Functions, operation Op, class T, class Exec>
FOCUS_NOINLINE void all_at_once(inputs<T>& x, outputs<T>& y, Exec&& exec) {
  attend<Functions, Op>(x.spec, x.q.view(), x.k.view(), x.v.view(), x.plans, y.out.view(),
                        y.lse.view(), exec);
  differentiate<Functions, Op>(x.spec, x.q.view(), x.k.view(), x.v.view(), x.plans, x.out.view(),
                               x.lse.view(), x.dout.view(), x.dlse.view(), y.dq.view(), y.dk.view(),
                               y.dv.view(), exec);
}

/// The bits of the loop, with one thread to three, and with more workers than tasks; nothing but
/// the elements is written.
template <operation Op>
std::string check_bits(const batch_case& c) {
  std::string wrong;
  with_main_storage(c.each.type, [&]<class T>() {
    inputs<T> x(c);
    const outputs<T> expected = one_by_one<library, Op>(x);
    const auto compare = [&](const char* how, auto&& exec) {
      outputs<T> got(c);
      all_at_once<library, Op>(x, got, exec);
      if (!got.same_bits(expected)) wrong = std::string(how) + ": other bits";
      if (!got.guards_hold()) wrong = std::string(how) + ": memory outside the extents was written";
    };
    compare("serial", focus::serial_executor{});
    compare("one thread", thread_executor(1));
    compare("two threads", thread_executor(2));
    compare("three threads", thread_executor(3));
    compare("many workers", many_workers{});
  });
  return wrong;
}

void check(const batch_case& c) {
  INFO(describe(c));
  CHECK(check_bits<operation::attention>(c) == "");
  CHECK(check_bits<operation::sparse>(c) == "");
}

const std::vector<grouping> all_layouts{grouping::balanced, grouping::scattered, grouping::drawn,
                                        grouping::one_group, grouping::zero};

}  // namespace

TEST_CASE("batch: the bits of a loop, for lengths and numbers of sequences") {
  for (const index_t n : {0, 1, 2, 17, 97})
    for (const index_t batch : {0, 1, 2, 3, 7})
      check({.batch = batch,
             .each = {.heads = 4, .kv_heads = 2, .n_q = n, .n_k = n, .d = 8, .d_v = 8}});
  check({.batch = 128,
         .each = {.heads = 8,
                  .kv_heads = 8,
                  .n_q = 32,
                  .n_k = 32,
                  .pattern = focus::full_causal,
                  .top_k = 2}});
  check({.batch = 4, .each = {.heads = 3, .kv_heads = 3, .n_q = 5, .n_k = 40}});
  check({.batch = 4, .each = {.heads = 3, .kv_heads = 3, .n_q = 40, .n_k = 5}});
  check({.batch = 4, .each = {.heads = 3, .kv_heads = 3, .n_q = 0, .n_k = 5}});
  check({.batch = 4, .each = {.heads = 3, .kv_heads = 3, .n_q = 5, .n_k = 0}});
  check({.batch = 4, .each = {.heads = 0, .kv_heads = 0}});
}

TEST_CASE("batch: the bits of a loop, for storage and layouts in memory") {
  for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
    for (const layout memory : {layout::heads_first, layout::tokens_first, layout::padded,
                                layout::misaligned, layout::batch_inside})
      for (const index_t batch : {2, 9})
        check({.batch = batch,
               .each = {.heads = 4,
                        .kv_heads = 2,
                        .n_q = 33,
                        .n_k = 41,
                        .d = 20,
                        .d_v = 12,
                        .pattern = {.window = 5, .sink_tokens = 1},
                        .score = {.softcap = 3.0f},
                        .type = type,
                        .memory = memory},
               .dlse = memory == layout::padded});
}

TEST_CASE("batch: the bits of a loop, for each layout of a plan, side by side") {
  for (const index_t window : {focus::no_window, index_t{0}, index_t{9}, focus::unlimited_window})
    for (const index_t batch : {3, 10})
      check({.batch = batch,
             .each = {.heads = 4,
                      .kv_heads = 2,
                      .n_q = 150,
                      .n_k = 150,
                      .d = 8,
                      .d_v = 8,
                      .pattern = {.causal = batch == 10, .window = window},
                      .group_count = 16,
                      .top_k = 2},
             .groups = all_layouts});
}

TEST_CASE("batch: the bits of a loop, with dlse") {
  for (const bool dout : {true, false})
    for (const index_t batch : {2, 9})
      check({.batch = batch,
             .each = {.heads = 4,
                      .kv_heads = 2,
                      .n_q = 50,
                      .n_k = 30,
                      .pattern = {.window = 3}},  // rows that see no key, too
             .dout = dout,
             .dlse = true,
             .groups = all_layouts});
}

TEST_CASE("batch: the bits of a loop, where a sequence's sums are split") {
  // How many segments share the keys of a kv head depends on all kv heads of a sequence, and not on
  // how many of them a task computes, nor on the batch.
  // A task's one kv head alone would have three, with 16 kv heads it has two.
  for (const index_t kv_heads : {2, 16})
    for (const index_t batch : {1, 3})
      check({.batch = batch,
             .each = {.heads = 16,
                      .kv_heads = kv_heads,
                      .n_q = 800,
                      .n_k = 800,
                      .d = 4,
                      .d_v = 4,
                      .pattern = {.window = 390},
                      .top_k = 2}});
}

TEST_CASE("batch: gradients and lse may be left out") {
  const batch_case c{.batch = 5, .each = {.heads = 4, .kv_heads = 2}, .dlse = true};
  inputs<float> x(c);
  const outputs<float> all = one_by_one<library, operation::attention>(x);
  using none = focus::tensor_view<float, 4>;
  const auto run = [&](const auto& dq, const auto& dk, const auto& dv) {
    focus::attention_backward(x.q.view(), x.k.view(), x.v.view(), x.out.view(), x.lse.view(),
                              x.dout.view(), x.dlse.view(), dq, dk, dv, c.each.pattern);
  };
  outputs<float> y(c);
  run(y.dq.view(), none{}, none{});
  run(none{}, y.dk.view(), none{});
  run(none{}, none{}, y.dv.view());
  focus::attention(x.q.view(), x.k.view(), x.v.view(), y.out.view(), c.each.pattern);
  CHECK(y.lse.untouched());
  focus::attention(x.q.view(), x.k.view(), x.v.view(), y.out.view(), c.each.pattern, {},
                   y.lse.view());
  CHECK(y.same_bits(all));
}

TEST_CASE("batch: {} in each place that may be empty") {
  const batch_case c{.batch = 2, .each = {.heads = 4, .kv_heads = 2}};
  inputs<float> x(c);
  outputs<float> y(c);
  const auto q = x.q.view(), k = x.k.view(), v = x.v.view(), out = y.out.view(),
             dout = x.dout.view(), dq = y.dq.view();
  const auto lse = x.lse.view(), dlse = x.dlse.view();
  const auto& plans = x.plans;
  using none = focus::tensor_view<const float, 3>;
  focus::attention(q, k, v, out, {}, {}, {}, {});
  focus::attention(q, k, v, out, {}, {}, lse);
  focus::attention_backward(q, k, v, out, lse, dout, {}, {}, {}, {}, {}, {});
  focus::attention_backward(q, k, v, out, lse, dout, dq, {}, {}, {});
  focus::attention_backward(q, k, v, {}, lse, {}, dlse, {}, {}, {}, {}, {}, {});
  focus::attention_backward(q, k, v, out, lse, dout, none{}, dq, {}, {}, {.window = 2});
  focus::sparse_attention(q, k, v, plans, out, {}, {}, {});
  focus::sparse_attention(q, k, v, plans, out, {}, lse);
  focus::sparse_attention_backward(q, k, v, plans, out, lse, dout, {}, {}, {}, {}, {});
  focus::sparse_attention_backward(q, k, v, plans, {}, lse, {}, dlse, {}, {}, {}, {}, {});
  namespace reference = focus::reference;
  reference::attention(q, k, v, out, {}, {}, {}, {});
  reference::attention_backward(q, k, v, out, lse, dout, {}, {}, {}, {}, {}, {});
  reference::attention_backward(q, k, v, {}, lse, {}, dlse, {}, {}, {}, {}, {}, {});
  reference::sparse_attention(q, k, v, plans, out, {}, {}, {});
  reference::sparse_attention_backward(q, k, v, plans, out, lse, dout, {}, {}, {}, {}, {});
  reference::sparse_attention_backward(q, k, v, plans, {}, lse, {}, dlse, {}, {}, {}, {}, {});
  CHECK(y.guards_hold());

  // Plans in whatever holds them contiguously.
  const std::array<focus::routing_plan, 2> in_array{plans[0], plans[1]};
  const focus::routing_plan in_c_array[2] = {plans[0], plans[1]};
  outputs<float> z(c);
  focus::sparse_attention(q, k, v, plans, out);
  focus::sparse_attention(q, k, v, in_array, z.out.view());
  CHECK(z.out.same_bits(y.out));
  focus::sparse_attention(q, k, v, in_c_array, z.out.view());
  CHECK(z.out.same_bits(y.out));
  focus::sparse_attention(q, k, v, std::span<const focus::routing_plan>(plans), z.out.view());
  CHECK(z.out.same_bits(y.out));
}

TEST_CASE("batch: none, without data") {
  const focus::tensor_view<float, 4> none, no_sequences(nullptr, {0, 4, 10, 8});
  const focus::tensor_view<float, 3> no_lse(nullptr, {0, 4, 10});
  const std::vector<focus::routing_plan> no_plans;
  const auto call = [&](const auto& x, const auto& lse, auto&& exec) {
    focus::attention(x, x, x, x, focus::full_causal, {}, lse, exec);
    focus::sparse_attention(x, x, x, no_plans, x, {}, lse, exec);
    focus::attention_backward(x, x, x, x, lse, x, x, x, x, focus::full_causal, {}, exec);
    focus::sparse_attention_backward(x, x, x, no_plans, x, lse, x, lse, x, x, x, {}, exec);
    focus::reference::attention(x, x, x, x, focus::full_causal, {}, lse);
    focus::reference::sparse_attention_backward(x, x, x, no_plans, x, lse, x, lse, x, x, x);
  };
  call(none, focus::tensor_view<float, 3>{}, focus::serial_executor{});
  call(no_sequences, no_lse, thread_executor(2));
  // Sequences of no tokens, or of no heads.
  const focus::tensor_view<float, 4> no_tokens(nullptr, {3, 4, 0, 8}),
      no_heads(nullptr, {3, 0, 9, 8});
  focus::attention(no_tokens, no_tokens, no_tokens, no_tokens);
  focus::attention(no_heads, no_heads, no_heads, no_heads, {}, {}, {}, thread_executor(2));
}

TEST_CASE("batch: the textbook's is a loop, too") {
  for (const bool dlse : {false, true}) {
    const batch_case c{.batch = 3,
                       .each = {.heads = 4, .kv_heads = 2, .n_q = 15, .n_k = 20, .d = 5, .d_v = 3},
                       .dout = !dlse,
                       .dlse = dlse,
                       .groups = all_layouts};
    const auto compare = [&]<operation Op>(std::integral_constant<operation, Op>) {
      inputs<double> x(c);
      const outputs<double> expected = one_by_one<textbook, Op>(x);
      outputs<double> got(c), fast(c);
      all_at_once<textbook, Op>(x, got, focus::serial_executor{});
      CHECK(got.same_bits(expected));
      // And the library agrees with it.
      all_at_once<library, Op>(x, fast, thread_executor(2));
      CHECK(compare_values("out", fast.out.values(), got.out.values(), 1e-12) == "");
      CHECK(compare_values("lse", fast.lse.values(), got.lse.values(), 1e-5) == "");
      CHECK(compare_values("dq", fast.dq.values(), got.dq.values(), 1e-12) == "");
      CHECK(compare_values("dk", fast.dk.values(), got.dk.values(), 1e-12) == "");
      CHECK(compare_values("dv", fast.dv.values(), got.dv.values(), 1e-12) == "");
    };
    compare(std::integral_constant<operation, operation::attention>{});
    compare(std::integral_constant<operation, operation::sparse>{});
  }
}

namespace {

/// As many workers as it says, by turns, without threads, which would allocate. Notes what is
/// allocated when, and how many loops there are.
struct watching_executor {
  struct log {
    index_t workers = 3;
    long in_loops = 0, loops = 0, before_loops = 0;
    long start = allocation_count;
  };
  log* notes;

  index_t concurrency() const { return notes->workers; }
  template <class F>
  void parallel_for(index_t tasks, F&& body) const {
    if (notes->loops++ == 0) notes->before_loops = allocation_count - notes->start;
    const long start = allocation_count;
    for (index_t task = 0; task < tasks; ++task) body(task, task % notes->workers);
    notes->in_loops += allocation_count - start;
  }
};

/// Calls f(name, call(exec)) for each function.
template <class F>
void for_each_call(inputs<float>& x, outputs<float>& y, F&& f) {
  const batch_case& c = x.spec;
  const auto q = x.q.view(), k = x.k.view(), v = x.v.view(), dout = x.dout.view(), dq = y.dq.view(),
             dk = y.dk.view(), dv = y.dv.view();
  const auto lse = x.lse.view(), dlse = x.dlse.view();
  f("attention", [&](auto&& exec) {
    focus::attention(q, k, v, y.out.view(), c.each.pattern, {}, y.lse.view(), exec);
  });
  f("sparse_attention", [&](auto&& exec) {
    focus::sparse_attention(q, k, v, x.plans, y.out.view(), {}, y.lse.view(), exec);
  });
  f("attention_backward", [&](auto&& exec) {
    focus::attention_backward(q, k, v, x.out.view(), lse, dout, dq, dk, dv, c.each.pattern, {},
                              exec);
  });
  f("sparse_attention_backward", [&](auto&& exec) {
    focus::sparse_attention_backward(q, k, v, x.plans, x.out.view(), lse, dout, dlse, dq, dk, dv,
                                     {}, exec);
  });
}

}  // namespace

TEST_CASE("batch: one allocation a call, before the loops, and none with a workspace") {
  for (const index_t batch : {2, 20})  // fewer kv heads than twice the workers, and more
    for (const index_t workers : {1, 3, 7}) {
      const batch_case c{.batch = batch,
                         .each = {.heads = 4,
                                  .kv_heads = 2,
                                  .n_q = 100,
                                  .n_k = 100,
                                  .pattern = {.window = 9},
                                  .group_count = 16,
                                  .top_k = 2},
                         .groups = all_layouts};
      inputs<float> x(c);
      one_by_one<library, operation::sparse>(x);
      outputs<float> y(c);
      for_each_call(x, y, [&](const char* name, auto&& call) {
        INFO(name << ", batch " << batch << ", workers " << workers);
        watching_executor::log notes{.workers = workers};
        const long total = allocations_of([&] { call(watching_executor{&notes}); });
        CHECK(total == 1);
        CHECK(notes.before_loops == 1);
        CHECK(notes.in_loops == 0);
        // Where heads are enough, there is one loop.
        if (batch * c.each.kv_heads >= 2 * workers) CHECK(notes.loops == 1);

        focus::workspace scratch;
        const auto with_scratch = [&] {
          call(focus::with_workspace(watching_executor{&notes}, scratch));
        };
        with_scratch();
        const std::size_t capacity = scratch.capacity();
        CHECK(allocations_of(with_scratch) == 0);
        CHECK(scratch.capacity() == capacity);
      });
    }
}

TEST_CASE("batch: memory does not grow with the number of sequences") {
  const auto capacities = [](index_t batch) {
    const batch_case c{.batch = batch, .each = {.n_q = 60, .n_k = 60}};
    inputs<float> x(c);
    one_by_one<library, operation::sparse>(x);
    outputs<float> y(c);
    std::vector<std::size_t> all;
    for_each_call(x, y, [&](const char*, auto&& call) {
      focus::workspace scratch;
      call(focus::with_workspace(thread_executor(2), scratch));
      all.push_back(scratch.capacity());
    });
    return all;
  };
  const std::vector<std::size_t> few = capacities(8), many = capacities(64);
  for (std::size_t which = 0; which < few.size(); ++which) CHECK(many[which] <= few[which] + 4096);
}

TEST_CASE("batch: whatever the workspace held before") {
  const batch_case c{.batch = 6, .each = {.heads = 4, .kv_heads = 2}, .groups = all_layouts};
  inputs<float> x(c);
  const outputs<float> expected = one_by_one<library, operation::sparse>(x);
  outputs<float> got(c);
  focus::workspace scratch;
  std::byte* const bytes = scratch.reserve(1 << 22);
  std::fill(bytes, bytes + (1 << 22), std::byte{0xff});
  all_at_once<library, operation::sparse>(x, got,
                                          focus::with_workspace(thread_executor(2), scratch));
  CHECK(got.same_bits(expected));
}

TEST_CASE("batch: an exception thrown in a body reaches the caller") {
  for (const index_t batch : {1, 6}) {
    const batch_case c{.batch = batch, .each = {.heads = 2, .kv_heads = 1}};
    inputs<float> x(c);
    one_by_one<library, operation::sparse>(x);
    outputs<float> y(c);
    for_each_call(x, y, [&](const char* name, auto&& call) {
      INFO(name << ", batch " << batch);
      CHECK_THROWS_AS(call(throwing_executor{0}), throwing_executor::error);
      if (batch > 1) CHECK_THROWS_AS(call(throwing_executor{batch - 1}), throwing_executor::error);
    });
  }
}

TEST_CASE("batch: bad arguments are refused by name, with nothing written") {
  const batch_case c{.batch = 3,
                     .each = {.heads = 4, .kv_heads = 2, .n_q = 5, .n_k = 7, .d = 3, .d_v = 6}};
  inputs<float> x(c);
  one_by_one<library, operation::sparse>(x);
  outputs<float> y(c);
  using view = focus::tensor_view<float, 4>;
  using rows = focus::tensor_view<float, 3>;
  std::vector<float> spare(2000, 7.0f);
  struct arguments {
    view q, k, v, out, dout, dq, dk, dv;
    rows lse, dlse;
    std::span<const focus::routing_plan> plans;
    focus::pattern_options pattern = focus::full_causal;
    focus::score_options score = {};
  };
  using args = arguments&;
  const arguments good{x.q.view(),    x.k.view(),    x.v.view(),  y.out.view(),
                       x.dout.view(), y.dq.view(),   y.dk.view(), y.dv.view(),
                       y.lse.view(),  x.dlse.view(), x.plans};
  // `given` of the backward pass: what the forward pass wrote.
  const auto refuse = [&](const char* name, bool forward, bool backward, bool sparse,
                          const std::function<void(arguments&)>& change) {
    arguments a = good;
    change(a);
    const auto check_one = [&](auto&& call) {
      CHECK(refusal(name, call) == "");
      CHECK(y.untouched());
      CHECK(std::all_of(spare.begin(), spare.end(), [](float f) { return f == 7.0f; }));
    };
    if (forward) {
      if (!sparse)
        check_one([&] { focus::attention(a.q, a.k, a.v, a.out, a.pattern, a.score, a.lse); });
      check_one([&] { focus::sparse_attention(a.q, a.k, a.v, a.plans, a.out, a.score, a.lse); });
      check_one([&] {
        focus::reference::sparse_attention(a.q, a.k, a.v, a.plans, a.out, a.score, a.lse);
      });
    }
    if (backward) {
      if (!sparse)
        check_one([&] {
          focus::attention_backward(a.q, a.k, a.v, a.out, a.lse, a.dout, a.dlse, a.dq, a.dk, a.dv,
                                    a.pattern, a.score);
        });
      check_one([&] {
        focus::sparse_attention_backward(a.q, a.k, a.v, a.plans, a.out, a.lse, a.dout, a.dlse, a.dq,
                                         a.dk, a.dv, a.score);
      });
      check_one([&] {
        focus::reference::sparse_attention_backward(a.q, a.k, a.v, a.plans, a.out, a.lse, a.dout,
                                                    a.dlse, a.dq, a.dk, a.dv, a.score);
      });
    }
  };
  const auto refuse_all = [&](const char* name, const std::function<void(arguments&)>& change) {
    refuse(name, true, true, false, change);
  };
  const auto refuse_backward = [&](const char* name,
                                   const std::function<void(arguments&)>& change) {
    refuse(name, false, true, false, change);
  };
  // The number of sequences, in each tensor.
  float* const at = spare.data();
  refuse_all("k", [&](args a) { a.k = view(at, {2, 2, 7, 3}); });
  refuse_all("v", [&](args a) { a.v = view(at, {4, 2, 7, 6}); });
  refuse_all("k", [&](args a) { a.q = view(at, {2, 4, 5, 3}); });
  refuse_all("out", [&](args a) { a.out = view(at, {2, 4, 5, 6}); });
  refuse_all("lse", [&](args a) { a.lse = rows(at, {2, 4, 5}); });
  refuse_backward("dout", [&](args a) { a.dout = view(at, {2, 4, 5, 6}); });
  refuse_backward("dlse", [&](args a) { a.dlse = rows(at, {2, 4, 5}); });
  refuse_backward("dq", [&](args a) { a.dq = view(at, {2, 4, 5, 3}); });
  refuse_backward("dk", [&](args a) { a.dk = view(at, {2, 2, 7, 3}); });
  refuse_backward("dv", [&](args a) { a.dv = view(at, {2, 2, 7, 6}); });
  refuse("plans", true, true, true, [&](args a) { a.plans = a.plans.first(2); });
  refuse("plans", true, true, true, [&](args a) { a.plans = {}; });
  // The other extents.
  refuse_all("k", [&](args a) { a.k = view(at, {3, 2, 7, 4}); });
  refuse_all("v", [&](args a) { a.v = view(at, {3, 2, 6, 6}); });
  refuse_all("q", [&](args a) { a.q = view(at, {3, 3, 5, 3}); });
  refuse_all("out", [&](args a) { a.out = view(at, {3, 4, 5, 5}); });
  refuse_all("lse", [&](args a) { a.lse = rows(at, {3, 4, 6}); });
  refuse_backward("dk", [&](args a) { a.dk = view(at, {3, 4, 7, 3}); });
  refuse_all("q", [&](args a) { a.q = view(nullptr, {3, 4, 5, 3}); });
  refuse_backward("dq", [&](args a) { a.dq = view(nullptr, {3, 4, 5, 3}); });
  // Overlap of the last sequence of one tensor and the first of another, and of sequences of one.
  refuse("out", true, false, false, [&](args a) {
    a.q = view(at, {3, 4, 5, 3}), a.out = view(at + 179, {3, 4, 5, 6});
  });
  refuse("lse", true, false, false, [&](args a) {
    a.lse = rows(at, {3, 4, 5}), a.v = view(at + 59, {3, 2, 7, 6});
  });
  refuse("out", true, false, false, [&](args a) { a.out = view(at, {3, 4, 5, 6}, {0, 30, 6, 1}); });
  refuse("out", true, false, false, [&](args a) {
    a.out = view(at, {3, 4, 5, 6}, {90, 30, 6, 1});
  });
  refuse_backward("dq", [&](args a) { a.dq = view(at, {3, 4, 5, 3}, {59, 15, 3, 1}); });
  refuse_backward("dk", [&](args a) {
    a.dlse = rows(at, {3, 4, 5}), a.dk = view(at + 59, {3, 2, 7, 3});
  });
  refuse_backward("dv", [&](args a) {
    a.dq = view(at, {3, 4, 5, 3}), a.dv = view(at + 179, {3, 2, 7, 6});
  });
  refuse_all("softcap", [](args a) { a.score.softcap = -1.0f; });

  // A plan for other lengths is named with its place.
  std::vector<focus::routing_plan> plans = x.plans;
  plans[1] = focus::make_routing_plan(std::vector<group_mask>(5, 1), std::vector<group_mask>(6, 1));
  refuse("plans", true, true, true, [&](args a) { a.plans = plans; });
  try {
    focus::sparse_attention(good.q, good.k, good.v, plans, good.out);
  } catch (const focus::invalid_argument& e) {
    CHECK(std::string(e.what()).find("[1]") != std::string::npos);
  }

  // Slices of one fused buffer [batch, tokens, heads, q | out] may interleave.
  std::vector<float> fused(3 * 5 * 4 * 9, 0.5f);
  const std::array<index_t, 4> strides{5 * 4 * 9, 9, 4 * 9, 1};
  focus::attention(view(fused.data(), {3, 4, 5, 3}, strides), good.k, good.v,
                   view(fused.data() + 3, {3, 4, 5, 6}, strides));
}

}  // namespace test_batch
