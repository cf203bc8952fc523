// What holds of every attention function, as checks on one case; each returns what is wrong, or
// nothing.
//
// A Call names its operation and calls the library:
//   static constexpr operation op;
//   template <class T, class Out, class Lse, class Exec>
//   void operator()(const call_inputs<T>&, Out out, Lse lse, Exec&& exec) const;
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "catch.hpp"
#include "executors.hpp"
#include "focus/error.hpp"
#include "focus/options.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"

namespace oracle {

/// The library's answer.
template <class Call, class T>
FOCUS_NOINLINE answer<T> solve(const problem<T>& p, int threads = 1) {
  answer<T> a(p.spec);
  Call{}(p.inputs(), a.out.view(), a.lse.view(), thread_executor(threads));
  return a;
}

/// The answer is right, in the case's storage type, and touches nothing but its extents.
template <class Call>
std::string check_values(const attention_case& c) {
  std::string wrong;
  with_storage(c.type, [&]<class T>() {
    const problem<T> p(c);
    wrong = compare(p, solve<Call>(p), Call::op);
  });
  return wrong;
}

/// The same bits with one, two and three threads, and the same out without an lse.
template <class Call>
std::string check_same_bits(const attention_case& c) {
  std::string wrong;
  with_storage(c.type, [&]<class T>() {
    const problem<T> p(c);
    const answer<T> one = solve<Call>(p);
    for (const int threads : {2, 3})
      if (!solve<Call>(p, threads).same_bits(one))
        wrong = std::to_string(threads) + " threads differ";
    answer<T> alone(c);
    Call{}(p.inputs(), alone.out.view(), focus::matrix_view<float>{}, thread_executor(1));
    if (!alone.out.same_bits(one.out)) wrong = "out differs without an lse";
    if (!alone.lse.untouched()) wrong = "lse written though not asked for";
  });
  return wrong;
}

/// `value` in one element of the key: rows that may not attend to it keep their bits, the others
/// are as in the truth.
template <class Call>
std::string check_poisoned_key(const attention_case& c, index_t key, double value) {
  std::string wrong;
  with_main_storage(c.type, [&]<class T>() {
    problem<T> p(c);
    const dense_problem dense = p.dense();
    const answer<T> clean = solve<Call>(p);
    const auto rows_keep_bits = [&](const answer<T>& poisoned) {
      for (index_t h = 0; h < c.heads; ++h)
        for (index_t i = 0; i < c.n_q; ++i)
          if (!dense.allowed(Call::op, i, key) && !poisoned.same_row_bits(clean, h, i))
            return false;
      return true;
    };
    const auto poison = [&](const focus::tensor_view<T, 3>& x) {
      for (index_t h = 0; h < c.kv_heads; ++h)
        x(h, key, (key + h) % x.extent(2)) = narrowed<T>(value);
    };

    problem<T> bad_v = p;
    poison(bad_v.v.view());
    const answer<T> with_v = solve<Call>(bad_v);
    if (!rows_keep_bits(with_v)) wrong = "a value reached a row that may not attend to it";
    if (!with_v.lse.same_bits(clean.lse)) wrong = "a value reached the lse";
    if (wrong.empty()) wrong = compare(bad_v, with_v, Call::op);

    problem<T> bad_k = p;
    poison(bad_k.k.view());
    const answer<T> with_k = solve<Call>(bad_k);
    if (!rows_keep_bits(with_k)) wrong = "a key reached a row that may not attend to it";
    if (wrong.empty()) wrong = compare(bad_k, with_k, Call::op);
  });
  return wrong;
}

/// `value` in one element of one query: its row is as in the truth, NaN for NaN and not a clean
/// zero, but zeros where it is empty; the others keep their bits.
template <class Call>
std::string check_poisoned_query(const attention_case& c, index_t head, index_t query,
                                 double value = not_a_number) {
  std::string wrong;
  with_main_storage(c.type, [&]<class T>() {
    const problem<T> p(c);
    const answer<T> clean = solve<Call>(p);
    problem<T> bad = p;
    bad.q.view()(head, query, query % c.d) = narrowed<T>(value);
    const answer<T> poisoned = solve<Call>(bad);
    const bool empty = p.dense().empty_row(Call::op, query);
    for (index_t h = 0; h < c.heads; ++h)
      for (index_t i = 0; i < c.n_q; ++i)
        if ((h != head || i != query || empty) && !poisoned.same_row_bits(clean, h, i))
          wrong = "row " + std::to_string(i) + " of head " + std::to_string(h) + " changed";
    if (wrong.empty()) wrong = compare(bad, poisoned, Call::op);
    if (empty || !std::isnan(value)) return;
    for (index_t x = 0; x < c.d_v; ++x)
      if (!std::isnan(widened(poisoned.out.view()(head, query, x)))) wrong = "the row is not NaN";
    if (!std::isnan(poisoned.lse.view()(head, query))) wrong = "the lse is not NaN";
  });
  return wrong;
}

/// Scores of -inf in the first keys, as many as `count`, or in all keys from there on: they weigh
/// nothing, however many blocks of keys they fill, and a row without any other key is empty.
template <class Call>
std::string check_vanishing_keys(const attention_case& c, index_t count, bool first) {
  std::string wrong;
  with_main_storage(c.type, [&]<class T>() {
    problem<T> p(c);
    p.q.fill([] { return 1.0; });
    for (index_t h = 0; h < c.kv_heads; ++h)
      for (index_t j = first ? 0 : count; j < (first ? count : c.n_k); ++j)
        p.k.view()(h, j, j % c.d) = narrowed<T>(-infinity);
    wrong = compare(p, solve<Call>(p), Call::op);
  });
  return wrong;
}

/// Everything about the tokens from `first` on is changed: rows before it stay the same but for
/// rounding. For n_q = n_k.
template <class Call>
std::string check_later_tokens(const attention_case& c, index_t first) {
  std::string wrong;
  with_main_storage(c.type, [&]<class T>() {
    const problem<T> p(c);
    attention_case other = c;
    other.seed += 1000;
    problem<T> changed = problem<T>(other);
    const auto keep = [first](const auto& from, const auto& to) {
      for (index_t h = 0; h < from.extent(0); ++h)
        for (index_t t = 0; t < first; ++t)
          for (index_t x = 0; x < from.extent(2); ++x) to(h, t, x) = from(h, t, x);
    };
    const auto keep_rows = [first](const auto& from, const auto& to) {
      for (index_t t = 0; t < first; ++t)
        for (index_t g = 0; g < from.extent(1); ++g) to(t, g) = from(t, g);
    };
    keep(p.q.view(), changed.q.view());
    keep(p.k.view(), changed.k.view());
    keep(p.v.view(), changed.v.view());
    keep_rows(p.query_assignment.view(), changed.query_assignment.view());
    keep_rows(p.key_assignment.view(), changed.key_assignment.view());
    for (std::size_t t = 0; t < static_cast<std::size_t>(first); ++t) {
      changed.query_masks[t] = p.query_masks[t];
      changed.key_masks[t] = p.key_masks[t];
    }
    const answer<T> a = solve<Call>(p), b = solve<Call>(changed);
    const double tolerance = 2 * (std::max)(epsilon<T>(), 16 * epsilon<focus::accumulator_t<T>>());
    for (index_t h = 0; h < c.heads; ++h)
      for (index_t i = 0; i < first; ++i)
        for (index_t x = 0; x < c.d_v; ++x) {
          const double before = widened(a.out.view()(h, i, x)),
                       after = widened(b.out.view()(h, i, x));
          if (!(std::abs(before - after) <= tolerance * (1 + std::abs(before))))
            wrong = "row " + std::to_string(i) + " changed from " + std::to_string(before) +
                    " to " + std::to_string(after);
        }
  });
  return wrong;
}

/// An exception thrown while a loop runs comes out of the call. True when some loop got to task
/// `at`.
template <class Call>
bool throws_from_body(const attention_case& c, index_t at) {
  const problem<float> p(c);
  answer<float> a(c);
  try {
    Call{}(p.inputs(), a.out.view(), a.lse.view(), throwing_executor{at});
  } catch (const throwing_executor::error&) {
    return true;
  }
  return false;
}

/// A good call, which must be refused once an argument of it is changed, with nothing written.
template <class Call>
class refused_call {
 public:
  using view = focus::tensor_view<float, 3>;
  using matrix = focus::matrix_view<float>;
  /// One type for all changes: what calls them is compiled once.
  using change_of = std::function<void(call_inputs<float>&, view&, matrix&)>;

