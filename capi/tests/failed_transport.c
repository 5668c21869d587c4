/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A transport that fails one call and says that all is well from then on: the rank does not use it again, and tells it to
 * abort. Each of agree, exchange and poll in turn.
 */
#include <cpattn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "expect.h"

#define TOKENS 8
#define DIM 4

/* What the transport is asked, in which call it fails, and how often it is told to abort. */
static int calls, failing, aborts;
static const char *function;

static int32_t outcome(const char *name) {
  if (strcmp(name, function) != 0) return 0;
  calls++;
  return failing ? 7 : 0;
}

static int32_t agree(void *context, uint32_t first, uint32_t end, uint64_t number, uint64_t *all, int64_t *blame) {
  (void)context, (void)blame;
  for (uint32_t i = first; i < end; i++) all[i - first] = number;
  return outcome("agree");
}

static int32_t exchange(void *context, const char *operation, uint32_t step, const cpattn_message *sends, size_t send_count,
                        const cpattn_message *recvs, size_t recv_count, void *stream, int64_t *blame) {
  (void)context, (void)operation, (void)step, (void)stream, (void)blame;
  /* The other rank, as it happens, sends what this one sends. */
  for (size_t i = 0; i < recv_count && i < send_count; i++)
    if (sends[i].bytes == recvs[i].bytes) memcpy(recvs[i].data, sends[i].data, recvs[i].bytes);
  return outcome("exchange");
}

static int32_t poll(void *context, int64_t *blame) {
  (void)context, (void)blame;
  return outcome("poll");
}

static void abort_all(void *context) {
  (void)context;
  aborts++;
}

static float q[TOKENS * DIM], k[TOKENS * DIM], v[TOKENS * DIM], o[TOKENS * DIM], lse[TOKENS];

static cpattn_tensor tensor(float *data, int64_t *shape, int32_t ndim) {
  cpattn_tensor t = {data, {CPATTN_DEVICE_CPU, 0}, ndim, {2, 32, 1}, shape, NULL, 0};
  return t;
}

int main(void) {
  const int32_t cu_seqlens[] = {0, TOKENS};
  const char *functions[] = {"agree", "exchange", "poll"};
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  cpattn_plan *plan = NULL;
  problem.cu_seqlens_q = cu_seqlens, problem.documents = 1, problem.heads = 1, problem.head_dim = DIM;
  problem.window_right = CPATTN_UNLIMITED;
  options.world = options.ring = 2, options.ulysses = 1, options.layout = CPATTN_LAYOUT_CONTIGUOUS;
  OK(cpattn_plan_create(&problem, &options, &plan));
  int64_t rows[] = {TOKENS / 2, 1, DIM}, heads[] = {1, TOKENS / 2};
  cpattn_tensor tq = tensor(q, rows, 3), tk = tensor(k, rows, 3), tv = tensor(v, rows, 3);
  cpattn_tensor to = tensor(o, rows, 3), tl = tensor(lse, heads, 2);
  cpattn_forward_args forward = CPATTN_FORWARD_ARGS_INIT;
  forward.q = &tq, forward.k = &tk, forward.v = &tv, forward.o = &to, forward.lse = &tl;
  for (int i = 0; i < 3; i++) {
    cpattn_transport_table table = CPATTN_TRANSPORT_TABLE_INIT;
    cpattn_transport *transport = NULL;
    cpattn_rank *rank = NULL;
    function = functions[i], calls = failing = aborts = 0;
    table.rank = 0, table.world = 2;
    table.agree = agree, table.exchange = exchange, table.poll = poll, table.abort = abort_all;
    OK(cpattn_transport_create(&table, &transport));
    OK(cpattn_rank_create(transport, NULL, &rank));
    if (i > 0) OK(cpattn_forward(rank, plan, &forward));
    failing = 1;
    char word[64];
    snprintf(word, sizeof word, "the transport's %s returned 7", function);
    if (i == 2) REFUSED(CPATTN_PEER, word, cpattn_rank_poll(rank));
    else REFUSED(CPATTN_PEER, word, cpattn_forward(rank, plan, &forward));
    /* All is well, says the transport. */
    failing = 0;
    int before = calls;
    REFUSED(CPATTN_PEER, word, cpattn_forward(rank, plan, &forward));
    REFUSED(CPATTN_PEER, word, cpattn_rank_poll(rank));
    if (calls != before) failures++, fprintf(stderr, "%s was called again\n", function);
    if (aborts == 0) failures++, fprintf(stderr, "after a failed %s abort was not called\n", function);
    OK(cpattn_rank_destroy(rank));
  }
  OK(cpattn_plan_destroy(plan));
  return failures != 0;
}
