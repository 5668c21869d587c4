/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Instruction sets of the CPU kernels, forced for a rank and for single calls, and a ring of a program's own, whose calls
 * are parts of one document.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "expect.h"

enum { TOKENS = 800, STEPS = 8, PART = TOKENS / STEPS, DIM = 64, ISAS = 7 };

static const int32_t cu_seqlens[] = {0, TOKENS};
static float q[TOKENS * DIM], k[TOKENS * DIM], v[TOKENS * DIM], d_o[TOKENS * DIM];
static float o[TOKENS * DIM], lse[TOKENS], running[TOKENS * DIM], words[TOKENS * 2];
static float delta[TOKENS], dq[TOKENS * DIM], dk[TOKENS * DIM], dv[TOKENS * DIM];
static float kept[TOKENS * DIM], automatic[TOKENS * DIM];
static double reference[TOKENS * DIM];
static int64_t rows[] = {TOKENS, 1, DIM}, lse_shape[] = {1, TOKENS}, words_shape[] = {1, TOKENS, 2};

static cpattn_tensor tensor(float *data, int64_t *shape, int32_t ndim) {
  cpattn_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = CPATTN_DEVICE_CPU;
  t.ndim = ndim;
  t.dtype.code = 2, t.dtype.bits = 32, t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

static cpattn_problem problem(int32_t documents) {
  cpattn_problem p = CPATTN_PROBLEM_INIT;
  p.cu_seqlens_q = cu_seqlens;
  p.documents = (size_t)documents;
  p.heads = 1;
  p.head_dim = DIM;
  p.window_right = CPATTN_UNLIMITED;
  return p;
}

static cpattn_range part(int i, int len) {
  cpattn_range r;
  memset(&r, 0, sizeof r);
  r.row = r.pos = i * len;
  r.len = (uint32_t)len;
  r.block = r.period = 1;
  return r;
}

/* A q range with one k range, of a document that has so many tokens of q and of k. */
static cpattn_q_range q_range(cpattn_range range, uint8_t mode, uint32_t document) {
  cpattn_q_range queries;
  memset(&queries, 0, sizeof queries);
  queries.range = range;
  queries.document[0] = queries.document[1] = document;
  queries.keys_end = 1;
  queries.mode = mode;
  return queries;
}

/* o, cut into steps of one range of keys each, as a ring of `steps` ranks would run it, of a document of this length. */
static void forward(cpattn_scratch *scratch, int steps, uint32_t document, int64_t window) {
  cpattn_tensor tq = tensor(q, rows, 3), tk = tensor(k, rows, 3), tv = tensor(v, rows, 3), to = tensor(o, rows, 3);
  cpattn_tensor tl = tensor(lse, lse_shape, 2), tr = tensor(running, rows, 3), tw = tensor(words, words_shape, 3);
  for (int rank = 0; rank < steps; rank++) {
    for (int step = 0; step < steps; step++) {
      cpattn_attend_args a = CPATTN_ATTEND_ARGS_INIT;
      const cpattn_pair pair = {0, 0};
      const cpattn_band band = CPATTN_BAND_WHOLE;
      cpattn_range keys = part((rank + step) % steps, TOKENS / steps);
      uint8_t mode = steps == 1 ? CPATTN_ONLY : step == 0 ? CPATTN_FIRST : step + 1 < steps ? CPATTN_MERGE : CPATTN_LAST;
      cpattn_q_range queries = q_range(part(rank, TOKENS / steps), mode, document);
      a.q = &tq, a.k = &tk, a.v = &tv, a.o = &to, a.lse = &tl, a.running = &tr, a.running_lse = &tw;
      a.score.scale = 0.125;
      a.score.window_left = a.score.window_right = window;
      a.ranges.q = &queries, a.ranges.q_count = 1;
      a.ranges.k = &keys, a.ranges.k_count = 1;
      a.ranges.pairs = &pair, a.ranges.pair_count = 1;
      a.ranges.bands = &band, a.ranges.band_count = 1;
      OK(cpattn_attend(scratch, &a));
    }
  }
}

/* dq of one part of the rows against one part of the keys. */
static void backward(cpattn_scratch *scratch, uint32_t document) {
  cpattn_tensor tq = tensor(q, rows, 3), tk = tensor(k, rows, 3), tv = tensor(v, rows, 3), td = tensor(d_o, rows, 3);
  cpattn_tensor tl = tensor(lse, lse_shape, 2), te = tensor(delta, lse_shape, 2);
  cpattn_tensor tdq = tensor(dq, rows, 3), tdk = tensor(dk, rows, 3), tdv = tensor(dv, rows, 3);
  cpattn_attend_backward_args a = CPATTN_ATTEND_BACKWARD_ARGS_INIT;
  const cpattn_pair pair = {0, 0};
  const cpattn_band band = CPATTN_BAND_WHOLE;
  cpattn_range keys = part(0, PART);
  cpattn_q_range queries = q_range(part(0, PART), CPATTN_ONLY, document);
  a.q = &tq, a.k = &tk, a.v = &tv, a.d_o = &td, a.lse = &tl, a.delta = &te, a.dq = &tdq, a.dk = &tdk, a.dv = &tdv;
  a.score.scale = 0.125;
  a.score.window_right = CPATTN_UNLIMITED;
  a.ranges.q = &queries, a.ranges.q_count = 1;
  a.ranges.k = &keys, a.ranges.k_count = 1;
  a.ranges.pairs = &pair, a.ranges.pair_count = 1;
  a.ranges.bands = &band, a.ranges.band_count = 1;
  OK(cpattn_attend_backward(scratch, &a));
}

static double error_of_o(void) {
  double error = 0, norm = 0;
  for (int i = 0; i < TOKENS * DIM; i++) {
    error += (o[i] - reference[i]) * (o[i] - reference[i]);
    norm += reference[i] * reference[i];
  }
  return sqrt(error / norm);
}

static void make(void) {
  uint32_t seed = 12345;
  float *all[] = {q, k, v, d_o};
  for (int x = 0; x < 4; x++) {
    for (int i = 0; i < TOKENS * DIM; i++) {
      float sum = 0; /* nearly normal */
      for (int j = 0; j < 6; j++) seed = seed * 1664525u + 1013904223u, sum += (float)(seed >> 8) / (float)(1 << 24) - 0.5f;
      all[x][i] = sum * 1.4f;
    }
  }
  static double score[TOKENS];
  for (int i = 0; i < TOKENS; i++) {
    double most = -INFINITY, total = 0;
    for (int j = 0; j < TOKENS; j++) {
      score[j] = 0;
      for (int d = 0; d < DIM; d++) score[j] += (double)q[i * DIM + d] * k[j * DIM + d] * 0.125;
      if (score[j] > most) most = score[j];
    }
    for (int j = 0; j < TOKENS; j++) {
      double p = exp(score[j] - most);
      total += p;
      for (int d = 0; d < DIM; d++) reference[i * DIM + d] += p * v[j * DIM + d];
    }
    for (int d = 0; d < DIM; d++) reference[i * DIM + d] /= total;
  }
}

#define CHECK(condition) do { if (!(condition)) failures++, fprintf(stderr, "line %d: %s\n", __LINE__, #condition); } while (0)

/* Each instruction set is honoured, or refused as one that the machine lacks. */
static void instruction_sets(int32_t has[ISAS]) {
  cpattn_scratch *scratch = NULL;
  cpattn_problem p = problem(1);
  cpattn_options options = CPATTN_OPTIONS_INIT;
  cpattn_plan *plan = NULL;
  cpattn_tensor tq = tensor(q, rows, 3), tk = tensor(k, rows, 3), tv = tensor(v, rows, 3), to = tensor(o, rows, 3);
  cpattn_tensor tl = tensor(lse, lse_shape, 2);
  cpattn_forward_args args = CPATTN_FORWARD_ARGS_INIT;
  args.q = &tq, args.k = &tk, args.v = &tv, args.o = &to, args.lse = &tl;
  OK(cpattn_plan_create(&p, &options, &plan));
  OK(cpattn_scratch_create(1, &scratch));
  OK(cpattn_scratch_reserve(scratch, CPATTN_F32, DIM, DIM));
  REFUSED(CPATTN_INVALID, "isa is 7, expected CPATTN_ISA_AUTO, CPATTN_ISA_PORTABLE, ", cpattn_scratch_set_isa(scratch, ISAS));
  REFUSED(CPATTN_INVALID, "isa is -1", cpattn_scratch_set_isa(scratch, -1));
  REFUSED(CPATTN_INVALID_HANDLE, "NULL", cpattn_scratch_set_isa(NULL, CPATTN_ISA_AUTO));
  for (int32_t isa = 0; isa < ISAS; isa++) {
    cpattn_transport *transport = NULL;
    cpattn_rank *rank = NULL;
    cpattn_rank_options o_rank = CPATTN_RANK_OPTIONS_INIT;
    OK(cpattn_local_group(1, 10000, &transport));
    o_rank.isa = isa;
    has[isa] = cpattn_scratch_set_isa(scratch, isa) == CPATTN_OK;
    if (!has[isa]) {
      REFUSED(CPATTN_UNSUPPORTED, "instruction set", cpattn_scratch_set_isa(scratch, isa));
      REFUSED(CPATTN_UNSUPPORTED, "instruction set", cpattn_rank_create(transport, &o_rank, &rank));
      OK(cpattn_transport_destroy(transport)); /* still the caller's */
      continue;
    }
    forward(scratch, 1, 0, CPATTN_UNLIMITED);
    CHECK(error_of_o() < 1e-6);
    memcpy(kept, o, sizeof o);
    if (isa == CPATTN_ISA_AUTO) memcpy(automatic, o, sizeof o);
    OK(cpattn_rank_create(transport, &o_rank, &rank));
    memset(o, 0, sizeof o);
    OK(cpattn_forward(rank, plan, &args));
    CHECK(!memcmp(kept, o, sizeof o)); /* one rank's plan is one call */
    OK(cpattn_rank_destroy(rank));
  }
  CHECK(has[CPATTN_ISA_AUTO] && has[CPATTN_ISA_PORTABLE] && has[CPATTN_ISA_NEON] + has[CPATTN_ISA_AVX2] < 2);
  /* The one that is set is the one that runs: multiply-adds that are fused round less often. */
  int32_t fused = has[CPATTN_ISA_AVX2] ? CPATTN_ISA_AVX2 : has[CPATTN_ISA_NEON] ? CPATTN_ISA_NEON : 0;
  if (fused) {
    OK(cpattn_scratch_set_isa(scratch, CPATTN_ISA_PORTABLE));
    forward(scratch, 1, 0, CPATTN_UNLIMITED);
    memcpy(kept, o, sizeof o);
    OK(cpattn_scratch_set_isa(scratch, fused));
    forward(scratch, 1, 0, CPATTN_UNLIMITED);
    CHECK(memcmp(kept, o, sizeof o));
  }
  OK(cpattn_scratch_set_isa(scratch, CPATTN_ISA_PORTABLE));
  OK(cpattn_scratch_set_isa(scratch, CPATTN_ISA_AUTO));
  forward(scratch, 1, 0, CPATTN_UNLIMITED);
  CHECK(!memcmp(automatic, o, sizeof o));
  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL;
  cpattn_rank_options wrong = CPATTN_RANK_OPTIONS_INIT;
  OK(cpattn_local_group(1, 1000, &transport));
  wrong.isa = ISAS;
  REFUSED(CPATTN_INVALID, "options.isa is 7, expected CPATTN_ISA_AUTO, ", cpattn_rank_create(transport, &wrong, &rank));
  wrong.isa = CPATTN_ISA_AUTO, wrong.reserved = 1;
  REFUSED(CPATTN_INVALID, "options.reserved is set", cpattn_rank_create(transport, &wrong, &rank));
  OK(cpattn_transport_destroy(transport));
  OK(cpattn_scratch_destroy(scratch));
  OK(cpattn_plan_destroy(plan));
}

/* A ring of a program's own errs as one call over the document does, if its ranges have the document's length. */
static void ring(const int32_t has[ISAS]) {
  cpattn_scratch *scratch = NULL;
  const int64_t all = CPATTN_UNLIMITED;
  OK(cpattn_scratch_create(1, &scratch));
  OK(cpattn_scratch_reserve(scratch, CPATTN_F32, DIM, DIM));
  for (int32_t isa = CPATTN_ISA_PORTABLE; isa < ISAS; isa++) {
    if (!has[isa]) continue;
    OK(cpattn_scratch_set_isa(scratch, isa));
    forward(scratch, 1, 0, all);
    double one = error_of_o();
    forward(scratch, STEPS, TOKENS, all);
    double told = error_of_o();
    CHECK(told <= 1.1 * one + 4 * 5.97e-8);
    backward(scratch, TOKENS);
    memcpy(kept, dq, sizeof dq);
    forward(scratch, STEPS, 0, all);
    double untold = error_of_o();
    printf("instruction set %d: one call errs by %.2g, a ring of %d by %.2g, without the length by %.2g\n", isa, one, STEPS, told, untold);
    backward(scratch, 0);
    /* Only matrix units make a difference. */
    CHECK(isa == CPATTN_ISA_AMX ? untold > 1.3 * told : untold == told);
    CHECK((isa == CPATTN_ISA_AMX) == !!memcmp(kept, dq, sizeof dq));
    /* A short document is computed as without a length here. */
    memcpy(kept, o, sizeof o);
    forward(scratch, STEPS, PART, all);
    CHECK(!memcmp(kept, o, sizeof o));
    /* A window that leaves a row few keys makes a long document a short one. */
    forward(scratch, STEPS, 0, 64);
    memcpy(kept, o, sizeof o);
    forward(scratch, STEPS, TOKENS, 64);
    CHECK(!memcmp(kept, o, sizeof o));
  }
  OK(cpattn_scratch_destroy(scratch));
}

int main(void) {
  int32_t has[ISAS];
  make();
  instruction_sets(has);
  ring(has);
  return failures != 0;
}
