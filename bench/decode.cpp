// Steps of generation over a cache, all rows in turn, against the rate at which the same threads
// read memory. `decode --help` lists the options.
//
//   step ms     the median of the rounds
//   tokens/s    queries x sequences / step, of one layer
//   GB/s        bytes of K and V that are allowed, once for each kv head, a second
//   of memory   their share of the read rate, median of the rounds (rows that the caches hold may
//               have more)
//   of dense    the dense row's time / this row's
//   memory      of the cache / of its K and V
//   allocs      in one step, once warm, with a workspace
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <focus/parallel.hpp>

#include "allocations.hpp"
#include "decode_options.hpp"
#include "decode_setting.hpp"
#include "machine.hpp"
#include "timing.hpp"

namespace {

using bench::index_t;

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// One row of the table.
struct row {
  std::string type;
  index_t groups = 0;
  std::function<void()> step;
  double read_bytes = 0, memory = 1;
  long allocations = 0;
  std::vector<double> seconds, share;
};

class program {
 public:
  explicit program(const bench::decode_options& options) : options_(options) {}

  void run() {
    std::printf(
        "%lld:%lld heads, %lld sequences, %lld queries, %lld threads, window %lld, "
        "sinks %lld\n",
        number(options_.heads), number(options_.kv_heads), number(options_.sequences),
        number(options_.queries), number(options_.threads), number(options_.window),
        number(options_.sinks));
#if defined(_OPENMP)
    if (options_.threads > 1) {
      focus::openmp_executor team(static_cast<int>(options_.threads));
      return run_on(team);
    }
#endif
    focus::serial_executor serial;
    run_on(serial);
  }

 private:
  static long long number(index_t x) {
    return static_cast<long long>(x);
  }

  template <class Exec>
  void run_on(Exec& exec) {
    for (const index_t head_dim : options_.head_dims)
      for (const index_t tokens : options_.tokens) measure(exec, tokens, head_dim);
  }

  template <class Exec>
  void measure(Exec& exec, index_t tokens, index_t head_dim) {
    std::vector<row> rows;
    bench::number_list patterns = options_.groups;
    patterns.insert(patterns.begin(), 0);
    for (const std::string& type : options_.types)
      for (const index_t groups : patterns) {
        const bench::decode_setting s{.tokens = tokens,
                                      .heads = options_.heads,
                                      .kv_heads = options_.kv_heads,
                                      .head_dim = head_dim,
                                      .queries = (std::min)(options_.queries, tokens),
                                      .sequences = options_.sequences,
                                      .groups = groups,
                                      .window = options_.window,
                                      .sinks = options_.sinks};
        if (type == "f32") add<float>(exec, rows, s, type);
        if (type == "bf16") add<focus::bfloat16>(exec, rows, s, type);
        if (type == "f16") add<focus::float16>(exec, rows, s, type);
        if (type == "int8") add<std::int8_t>(exec, rows, s, type);
      }
    std::vector<double> rates;
    for (index_t round = 0; round < options_.rounds; ++round) {
      rates.push_back(bench::measure_bandwidth(exec));
      for (row& r : rows) {
        constexpr double at_least = 0.02;  // seconds
        long calls = 0;
        double seconds = 0;
        for (; seconds < at_least; ++calls) seconds += seconds_of(r.step);
        r.seconds.push_back(seconds / static_cast<double>(calls));
        r.share.push_back(r.read_bytes / r.seconds.back() / rates.back());
      }
    }
    std::printf(
        "\n%lld tokens, head_dim %lld; memory is read at %.1f GB/s (%.1f to %.1f)\n"
        "%-6s %6s %10s %10s %8s %10s %9s %7s %7s\n",
        number(tokens), number(head_dim), bench::median(rates) / 1e9,
        *std::min_element(rates.begin(), rates.end()) / 1e9,
        *std::max_element(rates.begin(), rates.end()) / 1e9, "cache", "K", "step ms", "tokens/s",
        "GB/s", "of memory", "of dense", "memory", "allocs");
    double dense = 0;
    for (const row& r : rows) {
      const double step = bench::median(r.seconds);
      if (r.groups == 0) dense = step;
      std::printf("%-6s %6s %10.4f %10.0f %8.1f %9.0f%% %8.2fx %7.3f %7ld\n", r.type.c_str(),
                  r.groups == 0 ? "dense" : std::to_string(r.groups).c_str(), step * 1e3,
                  static_cast<double>(options_.queries * options_.sequences) / step,
                  r.read_bytes / step / 1e9, 100 * bench::median(r.share), dense / step, r.memory,
                  r.allocations);
    }
    std::fflush(stdout);
  }

  template <class T, class Exec>
  void add(Exec& exec, std::vector<row>& rows, const bench::decode_setting& s,
           const std::string& type) {
    const double bytes = s.bytes(sizeof(T));
    if (bytes * 1.1 > static_cast<double>(options_.gigabytes) * 1e9) {
      std::printf("%s, K = %lld, %lld tokens: left out, %.1f GB\n", type.c_str(), number(s.groups),
                  number(s.tokens), bytes / 1e9);
      return;
    }
    const auto work = std::make_shared<bench::decode_workload<T>>(s);
    const auto scratch = std::make_shared<focus::workspace>();
    row r;
    r.type = type;
    r.groups = s.groups;
    r.step = [work, scratch, &exec] {
      work->step(focus::with_workspace(exec, *scratch));
    };
    r.read_bytes = work->bytes_read();
    r.memory = work->cache_bytes() / bytes;
    r.step();
    const long before = bench::allocations;
    r.step();
    r.allocations = bench::allocations - before;
    rows.push_back(std::move(r));
  }

  const bench::decode_options& options_;
};

}  // namespace

int main(int argc, char** argv) {
  const bench::decode_options options = bench::parse_decode_options(argc, argv);
  program(options).run();
}
