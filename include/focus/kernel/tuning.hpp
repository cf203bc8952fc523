// Every tile size of the CPU kernels, with the register and cache arithmetic that gives it.
#pragma once

#include "focus/config.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Tile sizes for operands of type E on the instruction set in use: E is the type in which Q, K and
/// V are packed. It is that of the sums, accumulator_t<E>, called A below.
template <class E>
struct tile_sizes {
  using A = accumulator_t<E>;
  /// Lanes of a vector.
  static constexpr int lanes = vec<A>::width;
  /// Vectors side by side in a register block.
  static constexpr int vectors = 2;
  /// Query rows in a register block (a strip). A block keeps rows x vectors sums, `vectors` of the
  /// packed operand and one broadcast in registers:
  ///   AVX-512  14 x 2 + 2 + 1 = 31 of 32
  ///   AVX2      6 x 2 + 2 + 1 = 15 of 16
  ///   NEON      8 x 2 + 2 + 1 = 19 of 32; more rows would not be fed faster by 16-byte loads
  ///   generic   4 x 2 + 2 + 1 = 11 of 16 (two 16-byte vectors)
#if FOCUS_HAS_AVX512
  static constexpr int strip_rows = 14;
#elif FOCUS_HAS_AVX2 && FOCUS_HAS_FMA
  static constexpr int strip_rows = 6;
#elif FOCUS_HAS_NEON
  static constexpr int strip_rows = 8;
#else
  static constexpr int strip_rows = 4;
#endif
  /// The last strip of a tile may have fewer: half of them or less, down to this.
  static constexpr int half_strip = strip_rows / 2 + 1, smallest_strip = 1;
  /// Keys (or value columns) in a packed panel.
  static constexpr int panel = lanes * vectors;
  /// Keys that a strip takes at a time. With AVX2 the strip's scores (strip_rows x block_keys x
  /// sizeof(A): 6 KiB) and one value panel (block_keys x panel x sizeof(A): 16 KiB) share the L1
  /// cache. With AVX-512 the scores (21 KiB) stay in one of 48 KiB, and value panels (48 KiB) come
  /// from L2, a line every 7 cycles: longer blocks have fewer edges (2 to 4% of dense attention,
  /// against 256 keys; 512 are slower again). The block's K and V (2 x block_keys x d x sizeof(A):
  /// 128 and 192 KiB at d = 64) stay in L2 while all strips of a query tile pass over them.
#if FOCUS_HAS_AVX512
  static constexpr int block_keys = 1536 / static_cast<int>(sizeof(A));
#else
  static constexpr int block_keys = 1024 / static_cast<int>(sizeof(A));
#endif
  /// Keys that a tile of a backward pass takes at a time. All its weights and their gradients (2 x
  /// tile_rows x gradient_keys x sizeof(A): 96 KiB), the block's K twice and V (96 KiB at d = 64),
  /// its dK and dV (64 KiB) and the tile's own Q and dout, twice each, and dQ (120 KiB) share an L2
  /// cache of 512 KiB.
  static constexpr int gradient_keys = 512 / static_cast<int>(sizeof(A));
  /// Steps of the depth between two rows that a product asks for (row_prefetcher). A row of 64
  /// floats is 4 cache lines: 4 lines every 56 cycles (AVX-512: 28 multiply-adds a step, 2 a
  /// cycle), or every 48 (AVX2: 12 a step).
  static constexpr int prefetch_steps = FOCUS_HAS_AVX512 ? 4 : 8;
  /// Row stride of a strip's scores: one panel more, since a block may begin within a panel, and
  /// odd multiples of a cache line keep the rows in different cache sets.
  static constexpr int score_stride = block_keys + 2 * panel;
  /// Query rows in a task, whole strips of them (98 with AVX-512): enough for a block of K and V,
  /// once in L2, to be used again and again; few enough for the tile's own accumulators and packed
  /// queries (2 x tile_rows x d x sizeof(A): 48 KiB at d = 64) to stay beside it.
  static constexpr int tile_rows = (96 + strip_rows - 1) / strip_rows * strip_rows;
  /// Rows for which a tile has room: its last strip may be filled up with rows that do not exist.
  static constexpr int padded_rows = tile_rows + strip_rows;
  /// Elements of a packed query row side by side. A strip's rows lie that far apart, a distance
  /// known at compile time: one register addresses all of them. Rows of 256 bytes (float) fall into
  /// different cache sets.
  static constexpr int depth_chunk = 64;
  /// A packed depth (head_dim) is filled up with zeros to a multiple of this.
  static constexpr int depth_step = 1;
  /// The product Q K^T begins on a multiple of it: half a panel.
  static constexpr int score_step = lanes;
  static_assert(vectors == 2);
  /// The product P V takes whole runs of so many slots, from a multiple of it on.
  static constexpr int slot_step = 1;
  /// Running sums of the weights that a row keeps.
  static constexpr int row_sums = 1;
  /// Whether each row of a strip makes weights of its own slots alone, and not of all that the
  /// strip sees. With few rows in a strip these are nearly the same: looking for them costs more
  /// (2% of a window of 128 with 6 rows).
  static constexpr bool rows_apart = false;
};

