/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A plan of kind other: the caller's own kernel between the two all-to-alls. Here a running sum over each document, head by
 * head, which needs whole sequences; two ranks, each a thread.
 */
#include <cpattn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"

#define RANKS 2
#define TOKENS 11
#define HEADS 5
#define DIM 3

static const int32_t cu_seqlens[] = {0, 4, 4, TOKENS};
static cpattn_plan *plan;
static cpattn_transport *transports[RANKS];
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

/* An input that token, head and dimension determine. */
static float input(int64_t token, int head, int dim) { return (float)(token * 7 + head * 3 + dim); }

/* `expect` counts in a variable of the program. */
#define LOCKED(check) (pthread_mutex_lock(&turn), (check), pthread_mutex_unlock(&turn))

static cpattn_tensor tensor(float *data, int64_t *shape) {
  cpattn_tensor t = {data, {CPATTN_DEVICE_CPU, 0}, 3, {2, 32, 1}, shape, NULL, 0};
  return t;
}

static void *run(void *argument) {
  uint32_t number = (uint32_t)(uintptr_t)argument;
  cpattn_share share = CPATTN_SHARE_INIT;
  cpattn_rank *rank = NULL;
  LOCKED(OK(cpattn_plan_share(plan, number, &share)));
  LOCKED(OK(cpattn_rank_create(transports[number], NULL, &rank)));
  int64_t n = (int64_t)share.q_tokens, heads = share.q_head_end - share.q_head_begin;
  int64_t own[] = {n, HEADS, DIM}, held[] = {TOKENS, heads, DIM};
  int64_t tokens[TOKENS];
  LOCKED(OK(cpattn_plan_tokens(plan, CPATTN_Q, number, tokens, (size_t)n)));
  float *x = malloc(sizeof(float) * TOKENS * HEADS * DIM), *y = calloc(TOKENS * HEADS * DIM, sizeof(float));
  float *at_heads = calloc(TOKENS * HEADS * DIM, sizeof(float));
  for (int64_t i = 0; i < n; i++)
    for (int h = 0; h < HEADS; h++)
      for (int d = 0; d < DIM; d++) x[(i * HEADS + h) * DIM + d] = input(tokens[i], h, d);
  cpattn_tensor from = tensor(x, own), mid = tensor(at_heads, held), to = tensor(y, own);
  cpattn_event list[8];
  size_t count = 1;
  uint64_t began = 0, ended = 0;
  LOCKED(OK(cpattn_rank_trace(rank, NULL, 0, &count)));
  LOCKED(failures += count != 0);
  LOCKED(OK(cpattn_clock(&began)));
  LOCKED(OK(cpattn_rank_record(rank, 64)));
  for (int round = 0; round < 2; round++) {
    int32_t first = cpattn_rank_to_heads(rank, plan, CPATTN_Q, &from, &mid, NULL);
    LOCKED(OK(first));
    for (int document = 0; document < 3; document++)
      for (int64_t t = cu_seqlens[document] + 1; t < cu_seqlens[document + 1]; t++)
        for (int64_t i = 0; i < heads * DIM; i++) at_heads[t * heads * DIM + i] += at_heads[(t - 1) * heads * DIM + i];
    int32_t second = cpattn_rank_to_tokens(rank, plan, CPATTN_Q, &mid, &to, NULL);
    LOCKED(OK(second));
  }
  LOCKED(OK(cpattn_clock(&ended)));
  /* Asked for one operation at a time, and the rest is kept. */
  size_t all = 0, taken = 0, exchanges = 0;
  LOCKED(OK(cpattn_rank_trace(rank, NULL, 0, &all)));
  LOCKED(failures += all < 4);
  for (count = 1; taken < all; taken++) {
    memset(list, 0xff, sizeof list);
    LOCKED(OK(cpattn_rank_trace(rank, list, 1, &count)));
    const cpattn_event *e = &list[0];
    int exchange = strcmp(e->name, "exchange") == 0;
    exchanges += (size_t)exchange;
    LOCKED(failures += count != all - taken || e->rank != number || e->start_ns < began || e->end_ns < e->start_ns ||
                       e->end_ns > ended || e->lane != (exchange ? CPATTN_COMMUNICATION : CPATTN_COMPUTE) ||
                       (e->bytes > 0) != exchange || strcmp(e->phase, "all-to-all") != 0 || e->reserved != 0);
  }
  LOCKED(failures += exchanges != 4);
  LOCKED(OK(cpattn_rank_trace(rank, list, 8, &count)));
  LOCKED(failures += count != 0);
  LOCKED(OK(cpattn_rank_trace_accuracy(rank, &ended)));
  LOCKED(failures += ended != 0);
  LOCKED(REFUSED(CPATTN_INVALID, "capacity is 16777217", cpattn_rank_record(rank, (1 << 24) + 1)));
  LOCKED(REFUSED(CPATTN_INVALID, "count is NULL", cpattn_rank_trace(rank, list, 8, NULL)));
  LOCKED(REFUSED(CPATTN_INVALID, "events is NULL", cpattn_rank_trace(rank, NULL, 1, &count)));
  LOCKED(REFUSED(CPATTN_INVALID, "ns is NULL", cpattn_clock(NULL)));
  LOCKED(OK(cpattn_rank_record(rank, 0)));
  for (int64_t i = 0; i < n; i++)
    for (int h = 0; h < HEADS; h++)
      for (int d = 0; d < DIM; d++) {
        float sum = 0;
        int document = 0;
        while (cu_seqlens[document + 1] <= tokens[i]) document++;
        for (int64_t t = cu_seqlens[document]; t <= tokens[i]; t++) sum += input(t, h, d);
        if (y[(i * HEADS + h) * DIM + d] == sum) continue;
        LOCKED((failures++, fprintf(stderr, "rank %d, token %d, head %d: %g, expected %g\n", (int)number, (int)tokens[i], h,
                                    (double)y[(i * HEADS + h) * DIM + d], (double)sum)));
      }
  if (number == 0) {
    uint64_t bytes = 0;
    LOCKED(OK(cpattn_plan_all_to_all_workspace(plan, 0, CPATTN_Q, DIM, CPATTN_F32, &bytes)));
    /* What travels to the other rank is packed first: its heads of this rank's tokens. */
    LOCKED(failures += bytes < (uint64_t)(n * (HEADS - heads) * DIM) * sizeof(float));
    LOCKED(OK(cpattn_plan_verify_all_to_all(plan, CPATTN_Q, DIM, CPATTN_F32)));
    LOCKED(OK(cpattn_plan_verify_all_to_all(plan, CPATTN_K, 1, CPATTN_BF16)));
    LOCKED(REFUSED(CPATTN_INVALID, "side is 2", cpattn_plan_verify_all_to_all(plan, 2, DIM, CPATTN_F32)));
    LOCKED(REFUSED(CPATTN_INVALID, "dtype is 9", cpattn_plan_verify_all_to_all(plan, CPATTN_Q, DIM, 9)));
    LOCKED(REFUSED(CPATTN_INVALID, "dim is 0", cpattn_plan_verify_all_to_all(plan, CPATTN_Q, 0, CPATTN_F32)));
    cpattn_purpose purpose = CPATTN_PURPOSE_INIT;
    purpose.side = CPATTN_Q, purpose.dim = DIM, purpose.dtype = CPATTN_F32;
    LOCKED(OK(cpattn_rank_prepare(rank, plan, CPATTN_TO_HEADS, &purpose)));
    LOCKED(OK(cpattn_rank_prepare(rank, plan, CPATTN_TO_TOKENS, &purpose)));
    purpose.to = 1;
    LOCKED(REFUSED(CPATTN_INVALID, "purpose.to is given, expected 0 in CPATTN_TO_HEADS",
                   cpattn_rank_prepare(rank, plan, CPATTN_TO_HEADS, &purpose)));
    purpose.to = 0, purpose.dim = 0;
    LOCKED(REFUSED(CPATTN_INVALID, "dim is 0", cpattn_rank_prepare(rank, plan, CPATTN_TO_HEADS, &purpose)));
    purpose.dim = DIM, purpose.dtype = 9;
    LOCKED(REFUSED(CPATTN_INVALID, "dtype is 9", cpattn_rank_prepare(rank, plan, CPATTN_TO_TOKENS, &purpose)));
    LOCKED(REFUSED(CPATTN_INVALID, "side is 2", cpattn_plan_all_to_all_workspace(plan, 0, 2, DIM, CPATTN_F32, &bytes)));
    LOCKED(REFUSED(CPATTN_INVALID, "bytes is NULL", cpattn_plan_all_to_all_workspace(plan, 0, CPATTN_Q, DIM, CPATTN_F32, NULL)));
    LOCKED(REFUSED(CPATTN_INVALID, "rank is 2", cpattn_plan_all_to_all_workspace(plan, 2, CPATTN_Q, DIM, CPATTN_F32, &bytes)));
    /* Refused before anything moves; the other rank hears nothing of it. */
    LOCKED(REFUSED(CPATTN_INVALID, "to.tokens is", cpattn_rank_to_heads(rank, plan, CPATTN_Q, &from, &to, NULL)));
    LOCKED(REFUSED(CPATTN_INVALID, "side is 2", cpattn_rank_to_heads(rank, plan, 2, &from, &mid, NULL)));
    LOCKED(REFUSED(CPATTN_INVALID, "from is NULL", cpattn_rank_to_tokens(rank, plan, CPATTN_Q, NULL, &to, NULL)));
    LOCKED(REFUSED(CPATTN_UNSUPPORTED, "no streams", cpattn_rank_to_heads(rank, plan, CPATTN_Q, &from, &mid, &turn)));
    cpattn_forward_args forward = CPATTN_FORWARD_ARGS_INIT;
    forward.q = forward.k = forward.v = &from, forward.o = &to, forward.lse = &to;
    LOCKED(REFUSED(CPATTN_UNSUPPORTED, "cpattn_rank_to_heads", cpattn_forward(rank, plan, &forward)));
  }
  LOCKED(OK(cpattn_rank_destroy(rank)));
  free(x), free(y), free(at_heads);
  return NULL;
}

int main(void) {
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  pthread_t threads[RANKS];
  problem.cu_seqlens_q = cu_seqlens, problem.documents = 3;
  problem.heads = HEADS, problem.head_dim = DIM, problem.kind = CPATTN_OTHER;
  options.world = RANKS, options.ulysses = RANKS, options.ring = 1;
  OK(cpattn_plan_create(&problem, &options, &plan));
  OK(cpattn_local_group(RANKS, 20000, transports));
  for (uintptr_t i = 0; i < RANKS; i++) pthread_create(&threads[i], NULL, run, (void *)i);
  for (int i = 0; i < RANKS; i++) pthread_join(threads[i], NULL);
  OK(cpattn_plan_destroy(plan));
  return failures != 0;
}
