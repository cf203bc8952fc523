// The groups of a layer's tokens, by its router.
#pragma once

#include <span>
#include <vector>

#include <focus/options.hpp>
#include <focus/parallel.hpp>
#include <focus/tensor_view.hpp>

#include "router_file.hpp"
#include "thread_pool.hpp"

namespace language_model {

/// Groups kept a token: its k best as a query, and as a key.
struct top_k {
  int query = 1;
  int key = 1;
};

class token_masks {
 public:
  /// hidden: [tokens, d_model].
  void route(const router& by, index_t layer, top_k k, focus::matrix_view<const float> hidden,
             focus::workspace& workspace, thread_pool& pool);

  [[nodiscard]] std::span<const focus::group_mask> query() const noexcept { return query_; }
  [[nodiscard]] std::span<const focus::group_mask> key() const noexcept {
    return shared_ ? query_ : key_;
  }
  /// Whether keys have the groups of queries.
  [[nodiscard]] bool shared() const noexcept { return shared_; }

 private:
  std::vector<focus::group_mask> query_, key_;
  bool shared_ = true;
};

}  // namespace language_model
