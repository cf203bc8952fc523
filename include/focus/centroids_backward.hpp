// The gradients of Eq. 1: of the hidden states and of all that Focus trains.
#pragma once

#include <algorithm>
#include <concepts>
#include <span>
#include <type_traits>

#include "focus/centroid_params.hpp"
#include "focus/centroids.hpp"
#include "focus/checks/routing_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/kernel/widened_operand.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// One vector for each token, as value panels: [ceil(width / panel)][slots][panel].
template <class A>
struct token_panels {
  static constexpr int panel = tile_sizes<A>::panel;

  A* data = nullptr;
  index_t slot_count = 0, width = 0;

  [[nodiscard]] A* at(index_t p, index_t slot) const noexcept {
    return data + (p * slot_count + slot) * panel;
  }
  /// Elements of scratch memory; none where they are not wanted.
  [[nodiscard]] static index_t size(bool wanted, index_t slot_count, index_t width) noexcept {
    return wanted ? slot_count * round_up(width, panel) : 0;
  }
  /// Takes a vector in, as whole panels.
  void put(index_t slot, const A* from) const noexcept {
    for (index_t p = 0; p * panel < width; ++p)
      copy(from + p * panel, from + (p + 1) * panel, at(p, slot));
  }
};

/// to[r] += sum over t of x[t][r] * panel[t], x with rows of XStride elements: the sums of a block
/// of tokens start from 0, and are added to those of the blocks before.
template <int Rows, int Vectors, int XStride, class A>
FOCUS_NOINLINE void add_transposed_product(const A* x, const A* panel, index_t depth, A* to,
                                           index_t to_stride) {
  constexpr int lanes = vec<A>::width;
  table_of<vec<A>, Rows, Vectors> sum;
  static_for<Rows * Vectors>(
      [&](auto i) FOCUS_LAMBDA_INLINE { sum[i / Vectors][i % Vectors] = vec<A>::zero(); });
  multiply<Rows, Vectors, 1, XStride>(x, panel, depth, sum);
  static_for<Rows * Vectors>([&](auto i) FOCUS_LAMBDA_INLINE {
    A* const place = to + i / Vectors * to_stride + i % Vectors * lanes;
    (vec<A>::load(place) + sum[i / Vectors][i % Vectors]).store(place);
  });
}

/// X^T Y, the sum over the tokens that makes the gradients of all parameters: X [n, columns] of any
/// storage type, Y [n, width] in panels. Tokens are cut into segments and the segments into blocks,
/// whatever the number of threads; each is summed in order.
template <class A>
class token_product {
  static constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
  static constexpr int strip_rows = tile_sizes<A>::strip_rows;
  /// Columns of X in a task, whole strips and vectors: so many that X is read in long runs, which
  /// counts for more than that a block (block_tokens x task_columns x sizeof(A): 192 KiB) stays in
  /// L2 only. A strip of it and a block of Y (64 bytes and more a token, 4 KiB) share the L1 cache.
  static constexpr int task_columns = 768 / (strip_rows * lanes) * (strip_rows * lanes);
  static constexpr int block_tokens = 256 / static_cast<int>(sizeof(A));
  /// One cache line more keeps the rows of a block in different cache sets.
  static constexpr int block_stride = task_columns + 64 / static_cast<int>(sizeof(A));
  /// Tokens in a task: so many that the segments' sums, width numbers for each column, are little
  /// beside X.
  static constexpr index_t segment_tokens = 512;
  /// Columns whose segments are added up by one task.
  static constexpr index_t merged_columns = 64;

 public:
  /// columns: of the widest X.
  token_product(scratch_plan& plan, index_t workers, index_t n, index_t columns, index_t width)
      : n_(n),
        segments_((std::max<index_t>)(ceil_div(n, segment_tokens), 1)),
        width_(width),
        stride_(round_up(width, panel)) {
    scratch_plan one;
    block_ = one.add<A>(block_tokens * block_stride);
    blocks_ = plan.add_each(workers, one);
    sums_ = plan.add<A>(segments_ * round_up(columns, strip_rows) * stride_);
  }

