// A tile of query rows in a backward pass (arXiv 2205.14135, algorithm 4): the weights of a block
// of keys are computed again from the logsumexp, and give all gradients at once.
//
//   P_ij  = exp(s_ij - lse_i)                     dV_j += P_ij dout_i
//   dS_ij = P_ij (dout_i . v_j - delta_i)         dQ_i += dS_ij k_j,   dK_j += dS_ij q_i
//   delta_i = dout_i . out_i - dlse_i
//
// A strip makes its rows of P and dS and adds to its dQ while they are in L1; when all strips of
// the tile have made theirs, the block's dK and dV are sums over the tile's rows in one register
// block each. Where operands are not widened, P and dS are rounded to their type for these three
// products. The assignments of gates, and all that comes of them, are in the type of the sums.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "focus/config.hpp"
#include "focus/kernel/exp2.hpp"
#include "focus/kernel/operand.hpp"
#include "focus/kernel/panels.hpp"
#include "focus/kernel/plain_data.hpp"
#include "focus/kernel/row_panels.hpp"
#include "focus/kernel/rules.hpp"
#include "focus/kernel/scratch.hpp"
#include "focus/kernel/simd.hpp"
#include "focus/kernel/strip.hpp"
#include "focus/kernel/tile.hpp"
#include "focus/kernel/tuning.hpp"
#include "focus/kernel/unroll.hpp"
#include "focus/kernel/widened_operand.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

/// Where the gradients of the keys of one kv head are summed, by token; null: not wanted.
template <class A>
struct key_gradients {
  A *dk = nullptr, *dv = nullptr, *dgates = nullptr;
  index_t dk_stride = 0, dv_stride = 0, dgates_stride = 0;
  A* unused_row = nullptr;  // for slots that hold no token: as wide as the widest row
};

/// Which products a backward pass needs.
struct wanted_gradients {
  bool dout = true;  // there is a dout; else all gradients come from dlse
  bool dq = true, dk = true, dv = true;
  bool dquery_gates = false, dkey_gates = false;
};

/// What turns a block of scores into weights and gradients of scores. A gate does so from the
/// products of the assignments, p = g_i . g_j; where there is none, differentiate_softmax does.
template <class G, class E, class A = accumulator_t<E>, int Rows = tile_sizes<E>::strip_rows>
concept tile_gate = !G::any || requires(const G& gate, const slot_range* limits, index_t row,
                                        slot_range seen, index_t base, index_t count, A lse,
                                        A delta, A* scores, A* slopes, A* gates) {
  // The key assignments as keys, and as values where those of the queries have a gradient.
  { gate.keys } -> std::convertible_to<packed_keys<A>>;
  // Makes of the products of a strip, which begins with `row` of the tile, what differentiate
  // takes, in slots [base, base + count).
  gate.template prepare<Rows>(limits, row, seen, base, count, gates);
  // Scores to weights P, slopes from dP to dS, gates to dL/dp, for one row.
  gate.differentiate(row, *limits, base, count, lse, delta, scores, slopes, gates);
};
struct no_gate {
  static constexpr bool any = false;
};
static_assert(tile_gate<no_gate, float>);

/// scores: s to P = 2^(factor s - lse), where operand<E> has left a factor to do. slopes: dP = dout
/// . v to dS = P (dP - delta), and to 0 where P is 0: dP may be NaN for a key that is hidden.
template <class E, class A = accumulator_t<E>>
void differentiate_softmax(index_t count, A factor, A lse, A delta, A* scores, A* slopes) noexcept {
  constexpr bool has_factor = !std::is_empty_v<typename operand<E>::score_factor>;
  const vec<A> lse_v = vec<A>::broadcast(lse), delta_v = vec<A>::broadcast(delta);
  const vec<A> highest = vec<A>::broadcast(exp2_highest<A>), scale = vec<A>::broadcast(factor);
  for (index_t j = 0; j < count; j += vec<A>::width) {
    const vec<A> s = vec<A>::load(scores + j);
    const vec<A> x = has_factor ? fma(s, scale, vec<A>::zero() - lse_v) : s - lse_v;
    const vec<A> p = exp2<A>(minimum(highest, x));
    const vec<A> ds = p * (vec<A>::load(slopes + j) - delta_v);
    p.store(scores + j);
    where_zero(p, vec<A>::zero(), ds).store(slopes + j);
  }
}