#if FOCUS_HAS_AMX
/// bfloat16 in AMX tiles, with sums in float. A tile has 16 rows of 64 bytes: 16 x 16 sums, or 16
/// queries (or rows of weights) x 32 of their elements, or 16 pairs of these x 16 keys (or value
/// columns).
template <>
struct tile_sizes<bfloat16> : tile_sizes<float> {
  /// Rows of a tile, and sums side by side in it.
  static constexpr int tile = 16;
  /// Two tiles of queries by two of keys: 4 tiles of sums and 2 + 2 of operands are all 8 there
  /// are. Each tile that is loaded serves two products: of the 16 cycles that a product takes,
  /// loading takes 8.
  static constexpr int strip_rows = 2 * tile;
  static constexpr int half_strip = tile, smallest_strip = tile;
  static_assert(panel == 2 * tile);
  /// The strip's scores (32 x block_keys x 4 bytes: 32 KiB, of which the weights then take half)
  /// and one value panel (block_keys x 32 x 2 bytes: 16 KiB) fill an L1 cache of 48 KiB, which all
  /// processors with AMX have; the block's K and V (2 x block_keys x d x 2 bytes: 64 KiB at d = 64)
  /// stay in L2. A score row of 28 cache lines puts the 16 rows of a tile into 16 cache sets.
  static constexpr int block_keys = 256;
  static constexpr int tile_rows = 3 * strip_rows;
  static constexpr int padded_rows = tile_rows + strip_rows;
  /// Elements of a row of a tile.
  static constexpr int depth_chunk = 32;
  static constexpr int depth_step = depth_chunk;
  static constexpr int score_step = panel;
  static constexpr int slot_step = panel;
  /// Weights are rounded to bfloat16 for P V. The sum of them as they were gives the logsumexp;
  /// that of them as they are multiplied, padded_rows behind it, divides the output.
  static constexpr int row_sums = 2;
  /// Backward, the scores and dP of a strip and its gradient_keys (2 x 32 x 128 x 4 bytes: 32 KiB)
  /// are in L1 until they are weights. Those of 3 strips and 32 keys, transposed (6 KiB, in chunks
  /// padded_rows x 64 bytes apart), and the sums of 32 keys x 32 columns (4 KiB) are there beside
  /// 6 KiB of a panel of Q or dout.
  static_assert(gradient_keys % strip_rows == 0);
  /// Of 32 rows and a window of 128 slots, a strip sees up to 192 slots, a row 160; and
  /// exponentials are most of the work.
  static constexpr bool rows_apart = true;
};
#elif FOCUS_HAS_BFMMLA
/// bfloat16 in Arm's matrix products, with sums in float: a vector holds 2 rows of 4 elements, and
/// a product of two of them is 2 x 2 sums.
template <>
struct tile_sizes<bfloat16> : tile_sizes<float> {
  /// Rows and columns of a product, elements of a row that it takes, and of a vector.
  static constexpr int pair = 2, quad = 4, pair_size = pair * quad;
  /// 4 x 4 vectors of sums + 4 of queries + 4 of keys = 24 of 32; 8 loads feed 16 products.
  static constexpr int half_strip = strip_rows / 2, smallest_strip = half_strip;
  static constexpr int depth_chunk = quad, depth_step = quad;
  static constexpr int score_step = panel;
  static constexpr int slot_step = quad;
  /// As of AMX: the sum of the weights as they were, and that of them as they are multiplied.
  static constexpr int row_sums = 2;
  static_assert(half_strip % pair == 0 && tile_rows % strip_rows == 0 && panel % quad == 0);
};
#endif