  /// Calls take(c, row) with row c of X^T Y, as whole vectors whose lanes from `width` on mean
  /// nothing.
  template <class T, class Take>
  void run(const scratch_memory& memory, const matrix_view<const T>& x, const token_panels<A>& y,
           const any_executor& exec, Take&& take) const {
    const index_t columns = x.extent(1);
    const index_t column_tasks = ceil_div(columns, task_columns);
    A* const all_sums = memory[sums_];
    const index_t segment_stride = round_up(columns, strip_rows) * stride_;
    exec.parallel_for(segments_ * column_tasks, [&](index_t task, index_t worker) {
      const index_t segment = task / column_tasks, first = task % column_tasks * task_columns;
      const index_t count = (std::min<index_t>)(task_columns, columns - first);
      A* const sums = all_sums + segment * segment_stride + first * stride_;
      fill(sums, sums + round_up(count, strip_rows) * stride_, A{0});
      A* const block = blocks_.of(memory, worker)[block_];
      const index_t end = (std::min)((segment + 1) * segment_tokens, n_);
      for (index_t i = segment * segment_tokens; i < end; i += block_tokens)
        add_block(x, y, i, (std::min<index_t>)(block_tokens, end - i), first, count, block, sums);
    });
    exec.parallel_for(ceil_div(columns, merged_columns), [&](index_t task, index_t) {
      const index_t end = (std::min)((task + 1) * merged_columns, columns);
      for (index_t c = task * merged_columns; c < end; ++c) {
        A* const row = all_sums + c * stride_;
        for (index_t segment = 1; segment < segments_; ++segment)
          for (index_t v = 0; v < stride_; v += lanes)
            (vec<A>::load(row + v) + vec<A>::load(row + segment * segment_stride + v))
                .store(row + v);
        take(c, row);
      }
    });
  }

 private:
  /// Adds what tokens [i, i + tokens) give to the sums of columns [first, first + columns).
  template <class T>
  void add_block(const matrix_view<const T>& x, const token_panels<A>& y, index_t i, index_t tokens,
                 index_t first, index_t columns, A* block, A* sums) const {
    // Copied even where its type is A: rows of X are often a power of two apart, and then share few
    // cache sets.
    const index_t strips_end = round_up(columns, strip_rows);
    for (index_t t = 0; t < tokens; ++t) {
      A* const to = block + t * block_stride;
      widen_row(x.row(i + t) + first, columns, to);
      fill(to + columns, to + strips_end, A{0});
    }
    for (index_t c = 0; c < columns; c += strip_rows)
      for (index_t p = 0; p * panel < width_; ++p) {
        A* const to = sums + c * stride_ + p * panel;
        if (width_ - p * panel > lanes)
          add_transposed_product<strip_rows, 2, block_stride>(block + c, y.at(p, i), tokens, to,
                                                              stride_);
        else
          add_transposed_product<strip_rows, 1, block_stride>(block + c, y.at(p, i), tokens, to,
                                                              stride_);
      }
  }

  index_t n_, segments_, width_, stride_;
  worker_scratch blocks_;
  scratch_array<A> block_;  // of a worker: [block_tokens][block_stride]
  scratch_array<A> sums_;   // [segments][columns in whole strips][stride]
};

/// Through x -> x / |x| at a vector that was `length` long, with the unit vector at hand: turns the
/// gradient of the unit vector u into that of x, (d - u (u . d)) / |x|. A zero vector stays zero
/// whatever its neighbours are: its gradient is 0.
template <class A>
void normalize_backward(const A* unit, const vector_length<A>& length, index_t padded_count,
                        A* gradient) {
  constexpr int lanes = vec<A>::width;
  if (is_zero(length.root)) return fill(gradient, gradient + padded_count, A{0});
  vec<A> products = vec<A>::zero();
  for (index_t c = 0; c < padded_count; c += lanes)
    products = fma(vec<A>::load(unit + c), vec<A>::load(gradient + c), products);
  const vec<A> along = vec<A>::broadcast(reduce_add(products));
  const vec<A> root = vec<A>::broadcast(length.root), largest = vec<A>::broadcast(length.largest);
  for (index_t c = 0; c < padded_count; c += lanes) {
    const vec<A> across = vec<A>::load(gradient + c) - vec<A>::load(unit + c) * along;
    (across / root / largest).store(gradient + c);
  }
}

