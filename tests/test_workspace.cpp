// Memory: one allocation a call, before its loops; none with a workspace that has seen the shapes;
// none that grows with the square of the length.
#include <array>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "allocations.hpp"
#include "catch.hpp"
#include "focus/attention.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/route.hpp"
#include "focus/routing_plan.hpp"
#include "focus/sinkhorn.hpp"
#include "focus/soft_gate.hpp"
#include "focus/sparse_attention.hpp"
#include "oracle.hpp"

namespace test_workspace {
namespace {

using namespace oracle;

/// Three workers by turns, without threads, which would allocate. Notes what is allocated within
/// loops, and between them.
struct watching_executor {
  struct log {
    long in_loops = 0, before_loops = 0, between_loops = 0;
    long last = allocation_count;
    bool looped = false;
  };
  log* notes;

  index_t concurrency() const { return 3; }
  template <class F>
  void parallel_for(index_t tasks, F&& body) const {
    (notes->looped ? notes->between_loops : notes->before_loops) += allocation_count - notes->last;
    const long start = allocation_count;
    for (index_t task = 0; task < tasks; ++task) body(task, task % 3);
    notes->in_loops += allocation_count - start;
    notes->last = allocation_count;
    notes->looped = true;
  }
};

/// Says that it has many workers, for calls to plan with, and works alone.
struct many_workers {
  static index_t concurrency() { return 16; }
  template <class F>
  void parallel_for(index_t tasks, F&& body) const {
    for (index_t task = 0; task < tasks; ++task) body(task, index_t{0});
  }
};

/// One call of each function on inputs of a given length.
template <class T>
struct calls {
  attention_case spec;
  problem<T> p;
  answer<T> a;
  focus::routing_plan plan;
  std::vector<float> hidden, projection, centroids, scores, assignment, log_group_scale;
  std::vector<group_mask> masks;

  explicit calls(index_t n)
      : spec{.heads = 2,
             .n_q = n,
             .n_k = n,
             .d = 8,
             .d_v = 8,
             .pattern = {.window = 16, .sink_tokens = 1},
             .top_k = 2},
        p(spec),
        a(spec),
        plan(focus::make_routing_plan(p.query_masks, p.key_masks, spec.pattern)),
        hidden(static_cast<std::size_t>(n * 24), 0.25f),
        projection(24 * 16, 0.5f),
        centroids(4 * 16, 0.5f),
        scores(static_cast<std::size_t>(n * 4), 0.5f),
        assignment(scores.size()),
        log_group_scale(4),
        masks(static_cast<std::size_t>(n)) {}

  static constexpr std::array names{"attention", "sparse_attention", "soft_gate_attention",
                                    "sinkhorn",  "assign_groups",    "centroid_scores",
                                    "route"};

