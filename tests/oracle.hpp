// What the attention tests share: one case struct, made-up values and masks, the truth in double,
// and the naive form in the library's own precision, which gives the tolerance.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/options.hpp"
#include "focus/reference/attention.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"
#include "guarded_tensor.hpp"

namespace oracle {

using focus::group_mask;

/// A small generator of our own, so that cases are the same with every standard library.
class generator {
 public:
  explicit generator(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}

  std::uint64_t bits() {  // splitmix64
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  /// In [0, n).
  index_t below(index_t n) { return static_cast<index_t>(bits() % static_cast<std::uint64_t>(n)); }
  /// In [0, 1).
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  /// About normal, mean 0 and variance 1.
  double normal() {
    double sum = 0;
    for (int r = 0; r < 6; ++r) sum += uniform();
    return (sum - 3.0) * std::sqrt(2.0);
  }

 private:
  std::uint64_t state_;
};

// ---------------------------------------------------------------- cases

enum class storage { float32, float64, bfloat16, float16, engine_bfloat16, engine_float };
inline constexpr std::array all_storage{storage::float32,         storage::float64,
                                        storage::bfloat16,        storage::float16,
                                        storage::engine_bfloat16, storage::engine_float};

/// Calls f.template operator()<T>() with the type that `type` names.
template <class F>
void with_storage(storage type, F&& f) {
  switch (type) {
    case storage::float32:
      return f.template operator()<float>();
    case storage::float64:
      return f.template operator()<double>();
    case storage::bfloat16:
      return f.template operator()<focus::bfloat16>();
    case storage::float16:
      return f.template operator()<focus::float16>();
    case storage::engine_bfloat16:
      return f.template operator()<engine_bfloat16>();
    case storage::engine_float:
      return f.template operator()<engine_float>();
  }
}

/// The same for one type of each kind that the kernels have, which compiles sooner: float32,
/// float64 and bfloat16.
template <class F>
void with_main_storage(storage type, F&& f) {
  if (type == storage::float64) return f.template operator()<double>();
  if (type == storage::bfloat16) return f.template operator()<focus::bfloat16>();
  return f.template operator()<float>();
}

/// How the masks of the tokens come about.
enum class grouping {
  balanced,     // each group has as many tokens, in random order
  runs,         // neighbours share their groups
  skewed,       // most tokens in the first group
  one_group,    // all tokens in one group
  empty_group,  // no token in the last group
  all_bits,     // each token in each group
  zero,         // no token in any group
  mixed,        // balanced, and here and there all bits or none
  scattered,    // each token has a random mask of its own
  drawn,        // each token has k groups, drawn at random: lists of keys
};
inline constexpr std::array all_groupings{
    grouping::balanced,  grouping::runs,        grouping::skewed,
    grouping::one_group, grouping::empty_group, grouping::all_bits,
    grouping::zero,      grouping::mixed,       grouping::scattered};

enum class operation { attention, sparse, soft_gate };

struct attention_case {
  index_t heads = 2, kv_heads = 1;
  index_t n_q = 40, n_k = 40;
  index_t d = 16, d_v = 16;
  focus::pattern_options pattern = {.window = 8};
  focus::score_options score = {};
  storage type = storage::float32;
  layout memory = layout::heads_first;
  grouping groups = grouping::balanced;
  int group_count = 4, top_k = 1;
  bool separate_masks = false;  // queries have masks of their own
  focus::gate_options gate = {};
  bool one_hot_assignment = false;  // the masks as assignments, else soft ones with some zeros
  double query_magnitude = 1;
  std::uint64_t seed = 1;
  bool dout = true, dlse = false;  // what a loss gives a gradient to; soft gates: dlse in any case

  bool has_dlse(operation op) const { return dlse || op == operation::soft_gate; }
  index_t query_offset() const { return pattern.query_offset.value_or(n_k - n_q); }