/// Whether operand<E> makes of scores and dP at once what differentiate_softmax and round_weights
/// do, where nothing else is to be done with P and dS in between.
template <class E, class A = accumulator_t<E>>
inline constexpr bool differentiates_rows = requires(A x, A* row) {
  operand<E>::differentiate_row(index_t{}, x, x, x, row, row);
};

/// What the backward pass knows of a row beforehand.
template <class A>
struct row_state {
  bool sees_nothing;  // then the rest does not count
  A lse, delta;       // natural units
};

/// Scratch memory of the gradient tiles of all workers.
template <class E>
class gradient_tile_layout {
  using A = accumulator_t<E>;
  static constexpr int panel = tile_sizes<E>::panel, padded_rows = tile_sizes<E>::padded_rows;

 public:
  gradient_tile_layout(scratch_plan& plan, index_t workers, index_t head_dim, index_t value_dim,
                       index_t groups, bool capped, const wanted_gradients& wanted)
      : head_dim_(head_dim), value_dim_(value_dim), groups_(groups), wanted_(wanted) {
    constexpr index_t stride = tile_sizes<E>::score_stride;
    const bool gated = groups > 0;
    scratch_plan one;
    queries_ = one.add<E>(query_rows_size<E>(head_dim_));
    douts_ = one.add<E>(wanted.dout ? query_rows_size<E>(value_dim_) : 0);
    gates_ = one.add<A>(gated ? query_rows_size<A>(groups_) : 0);
    query_rows_ = one.add<E>(wanted.dk ? row_panels<E>::size(head_dim_) : 0);
    dout_rows_ = one.add<E>(wanted.dv ? row_panels<E>::size(value_dim_) : 0);
    gate_rows_ = one.add<A>(wanted.dkey_gates ? row_panels<A>::size(groups_) : 0);
    dq_ = one.add<A>(wanted.dq ? padded_rows * round_up(head_dim_, panel) : 0);
    dgates_ = one.add<A>(wanted.dquery_gates ? padded_rows * round_up(groups_, panel) : 0);
    lse_ = one.add<A>(padded_rows);
    delta_ = one.add<A>(padded_rows);
    limits_ = one.add<slot_range>(padded_rows);
    weights_ = one.add<A>(padded_rows * stride);
    slopes_ = one.add<A>(padded_rows * stride);
    gate_slopes_ = one.add<A>(gated ? padded_rows * stride : 0);
    cap_slopes_ = one.add<A>(capped ? tile_sizes<E>::strip_rows * stride : 0);
    const bool transposed = wanted.dk || wanted.dv;
    transposed_ = one.add<E>(transposed ? operand<E>::transposed_size : 0);
    transposed_sums_ = one.add<A>(transposed ? operand<E>::transposed_sums_size : 0);
    unused_row_ =
        one.add<A>(round_up((std::max)(head_dim_, (std::max)(value_dim_, groups_)), panel));
    tiles_ = plan.add_each(workers, one);
  }

 private:
  template <class>
  friend class gradient_tile;
  index_t head_dim_, value_dim_, groups_;
  wanted_gradients wanted_;
  scratch_array<E> queries_, douts_, query_rows_, dout_rows_, transposed_;
  scratch_array<A> gates_, gate_rows_, dq_, dgates_, lse_, delta_, weights_, slopes_, gate_slopes_,
      cap_slopes_, transposed_sums_, unused_row_;
  scratch_array<slot_range> limits_;
  worker_scratch tiles_;
};

/// Up to tile_rows query rows and the sums of their gradients, in the scratch memory of one worker.
template <class E>
class gradient_tile : operand<E>::scope {
  using A = accumulator_t<E>;
  static constexpr int strip_rows = tile_sizes<E>::strip_rows, panel = tile_sizes<E>::panel,
                       lanes = vec<A>::width, stride = tile_sizes<E>::score_stride;

 public:
  /// Rows for which there is room.
  static constexpr int padded_rows = tile_sizes<E>::padded_rows;

