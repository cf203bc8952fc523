// The plan's count of pairs against brute force, its accessors, rebuilding, and what it refuses.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "allocations.hpp"
#include "catch.hpp"
#include "focus/error.hpp"
#include "focus/options.hpp"
#include "focus/routing_plan.hpp"
#include "oracle.hpp"

namespace test_routing_plan {
namespace {

using namespace oracle;
using masks = std::vector<group_mask>;

/// The pairs that the masks and the pattern allow, one by one.
index_t count_pairs(const attention_case& c, const masks& query_masks, const masks& key_masks) {
  index_t count = 0;
  for (index_t i = 0; i < c.n_q; ++i)
    for (index_t j = 0; j < c.n_k; ++j)
      count += c.near_pair(i, j) ||
               (c.causal_pair(i, j) && (query_masks[static_cast<std::size_t>(i)] &
                                        key_masks[static_cast<std::size_t>(j)]) != 0);
  return count;
}

struct plan_masks {
  masks query, key;
};

plan_masks masks_of(const attention_case& c) {
  const problem<float> p(c);
  return {p.query_masks, p.key_masks};
}

void check_count(const attention_case& c) {
  INFO(describe(c));
  const auto [query, key] = masks_of(c);
  const focus::routing_plan plan = focus::make_routing_plan(query, key, c.pattern);
  CHECK(plan.allowed_pairs() == count_pairs(c, query, key));
  CHECK(plan.query_count() == c.n_q);
  CHECK(plan.key_count() == c.n_k);
}

bool same(std::span<const group_mask> a, const masks& b) {
  return masks(a.begin(), a.end()) == b;
}

}  // namespace

TEST_CASE("routing_plan: allowed_pairs is the number of pairs") {
  for (const grouping groups : all_groupings)
    for (const auto& [group_count, top_k] : std::vector<std::array<int, 2>>{
             {1, 1}, {2, 1}, {4, 2}, {8, 1}, {8, 8}, {64, 1}, {64, 4}, {64, 64}})
      for (const index_t window :
           {focus::no_window, index_t{0}, index_t{9}, focus::unlimited_window})
        for (const index_t sinks : {0, 1, 5})
          for (const bool causal : {true, false})
            check_count({.heads = 1,
                         .n_q = 61,
                         .n_k = 61,
                         .d = 1,
                         .d_v = 1,
                         .pattern = {.causal = causal, .window = window, .sink_tokens = sinks},
                         .groups = groups,
                         .group_count = group_count,
                         .top_k = top_k});
}

TEST_CASE("routing_plan: lengths, offsets and masks of the queries' own") {
  constexpr index_t far = index_t{1} << 60;
  for (const auto& [n_q, n_k] : std::vector<std::array<index_t, 2>>{{0, 0},
                                                                    {1, 1},
                                                                    {0, 7},
                                                                    {7, 0},
                                                                    {1, 130},
                                                                    {5, 130},
                                                                    {130, 5},
                                                                    {97, 128},
                                                                    {128, 128},
                                                                    {200, 199}})
    for (const std::optional<index_t> offset :
         {std::optional<index_t>{}, std::optional<index_t>{0}, std::optional<index_t>{-3},
          std::optional<index_t>{40}, std::optional<index_t>{500}, std::optional<index_t>{far},
          std::optional<index_t>{-far}})
      for (const index_t window : {focus::no_window, index_t{3}, far + 10, focus::unlimited_window})
        for (const bool causal : {true, false})
          for (const bool separate : {true, false})
            check_count({.heads = 1,
                         .n_q = n_q,
                         .n_k = n_k,
                         .d = 1,
                         .d_v = 1,
                         .pattern = {.causal = causal,
                                     .window = window,
                                     .sink_tokens = 2,
                                     .query_offset = offset},
                         .groups = grouping::mixed,
                         .group_count = 5,
                         .top_k = 2,
                         .separate_masks = separate});
}

TEST_CASE("routing_plan: in lists, each query is once in each of its groups and finishes once") {
  for (const grouping groups : {grouping::drawn, grouping::scattered})
    for (const bool separate : {true, false})
      for (const int top_k : {2, 3}) {
        // So many tokens that lists pay with the tiles of any instruction set.
        const attention_case c{.heads = 1,
                               .n_q = 2400,
                               .n_k = 2400,
                               .d = 1,
                               .d_v = 1,
                               .pattern = {.window = 5, .sink_tokens = 3},
                               .groups = groups,
                               .group_count = groups == grouping::drawn ? 16 : 8,
                               .top_k = top_k,
                               .separate_masks = separate};
        INFO(describe(c));
        auto [query, key] = masks_of(c);
        // Groups without keys are in no list, queries without others come first.
        for (group_mask& mask : key)
          if (separate) mask &= 0xfff;
        const focus::routing_plan plan = focus::make_routing_plan(query, key, c.pattern);
        REQUIRE(plan.layout() == focus::detail::plan_layout::groups);
        group_mask listed = 0;
        for (const focus::detail::token_run& list : plan.key_runs()) listed |= list.mask;
        masks met(query.size());
        std::vector<int> finished(query.size());
        for (index_t r = 0; r < plan.rounds(); ++r) {
          std::vector<bool> there(query.size());
          for (index_t t = plan.round(r).begin; t < plan.round(r).end; ++t) {
            const auto& tile = plan.tiles()[static_cast<std::size_t>(t)];
            for (index_t i = tile.begin; i < tile.begin + tile.rows; ++i) {
              const index_t row = plan.query_order()[static_cast<std::size_t>(i)];
              const auto at = static_cast<std::size_t>(row);
              const group_mask list = plan.tile_mask(tile);
              REQUIRE(!there[at]);
              REQUIRE(finished[at] == 0);
              REQUIRE((met[at] & list) == 0);
              there[at] = true;
              met[at] |= list;
              finished[at] += plan.is_last_tile_of(tile, row);
            }
          }
        }
        for (std::size_t i = 0; i < query.size(); ++i) {
          REQUIRE(met[i] == (query[i] & listed));
          REQUIRE(finished[i] == 1);
        }
      }
}

TEST_CASE("routing_plan: one group a token makes lists, all of one round") {
  const attention_case c{.heads = 1,
                         .n_q = 2400,
                         .n_k = 2400,
                         .d = 1,
                         .d_v = 1,
                         .pattern = {.window = 5, .sink_tokens = 3},
                         .group_count = 8,
                         .top_k = 1};
  const auto [query, key] = masks_of(c);
  const focus::routing_plan plan = focus::make_routing_plan(query, key, c.pattern);
  REQUIRE(plan.layout() == focus::detail::plan_layout::groups);
  CHECK(plan.rounds() == 1);
  CHECK(plan.key_runs().size() == 8);
}

TEST_CASE("routing_plan: where the window cuts each query's lists") {
  for (const bool causal : {true, false}) {
    const attention_case c{.heads = 1,
                           .n_q = 2400,
                           .n_k = 2300,
                           .d = 1,
                           .d_v = 1,
                           .pattern = {.causal = causal, .window = 40, .sink_tokens = 3},
                           .groups = grouping::drawn,
                           .group_count = 16,
                           .top_k = 2,
                           .separate_masks = true};
    const auto [query, key] = masks_of(c);
    const focus::routing_plan plan = focus::make_routing_plan(query, key, c.pattern);
    REQUIRE(plan.layout() == focus::detail::plan_layout::groups);
    CHECK(plan.after_begins().empty() == causal);
    for (index_t list = 0; list < std::ssize(plan.key_runs()); ++list) {
      const auto& keys = plan.key_runs()[static_cast<std::size_t>(list)];
      const auto& queries = plan.list_queries(list);
      CHECK(queries.mask == keys.mask);
      for (index_t q = queries.begin; q < queries.end; ++q) {
        const auto at = static_cast<std::size_t>(q);
        const index_t position = plan.query_order()[at] + c.query_offset();
        index_t before = keys.begin, after = keys.begin;
        for (index_t slot = keys.begin; slot < keys.end; ++slot) {
          const index_t token = plan.key_slots()[static_cast<std::size_t>(slot)];
          before += token < position - c.pattern.window;
          after += token <= position + c.pattern.window;
        }
        REQUIRE(plan.before_ends()[at] == before);
        if (!causal) REQUIRE(plan.after_begins()[at] == after);
      }
    }
  }
}

TEST_CASE("routing_plan: counts beyond 32 bits") {
  // All tokens in one group, or in none with an unlimited window: every causal pair.
  const index_t n = 100000;
  const masks one(static_cast<std::size_t>(n), 1), none(static_cast<std::size_t>(n), 0);
  CHECK(focus::make_routing_plan(one).allowed_pairs() == n * (n + 1) / 2);
  CHECK(focus::make_routing_plan(none, focus::full_causal).allowed_pairs() == n * (n + 1) / 2);
  CHECK(focus::make_routing_plan(one, {.causal = false}).allowed_pairs() == n * n);
  CHECK(focus::make_routing_plan(none, {.window = 0, .sink_tokens = 1}).allowed_pairs() ==
        2 * n - 1);
}

TEST_CASE("routing_plan: what it was made of") {
  const masks query{1, 2, 3}, key{4, 5, 6, 7, ~group_mask{0}};
  const focus::pattern_options pattern{
      .causal = false, .window = focus::unlimited_window, .sink_tokens = 9, .query_offset = -2};
  const focus::routing_plan plan = focus::make_routing_plan(query, key, pattern);
  CHECK(same(plan.query_masks(), query));
  CHECK(same(plan.key_masks(), key));
  CHECK(plan.pattern().causal == false);
  CHECK(plan.pattern().window == focus::unlimited_window);
  CHECK(plan.pattern().sink_tokens == 9);
  CHECK(plan.pattern().query_offset == -2);

  const focus::routing_plan self = focus::make_routing_plan(key);
  CHECK(same(self.query_masks(), key));
  CHECK(same(self.key_masks(), key));
  CHECK(self.pattern().causal);
  CHECK(self.pattern().window == 128);
  CHECK(self.pattern().sink_tokens == 0);
  CHECK_FALSE(self.pattern().query_offset.has_value());
}

TEST_CASE("routing_plan: masks come as vectors, arrays or spans") {
  const masks vector{1, 2, 1};
  const std::array<group_mask, 3> array{1, 2, 1};
  masks writable = vector;
  const focus::pattern_options none{.window = focus::no_window};
  CHECK(focus::make_routing_plan(vector, none).allowed_pairs() == 4);
  CHECK(focus::make_routing_plan(array, none).allowed_pairs() == 4);
  CHECK(focus::make_routing_plan(std::span<const group_mask>(vector), none).allowed_pairs() == 4);
  CHECK(focus::make_routing_plan(std::span<group_mask>(writable), none).allowed_pairs() == 4);
  CHECK(focus::make_routing_plan(std::span<const group_mask>(), none).allowed_pairs() == 0);
}

TEST_CASE("routing_plan: the masks may go, and the plan be copied and moved") {
  std::optional<focus::routing_plan> plan;
  {
    const masks gone{1, 1, 2};
    plan.emplace(focus::make_routing_plan(gone, {.window = focus::no_window}));
  }
  focus::routing_plan copy = *plan;
  plan.reset();
  CHECK(copy.allowed_pairs() == 4);
  CHECK(same(copy.query_masks(), {1, 1, 2}));
  CHECK(same(copy.key_masks(), {1, 1, 2}));
  const focus::routing_plan moved = std::move(copy);
  CHECK(moved.allowed_pairs() == 4);
  CHECK(same(moved.key_masks(), {1, 1, 2}));
}

TEST_CASE("routing_plan: rebuild is as good as new") {
  focus::routing_plan plan = focus::make_routing_plan(masks{1, 2, 3});
  for (const grouping groups : all_groupings)
    for (const index_t n : {130, 3, 0, 77}) {
      const attention_case c{.heads = 1,
                             .n_q = n,
                             .n_k = n + 4,
                             .d = 1,
                             .d_v = 1,
                             .pattern = {.window = 5},
                             .groups = groups,
                             .group_count = 16,
                             .top_k = 3};
      INFO(describe(c));
      const auto [query, key] = masks_of(c);
      plan.rebuild(query, key, c.pattern);
      CHECK(plan.allowed_pairs() == count_pairs(c, query, key));
      CHECK(same(plan.query_masks(), query));
      CHECK(same(plan.key_masks(), key));
      plan.rebuild(key, {.window = focus::no_window});
      attention_case self = c;
      self.n_q = c.n_k, self.pattern = {.window = focus::no_window};
      CHECK(plan.allowed_pairs() == count_pairs(self, key, key));
      CHECK(plan.pattern().window == focus::no_window);
    }
}

TEST_CASE("routing_plan: bad arguments are refused, and leave a plan as it was") {
  const masks some{1, 2, 1};
  focus::routing_plan plan = focus::make_routing_plan(some, {.window = focus::no_window});
  const auto refuse = [&](const char* argument, const focus::pattern_options& pattern) {
    CHECK(refusal(argument, [&] { (void)focus::make_routing_plan(some, pattern); }) == "");
    CHECK(refusal(argument, [&] { (void)focus::make_routing_plan(some, some, pattern); }) == "");
    CHECK(refusal(argument, [&] { plan.rebuild(masks{7, 7}, pattern); }) == "");
    CHECK(refusal(argument, [&] { plan.rebuild(masks{7, 7}, masks{7}, pattern); }) == "");
    CHECK(plan.allowed_pairs() == 4);
    CHECK(same(plan.query_masks(), some));
    CHECK(same(plan.key_masks(), some));
    CHECK(plan.pattern().window == focus::no_window);
  };
  refuse("window", {.window = -2});
  refuse("window", {.window = (std::numeric_limits<index_t>::min)()});
  refuse("sink_tokens", {.sink_tokens = -1});
  refuse("query_offset", {.query_offset = (std::numeric_limits<index_t>::max)()});
  refuse("query_offset", {.query_offset = (std::numeric_limits<index_t>::min)()});
}

TEST_CASE("routing_plan: rebuilt from its own masks, in the other's place") {
  const std::vector<focus::group_mask> first(300, 1), second(500, 2);
  auto plan = focus::make_routing_plan(first, second);
  plan.rebuild(plan.key_masks(), plan.query_masks());
  REQUIRE(plan.query_count() == 500);
  REQUIRE(plan.key_count() == 300);
  for (const focus::group_mask mask : plan.query_masks()) REQUIRE(mask == 2);
  for (const focus::group_mask mask : plan.key_masks()) REQUIRE(mask == 1);
}

TEST_CASE("routing_plan: rebuilt from a part of its own masks") {
  auto plan = focus::make_routing_plan(masks{1, 2, 4, 8}, {.window = focus::no_window});
  plan.rebuild(plan.query_masks().subspan(1), plan.key_masks().first(3));
  CHECK(same(plan.query_masks(), {2, 4, 8}));
  CHECK(same(plan.key_masks(), {1, 2, 4}));
}

TEST_CASE("routing_plan: when memory runs out, a plan of no tokens is left") {
  const attention_case c{.heads = 1,
                         .n_q = 900,
                         .n_k = 900,
                         .d = 1,
                         .d_v = 1,
                         .pattern = {.window = 5},
                         .groups = grouping::drawn,
                         .group_count = 16,
                         .top_k = 2};
  const auto [query, key] = masks_of(c);
  bool failed = true;
  for (long left = 0; failed; ++left) {
    focus::routing_plan plan = focus::make_routing_plan(masks{1, 2, 4});
    failed = false;
    allocations_left = left;
    try {
      plan.rebuild(query, key, c.pattern);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
    if (failed) CHECK((plan.query_count() == 0 && plan.key_count() == 0 && plan.tiles().empty()));
    plan.rebuild(query, key, c.pattern);
    CHECK(plan.allowed_pairs() == count_pairs(c, query, key));
  }
}

TEST_CASE("routing_plan: no more than four slots a key, and a panel for each group") {
  for (const grouping groups : {grouping::balanced, grouping::drawn, grouping::scattered})
    for (const int group_count : {2, 16, 64})
      for (const int top_k : {1, 2, 5}) {
        const attention_case c{.heads = 1,
                               .n_q = 2000,
                               .n_k = 2000,
                               .d = 1,
                               .d_v = 1,
                               .pattern = {.window = 5},
                               .groups = groups,
                               .group_count = group_count,
                               .top_k = top_k};
        INFO(describe(c));
        const auto [query, key] = masks_of(c);
        CHECK(focus::make_routing_plan(query, key, c.pattern).key_slots().size() <= 9024);
      }
  // Keys in five groups each, of which queries ask for a few.
  generator random(3);
  masks query(2000), key(2000);
  for (std::size_t t = 0; t < key.size(); ++t) {
    query[t] = group_mask{1} << random.below(8);
    for (int g = 0; g < 5; ++g) key[t] |= group_mask{256} << random.below(56);
    if (t % 100 == 0) key[t] |= 1;
  }
  CHECK(focus::make_routing_plan(query, key, {.window = 5}).key_slots().size() < 2000);
}

TEST_CASE("routing_plan: C arrays and {} are masks") {
  const focus::group_mask masks[] = {1, 2, 1, 2};
  const auto plan = focus::make_routing_plan(masks, masks, {.window = focus::no_window});
  CHECK(plan.allowed_pairs() == 6);  // each token itself, and the one two before it
  CHECK(focus::make_routing_plan(std::span<const focus::group_mask>(masks), {}, {}).key_count() ==
        0);
}

// So many distinct masks that keys are counted by group: 64 to a word, ends of words included.
TEST_CASE("routing_plan: the number of pairs of many distinct masks") {
  for (const index_t n_k : {191, 192, 193, 321})
    for (const index_t n_q : {index_t{97}, n_k})
      for (const int top_k : {2, 4})
        for (const index_t window : {focus::no_window, index_t{0}, index_t{63}, index_t{64}})
          for (const index_t sinks : {0, 1, 64, 65})
            for (const bool causal : {true, false})
              check_count({.heads = 1,
                           .n_q = n_q,
                           .n_k = n_k,
                           .d = 1,
                           .d_v = 1,
                           .pattern = {.causal = causal, .window = window, .sink_tokens = sinks},
                           .groups = grouping::drawn,
                           .group_count = 64,
                           .top_k = top_k,
                           .separate_masks = true});
}

// Masks of high groups alone used to fall into one place of the table of masks: 750 times slower.
TEST_CASE("routing_plan: its time does not hang on which groups the masks are of") {
  constexpr std::size_t n = 20000;
  const auto milliseconds = [](const masks& of) {
    focus::routing_plan plan;
    double least = 1e9;
    for (int round = 0; round < 5; ++round) {
      const auto start = std::chrono::steady_clock::now();
      plan.rebuild(of, {.window = 16});
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - start;
      least = (std::min)(least, took.count());
    }
    return least;
  };
  const auto masks_by = [](auto&& mask) {
    masks all(n);
    for (std::size_t t = 0; t < n; ++t) all[t] = mask(t);
    return all;
  };
  generator random(11);
  const masks low = masks_by([&](std::size_t) { return random.bits() & 0xfffff; });
  const double fair = milliseconds(low);
  for (const int shift : {20, 32, 44}) {
    INFO("groups from " << shift);
    CHECK(milliseconds(masks_by([&](std::size_t t) { return low[t] << shift; })) < 10 * fair);
  }

  // The adversary: the table's mixing run backwards, from values that agree in their low bits.
  const auto unmixed = [](std::uint64_t x) {
    const auto unshift = [](std::uint64_t y, int by) {
      std::uint64_t whole = y;
      for (int known = by; known < 64; known += by) whole = y ^ (whole >> by);
      return whole;
    };
    const auto inverse = [](std::uint64_t odd) {
      std::uint64_t y = odd;
      for (int step = 0; step < 6; ++step) y *= 2 - odd * y;
      return y;
    };
    x = unshift(x, 31) * inverse(0x94d049bb133111ebu);
    x = unshift(x, 27) * inverse(0xbf58476d1ce4e5b9u);
    return unshift(x, 30);
  };
  CHECK(milliseconds(masks_by([&](std::size_t t) { return unmixed(t << 24); })) < 10 * fair);
}

}  // namespace test_routing_plan
