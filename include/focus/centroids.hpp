// Eq. 1: how well each token fits each group, S = (H W_g) C^T.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <span>
#include <string>
#include <type_traits>

#include "focus/centroid_params.hpp"
#include "focus/checks/overlap.hpp"
#include "focus/checks/routing_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {

namespace detail {

/// The type in which products of hidden states and centroids are summed.
template <class H, class T>
using centroid_accumulator = std::common_type_t<accumulator_t<H>, accumulator_t<T>>;

/// to[r] += rows[r] * panel for Rows rows, each row's sum in rising order of t: its bits do not
/// depend on the rows beside it. next: bytes from a row to one that will be used soon; 0: none.
template <int Rows, int Vectors, class A>
FOCUS_NOINLINE void add_rows_times_panel(const array_of<const A*, Rows>& rows, const A* panel,
                                         index_t depth, A* to, index_t to_stride,
                                         [[maybe_unused]] index_t next) {
  constexpr int lanes = vec<A>::width, panel_width = tile_sizes<A>::panel;
  table_of<vec<A>, Rows, Vectors> sum;
  static_for<Rows * Vectors>([&](auto i) FOCUS_LAMBDA_INLINE {
    sum[i / Vectors][i % Vectors] =
        vec<A>::load(to + i / Vectors * to_stride + i % Vectors * lanes);
  });
  array_of<const A*, Rows> row;
  static_for<Rows>([&](auto r) FOCUS_LAMBDA_INLINE { row[r] = rows[r]; });
  const auto add = [&]<int Steps>(index_t t) FOCUS_LAMBDA_INLINE {
    table_of<vec<A>, Steps, Vectors> column;
    static_for<Steps * Vectors>([&](auto i) FOCUS_LAMBDA_INLINE {
      column[i / Vectors][i % Vectors] =
          vec<A>::load(panel + (t + i / Vectors) * panel_width + i % Vectors * lanes);
    });
    static_for<Rows>([&](auto r) FOCUS_LAMBDA_INLINE {
      const A* const elements = row[r] + t;
      static_for<Steps>([&](auto step) FOCUS_LAMBDA_INLINE {
        const vec<A> element = vec<A>::broadcast(elements[step]);
        static_for<Vectors>([&](auto v) FOCUS_LAMBDA_INLINE {
          sum[r][v] = fma(element, column[step][v], sum[r][v]);
        });
      });
    });
  };
  // There are more rows than registers for their addresses: each is loaded once for a few elements,
  // as many as there are registers for columns.
  constexpr int steps = Vectors == 1 ? 4 : 1;
  constexpr index_t line = 64 / static_cast<index_t>(sizeof(A));
  index_t t = 0;
  for (; t + steps <= depth; t += steps) {
#if defined(__GNUC__) || defined(__clang__)
    if (next != 0 && t % line == 0)
      static_for<Rows>([&](auto r) FOCUS_LAMBDA_INLINE {
        __builtin_prefetch(reinterpret_cast<const char*>(row[r] + t) + next, 0, 2);
      });
#endif
    add.template operator()<steps>(t);
  }
  for (; t < depth; ++t) add.template operator()<1>(t);
  static_for<Rows * Vectors>([&](auto i) FOCUS_LAMBDA_INLINE {
    sum[i / Vectors][i % Vectors].store(to + i / Vectors * to_stride + i % Vectors * lanes);
  });
}

/// to[r] += rows[r] * matrix, the matrix packed in panels that lie panel_stride apart. next: as
/// above.
template <int Rows, class A>
void add_rows_times_panels(const array_of<const A*, Rows>& rows, const A* panels,
                           index_t panel_stride, index_t depth, index_t columns, A* to,
                           index_t to_stride, index_t next = 0) {
  constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
  for (index_t c = 0; c < columns; c += panel, panels += panel_stride, next = 0) {
    if (columns - c > lanes)
      add_rows_times_panel<Rows, 2>(rows, panels, depth, to + c, to_stride, next);
    else
      add_rows_times_panel<Rows, 1>(rows, panels, depth, to + c, to_stride, next);
  }
}

/// Widens `count` elements; zeros behind them up to a whole vector.
template <class T, class A>
void widen_row(const T* from, index_t count, A* to) {
  constexpr int lanes = vec<A>::width;
  index_t t = 0;
  for (; t + lanes <= count; t += lanes) detail::load_widened<T, A>(from + t).store(to + t);
  if (t < count) detail::load_widened_partial<T, A>(from + t, count - t).store(to + t);
}

/// The length of a vector as largest * root: the largest magnitude of its elements, and the length
/// of the vector that is left when they are divided by it. Their product may leave the range.
template <class A>
struct vector_length {
  A largest = 0, root = 0;
};

/// Scales x (whole vectors, zeros behind its elements) to length 1 and returns the length that it
/// had; a zero vector stays zero.
template <class A>
vector_length<A> normalize(A* x, index_t padded_count) {
  constexpr int lanes = vec<A>::width;
  const auto divide_by = [&](A divisor) {
    for (index_t c = 0; c < padded_count; c += lanes)
      (vec<A>::load(x + c) / vec<A>::broadcast(divisor)).store(x + c);
  };
  vec<A> highest = vec<A>::zero();
  for (index_t c = 0; c < padded_count; c += lanes) {
    const vec<A> v = vec<A>::load(x + c);
    highest = maximum(highest, maximum(v, vec<A>::zero() - v));
  }
  // By the largest magnitude first: the squares of very large or small elements leave the range.
  const A largest = reduce_max(highest);
  if (largest > 0) divide_by(largest);
  vec<A> squares = vec<A>::zero();
  for (index_t c = 0; c < padded_count; c += lanes) {
    const vec<A> v = vec<A>::load(x + c);
    squares = fma(v, v, squares);
  }
  const A squared_length = reduce_add(squares);
  const A root = std::sqrt(squared_length);
  if (!is_zero(squared_length)) divide_by(root);
  return {largest, root};
}

/// Z = H W_g + bias, strip by strip; W_g is packed into panels once.
template <class A>
class token_projector {
  static constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
  static constexpr int strip_rows = tile_sizes<A>::strip_rows;
  /// Elements of a hidden state between two visits to the sums of its projection. The strip's
  /// elements and the panel's (depth x (strip_rows + panel) x sizeof(A): 22 KiB with AVX2) share
  /// the L1 cache.
  static constexpr index_t depth_block = 1024 / static_cast<int>(sizeof(A));

