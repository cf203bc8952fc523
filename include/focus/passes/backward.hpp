// What all backward passes of attention share: the loop over heads, tiles and keys that sums
// gradients in the same order for any number of threads.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "focus/checks/attention_arguments.hpp"
#include "focus/config.hpp"
#include "focus/kernel/gradient_tile.hpp"
#include "focus/kernel/pack.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/rules.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/passes/gradient_sums.hpp"
#include "focus/passes/sequences.hpp"
#include "focus/passes/token_order.hpp"
#include "focus/plan/cells.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

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

/// What a pass calls when the limits of a tile's rows are set.
struct attend_by_rules {
  template <hiding_rules Rules>
  void operator()(const Rules&) const noexcept {}
};

/// A backward pass goes over tiles of query rows, in rounds in none of which a row is twice.
template <class P>
concept backward_pass = requires(const P& pass, index_t tile, index_t r, index_t slot,
                                 gradient_tile<float>& rows, const attend_by_rules& attend) {
  { pass.slot_count() } -> std::same_as<index_t>;        // of its keys, as they are packed
  { pass.token_of(slot) } -> std::same_as<index_t>;      // the key at a slot; -1: none
  { pass.pairs_a_row } -> std::convertible_to<index_t>;  // about so many
  { pass.tiles() } -> std::same_as<index_t>;             // 0: there is nothing to do
  { pass.rows(tile) } -> std::same_as<index_t>;          // how many rows a tile has
  { pass.row(tile, r) } -> std::same_as<index_t>;        // the query that its row r is
  { pass.rounds() } -> std::same_as<index_t>;
  { pass.round(r) } -> std::same_as<task_range>;  // the tiles of a round
  // Whether the tile's row r is in no later round.
  { pass.is_last_tile_of(tile, r) } -> std::same_as<bool>;
  // Sets the limits of the rows of a tile and calls attend(rules), once or more often.
  pass.walk(rows, tile, attend);
};

/// What passes have in common that take `count` rows once, one after the other.
struct rows_once {
  index_t count;

  [[nodiscard]] index_t tiles() const noexcept { return ceil_div(count, plan_tile_rows); }
  [[nodiscard]] index_t rows(index_t tile) const noexcept {
    return (std::min)(plan_tile_rows, count - tile * plan_tile_rows);
  }
  [[nodiscard]] static index_t rounds() noexcept { return 1; }
  [[nodiscard]] task_range round(index_t) const noexcept { return {0, tiles()}; }
  [[nodiscard]] static bool is_last_tile_of(index_t, index_t) noexcept { return true; }
};

/// A pass over all query rows with the keys in token order. Walk: walk(tile, first row, attend),
/// which sets the limits of the tile's rows and calls attend(rules).
template <class Walk>
struct token_order_pass : rows_once {
  index_t n_k;
  index_t pairs_a_row;  // about so many
  Walk walk_tile;

  [[nodiscard]] index_t slot_count() const noexcept { return n_k; }
  [[nodiscard]] index_t token_of(index_t slot) const noexcept { return slot < n_k ? slot : -1; }
  [[nodiscard]] index_t row(index_t tile, index_t r) const noexcept {
    return tile * plan_tile_rows + r;
  }
  template <walked_tile Tile, class Attend>
  void walk(Tile& state, index_t tile, Attend&& attend) const {
    walk_tile(state, tile * plan_tile_rows, attend);
  }
};
template <class Walk>
token_order_pass(rows_once, index_t, index_t, Walk) -> token_order_pass<Walk>;

/// The pass over local pairs and sinks.
inline auto local_pass(const resolved_pattern& pattern, index_t n_q) {
  const key_range middle = pattern.local(n_q / 2);
  // Without a window and sinks there are no keys to pack.
  const bool any_local = pattern.window >= 0 || pattern.sinks > 0;
  return token_order_pass{{n_q},
                          any_local ? pattern.n_k : 0,
                          middle.size() + pattern.sinks,
                          [pattern](auto& tile, index_t first, auto&& attend) {
                            attend_local(tile, pattern, first, [&] { attend(no_rules{}); });
                          }};
}

static_assert(backward_pass<decltype(local_pass(resolved_pattern{}, 0))>);

/// Which of the passes over the same rows one is: dQ is kept between them.
struct pass_position {
  bool first, last;
};

/// The second pass where one is enough.
struct no_pass : rows_once {
  no_pass() noexcept : rows_once{0} {}

  static constexpr index_t pairs_a_row = 0;
  [[nodiscard]] static index_t slot_count() noexcept { return 0; }
  [[nodiscard]] static index_t token_of(index_t) noexcept { return -1; }
  [[nodiscard]] static index_t row(index_t, index_t) noexcept { return 0; }
  template <walked_tile Tile, class Attend>
  static void walk(Tile&, index_t, Attend&&) noexcept {}
};
static_assert(backward_pass<no_pass>);