/// to[r][column ...] = z_r W^T for one panel of W^T. z: [d_group / panel][strip_rows][panel].
template <int Rows, int Vectors, class A, class T>
FOCUS_NOINLINE void store_product(const A* z, const A* w, index_t depth, const matrix_view<T>& to,
                                  index_t first, index_t count, index_t column) {
  constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
  table_of<vec<A>, Rows, Vectors> sum;
  static_for<Rows * Vectors>(
      [&](auto i) FOCUS_LAMBDA_INLINE { sum[i / Vectors][i % Vectors] = vec<A>::zero(); });
  for (index_t t = 0; t < depth; t += panel)
    multiply<Rows, Vectors, panel, 1>(z + t * tile_sizes<A>::strip_rows, w + t * panel,
                                      (std::min<index_t>)(panel, depth - t), sum);
  const index_t columns = to.extent(1) - column;
  static_for<Rows>([&](auto r) FOCUS_LAMBDA_INLINE {
    if (r >= count) return;
    T* const row = to.row(first + r) + column;
    static_for<Vectors>([&](auto v) FOCUS_LAMBDA_INLINE {
      detail::store_narrowed<T, A>(sum[r][v], row + v * lanes,
                                   (std::min<index_t>)(lanes, columns - v * lanes));
    });
  });
}

/// Eq. 1 backwards. With Z = H W_g + bias and the gradient dS of S = Z C^T,
///   dZ = dS C,   dC = dS^T Z,   dH = dZ W_g^T,   dW_g = H^T dZ,   dbias = 1^T dZ,
/// and for cosines the same with unit vectors in place of Z and C, through whose lengths dZ and dC
/// then go. Z is made again, strip by strip; dZ (and Z for dC) is kept, O(n d_group).
template <class A>
class centroid_gradient {
  static constexpr int lanes = vec<A>::width, panel = tile_sizes<A>::panel;
  static constexpr int strip_rows = tile_sizes<A>::strip_rows;
  static constexpr index_t task_rows = tile_sizes<A>::tile_rows;

 public:
  template <class T, class Views>
  centroid_gradient(scratch_plan& plan, index_t workers, index_t n,
                    const centroid_params<T>& params, const Views& wanted)
      : n_(n),
        model_dim_(params.projection.extent(0)),
        group_dim_(params.projection.extent(1)),
        groups_(params.centroids.extent(0)),
        cosine_(params.metric == similarity::cosine),
        wants_hidden_(wanted.wants(wanted.hidden)),
        wants_projected_(wanted.wants_projected()),
        wants_centroids_(wanted.wants(wanted.centroids)),
        projector_(plan, needs_tokens() ? model_dim_ : 0, group_dim_),
        product_(plan, workers, n,
                 (std::max)(wanted.wants(wanted.projection) ? model_dim_ : index_t{1},
                            wants_centroids_ ? groups_ : index_t{1}),
                 group_dim_) {
    centroid_rows_ = plan.add<A>(groups_ * stride());
    centroid_panels_ = plan.add<A>(groups_ * stride());
    projection_ = plan.add<A>(wants_hidden_ ? round_up(model_dim_, panel) * group_dim_ + lanes : 0);
    tokens_ = plan.add<A>(token_panels<A>::size(wants_centroids_, n, group_dim_));
    dprojected_ = plan.add<A>(token_panels<A>::size(wants_projected_, n, group_dim_));
    scratch_plan strip;
    z_ = strip.add<A>(strip_rows * stride());
    dz_ = strip.add<A>(strip_rows * stride());
    dz_panels_ = strip.add<A>(strip_rows * stride());
    ds_ = strip.add<A>(strip_rows * groups_stride());
    projector_scratch_ = strip.add<A>(projector_.strip_scratch);
    strips_ = plan.add_each(workers, strip);
  }

  template <class H, class T, class DS, class Views>
  void run(const scratch_memory& memory, const matrix_view<const H>& hidden,
           const centroid_params<T>& params, const matrix_view<const DS>& dscores, const Views& to,
           const any_executor& exec) {
    pack(memory, params);
    const token_panels<A> tokens{memory[tokens_], n_, group_dim_};
    const token_panels<A> dprojected{memory[dprojected_], n_, group_dim_};
    exec.parallel_for(ceil_div(n_, task_rows), [&](index_t task, index_t worker) {
      const index_t end = (std::min)((task + 1) * task_rows, n_);
      for (index_t first = task * task_rows; first < end; first += strip_rows)
        with_strip_rows<A>(end - first, [&](auto rows) {
          pass_strip<rows()>(memory, hidden, dscores, first,
                             (std::min<index_t>)(rows(), end - first), worker, tokens, dprojected,
                             to.hidden);
        });
    });

    if (to.wants(to.projection))
      product_.run(memory, hidden, dprojected, exec, [&](index_t m, const A* row) {
        narrow_row(row, group_dim_, to.projection.row(m));
      });
    if (!to.bias.empty()) {
      array_of<A, lanes>
          one;  // a whole vector, though one element of it is read: compilers warn otherwise
      fill(one, one + lanes, A{1});
      const matrix_view<const A> ones(one, {n_, 1}, {0, 1});
      product_.run(memory, ones, dprojected, exec,
                   [&](index_t, const A* row) { narrow_row(row, group_dim_, to.bias.data()); });
    }
    if (to.wants(to.centroids))
      product_.run(memory, dscores, tokens, exec, [&](index_t g, A* row) {
        if (cosine_) {
          fill(row + group_dim_, row + stride(), A{0});
          normalize_backward(memory[centroid_rows_] + g * stride(), length_[g], stride(), row);
        }
        narrow_row(row, group_dim_, to.centroids.row(g));
      });
  }

