// decode_attention: against the reference, for all that a cache may hold and however it was filled.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "allocations.hpp"
#include "attention_checks.hpp"
#include "catch.hpp"
#include "executors.hpp"
#include "focus/decode.hpp"
#include "focus/decode_sequence.hpp"
#include "focus/kv_cache.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/reference.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"
#include "guarded_tensor.hpp"
#include "oracle.hpp"
#include "pairwise.hpp"

namespace test_decode {
namespace {

using namespace oracle;

/// Tokens [first, end) of a tensor.
template <class T>
focus::tensor_view<T, 3> tokens(const focus::tensor_view<T, 3>& x, index_t first, index_t end) {
  return {first == end ? nullptr : x.row(0, first),
          {x.extent(0), end - first, x.extent(2)},
          x.strides()};
}

/// Appends tokens [first, end) of a problem.
template <class Cache, class T>
void append(Cache& cache, const call_inputs<T>& in, index_t first, index_t end) {
  cache.append(
      tokens(in.k, first, end), tokens(in.v, first, end),
      in.key_masks.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(end - first)));
}

template <class Storage, class T>
focus::kv_cache<Storage> empty_cache(const call_inputs<T>& in) {
  return focus::kv_cache<Storage>(in.k.extent(0), in.k.extent(2), in.v.extent(2), in.pattern);
}

/// The whole problem as a cache and the queries at its end.
struct decode_call {
  static constexpr operation op = operation::sparse;
  template <class T, class Out, class Lse, class Exec>
  void operator()(const call_inputs<T>& in, Out out, Lse lse, Exec&& exec) const {
    auto cache = empty_cache<T>(in);
    cache.append(in.k, in.v, in.key_masks, exec);
    focus::decode_attention(in.q, in.query_masks, cache, out, in.score, lse, exec);
  }
};

/// m queries at the end of n keys.
attention_case decode_case(index_t m, index_t n) {
  attention_case c;
  c.n_q = m, c.n_k = n;
  c.heads = 4, c.kv_heads = 2;
  c.pattern = {.window = 8, .sink_tokens = 1};
  return c;
}

TEST_CASE("tokens, guesses and blocks of prefill are as in the reference") {
  const std::array<std::array<index_t, 2>, 9> sizes{
      {{1, 1}, {1, 7}, {1, 300}, {2, 9}, {3, 65}, {4, 129}, {20, 20}, {70, 300}, {130, 140}}};
  const std::array<index_t, 5> windows{focus::no_window, 0, 16, 1000, focus::unlimited_window};
  const std::array<std::array<index_t, 2>, 5> heads{{{1, 1}, {4, 2}, {9, 3}, {8, 1}, {3, 3}}};
  const std::array<index_t, 8> dims{1, 16, 40, 64, 80, 96, 128, 256};
  std::uint64_t seed = 0;
  for (const auto& [m, n] : sizes)
    for (const index_t window : windows)
      for (const bool causal : {true, false}) {
        attention_case c = decode_case(m, n);
        c.seed = ++seed;
        c.pattern = {
            .causal = causal, .window = window, .sink_tokens = static_cast<index_t>(seed % 3)};
        c.heads = heads[seed % 5][0], c.kv_heads = heads[seed % 5][1];
        c.d = dims[seed % 8], c.d_v = dims[seed / 2 % 8];
        c.groups = all_groupings[seed % 9];
        c.type = all_storage[seed % 6];
        c.memory = static_cast<layout>(seed % 4);
        c.top_k = 1 + static_cast<int>(seed % 2);
        c.separate_masks = seed % 4 == 0;
        if (seed % 5 == 0) c.score.softcap = 3.0;
        INFO(describe(c));
        CHECK(check_values<decode_call>(c).empty());
        CHECK(check_same_bits<decode_call>(c) == "");
      }
}

TEST_CASE("many splits, many groups, many distinct masks") {
  for (const int groups : {1, 8, 64})
    for (const grouping how : {grouping::balanced, grouping::drawn, grouping::skewed})
      for (const index_t m : {1, 3, 24}) {
        attention_case c = decode_case(m, 5000);
        c.d = c.d_v = 8;
        c.group_count = groups, c.groups = how, c.top_k = (std::min)(groups, 4);
        c.pattern.window = 40;
        INFO(describe(c));
        CHECK(check_values<decode_call>(c) == "");
        CHECK(check_same_bits<decode_call>(c) == "");
      }
}

TEST_CASE("query heads beyond a tile of rows") {
  attention_case c = decode_case(2, 50);
  c.heads = 200, c.kv_heads = 1;
  CHECK(check_values<decode_call>(c) == "");
  CHECK(check_same_bits<decode_call>(c) == "");
}

TEST_CASE("NaN and infinity reach the rows that may attend to them") {
  for (const index_t m : {1, 3, 40})
    for (const double value : {not_a_number, infinity, -infinity})
      for (const index_t key : {0, 13, 38, 49, 59}) {
        attention_case c = decode_case(m, 60);
        INFO(describe(c) << ", key " << key << ", value " << value);
        CHECK(check_poisoned_key<decode_call>(c, key, value) == "");
        c.groups = grouping::scattered;
        CHECK(check_poisoned_key<decode_call>(c, key, value) == "");
        CHECK(check_poisoned_query<decode_call>(c, 1, m - 1, value) == "");
      }
  for (const bool first : {true, false})
    for (const index_t count : {0, 30, 60})
      CHECK(check_vanishing_keys<decode_call>(decode_case(3, 60), count, first) == "");
}

TEST_CASE("rows that see nothing are zeros") {
  for (const index_t m : {1, 20}) {
    attention_case c = decode_case(m, 40);
    c.pattern = {.window = focus::no_window};
    c.groups = grouping::zero;
    INFO(describe(c));
    CHECK(check_values<decode_call>(c) == "");
  }
}

/// Fills a cache in steps of `step` tokens; before each a guess, which is taken back.
template <class T>
focus::kv_cache<T> filled_in_steps(const problem<T>& p, index_t step, index_t guess) {
  const call_inputs<T> in = p.inputs();
  auto cache = empty_cache<T>(in);
  problem<T> other = p;
  other.k.fill([] { return not_a_number; });
  other.v.fill([] { return infinity; });
  for (group_mask& mask : other.key_masks) mask = ~mask;
  for (index_t first = 0; first < p.spec.n_k; first += step) {
    append(cache, other.inputs(), 0, (std::min)(guess, p.spec.n_k));
    cache.truncate(first);
    append(cache, in, first, (std::min)(first + step, p.spec.n_k));
  }
  return cache;
}

TEST_CASE("the same bits however a cache was filled") {
  for (const grouping how : {grouping::balanced, grouping::drawn, grouping::scattered}) {
    attention_case c = decode_case(3, 700);
    c.groups = how, c.group_count = 12, c.top_k = 2;
    const problem<float> p(c);
    const answer<float> expected = solve<decode_call>(p);
    for (const auto& [step, guess] :
         std::vector<std::array<index_t, 2>>{{1, 0}, {1, 3}, {7, 1}, {129, 200}, {350, 700}}) {
      const focus::kv_cache<float> cache = filled_in_steps(p, step, guess);
      answer<float> a(c);
      focus::decode_attention(p.q.view(), p.query_masks, cache, a.out.view(), {}, a.lse.view());
      INFO(describe(c) << ", steps of " << step << ", guesses of " << guess);
      CHECK(a.same_bits(expected));
    }
  }
}

TEST_CASE("a copy grows by itself") {
  const attention_case c = decode_case(2, 200);
  const problem<float> p(c);
  const call_inputs<float> in = p.inputs();
  auto cache = empty_cache<float>(in);
  append(cache, in, 0, 100);
  focus::kv_cache<float> copy = cache;
  append(copy, in, 100, 200);
  append(cache, in, 0, 57);
  const answer<float> expected = solve<decode_call>(p);
  answer<float> a(c);
  focus::decode_attention(in.q, in.query_masks, copy, a.out.view(), in.score, a.lse.view());
  CHECK(a.same_bits(expected));
  cache = copy;
  cache = std::move(copy);
  answer<float> b(c);
  focus::decode_attention(in.q, in.query_masks, cache, b.out.view(), in.score, b.lse.view());
  CHECK(b.same_bits(expected));
}

/// A problem with K and V as an 8-bit cache keeps them.
problem<float> as_kept(const problem<float>& p) {
  problem<float> kept = p;
  const call_inputs<float> in = p.inputs();
  auto cache = empty_cache<std::int8_t>(in);
  append(cache, in, 0, p.spec.n_k);
  std::vector<group_mask> masks(p.key_masks.size());
  cache.read(0, kept.k.view(), kept.v.view(), masks);
  REQUIRE(masks == p.key_masks);
  return kept;
}

TEST_CASE("8-bit caches compute with the numbers that they keep") {
  for (const index_t m : {1, 4, 50})
    for (const index_t d : {1, 40, 64, 128})
      for (const grouping how : {grouping::balanced, grouping::scattered}) {
        attention_case c = decode_case(m, 300);
        c.d = d, c.d_v = 48, c.groups = how;
        const problem<float> p(c);
        answer<float> a(c);
        auto cache = empty_cache<std::int8_t>(p.inputs());
        append(cache, p.inputs(), 0, c.n_k);
        focus::decode_attention(p.q.view(), p.query_masks, cache, a.out.view(), c.score,
                                a.lse.view());
        INFO(describe(c));
        CHECK(compare(as_kept(p), a, operation::sparse) == "");
      }
}

TEST_CASE("a NaN in an 8-bit row stays with those who see it") {
  attention_case c = decode_case(3, 60);
  problem<float> p(c);
  p.v.view()(1, 20, 5) = static_cast<float>(not_a_number);
  p.k.view()(0, 33, 0) = static_cast<float>(infinity);
  answer<float> a(c);
  auto cache = empty_cache<std::int8_t>(p.inputs());
  append(cache, p.inputs(), 0, c.n_k);
  focus::decode_attention(p.q.view(), p.query_masks, cache, a.out.view(), c.score, a.lse.view());
  CHECK(compare(as_kept(p), a, operation::sparse) == "");
}

TEST_CASE("queries of another type than the cache's") {
  const attention_case c = decode_case(2, 90);
  const problem<float> p(c);
  problem<float> rounded = p;
  auto cache = empty_cache<focus::bfloat16>(p.inputs());
  append(cache, p.inputs(), 0, c.n_k);
  std::vector<group_mask> masks(p.key_masks.size());
  cache.read(0, rounded.k.view(), rounded.v.view(), masks);
  answer<float> a(c);
  focus::decode_attention(p.q.view(), p.query_masks, cache, a.out.view(), c.score, a.lse.view());
  CHECK(compare(rounded, a, operation::sparse) == "");
  answer<float> by_reference(c);
  focus::reference::decode_attention(p.q.view(), p.query_masks, cache, by_reference.out.view(),
                                     c.score, by_reference.lse.view());
  CHECK(compare(rounded, by_reference, operation::sparse) == "");
}

TEST_CASE("many sequences: the bits of a loop") {
  std::vector<problem<float>> problems;
  std::vector<focus::kv_cache<float>> caches;
  std::uint64_t seed = 50;
  for (const auto& [m, n] :
       std::vector<std::array<index_t, 2>>{{1, 1}, {0, 5}, {1, 3000}, {40, 300}, {5, 6}, {2, 64}}) {
    attention_case c = decode_case(m, n);
    c.seed = ++seed;
    problems.emplace_back(c);
    caches.push_back(empty_cache<float>(problems.back().inputs()));
    append(caches.back(), problems.back().inputs(), 0, n);
  }
  std::vector<answer<float>> expected, got;
  for (const problem<float>& p : problems) {
    expected.push_back(solve<decode_call>(p));
    got.emplace_back(p.spec);
  }
  for (const int threads : {1, 2, 3}) {
    std::vector<focus::decode_sequence<float, float>> sequences;
    for (std::size_t s = 0; s < problems.size(); ++s) {
      got[s] = answer<float>(problems[s].spec);
      sequences.push_back({problems[s].q.view(), problems[s].query_masks, &caches[s],
                           got[s].out.view(), got[s].lse.view()});
    }
    focus::decode_attention(sequences, {}, thread_executor(threads));
    for (std::size_t s = 0; s < problems.size(); ++s) CHECK(got[s].same_bits(expected[s]));
  }
  focus::decode_attention(std::vector<focus::decode_sequence<float, float>>{});
}

TEST_CASE("exceptions of a body come out") {
  CHECK(throws_from_body<decode_call>(decode_case(1, 60), 0));
  attention_case many = decode_case(1, 5000);
  many.groups = grouping::one_group;
  CHECK(throws_from_body<decode_call>(many, 2));
}

TEST_CASE("with a workspace nothing is allocated") {
  for (const index_t m : {1, 40}) {
    const attention_case c = decode_case(m, 3000);
    const problem<float> p(c);
    answer<float> a(c);
    auto cache = empty_cache<float>(p.inputs());
    append(cache, p.inputs(), 0, c.n_k);
    focus::workspace scratch;
    auto exec = focus::with_workspace(focus::serial_executor{}, scratch);
    const auto step = [&] {
      focus::decode_attention(p.q.view(), p.query_masks, cache, a.out.view(), {}, a.lse.view(),
                              exec);
    };
    step();
    CHECK(allocations_of(step) == 0);
  }
}

TEST_CASE("bad arguments are refused before anything is written") {
  const attention_case c = decode_case(2, 30);
  const problem<float> p(c);
  auto cache = empty_cache<float>(p.inputs());
  append(cache, p.inputs(), 0, c.n_k);
  answer<float> a(c);
  const auto q = p.q.view();
  const auto out = a.out.view();
  const auto lse = a.lse.view();
  const auto call = [&](auto&& queries, std::span<const group_mask> masks, auto&& to, auto&& to_lse,
                        const focus::score_options& score = {}) {
    focus::decode_attention(queries, masks, cache, to, score, to_lse);
  };
  using view = focus::tensor_view<const float, 3>;
  const std::span<const group_mask> masks = p.query_masks;
  CHECK(refusal("q", [&] { call(view(q.data(), {4, 2, 15}), masks, out, lse); }) == "");
  CHECK(refusal("q", [&] { call(view(q.data(), {3, 2, 16}), masks, out, lse); }) == "");
  CHECK(refusal("q", [&] { call(view(nullptr, {4, 2, 16}), masks, out, lse); }) == "");
  CHECK(refusal("q", [&] { call(view(q.data(), {4, 31, 16}), masks, out, lse); }) == "");
  CHECK(refusal("query_masks", [&] { call(q, masks.first(1), out, lse); }) == "");
  CHECK(refusal("out", [&] { call(q, masks, tokens(out, 0, 1), lse); }) == "");
  CHECK(refusal("out", [&] { call(view(out.data(), {4, 2, 16}), masks, out, lse); }) == "");
  CHECK(refusal("lse", [&] {
          call(q, masks, out, focus::matrix_view<float>(lse.data(), {4, 1}));
        }) == "");
  CHECK(refusal("softcap", [&] { call(q, masks, out, lse, {.softcap = -1.0}); }) == "");
  std::vector<focus::decode_sequence<float, float>> sequences(2);
  sequences[0] = {q, masks, &cache, out, lse};
  sequences[1] = {q, masks, nullptr, out, {}};
  CHECK(refusal("cache", [&] { focus::decode_attention(sequences); }) == "");
  const focus::kv_cache<float> other(4, 16, 16);
  sequences[1].cache = &other;
  sequences[1].q = focus::tensor_view<const float, 3>(nullptr, {4, 0, 16});
  sequences[1].query_masks = {};
  sequences[1].out = focus::tensor_view<float, 3>(nullptr, {4, 0, 16});
  CHECK(refusal("sequences", [&] { focus::decode_attention(sequences); }) == "");
  CHECK(a.untouched());
}

}  // namespace
}  // namespace test_decode
