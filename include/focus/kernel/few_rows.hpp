// A few query rows against keys that lie in memory row by row: the step of decode. Each key is read
// once, from where it is; nothing is packed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/operand.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/query_tile.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/tile.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// vec<A>::width elements as they are cached, widened; of 8-bit numbers without their scale.
template <class A, class T>
FOCUS_ALWAYS_INLINE vec<A> load_cached(const T* p) {
  if constexpr (std::is_same_v<T, std::int8_t>) {
    [[maybe_unused]] const void* const bits = p;
    if constexpr (requires { load_int8(bits, static_cast<vec<A>*>(nullptr)); }) {
      return load_int8(bits, static_cast<vec<A>*>(nullptr));
    } else {
      A lane[static_cast<std::size_t>(vec<A>::width)];
      for (int l = 0; l < vec<A>::width; ++l) lane[l] = static_cast<A>(p[l]);
      return vec<A>::load(lane);
    }
  } else {
    return detail::load_widened<T, A>(p);
  }
}
/// The first `count` < vec<A>::width of them, zeros behind them.
template <class A, class T>
FOCUS_ALWAYS_INLINE vec<A> load_cached_partial(const T* p, index_t count) {
  if constexpr (std::is_same_v<T, std::int8_t>) {
    A lane[static_cast<std::size_t>(vec<A>::width)] = {};
    for (index_t l = 0; l < count; ++l) lane[l] = static_cast<A>(p[l]);
    return vec<A>::load(lane);
  } else {
    return detail::load_widened_partial<T, A>(p, count);
  }
}

/// The sum of each of `width` vectors, in the lane of its number.
template <class A>
FOCUS_ALWAYS_INLINE vec<A> sum_each(array_of<vec<A>, vec<A>::width>& x) {
  constexpr int lanes = vec<A>::width;
  if constexpr (requires { add_lanes(x); }) {
    return add_lanes(x);
  } else {
    transpose(x);
    static_for<lanes - 1>([&](auto l) FOCUS_LAMBDA_INLINE { x[0] = x[0] + x[l + 1]; });
    return x[0];
  }
}

/// Some keys of one kv head: where their rows are. Format: how K and V lie in a row, as cached_row.
template <class Format>
struct key_rows {
  using value_type = typename Format::value_type;
  static constexpr bool is_quantised = Format::is_quantised;

  const Format* format;
  const std::byte* const* rows;  // [count], of kv head 0
  index_t count;
  index_t head_offset;  // from there to this head's

  [[nodiscard]] const std::byte* row(index_t j) const noexcept { return rows[j] + head_offset; }
  [[nodiscard]] const value_type* key(index_t j) const noexcept { return format->key(row(j)); }
  [[nodiscard]] const value_type* value(index_t j) const noexcept { return format->value(row(j)); }
};

/// Scratch memory of few_rows, of all workers: for so many rows of each of so many kv heads.
template <class A>
class few_rows_layout {
 public:
  few_rows_layout(scratch_plan& plan, index_t workers, index_t heads, index_t rows,
                  index_t head_dim, index_t value_dim)
      : head_dim_(head_dim),
        value_dim_(value_dim),
        depth_(round_up(head_dim, vec<A>::width)),
        acc_stride_(round_up(value_dim, vec<A>::width)) {
    constexpr index_t stride = few_rows_sizes<A>::score_stride;
    scratch_plan one;
    queries_ = one.add<A>(heads * rows * depth_);
    acc_ = one.add<A>(heads * rows * acc_stride_);
    top_ = one.add<A>(heads * rows);
    sum_ = one.add<A>(heads * rows);
    rescale_ = one.add<A>(rows);
    scores_ = one.add<A>(rows * stride);
    scales_ = one.add<A>(2 * stride);
    rows_ = plan.add_each(workers, one);
  }

 private:
  template <class>
  friend class few_rows;
  index_t head_dim_, value_dim_, depth_, acc_stride_;
  scratch_array<A> queries_, acc_, top_, sum_, rescale_, scores_, scales_;
  worker_scratch rows_;
};

/// The running softmax of a few query rows of some kv heads, in the scratch memory of one worker.
template <class A>
class few_rows {
  using sizes = few_rows_sizes<A>;
  static constexpr int lanes = vec<A>::width;
  static constexpr index_t stride = sizes::score_stride;

