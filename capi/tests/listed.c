/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Keys that each token lists: lists of all keys that the mask allows give the dense result, forward and backward, and a key that
 * no token lists may hold NaN and gets gradients 0.
 */
#include <cpattn.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "expect.h"

#define TOKENS 5
#define HEADS 2
#define DIM 4
#define ALL (TOKENS * HEADS * DIM)

static cpattn_tensor tensor(float *data, int32_t ndim, int64_t *shape) {
  cpattn_tensor t = {data, {CPATTN_DEVICE_CPU, 0}, ndim, {2, 32, 1}, shape, NULL, 0};
  return t;
}

static int apart(const float *a, const float *b, int n) {
  int found = 0;
  for (int i = 0; i < n; i++) found += !(fabsf(a[i] - b[i]) < 1e-5f);
  return found;
}

static cpattn_keys lists(const int32_t *indices, size_t tokens, size_t heads, size_t entries) {
  cpattn_keys keys = CPATTN_KEYS_INIT;
  keys.kind = CPATTN_KEYS_LISTED, keys.key_indices = indices;
  keys.tokens = tokens, keys.heads = heads, keys.entries = entries;
  return keys;
}

static int32_t forward_over(cpattn_rank *rank, const cpattn_plan *plan, cpattn_forward_args args, const int32_t *indices,
                            size_t tokens, size_t heads, size_t entries) {
  cpattn_keys keys = lists(indices, tokens, heads, entries);
  args.keys = &keys;
  return cpattn_forward(rank, plan, &args);
}

static int32_t backward_over(cpattn_rank *rank, const cpattn_plan *plan, cpattn_backward_args args, const int32_t *indices,
                             size_t tokens, size_t heads, size_t entries) {
  cpattn_keys keys = lists(indices, tokens, heads, entries);
  args.keys = &keys;
  return cpattn_backward(rank, plan, &args);
}