 public:
  /// Elements of scratch memory that a strip needs, for its widened hidden states.
  static constexpr index_t strip_scratch = strip_rows * depth_block;

  token_projector(scratch_plan& plan, index_t model_dim, index_t group_dim)
      : model_dim_(model_dim), group_dim_(group_dim), stride_(round_up(group_dim, panel)) {
    projection_ = plan.add<A>(model_dim * stride_);
    bias_ = plan.add<A>(stride_);
  }

  /// Elements from one projected token to the next: whole panels.
  [[nodiscard]] index_t stride() const noexcept { return stride_; }

  template <class T>
  void pack(const scratch_memory& memory, const centroid_params<T>& params) const {
    A* const projection = memory[projection_];
    for (index_t t = 0; t < model_dim_; ++t)
      for (index_t c = 0; c < stride_; c += lanes) {
        const T* from = params.projection.row(t) + c;
        const index_t count = group_dim_ - c;
        const vec<A> x = count > 0 ? detail::load_widened_up_to<T, A>(from, count) : vec<A>::zero();
        x.store(projection + (c / panel * model_dim_ + t) * panel + c % panel);
      }
    A* const bias = memory[bias_];
    fill(bias, bias + stride_, A{0});
    if (!params.bias.empty()) widen_row(params.bias.data(), group_dim_, bias);
  }

  /// projected[r] = z of token first + r, for a strip of `count` tokens that is filled up to Rows
  /// with its last one. Elements behind d_group mean nothing.
  template <int Rows, class H>
  void project(const scratch_memory& memory, const matrix_view<const H>& hidden, index_t first,
               index_t count, A* projected, A* scratch) const {
    array_of<const H*, Rows> token;
    for (int r = 0; r < Rows; ++r) {
      token[r] = hidden.row(first + (std::min<index_t>)(r, count - 1));
      const A* bias = memory[bias_];
      copy(bias, bias + stride_, projected + r * stride_);
    }
    // The next strip's rows, where they are read from where they lie.
    const bool another =
        std::same_as<H, A> && count == Rows && first + 2 * Rows <= hidden.extent(0);
    const index_t next =
        another ? Rows * hidden.stride(0) * static_cast<index_t>(sizeof(A)) : index_t{0};
    array_of<const A*, Rows> operand;
    for (index_t t = 0; t < model_dim_; t += depth_block) {
      const index_t depth = (std::min)(depth_block, model_dim_ - t);
      for (int r = 0; r < Rows; ++r) {
        if constexpr (std::same_as<H, A>) {
          operand[r] = token[r] + t;
        } else {
          widen_row(token[r] + t, depth, scratch + r * depth_block);
          operand[r] = scratch + r * depth_block;
        }
      }
      add_rows_times_panels<Rows>(operand, memory[projection_] + t * panel, model_dim_ * panel,
                                  depth, group_dim_, projected, stride_, next);
    }
  }

