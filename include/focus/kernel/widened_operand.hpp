// Operands that are widened to the type of the sums, float or double, when they are packed: the
// vector layer multiplies them.
#pragma once

#include <algorithm>
#include <concepts>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/row_panels.hpp"
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

/// sum[r][v] += a(r, t) * b(t, v) over t < depth: the inner product of all kernels. a(r, t) is one
/// element at a[r * RowStep + t * DepthStep]; b(t, .) are vectors at row(t).
template <int Rows, int Vectors, int RowStep, int DepthStep, class A, class RowAt>
FOCUS_ALWAYS_INLINE void multiply_rows(const A* a, RowAt&& row, index_t depth,
                                       table_of<vec<A>, Rows, Vectors>& sum) {
  constexpr int lanes = vec<A>::width;
  for (index_t t = 0; t < depth; ++t, a += DepthStep) {
    const A* const b = row(t);
    array_of<vec<A>, Vectors> column;
    static_for<Vectors>([&](auto v)
                            FOCUS_LAMBDA_INLINE { column[v] = vec<A>::load(b + v * lanes); });
    static_for<Rows>([&](auto r) FOCUS_LAMBDA_INLINE {
      const vec<A> element = vec<A>::broadcast(a[r * RowStep]);
      static_for<Vectors>(
          [&](auto v) FOCUS_LAMBDA_INLINE { sum[r][v] = fma(element, column[v], sum[r][v]); });
    });
  }
}
/// The same where b is a panel.
template <int Rows, int Vectors, int RowStep, int DepthStep, class A>
FOCUS_ALWAYS_INLINE void multiply(const A* a, const A* b, index_t depth,
                                  table_of<vec<A>, Rows, Vectors>& sum) {
  multiply_rows<Rows, Vectors, RowStep, DepthStep>(
      a,
      [&](index_t) FOCUS_LAMBDA_INLINE {
        const A* const row = b;
        b += tile_sizes<A>::panel;
        return row;
      },
      depth, sum);
}

/// scores[r][0, panel) = query row r . key, for one key panel; only the first Vectors vectors of
/// it.
template <int Rows, int Vectors, class A>
FOCUS_NOINLINE void score_panel(const A* query, const A* key_panel, index_t depth, A* scores,
                                row_prefetcher* ahead) {
  constexpr int lanes = vec<A>::width, stride = tile_sizes<A>::score_stride,
                panel = tile_sizes<A>::panel, chunk = tile_sizes<A>::depth_chunk;
  table_of<vec<A>, Rows, Vectors> sum;
  static_for<Rows * Vectors>(
      [&](auto i) FOCUS_LAMBDA_INLINE { sum[i / Vectors][i % Vectors] = vec<A>::zero(); });
  for (index_t first = 0; first < depth; first += chunk) {
    index_t done = 0;
    if (ahead != nullptr && depth - first >= chunk) {
      constexpr int steps = tile_sizes<A>::prefetch_steps;
      for (; done < chunk; done += steps) {
        ahead->next();
        multiply<Rows, Vectors, chunk, 1>(query + done, key_panel + done * panel, steps, sum);
      }
    }
    multiply<Rows, Vectors, chunk, 1>(query + done, key_panel + done * panel,
                                      (std::min<index_t>)(chunk, depth - first) - done, sum);
    query += tile_sizes<A>::padded_rows * chunk;
    key_panel += chunk * panel;
  }
  static_for<Rows * Vectors>([&](auto i) FOCUS_LAMBDA_INLINE {
    sum[i / Vectors][i % Vectors].store(scores + i / Vectors * stride + i % Vectors * lanes);
  });
}

