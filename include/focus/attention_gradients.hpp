// What all backward passes of attention share: their arguments, and the loop over heads, tiles and
// keys that sums gradients in the same order for any number of threads.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <string>
#include <type_traits>

#include "focus/attention.hpp"
#include "focus/attention_arguments.hpp"
#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/kernel/gradient_tile.hpp"
#include "focus/kernel/pack.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/options.hpp"
#include "focus/overlap.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus::inline FOCUS_ABI {
namespace detail {

/// What a caller leaves out with {}.
template <class T, int Rank>
constexpr bool is_given(const tensor_view<T, Rank>& view) noexcept {
  return view.data() != nullptr || !view.empty();
}

/// Views of the arguments of a backward pass after their checks.
template <scalar TQ, scalar TK, scalar TV, scalar TOut, scalar TDout, std::floating_point TLse,
          std::floating_point TDlse, scalar TDq, scalar TDk, scalar TDv>
struct backward_arguments {
  using accumulator = accumulator_t<TQ>;

  tensor_view<const TQ, 3> q;
  tensor_view<const TK, 3> k;
  tensor_view<const TV, 3> v;
  tensor_view<const TOut, 3> out;
  matrix_view<const TLse> lse;
  tensor_view<const TDout, 3> dout;  // the last four: not wanted, or zeros, where they are null
  matrix_view<const TDlse> dlse;
  tensor_view<TDq, 3> dq;
  tensor_view<TDk, 3> dk;
  tensor_view<TDv, 3> dv;
  attention_shape shape;

