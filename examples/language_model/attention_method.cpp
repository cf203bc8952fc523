#include "attention_method.hpp"

#include <algorithm>

#include <focus/attention.hpp>
#include <focus/sparse_attention.hpp>

#include "stopwatch.hpp"

namespace language_model {

double windowed_pairs(index_t n, const focus::pattern_options& pattern) {
  double pairs = 0;
  for (index_t i = 0; i < n; ++i) {
    const index_t local = std::min(i, pattern.window) + 1;
    pairs += static_cast<double>(local + std::min(pattern.sink_tokens, i + 1 - local));
  }
  return pairs;
}

void attention_runner::operator()(const attention_call& call) {
  const stopwatch time;
  const index_t n = call.q.extent(1);
  const bool selected = method_.layers[static_cast<std::size_t>(call.layer)];
  if (selected && method_.what == attention_method::kind::focus) {
    run_focus(call);
  } else {
    const bool windowed = selected && method_.what == attention_method::kind::windowed;
    const focus::pattern_options& pattern = windowed ? method_.pattern : focus::full_causal;
    focus::attention(call.q, call.k, call.v, call.out, pattern, {}, {},
                     focus::with_workspace(pool_, workspace_));
    pairs_ += windowed_pairs(n, pattern);
  }
  causal_pairs_ += windowed_pairs(n, focus::full_causal);
  seconds_ += time.seconds();
}

void attention_runner::run_focus(const attention_call& call) {
  masks_.route(*method_.router, call.layer, method_.k, call.hidden, workspace_, pool_);
  if (masks_.shared())
    plan_.rebuild(masks_.query(), method_.pattern);
  else
    plan_.rebuild(masks_.query(), masks_.key(), method_.pattern);
  focus::sparse_attention(call.q, call.k, call.v, plan_, call.out, {}, {},
                          focus::with_workspace(pool_, workspace_));
  pairs_ += static_cast<double>(plan_.allowed_pairs());
  if (on_masks_) on_masks_(call.layer, masks_.query(), masks_.key());
}

}  // namespace language_model