/// acc[r] = rescale[r] * acc[r] + sum over t of weights[r][t] * values of row(t), for one value
/// panel. If Checked: unless a sum is NaN or infinite; returns whether all are finite.
template <int Rows, int Vectors, bool Checked, class A, class RowAt>
FOCUS_NOINLINE bool accumulate_panel(const A* weights, RowAt row, index_t count, const A* rescale,
                                     A* acc, index_t acc_stride) {
  constexpr int lanes = vec<A>::width, stride = tile_sizes<A>::score_stride;
  table_of<vec<A>, Rows, Vectors> sum;
  static_for<Rows>([&](auto r) FOCUS_LAMBDA_INLINE {
    const vec<A> factor = vec<A>::broadcast(rescale[r]);
    static_for<Vectors>([&](auto v) FOCUS_LAMBDA_INLINE {
      sum[r][v] = vec<A>::load(acc + r * acc_stride + v * lanes) * factor;
    });
  });
  multiply_rows<Rows, Vectors, stride, 1>(weights, row, count, sum);
  if constexpr (Checked) {
    array_of<vec<A>, Vectors> poison;  // 0 * x is NaN just for NaN and infinite x
    static_for<Vectors>([&](auto v) FOCUS_LAMBDA_INLINE {
      poison[v] = vec<A>::zero();
      static_for<Rows>([&](auto r) FOCUS_LAMBDA_INLINE {
        poison[v] = fma(sum[r][v], vec<A>::zero(), poison[v]);
      });
    });
    vec<A> all = poison[0];
    static_for<Vectors - 1>([&](auto v) FOCUS_LAMBDA_INLINE { all = all + poison[v + 1]; });
    if (is_nan(reduce_add(all))) return false;
  }
  static_for<Rows>([&](auto r) FOCUS_LAMBDA_INLINE {
    static_for<Vectors>(
        [&](auto v) FOCUS_LAMBDA_INLINE { sum[r][v].store(acc + r * acc_stride + v * lanes); });
  });
  return true;
}

/// to[c][0, Vectors vectors) += sum over rows t of weights[t][c] * rows[t], c < Keys: the product
/// with the transposed weights. rows: a value panel.
template <int Keys, int Vectors, class A>
FOCUS_NOINLINE void accumulate_transposed(const A* weights, const A* rows, index_t count,
                                          A* const* to, index_t offset) {
  constexpr int lanes = vec<A>::width, stride = tile_sizes<A>::score_stride;
  table_of<vec<A>, Keys, Vectors> sum;
  static_for<Keys>([&](auto c) FOCUS_LAMBDA_INLINE {
    static_for<Vectors>(
        [&](auto v) FOCUS_LAMBDA_INLINE { sum[c][v] = vec<A>::load(to[c] + offset + v * lanes); });
  });
  multiply<Keys, Vectors, 1, stride>(weights, rows, count, sum);
  static_for<Keys>([&](auto c) FOCUS_LAMBDA_INLINE {
    static_for<Vectors>([&](auto v)
                            FOCUS_LAMBDA_INLINE { sum[c][v].store(to[c] + offset + v * lanes); });
  });
}

/// The rows of values that accumulate_panel takes: those of a panel, or of V where it lies.
template <class A>
struct rows_in_panel {
  const A* values;
  FOCUS_ALWAYS_INLINE const A* operator()(index_t t) const noexcept {
    return values + t * tile_sizes<A>::panel;
  }
};
template <class A>
struct rows_in_place {
  const A* values;
  index_t step;
  FOCUS_ALWAYS_INLINE const A* operator()(index_t t) const noexcept { return values + t * step; }
};

/// row[j] = 2^(row[j] - shift), times gates[j] where there are gates, for whole vectors of `count`
/// elements; returns their sum. Two vectors at a time: the exponentials of both overlap.
template <class A, class... Gates>
FOCUS_ALWAYS_INLINE A exponentiate_row(A shift, index_t count, A* row, const Gates*... gates) {
  constexpr int lanes = vec<A>::width;
  const vec<A> offset = vec<A>::broadcast(shift);
  const auto weigh = [&](index_t j) FOCUS_LAMBDA_INLINE {
    vec<A> weight = exp2<A>(vec<A>::load(row + j) - offset);
    ((weight = weight * vec<A>::load(gates + j)), ...);
    weight.store(row + j);
    return weight;
  };
  vec<A> total = vec<A>::zero(), total_of_odd = vec<A>::zero();
  index_t j = 0;
  for (; j + lanes < count; j += 2 * lanes) {
    const vec<A> even = weigh(j), odd = weigh(j + lanes);
    total = total + even;
    total_of_odd = total_of_odd + odd;
  }
  if (j < count) total = total + weigh(j);
  return reduce_add(total + total_of_odd);
}

/// Operands of the type of the sums; see kernel/operand.hpp.
template <class A>
struct operand {
  static_assert(
      std::same_as<A, accumulator_t<A>>,
      "focus: operands of this type are not multiplied as they are on this instruction set.");

  /// Nothing is held.
  struct scope {};

  /// Nothing is left to be multiplied by: the packed queries hold the factor.
  struct score_factor {
    void set(A) noexcept {}
    template <int Rows>
    A apply(A*, index_t, [[maybe_unused]] bool capped) const noexcept {
      return 1;
    }
  };

