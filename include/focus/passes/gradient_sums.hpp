// Sums of the gradients of keys and of assignments, in the same order for any number of threads.
#pragma once

#include <algorithm>

#include "focus/checks/attention_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/gradient_tile.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/parallel.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// The sums that a batch of kv heads keeps in scratch memory, each row padded to whole panels.
///
/// Tasks are (kv head, segment): segment s takes tiles s, s + segments, ... of all query heads of
/// its kv head, one after the other, and adds to key gradients of its own; these are then added up
/// in order. The number of segments depends on the work alone, so the sums do not depend on
/// threads.
template <class A>
class gradient_sums {
  static constexpr int panel = tile_sizes<A>::panel;

 public:
  gradient_sums(scratch_plan& plan, const attention_shape& s, index_t batch, index_t segments,
                index_t groups, const wanted_gradients& wanted, bool keeps_dq)
      : n_q_(s.n_q), n_k_(s.n_k), segments_(segments) {
    dq_stride_ = keeps_dq ? round_up(s.head_dim, panel) : 0;
    dk_stride_ = wanted.dk ? round_up(s.head_dim, panel) : 0;
    dv_stride_ = wanted.dv ? round_up(s.value_dim, panel) : 0;
    dquery_gates_stride_ = wanted.dquery_gates ? round_up(groups, panel) : 0;
    dkey_gates_stride_ = wanted.dkey_gates ? round_up(groups, panel) : 0;
    const index_t parts = batch * segments;
    dq_ = plan.add<A>(batch * s.queries_per_kv_head() * n_q_ * dq_stride_);
    dk_ = plan.add<A>(parts * n_k_ * dk_stride_);
    dv_ = plan.add<A>(parts * n_k_ * dv_stride_);
    dkey_gates_ = plan.add<A>(parts * n_k_ * dkey_gates_stride_);
    dquery_gates_ = plan.add<A>(batch * n_q_ * dquery_gates_stride_);
    all_dquery_gates_ = plan.add<A>(n_q_ * dquery_gates_stride_);
    all_dkey_gates_ = plan.add<A>(n_k_ * dkey_gates_stride_);
  }

  /// Where segment `segment` of a kv head of the batch adds the gradients of its keys.
  [[nodiscard]] key_gradients<A> keys_of(const scratch_memory& memory, index_t kv_head,
                                         index_t segment, A* unused_row) const noexcept {
    const index_t part = kv_head * segments_ + segment;
    return {memory[dk_] + part * n_k_ * dk_stride_,
            memory[dv_] + part * n_k_ * dv_stride_,
            memory[dkey_gates_] + part * n_k_ * dkey_gates_stride_,
            dk_stride_,
            dv_stride_,
            dkey_gates_stride_,
            unused_row};
  }
  /// The dQ of a row between passes and rounds.
  [[nodiscard]] A* dq(const scratch_memory& memory, index_t head, index_t row) const noexcept {
    return memory[dq_] + (head * n_q_ + row) * dq_stride_;
  }
  [[nodiscard]] A* dquery_gates(const scratch_memory& memory, index_t kv_head,
                                index_t row) const noexcept {
    return memory[dquery_gates_] + (kv_head * n_q_ + row) * dquery_gates_stride_;
  }
  /// Sums over all kv heads.
  [[nodiscard]] A* all_dquery_gates(const scratch_memory& memory, index_t row) const noexcept {
    return memory[all_dquery_gates_] + row * dquery_gates_stride_;
  }
  [[nodiscard]] A* all_dkey_gates(const scratch_memory& memory, index_t key) const noexcept {
    return memory[all_dkey_gates_] + key * dkey_gates_stride_;
  }

