#include "attention_method.hpp"

#include <algorithm>

#include <focus/attention.hpp>
#include <focus/route.hpp>
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
  const router& router = *method_.router;
  const layer_router& layer = router.layers[static_cast<std::size_t>(call.layer)];
  auto exec = focus::with_workspace(pool_, workspace_);
  const auto n = static_cast<std::size_t>(call.hidden.extent(0));
  const auto route = [&](const token_router& by, int k, std::vector<focus::group_mask>& masks) {
    masks.resize(n);
    focus::route(call.hidden, by.params(router.metric), by.potentials(), k, masks,
                 {.temperature = router.temperature}, exec);
  };

  route(layer.query, method_.k.query, query_masks_);
  const bool shared = !layer.key && method_.k.key == method_.k.query;
  if (shared) {
    plan_.rebuild(query_masks_, method_.pattern);
  } else {
    route(layer.for_keys(), method_.k.key, key_masks_);
    plan_.rebuild(query_masks_, key_masks_, method_.pattern);
  }
  focus::sparse_attention(call.q, call.k, call.v, plan_, call.out, {}, {}, exec);
  pairs_ += static_cast<double>(plan_.allowed_pairs());
  if (on_masks_) on_masks_(call.layer, query_masks_, shared ? query_masks_ : key_masks_);
}

}  // namespace language_model
