// The first keys of a tile's rows: a few that all of them see.
#pragma once

#include <algorithm>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/query_tile.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The most keys that a tile takes as sinks: for each of them a row's accumulator is gone through.
inline constexpr int most_sinks = 4;

/// The scores of `lanes` rows with one key, in units of log2. Products go along the rows, and their
/// sums are transposed: a panel of keys would be empty but for this one.
template <class A, class T>
vec<A> sink_scores(const A* query, const T* key, index_t depth, A softcap) {
  constexpr int lanes = vec<A>::width, chunk = tile_sizes<A>::depth_chunk;
  array_of<vec<A>, lanes> sum;
  static_for<lanes>([&](auto l) FOCUS_LAMBDA_INLINE { sum[l] = vec<A>::zero(); });
  for (index_t t = 0; t < depth; t += lanes) {
    const vec<A> k = detail::load_widened_up_to<T, A>(key + t, depth - t);
    const A* const q = query + t / chunk * tile_sizes<A>::padded_rows * chunk + t % chunk;
    static_for<lanes>(
        [&](auto l) FOCUS_LAMBDA_INLINE { sum[l] = fma(vec<A>::load(q + l * chunk), k, sum[l]); });
  }
  transpose(sum);
  static_for<lanes / 2>([&](auto l) FOCUS_LAMBDA_INLINE { sum[l] = sum[l] + sum[l + lanes / 2]; });
  for (int l = 1; l < lanes / 2; ++l) sum[0] = sum[0] + sum[l];
  return softcap > 0 ? tanh<A>(sum[0]) * vec<A>::broadcast(softcap * log2_e<A>) : sum[0];
}

/// Lets the rows of a tile see `count` keys (1 ... most_sinks) and nothing before: the running
/// softmax begins with them. key_of(j), value_of(j): their rows of K and V.
template <class A, class KeyOf, class ValueOf>
void see_sinks(query_tile<A>& tile, index_t head_dim, index_t value_dim, index_t count,
               KeyOf&& key_of, ValueOf&& value_of, A softcap) {
  constexpr int lanes = vec<A>::width;
  using T = std::remove_cvref_t<decltype(*value_of(0))>;
  for (index_t first = 0; first < tile.rows(); first += lanes) {
    const strip_state<A> rows = tile.state_of(first);
    array_of<vec<A>, most_sinks> weight;
    vec<A> top = vec<A>::broadcast(lowest<A>);
    for (index_t j = 0; j < count; ++j) {
      weight[j] = sink_scores<A>(rows.query, key_of(j), head_dim, softcap);
      top = maximum(weight[j], top);  // that of NaN stays what it is
    }
    array_of<A, lanes> tops, shift;
    top.store(tops);
    // As update_softmax has it: measured from 0, nothing seen weighs 0.
    for (int l = 0; l < lanes; ++l) shift[l] = tops[l] > lowest<A> ? tops[l] : A{0};
    vec<A> total = vec<A>::zero();
    for (index_t j = 0; j < count; ++j) {
      weight[j] = exp2<A>(weight[j] - vec<A>::load(shift));
      total = total + weight[j];
    }
    array_of<A, lanes> totals;
    table_of<A, most_sinks, lanes> weights;
    total.store(totals);
    for (index_t j = 0; j < count; ++j) weight[j].store(weights[j]);

    const index_t there = (std::min<index_t>)(lanes, tile.rows() - first);
    copy(tops, tops + there, rows.top);
    copy(totals, totals + there, rows.sum);
    for (index_t l = 0; l < there; ++l) {
      A* const acc = rows.acc + l * rows.acc_stride;
      for (index_t c = 0; c < value_dim; c += lanes) {
        vec<A> sum = vec<A>::zero();
        for (index_t j = 0; j < count; ++j)
          sum = fma(vec<A>::broadcast(weights[j][l]),
                    detail::load_widened_up_to<T, A>(value_of(j) + c, value_dim - c), sum);
        sum.store(acc + c);
      }
    }
  }
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