 private:
  /// Elements of a projected token: whole panels.
  [[nodiscard]] index_t stride() const noexcept { return round_up(group_dim_, panel); }
  /// Elements of a token's widened dscores.
  [[nodiscard]] index_t groups_stride() const noexcept { return round_up(groups_, lanes); }
  /// Whether Z has to be made again.
  [[nodiscard]] bool needs_tokens() const noexcept { return cosine_ || wants_centroids_; }

  template <class T>
  static void narrow_row(const A* from, index_t count, T* to) {
    for (index_t c = 0; c < count; c += lanes)
      detail::store_narrowed<T, A>(vec<A>::load(from + c), to + c,
                                   (std::min<index_t>)(lanes, count - c));
  }

  template <class T>
  void pack(const scratch_memory& memory, const centroid_params<T>& params) {
    if (needs_tokens()) projector_.pack(memory, params);
    A* const rows = memory[centroid_rows_];
    widen_centroids(params, stride(), rows, length_);
    const token_panels<A> panels{memory[centroid_panels_], groups_, group_dim_};
    for (index_t g = 0; g < groups_; ++g) panels.put(g, rows + g * stride());
    for (index_t m = 0; wants_hidden_ && m < model_dim_; m += panel)
      pack_rows_as_columns<panel>(
          [&](int c) -> const T* {
            return m + c < model_dim_ ? params.projection.row(m + c) : nullptr;
          },
          group_dim_, memory[projection_] + m * group_dim_);
  }

  /// A strip of `count` tokens, filled up to Rows with its last one.
  template <int Rows, class H, class DS, class TH>
  void pass_strip(const scratch_memory& memory, const matrix_view<const H>& hidden,
                  const matrix_view<const DS>& dscores, index_t first, index_t count,
                  index_t worker, const token_panels<A>& tokens, const token_panels<A>& dprojected,
                  const matrix_view<TH>& dhidden) const {
    const scratch_block own = strips_.of(memory, worker);
    A* const z = own[z_];
    A* const dz = own[dz_];
    A* const dz_panels = own[dz_panels_];
    A* const ds = own[ds_];
    A* const scratch = own[projector_scratch_];

    array_of<vector_length<A>, Rows> length;
    if (cosine_)
      projector_.template project_directions<Rows>(memory, hidden, first, count, z, scratch,
                                                   length);
    else if (wants_centroids_)
      projector_.template project<Rows>(memory, hidden, first, count, z, scratch);
    for (index_t r = 0; wants_centroids_ && r < count; ++r) tokens.put(first + r, z + r * stride());
    if (!wants_projected_) return;

    array_of<const A*, Rows> operand;
    for (int r = 0; r < Rows; ++r) {
      operand[r] = ds + r * groups_stride();
      widen_row(dscores.row(first + (std::min<index_t>)(r, count - 1)), groups_,
                ds + r * groups_stride());
    }
    fill(dz, dz + Rows * stride(), A{0});
    add_rows_times_panels<Rows>(operand, memory[centroid_panels_], groups_ * panel, groups_,
                                group_dim_, dz, stride());
    const token_panels<A> strip{dz_panels, strip_rows, group_dim_};
    for (int r = 0; r < Rows; ++r) {
      A* const row = dz + r * stride();
      if (cosine_) {
        fill(row + group_dim_, row + stride(), A{0});  // may be inf * 0 by now
        normalize_backward(z + r * stride(), length[r], stride(), row);
      }
      strip.put(r, row);
      if (r < count) dprojected.put(first + r, row);
    }
    if (!wants_hidden_) return;
    const A* w = memory[projection_];
    for (index_t m = 0; m < model_dim_; m += panel, w += group_dim_ * panel) {
      if (model_dim_ - m > lanes)
        store_product<Rows, 2>(dz_panels, w, group_dim_, dhidden, first, count, m);
      else
        store_product<Rows, 1>(dz_panels, w, group_dim_, dhidden, first, count, m);
    }
  }

