/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The smallest program: one rank, two documents, causal attention.
 *
 * From the repository's root:
 *
 *   capi/build && cc -std=c99 examples/c/hello.c $(PKG_CONFIG_PATH=target/capi/lib/pkgconfig pkg-config --cflags --libs cpattn) \
 *     -Wl,-rpath,$PWD/target/capi/lib -o target/hello && target/hello
 */
#include <cpattn.h>
#include <stdio.h>
#include <stdlib.h>

#define TOKENS 6
#define HEADS 2
#define DIM 4

static void must(int32_t status) {
  if (status == CPATTN_OK) return;
  fprintf(stderr, "%s: %s\n", cpattn_status_name(status), cpattn_last_error());
  exit(1);
}

static cpattn_tensor f32_tensor(float *data, int32_t ndim, int64_t *shape) {
  cpattn_tensor t = {0};
  t.data = data;
  t.device.device_type = CPATTN_DEVICE_CPU;
  t.ndim = ndim;
  t.dtype.code = 2; /* float */
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape; /* strides NULL: compact */
  return t;
}

int main(void) {
  int32_t documents[] = {0, 4, TOKENS};
  float q[TOKENS * HEADS * DIM], k[TOKENS * HEADS * DIM], v[TOKENS * HEADS * DIM], o[TOKENS * HEADS * DIM];
  float lse[HEADS * TOKENS];
  for (int i = 0; i < TOKENS * HEADS * DIM; i++) {
    q[i] = (float)(i % 5) - 2.0f;
    k[i] = (float)(i % 7) - 3.0f;
    v[i] = (float)(i / (HEADS * DIM)); /* the token's number: o is a mean of them */
  }

  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  problem.cu_seqlens_q = documents;
  problem.documents = 2;
  problem.heads = HEADS;
  problem.head_dim = DIM;
  problem.dtype = CPATTN_F32;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  cpattn_plan *plan = NULL;
  must(cpattn_plan_create(&problem, &options, &plan));

  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL;
  must(cpattn_local_group(1, 1000, &transport));
  must(cpattn_rank_create(transport, NULL, &rank));

  int64_t rows[] = {TOKENS, HEADS, DIM}, head_major[] = {HEADS, TOKENS};
  cpattn_tensor tq = f32_tensor(q, 3, rows), tk = f32_tensor(k, 3, rows), tv = f32_tensor(v, 3, rows);
  cpattn_tensor to = f32_tensor(o, 3, rows), tlse = f32_tensor(lse, 2, head_major);
  cpattn_forward_args args = CPATTN_FORWARD_ARGS_INIT;
  args.q = &tq;
  args.k = &tk;
  args.v = &tv;
  args.o = &to;
  args.lse = &tlse;
  must(cpattn_forward(rank, plan, &args));

  for (int t = 0; t < TOKENS; t++) printf("token %d: head 0 reads %.3f on average, lse %.3f\n", t, o[t * HEADS * DIM], lse[t]);
  must(cpattn_rank_destroy(rank));
  must(cpattn_plan_destroy(plan));
  /* The first token of each document sees itself only. */
  return o[0] == 0.0f && o[4 * HEADS * DIM] == 4.0f ? 0 : 1;
}