 public:
  few_rows(const scratch_memory& memory, const few_rows_layout<A>& layout, index_t worker) noexcept
      : head_dim_(layout.head_dim_),
        value_dim_(layout.value_dim_),
        depth_(layout.depth_),
        acc_stride_(layout.acc_stride_) {
    const scratch_block own = layout.rows_.of(memory, worker);
    queries_ = own[layout.queries_];
    acc_ = own[layout.acc_];
    top_ = own[layout.top_];
    sum_ = own[layout.sum_];
    rescale_ = own[layout.rescale_];
    scores_ = own[layout.scores_];
    scales_ = own[layout.scales_];
  }

  [[nodiscard]] index_t rows() const noexcept { return rows_; }

  /// Begins with `rows` rows that have seen nothing. row_of(r): the elements of query row r; scores
  /// are their products times `factor`.
  template <class RowOf>
  void begin(index_t rows, A factor, RowOf&& row_of) {
    rows_ = rows;
    for (index_t r = 0; r < rows; ++r) {
      const auto* const from = row_of(r);
      A* const to = queries_ + r * depth_;
      for (index_t t = 0; t < head_dim_; ++t)
        to[t] = static_cast<A>(detail::widen(from[t])) * factor;
      fill(to + head_dim_, to + depth_, A{0});
      top_[r] = lowest<A>;
      sum_[r] = 0;
      fill(acc_ + r * acc_stride_, acc_ + (r + 1) * acc_stride_, A{0});
    }
  }

  /// Rows [first, first + count) of these: those of one kv head.
  [[nodiscard]] few_rows part(index_t first, index_t count) const noexcept {
    few_rows some = *this;
    some.queries_ += first * depth_;
    some.acc_ += first * acc_stride_;
    some.top_ += first;
    some.sum_ += first;
    some.rows_ = count;
    return some;
  }

  /// Adds a block of keys, at most block_keys, to the running softmax of all rows.
  /// @param next     what will be used after it, and is asked for on the way; may be none
  /// @param seen_by  null, or of each key the rows that see it: bit r / rows_a_query for row r
  template <class Format>
  void attend(const key_rows<Format>& keys, const key_rows<Format>& next,
              const std::uint64_t* seen_by, index_t rows_a_query, A softcap) {
    const index_t count = keys.count, padded = round_up(count, lanes);
    const key_rows<Format> none{keys.format, nullptr, 0, 0};
    const auto next_of = [&](index_t r) -> const key_rows<Format>& {
      return r == 0 ? next : none;
    };
    for_rows(0, rows_, [&](auto rows, index_t r) { score<rows()>(keys, next_of(r), r); });
    if constexpr (Format::is_quantised) scale_scores(keys);
    for (index_t r = 0; r < rows_; ++r) {
      A* const row = scores_ + r * stride;
      if (softcap > 0) cap(row, count, softcap);
      fill(row + count, row + padded, lowest<A>);
      if (seen_by != nullptr)
        hide_by_groups<hidden_keys::disjoint>(
            seen_by, std::uint64_t{1} << static_cast<int>(r / rows_a_query), count, row);
      weigh(r, padded);
    }
    if constexpr (Format::is_quantised) scale_weights(padded);
    if (seen_by == nullptr) {
      for_rows(0, rows_, [&](auto rows, index_t r) {
        accumulate<rows(), false>(keys, next_of(r), nullptr, 0, r);
      });
    } else {
      for (index_t q = 0; q * rows_a_query < rows_; ++q)
        for_rows(q * rows_a_query, (q + 1) * rows_a_query, [&](auto rows, index_t r) {
          accumulate<rows(), true>(keys, next_of(r), seen_by, static_cast<int>(q), r);
        });
    }
  }

  /// The running softmax of row r: its accumulator [value_dim], and the rest.
  [[nodiscard]] const A* accumulator(index_t r) const noexcept { return acc_ + r * acc_stride_; }
  [[nodiscard]] row_softmax<A> softmax(index_t r) const noexcept {
    return {top_[r], sum_[r], sum_[r]};
  }

 private:
  /// Asks for elements that come next, into L2: L1 is full of what is being multiplied.
  template <class T>
  FOCUS_ALWAYS_INLINE static void ask_for([[maybe_unused]] const T* from,
                                          [[maybe_unused]] index_t count) noexcept {
#if defined(__GNUC__) || defined(__clang__)
    constexpr index_t line = 64;
    const auto* const bytes = reinterpret_cast<const char*>(from);
    for (index_t at = 0; at < count * static_cast<index_t>(sizeof(T)); at += line)
      __builtin_prefetch(bytes + at, 0, 2);
#endif
  }