int main(void) {
  cpattn_transport *own = NULL;
  cpattn_rank *rank = NULL;
  cpattn_plan *plan = NULL;
  OK(cpattn_local_group(1, 60000, &own));
  OK(cpattn_rank_create(own, NULL, &rank));
  const int32_t ends[] = {0, TOKENS};
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  problem.documents = 1, problem.cu_seqlens_q = ends;
  problem.heads = problem.kv_heads = HEADS, problem.head_dim = problem.value_dim = DIM, problem.dtype = CPATTN_F32;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  options.world = 1;
  OK(cpattn_plan_create(&problem, &options, &plan));

  float q[ALL], k[ALL], v[ALL], d_o[ALL], o[ALL], lse[TOKENS * HEADS], dq[ALL], dk[ALL], dv[ALL];
  for (int i = 0; i < ALL; i++) {
    q[i] = (float)sin(i * 0.3), k[i] = (float)sin(i * 0.7), v[i] = (float)sin(i * 0.11), d_o[i] = (float)cos(i * 0.9);
  }
  int64_t rows[] = {TOKENS, HEADS, DIM}, heads[] = {HEADS, TOKENS};
  cpattn_tensor tq = tensor(q, 3, rows), tk = tensor(k, 3, rows), tv = tensor(v, 3, rows), to = tensor(o, 3, rows);
  cpattn_tensor tl = tensor(lse, 2, heads), td = tensor(d_o, 3, rows);
  cpattn_tensor tdq = tensor(dq, 3, rows), tdk = tensor(dk, 3, rows), tdv = tensor(dv, 3, rows);
  cpattn_forward_args forward = CPATTN_FORWARD_ARGS_INIT;
  forward.q = &tq, forward.k = &tk, forward.v = &tv, forward.o = &to, forward.lse = &tl;
  cpattn_backward_args backward = CPATTN_BACKWARD_ARGS_INIT;
  backward.q = &tq, backward.k = &tk, backward.v = &tv, backward.o = &to, backward.lse = &tl, backward.d_o = &td;
  backward.dq = &tdq, backward.dk = &tdk, backward.dv = &tdv;

  OK(cpattn_forward(rank, plan, &forward));
  OK(cpattn_backward(rank, plan, &backward));
  float dense[4][ALL];
  memcpy(dense[0], o, sizeof o), memcpy(dense[1], dq, sizeof o), memcpy(dense[2], dk, sizeof o), memcpy(dense[3], dv, sizeof o);

  /* All keys of the causal mask, the last first; then all but key 1. */
  int32_t all[TOKENS * TOKENS], most[TOKENS * TOKENS];
  for (int t = 0; t < TOKENS; t++) {
    for (int i = 0; i < TOKENS; i++) {
      all[t * TOKENS + i] = i <= t ? t - i : -1;
      most[t * TOKENS + i] = i <= t && t - i != 1 ? t - i : -1;
    }
  }
  OK(forward_over(rank, plan, forward, all, TOKENS, 1, TOKENS));
  OK(backward_over(rank, plan, backward, all, TOKENS, 1, TOKENS));
  failures += apart(o, dense[0], ALL) + apart(dq, dense[1], ALL) + apart(dk, dense[2], ALL) + apart(dv, dense[3], ALL);

  for (int i = 0; i < HEADS * DIM; i++) k[HEADS * DIM + i] = v[HEADS * DIM + i] = NAN;
  OK(forward_over(rank, plan, forward, most, TOKENS, 1, TOKENS));
  OK(backward_over(rank, plan, backward, most, TOKENS, 1, TOKENS));
  for (int i = 0; i < ALL; i++) failures += !(isfinite(o[i]) && isfinite(dq[i]) && isfinite(dk[i]) && isfinite(dv[i]));
  for (int i = 0; i < HEADS * DIM; i++) failures += dk[HEADS * DIM + i] != 0 || dv[HEADS * DIM + i] != 0;
  failures += !apart(o, dense[0], ALL);

  all[1] = 3;
  REFUSED(CPATTN_INVALID, "key_indices[0][0][1] is 3", forward_over(rank, plan, forward, all, TOKENS, 1, TOKENS));
  REFUSED(CPATTN_INVALID, "key_indices[0][0][1] is 3", backward_over(rank, plan, backward, all, TOKENS, 1, TOKENS));
  REFUSED(CPATTN_INVALID, "key_indices is NULL", forward_over(rank, plan, forward, NULL, TOKENS, 1, TOKENS));
  REFUSED(CPATTN_INVALID, "key_indices.heads is 3", forward_over(rank, plan, forward, all, 1, 3, TOKENS));
  REFUSED(CPATTN_INVALID, "key_indices is of 20 entries", forward_over(rank, plan, forward, all, 4, 1, TOKENS));
  /* What a kind of keys does not use is left out. */
  cpattn_keys keys = lists(most, TOKENS, 1, TOKENS);
  keys.block_table = most, forward.keys = &keys;
  REFUSED(CPATTN_INVALID, "keys.block_table is given, expected NULL, its sizes 0: keys.kind is CPATTN_KEYS_LISTED",
          cpattn_forward(rank, plan, &forward));
  keys.block_table = NULL, keys.page_size = 1;
  REFUSED(CPATTN_INVALID, "keys.block_table", cpattn_forward(rank, plan, &forward));
  keys.page_size = 0, keys.kind = CPATTN_KEYS_ALL;
  REFUSED(CPATTN_INVALID, "keys.key_indices is given", cpattn_forward(rank, plan, &forward));
  keys.kind = 3;
  REFUSED(CPATTN_INVALID, "keys.kind is 3", cpattn_forward(rank, plan, &forward));
  keys.kind = CPATTN_KEYS_PAGES, keys.key_indices = NULL, keys.tokens = keys.heads = keys.entries = 0;
  keys.block_table = all, keys.documents = 1, keys.pages_per_document = 1, keys.page_size = keys.page_stride = TOKENS;
  backward.keys = &keys, all[0] = 0;
  REFUSED(CPATTN_UNSUPPORTED, "a backward with pages", cpattn_backward(rank, plan, &backward));
  forward.keys = &keys;
  OK(cpattn_forward(rank, plan, &forward));
  cpattn_keys none = CPATTN_KEYS_INIT;
  forward.keys = &none;
  OK(cpattn_forward(rank, plan, &forward));
  OK(cpattn_plan_destroy(plan));
  OK(cpattn_rank_destroy(rank));
  return failures != 0;
}
