// Sparse against dense attention: both in turn in each round, medians over the rounds, so that a
// machine that slows down slows both. One thread (processor time), fp32, causal; the plan is built
// anew in each call.
//
//   speedup [--tokens 1024,4096,...] [--groups 4,8] [--top-k 1,2] [--head-dim 64] [--heads 8]
//           [--window 128] [--sinks 1] [--rounds 7]
//
//   pairs       computed / causal
//   plan        share of the sparse time that goes into building the plan
//   speedup     dense time / sparse time
//   efficiency  speedup x pairs: 1 is a speedup equal to the share of work saved
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <focus/focus.hpp>

#include "allocations.hpp"
#include "machine.hpp"
#include "workload.hpp"

namespace {

using focus::index_t;

std::vector<index_t> parse_list(const std::string& text) {
  std::vector<index_t> values;
  const char* at = text.c_str();
  while (*at != '\0') {
    char* end = nullptr;
    values.push_back(std::strtoll(at, &end, 10));
    if (end == at || values.back() < 0) {
      std::fprintf(stderr, "speedup: not a list of numbers: %s\n", text.c_str());
      std::exit(EXIT_FAILURE);
    }
    at = *end == ',' ? end + 1 : end;
  }
  return values;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct setting {
  index_t tokens, heads, head_dim, groups, top_k, window, sinks, rounds;
};

void measure(const setting& s, double peak) {
  bench::attention_inputs in(s.heads, s.tokens, s.head_dim);
  const auto masks =
      bench::balanced_masks(s.tokens, static_cast<int>(s.groups), static_cast<int>(s.top_k));
  const focus::pattern_options pattern{.window = s.window, .sink_tokens = s.sinks};
  focus::workspace scratch;
  focus::serial_executor serial;
  auto exec = focus::with_workspace(serial, scratch);
  auto plan = focus::make_routing_plan(masks, pattern);

  std::vector<double> dense, sparse, planning, speedup, plan_share;
  long allocations = 0;
  for (index_t round = -1; round < s.rounds; ++round) {  // one to warm up
    if (round == 0)
      dense.clear(), sparse.clear(), planning.clear(), speedup.clear(), plan_share.clear();
    const long before = bench::allocations;
    double start = bench::cpu_seconds();
    focus::attention(in.q(), in.k(), in.v(), in.out(), focus::full_causal, {}, {}, exec);
    const double dense_seconds = bench::cpu_seconds() - start;
    start = bench::cpu_seconds();
    plan.rebuild(masks, pattern);
    const double plan_seconds = bench::cpu_seconds() - start;
    focus::sparse_attention(in.q(), in.k(), in.v(), plan, in.out(), {}, {}, exec);
    const double sparse_seconds = bench::cpu_seconds() - start;
    allocations = bench::allocations - before;
    dense.push_back(dense_seconds), sparse.push_back(sparse_seconds),
        planning.push_back(plan_seconds);
    speedup.push_back(dense_seconds / sparse_seconds);
    plan_share.push_back(plan_seconds / sparse_seconds);
  }
  const double causal = bench::causal_pairs(s.tokens);
  const double pairs = static_cast<double>(plan.allowed_pairs()) / causal;
  const double dense_flops =
      static_cast<double>(s.heads) * bench::flops_per_pair(s.head_dim) * causal;
  std::printf("%8lld %4lld %4lld %7.1f%% %10.2f %9.1f%% %10.2f %7.2f%% %8.2fx %10.2f %11ld\n",
              static_cast<long long>(s.tokens), static_cast<long long>(s.groups),
              static_cast<long long>(s.top_k), 100 * pairs, 1e3 * median(dense),
              100 * dense_flops / median(dense) / peak, 1e3 * median(sparse),
              100 * median(plan_share), median(speedup), median(speedup) * pairs, allocations);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> options{{"--tokens", "1024,2048,4096,8192"},
                                             {"--groups", "4,8"},
                                             {"--top-k", "1"},
                                             {"--head-dim", "64"},
                                             {"--heads", "8"},
                                             {"--window", "128"},
                                             {"--sinks", "1"},
                                             {"--rounds", "7"}};
  for (int a = 1; a < argc; a += 2) {
    if (!options.contains(argv[a]) || a + 1 == argc) {
      std::fprintf(stderr, "speedup: unknown option or no value: %s\n", argv[a]);
      return EXIT_FAILURE;
    }
    options[argv[a]] = argv[a + 1];
  }
  const auto number = [&](const char* name) {
    const std::vector<index_t> values = parse_list(options[name]);
    return values.empty() ? index_t{0} : values.front();
  };

  const double peak = bench::measure_fma_peak<float>();
  std::printf(
      "%d float lanes, FMA peak of one core %.1f GFLOP/s; %s heads, head_dim %s, window %s, sinks "
      "%s, %s rounds\n",
      focus::detail::vec<float>::width, peak / 1e9, options["--heads"].c_str(),
      options["--head-dim"].c_str(), options["--window"].c_str(), options["--sinks"].c_str(),
      options["--rounds"].c_str());
  std::printf("%8s %4s %4s %8s %10s %10s %10s %8s %9s %10s %11s\n", "tokens", "K", "k", "pairs",
              "dense ms", "of peak", "sparse ms", "plan", "speedup", "efficiency", "allocations");
  for (index_t tokens : parse_list(options["--tokens"]))
    for (index_t groups : parse_list(options["--groups"]))
      for (index_t top_k : parse_list(options["--top-k"]))
        measure({tokens, number("--heads"), number("--head-dim"), groups, top_k, number("--window"),
                 number("--sinks"), number("--rounds")},
                peak);
}