  template <class RowOf>
  static void pack_queries(index_t rows, index_t depth, A factor, RowOf&& row_of, A* to) {
    constexpr int lanes = vec<A>::width, chunk = tile_sizes<A>::depth_chunk;
    static_assert(chunk % lanes == 0);
    const vec<A> scale = vec<A>::broadcast(factor);
    for (index_t first = 0; first < depth;
         first += chunk, to += tile_sizes<A>::padded_rows * chunk) {
      const index_t width = (std::min<index_t>)(chunk, depth - first);
      for (index_t r = 0; r < rows; ++r) {
        constexpr index_t ahead = 6;
        if (r + ahead < rows) detail::prefetch_row(row_of(r + ahead) + first, width);
        const auto* from = row_of(r) + first;
        using T = std::remove_cvref_t<decltype(*from)>;
        A* row = to + r * chunk;
        index_t c = 0;
        for (; c + lanes <= width; c += lanes)
          (detail::load_widened<T, A>(from + c) * scale).store(row + c);
        if (c < width)
          (detail::load_widened_partial<T, A>(from + c, width - c) * scale).store(row + c);
      }
      fill(to + rows * chunk, to + round_up(rows, tile_sizes<A>::strip_rows) * chunk, A{0});
    }
  }

  template <class RowOf>
  static void pack_key_panel(RowOf&& row_of, index_t depth, A* to) {
    detail::pack_rows_as_columns<tile_sizes<A>::panel>(row_of, depth, to);
  }

  template <class RowOf>
  static bool pack_value_panel(RowOf&& row_of, index_t width, index_t first, index_t stride,
                               A* panels) {
    constexpr int panel = tile_sizes<A>::panel;
    array_of<decltype(row_of(0)), panel> rows;
    for (int c = 0; c < panel; ++c) rows[c] = row_of(c);
    return detail::spread_over_panels(rows, panel, width, first, stride, panels);
  }

  // Here, and in accumulate, a call is nothing beside its block of keys: without a word the
  // compiler would copy the code into all callers.
  template <int Rows>
  FOCUS_NOINLINE static void score_slots(const A* query, const packed_keys<A>& keys, index_t base,
                                         index_t end, A* scores, row_prefetcher* ahead = nullptr) {
    constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
    index_t slot = base;
    if (slot % panel != 0) {  // the second half of a panel
      score_panel<Rows, 1>(query, keys.key_panel(slot - lanes) + lanes, keys.head_dim, scores,
                           ahead);
      slot += lanes, scores += lanes;
    }
    for (; slot < end; slot += panel, scores += panel) {
      if (end - slot > lanes)
        score_panel<Rows, 2>(query, keys.key_panel(slot), keys.head_dim, scores, ahead);
      else
        score_panel<Rows, 1>(query, keys.key_panel(slot), keys.head_dim, scores, ahead);
    }
  }

  /// The scores come with nothing left of the factor.
  FOCUS_ALWAYS_INLINE static weight_sums<A> weigh_row(int, A shift, A, index_t count, A* row) {
    return {{detail::exponentiate_row(shift, count, row)}};
  }
  FOCUS_ALWAYS_INLINE static weight_sums<A> weigh_gated_row(int, A shift, index_t count, A* row,
                                                            const A* gates) {
    return {{detail::exponentiate_row(shift, count, row, gates)}};
  }

  template <int Rows>
  FOCUS_NOINLINE static void accumulate(const strip_state<A>& strip, const packed_keys<A>& keys,
                                        slot_range seen, const A* weights, const A* rescale) {
    for (index_t p = 0; p < keys.value_panels(); ++p)
      accumulate_values<Rows, false>(strip, keys, p, seen, weights, rescale);
  }

  template <int Rows, class Sees>
  FOCUS_NOINLINE static void accumulate_seen(const strip_state<A>& strip,
                                             const packed_keys<A>& keys, slot_range seen,
                                             const A* weights, const A* rescale, Sees&& sees) {
    constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
    for (index_t p = 0; p < keys.value_panels(); ++p) {
      // Where no value is known to be one of those, they are noticed by what they leave.
      if (keys.nonfinite_values == nullptr &&
          accumulate_values<Rows, true>(strip, keys, p, seen, weights, rescale))
        continue;
      const index_t end = (std::min)(round_up(keys.value_dim, lanes), (p + 1) * panel);
      for (index_t column = p * panel; column < end; column += lanes)
        for (int r = 0; r < Rows; ++r) {
          A* acc = strip.acc + r * strip.acc_stride + column;
          vec<A> sum = vec<A>::load(acc) * vec<A>::broadcast(rescale[r]);
          for (index_t slot = seen.begin; slot < seen.end; ++slot) {
            if (!sees(r, slot)) continue;
            const A weight = weights[r * tile_sizes<A>::score_stride + slot - seen.begin];
            const A* values = keys.value_panel(p, slot) + column % panel;
            sum = fma(vec<A>::broadcast(weight), vec<A>::load(values), sum);
          }
          sum.store(acc);
        }
    }
  }

