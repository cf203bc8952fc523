/* Focus attention behind a C interface: one shared library that holds the kernels for several instruction sets and takes the
 * best that the processor has, or the one that is asked for. */
#ifndef FOCUS_DISPATCH_H
#define FOCUS_DISPATCH_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FOCUS_DISPATCH_API __attribute__((visibility("default")))
#else
#define FOCUS_DISPATCH_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { focus_ok = 0, focus_invalid_argument = 1, focus_out_of_memory = 2, focus_other_error = 3 };

/* Shapes and pattern; set all fields. Token i of the queries stands at position i + n_k - n_q. */
typedef struct {
  int64_t heads, kv_heads; /* heads is a multiple of kv_heads */
  int64_t n_q, n_k;        /* tokens of the queries, of the keys */
  int64_t head_dim, value_dim;
  int64_t window;      /* a query sees the keys up to so many positions before it; -1: none by position */
  int64_t sink_tokens; /* keys at positions below are seen by all later queries */
} focus_problem;

/* The sets of this library that this processor has: "avx512", "avx2", "generic", best first; NULL for index out of range. */
FOCUS_DISPATCH_API const char* focus_instruction_set(int index);

/* Causal attention over the pairs that are within the window, sinks, or share a group. Tensors are dense, in the order
 * q [n_q, heads, head_dim], k [n_k, kv_heads, head_dim], v [n_k, kv_heads, value_dim], out [n_q, heads, value_dim]; lse
 * [heads, n_q], the logsumexp of the scores, may be NULL. Bit g of a mask: the token belongs to group g. scale is
 * 1 / sqrt(head_dim). set: the name of an instruction set; NULL: the best.
 *
 * Returns focus_ok, or another status; then nothing has been written but message, which says what is wrong in at most
 * message_size bytes, its end included (may be NULL with size 0). Keeps no state: calls may run at a time. */
FOCUS_DISPATCH_API int focus_sparse_attention(const char* set, const focus_problem* problem, const float* q, const float* k,
                                              const float* v, const uint64_t* query_masks, const uint64_t* key_masks,
                                              float* out, float* lse, char* message, size_t message_size);

#ifdef __cplusplus
}
#endif
#endif
