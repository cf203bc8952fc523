// The keys and values of a sequence that grows token by token, by cell: what decode_attention
// reads.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>
#include <vector>

#include "focus/cache/cached_row.hpp"
#include "focus/cache/cell_store.hpp"
#include "focus/config.hpp"
#include "focus/error.hpp"
#include "focus/options.hpp"
#include "focus/parallel.hpp"
#include "focus/scalar.hpp"
#include "focus/tensor_view.hpp"

namespace focus {
inline namespace FOCUS_ABI {
namespace detail {

struct cache_access;

}  // namespace detail

/// K, V and masks of the tokens of one sequence and layer, for decode_attention.
///
/// Tokens with the same mask lie side by side in order of position (a cell), in pages of 8 tokens:
/// a query reads the cells that its mask meets, the last tokens of the others (the window) and
/// their first (the sinks), each key once and in runs. Masks that too few tokens have share one
/// cell, in which a query tests each key's mask. append moves no key that is there.
///
/// T is the type in which K and V are kept: float, double, bfloat16, float16, an engine's own, or
/// std::int8_t. 8-bit numbers have a scale for each row of K and of V, its largest magnitude / 127:
/// an element is off by at most 1 / 254 of the largest one in its row (and 2^-23 of itself, for
/// float's rounding); a row with a NaN or an infinity is all NaN. Results are those of the numbers
/// as they are kept.
///
/// Memory: K and V as kept, 16 bytes a token and layer, half a page for each distinct mask, and up
/// to 3% that waits for tokens. A cache can be copied: the copy grows by itself.
template <class T>
class kv_cache {
  static_assert(cache_storage<T>,
                "focus::kv_cache: T is float, double, focus::bfloat16, focus::float16, "
                "std::int8_t, or a type for which focus::scalar_traits is specialised.");

 public:
  using value_type = T;
  using accumulator = detail::cached_accumulator_t<T>;

  /// An empty cache for tokens with K [kv_heads, head_dim] and V [kv_heads, value_dim].
  ///
  /// @param pattern which pairs are visible whatever their groups: window and sinks, for all
  ///        queries. Its query_offset is none: queries are the last tokens in the cache.
  /// @throws invalid_argument
  kv_cache(index_t kv_heads, index_t head_dim, index_t value_dim,
           const pattern_options& pattern = {})
      : kv_heads_(checked(kv_heads, "kv_heads")),
        row_(checked(head_dim, "head_dim"), checked(value_dim, "value_dim")),
        pattern_(checked(pattern)),
        store_(kv_heads, row_.bytes()) {}

  [[nodiscard]] index_t kv_heads() const noexcept { return kv_heads_; }
  [[nodiscard]] index_t head_dim() const noexcept { return row_.head_dim(); }
  [[nodiscard]] index_t value_dim() const noexcept { return row_.value_dim(); }
  [[nodiscard]] const pattern_options& pattern() const noexcept { return pattern_; }
  /// Tokens in it: positions [0, size()).
  [[nodiscard]] index_t size() const noexcept { return store_.size(); }
  /// Bytes of memory that it holds.
  [[nodiscard]] index_t memory_bytes() const noexcept { return store_.bytes(); }

  /// Appends m tokens, at positions size() ... size() + m - 1.
  ///
  /// @param k     [kv_heads, m, head_dim], any strides but the last, of T or of any type with sums
  ///              of the same type, which is rounded to T
  /// @param v     [kv_heads, m, value_dim], likewise
  /// @param masks [m] the groups of each token
  /// @param exec  where the loops run
  /// @throws invalid_argument, std::bad_alloc, and what exec throws; the cache is then as before
  ///
  /// What is in the cache afterwards does not depend on how tokens came: one by one, in blocks, or
  /// all at once, and whatever was truncated in between.
  template <tensor_like<3> K, tensor_like<3> V, span_like<group_mask> Masks,
            class Exec = serial_executor>
  requires executor<std::remove_reference_t<Exec>>
  void append(const K& k, const V& v, const Masks& masks, Exec&& exec = {}) {
    append_views(detail::as_const_view(k), detail::as_const_view(v),
                 std::span<const group_mask>(detail::as_span(masks)), detail::any_executor(exec));
  }

  /// Forgets all tokens but the first `size`: those of a guess that did not come true, or (0) all.
  /// Their memory is kept for the next ones.
  /// @throws invalid_argument for a size below 0 or above size()
  void truncate(index_t size) {
    detail::require(size >= 0 && size <= this->size(), "kv_cache::truncate", "size",
                    "between 0 and size()", size);
    store_.truncate(size);
  }

  /// Copies the tokens from position `first` on out of the cache, as it keeps them: to save them,
  /// or to look at them. O(size()), whatever is read.
  ///
  /// @param first position of the first token
  /// @param k     [kv_heads, m, head_dim]; positions first ... first + m - 1
  /// @param v     [kv_heads, m, value_dim]
  /// @param masks [m]
  /// @throws invalid_argument
  template <mutable_tensor_like<3> K, mutable_tensor_like<3> V, mutable_span_like<group_mask> Masks>
  void read(index_t first, K&& k, V&& v, Masks&& masks) const {
    read_views(first, detail::as_view(k), detail::as_view(v), detail::as_span(masks));
  }

 private:
  friend struct detail::cache_access;

  static index_t checked(index_t extent, const char* name) {
    constexpr index_t limit = index_t{1} << 20;  // bytes of a page stay far below 2^63
    detail::require(extent >= 0 && extent <= limit, "kv_cache", name, "between 0 and 2^20", extent);
    return extent;
  }
  static const pattern_options& checked(const pattern_options& pattern) {
    detail::validate(pattern, "kv_cache");
    if (pattern.query_offset)
      detail::fail_argument("kv_cache", "query_offset", "none: queries are the last tokens",
                            *pattern.query_offset);
    return pattern;
  }

  template <class TK>
  void check_rows(const tensor_view<TK, 3>& rows, index_t tokens, index_t width,
                  const char* function, const char* name) const {
    using element = std::remove_const_t<TK>;
    static_assert(scalar<element>,
                  "focus::kv_cache: k and v are of float, double, focus::bfloat16, focus::float16 "
                  "or a type for which focus::scalar_traits is specialised.");
    static_assert(std::same_as<accumulator, accumulator_t<element>>,
                  "focus::kv_cache: k and v must all be double where the cache is, and else types "
                  "whose sums are float.");
    detail::require_shape(rows, {kv_heads_, tokens, width}, function, name);
    detail::require_data(rows, function, name);
  }

  template <class TK, class TV>
  void append_views(const tensor_view<const TK, 3>& k, const tensor_view<const TV, 3>& v,
                    std::span<const group_mask> masks, const detail::any_executor& exec) {
    constexpr const char* name = "kv_cache::append";
    const auto tokens = static_cast<index_t>(masks.size());
    check_rows(k, tokens, head_dim(), name, "k");
    check_rows(v, tokens, value_dim(), name, "v");
    // Whatever throws, what was there stays.
    struct rollback {
      detail::cell_store* store;
      index_t size;
      ~rollback() {
        if (store != nullptr) store->truncate(size);
      }
    } undo{&store_, size()};
    for (index_t first = 0; first < tokens; first += tokens_at_once) {
      const index_t count = (std::min)(tokens_at_once, tokens - first);
      std::byte* rows[static_cast<std::size_t>(tokens_at_once)];
      for (index_t t = 0; t < count; ++t)
        rows[t] = store_.add(masks[static_cast<std::size_t>(first + t)]);
      const auto write = [&](index_t head, index_t) {
        for (index_t t = 0; t < count; ++t)
          row_.write(rows[t] + head * store_.head_bytes(), k.row(head, first + t),
                     v.row(head, first + t));
      };
      if (count < tokens_at_once)  // less work than there is in sharing it out
        for (index_t head = 0; head < kv_heads_; ++head) write(head, 0);
      else
        exec.parallel_for(kv_heads_, write);
    }
    undo.store = nullptr;
  }

  template <class TK, class TV>
  void read_views(index_t first, const tensor_view<TK, 3>& k, const tensor_view<TV, 3>& v,
                  std::span<group_mask> masks) const {
    constexpr const char* name = "kv_cache::read";
    const auto tokens = static_cast<index_t>(masks.size());
    detail::require(first >= 0 && first <= size(), name, "first", "between 0 and size()", first);
    detail::require(tokens <= size() - first, name, "masks", "no token behind the last one",
                    tokens);
    check_rows(k, tokens, head_dim(), name, "k");
    check_rows(v, tokens, value_dim(), name, "v");
    std::vector<accumulator> k_row(static_cast<std::size_t>(head_dim()));
    std::vector<accumulator> v_row(static_cast<std::size_t>(value_dim()));
    for (index_t c = 0; c < store_.cells(); ++c) {
      const detail::cached_cell& cell = store_.cell(c);
      for (index_t i = 0; i < cell.size; ++i) {
        const detail::cell_page page = cell.pages[i / detail::page_slots];
        const index_t slot = i % detail::page_slots;
        const index_t token = store_.header(page).position[slot] - first;
        if (token < 0 || token >= tokens) continue;
        masks[static_cast<std::size_t>(token)] = store_.header(page).mask[slot];
        for (index_t head = 0; head < kv_heads_; ++head) {
          const std::byte* const row =
              store_.rows(page) + head * store_.head_bytes() + slot * store_.row_bytes();
          row_.read(row, k_row.data(), v_row.data());
          for (index_t d = 0; d < head_dim(); ++d)
            k(head, token, d) = narrow_to<TK>(k_row[static_cast<std::size_t>(d)]);
          for (index_t d = 0; d < value_dim(); ++d)
            v(head, token, d) = narrow_to<TV>(v_row[static_cast<std::size_t>(d)]);
        }
      }
    }
  }
  template <class To>
  static To narrow_to(accumulator x) noexcept {
    return detail::narrow<To>(static_cast<accumulator_t<To>>(x));
  }

  static constexpr index_t tokens_at_once = 128;

  index_t kv_heads_;
  detail::cached_row<T> row_;
  pattern_options pattern_;
  detail::cell_store store_;
};

namespace detail {

/// What the passes see of a cache.
struct cache_access {
  template <class T>
  static const cell_store& store(const kv_cache<T>& cache) noexcept {
    return cache.store_;
  }
  template <class T>
  static const cached_row<T>& row(const kv_cache<T>& cache) noexcept {
    return cache.row_;
  }
};

}  // namespace detail
}  // namespace FOCUS_ABI
}  // namespace focus