  /// The rule of the pairs, once more.
  bool causal_pair(index_t i, index_t j) const {
    return !pattern.causal || j <= i + query_offset();
  }
  bool near_pair(index_t i, index_t j) const {
    if (!causal_pair(i, j)) return false;
    if (j < pattern.sink_tokens) return true;
    const index_t later = (std::max)(i + query_offset(), j),
                  earlier = (std::min)(i + query_offset(), j);
    return later - earlier <= pattern.window;
  }
};

inline std::string describe(const attention_case& c) {
  std::ostringstream text;
  text << "heads " << c.heads << "/" << c.kv_heads << ", n_q " << c.n_q << ", n_k " << c.n_k
       << ", d " << c.d << ", d_v " << c.d_v << (c.pattern.causal ? ", causal" : ", not causal")
       << ", window " << c.pattern.window << ", sinks " << c.pattern.sink_tokens
       << ", query_offset ";
  if (c.pattern.query_offset)
    text << *c.pattern.query_offset;
  else
    text << "none";
  text << ", scale " << c.score.scale.value_or(-1.0f) << ", softcap "
       << c.score.softcap.value_or(0.0f) << ", storage " << static_cast<int>(c.type) << ", layout "
       << static_cast<int>(c.memory) << ", grouping " << static_cast<int>(c.groups) << ", K "
       << c.group_count << ", k " << c.top_k << (c.separate_masks ? ", separate masks" : "")
       << ", gate " << static_cast<int>(c.gate.kind) << ", sharpness " << c.gate.sharpness
       << (c.one_hot_assignment ? ", one-hot" : "") << (c.dout ? "" : ", no dout")
       << (c.dlse ? ", dlse" : "") << ", query magnitude " << c.query_magnitude << ", seed "
       << c.seed;
  return text.str();
}

/// Masks of n tokens.
inline std::vector<group_mask> make_masks(index_t n, grouping kind, int groups, int top_k,
                                          std::uint64_t seed) {
  generator random(seed);
  const group_mask all = groups == 64 ? ~group_mask{0} : (group_mask{1} << groups) - 1;
  std::vector<group_mask> masks(static_cast<std::size_t>(n));
  std::vector<index_t> order(masks.size());
  for (std::size_t t = 0; t < order.size(); ++t) order[t] = static_cast<index_t>(t);
  for (std::size_t t = order.size(); t > 1; --t)
    std::swap(order[t - 1], order[static_cast<std::size_t>(random.below(static_cast<index_t>(t)))]);

  for (std::size_t t = 0; t < masks.size(); ++t) {
    const int available = kind == grouping::empty_group && groups > 1 ? groups - 1 : groups;
    index_t group = order[t] % available;
    if (kind == grouping::runs) group = static_cast<index_t>(t) * available / n;
    if (kind == grouping::skewed && random.below(5) != 0) group = 0;
    if (kind == grouping::one_group) group = 0;
    group_mask mask = 0;
    for (int r = 0; r < (std::min)(top_k, available); ++r)
      mask |= group_mask{1} << ((group + r) % available);
    if (kind == grouping::all_bits) mask = all;
    if (kind == grouping::zero) mask = 0;
    if (kind == grouping::scattered) mask = random.bits() & random.bits() & all;
    if (kind == grouping::drawn)
      for (mask = 0; std::popcount(mask) < (std::min)(top_k, groups);)
        mask |= group_mask{1} << random.below(groups);
    if (kind == grouping::mixed && t % 7 == 3) mask = 0;
    if (kind == grouping::mixed && t % 7 == 5) mask = all;
    masks[t] = mask;
  }
  return masks;
}

/// The inputs of one case in double: dense, row-major, exactly as stored.
struct dense_problem {
  attention_case spec;
  std::vector<double> q, k, v, query_assignment, key_assignment;
  std::vector<group_mask> query_masks, key_masks;

  /// Whether the pair can matter to the result.
  bool allowed(operation op, index_t i, index_t j) const {
    if (spec.near_pair(i, j)) return true;
    if (op == operation::attention || !spec.causal_pair(i, j)) return false;
    if (op == operation::sparse)
      return (query_masks[static_cast<std::size_t>(i)] & key_masks[static_cast<std::size_t>(j)]) !=
             0;
    return spec.gate.kind == focus::gate_kind::score || gate_product(i, j) != 0;
  }

  /// p_ij = g_i . g_j.
  double gate_product(index_t i, index_t j) const {
    double p = 0;
    for (index_t g = 0; g < spec.group_count; ++g)
      p += query_assignment[static_cast<std::size_t>(i * spec.group_count + g)] *
           key_assignment[static_cast<std::size_t>(j * spec.group_count + g)];
    return p;
  }

