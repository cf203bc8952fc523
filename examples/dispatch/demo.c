/* Calls the library from C with each instruction set of this processor: the error against attention by its definition, in
 * double, and the time. Ends with 1 where a set is wrong. */
#define _POSIX_C_SOURCE 199309L
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "focus_dispatch.h"

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Query row i of head h, by the definition: the largest difference from out. */
static double error_of_row(const focus_problem* p, const float* q, const float* k, const float* v, const uint64_t* masks,
                           const float* out, int64_t i, int64_t h) {
  const int64_t d = p->head_dim, kv = h / (p->heads / p->kv_heads);
  double total = 0, sum[256] = {0}, worst = 0;
  for (int64_t j = 0; j <= i; ++j) {
    double score = 0, weight;
    if (!(i - j <= p->window || j < p->sink_tokens || (masks[i] & masks[j]))) continue;
    for (int64_t c = 0; c < d; ++c)
      score += (double)q[(i * p->heads + h) * d + c] * (double)k[(j * p->kv_heads + kv) * d + c];
    weight = exp(score / sqrt((double)d)); /* the scores of the demo are small */
    total += weight;
    for (int64_t c = 0; c < p->value_dim; ++c) sum[c] += weight * (double)v[(j * p->kv_heads + kv) * p->value_dim + c];
  }
  for (int64_t c = 0; c < p->value_dim; ++c) {
    const double error = fabs(sum[c] / total - (double)out[(i * p->heads + h) * p->value_dim + c]);
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

int main(int argc, char** argv) {
  const int64_t n = argc > 1 ? atoll(argv[1]) : 4096;
  focus_problem p = {.heads = 4, .kv_heads = 2, .n_q = n, .n_k = n, .head_dim = 64, .value_dim = 64, .window = 128,
                     .sink_tokens = 1};
  const size_t nq = (size_t)(n * p.heads * p.head_dim), nk = (size_t)(n * p.kv_heads * p.head_dim);
  float *q = malloc(nq * sizeof *q), *k = malloc(nk * sizeof *k), *v = malloc(nk * sizeof *v), *out = malloc(nq * sizeof *out);
  uint64_t* masks = malloc((size_t)n * sizeof *masks);
  char message[200] = "";
  int failed = 0;
  const char* set;
  if (n < 1 || !q || !k || !v || !out || !masks) {
    fprintf(stderr, "usage: demo [TOKENS]\n");
    return 2;
  }
  uint32_t state = 1;
  for (size_t i = 0; i < nq; ++i) q[i] = (float)((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1;
  for (size_t i = 0; i < nk; ++i) k[i] = (float)((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1;
  for (size_t i = 0; i < nk; ++i) v[i] = (float)((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1;
  for (int64_t i = 0; i < n; ++i) masks[i] = (uint64_t)1 << ((state = state * 1664525u + 1013904223u) >> 29);

  printf("%lld tokens, 4 heads of 64, 8 groups, window 128, one thread\n", (long long)n);
  for (int index = 0; (set = focus_instruction_set(index)) != NULL; ++index) {
    double best = INFINITY, worst = 0;
    for (int run = 0; run < 3; ++run) {
      const double start = seconds();
      if (focus_sparse_attention(set, &p, q, k, v, masks, masks, out, NULL, message, sizeof message) != focus_ok) {
        fprintf(stderr, "%s\n", message);
        return 1;
      }
      if (seconds() - start < best) best = seconds() - start;
    }
    for (int64_t i = 0; i < n; i += n / 50 + 1)
      for (int64_t h = 0; h < p.heads; ++h) {
        const double error = error_of_row(&p, q, k, v, masks, out, i, h);
        if (!(error <= worst)) worst = error;
      }
    /* float: n weights of 6e-8 each, averaged over values below 1 */
    if (!(worst < 2e-6)) failed = 1;
    printf("%-8s %8.2f ms  error %.1e%s\n", set, 1e3 * best, worst, worst < 2e-6 ? "" : "  WRONG");
  }

  /* What is wrong comes back as a status and a message, and nothing is written. */
  p.kv_heads = 3;
  out[0] = 7;
  if (focus_sparse_attention(NULL, &p, q, k, v, masks, masks, out, NULL, message, sizeof message) != focus_invalid_argument ||
      strstr(message, "heads") == NULL || out[0] != 7)
    failed = 1;
  printf("3 kv heads for 4 heads: %s\n", message);
  p.kv_heads = 2;
  if (focus_sparse_attention("avx1024", &p, q, k, v, masks, masks, out, NULL, message, sizeof message) != focus_invalid_argument)
    failed = 1;
  free(q), free(k), free(v), free(out), free(masks);
  return failed;
}