  explicit refused_call(const attention_case& c) : problem_(c), answer_(c) {}

  void operator()(const char* argument, const change_of& change) {
    call_inputs<float> in = problem_.inputs();
    view out = answer_.out.view();
    matrix lse = answer_.lse.view();
    change(in, out, lse);
    CHECK(refusal(argument, [&] { Call{}(in, out, lse, thread_executor(1)); }) == "");
    CHECK(answer_.untouched());
    CHECK(std::all_of(spare.begin(), spare.end(), [](float x) { return x == 7.0f; }));
  }

  /// Other memory for changes to point into.
  std::vector<float> spare = std::vector<float>(200, 7.0f);

 private:
  const problem<float> problem_;
  answer<float> answer_;
};

/// Each bad argument that all attention functions share is refused by name, with nothing written.
template <class Call>
void check_refusals() {
  refused_call<Call> refuse(
      {.heads = 4, .kv_heads = 2, .n_q = 5, .n_k = 7, .d = 3, .d_v = 6, .memory = layout::padded});
  std::vector<float>& spare = refuse.spare;
  using view = typename refused_call<Call>::view;
  using matrix = typename refused_call<Call>::matrix;
  using inputs = call_inputs<float>&;

  refuse("k", [&](inputs in, view&, matrix&) { in.k = view(spare.data(), {2, 7, 4}); });
  refuse("v", [&](inputs in, view&, matrix&) { in.v = view(spare.data(), {2, 8, 6}); });
  refuse("v", [&](inputs in, view&, matrix&) { in.v = view(spare.data(), {1, 7, 6}); });
  refuse("q", [&](inputs in, view&, matrix&) { in.q = view(spare.data(), {3, 5, 3}); });
  refuse("q", [&](inputs in, view&, matrix&) {
    in.k = view(spare.data(), {0, 7, 3}), in.v = view(spare.data(), {0, 7, 6});
  });
  refuse("out", [&](inputs, view& out, matrix&) { out = view(spare.data(), {4, 5, 5}); });
  refuse("out", [&](inputs, view& out, matrix&) { out = view(spare.data(), {4, 6, 6}); });
  refuse("lse", [&](inputs, view&, matrix& lse) { lse = matrix(spare.data(), {4, 6}); });
  refuse("lse", [&](inputs, view&, matrix& lse) { lse = matrix(spare.data(), {5, 4}); });

  refuse("q", [&](inputs in, view&, matrix&) { in.q = view(nullptr, {4, 5, 3}); });
  refuse("k", [&](inputs in, view&, matrix&) { in.k = view(nullptr, {2, 7, 3}); });
  refuse("v", [&](inputs in, view&, matrix&) { in.v = view(nullptr, {2, 7, 6}); });
  refuse("out", [&](inputs, view& out, matrix&) { out = view(nullptr, {4, 5, 6}); });
  refuse("lse", [&](inputs, view&, matrix& lse) { lse = matrix(nullptr, {4, 5}); });

  // Overlap, of one element or of all.
  refuse("out", [&](inputs in, view& out, matrix&) {
    in.q = view(spare.data(), {4, 5, 3}), out = view(spare.data() + 59, {4, 5, 6});
  });
  refuse("out", [&](inputs in, view& out, matrix&) {
    in.k = view(spare.data(), {2, 7, 3}), out = view(spare.data(), {4, 5, 6});
  });
  refuse("out", [&](inputs in, view& out, matrix&) {
    in.v = view(spare.data() + 10, {2, 7, 6}), out = view(spare.data(), {4, 5, 6});
  });
  refuse("lse", [&](inputs in, view&, matrix& lse) {
    in.q = view(spare.data(), {4, 5, 3}), lse = matrix(spare.data() + 59, {4, 5});
  });
  refuse("lse", [&](inputs in, view&, matrix& lse) {
    in.k = view(spare.data(), {2, 7, 3}), lse = matrix(spare.data(), {4, 5});
  });
  refuse("lse", [&](inputs in, view&, matrix& lse) {
    in.v = view(spare.data(), {2, 7, 6}), lse = matrix(spare.data(), {4, 5});
  });
  refuse("lse", [&](inputs, view& out, matrix& lse) {
    out = view(spare.data(), {4, 5, 6}), lse = matrix(spare.data() + 119, {4, 5});
  });
  refuse("out", [&](inputs, view& out, matrix&) {
    out = view(spare.data(), {4, 5, 6}, {30, 0, 1});
  });
  refuse("out", [&](inputs, view& out, matrix&) {
    out = view(spare.data(), {4, 5, 6}, {12, 6, 1});
  });
  refuse("lse", [&](inputs, view&, matrix& lse) { lse = matrix(spare.data(), {4, 5}, {4, 1}); });

  refuse("window", [&](inputs in, view&, matrix&) { in.pattern.window = -2; });
  refuse("window", [&](inputs in, view&, matrix&) {
    in.pattern.window = (std::numeric_limits<index_t>::min)();
  });
  refuse("sink_tokens", [&](inputs in, view&, matrix&) { in.pattern.sink_tokens = -1; });
  refuse("query_offset", [&](inputs in, view&, matrix&) {
    in.pattern.query_offset = (std::numeric_limits<index_t>::max)();
  });
  refuse("query_offset", [&](inputs in, view&, matrix&) {
    in.pattern.query_offset = (std::numeric_limits<index_t>::min)();
  });
  refuse("softcap", [&](inputs in, view&, matrix&) { in.score.softcap = -1.0f; });
  refuse("softcap", [&](inputs in, view&, matrix&) {
    in.score.softcap = std::numeric_limits<float>::quiet_NaN();
  });
}

/// Lengths around every tile size of the kernels, and a few far from any.
inline const std::vector<index_t> odd_lengths{0,  1,  2,  3,  4,  5,   6,   7,   8,   9,   13,
                                              14, 15, 16, 17, 31, 32,  33,  63,  64,  65,  90,
                                              95, 96, 97, 98, 99, 127, 128, 129, 255, 256, 257};
/// (head_dim, value_dim).
inline const std::vector<std::array<index_t, 2>> head_dims{
    {1, 1},   {2, 3},   {3, 1},   {7, 9},    {8, 8},     {16, 15},  {17, 33},   {40, 40}, {40, 64},
    {64, 64}, {64, 40}, {80, 80}, {96, 128}, {128, 128}, {128, 96}, {256, 256}, {1, 256}, {256, 1}};
inline const std::vector<index_t> odd_windows{focus::no_window,
                                              0,
                                              1,
                                              2,
                                              15,
                                              16,
                                              59,
                                              60,
                                              61,
                                              index_t{1} << 40,
                                              focus::unlimited_window - 1,
                                              focus::unlimited_window};

}  // namespace oracle
