/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What ranks do together between runs: rows that lie some tokens on, compared with a shift of the whole, and the trace of
 * a group; and events as files. */
#include <cpattn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"

enum { RANKS = 3, TOKENS = 26, DIM = 4 };
static const int32_t documents[] = {0, 11, 12, 26};
static cpattn_plan *plan;

typedef struct {
  cpattn_rank *rank;
  int32_t number, odd;
  cpattn_event events[128];
  size_t count;
} end;

/* One at a time: `failures` is one for all. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
#define LOCKED(call) \
  do { \
    int32_t status_ = call; \
    pthread_mutex_lock(&lock); \
    expect(status_, CPATTN_OK, "", #call, __LINE__); \
    pthread_mutex_unlock(&lock); \
  } while (0)
#define TRUE(holds) \
  do { \
    if (!(holds)) pthread_mutex_lock(&lock), failures++, fprintf(stderr, "line %d: not %s\n", __LINE__, #holds), pthread_mutex_unlock(&lock); \
  } while (0)

static cpattn_tensor tensor(void *data, int32_t ndim, int64_t *shape, int64_t *strides, uint8_t bits) {
  cpattn_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data, t.ndim = ndim, t.shape = shape, t.strides = strides;
  t.device.device_type = CPATTN_DEVICE_CPU;
  t.dtype.code = 0, t.dtype.bits = bits, t.dtype.lanes = 1;
  return t;
}

static int64_t tokens_of(int32_t rank) {
  cpattn_share share = CPATTN_SHARE_INIT;
  LOCKED(cpattn_plan_share(plan, (uint32_t)rank, &share));
  return (int64_t)share.q_tokens;
}

/* Rows of one, of 3 and of 2 x 2 numbers, by each `by`, against cpattn_plan_shift of the whole. */
static void *shifts(void *argument) {
  end *e = argument;
  int64_t n = tokens_of(e->number), steps[] = {1, -1, 0, 5, INT64_MIN};
  int64_t whole[TOKENS][2][3], mine[TOKENS][2][3], want[TOKENS][2][3], got[TOKENS][2][3], fill = -100;
  for (int t = 0; t < TOKENS; t++)
    for (int i = 0; i < 6; i++) whole[t][i / 3][i % 3] = 10 * t + i;
  int64_t shapes[][3] = {{0}, {0, 3}, {0, 2, 2}}, strides[] = {6, 3, 1}, flat[] = {6, 1};
  for (int32_t ndim = 1; ndim <= 3; ndim++)
    for (int i = 0; i < 5; i++) {
      int64_t all[3], own[3];
      memcpy(all, shapes[ndim - 1], sizeof all), memcpy(own, all, sizeof own);
      all[0] = TOKENS, own[0] = n;
      int64_t *by_token = ndim == 3 ? strides : flat;
      cpattn_tensor w = tensor(whole, ndim, all, by_token, 64), m = tensor(mine, ndim, own, by_token, 64);
      cpattn_tensor to = tensor(want, ndim, own, by_token, 64), out = tensor(got, ndim, own, by_token, 64);
      memset(mine, 7, sizeof mine), memset(want, 7, sizeof want), memset(got, 7, sizeof got);
      LOCKED(cpattn_plan_shard(plan, CPATTN_Q, (uint32_t)e->number, &w, &m));
      LOCKED(cpattn_plan_shift(plan, (uint32_t)e->number, steps[i], &fill, &w, &to));
      LOCKED(cpattn_rank_shift(e->rank, plan, steps[i], &fill, &m, &out));
      /* Also what lies between the rows is untouched. */
      TRUE(!memcmp(want, got, sizeof want));
    }
  return NULL;
}

/* One rank shifts rows of another type: all are told, and go on. */
static void *disagree(void *argument) {
  end *e = argument;
  int64_t rows[TOKENS] = {0}, out[TOKENS], fill = 0, n = tokens_of(e->number);
  cpattn_tensor m = tensor(rows, 1, &n, NULL, 64), o = tensor(out, 1, &n, NULL, 64);
  m.dtype.code = o.dtype.code = e->odd ? 2 : 0;
  int32_t status = cpattn_rank_shift(e->rank, plan, 1, &fill, &m, &o);
  TRUE(status == CPATTN_DISAGREEMENT && strstr(cpattn_last_error(), "a shift by 1 of rows of 8 bytes"));
  status = e->odd ? cpattn_rank_gather_trace(e->rank) : cpattn_rank_shift(e->rank, plan, 1, &fill, &m, &o);
  TRUE(status == CPATTN_DISAGREEMENT);
  m.dtype.code = o.dtype.code = 0;
  LOCKED(cpattn_rank_shift(e->rank, plan, 1, &fill, &m, &o));
  return NULL;
}