  template <class Exec>
  void call(std::size_t which, Exec&& exec) {
    const index_t n = spec.n_q;
    const auto q = p.q.view(), k = p.k.view(), v = p.v.view(), out = a.out.view();
    const auto lse = a.lse.view();
    const focus::matrix_view<float> s(scores.data(), {n, 4}), g(assignment.data(), {n, 4});
    const focus::matrix_view<const float> h(hidden.data(), {n, 24});
    const focus::centroid_params<float> params{.projection = {projection.data(), {24, 16}},
                                               .centroids = {centroids.data(), {4, 16}}};
    if (which == 0) focus::attention(q, k, v, out, spec.pattern, {}, lse, exec);
    if (which == 1) focus::sparse_attention(q, k, v, plan, out, {}, lse, exec);
    if (which == 2)
      focus::soft_gate_attention(q, k, v, p.query_assignment.view(), p.key_assignment.view(), {},
                                 out, spec.pattern, {}, lse, exec);
    if (which == 3) focus::sinkhorn(s, g, log_group_scale, {}, exec);
    if (which == 4) focus::assign_groups(s, log_group_scale, g, {}, exec);
    if (which == 5) focus::centroid_scores(h, params, s, exec);
    if (which == 6) focus::route(h, params, log_group_scale, 2, masks, {}, exec);
  }
};

}  // namespace

TEST_CASE("workspace: one allocation a call, before the loops") {
  calls<float> c(300);
  for (std::size_t which = 0; which < c.names.size(); ++which) {
    INFO(c.names[which]);
    watching_executor::log notes;
    const long before = allocation_count;
    c.call(which, watching_executor{&notes});
    const long total = allocation_count - before;
    CHECK(total <= 1);
    CHECK(notes.before_loops == total);
    CHECK(notes.between_loops == 0);
    CHECK(notes.in_loops == 0);
  }
}

TEST_CASE("workspace: no allocation after one call of the same shapes") {
  const auto check = [](auto& c) {
    for (std::size_t which = 0; which < c.names.size(); ++which) {
      INFO(c.names[which]);
      focus::workspace memory;
      watching_executor::log notes;
      c.call(which, focus::with_workspace(watching_executor{&notes}, memory));
      const std::size_t capacity = memory.capacity();
      const long before = allocation_count;
      for (int again = 0; again < 3; ++again)
        c.call(which, focus::with_workspace(watching_executor{&notes}, memory));
      const long after = allocation_count;
      CHECK(after == before);
      CHECK(memory.capacity() == capacity);
    }
  };
  calls<float> c(300);
  check(c);
  calls<focus::bfloat16> narrow(131);
  check(narrow);
}

TEST_CASE("workspace: one workspace serves all, whatever it held before") {
  // Results do not depend on what the memory holds: NaN here.
  focus::workspace memory;
  std::byte* bytes = memory.reserve(1 << 22);
  std::memset(bytes, 0xff, 1 << 22);
  calls<float> c(300), fresh(300);
  watching_executor::log notes;
  const long before = allocation_count;
  c.call(1, focus::with_workspace(watching_executor{&notes}, memory));
  CHECK(allocation_count == before);
  fresh.call(1, watching_executor{&notes});
  CHECK(c.a.same_bits(fresh.a));
  std::memset(bytes, 0xff, 1 << 22);
  for (const std::size_t which : {std::size_t{0}, std::size_t{2}}) {
    c.call(which, focus::with_workspace(watching_executor{&notes}, memory));
    fresh.call(which, watching_executor{&notes});
    CHECK(c.a.same_bits(fresh.a));
    std::memset(bytes, 0xff, 1 << 22);
  }
}

TEST_CASE("workspace: a plan is rebuilt in its own memory") {
  for (const grouping groups :
       {grouping::balanced, grouping::runs, grouping::mixed, grouping::scattered}) {
    const std::vector<group_mask> first = make_masks(500, groups, 16, 2, 1),
                                  second = make_masks(500, groups, 16, 2, 2);
    focus::routing_plan plan = focus::make_routing_plan(first);
    plan.rebuild(second, first);
    plan.rebuild(first, second);
    plan.rebuild(second);
    const long before = allocation_count;
    for (int again = 0; again < 3; ++again) {
      plan.rebuild(first);
      plan.rebuild(second);
      plan.rebuild(second, first);
      plan.rebuild(first, second);
    }
    const long after = allocation_count;
    CHECK(after == before);
  }
}

TEST_CASE("workspace: memory grows with the length, not with its square") {
  calls<float> once(1500), twice(3000);
  watching_executor::log notes;
  for (std::size_t which = 0; which < once.names.size(); ++which) {
    INFO(once.names[which]);
    focus::workspace for_once, for_twice;
    once.call(which, focus::with_workspace(watching_executor{&notes}, for_once));
    twice.call(which, focus::with_workspace(watching_executor{&notes}, for_twice));
    CHECK(for_twice.capacity() <= 2 * for_once.capacity() + 4096);
  }
}

TEST_CASE("workspace: one token of all groups asks for hardly more memory") {
  const attention_case c{.heads = 16,
                         .kv_heads = 16,
                         .n_q = 1500,
                         .n_k = 1500,
                         .d = 16,
                         .d_v = 16,
                         .pattern = {.window = 5},
                         .groups = grouping::drawn,
                         .group_count = 16,
                         .top_k = 2};
  problem<float> p(c);
  const auto capacity_of = [&] {
    const auto plan = focus::make_routing_plan(p.query_masks, p.key_masks, c.pattern);
    CHECK(plan.layout() == focus::detail::plan_layout::groups);
    answer<float> a(c);
    focus::workspace memory;
    const many_workers workers;
    const auto in = p.inputs();
    focus::sparse_attention(in.q, in.k, in.v, plan, a.out.view(), {}, {},
                            focus::with_workspace(workers, memory));
    return static_cast<double>(memory.capacity());
  };
  const double usual = capacity_of();
  p.query_masks[700] = ~group_mask{0};
  CHECK(capacity_of() < 1.1 * usual);
}

}  // namespace test_workspace