  /// Calls f(how many, as a constant, first) for rows [begin, end), some at a time.
  template <class F>
  static void for_rows(index_t begin, index_t end, F&& f) {
    index_t r = begin;
    for (; r + 4 <= end; r += 4) f(std::integral_constant<int, 4>{}, r);
    for (; r + 2 <= end; r += 2) f(std::integral_constant<int, 2>{}, r);
    if (r < end) f(std::integral_constant<int, 1>{}, r);
  }

  /// Scores of rows r ... with the keys of a block. Asks on the way for those of the next.
  template <int Rows, class Keys>
  FOCUS_NOINLINE void score(const Keys& keys, const Keys& next, index_t r) {
    using T = typename Keys::value_type;
    constexpr int sums = sizes::sums, at_once = sums / Rows;
    const index_t count = keys.count;
    const A* const query = queries_ + r * depth_;
    for (index_t j = 0; j < count; j += at_once) {
      const T* key[static_cast<std::size_t>(at_once)];
      for (int k = 0; k < at_once; ++k) key[k] = keys.key((std::min<index_t>)(j + k, count - 1));
      for (index_t k = j; k < (std::min)(j + at_once, next.count); ++k)
        ask_for(next.key(k), head_dim_);

      array_of<vec<A>, sums> sum;
      static_for<sums>([&](auto s) FOCUS_LAMBDA_INLINE { sum[s] = vec<A>::zero(); });
      const auto step = [&](index_t t, auto&& load) FOCUS_LAMBDA_INLINE {
        if constexpr (Rows == 1) {
          const vec<A> q = vec<A>::load(query + t);
          static_for<at_once>(
              [&](auto k) FOCUS_LAMBDA_INLINE { sum[k] = fma(q, load(key[k] + t), sum[k]); });
        } else {
          array_of<vec<A>, at_once> x;
          static_for<at_once>([&](auto k) FOCUS_LAMBDA_INLINE { x[k] = load(key[k] + t); });
          static_for<Rows>([&](auto i) FOCUS_LAMBDA_INLINE {
            const vec<A> q = vec<A>::load(query + i * depth_ + t);
            static_for<at_once>([&](auto k) FOCUS_LAMBDA_INLINE {
              sum[i * at_once + k] = fma(q, x[k], sum[i * at_once + k]);
            });
          });
        }
      };
      index_t t = 0;
      for (; t + lanes <= head_dim_; t += lanes)
        step(t, [](const T* p) FOCUS_LAMBDA_INLINE { return detail::load_cached<A>(p); });
      if (t < head_dim_)
        step(t, [left = head_dim_ - t](const T* p)
                    FOCUS_LAMBDA_INLINE { return detail::load_cached_partial<A>(p, left); });

      A score[static_cast<std::size_t>(sums)];
      static_for<sums / lanes>([&](auto tree) FOCUS_LAMBDA_INLINE {
        array_of<vec<A>, lanes> part;
        static_for<lanes>([&](auto l) FOCUS_LAMBDA_INLINE { part[l] = sum[tree * lanes + l]; });
        detail::sum_each<A>(part).store(score + tree * lanes);
      });
      for (int i = 0; i < Rows; ++i)
        copy(score + i * at_once, score + (i + 1) * at_once, scores_ + (r + i) * stride + j);
    }
  }

  static void cap(A* row, index_t count, A softcap) {
    const vec<A> factor = vec<A>::broadcast(softcap * log2_e<A>);
    for (index_t j = 0; j < count; j += lanes)
      (tanh<A>(vec<A>::load(row + j)) * factor).store(row + j);
  }

  /// Scores into weights 2^(score - top), for a new running maximum.
  void weigh(index_t r, index_t padded) {
    A* const row = scores_ + r * stride;
    const A highest = highest_score(row, padded);
    const A top = highest > top_[r] ? highest : top_[r];
    // Measured from 0, not from itself, nothing seen weighs 2^lowest = 0.
    const A shift = top > lowest<A> ? top : A{0};
    array_of<A, lanes> rescale = {top_[r] - shift};
    exp2<A>(vec<A>::load(rescale)).store(rescale);
    rescale_[r] = rescale[0];
    top_[r] = top;
    sum_[r] = sum_[r] * rescale[0] + detail::exponentiate_row(shift, padded, row);
  }

