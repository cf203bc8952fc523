// Dense causal attention, or its gradient, by this library and by others, one thread each: one
// round whenever a line "round" comes in, so that another program can alternate its own work with
// it (compare.py). What goes out, with tabs between the fields:
//
//   limit NAME UNIT VALUE    what one core can do at best, measured here
//   row NAME ERROR           a peer, and its largest error against focus::reference
//   ready
//   NAME SECONDS             for each peer, for each "round"
//   end
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include <focus/focus.hpp>
#include <focus/reference.hpp>

#include "../command_line.hpp"
#include "../machine.hpp"
#include "../workload.hpp"
#include "blocked_attention.hpp"
#include "products.hpp"

namespace {

using bench::attention_inputs;
using bench::gradient_inputs;
using bench::index_t;

struct options {
  std::string pass = "forward", type = "fp32", check_file;
  index_t tokens = 1024, head_dim = 64, heads = 8;
};

options parse_options(int argc, char** argv) {
  options o;
  bench::command_line line("peers", "dense causal attention by several libraries, in rounds");
  line.add("--pass", &o.pass, "attention or its gradient", 0, {"forward", "backward"});
  line.add("--type", &o.type, "storage type", 0, {"fp32", "bf16"});
  line.add("--tokens", &o.tokens, "sequence length", 1);
  line.add("--head-dim", &o.head_dim, "head dimension", 1);
  line.add("--heads", &o.heads, "query, key and value heads", 1);
  line.add("--check-file", &o.check_file,
           "write Q, K, V and the reference's output (backward: dout, dQ, dK and dV) of the small "
           "problem on which peers are checked, [2, 600, head_dim] floats each, and end");
  line.parse(argc, argv);
  return o;
}

template <class T>
struct peer {
  std::string name;
  std::function<void(gradient_inputs<T>&)> run;
};

/// This library, with a workspace, as an engine would call it.
template <class T>
peer<T> make_focus() {
  return {"focus", [scratch = std::make_shared<focus::workspace>()](attention_inputs<T>& in) {
            focus::attention(in.q(), in.k(), in.v(), in.out(), focus::full_causal, {}, {},
                             focus::with_workspace(focus::serial_executor{}, *scratch));
          }};
}

/// Its gradient, after the forward pass.
template <class T>
peer<T> make_focus_backward() {
  return {"focus", [scratch = std::make_shared<focus::workspace>()](gradient_inputs<T>& in) {
            focus::attention_backward(in.q(), in.k(), in.v(), in.out(), in.lse(), in.dout(),
                                      in.dq(), in.dk(), in.dv(), focus::full_causal, {},
                                      focus::with_workspace(focus::serial_executor{}, *scratch));
          }};
}

/// Blocks around a library's products, of the sizes that are fastest at this length and dimension.
template <class Products>
peer<float> make_blocked(const std::string& library, const options& o) {
  attention_inputs<float> one_head(1, o.tokens, o.head_dim);
  bench::block_sizes best{};
  double least = HUGE_VAL;
  for (const index_t queries : {64, 128, 256})
    for (const index_t keys : {128, 256, 512}) {
      bench::blocked_attention<Products> attend({queries, keys});
      for (int attempt = 0; attempt < 3; ++attempt) {
        const bench::stopwatch time(true);
        attend(one_head.q(), one_head.k(), one_head.v(), one_head.out());
        if (time.seconds() < least) least = time.seconds(), best = {queries, keys};
      }
    }
  const std::string sizes = std::to_string(best.queries) + " x " + std::to_string(best.keys);
  return {library + ", blocks " + sizes,
          [attend = bench::blocked_attention<Products>(best)](attention_inputs<float>& in) mutable {
            attend(in.q(), in.k(), in.v(), in.out());
          }};
}

template <class T>
std::vector<peer<T>> make_peers(const options&) {
  return {make_focus<T>()};
}
template <>
std::vector<peer<float>> make_peers(const options& o) {
  std::vector<peer<float>> peers = {make_focus<float>()};
#if FOCUS_BENCH_OPENBLAS
  openblas_set_num_threads(1);
  peers.push_back(make_blocked<bench::openblas_products>(
      std::string("OpenBLAS ") + openblas_get_corename(), o));
#endif
#if FOCUS_BENCH_EIGEN
  peers.push_back(make_blocked<bench::eigen_products>("Eigen", o));
#endif
#if FOCUS_BENCH_ONEDNN
  peers.push_back(make_blocked<bench::onednn_products>("oneDNN", o));
#endif
  return peers;
}

/// What the backward pass needs of the forward pass.
template <class T>
void make_state(gradient_inputs<T>& in) {
  focus::attention(in.q(), in.k(), in.v(), in.out(), focus::full_causal, {}, in.lse());
}

/// A small problem, with blocks that are not full, and what focus::reference makes of it.
template <class T>
class check {
 public:
  check(bool backward, index_t head_dim) : backward_(backward), in_(heads, tokens, head_dim) {
    focus::reference::attention(in_.q(), in_.k(), in_.v(), in_.out(), focus::full_causal, {},
                                in_.lse());
    if (backward)
      focus::reference::attention_backward(in_.q(), in_.k(), in_.v(), in_.out(), in_.lse(),
                                           in_.dout(), in_.dq(), in_.dk(), in_.dv());
    for (const focus::tensor_view<T, 3>& result : results()) expected_.push_back(widened(result));
  }