static void *traced(void *argument) {
  end *e = argument;
  int64_t n = tokens_of(e->number), rows[] = {n, 1, DIM}, heads[] = {1, n};
  static float memory[RANKS][5][TOKENS * DIM];
  cpattn_tensor t[5];
  for (int i = 0; i < 5; i++) {
    t[i] = tensor(memory[e->number][i], i < 4 ? 3 : 2, i < 4 ? rows : heads, NULL, 32);
    t[i].dtype.code = 2;
  }
  cpattn_forward_args args = CPATTN_FORWARD_ARGS_INIT;
  args.q = &t[0], args.k = &t[1], args.v = &t[2], args.o = &t[3], args.lse = &t[4];
  LOCKED(cpattn_rank_record(e->rank, 64));
  LOCKED(cpattn_forward(e->rank, plan, &args));
  /* Taken in part before: the rest is gathered. */
  size_t taken = 0;
  if (e->number == 1) LOCKED(cpattn_rank_trace(e->rank, e->events, 1, &taken));
  LOCKED(cpattn_rank_gather_trace(e->rank));
  size_t count = 99;
  LOCKED(cpattn_rank_trace(e->rank, NULL, 0, &count));
  TRUE(e->number == 0 || count == 0);
  LOCKED(cpattn_rank_trace(e->rank, e->events, 128, &e->count));
  TRUE(e->count == count);
  LOCKED(cpattn_rank_trace(e->rank, NULL, 0, &count));
  TRUE(count == 0);
  return NULL;
}

static void on_threads(end *ends, void *(*job)(void *)) {
  pthread_t threads[RANKS];
  for (int r = 0; r < RANKS; r++)
    if (pthread_create(&threads[r], NULL, job, &ends[r])) exit(2);
  for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
}

static void refusals(cpattn_rank *rank) {
  int64_t n = tokens_of(0), rows[2 * TOKENS] = {0}, out[TOKENS], fill = 0, short_n = n - 1, zero = 0;
  cpattn_tensor m = tensor(rows, 1, &n, NULL, 64), o = tensor(out, 1, &n, NULL, 64), other;
  REFUSED(CPATTN_INVALID_HANDLE, "rank is NULL", cpattn_rank_shift(NULL, plan, 1, &fill, &m, &o));
  REFUSED(CPATTN_INVALID_HANDLE, "plan is NULL", cpattn_rank_shift(rank, NULL, 1, &fill, &m, &o));
  REFUSED(CPATTN_INVALID, "fill is NULL", cpattn_rank_shift(rank, plan, 1, NULL, &m, &o));
  REFUSED(CPATTN_INVALID, "rows is NULL", cpattn_rank_shift(rank, plan, 1, &fill, NULL, &o));
  REFUSED(CPATTN_INVALID, "out is NULL", cpattn_rank_shift(rank, plan, 1, &fill, &m, NULL));
  other = tensor(rows, 1, &short_n, NULL, 64);
  REFUSED(CPATTN_INVALID, "rows.shape[0] is", cpattn_rank_shift(rank, plan, 1, &fill, &other, &o));
  REFUSED(CPATTN_INVALID, "out.shape[0] is", cpattn_rank_shift(rank, plan, 1, &fill, &m, &other));
  other = tensor(out, 1, &n, NULL, 32);
  REFUSED(CPATTN_INVALID, "out.dtype is code 0 with 32 bits", cpattn_rank_shift(rank, plan, 1, &fill, &m, &other));
  other = tensor(out, 1, &n, &zero, 64);
  REFUSED(CPATTN_INVALID, "out.strides is overlapping", cpattn_rank_shift(rank, plan, 1, &fill, &m, &other));
  other = tensor(rows + 1, 1, &n, NULL, 64);
  REFUSED(CPATTN_INVALID, "out is memory that overlaps rows", cpattn_rank_shift(rank, plan, 1, &fill, &m, &other));
  REFUSED(CPATTN_INVALID_HANDLE, "rank is NULL", cpattn_rank_gather_trace(NULL));
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  cpattn_plan *two = NULL;
  problem.cu_seqlens_q = documents, problem.documents = 3, problem.heads = 1, problem.head_dim = DIM;
  options.world = 2, options.ring = 2, options.ulysses = 1;
  OK(cpattn_plan_create(&problem, &options, &two));
  REFUSED(CPATTN_INVALID, "world", cpattn_rank_shift(rank, two, 1, &fill, &m, &o));
  OK(cpattn_plan_destroy(two));
}

