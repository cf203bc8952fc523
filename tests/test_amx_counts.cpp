// How many tile instructions a unit of 32 queries by 64 keys takes in AMX, counted by the
// emulation: a price that needs no such processor.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "catch.hpp"
#include "focus/attention.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/options.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

#if !defined(FOCUS_TEST_COUNTS_TILES) || !FOCUS_HAS_AMX
#error "Tile instructions are counted where AMX is emulated: -include tests/emulate_avx512.hpp."
#endif

namespace test_amx_counts {
namespace {

using focus::bfloat16;
using focus::index_t;
using focus_test::amx::tile_counts;

/// One head, no causal limit: every strip sees every key, so each unit is whole.
tile_counts count_dense(index_t queries, index_t keys, index_t dim) {
  const std::vector<bfloat16> q(static_cast<std::size_t>(queries * dim));
  const std::vector<bfloat16> k(static_cast<std::size_t>(keys * dim)), v = k;
  std::vector<bfloat16> out(q.size());
  focus_test::amx::counts = {};
  focus::attention(focus::tensor_view<const bfloat16, 3>(q.data(), {1, queries, dim}),
                   focus::tensor_view<const bfloat16, 3>(k.data(), {1, keys, dim}),
                   focus::tensor_view<const bfloat16, 3>(v.data(), {1, keys, dim}),
                   focus::tensor_view<bfloat16, 3>(out.data(), {1, queries, dim}),
                   focus::pattern_options{.causal = false, .window = focus::unlimited_window});
  return focus_test::amx::counts;
}

TEST_CASE("amx counts: tile instructions of whole units, by their model") {
  using sizes = focus::detail::tile_sizes<bfloat16>;
  constexpr index_t block = sizes::block_keys, tile = 16, panel = 32;
  for (const index_t dim : {64, 128})
    for (const index_t blocks : {1, 2}) {
      const index_t queries = 2 * panel, keys = blocks * block;
      INFO("dim " << dim << ", keys " << keys);
      const tile_counts got = count_dense(queries, keys, dim);
      // Both products: a TDP multiplies 16 x 16 x 32 numbers.
      CHECK(got.products == 2 * queries * keys * dim / (tile * tile * panel));
      // Of a 2 x 2 block of TDPs two operands stream by, keys or values, and two stay.
      CHECK(got.stream_loads == got.products / 2);
      const index_t strips = queries / panel;
      const index_t scores = strips * (keys / panel) * 4;
      const index_t sums = strips * blocks * (dim / panel) * 4;
      CHECK(got.zeros == scores);
      CHECK(got.stores == scores + sums);
      CHECK(got.loads == got.products / 2 + sums);
    }
}

}  // namespace
}  // namespace test_amx_counts