  /// The largest error. Inputs and outputs are of order 1: a wrong mask or scale shows in the first
  /// digits, and is refused.
  double error_of(const peer<T>& candidate) {
    constexpr double most = sizeof(T) == 4 ? 1e-4 : 3e-2;
    for (const focus::tensor_view<T, 3>& result : results())
      std::fill(result.data(), result.data() + result.size(),
                focus::scalar_traits<T>::from_accumulator(std::nanf("")));
    candidate.run(in_);
    double error = 0;
    for (std::size_t r = 0; r < expected_.size(); ++r) {
      const std::vector<float> got = widened(results()[r]);
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double off =
            std::abs(static_cast<double>(got[i]) - static_cast<double>(expected_[r][i]));
        if (!(off <= most)) throw std::runtime_error(candidate.name + " computes something else");
        error = (std::max)(error, off);
      }
    }
    return error;
  }

  void write(const std::string& path) const {
    std::ofstream file(path, std::ios::binary);
    std::vector<std::vector<float>> parts = {widened(in_.q()), widened(in_.k()), widened(in_.v())};
    if (backward_) parts.push_back(widened(in_.dout()));
    parts.insert(parts.end(), expected_.begin(), expected_.end());
    for (const auto& part : parts)
      file.write(reinterpret_cast<const char*>(part.data()),
                 static_cast<std::streamsize>(part.size() * sizeof(float)));
    if (!file.flush()) throw std::runtime_error(path + " cannot be written");
  }

 private:
  static constexpr index_t heads = 2, tokens = 600;

  template <class View>
  static std::vector<float> widened(const View& dense) {
    std::vector<float> values;
    for (index_t i = 0; i < dense.size(); ++i)
      values.push_back(focus::scalar_traits<T>::to_accumulator(dense.data()[i]));
    return values;
  }

  std::vector<focus::tensor_view<T, 3>> results() {
    if (backward_) return {in_.dq(), in_.dk(), in_.dv()};
    return {in_.out()};
  }

  bool backward_;
  gradient_inputs<T> in_;
  std::vector<std::vector<float>> expected_;
};

void print_limits() {
  constexpr double giga = 1e-9;
  const auto print = [](const char* name, const char* unit, double value) {
    if (value > 0) std::printf("limit\t%s\t%s\t%.1f\n", name, unit, giga * value);
  };
  print("FMA peak, fp32", "GFLOP/s", bench::measure_fma_peak<float>());
  print("AMX peak, bf16", "GFLOP/s", bench::measure_amx_peak());
  print("exp2 in cache, fp32", "G/s", bench::measure_exp_rate());
  print("memory, one core reading", "GB/s", bench::measure_bandwidth());
}

template <class T>
void run(const options& o) {
  const bool backward = o.pass == "backward";
  check<T> small(backward, o.head_dim);
  if (!o.check_file.empty()) return small.write(o.check_file);

  print_limits();
  const std::vector<peer<T>> peers =
      backward ? std::vector{make_focus_backward<T>()} : make_peers<T>(o);
  for (const peer<T>& p : peers) std::printf("row\t%s\t%.1e\n", p.name.c_str(), small.error_of(p));
  gradient_inputs<T> in(o.heads, o.tokens, o.head_dim);
  if (backward) make_state(in);
  std::printf("ready\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line) && line == "round";) {
    for (const peer<T>& p : peers) {
      const bench::stopwatch time(true);
      p.run(in);
      std::printf("%s\t%.6f\n", p.name.c_str(), time.seconds());
    }
    std::printf("end\n");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const options o = parse_options(argc, argv);
#if defined(_OPENMP)
  omp_set_num_threads(1);  // oneDNN's threads
#endif
  try {
    o.type == "bf16" ? run<focus::bfloat16>(o) : run<float>(o);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "peers: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
