#include "cached_attention.hpp"

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>

#include <focus/decode.hpp>
#include <focus/kv_cache.hpp>
#include <focus/routing_plan.hpp>

#include "stopwatch.hpp"

namespace language_model {

/// The cache of one layer, of whatever type.
class cached_attention::layer_cache {
 public:
  virtual ~layer_cache() = default;
  virtual void attend(const attention_call& call, std::span<const focus::group_mask> query_masks,
                      std::span<const focus::group_mask> key_masks, focus::workspace& workspace,
                      thread_pool& pool) = 0;
  virtual void truncate(index_t size) = 0;
  [[nodiscard]] virtual index_t size() const = 0;
  [[nodiscard]] virtual double memory_bytes() const = 0;
  [[nodiscard]] virtual double bytes_of_last_token() const = 0;
  [[nodiscard]] virtual double pairs() const = 0;
};

template <class T>
class cached_attention::typed_cache final : public layer_cache {
 public:
  typed_cache(const model_config& config, const focus::pattern_options& pattern)
      : cache_(config.kv_heads, config.head_dim, config.head_dim, pattern) {}

  void attend(const attention_call& call, std::span<const focus::group_mask> query_masks,
              std::span<const focus::group_mask> key_masks, focus::workspace& workspace,
              thread_pool& pool) override {
    auto exec = focus::with_workspace(pool, workspace);
    cache_.append(call.k, call.v, key_masks, exec);
    key_masks_.insert(key_masks_.end(), key_masks.begin(), key_masks.end());
    query_masks_.insert(query_masks_.end(), query_masks.begin(), query_masks.end());
    focus::decode_attention(call.q, query_masks, cache_, call.out, {}, {}, exec);
  }
  void truncate(index_t size) override {
    cache_.truncate(size);
    key_masks_.resize(static_cast<std::size_t>(size));
    query_masks_.resize(static_cast<std::size_t>(size));
  }
  [[nodiscard]] index_t size() const override { return cache_.size(); }
  [[nodiscard]] double memory_bytes() const override {
    return static_cast<double>(cache_.memory_bytes());
  }
  [[nodiscard]] double bytes_of_last_token() const override {
    const focus::pattern_options& pattern = cache_.pattern();
    const index_t last = cache_.size() - 1;
    index_t keys = 0;
    for (index_t j = 0; j <= last; ++j)
      keys += last - j <= pattern.window || j < pattern.sink_tokens ||
              (key_masks_[static_cast<std::size_t>(j)] & query_masks_.back()) != 0;
    return static_cast<double>(keys * cache_.kv_heads() *
                               (cache_.head_dim() + cache_.value_dim())) *
           sizeof(T);
  }

  [[nodiscard]] double pairs() const override {
    return static_cast<double>(
        focus::make_routing_plan(query_masks_, key_masks_, cache_.pattern()).allowed_pairs());
  }

 private:
  focus::kv_cache<T> cache_;
  std::vector<focus::group_mask> query_masks_, key_masks_;
};

cache_type parse_cache_type(const std::string& name) {
  for (const auto& [known, type] : {std::pair("f32", cache_type::f32),
                                    {"bf16", cache_type::bf16},
                                    {"f16", cache_type::f16},
                                    {"int8", cache_type::int8}})
    if (name == known) return type;
  throw std::invalid_argument("no such type of cache: " + name);
}

cached_attention::cached_attention(const attention_method& method, const model_config& config,
                                   cache_type type, thread_pool& pool)
    : method_(method), pool_(pool) {
  for (index_t l = 0; l < config.layers; ++l) {
    const focus::pattern_options& pattern =
        method.layers[static_cast<std::size_t>(l)] ? method.pattern : focus::full_causal;
    const auto make = [&]<class T>(T) {
      layers_.push_back(std::make_unique<typed_cache<T>>(config, pattern));
    };
    if (type == cache_type::f32) make(float{});
    if (type == cache_type::bf16) make(focus::bfloat16{});
    if (type == cache_type::f16) make(focus::float16{});
    if (type == cache_type::int8) make(std::int8_t{});
  }
}

cached_attention::~cached_attention() = default;

void cached_attention::operator()(const attention_call& call) {
  const stopwatch time;
  layer_cache& layer = *layers_[static_cast<std::size_t>(call.layer)];
  const bool focus_here = method_.what == attention_method::kind::focus &&
                          method_.layers[static_cast<std::size_t>(call.layer)];
  if (focus_here) {
    masks_.route(*method_.router, call.layer, method_.k, call.hidden, workspace_, pool_);
    layer.attend(call, masks_.query(), masks_.key(), workspace_, pool_);
  } else {
    const std::vector<focus::group_mask> no_groups(static_cast<std::size_t>(call.q.extent(1)));
    layer.attend(call, no_groups, no_groups, workspace_, pool_);
  }
  seconds_ += time.seconds();
}

index_t cached_attention::size() const {
  return layers_.empty() ? 0 : layers_.back()->size();
}

void cached_attention::truncate(index_t size) {
  for (const auto& layer : layers_) layer->truncate(size);
}

double cached_attention::memory_bytes() const {
  double sum = 0;
  for (const auto& layer : layers_) sum += layer->memory_bytes();
  return sum;
}

double cached_attention::bytes_of_last_token() const {
  double sum = 0;
  for (const auto& layer : layers_) sum += layer->bytes_of_last_token();
  return sum;
}

double cached_attention::pairs() const {
  double sum = 0;
  for (const auto& layer : layers_) sum += layer->pairs();
  const auto all = static_cast<double>(layers_.size()) * windowed_pairs(size(), focus::full_causal);
  return sum / all;
}

}  // namespace language_model
