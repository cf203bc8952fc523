// Parallel loops over matrices. How they are cut into tasks is fixed, so that results do not depend
// on the number of threads.
#pragma once

#include <algorithm>

#include "thread_pool.hpp"

namespace language_model {

constexpr index_t ceil_div(index_t a, index_t b) {
  return (a + b - 1) / b;
}

/// Calls body(first_row, rows) for all rows, in chunks: for element-wise work.
template <class Body>
void for_row_chunks(index_t rows, thread_pool& pool, Body&& body) {
  constexpr index_t chunk = 64;
  pool.parallel_for(ceil_div(rows, chunk), [&](index_t task, index_t) {
    const index_t first = task * chunk;
    body(first, std::min(chunk, rows - first));
  });
}

/// Calls body(first_row, rows, first_output, outputs) for all tiles of a matrix product: large
/// enough that packing both operands costs little beside multiplying them, small enough to keep
/// many threads busy. Of a token or a few, which pack nothing, tiles are narrow: each thread is to
/// read its share of the weights.
template <class Body>
void for_product_tiles(index_t rows, index_t outputs, thread_pool& pool, Body&& body) {
  constexpr index_t tile_rows = 256, few_rows = 8;
  const index_t tile_outputs = rows <= few_rows ? 64 : 512;
  const index_t tiles_across = ceil_div(outputs, tile_outputs);
  pool.parallel_for(ceil_div(rows, tile_rows) * tiles_across, [&](index_t task, index_t) {
    const index_t row = task / tiles_across * tile_rows;
    const index_t output = task % tiles_across * tile_outputs;
    body(row, std::min(tile_rows, rows - row), output, std::min(tile_outputs, outputs - output));
  });
}

}  // namespace language_model
