// Gradients of dense and windowed attention against the textbook, and the textbook against central
// differences.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "attention_checks.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/attention.hpp"
#include "focus/attention_backward.hpp"
#include "gradient_checks.hpp"
#include "oracle.hpp"

namespace test_attention_backward {
namespace {

using namespace oracle;

constexpr operation op = operation::attention;

void check(const attention_case& c) {
  INFO(describe(c));
  CHECK(check_gradients<op>(c) == "");
}

}  // namespace

TEST_CASE("attention_backward: the textbook agrees with central differences") {
  for (const float softcap : {0.0f, 2.0f})
    for (const index_t window : {index_t{4}, focus::unlimited_window})
      for (const bool causal : {true, false}) {
        const attention_case c{.heads = 4,
                               .kv_heads = 2,
                               .n_q = 11,
                               .n_k = 13,
                               .d = 5,
                               .d_v = 3,
                               .pattern = {.causal = causal, .window = window, .sink_tokens = 1},
                               .score = {.softcap = softcap}};
        INFO(describe(c));
        CHECK(largest_difference(c, op, 25) < 1e-8);
      }
}

TEST_CASE("attention_backward: lengths around the tiles") {
  for (const index_t n : odd_lengths)
    for (const bool causal : {true, false})
      check({.n_q = n,
             .n_k = n,
             .pattern = {.causal = causal, .window = n % 2 ? focus::unlimited_window : 20}});
}

TEST_CASE("attention_backward: head dimensions") {
  for (const auto& [d, d_v] : head_dims)
    check({.n_q = 50, .n_k = 70, .d = d, .d_v = d_v, .pattern = focus::full_causal});
}

TEST_CASE("attention_backward: windows, sinks and offsets") {
  for (const index_t window : odd_windows)
    for (const index_t sinks : {0, 3})
      for (const bool causal : {true, false})
        check({.n_q = 60,
               .n_k = 60,
               .d = 8,
               .d_v = 8,
               .pattern = {.causal = causal, .window = window, .sink_tokens = sinks}});
  for (const auto& [n_q, n_k] :
       std::vector<std::array<index_t, 2>>{{40, 150}, {1, 100}, {100, 7}, {0, 5}, {5, 0}})
    for (const index_t offset : {-30, 0, 20, 300})
      check({.n_q = n_q,
             .n_k = n_k,
             .pattern = {.window = 9, .sink_tokens = 1, .query_offset = offset}});
}

TEST_CASE("attention_backward: heads, storage, layouts, scores") {
  for (const auto& [heads, kv_heads] :
       std::vector<std::array<index_t, 2>>{{1, 1}, {6, 1}, {6, 2}, {4, 4}})
    for (const storage type : {storage::float32, storage::float64, storage::bfloat16})
      for (const layout memory :
           {layout::heads_first, layout::tokens_first, layout::padded, layout::misaligned})
        check({.heads = heads,
               .kv_heads = kv_heads,
               .n_q = 37,
               .n_k = 50,
               .d = 20,
               .d_v = 12,
               .pattern = focus::full_causal,
               .type = type,
               .memory = memory});
  for (const focus::score_options score :
       {focus::score_options{.scale = 0.0f}, focus::score_options{.scale = -0.7f},
        focus::score_options{.softcap = 1.5f},
        focus::score_options{.scale = 2.0f, .softcap = 30.0f}})
    for (const storage type : {storage::float32, storage::float64})
      check({.pattern = focus::full_causal, .score = score, .type = type});
  check({.pattern = focus::full_causal, .query_magnitude = 30});
}

TEST_CASE("attention_backward: more keys than one segment, the same bits for any threads") {
  const attention_case c{.heads = 2,
                         .kv_heads = 1,
                         .n_q = 700,
                         .n_k = 700,
                         .d = 8,
                         .d_v = 8,
                         .pattern = focus::full_causal};
  check(c);
  CHECK(check_gradient_bits<op>(c) == "");
  CHECK(check_gradient_bits<op>({.heads = 6, .kv_heads = 3, .pattern = {.window = 5}}) == "");
}

TEST_CASE("attention_backward: any gradient may be left out") {
  const attention_case c{.heads = 4, .kv_heads = 2, .pattern = focus::full_causal};
  gradient_problem<float> p(c);
  p.attend(op);
  const gradients<float> all = differentiate<op>(p);
  const call_inputs<float> in = p.inputs();
  gradients<float> dq(c), dk(c), dv(c), none(c);
  const auto run = [&](auto&& x, auto&& y, auto&& z) {
    focus::attention_backward(in.q, in.k, in.v, p.out.view(), p.lse.view(), p.dout.view(), x, y, z,
                              in.pattern);
  };
  const focus::tensor_view<float, 3> left_out;
  run(dq.dq.view(), left_out, left_out);
  run(left_out, dk.dk.view(), left_out);
  run(left_out, left_out, dv.dv.view());
  focus::attention_backward(in.q, in.k, in.v, p.out.view(), p.lse.view(), p.dout.view(), {}, {}, {},
                            in.pattern);
  CHECK(dq.dq.same_bits(all.dq));
  CHECK(dk.dk.same_bits(all.dk));
  CHECK(dv.dv.same_bits(all.dv));
}

TEST_CASE("attention_backward: dlse, the textbook agrees with central differences") {
  for (const float softcap : {0.0f, 2.0f})
    for (const index_t window : {index_t{0}, index_t{4}, focus::unlimited_window})
      for (const attention_case& c : with_dlse({.heads = 4,
                                     .kv_heads = 2,
                                     .n_q = 11,
                                     .n_k = 13,
                                     .d = 5,
                                     .d_v = 3,
                                     .pattern = {.window = window},
                                     .score = {.softcap = softcap}})) {
        INFO(describe(c));
        CHECK(largest_difference(c, op, 25) < 1e-8);
      }
}

TEST_CASE("attention_backward: dlse, alone and with dout") {
  for (const storage type : all_storage)
    for (const attention_case& c : with_dlse({.heads = 4,
                                   .kv_heads = 2,
                                   .n_q = 37,
                                   .n_k = 50,
                                   .d = 20,
                                   .d_v = 12,
                                   .pattern = focus::full_causal,
                                   .score = {.softcap = 3.0f},
                                   .type = type,
                                   .memory = layout::padded})) {
      INFO(describe(c));
      with_storage(type, [&]<class T>() { CHECK(check_gradients_of<op, T>(c) == ""); });
    }
  for (const auto& [heads, kv_heads] :
       std::vector<std::array<index_t, 2>>{{1, 1}, {6, 1}, {6, 2}, {4, 4}})
    for (const layout memory : {layout::heads_first, layout::tokens_first, layout::misaligned})
      for (const attention_case& c :
           with_dlse({.heads = heads, .kv_heads = kv_heads, .memory = memory}))
        check(c);
  for (const index_t window : odd_windows)
    for (const bool causal : {true, false})
      for (const attention_case& c :
           with_dlse({.n_q = 60, .n_k = 60, .pattern = {.causal = causal, .window = window}}))
        check(c);
  for (const index_t n : {0, 1, 2, 97})
    for (const attention_case& c : with_dlse({.n_q = n, .n_k = n, .pattern = focus::full_causal}))
      check(c);
}

TEST_CASE("attention_backward: dlse of rows that see no key, and of one that is NaN") {
  CHECK(check_dlse_of_empty_rows<op>({.n_q = 30, .n_k = 10, .pattern = {.window = 3}}) == "");
  CHECK(check_dlse_of_empty_rows<op>({.pattern = {.window = focus::no_window}}) == "");

  // NaN in dlse reaches that row of dQ, and the keys it sees.
  const attention_case c{.heads = 1, .n_q = 90, .n_k = 90, .pattern = {.window = 6}, .dlse = true};
  gradient_problem<float> clean(c), bad(c);
  clean.attend(op), bad.attend(op);
  constexpr index_t at = 50;
  bad.dlse.view()(0, at) = static_cast<float>(not_a_number);
  const gradients<float> expected = differentiate<op>(clean), got = differentiate<op>(bad);
  for (index_t i = 0; i < c.n_q; ++i) {
    INFO(i);
    const auto same = [&](const auto& a, const auto& b) {
      return oracle::same_row_bits<float>(a.view(), b.view(), 0, i);
    };
    CHECK(same(got.dq, expected.dq) == (i != at));
    CHECK(same(got.dk, expected.dk) == (i > at || i < at - 6));
    CHECK(same(got.dv, expected.dv));
  }
}

TEST_CASE("attention_backward: dlse, the same bits for any threads, and none is none") {
  const attention_case c{
      .heads = 4, .kv_heads = 2, .n_q = 500, .n_k = 500, .pattern = focus::full_causal};
  for (const attention_case& with : with_dlse(c)) CHECK(check_gradient_bits<op>(with) == "");

  gradient_problem<float> p(c);
  p.attend(op);
  const gradients<float> expected = differentiate<op>(p);
  gradients<float> none(c), zeros(c), wide(c), both(c);
  const call_inputs<float> in = p.inputs();
  const auto run = [&](const auto& dlse, gradients<float>& g) {
    focus::attention_backward(in.q, in.k, in.v, p.out.view(), p.lse.view(), p.dout.view(), dlse,
                              g.dq.view(), g.dk.view(), g.dv.view(), in.pattern, in.score);
  };
  run(focus::matrix_view<const float>{}, none);
  CHECK(none.same_bits(expected));
  std::vector<float> zero(static_cast<std::size_t>(c.heads * c.n_q));
  run(focus::matrix_view<float>(zero.data(), {c.heads, c.n_q}), zeros);
  CHECK(zeros.same_bits(expected));
  // dlse may have a type of its own.
  const std::vector<double> values = p.dlse.values();
  run(focus::matrix_view<const double>(values.data(), {c.heads, c.n_q}), wide);
  run(p.dlse.view(), both);
  CHECK(wide.same_bits(both));
  CHECK(!both.same_bits(expected));
}

TEST_CASE("attention_backward: neither dout nor dlse: zeros") {
  const attention_case c{.heads = 4, .kv_heads = 2};
  gradient_problem<float> p(c);
  p.attend(op);
  gradients<float> g(c);
  const call_inputs<float> in = p.inputs();
  focus::attention_backward(in.q, in.k, in.v, {}, p.lse.view(), {},
                            focus::matrix_view<const float>{}, g.dq.view(), g.dk.view(),
                            g.dv.view(), in.pattern);
  CHECK(g.guards_hold());
  const auto values = g.values();
  for (std::size_t x = 0; x < 3; ++x)
    CHECK(std::all_of(values[x].begin(), values[x].end(), [](double value) { return value == 0; }));
}

TEST_CASE("attention_backward: {} in each place that may be empty") {
  // Each call compiles, means one function alone, and writes what it is given room for.
  const attention_case c{.heads = 4, .kv_heads = 2, .pattern = focus::full_causal};
  gradient_problem<float> p(c);
  p.attend(op);
  gradients<float> g(c);
  const call_inputs<float> in = p.inputs();
  const auto out = p.out.view(), dout = p.dout.view(), dq = g.dq.view(), dk = g.dk.view(),
             dv = g.dv.view();
  const auto lse = p.lse.view(), dlse = p.dlse.view();
  focus::attention_backward(in.q, in.k, in.v, out, lse, dout, {}, {}, {});
  focus::attention_backward(in.q, in.k, in.v, out, lse, dout, {}, {}, {}, {}, {}, {});
  focus::attention_backward(in.q, in.k, in.v, out, lse, dout, {}, dk, {}, {});
  focus::attention_backward(in.q, in.k, in.v, out, lse, dout, {}, dk, dv, {}, {});
  focus::attention_backward(in.q, in.k, in.v, out, lse, dout, dq, {}, {}, {.window = 3}, {});
  focus::attention_backward(in.q, in.k, in.v, out, lse, dout, dq, {}, dv, {}, {.scale = 1.0f}, {});
  focus::attention_backward(in.q, in.k, in.v, out, lse, dout, dlse, {}, {}, {});
  focus::attention_backward(in.q, in.k, in.v, out, lse, dout, dlse, {}, {}, {}, {}, {}, {});
  focus::attention_backward(in.q, in.k, in.v, {}, lse, {}, dlse, {}, dk, {}, {});
  focus::attention_backward(in.q, in.k, in.v, {}, lse, {}, dlse, dq, {}, dv, {.window = 3}, {});
  focus::attention_backward(in.q, in.k, in.v, {}, lse, {}, dlse, dq, dk, dv, {}, {}, {});
  using none = focus::matrix_view<const float>;
  focus::attention_backward(in.q, in.k, in.v, out, lse, dout, none{}, {}, {}, {});
  focus::attention_backward(in.q, in.k, in.v, {}, lse, {}, none{}, {}, {}, {}, {}, {}, {});
  namespace reference = focus::reference;
  reference::attention_backward(in.q, in.k, in.v, out, lse, dout, {}, {}, {}, {}, {}, {});
  reference::attention_backward(in.q, in.k, in.v, out, lse, dout, {}, dk, {}, {});
  reference::attention_backward(in.q, in.k, in.v, {}, lse, {}, dlse, {}, {}, {}, {}, {}, {});
  reference::attention_backward(in.q, in.k, in.v, {}, lse, {}, none{}, {}, dk, {});
  CHECK(g.guards_hold());
}

TEST_CASE("attention_backward: empty rows, and NaN that reaches only its own") {
  // Queries before the first key see nothing.
  check({.n_q = 30, .n_k = 10, .pattern = {.window = 3}});

  const attention_case c{
      .heads = 1, .n_q = 150, .n_k = 150, .pattern = {.window = 6, .sink_tokens = 1}};
  gradient_problem<float> clean(c);
  clean.attend(op);
  const gradients<float> expected = differentiate<op>(clean);
  const auto differs = [&](const gradients<float>& g, auto member, index_t row) {
    const auto a = (g.*member).view(), b = (expected.*member).view();
    return !oracle::same_row_bits<float>(a, b, 0, row);
  };
  for (const double poison : {not_a_number, infinity}) {
    constexpr index_t at = 70;
    gradient_problem<float> bad_key = clean;
    bad_key.k.view()(0, at, 2) = static_cast<float>(poison);
    bad_key.attend(op);
    const gradients<float> of_key = differentiate<op>(bad_key);
    gradient_problem<float> bad_value = clean;
    bad_value.v.view()(0, at, 2) = static_cast<float>(poison);
    bad_value.attend(op);
    const gradients<float> of_value = differentiate<op>(bad_value);
    gradient_problem<float> bad_query = clean;
    bad_query.q.view()(0, at, 2) = static_cast<float>(poison);
    bad_query.attend(op);
    const gradients<float> of_query = differentiate<op>(bad_query);
    for (index_t i = 0; i < c.n_q; ++i) {
      INFO(i);
      const bool sees = i >= at && i - at <= 6;
      // Row i of dQ depends on the keys it sees.
      if (!sees) CHECK(!differs(of_key, &gradients<float>::dq, i));
      if (!sees) CHECK(!differs(of_value, &gradients<float>::dq, i));
      if (i != at) CHECK(!differs(of_query, &gradients<float>::dq, i));
      // Row i of dK and dV depends on the queries that see it, and these on the keys they see.
      const bool is_seen = i == 0 || (i >= at - 6 && i <= at);
      if (!is_seen) CHECK(!differs(of_query, &gradients<float>::dk, i));
      if (!is_seen) CHECK(!differs(of_query, &gradients<float>::dv, i));
      const bool meets = i == 0 || (i >= at - 6 && i <= at + 6);
      if (!meets) CHECK(!differs(of_key, &gradients<float>::dk, i));
      if (!meets) CHECK(!differs(of_value, &gradients<float>::dv, i));
    }
  }
}

TEST_CASE("attention_backward: no allocation with a workspace") {
  const attention_case c{.n_q = 200, .n_k = 200, .pattern = focus::full_causal};
  gradient_problem<float> p(c);
  p.attend(op);
  gradients<float> g(c);
  const call_inputs<float> in = p.inputs();
  focus::workspace scratch;
  const auto run = [&] {
    focus::attention_backward(in.q, in.k, in.v, p.out.view(), p.lse.view(), p.dout.view(),
                              g.dq.view(), g.dk.view(), g.dv.view(), in.pattern, {},
                              focus::with_workspace(focus::serial_executor{}, scratch));
  };
  run();
  CHECK(allocations_of(run) == 0);
}

TEST_CASE("attention_backward: bad arguments are refused by name, with nothing written") {
  const attention_case c{.heads = 4, .kv_heads = 2, .n_q = 5, .n_k = 7, .d = 3, .d_v = 6};
  gradient_problem<float> p(c);
  p.attend(op);
  gradients<float> g(c);
  using view = focus::tensor_view<float, 3>;
  using matrix = focus::matrix_view<float>;
  std::vector<float> spare(400, 7.0f);
  struct arguments {
    focus::tensor_view<const float, 3> q, k, v, out, dout;
    focus::matrix_view<const float> lse;
    view dq, dk, dv;
    focus::matrix_view<const float> dlse;
    focus::pattern_options pattern = focus::full_causal;
    focus::score_options score = {};
    bool with_dlse = false;
  };
  const auto refuse = [&](const char* name, const std::function<void(arguments&)>& change) {
    arguments a{p.q.view(),   p.k.view(),  p.v.view(),  p.out.view(), p.dout.view(),
                p.lse.view(), g.dq.view(), g.dk.view(), g.dv.view(),  p.dlse.view()};
    change(a);
    const auto with_dlse = [&] {
      focus::attention_backward(a.q, a.k, a.v, a.out, a.lse, a.dout, a.dlse, a.dq, a.dk, a.dv,
                                a.pattern, a.score);
    };
    if (!a.with_dlse)
      CHECK(refusal(name, [&] {
              focus::attention_backward(a.q, a.k, a.v, a.out, a.lse, a.dout, a.dq, a.dk, a.dv,
                                        a.pattern, a.score);
            }) == "");
    // out and dout, both {}, are no fault where there is a dlse.
    if (focus::detail::is_given(a.dout)) CHECK(refusal(name, with_dlse) == "");
    CHECK(g.untouched());
    CHECK(std::all_of(spare.begin(), spare.end(), [](float x) { return x == 7.0f; }));
  };
  using args = arguments&;
  refuse("k", [&](args a) { a.k = view(spare.data(), {2, 7, 4}); });
  refuse("v", [&](args a) { a.v = view(spare.data(), {2, 6, 6}); });
  refuse("q", [&](args a) { a.q = view(spare.data(), {3, 5, 3}); });
  refuse("out", [&](args a) { a.out = view(spare.data(), {4, 5, 5}); });
  refuse("out", [&](args a) { a.out = {}; });
  refuse("lse", [&](args a) { a.lse = matrix(spare.data(), {4, 6}); });
  refuse("lse", [&](args a) { a.lse = {}; });
  refuse("dout", [&](args a) { a.dout = view(spare.data(), {4, 5, 5}); });
  refuse("dout", [&](args a) { a.dout = {}; });
  refuse("dq", [&](args a) { a.dq = view(spare.data(), {4, 5, 4}); });
  refuse("dk", [&](args a) { a.dk = view(spare.data(), {4, 7, 3}); });
  refuse("dv", [&](args a) { a.dv = view(spare.data(), {2, 7, 3}); });
  refuse("dq", [&](args a) { a.dq = view(nullptr, {4, 5, 3}); });
  refuse("dq", [&](args a) { a.dq = view(spare.data(), {4, 5, 3}, {15, 0, 1}); });
  refuse("dq", [&](args a) {
    a.q = view(spare.data(), {4, 5, 3}), a.dq = view(spare.data() + 59, {4, 5, 3});
  });
  refuse("dk", [&](args a) {
    a.lse = matrix(spare.data(), {4, 5}), a.dk = view(spare.data() + 19, {2, 7, 3});
  });
  refuse("dk", [&](args a) {
    a.dq = view(spare.data(), {4, 5, 3}), a.dk = view(spare.data() + 59, {2, 7, 3});
  });
  refuse("dv", [&](args a) {
    a.dout = view(spare.data(), {4, 5, 6}), a.dv = view(spare.data(), {2, 7, 6});
  });
  refuse("dv", [&](args a) {
    a.dk = view(spare.data(), {2, 7, 3}), a.dv = view(spare.data(), {2, 7, 6});
  });
  refuse("window", [](args a) { a.pattern.window = -2; });
  refuse("softcap", [](args a) { a.score.softcap = -1.0f; });

  const auto refuse_dlse = [&](const char* name, const std::function<void(arguments&)>& change) {
    refuse(name, [&](args a) { a.with_dlse = true, change(a); });
  };
  refuse_dlse("dlse", [&](args a) { a.dlse = matrix(spare.data(), {4, 6}); });
  refuse_dlse("dlse", [&](args a) { a.dlse = matrix(spare.data(), {2, 5}); });
  refuse_dlse("dlse", [&](args a) { a.dlse = matrix(nullptr, {4, 5}); });
  refuse_dlse("dq", [&](args a) {
    a.dlse = matrix(spare.data() + 59, {4, 5}), a.dq = view(spare.data(), {4, 5, 3});
  });
  refuse_dlse("dk", [&](args a) {
    a.dlse = matrix(spare.data(), {4, 5}), a.dk = view(spare.data() + 19, {2, 7, 3});
  });
  refuse_dlse("dv", [&](args a) {
    a.dlse = matrix(spare.data() + 5, {4, 5}), a.dv = view(spare.data(), {2, 7, 6});
  });
}

TEST_CASE("attention_backward: head_dim 0 without data, several kv heads") {
  constexpr index_t n = 40, d_v = 3;
  const std::array<index_t, 3> extents{2, n, d_v};
  std::vector<float> v(2 * n * d_v), dout(v.size()), out(v.size()), dv(v.size(), 7.0f),
      expected(v.size()), lse(2 * n);
  for (std::size_t i = 0; i < v.size(); ++i)
    v[i] = static_cast<float>(i % 7), dout[i] = static_cast<float>(i % 5) - 2;
  const focus::tensor_view<const float, 3> none(nullptr, {2, n, 0});
  const focus::tensor_view<const float, 3> values(v.data(), extents), given(dout.data(), extents);
  const focus::tensor_view<float, 3> result(out.data(), extents);
  const focus::matrix_view<float> state(lse.data(), {2, n});
  focus::attention(none, none, values, result, focus::full_causal, {}, state);
  focus::attention_backward(none, none, values, result, state, given, {}, {},
                            focus::tensor_view<float, 3>(dv.data(), extents));
  focus::reference::attention_backward(none, none, values, result, state, given, {}, {},
                                       focus::tensor_view<float, 3>(expected.data(), extents));
  for (std::size_t i = 0; i < dv.size(); ++i) {
    // 40 summands, whose magnitudes add up to at most 2 (1 + 1/2 + ... + 1/40) < 9.
    CHECK(std::abs(dv[i] - expected[i]) <= 9 * 40 * 0x1p-24f);
  }
}

}  // namespace test_attention_backward