  index_t n_, model_dim_, group_dim_, groups_;
  bool cosine_, wants_hidden_, wants_projected_, wants_centroids_;
  token_projector<A> projector_;
  token_product<A> product_;
  vector_length<A> length_[max_groups];  // of the centroids
  scratch_array<A> centroid_rows_;       // [K][stride()]
  scratch_array<A> centroid_panels_;     // [d_group / panel][K][panel]
  scratch_array<A> projection_;          // W^T: [d_model / panel][d_group][panel]
  scratch_array<A> tokens_;              // Z in panels
  scratch_array<A> dprojected_;          // dZ in panels
  // Each worker has these, for the strip that it is at.
  worker_scratch strips_;
  scratch_array<A> z_, dz_, dz_panels_;  // [strip_rows][stride()]
  scratch_array<A> ds_;                  // widened dscores: [strip_rows][groups_stride()]
  scratch_array<A> projector_scratch_;
};

/// The gradients after their checks.
template <class A, class H, class T, class DS, class Views>
void run_centroid_gradient(const matrix_view<const H>& hidden, const centroid_params<T>& params,
                           const matrix_view<const DS>& dscores, const Views& to,
                           const any_executor& exec) {
  scratch_plan plan;
  centroid_gradient<A> gradient(plan, exec.concurrency(), hidden.extent(0), params, to);
  const scratch_memory memory(exec, plan);
  gradient.run(memory, hidden, params, dscores, to, exec);
}

}  // namespace detail

/// The gradients of centroid_scores, from that of the scores.
///
///   dZ = dS C,   dH = dZ W_g^T,   dW_g = H^T dZ,   dbias = sum_i dZ_i,   dC = dS^T Z
///
/// with Z = H W_g + bias; with similarity::cosine through the lengths of Z's and C's rows too,
/// where a zero vector, whose scores are 0, has a gradient of 0. dhidden of a token depends on that
/// token alone: the same bits in a batch of any size, and a NaN in another token does not reach it.
///
/// @param hidden       H [n, d_model], as centroid_scores had it, any storage type
/// @param params       W_g [d_model, d_group], C [K, d_group], bias, metric
/// @param dscores      dS [n, K], any storage type
/// @param dhidden      [n, d_model] or {}, any storage type
/// @param dprojection  [d_model, d_group] or {}, any storage type; float is better than a 16-bit
///                     type where gradients are then added up
/// @param dbias        [d_group] or {}, contiguous, any storage type; where there is no bias, that
///                     of a bias of zeros
/// @param dcentroids   [K, d_group] or {}, any storage type
/// @param exec         where the loops run
/// @throws invalid_argument before anything is written
///
/// No output may overlap another argument. They are overwritten, not added to; the parameters' are
/// zeros where n is 0. Sums are in float, or in double where hidden, params or dscores are double.
/// Memory: copies of W_g, and O(n d_group).
template <tensor_like<2> Hidden, scalar T, tensor_like<2> DScores,
          mutable_tensor_like<2> DHidden = matrix_view<float>,
          mutable_tensor_like<2> DProjection = matrix_view<float>, class DBias = std::span<float>,
          mutable_tensor_like<2> DCentroids = matrix_view<float>, class Exec = serial_executor>
requires scalar<detail::span_element_of<DBias>> &&
    mutable_span_like<DBias, detail::span_element_of<DBias>> &&
    executor<std::remove_reference_t<Exec>>
void centroid_scores_backward(const Hidden& hidden, const centroid_params<T>& params,
                              const DScores& dscores, DHidden&& dhidden, DProjection&& dprojection,
                              DBias&& dbias, DCentroids&& dcentroids, Exec&& exec = {}) {
  constexpr const char* name = "centroid_scores_backward";
  const auto h = detail::as_const_view(hidden);
  const auto ds = detail::as_const_view(dscores);
  const auto to = detail::view_centroid_gradients(dhidden, dprojection, dbias, dcentroids);
  detail::check_centroid_gradient_arguments(name, h, params, ds, to);
  if (!to.wants_any()) return;

  using A = std::common_type_t<detail::centroid_accumulator<detail::element_of<Hidden>, T>,
                               accumulator_t<detail::element_of<DScores>>>;
  detail::run_centroid_gradient<A>(h, params, ds, to, detail::any_executor(exec));
}

}  // namespace FOCUS_ABI
}  // namespace focus