  /// The same for kv heads [first, first + count) and the query heads that read them.
  [[nodiscard]] backward_arguments heads_of(index_t first, index_t count) const {
    backward_arguments part = *this;
    const index_t group = shape.group_size();
    const index_t first_head = first * group, heads = count * group;
    part.q = heads_slice(q, first_head, heads);
    part.k = heads_slice(k, first, count);
    part.v = heads_slice(v, first, count);
    part.out = heads_slice(out, first_head, heads);
    part.lse = heads_slice(lse, first_head, heads);
    part.dout = heads_slice(dout, first_head, heads);
    part.dlse = heads_slice(dlse, first_head, heads);
    part.dq = heads_slice(dq, first_head, heads);
    part.dk = heads_slice(dk, first, count);
    part.dv = heads_slice(dv, first, count);
    part.shape.heads = heads;
    part.shape.kv_heads = count;
    return part;
  }
};

/// A view and the name that the signature gives it.
template <class T, int Rank>
struct named_view {
  const tensor_view<T, Rank>& view;
  const char* name;
};
template <class T, int Rank>
named_view(const tensor_view<T, Rank>&, const char*) -> named_view<T, Rank>;

/// Refuses an output that overlaps itself or any of `others`.
template <class Out, class... Others>
void require_apart(const char* function, const Out& out, const Others&... others) {
  if (out.view.empty()) return;
  require_distinct_elements(out.view, out.name, function);
  (require_disjoint(out.view, out.name, others.view, others.name, function), ...);
}

/// A view that must have the given shape, or, where it may be left out, be {}.
template <int Rank, class T>
void require_tensor(
    const tensor_view<T, Rank>& view,
    const std::type_identity_t<std::array<index_t, static_cast<std::size_t>(Rank)>>& shape,
    bool optional, const char* function, const char* name) {
  if (optional && !detail::is_given(view)) return;
  require_shape(view, shape, function, name);
  require_data(view, function, name);
}

/// Checks shapes, null pointers and overlap; throws invalid_argument with the argument's name.
/// only_lse: out and dout may both be left out.
template <class TQ, class TK, class TV, class TOut, class TLse, class TDout, class TDlse, class TDq,
          class TDk, class TDv>
auto check_backward_views(const char* function, bool only_lse, const tensor_view<const TQ, 3>& q,
                          const tensor_view<const TK, 3>& k, const tensor_view<const TV, 3>& v,
                          const tensor_view<const TOut, 3>& out, const matrix_view<const TLse>& lse,
                          const tensor_view<const TDout, 3>& dout,
                          const matrix_view<const TDlse>& dlse, const tensor_view<TDq, 3>& dq,
                          const tensor_view<TDk, 3>& dk, const tensor_view<TDv, 3>& dv) {
  const attention_shape s = check_attention_inputs(function, q, k, v);
  only_lse = only_lse && !detail::is_given(dout);
  require_tensor(out, {s.heads, s.n_q, s.value_dim}, only_lse, function, "out");
  require_tensor(lse, {s.heads, s.n_q}, false, function, "lse");
  require_tensor(dout, {s.heads, s.n_q, s.value_dim}, only_lse, function, "dout");
  require_tensor(dlse, {s.heads, s.n_q}, true, function, "dlse");
  require_tensor(dq, {s.heads, s.n_q, s.head_dim}, true, function, "dq");
  require_tensor(dk, {s.kv_heads, s.n_k, s.head_dim}, true, function, "dk");
  require_tensor(dv, {s.kv_heads, s.n_k, s.value_dim}, true, function, "dv");
  const auto apart_from_inputs = [&](const auto& view, const auto&... others) {
    require_apart(function, view, named_view{q, "q"}, named_view{k, "k"}, named_view{v, "v"},
                  named_view{out, "out"}, named_view{lse, "lse"}, named_view{dout, "dout"},
                  named_view{dlse, "dlse"}, others...);
  };
  const named_view dq_named{dq, "dq"}, dk_named{dk, "dk"};
  apart_from_inputs(dq_named);
  apart_from_inputs(dk_named, dq_named);
  apart_from_inputs(named_view{dv, "dv"}, dq_named, dk_named);

  using A = accumulator_t<TQ>;
  // Only q, k and v: what is left out is a view of float, whatever they are.
  static_assert(std::same_as<A, accumulator_t<TK>> && std::same_as<A, accumulator_t<TV>>,
                "focus: q, k and v must all be double, or all be types whose sums are float.");
  static_assert(std::same_as<A, double> || (std::same_as<accumulator_t<TOut>, float> &&
                                            std::same_as<accumulator_t<TDout>, float>),
                "focus: out and dout may be double only when q, k and v are double.");
  return backward_arguments<TQ, TK, TV, TOut, TDout, TLse, TDlse, TDq, TDk, TDv>{
      q, k, v, out, lse, dout, dlse, dq, dk, dv, s};
}

/// The same for tensors of whatever type.
template <class Q, class K, class V, class Out, class Lse, class Dout, class Dlse, class Dq,
          class Dk, class Dv>
auto check_backward_arguments(const char* function, bool only_lse, Q&& q, K&& k, V&& v, Out&& out,
                              Lse&& lse, Dout&& dout, Dlse&& dlse, Dq&& dq, Dk&& dk, Dv&& dv) {
  return check_backward_views(function, only_lse, detail::as_const_view(q),
                              detail::as_const_view(k), detail::as_const_view(v),
                              detail::as_const_view(out), detail::as_const_view(lse),
                              detail::as_const_view(dout), detail::as_const_view(dlse),
                              detail::as_view(dq), detail::as_view(dk), detail::as_view(dv));
}

/// Sum of a[c] * b[c] over c < n.
template <class A, class TA, class TB>
A dot_rows(const TA* a, const TB* b, index_t n) {
  constexpr int lanes = vec<A>::width;
  vec<A> sum = vec<A>::zero();
  index_t c = 0;
  for (; c + lanes <= n; c += lanes)
    sum = fma(detail::load_widened<TA, A>(a + c), detail::load_widened<TB, A>(b + c), sum);
  if (c < n)
    sum = fma(detail::load_widened_partial<TA, A>(a + c, n - c),
              detail::load_widened_partial<TB, A>(b + c, n - c), sum);
  return reduce_add(sum);
}

/// A pass over all tiles of query rows with the keys in token order. Walk: walk(tile, first row,
/// attend), which sets the limits of the tile's rows and calls attend(rules).
template <class Walk>
struct token_order_pass {
  index_t n_q, n_k;
  index_t pairs_a_row;  // about
  Walk walk_tile;

