// The paper's table: Focus attention against dense attention, both by this library, routing and
// plan included. `speedup --help` lists the options.
//
//   dense ms     focus::attention, causal; of peak: its share of the FMA peak measured in this run
//   route ms     hidden states to masks
//   plan ms      masks to plan, built anew in each call
//   sparse ms    focus::sparse_attention
//   speedup      dense / (route + plan + sparse), the median of the rounds' ratios
//   pairs        computed / causal;  ideal: its inverse;  effic.: speedup / ideal
//   allocs       in one call, once warm, with a workspace
//   dense MB, sparse MB   the most scratch memory that a first call holds, the plan included
#include <bit>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include "comparison.hpp"
#include "machine.hpp"
#include "mask_file.hpp"
#include "no_slower.hpp"
#include "speedup_options.hpp"
#include "speedup_table.hpp"

namespace {

using bench::index_t;

/// Of the masks of real text those of the first `tokens` tokens.
bench::sparse_case text_case(const bench::layer_masks& layer, index_t tokens,
                             const focus::pattern_options& pattern) {
  const auto first = [tokens](const bench::mask_list& masks) {
    return bench::mask_list(masks.begin(), masks.begin() + tokens);
  };
  focus::group_mask all = 0;
  for (const focus::group_mask m : layer.query) all |= m;
  const bool same = layer.query == layer.key;
  return {.masks = layer.name,
          .groups = static_cast<index_t>(std::bit_width(all)),
          .top_k = std::popcount(layer.query.front()),
          .query = first(layer.query),
          .key = same ? bench::mask_list{} : first(layer.key),
          .pattern = pattern};
}

class program {
 public:
  explicit program(const bench::speedup_options& options) : options_(options) {
    if (!options.masks_file.empty()) layers_ = bench::mask_file(options.masks_file).read();
  }

  void run() const {
    std::printf(
        "%d float lanes, FMA peak of one core %.1f GFLOP/s fp32, %.1f fp64; %lld heads, "
        "%lld kv heads, %lld threads, window %lld, sinks %lld\n",
        focus::detail::vec<float>::width, single_peak_ / 1e9, double_peak_ / 1e9,
        static_cast<long long>(options_.heads), static_cast<long long>(options_.kv_heads),
        static_cast<long long>(options_.threads), static_cast<long long>(options_.window),
        static_cast<long long>(options_.sinks));
    options_.no_slower ? print_worst() : print_table();
  }

 private:
  void print_table() const {
    bench::speedup_table table(options_.csv);
    for (const std::string& type : options_.types)
      for (const index_t head_dim : options_.head_dims)
        for (const index_t tokens : options_.tokens) {
          const bench::attention_setting s = setting(tokens, head_dim);
          const auto cases = cases_of(tokens);
          if (cases.empty() && !layers_.empty())
            std::fprintf(stderr, "speedup: %s has no %lld tokens in one window\n",
                         options_.masks_file.c_str(), static_cast<long long>(tokens));
          const auto results = compare(type, s, cases);
          for (std::size_t c = 0; c < results.size(); ++c)
            table.add(s, type, cases[c], results[c], type == "fp64" ? double_peak_ : single_peak_);
        }
  }

  /// At the lengths asked for that are not small, and at small ones.
  void print_worst() const {
    for (const std::string& type : options_.types)
      for (const index_t head_dim : options_.head_dims) {
        bench::number_list lengths = {1, 2, 5, 16, 31, 64, 100, 128, 129, 200, 256};
        for (const index_t tokens : options_.tokens)
          if (tokens > lengths.back() && tokens <= 16384) lengths.push_back(tokens);
        bench::worst_ratios worst;
        for (const index_t tokens : lengths) {
          const bench::attention_setting s = setting(tokens, head_dim);
          const auto cases = bench::hard_patterns(tokens, pattern());
          const auto results = compare(type, s, cases);
          for (std::size_t c = 0; c < results.size(); ++c) worst.add(s, cases[c], results[c]);
        }
        std::printf("\n%s, head_dim %lld: time / time of dense\n", type.c_str(),
                    static_cast<long long>(head_dim));
        worst.print();
      }
  }

  bench::attention_setting setting(index_t tokens, index_t head_dim) const {
    return {.tokens = tokens,
            .heads = options_.heads,
            .kv_heads = options_.kv_heads,
            .head_dim = head_dim,
            .threads = options_.threads,
            .d_model = options_.d_model > 0 ? options_.d_model : options_.heads * head_dim,
            .d_group = 16};
  }

  focus::pattern_options pattern() const {
    return {.window = options_.window, .sink_tokens = options_.sinks};
  }

  std::vector<bench::sparse_case> cases_of(index_t tokens) const {
    std::vector<bench::sparse_case> cases;
    for (const bench::layer_masks& layer : layers_)
      if (std::ssize(layer.query) >= tokens) cases.push_back(text_case(layer, tokens, pattern()));
    if (!layers_.empty()) return cases;
    for (const std::string& masks : options_.masks)
      for (const index_t groups : options_.groups)
        for (const index_t k : options_.top_k) {
          if (k > groups) continue;
          const auto make = masks == "runs"     ? bench::run_masks
                            : masks == "skewed" ? bench::skewed_masks
                                                : bench::balanced_masks;
          cases.push_back({masks, groups, k, make(tokens, groups, k), {}, pattern()});
        }
    return cases;
  }

  std::vector<bench::comparison> compare(const std::string& type, const bench::attention_setting& s,
                                         const std::vector<bench::sparse_case>& cases) const {
    const auto measure = [&]<class T>(T) {
      return bench::compare_with_dense<T>(s, cases, options_.rounds,
                                          static_cast<double>(options_.seconds));
    };
    if (cases.empty()) return {};
    if (type == "fp64") return measure(double{});
    if (type == "bf16") return measure(focus::bfloat16{});
    if (type == "f16") return measure(focus::float16{});
    return measure(float{});
  }

  const bench::speedup_options& options_;
  std::vector<bench::layer_masks> layers_;
  double single_peak_ = bench::measure_fma_peak<float>();
  double double_peak_ = bench::measure_fma_peak<double>();
};

}  // namespace

int main(int argc, char** argv) {
  const bench::speedup_options options = bench::parse_speedup_options(argc, argv);
  try {
    program(options).run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "speedup: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
