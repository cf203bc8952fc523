#include "token_masks.hpp"

#include <focus/route.hpp>

namespace language_model {

void token_masks::route(const router& by, index_t layer, top_k k,
                        focus::matrix_view<const float> hidden, focus::workspace& workspace,
                        thread_pool& pool) {
  const layer_router& routers = by.layers[static_cast<std::size_t>(layer)];
  auto exec = focus::with_workspace(pool, workspace);
  const auto fill = [&](const token_router& router, int groups,
                        std::vector<focus::group_mask>& masks) {
    masks.resize(static_cast<std::size_t>(hidden.extent(0)));
    focus::route(hidden, router.params(by.metric), router.potentials(), groups, masks,
                 {.temperature = by.temperature}, exec);
  };
  fill(routers.query, k.query, query_);
  shared_ = !routers.key && k.key == k.query;
  if (!shared_) fill(routers.for_keys(), k.key, key_);
}

}  // namespace language_model