  [[nodiscard]] index_t slots() const noexcept { return n_k; }
  [[nodiscard]] index_t token_of(index_t slot) const noexcept { return slot < n_k ? slot : -1; }
  [[nodiscard]] index_t tiles() const noexcept { return ceil_div(n_q, plan_tile_rows); }
  [[nodiscard]] index_t rows(index_t tile) const noexcept {
    return (std::min)(plan_tile_rows, n_q - tile * plan_tile_rows);
  }
  [[nodiscard]] index_t row(index_t tile, index_t r) const noexcept {
    return tile * plan_tile_rows + r;
  }
  template <class Tile, class Attend>
  void walk(Tile& state, index_t tile, Attend&& attend) const {
    walk_tile(state, tile * plan_tile_rows, attend);
  }
};
template <class Walk>
token_order_pass(index_t, index_t, index_t, Walk) -> token_order_pass<Walk>;

/// The pass over local pairs and sinks.
inline auto local_pass(const resolved_pattern& pattern, index_t n_q) {
  const key_range middle = pattern.local(n_q / 2);
  // Without a window and sinks there are no keys to pack.
  const bool any_local = pattern.window >= 0 || pattern.sinks > 0;
  return token_order_pass{n_q, any_local ? pattern.n_k : 0, middle.size() + pattern.sinks,
                          [pattern](auto& tile, index_t first, auto&& attend) {
                            attend_local(tile, pattern, first, [&] { attend(no_rules{}); });
                          }};
}

/// Which of the passes over the same rows one is: dQ is kept between them.
struct pass_place {
  bool first, last;
};

/// The second pass of what needs one only.
struct no_pass {
  static constexpr index_t pairs_a_row = 0;
  [[nodiscard]] static index_t slots() noexcept { return 0; }
  [[nodiscard]] static index_t token_of(index_t) noexcept { return -1; }
  [[nodiscard]] static index_t tiles() noexcept { return 0; }
  [[nodiscard]] static index_t rows(index_t) noexcept { return 0; }
  [[nodiscard]] static index_t row(index_t, index_t) noexcept { return 0; }
  template <class Tile, class Attend>
  static void walk(Tile&, index_t, Attend&&) noexcept {}
};

/// Where a tile is at work.
template <class A>
struct tile_site {
  const scratch_memory& memory;
  const packed_keys<A>& keys;
  index_t worker;
  index_t head;  // of all heads of the call
};

/// What a backward pass knows of its rows beforehand, where it is what the caller handed over.
struct given_row_states {
  /// The row_state of row(r) of a head of `args`, as a function of r.
  template <class A, class Arguments, class RowOf>
  [[nodiscard]] static auto row_states(const tile_site<A>&, const Arguments& args, index_t head,
                                       index_t, RowOf row) {
    return [&args, head, row](index_t r) {
      const index_t i = row(r);
      A delta = detail::is_given(args.dout)
                    ? detail::dot_rows<A>(args.dout.row(head, i), args.out.row(head, i),
                                          args.shape.value_dim)
                    : A{0};
      if (detail::is_given(args.dlse)) delta -= static_cast<A>(args.dlse(head, i));
      return row_state<A>{static_cast<A>(args.lse(head, i)), delta};
    };
  }
};

/// The gates of what is not gated; soft_gate_backward.hpp has the others.
struct ungated : given_row_states {
  static constexpr index_t groups = 0;
  static constexpr bool wants_dquery = false, wants_dkey = false;
  static void pack(const scratch_memory&, const any_executor&) noexcept {}
  template <class Tile, class RowOf>
  [[nodiscard]] static no_gate begin_tile(const scratch_memory&, Tile&, RowOf&&) noexcept {
    return {};
  }
  template <class Sums>
  static void write(const scratch_memory&, const Sums&, const any_executor&) noexcept {}
};

/// What run_backward makes its gates with.
struct make_ungated {
  ungated operator()(scratch_plan&, index_t) const noexcept { return {}; }
};

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
    dq_at_ = plan.add<A>(batch * s.group_size() * n_q_ * dq_stride_);
    dk_at_ = plan.add<A>(parts * n_k_ * dk_stride_);
    dv_at_ = plan.add<A>(parts * n_k_ * dv_stride_);
    dkey_gates_at_ = plan.add<A>(parts * n_k_ * dkey_gates_stride_);
    dquery_gates_at_ = plan.add<A>(batch * n_q_ * dquery_gates_stride_);
    all_dquery_gates_at_ = plan.add<A>(n_q_ * dquery_gates_stride_);
    all_dkey_gates_at_ = plan.add<A>(n_k_ * dkey_gates_stride_);
  }

  /// Where segment `segment` of a kv head of the batch adds the gradients of its keys.
  [[nodiscard]] key_gradients<A> keys_of(const scratch_memory& memory, index_t kv_head,
                                         index_t segment, A* nowhere) const noexcept {
    const index_t part = kv_head * segments_ + segment;
    return {memory.at<A>(dk_at_) + part * n_k_ * dk_stride_,
            memory.at<A>(dv_at_) + part * n_k_ * dv_stride_,
            memory.at<A>(dkey_gates_at_) + part * n_k_ * dkey_gates_stride_,
            dk_stride_,
            dv_stride_,
            dkey_gates_stride_,
            nowhere};
  }
  /// The dQ of a row between two passes.
  [[nodiscard]] A* dq(const scratch_memory& memory, index_t head, index_t row) const noexcept {
    return memory.at<A>(dq_at_) + (head * n_q_ + row) * dq_stride_;
  }
  [[nodiscard]] A* dquery_gates(const scratch_memory& memory, index_t kv_head,
                                index_t row) const noexcept {
    return memory.at<A>(dquery_gates_at_) + (kv_head * n_q_ + row) * dquery_gates_stride_;
  }
  /// Sums over all kv heads.
  [[nodiscard]] A* all_dquery_gates(const scratch_memory& memory, index_t row) const noexcept {
    return memory.at<A>(all_dquery_gates_at_) + row * dquery_gates_stride_;
  }
  [[nodiscard]] A* all_dkey_gates(const scratch_memory& memory, index_t key) const noexcept {
    return memory.at<A>(all_dkey_gates_at_) + key * dkey_gates_stride_;
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
          add(memory.at<A>(dkey_gates_at_) + (part * n_k_ + j) * dkey_gates_stride_,
              dkey_gates_stride_, all_dkey_gates(memory, j));
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
  std::size_t dq_at_ = 0, dk_at_ = 0, dv_at_ = 0, dkey_gates_at_ = 0, dquery_gates_at_ = 0,
              all_dquery_gates_at_ = 0, all_dkey_gates_at_ = 0;
};