  gradient_tile(const scratch_memory& memory, const gradient_tile_layout<E>& layout,
                index_t worker) noexcept
      : head_dim_(layout.head_dim_),
        value_dim_(layout.value_dim_),
        groups_(layout.groups_),
        wanted_(layout.wanted_) {
    const scratch_block own = layout.tiles_.of(memory, worker);
    queries_ = own[layout.queries_];
    douts_ = own[layout.douts_];
    gates_ = own[layout.gates_];
    query_rows_ = {own[layout.query_rows_], head_dim_};
    dout_rows_ = {own[layout.dout_rows_], value_dim_};
    gate_rows_ = {own[layout.gate_rows_], groups_};
    dq_ = own[layout.dq_];
    dgates_ = own[layout.dgates_];
    lse_ = own[layout.lse_];
    delta_ = own[layout.delta_];
    limits_ = own[layout.limits_];
    weights_ = own[layout.weights_];
    slopes_ = own[layout.slopes_];
    gate_slopes_ = own[layout.gate_slopes_];
    cap_slopes_ = own[layout.cap_slopes_];
    transposition_ = {own[layout.transposed_], own[layout.transposed_sums_]};
    unused_row_ = own[layout.unused_row_];
  }

  [[nodiscard]] index_t rows() const noexcept { return rows_; }
  [[nodiscard]] slot_range& limit(index_t r) noexcept { return limits_[r]; }
  [[nodiscard]] A* unused_row() const noexcept { return unused_row_; }

  /// Begins with `rows` query rows, packed times `factor` for the scores, and gradients of 0.
  /// query_of(r): row r of Q. state_of(r): its row_state.
  template <class QueryOf, class StateOf>
  void begin(index_t rows, A factor, QueryOf&& query_of, StateOf&& state_of) {
    rows_ = rows;
    factor_.set(factor);
    operand<E>::pack_queries(rows, head_dim_, factor, query_of, queries_);
    if (wanted_.dk) query_rows_.pack(rows, query_of);
    for (index_t r = 0; r < rows; ++r) {
      const row_state<A> state = state_of(r);
      lse_[r] = state.sees_nothing  ? empty_row
                : is_nan(state.lse) ? nan_row
                                    : (std::max)(state.lse * log2_e<A>, nan_row / 2);
      delta_[r] = state.delta;
    }
    const index_t padded = rows + strip_rows;
    fill(lse_ + rows, lse_ + padded, A{0});
    fill(delta_ + rows, delta_ + padded, A{0});
    fill(limits_, limits_ + padded, slot_range{});
    if (wanted_.dq) fill(dq_, dq_ + padded * dq_stride(), A{0});
    if (wanted_.dquery_gates) fill(dgates_, dgates_ + padded * dgates_stride(), A{0});
  }
  /// dout_of(r): row r of the gradient of the output. Not called where there is none
  /// (wanted_gradients::dout).
  template <class DoutOf>
  void set_douts(DoutOf&& dout_of) {
    operand<E>::pack_queries(rows_, value_dim_, A{1}, dout_of, douts_);
    if (wanted_.dv) dout_rows_.pack(rows_, dout_of);
  }
  /// gate_of(r): the assignment of query row r.
  template <class GateOf>
  void set_gates(GateOf&& gate_of) {
    detail::pack_queries_of_strips<E>(rows_, groups_, gate_of, gates_);
    if (wanted_.dkey_gates) gate_rows_.pack(rows_, gate_of);
  }

  /// Adds the pairs within the rows' limits, less those that the rules hide, to all gradients.
  /// keys: K as keys and as values. values: V as keys. token_of(slot): whose row of `to` a slot
  /// adds to, or -1.
  template <hiding_rules Rules, tile_gate<E> Gate, class TokenOf>
  void attend(const packed_keys<E>& keys, const packed_keys<E>& values, A softcap,
              const Rules& rules, const Gate& gate, TokenOf&& token_of,
              const key_gradients<A>& to) {
    hide_empty_rows();
    const auto differentiate_block = [&](slot_range block) {
      array_of<slot_range, max_strips> seen;
      for (index_t first = 0; first < rows_; first += strip_rows)
        with_strip_rows<E>(rows_ - first, [&](auto strip) {
          seen[first / strip_rows] =
              differentiate<strip()>(first, block, keys, values, softcap, rules, gate);
        });
      if (wanted_.dk || wanted_.dv || wanted_.dkey_gates) add_to_keys(block, seen, token_of, to);
    };
    for_each_block<E>(limits_, rows_, keys, tile_sizes<E>::gradient_keys, differentiate_block);
  }

