// One case of attention, of whatever shape and pattern the bytes say, against focus::reference:
// forward and backward, with the checks and the tolerances of the tests.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "../executors.hpp"
#include "../gradient_checks.hpp"
#include "../guarded_tensor.hpp"
#include "../oracle.hpp"
#include "focus/focus.hpp"

namespace shapes {

using oracle::attention_case;
using oracle::operation;

/// Bytes one after another; zeros behind the last.
class byte_reader {
 public:
  byte_reader(const std::uint8_t* data, std::size_t size) : next_(data), end_(data + size) {}

  int byte() { return next_ == end_ ? 0 : *next_++; }
  /// In [0, n), for n of at most 256.
  int below(int n) { return byte() % n; }
  bool flag() { return below(2) == 1; }
  template <class T, std::size_t N>
  T one_of(const std::array<T, N>& choices) {
    return choices[static_cast<std::size_t>(below(static_cast<int>(N)))];
  }

 private:
  const std::uint8_t *next_, *end_;
};

/// A number that is not finite, in one element of an input.
struct poison {
  int tensor = 0;  // q, k, v
  std::uint64_t place = 0;
  double value = 0;
};

struct fuzzed_case {
  attention_case spec;
  operation op = operation::attention;
  bool backward = false, lent_workspace = false;
  int threads = 1, poisons = 0;
  std::array<poison, 2> poisoned;
};

/// A length: mostly short, now and then at the edge of a tile.
inline oracle::index_t length(byte_reader& bytes) {
  constexpr std::array<oracle::index_t, 12> edges{63, 64, 65, 59,  60,  61,
                                                  95, 96, 97, 127, 128, 129};
  return bytes.below(6) == 5 ? bytes.one_of(edges) : bytes.below(40);
}
inline oracle::index_t width(byte_reader& bytes) {
  constexpr std::array<oracle::index_t, 8> wide{48, 63, 64, 65, 80, 96, 127, 128};
  return bytes.below(6) == 5 ? bytes.one_of(wide) : 1 + bytes.below(36);
}

inline fuzzed_case decode(const std::uint8_t* data, std::size_t size) {
  byte_reader bytes(data, size);
  fuzzed_case f;
  attention_case& c = f.spec;
  f.op = bytes.one_of(std::array{operation::attention, operation::sparse, operation::soft_gate});
  f.backward = bytes.below(3) == 2;
  f.threads = 1 + bytes.below(3);
  f.lent_workspace = bytes.flag();
  c.type = bytes.one_of(std::array{oracle::storage::float32, oracle::storage::float64,
                                   oracle::storage::bfloat16, oracle::storage::float16});
  c.memory = bytes.one_of(std::array{oracle::layout::heads_first, oracle::layout::tokens_first,
                                     oracle::layout::padded, oracle::layout::misaligned});
  c.kv_heads = 1 + bytes.below(3);
  c.heads = c.kv_heads * (1 + bytes.below(3));
  c.n_q = length(bytes);
  c.n_k = bytes.flag() ? c.n_q : length(bytes);
  c.d = width(bytes);
  c.d_v = bytes.flag() ? c.d : width(bytes);

  c.pattern.causal = bytes.flag();
  c.pattern.window = bytes.one_of(std::array<oracle::index_t, 8>{focus::no_window, 0, 1, 3, 8, 20,
                                                                 60, focus::unlimited_window});
  c.pattern.sink_tokens = bytes.flag() ? 0 : bytes.below(70);
  if (bytes.below(3) == 2) c.pattern.query_offset = bytes.below(200) - 100;
  if (bytes.below(3) == 2) c.score.scale = bytes.one_of(std::array{0.0f, -0.5f, 0.03f, 1.0f, 3.0f});
  if (bytes.below(3) == 2)
    c.score.softcap = bytes.one_of(std::array{0.0f, 0.5f, 5.0f, 50.0f, 1e30f, 1e-30f});

  constexpr std::array groupings{oracle::grouping::balanced,    oracle::grouping::runs,
                                 oracle::grouping::skewed,      oracle::grouping::one_group,
                                 oracle::grouping::all_bits,    oracle::grouping::zero,
                                 oracle::grouping::empty_group, oracle::grouping::mixed,
                                 oracle::grouping::scattered,   oracle::grouping::drawn};
  c.groups = bytes.one_of(groupings);
  c.group_count = bytes.one_of(std::array{1, 2, 3, 4, 7, 8, 16, 33, 63, 64});
  c.top_k = 1 + bytes.below((std::min)(c.group_count, 4));
  c.separate_masks = bytes.flag();
  c.one_hot_assignment = bytes.flag();
  c.gate.kind = bytes.flag() ? focus::gate_kind::weight : focus::gate_kind::score;
  c.gate.sharpness = bytes.one_of(std::array{0.0f, 1.0f, 2.0f, 10.0f});
  c.query_magnitude = bytes.one_of(std::array{1.0, 1.0, 0.01, 4.0});
  c.seed = 1 + static_cast<std::uint64_t>(bytes.byte() + 256 * bytes.byte());

  f.poisons = f.backward ? 0 : (std::max)(0, bytes.below(5) - 2);
  for (int p = 0; p < f.poisons; ++p) {
    poison& x = f.poisoned[static_cast<std::size_t>(p)];
    x.tensor = bytes.below(3);
    x.place = static_cast<std::uint64_t>(bytes.byte() + 256 * bytes.byte());
    x.value = bytes.one_of(std::array{oracle::not_a_number, oracle::infinity, -oracle::infinity});
    // In v it is the infinity that need not keep its sign: times a weight that underflows it is
    // NaN.
    if (x.tensor == 2) x.value = std::abs(x.value);
  }
  if (f.backward) {
    // What is out of a float's reach: the slope of a cap where it is a step, and the gradient of an
    // assignment whose score is far above all that the row attends to.
    if (c.score.softcap && *c.score.softcap < 0.1f) c.score.softcap = 0.1f;
    if (f.op == operation::soft_gate && c.gate.kind == focus::gate_kind::weight) {
      c.query_magnitude = (std::min)(c.query_magnitude, 1.0);
      if (c.score.scale) *c.score.scale = (std::min)(*c.score.scale, 0.1);
    }
  }
  return f;
}

inline std::string describe(const fuzzed_case& f) {
  constexpr std::array names{"attention", "sparse_attention", "soft_gate_attention"};
  std::string text = names[static_cast<std::size_t>(f.op)];
  text += (f.backward ? "_backward, threads " : ", threads ") + std::to_string(f.threads) +
          (f.lent_workspace ? ", workspace, " : ", ") + oracle::describe(f.spec);
  for (int p = 0; p < f.poisons; ++p) {
    const poison& x = f.poisoned[static_cast<std::size_t>(p)];
    text += ", " + std::to_string(x.value) + " in " + "qkv"[x.tensor] + " at " +
            std::to_string(x.place);
  }
  return text;
}

/// Calls f with the executor: of so many threads, with memory that earlier cases have used or none.
template <class F>
void with_executor(const fuzzed_case& fuzzed, F&& f) {
  static focus::workspace used;
  const oracle::thread_executor threads(fuzzed.threads);
  if (fuzzed.lent_workspace)
    f(focus::with_workspace(threads, used));
  else
    f(threads);
}

template <class T>
void spoil(const poison& x, const focus::tensor_view<T, 3>& view) {
  const auto size = static_cast<std::uint64_t>(view.extent(0) * view.extent(1) * view.extent(2));
  if (size == 0) return;
  const auto at = static_cast<oracle::index_t>(x.place % size), row = at / view.extent(2);
  view(row / view.extent(1), row % view.extent(1), at % view.extent(2)) =
      oracle::narrowed<T>(x.value);
}

/// What is wrong with the library's answer, or nothing.
template <class T>
std::string forward_fault(const fuzzed_case& f) {
  oracle::problem<T> p(f.spec);
  for (int r = 0; r < f.poisons; ++r) {
    const poison& x = f.poisoned[static_cast<std::size_t>(r)];
    spoil(x, x.tensor == 0 ? p.q.view() : x.tensor == 1 ? p.k.view() : p.v.view());
  }
  const oracle::call_inputs<T> in = p.inputs();
  const auto solve = [&](const auto& exec) {
    oracle::answer<T> a(f.spec);
    if (f.op == operation::attention)
      focus::attention(in.q, in.k, in.v, a.out.view(), in.pattern, in.score, a.lse.view(), exec);
    else if (f.op == operation::sparse)
      focus::sparse_attention(in.q, in.k, in.v,
                              focus::make_routing_plan(in.query_masks, in.key_masks, in.pattern),
                              a.out.view(), in.score, a.lse.view(), exec);
    else
      focus::soft_gate_attention(in.q, in.k, in.v, in.query_assignment, in.key_assignment, in.gate,
                                 a.out.view(), in.pattern, in.score, a.lse.view(), exec);
    return a;
  };
  std::string wrong;
  with_executor(f, [&](const auto& exec) {
    const oracle::answer<T> a = solve(exec);
    wrong = oracle::compare(p, a, f.op);
    if (wrong.empty() && f.threads > 1 && !solve(oracle::thread_executor(1)).same_bits(a))
      wrong = "other bits than on one thread";
  });
  return wrong;
}

template <operation Op, class T>
std::string backward_fault(const fuzzed_case& f) {
  oracle::gradient_problem<T> p(f.spec);
  p.attend(Op);
  const oracle::gradients<T> g = oracle::differentiate<Op>(p, f.threads);
  std::string wrong = oracle::compare_gradients<Op>(p, g);
  if (wrong.empty() && f.threads > 1 && !oracle::differentiate<Op>(p).same_bits(g))
    wrong = "other bits than on one thread";
  return wrong;
}

/// What is wrong with the case that the bytes describe, or nothing; `what` says which it was.
inline std::string fault(const std::uint8_t* data, std::size_t size, std::string& what) {
  const fuzzed_case f = decode(data, size);
  what = describe(f);
  const auto check = [&]<class T>() -> std::string {
    if (!f.backward) return forward_fault<T>(f);
    if (f.op == operation::attention) return backward_fault<operation::attention, T>(f);
    if (f.op == operation::sparse) return backward_fault<operation::sparse, T>(f);
    return backward_fault<operation::soft_gate, T>(f);
  };
  if (f.spec.type == oracle::storage::float32) return check.template operator()<float>();
  if (f.spec.type == oracle::storage::float64) return check.template operator()<double>();
  if (f.spec.type == oracle::storage::bfloat16) return check.template operator()<focus::bfloat16>();
  return check.template operator()<focus::float16>();
}

}  // namespace shapes
