/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * A program that was compiled against an earlier header, and one that was compiled against a later one.
 *
 * Before there were devices, cpattn_forward_args and cpattn_backward_args ended without `stream`. What lies behind such a
 * struct is the program's, and is filled here with bytes that would be refused if they were read as a stream. Each struct
 * of another age must give the bits that today's gives.
 */
#include <cpattn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "expect.h"

#define TOKENS 9
#define HEADS 4
#define KV_HEADS 2
#define DIM 8

/* As the earlier header declared them. */
typedef struct {
  size_t struct_size;
  const cpattn_tensor *q, *k, *v, *sinks, *o, *lse;
} earlier_forward_args;
typedef struct {
  size_t struct_size;
  const cpattn_tensor *q, *k, *v, *sinks, *o, *lse, *d_o, *dq, *dk, *dv, *dsinks;
} earlier_backward_args;

/* Before instruction sets could be chosen. */
typedef struct {
  size_t struct_size;
  uint32_t workers;
  int32_t device_type, device_id;
  uint32_t sm_margin;
} earlier_rank_options;

/* As a later header may declare it. */
typedef struct {
  cpattn_forward_args known;
  uint64_t unknown;
} later_forward_args;

static float q[TOKENS * HEADS * DIM], k[TOKENS * KV_HEADS * DIM], v[TOKENS * KV_HEADS * DIM], d_o[TOKENS * HEADS * DIM];
/* Written: o, lse, dq, dk, dv, by today's structs and by those of other ages. */
static float o[2][TOKENS * HEADS * DIM], lse[2][HEADS * TOKENS], dq[2][TOKENS * HEADS * DIM];
static float dk[2][TOKENS * KV_HEADS * DIM], dv[2][TOKENS * KV_HEADS * DIM];

static int64_t many[3] = {TOKENS, HEADS, DIM}, few[3] = {TOKENS, KV_HEADS, DIM}, rows[2] = {HEADS, TOKENS};

static cpattn_tensor tensor(float *data, int64_t *shape, int32_t ndim) {
  cpattn_tensor t = {data, {CPATTN_DEVICE_CPU, 0}, ndim, {2, 32, 1}, shape, NULL, 0};
  return t;
}

static void fill(float *data, size_t n, float step) {
  for (size_t i = 0; i < n; i++) data[i] = (float)((i * 37 + 11) % 101) * step - 1.0f;
}

int main(void) {
  const int32_t cu_seqlens[] = {0, 4, TOKENS};
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  cpattn_plan *plan = NULL;
  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL;
  problem.cu_seqlens_q = cu_seqlens;
  problem.documents = 2;
  problem.heads = HEADS;
  problem.kv_heads = KV_HEADS;
  problem.head_dim = DIM;
  OK(cpattn_plan_create(&problem, &options, &plan));
  OK(cpattn_local_group(1, 10000, &transport));
  struct {
    earlier_rank_options options;
    unsigned char others[64];
  } e;
  memset(&e, 0xa5, sizeof e);
  earlier_rank_options earlier_options = {sizeof(earlier_rank_options), 1, CPATTN_DEVICE_CPU, 0, 0};
  e.options = earlier_options;
  e.options.struct_size = sizeof(cpattn_rank_options); /* what lies behind is then read, and refused */
  REFUSED(CPATTN_INVALID, "options.reserved is set", cpattn_rank_create(transport, (const cpattn_rank_options *)&e.options, &rank));
  e.options.struct_size = sizeof(earlier_rank_options);
  OK(cpattn_rank_create(transport, (const cpattn_rank_options *)&e.options, &rank));
  fill(q, TOKENS * HEADS * DIM, 0.02f);
  fill(k, TOKENS * KV_HEADS * DIM, 0.03f);
  fill(v, TOKENS * KV_HEADS * DIM, 0.04f);
  fill(d_o, TOKENS * HEADS * DIM, 0.01f);

  cpattn_tensor tq = tensor(q, many, 3), tk = tensor(k, few, 3), tv = tensor(v, few, 3), td = tensor(d_o, many, 3);
  cpattn_tensor to[2], tl[2], tdq[2], tdk[2], tdv[2];
  for (int i = 0; i < 2; i++) {
    to[i] = tensor(o[i], many, 3), tl[i] = tensor(lse[i], rows, 2), tdq[i] = tensor(dq[i], many, 3);
    tdk[i] = tensor(dk[i], few, 3), tdv[i] = tensor(dv[i], few, 3);
  }

  cpattn_forward_args forward = CPATTN_FORWARD_ARGS_INIT;
  forward.q = &tq, forward.k = &tk, forward.v = &tv, forward.o = &to[0], forward.lse = &tl[0];
  OK(cpattn_forward(rank, plan, &forward));
  cpattn_backward_args backward = CPATTN_BACKWARD_ARGS_INIT;
  backward.q = &tq, backward.k = &tk, backward.v = &tv, backward.o = &to[0], backward.lse = &tl[0], backward.d_o = &td;
  backward.dq = &tdq[0], backward.dk = &tdk[0], backward.dv = &tdv[0];
  OK(cpattn_backward(rank, plan, &backward));

  /* What follows the struct in memory is no part of it. */
  struct {
    earlier_forward_args args;
    unsigned char others[64];
  } f;
  struct {
    earlier_backward_args args;
    unsigned char others[64];
  } b;
  memset(&f, 0xa5, sizeof f);
  memset(&b, 0xa5, sizeof b);
  earlier_forward_args earlier_forward = {sizeof(earlier_forward_args), &tq, &tk, &tv, NULL, &to[1], &tl[1]};
  earlier_backward_args earlier_backward = {
      sizeof(earlier_backward_args), &tq, &tk, &tv, NULL, &to[1], &tl[1], &td, &tdq[1], &tdk[1], &tdv[1], NULL};
  f.args = earlier_forward;
  b.args = earlier_backward;
  OK(cpattn_forward(rank, plan, (const cpattn_forward_args *)&f.args));
  OK(cpattn_backward(rank, plan, (const cpattn_backward_args *)&b.args));
#define SAME(x) if (memcmp(x[0], x[1], sizeof x[0])) fprintf(stderr, "line %d: " #x " differs\n", __LINE__), failures++
  SAME(o);
  SAME(lse);
  SAME(dq);
  SAME(dk);
  SAME(dv);

  /* With today's size those bytes are the stream, max_logit and dropout_seed, and are refused. */
  f.args.struct_size = sizeof(cpattn_forward_args);
  REFUSED(CPATTN_INVALID, "max_logit", cpattn_forward(rank, plan, (const cpattn_forward_args *)&f.args));
  /* A struct that no header had. */
  f.args.struct_size = sizeof(earlier_forward_args) - sizeof(void *);
  REFUSED(CPATTN_INVALID, "args.struct_size is 48", cpattn_forward(rank, plan, (const cpattn_forward_args *)&f.args));

  later_forward_args later = {CPATTN_FORWARD_ARGS_INIT, 0};
  memset(o[1], 0, sizeof o[1]);
  later.known = forward;
  later.known.o = &to[1];
  later.known.struct_size = sizeof later;
  OK(cpattn_forward(rank, plan, &later.known));
  SAME(o);
  later.unknown = 1;
  REFUSED(CPATTN_UNSUPPORTED, "older than the header", cpattn_forward(rank, plan, &later.known));

  OK(cpattn_rank_destroy(rank));
  OK(cpattn_plan_destroy(plan));
  return failures != 0;
}