  /// Sums of dQ / scale of row r, and of its assignment's gradient; dq_stride(), dgates_stride()
  /// elements.
  [[nodiscard]] A* dq(index_t r) const noexcept { return dq_ + r * dq_stride(); }
  [[nodiscard]] A* dgates(index_t r) const noexcept { return dgates_ + r * dgates_stride(); }
  [[nodiscard]] index_t dq_stride() const noexcept { return round_up(head_dim_, panel); }
  [[nodiscard]] index_t dgates_stride() const noexcept { return round_up(groups_, panel); }

 private:
  static constexpr index_t max_strips = tile_sizes<E>::tile_rows / strip_rows + 1;
  /// The lse of a row that sees nothing: no score weighs anything against it.
  static constexpr A empty_row = (std::numeric_limits<A>::max)();
  /// The lse of a row whose lse is NaN: against it any score but `lowest` weighs more than nothing,
  /// so that hidden pairs are still told apart.
  static constexpr A nan_row = std::numeric_limits<A>::lowest() / 2;

  /// An empty row sees nothing and has no gradient.
  void hide_empty_rows() noexcept {
    for (index_t r = 0; r < rows_; ++r)
      if (is_equal(lse_[r], empty_row)) limits_[r] = {};
  }

  /// Makes P and dS (and the gradients of the gates) of one strip against one block, at
  /// [row][slot - block.begin], zeros where the strip sees nothing, and adds to the rows'
  /// gradients. Returns the slots that some row sees.
  template <int Rows, class Rules, class Gate>
  slot_range differentiate(index_t first, slot_range block, const packed_keys<E>& keys,
                           const packed_keys<E>& values, A softcap, const Rules& rules,
                           const Gate& gate) {
    constexpr int step = tile_sizes<E>::slot_step;
    const slot_range seen = visible_slots<Rows>(limits_ + first, block);
    const index_t width = round_up(block.end - block.begin, panel);
    A* const weights = weights_ + first * stride;
    A* const slopes = slopes_ + first * stride;
    A* const gate_slopes = gate_slopes_ + first * stride;
    const auto clear = [&](index_t begin, index_t end) {
      for (index_t r = 0; r < Rows; ++r) {
        fill(weights + r * stride + begin, weights + r * stride + end, A{0});
        fill(slopes + r * stride + begin, slopes + r * stride + end, A{0});
        if constexpr (Gate::any)
          fill(gate_slopes + r * stride + begin, gate_slopes + r * stride + end, A{0});
      }
    };
    if (seen.begin >= seen.end) {
      clear(0, width);
      return {};
    }
    const index_t base = seen.begin / panel * panel, at = base - block.begin;
    const index_t count = round_up(seen.end - base, tile_sizes<E>::score_step);
    const slot_range taken{seen.begin / step * step, round_up(seen.end, step)};
    clear(0, at);
    clear(at + count, width);

    A* const s = weights + at;
    A* const ds = slopes + at;
    operand<E>::template score_slots<Rows>(queries_ + first * tile_sizes<E>::depth_chunk, keys,
                                           base, seen.end, s);
    // The factor may be left for later, unless something else comes before it.
    const bool plain = !(softcap > 0) && !Gate::any && !any_low_row<Rows>(first);
    const A factor = factor_.template apply<Rows>(s, count, !plain);
    if (softcap > 0) cap<Rows>(s, count, softcap);
    if (wanted_.dout)
      operand<E>::template score_slots<Rows>(douts_ + first * tile_sizes<E>::depth_chunk, values,
                                             base, seen.end, ds);
    else
      for (index_t r = 0; r < Rows; ++r) fill(ds + r * stride, ds + r * stride + count, A{0});
    if constexpr (Gate::any) {
      score_strip<Rows>(gates_ + first * tile_sizes<A>::depth_chunk, gate.keys, base, base + count,
                        gate_slopes + at);
      gate.template prepare<Rows>(limits_ + first, first, seen, base, count, gate_slopes + at);
    }
    hide_outside<Rows>(limits_ + first, taken, base, count, s);
    rules.template hide<Rows>(first, base, seen.end - base, s);
    if constexpr (!Gate::any && differentiates_rows<E>) {
      for (index_t r = 0; plain && r < Rows; ++r)
        operand<E>::differentiate_row(count, factor, lse_[first + r], delta_[first + r],
                                      s + r * stride, ds + r * stride);
    }
    if (!plain || Gate::any || !differentiates_rows<E>)
      differentiate_rows<Rows>(first, base, count, factor, softcap, gate, s, ds, gate_slopes + at);

    if (wanted_.dq)
      add_to_rows<Rows>(first, keys, taken, slopes + (taken.begin - block.begin),
                        dq_ + first * dq_stride(), dq_stride());
    if constexpr (Gate::any)
      if (wanted_.dquery_gates) {
        constexpr int rows = block_rows<A>(Rows);
        for (index_t r = 0; r < Rows; r += rows)
          add_to_rows<rows>(first + r, gate.keys, seen,
                            gate_slopes + r * stride + (seen.begin - block.begin),
                            dgates(first + r), dgates_stride());
      }
    return seen;
  }