typedef int32_t (*drawing)(const cpattn_event *, size_t, char *, size_t, size_t *);

/* The whole text, and parts that end in a 0. */
static void drawn(drawing draw, const end *e, const char *begin, const char *within) {
  static char text[1 << 18], part[1 << 18];
  size_t needed = 0, again = 0;
  OK(draw(e->events, e->count, NULL, 0, &needed));
  OK(draw(e->events, e->count, text, sizeof text, &again));
  TRUE(needed == again && strlen(text) + 1 == needed && !strncmp(text, begin, strlen(begin)) && strstr(text, within));
  OK(draw(e->events, e->count, part, 100, &again));
  TRUE(again == needed && strlen(part) <= 99 && strlen(part) > 90 && !strncmp(part, text, strlen(part)));
  OK(draw(NULL, 0, part, sizeof part, &again));
  TRUE(!strncmp(part, begin, 4));

  cpattn_event own;
  memset(&own, 0, sizeof own);
  own.end_ns = UINT64_MAX;
  memcpy(own.name, "<a \"name\" of 32 characters here>", 32);
  memcpy(own.phase, "\xff\n", 2);
  cpattn_event both[] = {own, own};
  both[1].rank = UINT32_MAX;
  OK(draw(both, 2, part, sizeof part, &again));
  TRUE(strstr(part, draw == cpattn_timeline_svg ? "&lt;a &quot;name&quot;" : "<a \\\"name\\\""));
  REFUSED(CPATTN_INVALID, "events is NULL", draw(NULL, 1, part, sizeof part, &again));
  REFUSED(CPATTN_INVALID, "text is NULL", draw(&own, 1, NULL, 1, &again));
  REFUSED(CPATTN_INVALID, "needed is NULL", draw(&own, 1, part, sizeof part, NULL));
  both[1].lane = 2;
  REFUSED(CPATTN_INVALID, "events[1].lane is 2, expected CPATTN_COMPUTE or CPATTN_COMMUNICATION", draw(both, 2, part, sizeof part, &again));
  both[1].lane = 0, both[1].start_ns = 8, both[1].end_ns = 7;
  REFUSED(CPATTN_INVALID, "events[1].end_ns is 7, expected at least its start_ns, 8", draw(both, 2, part, sizeof part, &again));
  both[1].end_ns = 9, both[1].reserved = 1;
  REFUSED(CPATTN_INVALID, "events[1].reserved is 1", draw(both, 2, part, sizeof part, &again));
}

int main(void) {
  static end ends[RANKS];
  cpattn_transport *transports[RANKS];
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  problem.cu_seqlens_q = documents, problem.documents = 3, problem.heads = 1, problem.head_dim = DIM;
  options.world = options.ring = RANKS, options.ulysses = 1, options.layout = CPATTN_LAYOUT_ZIGZAG;
  OK(cpattn_plan_create(&problem, &options, &plan));
  OK(cpattn_local_group(RANKS, 60000, transports));
  for (int r = 0; r < RANKS; r++) {
    ends[r].number = r, ends[r].odd = r == 1;
    OK(cpattn_rank_create(transports[r], NULL, &ends[r].rank));
  }
  refusals(ends[0].rank);
  on_threads(ends, shifts);
  on_threads(ends, disagree);
  on_threads(ends, traced);
  size_t by_rank[RANKS] = {0};
  for (size_t i = 0; i < ends[0].count; i++) {
    by_rank[ends[0].events[i].rank % RANKS]++;
    TRUE(i == 0 || ends[0].events[i].start_ns >= ends[0].events[i - 1].start_ns);
  }
  TRUE(by_rank[0] > 1 && by_rank[1] > 0 && by_rank[2] > 1);
  drawn(cpattn_timeline_svg, &ends[0], "<svg xmlns", ">3 ranks, ");
  drawn(cpattn_chrome_trace, &ends[0], "{\"displayTimeUnit\"", "\"name\":\"rank 2\"");
  for (int r = 0; r < RANKS; r++) {
    OK(cpattn_rank_poll(ends[r].rank));
    OK(cpattn_rank_destroy(ends[r].rank));
  }
  OK(cpattn_plan_destroy(plan));
  return failures != 0;
}