  /// The same scaled to length 1, with zeros behind d_group; length[r] is what it was.
  template <int Rows, class H>
  void project_directions(const scratch_memory& memory, const matrix_view<const H>& hidden,
                          index_t first, index_t count, A* projected, A* scratch,
                          array_of<vector_length<A>, Rows>& length) const {
    project<Rows>(memory, hidden, first, count, projected, scratch);
    for (int r = 0; r < Rows; ++r) {
      A* const row = projected + r * stride_;
      fill(row + group_dim_, row + stride_, A{0});  // may be inf * 0 by now
      length[r] = normalize(row, stride_);
    }
  }

 private:
  index_t model_dim_, group_dim_;
  index_t stride_;
  scratch_array<A> projection_;  // [d_group / panel][d_model][panel]
  scratch_array<A> bias_;        // [stride]
};

/// The centroids as rows of whole panels with zeros behind them, for cosines scaled to length 1;
/// length[g] is then what it was.
template <class T, class A>
void widen_centroids(const centroid_params<T>& params, index_t stride, A* rows,
                     vector_length<A>* length = nullptr) {
  for (index_t g = 0; g < params.centroids.extent(0); ++g) {
    A* const row = rows + g * stride;
    fill(row, row + stride, A{0});
    widen_row(params.centroids.row(g), params.centroids.extent(1), row);
    if (params.metric != similarity::cosine) continue;
    const vector_length<A> was = normalize(row, stride);
    if (length != nullptr) length[g] = was;
  }
}

/// Eq. 1 strip by strip: W_g and C are packed into panels once, then each strip of tokens is
/// projected and scored while its sums are in registers and L1.
template <class A>
class centroid_scorer {
  static constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
  static constexpr int strip_rows = tile_sizes<A>::strip_rows;

 public:
  /// Tokens in a task.
  static constexpr index_t task_rows = tile_sizes<A>::tile_rows;

  centroid_scorer(scratch_plan& plan, index_t workers, index_t model_dim, index_t group_dim,
                  index_t groups, similarity metric)
      : projector_(plan, model_dim, group_dim),
        group_dim_(group_dim),
        groups_(groups),
        metric_(metric),
        scores_stride_(round_up(groups, panel)) {
    centroid_rows_ = plan.add<A>(groups * projector_.stride());
    centroids_ = plan.add<A>(group_dim * scores_stride_ + lanes);
    scratch_plan strip;
    projected_ = strip.add<A>(strip_rows * projector_.stride());
    scores_ = strip.add<A>(strip_rows * scores_stride_);
    projector_scratch_ = strip.add<A>(projector_.strip_scratch);
    strips_ = plan.add_each(workers, strip);
  }

  template <class T>
  void pack(const scratch_memory& memory, const centroid_params<T>& params) const {
    projector_.pack(memory, params);
    A* const rows = memory[centroid_rows_];
    widen_centroids(params, projector_.stride(), rows);
    for (index_t g = 0; g < groups_; g += panel)
      pack_rows_as_columns<panel>(
          [&](int c) -> const A* {
            return g + c < groups_ ? rows + (g + c) * projector_.stride() : nullptr;
          },
          group_dim_, memory[centroids_] + g * group_dim_);
  }

  /// Calls take(token, scores) with the scores of each token, as whole vectors whose lanes from K
  /// on mean nothing.
  template <class H, class Take>
  void score(const scratch_memory& memory, const matrix_view<const H>& hidden,
             const any_executor& exec, Take&& take) const {
    const index_t n = hidden.extent(0);
    exec.parallel_for(ceil_div(n, task_rows), [&](index_t task, index_t worker) {
      const index_t end = (std::min)((task + 1) * task_rows, n);
      for (index_t first = task * task_rows; first < end; first += strip_rows)
        with_strip_rows<A>(end - first, [&](auto rows) {
          score_strip<rows()>(memory, hidden, first, (std::min<index_t>)(rows(), end - first),
                              worker, take);
        });
    });
  }