  /// Scores s and dP in slots [base, base + count) to P and dS, as accumulate takes them, and gates
  /// to their gradients.
  template <int Rows, class Gate>
  void differentiate_rows(index_t first, [[maybe_unused]] index_t base, index_t count, A factor,
                          A softcap, [[maybe_unused]] const Gate& gate, A* s, A* ds,
                          [[maybe_unused]] A* gate_slopes) const {
    for (index_t r = 0; r < Rows; ++r) {
      const A lse = lse_[first + r], delta = delta_[first + r];
      if constexpr (Gate::any)
        gate.differentiate(first + r, limits_[first + r], base, count, lse, delta, s + r * stride,
                           ds + r * stride, gate_slopes + r * stride);
      else
        differentiate_softmax<E>(count, factor, lse, delta, s + r * stride, ds + r * stride);
      if (is_equal(lse, nan_row)) {
        spread_nan(count, s + r * stride);
        spread_nan(count, ds + r * stride);
        if constexpr (Gate::any) spread_nan(count, gate_slopes + r * stride);
      }
    }
    if (softcap > 0) multiply_by_cap_slopes<Rows>(ds, count);
    for (int r = 0; r < Rows; ++r) {
      operand<E>::round_weights(r, count, s + r * stride);
      operand<E>::round_weights(r, count, ds + r * stride);
    }
  }

  /// Whether some lse of a strip (nan_row, above all) is so low that `lowest` times a factor may
  /// not be below it: the factor is above 2^-60, and lowest is about -2^128.
  template <int Rows>
  [[nodiscard]] bool any_low_row(index_t first) const noexcept {
    bool any = false;
    for (index_t r = first; r < first + Rows; ++r) any |= lse_[r] < A(-0x1p60);
    return any;
  }

  /// Sets x to NaN where it is not 0.
  static void spread_nan(index_t count, A* x) noexcept {
    const vec<A> nan = vec<A>::broadcast(std::numeric_limits<A>::quiet_NaN());
    for (index_t j = 0; j < count; j += lanes)
      where_zero(vec<A>::load(x + j), vec<A>::zero(), nan).store(x + j);
  }

  /// s = softcap * tanh(x) in units of log2; keeps 1 - tanh^2.
  template <int Rows>
  void cap(A* scores, index_t count, A softcap) const {
    const vec<A> factor = vec<A>::broadcast(softcap * log2_e<A>);
    const vec<A> one = vec<A>::broadcast(A{1});
    for (index_t r = 0; r < Rows; ++r)
      for (index_t j = 0; j < count; j += lanes) {
        const vec<A> t = tanh<A>(vec<A>::load(scores + r * stride + j));
        (t * factor).store(scores + r * stride + j);
        ((one - t) * (one + t)).store(cap_slopes_ + r * stride + j);
      }
  }
  template <int Rows>
  void multiply_by_cap_slopes(A* slopes, index_t count) const {
    for (index_t r = 0; r < Rows; ++r)
      for (index_t j = 0; j < count; j += lanes) {
        const vec<A> ds = vec<A>::load(slopes + r * stride + j);
        where_zero(ds, ds, ds * vec<A>::load(cap_slopes_ + r * stride + j))
            .store(slopes + r * stride + j);
      }
  }