  bool empty_row(operation op, index_t i) const {
    for (index_t j = 0; j < spec.n_k; ++j)
      if (allowed(op, i, j)) return false;
    return true;
  }
};

/// What a call is given. Tests of bad arguments change it.
template <class T>
struct call_inputs {
  using real = focus::accumulator_t<T>;
  focus::tensor_view<const T, 3> q, k, v;
  std::span<const group_mask> query_masks, key_masks;
  focus::matrix_view<const real> query_assignment, key_assignment;
  focus::gate_options gate;
  focus::pattern_options pattern;
  focus::score_options score;
};

/// The inputs of one case.
template <class T>
struct problem {
  using real = focus::accumulator_t<T>;

  attention_case spec;
  guarded_tensor<T, 3> q, k, v;
  std::vector<group_mask> query_masks, key_masks;
  guarded_tensor<real, 2> query_assignment, key_assignment;

  FOCUS_NOINLINE explicit problem(const attention_case& c)
      : spec(c),
        q({c.heads, c.n_q, c.d}, c.memory),
        k({c.kv_heads, c.n_k, c.d}, c.memory),
        v({c.kv_heads, c.n_k, c.d_v}, c.memory),
        key_masks(make_masks(c.n_k, c.groups, c.group_count, c.top_k, c.seed + 10)),
        query_assignment({c.n_q, c.group_count}, c.memory),
        key_assignment({c.n_k, c.group_count}, c.memory) {
    generator random(c.seed);
    q.fill([&] { return c.query_magnitude * random.normal(); });
    k.fill([&] { return random.normal(); });
    v.fill([&] { return random.normal(); });

    // A query has the mask of the key at its position, where there is one.
    query_masks = make_masks(c.n_q, c.groups, c.group_count, c.top_k, c.seed + 11);
    if (!c.separate_masks)
      for (index_t i = 0; i < c.n_q; ++i) {
        const index_t position = i + c.query_offset();
        if (position >= 0 && position < c.n_k)
          query_masks[static_cast<std::size_t>(i)] = key_masks[static_cast<std::size_t>(position)];
      }
    assign(query_assignment, query_masks, random);
    assign(key_assignment, key_masks, random);
  }

  call_inputs<T> inputs() const {
    return {.q = q.view(),
            .k = k.view(),
            .v = v.view(),
            .query_masks = query_masks,
            .key_masks = key_masks,
            .query_assignment = query_assignment.view(),
            .key_assignment = key_assignment.view(),
            .gate = spec.gate,
            .pattern = spec.pattern,
            .score = spec.score};
  }

  FOCUS_NOINLINE dense_problem dense() const {
    return {spec,
            q.values(),
            k.values(),
            v.values(),
            query_assignment.values(),
            key_assignment.values(),
            query_masks,
            key_masks};
  }

 private:
  void assign(guarded_tensor<real, 2>& to, const std::vector<group_mask>& masks,
              generator& random) const {
    const auto view = to.view();
    for (index_t t = 0; t < view.extent(0); ++t) {
      real sum = 0;
      for (index_t g = 0; g < view.extent(1); ++g) {
        const bool member = (masks[static_cast<std::size_t>(t)] >> g & 1u) != 0;
        const double share = random.below(3) == 0 ? 0.0 : 0.02 + random.uniform();
        view(t, g) = spec.one_hot_assignment ? real(member) : static_cast<real>(share);
        sum += view(t, g);
      }
      if (spec.one_hot_assignment || sum == 0) continue;
      for (index_t g = 0; g < view.extent(1); ++g) view(t, g) /= sum;
    }
  }
};

/// The outputs of one case.
template <class T, class L = float>
struct answer {
  guarded_tensor<T, 3> out;
  guarded_tensor<L, 2> lse;

  FOCUS_NOINLINE explicit answer(const attention_case& c)
      : out({c.heads, c.n_q, c.d_v}, c.memory), lse({c.heads, c.n_q}, c.memory) {}

