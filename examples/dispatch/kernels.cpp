// Compiled once for each instruction set, with another name for its one function. Nothing of C++
// crosses its border: neither types, which differ by set, nor exceptions.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <span>
#include <type_traits>

#include <focus/routing_plan.hpp>
#include <focus/sparse_attention.hpp>

#include "focus_dispatch.h"

extern "C" int FOCUS_DISPATCH_KERNEL(const focus_problem* p, const float* q, const float* k,
                                     const float* v, const std::uint64_t* query_masks,
                                     const std::uint64_t* key_masks, float* out, float* lse,
                                     char* message, std::size_t message_size) {
  const auto says = [&](int status, const char* text) {
    if (message_size > 0) std::snprintf(message, message_size, "%s", text);
    return status;
  };
  try {
    if (p->n_q < 0 || p->n_k < 0)
      return says(focus_invalid_argument, "n_q and n_k: expected 0 or more");
    if ((p->n_q > 0 && query_masks == nullptr) || (p->n_k > 0 && key_masks == nullptr))
      return says(focus_invalid_argument,
                  "query_masks and key_masks: expected a mask for each token");
    const auto plan =
        focus::make_routing_plan(std::span(query_masks, static_cast<std::size_t>(p->n_q)),
                                 std::span(key_masks, static_cast<std::size_t>(p->n_k)),
                                 {.window = p->window, .sink_tokens = p->sink_tokens});
    // [tokens, heads, dim] in memory, as [heads, tokens, dim].
    const auto by_head = [](auto* data, focus::index_t tokens, focus::index_t heads,
                            focus::index_t dim) {
      return focus::tensor_view<std::remove_pointer_t<decltype(data)>, 3>(
          data, {heads, tokens, dim}, {dim, heads * dim, 1});
    };
    focus::tensor_view<float, 2> sums;
    if (lse != nullptr) sums = {lse, {p->heads, p->n_q}};
    focus::sparse_attention(by_head(q, p->n_q, p->heads, p->head_dim),
                            by_head(k, p->n_k, p->kv_heads, p->head_dim),
                            by_head(v, p->n_k, p->kv_heads, p->value_dim), plan,
                            by_head(out, p->n_q, p->heads, p->value_dim), {}, sums);
    return focus_ok;
  } catch (const focus::invalid_argument& e) {
    return says(focus_invalid_argument, e.what());
  } catch (const std::bad_alloc&) {
    return says(focus_out_of_memory, "out of memory");
  } catch (const std::exception& e) {
    return says(focus_other_error, e.what());
  } catch (...) {
    return says(focus_other_error, "an unknown error");
  }
}