  /// They are weights already.
  static void round_weights(int, index_t, A*) noexcept {}
  static A weight(const A* weights, int r, index_t slot) noexcept {
    return weights[r * tile_sizes<A>::score_stride + slot];
  }

  /// The weights are read where they lie, and sums stay in registers.
  static constexpr index_t transposed_size = 0, transposed_sums_size = 0;
  static void accumulate_rows(const A* weights, const row_panels<A>& rows, index_t first,
                              index_t last, index_t keys, A* const* to,
                              const transposition_scratch<A>&) {
    constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel,
                  stride = tile_sizes<A>::score_stride;
    if (rows.nonfinite) {
      for (index_t c = 0; c < keys; ++c)
        for (index_t t = first; t < last; ++t) {
          const A weight = weights[t * stride + c];
          if (is_zero(weight)) continue;
          for (index_t x = 0; x < rows.width; x += lanes)
            fma(vec<A>::broadcast(weight), vec<A>::load(rows.at(x / panel, t) + x % panel),
                vec<A>::load(to[c] + x))
                .store(to[c] + x);
        }
      return;
    }
    with_strip_rows<A>(keys, [&](auto size) {
      for (index_t p = 0; p * panel < rows.width; ++p) {
        const A* block = rows.at(p, first);
        if (rows.width - p * panel > lanes)
          accumulate_transposed<size(), 2>(weights + first * stride, block, last - first, to,
                                           p * panel);
        else
          accumulate_transposed<size(), 1>(weights + first * stride, block, last - first, to,
                                           p * panel);
      }
    });
  }

 private:
  /// The columns of value panel p.
  template <int Rows, bool Checked>
  FOCUS_ALWAYS_INLINE static bool accumulate_values(const strip_state<A>& strip,
                                                    const packed_keys<A>& keys, index_t p,
                                                    slot_range seen, const A* weights,
                                                    const A* rescale) {
    constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
    const auto take = [&](auto rows) {
      const index_t count = seen.end - seen.begin;
      A* const acc = strip.acc + p * panel;
      return keys.value_dim - p * panel > lanes
                 ? accumulate_panel<Rows, 2, Checked>(weights, rows, count, rescale, acc,
                                                      strip.acc_stride)
                 : accumulate_panel<Rows, 1, Checked>(weights, rows, count, rescale, acc,
                                                      strip.acc_stride);
    };
    const A* const values = keys.value_panel(p, seen.begin);
    if (keys.nonfinite_values == nullptr) return take(rows_in_place<A>{values, keys.value_step});
    if constexpr (!Checked) return take(rows_in_panel<A>{values});
    return false;
  }
};

/// scores[r][slot - base] = query row r . key, as operand<A>::score_slots, for a strip of other
/// operands: in as many register blocks of these as it takes. base: a multiple of panel.
template <int Rows, class A>
void score_strip(const A* query, const packed_keys<A>& keys, index_t base, index_t end, A* scores) {
  constexpr int block = block_rows<A>(Rows);
  for (int r = 0; r < Rows; r += block)
    operand<A>::template score_slots<block>(query + r * tile_sizes<A>::depth_chunk, keys, base, end,
                                            scores + r * tile_sizes<A>::score_stride);
}

/// Packs the rows row_of(0) ... row_of(rows - 1) for score_strip of strips of E, whose last may be
/// filled up further than one of these operands: with the last row again, which nobody asks for.
template <class E, class A, class RowOf>
void pack_queries_of_strips(index_t rows, index_t depth, RowOf&& row_of, A* to) {
  static_assert(tile_sizes<E>::tile_rows <= tile_sizes<A>::padded_rows);
  const index_t all = std::is_same_v<E, A> ? rows : round_up(rows, tile_sizes<E>::strip_rows);
  operand<A>::pack_queries(
      all, depth, A{1}, [&](index_t r) { return row_of((std::min)(r, rows - 1)); }, to);
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