  bool untouched() const { return out.untouched() && lse.untouched(); }
  bool guards_hold() const { return out.guards_hold() && lse.guards_hold(); }
  bool same_bits(const answer& other) const {
    return out.same_bits(other.out) && lse.same_bits(other.lse);
  }
  bool same_row_bits(const answer& other, index_t h, index_t i) const {
    return oracle::same_row_bits<T>(out.view(), other.out.view(), h, i) &&
           std::memcmp(&lse.view()(h, i), &other.lse.view()(h, i), sizeof(L)) == 0;
  }
};

// ---------------------------------------------------------------- the truth, and the naive form

/// out [heads, n_q, d_v] and lse [heads, n_q] in double, dense.
struct attention_state {
  std::vector<double> out, lse;
};

/// focus::reference in double.
inline attention_state truth(const dense_problem& p, operation op) {
  const attention_case& c = p.spec;
  attention_state s;
  s.out.assign(static_cast<std::size_t>(c.heads * c.n_q * c.d_v), not_a_number);
  s.lse.assign(static_cast<std::size_t>(c.heads * c.n_q), not_a_number);
  using tensor = focus::tensor_view<const double, 3>;
  using matrix = focus::matrix_view<const double>;
  const tensor q(p.q.data(), {c.heads, c.n_q, c.d}), k(p.k.data(), {c.kv_heads, c.n_k, c.d}),
      v(p.v.data(), {c.kv_heads, c.n_k, c.d_v});
  const matrix g_q(p.query_assignment.data(), {c.n_q, c.group_count}),
      g_k(p.key_assignment.data(), {c.n_k, c.group_count});
  const focus::tensor_view<double, 3> out(s.out.data(), {c.heads, c.n_q, c.d_v});
  const focus::matrix_view<double> lse(s.lse.data(), {c.heads, c.n_q});
  if (op == operation::attention)
    focus::reference::attention(q, k, v, out, c.pattern, c.score, lse);
  else if (op == operation::sparse)
    focus::reference::sparse_attention(q, k, v, p.query_masks, p.key_masks, c.pattern, out, c.score,
                                       lse);
  else
    focus::reference::soft_gate_attention(q, k, v, g_q, g_k, c.gate, out, c.pattern, c.score, lse);
  return s;
}

/// What anyone would write, with all sums in `Real`.
template <class Real>
struct naive_form {
  attention_state state;
  // How large the numbers were that rounding worked on, before and after the cap.
  double largest_score = 0;