/// How many segments share the keys of a kv head: some 32 tasks in all, as long as zeroing and
/// adding up a segment's sums stays small beside the pairs that it computes.
inline index_t gradient_segments(const attention_shape& s, index_t pairs_a_row,
                                 index_t tiles) noexcept {
  constexpr index_t tasks = 32, pairs_a_segment = 128;
  const index_t wanted = ceil_div(tasks, (std::max<index_t>)(s.kv_heads, 1));
  const index_t most = (std::min)(pairs_a_row / pairs_a_segment, tiles);
  return std::clamp<index_t>(wanted, 1, (std::max<index_t>)(most, 1));
}

/// to = factor * from, narrowed.
template <class A, class T>
void write_scaled(const A* from, A factor, T* to, index_t width) {
  constexpr int lanes = vec<A>::width;
  for (index_t c = 0; c < width; c += lanes)
    detail::store_narrowed<T, A>(vec<A>::load(from + c) * vec<A>::broadcast(factor), to + c,
                                 (std::min<index_t>)(lanes, width - c));
}

/// A backward pass after its checks. make_gates(scratch plan, workers): what is gated, and where
/// the gradients of the assignments go; `ungated` for none.
template <class Arguments, class A, class Gates, class First, class Second>
void run_backward(const Arguments& args, const resolved_score<A>& score, const Gates& make_gates,
                  const First& first_pass, const Second& second_pass, const any_executor& exec) {
  const attention_shape& s = args.shape;
  const bool two = second_pass.tiles() > 0;
  const index_t threads = exec.concurrency();

  scratch_plan plan;
  const auto gates = make_gates(plan, threads);
  const wanted_gradients wanted{detail::is_given(args.dout), detail::is_given(args.dq),
                                detail::is_given(args.dk),   detail::is_given(args.dv),
                                gates.wants_dquery,          gates.wants_dkey};
  const bool any_wanted =
      wanted.dq || wanted.dk || wanted.dv || wanted.dquery_gates || wanted.dkey_gates;
  const index_t segments = gradient_segments(s, first_pass.pairs_a_row + second_pass.pairs_a_row,
                                             (std::max)(first_pass.tiles(), second_pass.tiles()));
  const index_t batch = threads <= 1 ? (std::min<index_t>)(s.kv_heads, 1)
                                     : (std::min)(ceil_div(4 * threads, segments), s.kv_heads);
  // Of V only the products with dout are needed: V is packed as keys are, and K both as keys and as
  // values.
  const index_t value_dim = wanted.dout ? s.value_dim : 0;
  const key_packer<A> first_keys(plan, batch, first_pass.slots(), s.head_dim,
                                 wanted.dq ? s.head_dim : 0);
  const key_packer<A> first_values(plan, batch, first_pass.slots(), value_dim, 0);
  const key_packer<A> second_keys(plan, batch, second_pass.slots(), s.head_dim,
                                  wanted.dq ? s.head_dim : 0);
  const key_packer<A> second_values(plan, batch, second_pass.slots(), value_dim, 0);
  const gradient_tile_layout<A> layout(plan, threads, s.head_dim, value_dim, gates.groups,
                                       score.softcap > 0, wanted);
  const gradient_sums<A> sums(plan, s, batch, segments, gates.groups, wanted, two && wanted.dq);
  const scratch_memory memory(exec, plan);
  gates.pack(memory, exec);
  sums.clear_totals(memory);

  index_t first_head = 0;  // of the batch
  const auto run_pass = [&](const auto& part, const auto& pass, const key_packer<A>& keys,
                            const key_packer<A>& values, pass_place place) {
    const auto token_of = [&](index_t slot) {
      return slot < pass.slots() ? pass.token_of(slot) : -1;
    };
    const auto no_columns = [](const auto& view) {
      auto extents = view.extents();
      extents[2] = 0;
      return std::remove_cvref_t<decltype(view)>(view.data(), extents, view.strides());
    };
    keys.pack(memory, part.k, wanted.dq ? part.k : no_columns(part.k), token_of, exec);
    if (wanted.dout) values.pack(memory, part.v, no_columns(part.v), token_of, exec);
    exec.parallel_for(part.shape.kv_heads * segments, [&](index_t task, index_t worker) {
      const index_t kv_head = task / segments, segment = task % segments;
      gradient_tile<A> tile(memory, layout, worker);
      const key_gradients<A> key_sums = sums.keys_of(memory, kv_head, segment, tile.nowhere());
      const packed_keys<A> packed_k = keys.head(memory, kv_head);
      const packed_keys<A> packed_v = values.head(memory, kv_head);
      for (index_t h = 0; h < s.group_size(); ++h) {
        const index_t head = kv_head * s.group_size() + h;
        for (index_t t = segment; t < pass.tiles(); t += segments) {
          const auto row = [&](index_t r) {
            return pass.row(t, r);
          };
          tile.begin(
              pass.rows(t), query_factor(score),
              [&](index_t r) { return part.q.row(head, row(r)); },
              gates.row_states(tile_site<A>{memory, packed_k, worker, first_head + head}, part,
                               head, pass.rows(t), row));
          if (wanted.dout) tile.set_douts([&](index_t r) { return part.dout.row(head, row(r)); });
          const auto gate = gates.begin_tile(memory, tile, row);
          if (wanted.dq && !place.first)
            for (index_t r = 0; r < tile.rows(); ++r)
              copy(sums.dq(memory, head, row(r)), sums.dq(memory, head, row(r)) + tile.dq_stride(),
                   tile.dq(r));
          if (!any_wanted) continue;
          pass.walk(tile, t, [&](const auto& rules) {
            tile.attend(packed_k, packed_v, score.softcap, rules, gate, token_of, key_sums);
          });
          for (index_t r = 0; r < tile.rows(); ++r) {
            if (wanted.dq && !place.last)
              copy(tile.dq(r), tile.dq(r) + tile.dq_stride(), sums.dq(memory, head, row(r)));
            if (wanted.dq && place.last)
              detail::write_scaled(tile.dq(r), score.scale, part.dq.row(head, row(r)), s.head_dim);
            if (wanted.dquery_gates)
              sums.add(tile.dgates(r), tile.dgates_stride(),
                       sums.dquery_gates(memory, kv_head, row(r)));
          }
        }
      }
    });
  };

  for_each_head_batch(args, batch, [&](const Arguments& part) {
    sums.clear(memory, part.shape.kv_heads, exec);
    run_pass(part, first_pass, first_keys, first_values, {.first = true, .last = !two});
    if (two)
      run_pass(part, second_pass, second_keys, second_values, {.first = false, .last = true});
    sums.write_key_gradients(memory, part, score.scale, exec);
    sums.add_gate_gradients(memory, part.shape.kv_heads, exec);
    first_head += part.shape.heads;
  });
  gates.write(memory, sums, exec);
}

}  // namespace detail
}  // namespace focus::inline FOCUS_ABI
