#include "attend.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

#include <focus/focus.hpp>

#define FOCUS_TEST_PASTE_(a, b) a##b
#define FOCUS_TEST_PASTE(a, b) FOCUS_TEST_PASTE_(a, b)

focus_test::attended focus_test::FOCUS_TEST_PASTE(attend_, FOCUS_TEST_TIER)() {
  constexpr focus::index_t heads = 2, tokens = 150, d = 24;
  std::uint32_t state = 1;
  const auto made_up = [&] {
    std::vector<float> values(static_cast<std::size_t>(heads * tokens * d));
    for (float& x : values) {
      state = state * 1664525u + 1013904223u;
      x = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
    }
    return values;
  };
  const std::vector<float> q = made_up(), k = made_up(), v = made_up();
  std::vector<focus::group_mask> masks(static_cast<std::size_t>(tokens));
  for (std::size_t t = 0; t < masks.size(); ++t) masks[t] = focus::group_mask{1} << (t * 7 % 4);

  const auto input = [&](const std::vector<float>& x) {
    return focus::tensor_view<const float, 3>(x.data(), {heads, tokens, d});
  };
  const auto output = [&](std::vector<float>& x) {
    x.resize(q.size());
    return focus::tensor_view<float, 3>(x.data(), {heads, tokens, d});
  };
  attended result;
  result.vector_width = focus::detail::vec<float>::width;
  focus::attention(input(q), input(k), input(v), output(result.dense));
  focus::sparse_attention(input(q), input(k), input(v),
                          focus::make_routing_plan(masks, {.window = 5, .sink_tokens = 1}),
                          output(result.sparse));
  return result;
}
