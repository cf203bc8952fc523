// Dense causal attention by this library and by others, one thread each: one round whenever a line
// "round" comes in, so that another program can alternate its own work with it (compare.py). What
// goes out, with tabs between the fields:
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
using bench::index_t;

struct options {
  std::string type = "fp32", check_file;
  index_t tokens = 1024, head_dim = 64, heads = 8;
};

options parse_options(int argc, char** argv) {
  options o;
  bench::command_line line("peers", "dense causal attention by several libraries, in rounds");
  line.add("--type", &o.type, "storage type", 0, {"fp32", "bf16"});
  line.add("--tokens", &o.tokens, "sequence length", 1);
  line.add("--head-dim", &o.head_dim, "head dimension", 1);
  line.add("--heads", &o.heads, "query, key and value heads", 1);
  line.add("--check-file", &o.check_file,
           "write Q, K, V and the reference's output of the small problem on which peers are "
           "checked, [2, 600, head_dim] floats each, and end");
  line.parse(argc, argv);
  return o;
}

template <class T>
struct peer {
  std::string name;
  std::function<void(attention_inputs<T>&)> attend;
};

/// This library, with a workspace, as an engine would call it.
template <class T>
peer<T> make_focus() {
  return {"focus", [scratch = std::make_shared<focus::workspace>()](attention_inputs<T>& in) {
            focus::attention(in.q(), in.k(), in.v(), in.out(), focus::full_causal, {}, {},
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

/// A small problem, with blocks that are not full, and what focus::reference makes of it.
template <class T>
class check {
 public:
  explicit check(index_t head_dim) : in_(heads, tokens, head_dim) {
    focus::reference::attention(in_.q(), in_.k(), in_.v(), in_.out());
    expected_ = widened(in_.out());
  }

  /// The largest error. Inputs and outputs are of order 1: a wrong mask or scale shows in the first
  /// digits, and is refused.
  double error_of(const peer<T>& candidate) {
    constexpr double most = sizeof(T) == 4 ? 1e-4 : 3e-2;
    focus::tensor_view<T, 3> out = in_.out();
    std::fill(out.data(), out.data() + out.size(),
              focus::scalar_traits<T>::from_accumulator(std::nanf("")));
    candidate.attend(in_);
    const std::vector<float> got = widened(out);
    double error = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double off = std::abs(static_cast<double>(got[i]) - static_cast<double>(expected_[i]));
      if (!(off <= most)) throw std::runtime_error(candidate.name + " computes something else");
      error = (std::max)(error, off);
    }
    return error;
  }

  void write(const std::string& path) const {
    std::ofstream file(path, std::ios::binary);
    for (const auto& part : {widened(in_.q()), widened(in_.k()), widened(in_.v()), expected_})
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

  attention_inputs<T> in_;
  std::vector<float> expected_;
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
  check<T> small(o.head_dim);
  if (!o.check_file.empty()) return small.write(o.check_file);

  print_limits();
  const std::vector<peer<T>> peers = make_peers<T>(o);
  for (const peer<T>& p : peers) std::printf("row\t%s\t%.1e\n", p.name.c_str(), small.error_of(p));
  attention_inputs<T> in(o.heads, o.tokens, o.head_dim);
  std::printf("ready\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line) && line == "round";) {
    for (const peer<T>& p : peers) {
      const bench::stopwatch time(true);
      p.attend(in);
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