  /// sums[r] += sum over the slots of `taken` of weights[r][slot - taken.begin] * values[slot]. O:
  /// E, or the type of the sums.
  template <int Rows, class O>
  void add_to_rows(index_t first, const packed_keys<O>& values, slot_range taken, const A* weights,
                   A* sums, index_t sums_stride) const {
    A keep[tile_sizes<O>::strip_rows];
    fill(keep, keep + Rows, A{1});
    const strip_state<O> strip{nullptr, limits_ + first, nullptr, nullptr,
                               sums,    sums_stride,     nullptr};
    if (!values.may_be_nonfinite(taken.begin, taken.end))
      operand<O>::template accumulate<Rows>(strip, values, taken, weights, keep);
    else
      operand<O>::template accumulate_seen<Rows>(
          strip, values, taken, weights, keep, [&](int r, index_t slot) {
            return !is_zero(operand<O>::weight(weights, r, slot - taken.begin));
          });
  }

  /// Adds to the gradients of the block's keys what the rows of the strips that see them give.
  template <class TokenOf>
  void add_to_keys(slot_range block, const slot_range* seen, TokenOf&& token_of,
                   const key_gradients<A>& to) const {
    const auto gates = [&](const auto& some_keys) {
      if (wanted_.dkey_gates)
        some_keys.add(gate_slopes_, gate_rows_, to.dgates, to.dgates_stride, {});
    };
    constexpr bool widened = std::is_same_v<E, A>;
    if (wanted_.dv || wanted_.dk || widened)
      for_each_key_strip<E>(block, seen, token_of, to.unused_row, [&](const auto& some_keys) {
        if (wanted_.dv) some_keys.add(weights_, dout_rows_, to.dv, to.dv_stride, transposition_);
        if (wanted_.dk) some_keys.add(slopes_, query_rows_, to.dk, to.dk_stride, transposition_);
        if constexpr (widened) gates(some_keys);
      });
    if constexpr (!widened)
      if (wanted_.dkey_gates) for_each_key_strip<A>(block, seen, token_of, to.unused_row, gates);
  }

  /// As many keys of a block as operand<O> adds to at a time, and the rows that see them.
  template <class O>
  struct key_strip {
    index_t at, keys, first_row, last_row;
    array_of<index_t, tile_sizes<O>::strip_rows> token;
    A* unused_row;

    void add(const A* weights, const row_panels<O>& rows, A* sums, index_t sums_stride,
             const transposition_scratch<O>& scratch) const {
      constexpr int most = tile_sizes<O>::strip_rows;
      array_of<A*, most> to_key;
      for (index_t c = 0; c < most; ++c)
        to_key[c] = c < keys && token[c] >= 0 ? sums + token[c] * sums_stride : unused_row;
      operand<O>::accumulate_rows(weights + at, rows, first_row, last_row, keys, to_key, scratch);
    }
  };
  template <class O, class TokenOf, class F>
  void for_each_key_strip(slot_range block, const slot_range* seen, TokenOf&& token_of,
                          A* unused_row, F&& f) const {
    constexpr index_t most = tile_sizes<O>::strip_rows;
    const index_t strips = ceil_div(rows_, strip_rows);
    for (index_t slot = block.begin; slot < block.end; slot += most) {
      const index_t keys = (std::min)(most, block.end - slot);
      const auto sees = [&](index_t s) {
        return seen[s].begin < slot + keys && seen[s].end > slot;
      };
      index_t first = 0, last = strips;
      while (first < strips && !sees(first)) ++first;
      while (last > first && !sees(last - 1)) --last;
      if (first == last) continue;
      key_strip<O> some_keys{
          slot - block.begin, keys, first * strip_rows, (std::min)(last * strip_rows, rows_), {},
          unused_row};
      for (index_t c = 0; c < keys; ++c) some_keys.token[c] = token_of(slot + c);
      f(some_keys);
    }
  }

  index_t head_dim_, value_dim_, groups_;
  wanted_gradients wanted_;
  index_t rows_ = 0;
  [[no_unique_address]] typename operand<E>::score_factor factor_;
  E *queries_, *douts_;
  A *gates_, *dq_, *dgates_, *lse_, *delta_, *weights_, *slopes_, *gate_slopes_, *cap_slopes_,
      *unused_row_;
  row_panels<E> query_rows_, dout_rows_;
  row_panels<A> gate_rows_;
  transposition_scratch<E> transposition_;
  slot_range* limits_;
};

static_assert(walked_tile<gradient_tile<float>>);
#if FOCUS_HAS_BFLOAT16_PRODUCTS
static_assert(walked_tile<gradient_tile<bfloat16>>);
#endif

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