 private:
  /// A strip of `count` tokens, filled up to Rows with its last one.
  template <int Rows, class H, class Take>
  void score_strip(const scratch_memory& memory, const matrix_view<const H>& hidden, index_t first,
                   index_t count, index_t worker, Take&& take) const {
    const scratch_block own = strips_.of(memory, worker);
    A* const projected = own[projected_];
    A* const scores = own[scores_];
    A* const scratch = own[projector_scratch_];
    if (metric_ == similarity::cosine) {
      array_of<vector_length<A>, Rows> length;
      projector_.template project_directions<Rows>(memory, hidden, first, count, projected, scratch,
                                                   length);
    } else {
      projector_.template project<Rows>(memory, hidden, first, count, projected, scratch);
    }
    array_of<const A*, Rows> operand;
    for (int r = 0; r < Rows; ++r) operand[r] = projected + r * projector_.stride();
    fill(scores, scores + Rows * scores_stride_, A{0});
    add_rows_times_panels<Rows>(operand, memory[centroids_], group_dim_ * panel, group_dim_,
                                groups_, scores, scores_stride_);
    for (index_t r = 0; r < count; ++r) take(first + r, scores + r * scores_stride_);
  }

  token_projector<A> projector_;
  index_t group_dim_, groups_;
  similarity metric_;
  index_t scores_stride_;           // whole panels
  scratch_array<A> centroid_rows_;  // [K][projector_.stride()]
  scratch_array<A> centroids_;      // [K / panel][d_group][panel]
  // Each worker has these, for the strip that it is at.
  worker_scratch strips_;
  scratch_array<A> projected_;  // [strip_rows][projector_.stride()]
  scratch_array<A> scores_;     // [strip_rows][scores_stride]
  scratch_array<A> projector_scratch_;
};

/// Centroid scores after their checks.
template <class H, class T, class TScore>
void run_centroid_scores(const matrix_view<const H>& hidden, const centroid_params<T>& params,
                         const matrix_view<TScore>& scores, const any_executor& exec) {
  using A = centroid_accumulator<H, T>;
  const index_t groups = scores.extent(1);
  scratch_plan plan;
  const centroid_scorer<A> scorer(plan, exec.concurrency(), hidden.extent(1),
                                  params.projection.extent(1), groups, params.metric);
  const scratch_memory memory(exec, plan);
  scorer.pack(memory, params);
  scorer.score(memory, hidden, exec, [&](index_t token, const A* row) {
    for (index_t g = 0; g < groups; ++g)
      scores(token, g) = detail::narrow<TScore>(static_cast<accumulator_t<TScore>>(row[g]));
  });
}

}  // namespace detail

/// Centroid scores (Eq. 1 of arXiv 2604.03260):
///
///   S = Z C^T,   Z = H W_g + bias
///
/// or, with similarity::cosine, the same with the rows of Z and C scaled to length 1, where a zero
/// vector gives scores of 0. The scores of a token depend on that token alone: the same bits in a
/// batch of any size, for any number of threads.
///
/// @param hidden  H [n, d_model], any storage type
/// @param params  W_g [d_model, d_group], C [K, d_group], bias, metric
/// @param scores  S [n, K]. May not overlap another argument
/// @param exec    where the loops run
/// @throws invalid_argument before anything is written
///
/// Sums are in float, or in double where hidden or params are double.
template <tensor_like<2> Hidden, scalar T, mutable_tensor_like<2> Scores,
          class Exec = serial_executor>
requires executor<std::remove_reference_t<Exec>>
void centroid_scores(const Hidden& hidden, const centroid_params<T>& params, Scores&& scores,
                     Exec&& exec = {}) {
  constexpr const char* name = "centroid_scores";
  const auto h = detail::as_const_view(hidden);
  const auto s = detail::as_view(scores);
  detail::check_centroid_arguments(name, h, params);
  const index_t n = h.extent(0), groups = params.centroids.extent(0);
  detail::require_shape(s, {n, groups}, name, "scores");
  detail::require_data(s, name, "scores");
  detail::require_distinct_elements(s, "scores", name);
  detail::require_disjoint_from_centroids(s, "scores", h, params, name);
  if (n > 0) detail::run_centroid_scores(h, params, s, detail::any_executor(exec));
}

}  // namespace FOCUS_ABI
}  // namespace focus
