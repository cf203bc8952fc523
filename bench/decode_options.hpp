// What `decode` can be asked to do.
#pragma once

#include <string>

#include "command_line.hpp"

namespace bench {

struct decode_options {
  number_list tokens = {1024, 4096, 16384, 65536};
  number_list head_dims = {64};
  number_list groups = {8};
  index_t heads = 32, kv_heads = 8, threads = 1;
  index_t queries = 1, sequences = 1;
  index_t window = 128, sinks = 1;
  word_list types = {"f32", "bf16", "f16", "int8"};
  index_t rounds = 11, gigabytes = 8;
};

inline decode_options parse_decode_options(int argc, char** argv) {
  decode_options o;
  command_line line("decode", "steps of generation over a cache, against the memory's bandwidth");
  line.add("--tokens", &o.tokens, "tokens in the cache; 4K is 4096", 1);
  line.add("--head-dim", &o.head_dims, "head dimensions", 1);
  line.add("--heads", &o.heads, "query heads", 1);
  line.add("--kv-heads", &o.kv_heads, "key and value heads", 1);
  line.add("--groups", &o.groups, "K, of which each token has one; dense attention comes first", 1);
  line.add("--types", &o.types, "what the cache keeps", 0, {"f32", "bf16", "f16", "int8"});
  line.add("--queries", &o.queries, "tokens in a step", 1);
  line.add("--sequences", &o.sequences, "sequences in a step, each with a cache of its own", 1);
  line.add("--window", &o.window, "w: keys up to so far back are read whatever their groups");
  line.add("--sinks", &o.sinks, "first tokens that all later ones see");
  line.add("--threads", &o.threads, "threads (more than one: OpenMP)", 1);
  line.add("--rounds", &o.rounds, "rounds of all rows in turn", 1);
  line.add("--gigabytes", &o.gigabytes, "caches that need more memory are left out, and named", 1);
  line.parse(argc, argv);

  if (o.heads % o.kv_heads != 0) line.refuse("--heads must be a multiple of --kv-heads");
  for (const index_t groups : o.groups)
    if (groups > 64) line.refuse("--groups: at most 64");
#if !defined(_OPENMP)
  if (o.threads > 1) line.refuse("--threads: this program was built without OpenMP");
#endif
  return o;
}

}  // namespace bench