/// Where a tile is at work, for what its rows are to be found out from.
template <class E>
struct tile_location {
  const scratch_memory& memory;
  const packed_keys<E>& keys;
  index_t worker;
  index_t head;  // of all heads of the call
};

/// What is gated in a backward pass, and what becomes of the gradients of the assignments. Beside
/// this,
///   row_states(location, args, head, rows, row)
/// returns a function of r: the row_state of the tile's row r, which is query row(r) of `head` of
/// `args`. It is not called for here, since its type hangs on that of `args`.
template <class G, class E>
concept gates_of = requires(const G& gates, const scratch_memory& memory, const any_executor& exec,
                            gradient_tile<E>& tile, index_t (*row)(index_t),
                            const gradient_sums<accumulator_t<E>>& sums) {
  { gates.groups } -> std::convertible_to<index_t>;  // elements of an assignment; 0: of none
  // Whether the assignments of the queries and of the keys have a gradient.
  { gates.wants_dquery } -> std::convertible_to<bool>;
  { gates.wants_dkey } -> std::convertible_to<bool>;
  gates.pack(memory, exec);  // before the first pass
  // Packs the assignments of the tile's rows; returns the tile's gate.
  { gates.begin_tile(memory, tile, row) } -> tile_gate<E>;
  gates.write(memory, sums, exec);  // after the last pass
};