/// Sizes of few_rows, the step of decode. What it takes from memory, 4 to 8 bytes a cycle, leaves
/// it time: sums of products are enough to hide the latency of an addition, and rows share a key
/// once it is widened.
template <class A>
struct few_rows_sizes {
  /// Sums of products at a time, of rows x keys (4 x 4, 2 x 8 or 1 x 16), whole vectors of lanes
  /// to be added up:
  ///   AVX-512, NEON  16 + at most 8 keys + 1 query = 25 of 32 registers
  ///   AVX2, generic   8 + at most 4 keys + 1 query = 13 of 16
  static constexpr int sums = FOCUS_HAS_AVX512 || FOCUS_HAS_NEON ? 16 : 8;
  static_assert(sums % vec<A>::width == 0);
  /// Vectors of the values that up to 4 rows take at a time: 16 (8) sums + 4 (2) values + 1 weight.
  static constexpr int value_vectors = sums / 4;
  /// Keys between two looks at the running maximum. Their K and V (32 KiB at d = 64 and 4 bytes)
  /// stay close from the scores to the sums of values, and those of the next block are on their way
  /// to L2: with 128 and 256 keys, whose rows come in longer bursts, decode reads 3 and 10% less a
  /// second.
  static constexpr int block_keys = 64;
  static constexpr int score_stride = block_keys + sums;
};
/// Rows of a kv head (queries x the query heads that share it) up to which keys are read where they
/// are; more are worth packing them: packing costs as much as some 16 rows, and bfloat16 products
/// as stored as 8.
template <class E>
inline constexpr index_t most_few_rows = sizeof(E) == 2 ? 7 : 16;
/// Pages of 8 keys in a task of decode: the sums of a task, read again when they are added up, are
/// 1 KiB for 4 rows of 64, the keys 128 KiB (8 bits) to 512 KiB (float).
inline constexpr index_t split_pages = 128;
/// The same where keys are packed for many rows, and tasks from which on nothing is split.
inline constexpr index_t packed_split_pages = 512, enough_tasks = 64;

/// How many rows of a strip of other operands go through a register block of A together: all, or
/// the most that the strip is a multiple of.
template <class A>
constexpr int block_rows(int strip_rows) noexcept {
  int rows = strip_rows;
  while (rows > tile_sizes<A>::strip_rows || strip_rows % rows != 0) --rows;
  return rows;
}

/// Bytes of K and V that a thread packs for itself to use them from L2, where its tiles' rows lie,
/// too: of the 1 or 2 MiB that server processors with AVX-512 have, or of 512 KiB.
inline constexpr index_t packed_bytes = FOCUS_HAS_AVX512 ? 640 * 1024 : 320 * 1024;

/// Cells of keys begin on a multiple of every type's panel, so that one plan serves them all.
inline constexpr index_t widest_panel = tile_sizes<float>::panel;
static_assert(widest_panel % tile_sizes<double>::panel == 0);
/// Query rows of a plan's tiles: what a tile of any type has room for, and whole strips of most.
inline constexpr index_t plan_tile_rows = 96;
static_assert(plan_tile_rows <= tile_sizes<float>::tile_rows);
static_assert(plan_tile_rows <= tile_sizes<double>::tile_rows);

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