  naive_form(const dense_problem& p, operation op) {
    const attention_case& c = p.spec;
    const std::vector<Real> q(p.q.begin(), p.q.end()), k(p.k.begin(), p.k.end()),
        v(p.v.begin(), p.v.end());
    const Real scale = c.score.scale ? Real(*c.score.scale)
                                     : Real(1) / std::sqrt(Real((std::max)(c.d, index_t{1})));
    const Real cap = Real(c.score.softcap.value_or(0.0f));
    std::vector<Real> score(static_cast<std::size_t>(c.n_k)), share(score.size());
    std::vector<Real> sum_v(static_cast<std::size_t>(c.d_v));
    for (index_t h = 0; h < c.heads; ++h)
      for (index_t i = 0; i < c.n_q; ++i) {
        const index_t kv = h * c.kv_heads / c.heads;
        Real largest = -std::numeric_limits<Real>::infinity();
        for (index_t j = 0; j < c.n_k; ++j) {
          const auto at = static_cast<std::size_t>(j);
          share[at] = 0;
          if (!p.allowed(op, i, j)) continue;
          const Real* q_row = q.data() + (h * c.n_q + i) * c.d;
          const Real* k_row = k.data() + (kv * c.n_k + j) * c.d;
          Real dot = 0;
          for (index_t x = 0; x < c.d; ++x) dot += q_row[x] * k_row[x];
          score[at] = scale * dot;
          if (std::isfinite(score[at]))
            largest_score = (std::max)(largest_score, std::abs(static_cast<double>(score[at])));
          if (cap > 0) {
            score[at] = cap * std::tanh(score[at] / cap);
            largest_score = (std::max)(largest_score, std::abs(static_cast<double>(score[at])));
          }
          share[at] = 1;
          if (op == operation::soft_gate && !c.near_pair(i, j)) {
            const Real product = static_cast<Real>(p.gate_product(i, j));
            if (c.gate.kind == focus::gate_kind::weight)
              share[at] = product;
            else
              score[at] *= Real(1) / (1 + std::exp(-Real(c.gate.sharpness) * product));
          }
          largest = (std::max)(largest, score[at]);
        }
        Real sum = 0;
        sum_v.assign(sum_v.size(), Real(0));
        for (index_t j = 0; j < c.n_k; ++j) {
          const auto at = static_cast<std::size_t>(j);
          if (share[at] == 0) continue;
          const Real weight = share[at] * std::exp(score[at] - largest);
          const Real* v_row = v.data() + (kv * c.n_k + j) * c.d_v;
          sum += weight;
          for (index_t x = 0; x < c.d_v; ++x)
            sum_v[static_cast<std::size_t>(x)] += weight * v_row[x];
        }
        for (const Real x : sum_v) state.out.push_back(static_cast<double>(x / sum));
        state.lse.push_back(static_cast<double>(largest + std::log(sum)));
      }
  }
};

/// Compares values with the truth: as near as `tolerance` where it is finite, NaN or infinite where
/// it is.
inline std::string compare_values(const char* name, const std::vector<double>& got,
                                  const std::vector<double>& expected, double tolerance) {
  for (std::size_t at = 0; at < expected.size(); ++at) {
    const double e = expected[at], g = got[at];
    const bool good = std::isfinite(e) ? std::abs(g - e) <= tolerance
                      : e == -infinity ? g == e
                                       : !std::isfinite(g);
    if (good) continue;
    std::ostringstream text;
    text.precision(9);
    text << name << "[" << at << "]: expected " << e << ", got " << g << ", tolerance "
         << tolerance;
    return text.str();
  }
  return {};
}

/// The largest error of `got`, where both are finite.
inline double largest_error(const std::vector<double>& got, const std::vector<double>& expected) {
  double largest = 0;
  for (std::size_t at = 0; at < expected.size(); ++at)
    if (std::isfinite(expected[at]) && std::isfinite(got[at]))
      largest = (std::max)(largest, std::abs(got[at] - expected[at]));
  return largest;
}

inline double largest_magnitude(const std::vector<double>& values) {
  double largest = 0;
  for (const double x : values)
    if (std::isfinite(x)) largest = (std::max)(largest, std::abs(x));
  return largest;
}

/// Compares an answer with the truth; returns the first difference, or nothing.
///
/// The error may be twice that of the naive form, and a few epsilons at the magnitude of the
/// values: those of the storage type (`out_epsilon`, `lse_epsilon`), and those of the sums for
/// scores as large as they are here.
template <class Real>
std::string compare(const dense_problem& p, const attention_state& got, operation op,
                    double out_epsilon, double lse_epsilon) {
  const attention_state expected = truth(p, op);
  const naive_form<Real> naive(p, op);
  const double of_scores = 4 * epsilon<Real>() * (1 + naive.largest_score);
  const double out_tolerance = 2 * largest_error(naive.state.out, expected.out) +
                               (2 * out_epsilon + of_scores) * largest_magnitude(p.v);
  const double lse_tolerance = 2 * largest_error(naive.state.lse, expected.lse) + of_scores +
                               4 * lse_epsilon * (1 + largest_magnitude(expected.lse));
  const std::string lse = compare_values("lse", got.lse, expected.lse, lse_tolerance);
  if (!lse.empty()) return lse;
  const std::string out = compare_values("out", got.out, expected.out, out_tolerance);
  if (!out.empty()) return out;
  const auto d_v = static_cast<std::size_t>(p.spec.d_v);
  for (std::size_t row = 0; row < expected.lse.size(); ++row)
    for (std::size_t x = 0; expected.lse[row] == -infinity && x < d_v; ++x)
      if (got.out[row * d_v + x] != 0) return "an empty row is not zero";
  return {};
}

template <class T, class L>
FOCUS_NOINLINE std::string compare(const problem<T>& p, const answer<T, L>& a, operation op) {
  if (!a.guards_hold()) return "memory outside the extents was written";
  return compare<focus::accumulator_t<T>>(
      p.dense(), {a.out.values(), a.lse.values()}, op, epsilon<T>(),
      (std::max)(epsilon<L>(), epsilon<focus::accumulator_t<T>>()));
}

/// Calls f, which should throw invalid_argument with a text that names the argument; returns what
/// is wrong, or nothing.
template <class F>
std::string refusal(const std::string& argument, F&& f) {
  try {
    f();
  } catch (const focus::invalid_argument& e) {
    const std::string text = e.what();
    if (text.find(" " + argument + ":") != std::string::npos &&
        text.find("expected") != std::string::npos && text.find("got") != std::string::npos)
      return {};
    return "should name " + argument + ", but says: " + text;
  }
  return "should refuse " + argument + ", but did not";
}

}  // namespace oracle