/// What a backward pass knows of its rows beforehand, where it is what the caller handed over.
struct given_row_states {
  /// The row_state of row(r) of a head of `args`, as a function of r.
  template <class E, class Arguments, class RowOf>
  [[nodiscard]] static auto row_states(const tile_location<E>&, const Arguments& args, index_t head,
                                       index_t, RowOf row) {
    using A = accumulator_t<E>;
    return [&args, head, row](index_t r) {
      const index_t i = row(r);
      if (is_minus_infinity(args.lse(head, i))) return row_state<A>{true, 0, 0};
      A delta = detail::is_given(args.dout)
                    ? detail::dot_rows<A>(args.dout.row(head, i), args.out.row(head, i),
                                          args.shape.value_dim)
                    : A{0};
      if (detail::is_given(args.dlse)) delta -= static_cast<A>(args.dlse(head, i));
      return row_state<A>{false, static_cast<A>(args.lse(head, i)), delta};
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

static_assert(gates_of<ungated, float>);

/// What run_backward makes its gates with.
struct make_ungated {
  ungated operator()(scratch_plan&, index_t) const noexcept { return {}; }
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

/// What a call wants of a backward pass, gates aside.
template <class Arguments>
wanted_gradients wanted_of(const Arguments& args) noexcept {
  return {.dout = detail::is_given(args.dout),
          .dq = detail::is_given(args.dq),
          .dk = detail::is_given(args.dk),
          .dv = detail::is_given(args.dv)};
}

/// A backward pass, for run_call: what it plans, and its steps. Two passes over the same rows.
template <class E, gates_of<E> Gates, backward_pass First, backward_pass Second>
class backward_run {
  using A = accumulator_t<E>;

 public:
  /// make_gates(scratch plan, workers): what is gated, and where the gradients of the assignments
  /// go.
  template <class MakeGates>
  backward_run(scratch_plan& scratch, const attention_shape& s, index_t workers,
               const resolved_score<A>& score, const wanted_gradients& wanted, MakeGates make_gates,
               index_t segments, const First& first_pass, const Second& second_pass)
      : score_(score),
        first_pass_(first_pass),
        second_pass_(second_pass),
        two_passes_(second_pass.tiles() > 0),
        segments_(segments),
        heads_at_once_(workers <= 1 ? (std::min<index_t>)(s.kv_heads, 1)
                                    : (std::min)(ceil_div(4 * workers, segments), s.kv_heads)),
        gates_(make_gates(scratch, workers)),
        wanted_(with_gates(wanted)),
        first_packers_(plan_packers(scratch, s, first_pass.slot_count())),
        second_packers_(plan_packers(scratch, s, second_pass.slot_count())),
        layout_(scratch, workers, s.head_dim, value_dim(s), gates_.groups, score.softcap > 0,
                wanted_),
        sums_(scratch, s, heads_at_once_, segments, gates_.groups, wanted_,
              two_passes_ && wanted_.dq) {}

  template <class Arguments>
  void run(const Arguments& args, const scratch_memory& memory, const any_executor& exec) const {
    gates_.pack(memory, exec);
    sums_.clear_totals(memory);
    index_t first_head = 0;
    for_each_head_batch(args, heads_at_once_, [&](const Arguments& part) {
      sums_.clear(memory, part.shape.kv_heads, exec);
      const some_heads<Arguments> heads{part, first_head, memory, exec};
      run_pass(heads, first_pass_, first_packers_, {.first = true, .last = !two_passes_});
      if (two_passes_)
        run_pass(heads, second_pass_, second_packers_, {.first = false, .last = true});
      sums_.write_key_gradients(memory, part, score_.scale, exec);
      sums_.add_gate_gradients(memory, part.shape.kv_heads, exec);
      first_head += part.shape.heads;
    });
    gates_.write(memory, sums_, exec);
  }

 private:
  /// The heads that are computed at once, and where.
  template <class Arguments>
  struct some_heads {
    const Arguments& args;
    index_t first;  // of all heads of the call
    const scratch_memory& memory;
    const any_executor& exec;
  };

  /// Of V only the products with dout are needed: V is packed as keys are, and K both as keys and
  /// as values.
  struct packers {
    key_packer<E> keys, values;
  };
  packers plan_packers(scratch_plan& scratch, const attention_shape& s, index_t slot_count) const {
    // In this order: a list of initialisers is evaluated from left to right.
    return {
        key_packer<E>(scratch, heads_at_once_, slot_count, s.head_dim, wanted_.dq ? s.head_dim : 0),
        key_packer<E>(scratch, heads_at_once_, slot_count, value_dim(s), 0)};
  }
  [[nodiscard]] wanted_gradients with_gates(wanted_gradients wanted) const noexcept {
    wanted.dquery_gates = gates_.wants_dquery;
    wanted.dkey_gates = gates_.wants_dkey;
    return wanted;
  }
  [[nodiscard]] index_t value_dim(const attention_shape& s) const noexcept {
    return wanted_.dout ? s.value_dim : 0;
  }
  [[nodiscard]] bool any_wanted() const noexcept {
    return wanted_.dq || wanted_.dk || wanted_.dv || wanted_.dquery_gates || wanted_.dkey_gates;
  }

  template <class Arguments, class Pass>
  void run_pass(const some_heads<Arguments>& heads, const Pass& pass, const packers& packed,
                pass_position place) const {
    const Arguments& args = heads.args;
    const auto token_of = [&](index_t slot) {
      return slot < pass.slot_count() ? pass.token_of(slot) : -1;
    };
    const auto no_columns = [](const auto& view) {
      auto extents = view.extents();
      extents[2] = 0;
      return std::remove_cvref_t<decltype(view)>(view.data(), extents, view.strides());
    };
    packed.keys.pack(heads.memory, args.k, wanted_.dq ? args.k : no_columns(args.k), token_of,
                     heads.exec);
    if (wanted_.dout)
      packed.values.pack(heads.memory, args.v, no_columns(args.v), token_of, heads.exec);
    for (index_t round = 0; round < pass.rounds(); ++round)
      run_round(heads, pass, packed, pass.round(round), token_of,
                {.first = place.first && round == 0, .last = place.last});
  }

  template <class Arguments, class Pass, class TokenOf>
  void run_round(const some_heads<Arguments>& heads, const Pass& pass, const packers& packed,
                 task_range tiles, const TokenOf& token_of, pass_position place) const {
    const scratch_memory& memory = heads.memory;
    const attention_shape& s = heads.args.shape;
    heads.exec.parallel_for(s.kv_heads * segments_, [&](index_t task, index_t worker) {
      const index_t kv_head = task / segments_, segment = task % segments_;
      gradient_tile<E> tile(memory, layout_, worker);
      const key_gradients<A> key_sums = sums_.keys_of(memory, kv_head, segment, tile.unused_row());
      const packed_keys<E> keys = packed.keys.head(memory, kv_head);
      const packed_keys<E> values = packed.values.head(memory, kv_head);
      const index_t group_size = s.queries_per_kv_head();
      for (index_t head = kv_head * group_size; head < (kv_head + 1) * group_size; ++head)
        for (index_t t = tiles.begin + segment; t < tiles.end; t += segments_) {
          const auto row = [&](index_t r) {
            return pass.row(t, r);
          };
          const tile_location<E> site{memory, keys, worker, heads.first + head};
          const auto gate = begin_tile(tile, heads.args, head, pass.rows(t), row, site, place);
          if (!any_wanted()) continue;
          pass.walk(tile, t, [&](const auto& rules) {
            tile.attend(keys, values, score_.softcap, rules, gate, token_of, key_sums);
          });
          finish_tile(tile, heads, head, kv_head, row,
                      [&](index_t r) { return place.last && pass.is_last_tile_of(t, r); });
        }
    });
  }

  /// Begins a tile whose row r is row(r) of `head`; returns its gate.
  template <class Arguments, class Row>
  auto begin_tile(gradient_tile<E>& tile, const Arguments& args, index_t head, index_t rows,
                  const Row& row, const tile_location<E>& site, pass_position place) const {
    tile.begin(
        rows, query_factor(score_), [&](index_t r) { return args.q.row(head, row(r)); },
        gates_.row_states(site, args, head, rows, row));
    if (wanted_.dout) tile.set_douts([&](index_t r) { return args.dout.row(head, row(r)); });
    if (wanted_.dq && !place.first)
      for (index_t r = 0; r < tile.rows(); ++r) {
        const A* from = sums_.dq(site.memory, head, row(r));
        copy(from, from + tile.dq_stride(), tile.dq(r));
      }
    return gates_.begin_tile(site.memory, tile, row);
  }

  /// Writes the tile's dQ, or keeps it for the next pass. is_last(r): nothing more is added to that
  /// of row r.
  template <class Arguments, class Row, class IsLast>
  void finish_tile(gradient_tile<E>& tile, const some_heads<Arguments>& heads, index_t head,
                   index_t kv_head, const Row& row, IsLast&& is_last) const {
    const Arguments& args = heads.args;
    for (index_t r = 0; r < tile.rows(); ++r) {
      if (wanted_.dq && !is_last(r))
        copy(tile.dq(r), tile.dq(r) + tile.dq_stride(), sums_.dq(heads.memory, head, row(r)));
      else if (wanted_.dq)
        detail::write_scaled(tile.dq(r), score_.scale, args.dq.row(head, row(r)),
                             args.shape.head_dim);
      if (wanted_.dquery_gates)
        sums_.add(tile.dgates(r), tile.dgates_stride(),
                  sums_.dquery_gates(heads.memory, kv_head, row(r)));
    }
  }

  resolved_score<A> score_;
  First first_pass_;
  Second second_pass_;
  bool two_passes_;
  index_t segments_, heads_at_once_;
  // Each plans its part of the scratch memory, in this order.
  Gates gates_;
  wanted_gradients wanted_;
  packers first_packers_, second_packers_;
  gradient_tile_layout<E> layout_;
  gradient_sums<A> sums_;
};

/// What all sequences of a backward pass have in common. shape: of a whole sequence, of all its
/// heads, on which the order of the sums depends.
template <class E, class MakeGates>
struct backward_options {
  attention_shape shape;
  resolved_score<accumulator_t<E>> score;
  wanted_gradients wanted;
  MakeGates make_gates;

  /// f(backward_run), planned for `part` of the heads.
  template <class First, class Second, class F>
  void plan(scratch_plan& scratch, const attention_shape& part, index_t workers,
            const First& first_pass, const Second& second_pass, F&& f) const {
    using gates = std::invoke_result_t<const MakeGates&, scratch_plan&, index_t>;
    const index_t segments =
        gradient_segments(shape, first_pass.pairs_a_row + second_pass.pairs_a_row,
                          (std::max)(first_pass.tiles(), second_pass.tiles()));
    f(backward_run<E, gates, First, Second>(scratch, part, workers, score, wanted, make_gates,
                                            segments, first_pass, second_pass));
  }
};

/// Calls f<E>(arguments), where E is the type in which operands are packed: bfloat16 where all that
/// is multiplied or written is stored in it, the instruction set multiplies it as it is, and
/// `permitted` agrees; else that of the sums.
template <class Arguments, class Permitted, class F>
void with_gradient_operands(const Arguments& args, [[maybe_unused]] Permitted&& permitted, F&& f) {
  if constexpr (FOCUS_HAS_BFLOAT16_PRODUCTS && Arguments::inputs_are_bfloat16)
    if (args.all_bfloat16() && permitted())
      return f.template operator()<bfloat16>(args.in_bfloat16());
  f.template operator()<typename Arguments::accumulator>(args);
}
template <class Arguments, class F>
void with_gradient_operands(const Arguments& args, F&& f) {
  detail::with_gradient_operands(args, bfloat16_products_permitted, std::forward<F>(f));
}

/// A backward pass after its checks, with the same passes for each sequence and operands of type E.
/// make_gates(scratch plan, workers): what is gated, and where the gradients of the assignments go;
/// make_ungated for none.
template <class E, class Arguments, class MakeGates, backward_pass First, backward_pass Second>
void run_backward(const Arguments& args, const resolved_score<accumulator_t<E>>& score,
                  const MakeGates& make_gates, const First& first_pass, const Second& second_pass,
                  const any_executor& exec) {
  const backward_options<E, MakeGates> options{args.shape, score, detail::wanted_of(args),
                                               make_gates};
  detail::run_call(
      args, exec,
      [&](index_t, scratch_plan& scratch, const attention_shape& part, index_t workers,
          const auto& f) { options.plan(scratch, part, workers, first_pass, second_pass, f); });
}

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
