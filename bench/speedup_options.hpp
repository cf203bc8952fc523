// What `speedup` can be asked to do.
#pragma once

#include <string>
#include <vector>

#include "command_line.hpp"

namespace bench {

struct speedup_options {
  number_list tokens = {1024, 4096, 16384, 65536};
  bool long_run = false;
  number_list groups = {4, 8, 16}, top_k = {1, 2};
  word_list masks = {"balanced"};
  std::string masks_file;
  word_list types = {"fp32"};
  number_list head_dims = {64};
  index_t heads = 8, kv_heads = 0, d_model = 0, threads = 1;
  index_t window = 128, sinks = 1;
  index_t rounds = 7, seconds = 120;
  std::string csv;
  bool no_slower = false;
};

inline speedup_options parse_speedup_options(int argc, char** argv) {
  speedup_options o;
  command_line line("speedup", "how much faster Focus attention is than dense attention");
  line.add("--tokens", &o.tokens, "sequence lengths; 4K is 4096", 1);
  line.add("--long", &o.long_run, "256K tokens as well");
  line.add("--groups", &o.groups, "K", 1);
  line.add("--top-k", &o.top_k, "groups a token; those above K are left out", 1);
  line.add("--masks", &o.masks, "how groups are made up", 0, {"balanced", "runs", "skewed"});
  line.add("--masks-file", &o.masks_file,
           "masks of real text instead: what language_model perplexity --masks-out wrote");
  line.add("--types", &o.types, "storage types", 0, {"fp32", "fp64", "bf16", "f16"});
  line.add("--head-dim", &o.head_dims, "head dimensions", 1);
  line.add("--heads", &o.heads, "query heads", 1);
  line.add("--kv-heads", &o.kv_heads, "key and value heads; 0: as many as query heads");
  line.add("--d-model", &o.d_model, "width of the router's input; 0: heads x head dimension");
  line.add("--window", &o.window, "w: pairs with i - j <= w are computed whatever their groups");
  line.add("--sinks", &o.sinks, "first tokens that all later ones see");
  line.add("--threads", &o.threads, "threads (more than one: OpenMP and the wall clock)", 1);
  line.add("--rounds", &o.rounds, "rounds of dense and sparse in turn", 1);
  line.add("--seconds", &o.seconds, "no new round of one setting after so many");
  line.add("--csv", &o.csv, "file for the table, for plot_speedup.py");
  line.add("--no-slower", &o.no_slower,
           "the patterns that must not be slower than dense, and the worst ratio of each");
  line.parse(argc, argv);

  if (o.no_slower && !o.csv.empty()) line.refuse("--csv: not with --no-slower");
  if (o.long_run) o.tokens.push_back(262144);
  if (o.kv_heads == 0) o.kv_heads = o.heads;
  if (o.heads % o.kv_heads != 0) line.refuse("--heads must be a multiple of --kv-heads");
  for (const index_t groups : o.groups)
    if (groups > 64) line.refuse("--groups: at most 64");
#if !defined(_OPENMP)
  if (o.threads > 1) line.refuse("--threads: this program was built without OpenMP");
#endif
  return o;
}

}  // namespace bench