  void clear_totals(const scratch_memory& memory) const noexcept {
    fill(all_dquery_gates(memory, 0), all_dquery_gates(memory, n_q_), A{0});
    fill(all_dkey_gates(memory, 0), all_dkey_gates(memory, n_k_), A{0});
  }
  void clear(const scratch_memory& memory, index_t kv_heads, const any_executor& exec) const {
    exec.parallel_for(kv_heads * segments_, [&](index_t part, index_t) {
      const key_gradients<A> g = keys_of(memory, part / segments_, part % segments_, nullptr);
      fill(g.dk, g.dk + n_k_ * dk_stride_, A{0});
      fill(g.dv, g.dv + n_k_ * dv_stride_, A{0});
      fill(g.dgates, g.dgates + n_k_ * dkey_gates_stride_, A{0});
      if (part % segments_ == 0)
        fill(dquery_gates(memory, part / segments_, 0),
             dquery_gates(memory, part / segments_, n_q_), A{0});
    });
  }

  /// Adds up the segments; writes dk = scale * sum and dv where they are wanted.
  template <class Arguments>
  void write_key_gradients(const scratch_memory& memory, const Arguments& args, A scale,
                           const any_executor& exec) const {
    if (dk_stride_ == 0 && dv_stride_ == 0) return;
    for_each_row_chunk(args.shape.kv_heads, n_k_, exec, [&](index_t kv_head, index_t j) {
      const key_gradients<A> first = keys_of(memory, kv_head, 0, nullptr);
      if (dk_stride_ > 0)
        write_sum(first.dk + j * dk_stride_, dk_stride_, scale, args.dk.row(kv_head, j),
                  args.shape.head_dim);
      if (dv_stride_ > 0)
        write_sum(first.dv + j * dv_stride_, dv_stride_, A{1}, args.dv.row(kv_head, j),
                  args.shape.value_dim);
    });
  }

  /// Adds the assignments' gradients of a batch of kv heads to the totals, in the order of the
  /// heads.
  void add_gate_gradients(const scratch_memory& memory, index_t kv_heads,
                          const any_executor& exec) const {
    if (dquery_gates_stride_ > 0)
      for_each_row_chunk(1, n_q_, exec, [&](index_t, index_t i) {
        for (index_t h = 0; h < kv_heads; ++h)
          add(dquery_gates(memory, h, i), dquery_gates_stride_, all_dquery_gates(memory, i));
      });
    if (dkey_gates_stride_ > 0)
      for_each_row_chunk(1, n_k_, exec, [&](index_t, index_t j) {
        for (index_t part = 0; part < kv_heads * segments_; ++part)
          add(memory[dkey_gates_] + (part * n_k_ + j) * dkey_gates_stride_, dkey_gates_stride_,
              all_dkey_gates(memory, j));
      });
  }

  static void add(const A* from, index_t count, A* to) noexcept {
    for (index_t c = 0; c < count; c += vec<A>::width)
      (vec<A>::load(to + c) + vec<A>::load(from + c)).store(to + c);
  }

 private:
  template <class F>
  static void for_each_row_chunk(index_t heads, index_t rows, const any_executor& exec, F&& body) {
    constexpr index_t chunk = 128;
    const index_t chunks = ceil_div(rows, chunk);
    exec.parallel_for(heads * chunks, [&](index_t task, index_t) {
      const index_t first = task % chunks * chunk;
      for (index_t r = first; r < (std::min)(first + chunk, rows); ++r) body(task / chunks, r);
    });
  }
  template <class T>
  void write_sum(const A* first, index_t stride, A factor, T* to, index_t width) const {
    constexpr int lanes = vec<A>::width;
    for (index_t c = 0; c < width; c += lanes) {
      vec<A> sum = vec<A>::load(first + c);
      for (index_t s = 1; s < segments_; ++s)
        sum = sum + vec<A>::load(first + s * n_k_ * stride + c);
      detail::store_narrowed<T, A>(sum * vec<A>::broadcast(factor), to + c,
                                   (std::min<index_t>)(lanes, width - c));
    }
  }

  index_t n_q_, n_k_, segments_;
  index_t dq_stride_, dk_stride_, dv_stride_, dquery_gates_stride_, dkey_gates_stride_;
  scratch_array<A> dq_, dk_, dv_, dkey_gates_, dquery_gates_, all_dquery_gates_, all_dkey_gates_;
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