  /// Of 8-bit numbers: scores times the scales of their keys; those of values for scale_weights.
  template <class Keys>
  void scale_scores(const Keys& keys) {
    A *const key_scale = scales_, *const value_scale = scales_ + stride;
    const index_t padded = round_up(keys.count, lanes);
    for (index_t j = 0; j < padded; ++j) {
      const auto s = keys.format->scales(keys.row((std::min)(j, keys.count - 1)));
      key_scale[j] = s.key;
      value_scale[j] = s.value;
    }
    for (index_t r = 0; r < rows_; ++r)
      for (index_t j = 0; j < padded; j += lanes) {
        A* const s = scores_ + r * stride + j;
        (vec<A>::load(s) * vec<A>::load(key_scale + j)).store(s);
      }
  }
  void scale_weights(index_t padded) {
    for (index_t r = 0; r < rows_; ++r)
      for (index_t j = 0; j < padded; j += lanes) {
        A* const w = scores_ + r * stride + j;
        (vec<A>::load(w) * vec<A>::load(scales_ + stride + j)).store(w);
      }
  }

  /// acc = rescale * acc + weights * values, for rows r ...; where some keys are hidden, by query
  /// `query`'s bits. Asks for rows as score does.
  template <int Rows, bool Some, class Keys>
  FOCUS_NOINLINE void accumulate(const Keys& keys, const Keys& next, const std::uint64_t* seen_by,
                                 int query, index_t r) {
    using T = typename Keys::value_type;
    constexpr int vectors = sizes::value_vectors;
    const auto columns = [&](auto width, index_t c, auto&& load) FOCUS_LAMBDA_INLINE {
      constexpr int v_count = width();
      table_of<vec<A>, Rows, v_count> sum;
      static_for<Rows>([&](auto i) FOCUS_LAMBDA_INLINE {
        const vec<A> factor = vec<A>::broadcast(rescale_[r + i]);
        static_for<v_count>([&](auto v) FOCUS_LAMBDA_INLINE {
          sum[i][v] = vec<A>::load(acc_ + (r + i) * acc_stride_ + c + v * lanes) * factor;
        });
      });
      for (index_t j = 0; j < keys.count; ++j) {
        if (j < next.count) ask_for(next.value(j) + c, v_count * lanes);
        if constexpr (Some)
          if ((seen_by[j] >> query & 1) == 0) continue;
        const T* const value = keys.value(j) + c;
        array_of<vec<A>, v_count> x;
        static_for<v_count>([&](auto v) FOCUS_LAMBDA_INLINE { x[v] = load(value + v * lanes); });
        static_for<Rows>([&](auto i) FOCUS_LAMBDA_INLINE {
          const vec<A> weight = vec<A>::broadcast(scores_[(r + i) * stride + j]);
          static_for<v_count>(
              [&](auto v) FOCUS_LAMBDA_INLINE { sum[i][v] = fma(weight, x[v], sum[i][v]); });
        });
      }
      static_for<Rows>([&](auto i) FOCUS_LAMBDA_INLINE {
        static_for<v_count>([&](auto v) FOCUS_LAMBDA_INLINE {
          sum[i][v].store(acc_ + (r + i) * acc_stride_ + c + v * lanes);
        });
      });
    };
    const auto whole = [](const T* p) FOCUS_LAMBDA_INLINE {
      return detail::load_cached<A>(p);
    };
    index_t c = 0;
    for (; c + vectors * lanes <= value_dim_; c += vectors * lanes)
      columns(std::integral_constant<int, vectors>{}, c, whole);
    for (; c + lanes <= value_dim_; c += lanes) columns(std::integral_constant<int, 1>{}, c, whole);
    if (c < value_dim_)
      columns(std::integral_constant<int, 1>{}, c,
              [left = value_dim_ - c](const T* p)
                  FOCUS_LAMBDA_INLINE { return detail::load_cached_partial<A>(p, left); });
  }

  index_t head_dim_, value_dim_, depth_, acc_stride_;
  index_t rows_ = 0;
  A *queries_, *acc_, *top_, *sum_, *rescale_, *scores_, *scales_;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
