/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * An engine of the caller's: threads that send and receive through queues, and a store. A run over it, what a group does beside
 * a rank, and a rank that stops, which the others name.
 */
#define _POSIX_C_SOURCE 200809L
#include <cpattn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "expect.h"

#define RANKS 3
#define TOKENS 12
#define DIM 4
#define MOST 4096

/* A message that was posted: on its way, or waited for. */
typedef struct {
  uint32_t from, to, tag;
  void *data;
  size_t bytes;
  int there;
} letter;

typedef struct {
  char key[64], value[CPATTN_ENGINE_VALUE];
  size_t bytes;
} entry;

/* All of it behind one lock: `sent` in the order of posting, requests by number, the store. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static letter sent[MOST], requests[MOST];
static size_t sent_count, request_count, entries, came;
static entry store[MOST / 16];
static int closed[RANKS], stopped[RANKS], released[RANKS];

static size_t rank_of(const void *context) { return (size_t)(uintptr_t)context; }

static int32_t fails(char *text, const char *why) {
  snprintf(text, CPATTN_ENGINE_TEXT, "%s", why);
  return CPATTN_ENGINE_GROUP;
}

/* Begins a call of a rank that may be stopped, in which case it does not return before it goes on. */
static void enter(const void *context) {
  pthread_mutex_lock(&lock);
  while (stopped[rank_of(context)]) pthread_cond_wait(&changed, &lock);
}

static int32_t leave(int32_t outcome) {
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return outcome;
}

static int32_t open_store(void *context, char *text) {
  (void)text;
  enter(context);
  return leave(0);
}

static int32_t connect_all(void *context, char *text) {
  (void)text;
  enter(context);
  came++;
  pthread_cond_broadcast(&changed);
  while (came < RANKS) pthread_cond_wait(&changed, &lock);
  return leave(0);
}

static int32_t post(void *context, int32_t receive, uint32_t peer, uint32_t tag, void *data, size_t bytes,
                    uint64_t *request, char *text) {
  uint32_t own = (uint32_t)rank_of(context);
  letter mine = {receive ? peer : own, receive ? own : peer, tag, data, bytes, 0};
  enter(context);
  if (request_count == MOST || sent_count == MOST) return fails(text, "no room"), leave(2);
  *request = request_count;
  requests[request_count++] = mine;
  if (!receive) {
    mine.data = memcpy(malloc(bytes), data, bytes), mine.there = 1;
    sent[sent_count++] = mine;
  }
  return leave(0);
}

/* The first message of this sender, receiver and tag that has not arrived yet. */
static letter *first(const letter *wanted) {
  for (size_t i = 0; i < sent_count; i++)
    if (sent[i].there && sent[i].from == wanted->from && sent[i].to == wanted->to && sent[i].tag == wanted->tag) return &sent[i];
  return NULL;
}

static int32_t wait_moved(void *context, uint64_t request, uint64_t timeout_ms, char *text) {
  size_t own = rank_of(context);
  struct timespec end;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += (time_t)(timeout_ms / 1000), end.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
  if (end.tv_nsec >= 1000000000) end.tv_sec++, end.tv_nsec -= 1000000000;
  enter(context);
  letter *mine = &requests[request], *arrived;
  if (mine->from == own) return leave(0);
  while (!(arrived = first(mine))) {
    if (closed[own] || closed[mine->from]) return fails(text, "the connection was closed"), leave(CPATTN_ENGINE_GROUP);
    if (pthread_cond_timedwait(&changed, &lock, &end)) return fails(text, "the time has passed"), leave(CPATTN_ENGINE_GROUP);
  }
  memcpy(mine->data, arrived->data, arrived->bytes <= mine->bytes ? arrived->bytes : 0);
  free(arrived->data);
  arrived->there = 0;
  return leave(0);
}

static void close_all(void *context) {
  pthread_mutex_lock(&lock);
  closed[rank_of(context)] = 1;
  leave(0);
}

static entry *find(const char *key) {
  for (size_t i = 0; i < entries; i++)
    if (strcmp(store[i].key, key) == 0) return &store[i];
  return NULL;
}

static int32_t put(void *context, const char *key, const void *value, size_t bytes, void *there, size_t *there_bytes, char *text) {
  (void)text;
  enter(context);
  entry *e = find(key);
  if (!e) {
    e = &store[entries++];
    snprintf(e->key, sizeof e->key, "%s", key);
    memcpy(e->value, value, bytes), e->bytes = bytes;
  }
  memcpy(there, e->value, e->bytes), *there_bytes = e->bytes;
  return leave(0);
}

static int32_t get(void *context, const char *key, void *there, size_t *there_bytes, char *text) {
  (void)text;
  enter(context);
  entry *e = find(key);
  if (e) memcpy(there, e->value, e->bytes), *there_bytes = e->bytes;
  return leave(0);
}

static int32_t wait_for(void *context, const char *key, char *text) {
  (void)text;
  enter(context);
  while (!find(key) || stopped[rank_of(context)]) pthread_cond_wait(&changed, &lock);
  return leave(0);
}

static void release(void *context) {
  pthread_mutex_lock(&lock);
  released[rank_of(context)]++;
  leave(0);
}

static cpattn_plan *plan;
static float q[RANKS][TOKENS * DIM], o[RANKS][TOKENS * DIM], lse[RANKS][TOKENS];

static cpattn_tensor tensor(float *data, int64_t *shape, int32_t ndim) {
  cpattn_tensor t = {data, {CPATTN_DEVICE_CPU, 0}, ndim, {2, 32, 1}, shape, NULL, 0};
  return t;
}

static cpattn_engine_table table_of(size_t number) {
  cpattn_engine_table table = CPATTN_ENGINE_TABLE_INIT;
  table.context = (void *)(uintptr_t)number, table.rank = (uint32_t)number, table.world = RANKS;
  table.open = open_store, table.connect = connect_all, table.post = post, table.wait = wait_moved, table.close = close_all;
  table.put = put, table.get = get, table.wait_for = wait_for, table.release = release;
  return table;
}

static int32_t run(cpattn_rank *rank, size_t number) {
  int64_t rows[] = {TOKENS / RANKS, 1, DIM}, heads[] = {1, TOKENS / RANKS};
  cpattn_tensor tq = tensor(q[number], rows, 3), to = tensor(o[number], rows, 3), tl = tensor(lse[number], heads, 2);
  cpattn_forward_args forward = CPATTN_FORWARD_ARGS_INIT;
  forward.q = forward.k = forward.v = &tq, forward.o = &to, forward.lse = &tl;
  return cpattn_forward(rank, plan, &forward);
}

static void *job(void *context) {
  size_t number = rank_of(context);
  uint32_t next = (uint32_t)((number + 1) % RANKS), last = (uint32_t)((number + RANKS - 1) % RANKS);
  cpattn_engine_table table = table_of(number);
  cpattn_transport *transport = NULL, *other = NULL, *local[1] = {NULL};
  cpattn_rank *rank = NULL;
  OK(cpattn_engine_group(&table, 1500, &transport));
  REFUSED(CPATTN_INVALID, "connect it first", cpattn_engine_agree(transport, 0, RANKS, 1, (uint64_t[RANKS]){0}));
  OK(cpattn_engine_connect(transport));
  OK(cpattn_engine_share(transport, &other));
  OK(cpattn_rank_create(transport, NULL, &rank));
  OK(run(rank, number));
  /* Beside the rank. */
  uint64_t all[RANKS] = {0}, out = 10 + number, in = 0;
  OK(cpattn_engine_agree(other, 0, RANKS, 7 + number, all));
  for (size_t i = 0; i < RANKS; i++)
    if (all[i] != 7 + i) failures++, fprintf(stderr, "rank %zu gave %d\n", i, (int)all[i]);
  cpattn_message to = {next, &out, sizeof out}, from = {last, &in, sizeof in};
  OK(cpattn_engine_exchange(other, 5, &to, 1, &from, 1));
  if (in != 10 + last) failures++, fprintf(stderr, "%d from rank %u\n", (int)in, last);
  REFUSED(CPATTN_INVALID, "sends[0].peer is 3, expected a rank below 3",
          cpattn_engine_exchange(other, 5, &(cpattn_message){RANKS, &out, 8}, 1, NULL, 0));
  OK(cpattn_local_group(1, 1000, local));
  REFUSED(CPATTN_INVALID, "transport is of another kind, expected one of cpattn_engine_group", cpattn_engine_poll(local[0]));
  OK(cpattn_transport_destroy(local[0]));
  OK(cpattn_engine_poll(other));
  /* Rank 2 stops. */
  OK(cpattn_engine_agree(other, 0, RANKS, 1, all));
  if (number == 2) {
    pthread_mutex_lock(&lock);
    stopped[2] = 1;
    leave(0);
    REFUSED(CPATTN_PEER, "rank 2 gives no answer", run(rank, number));
  } else {
    REFUSED(CPATTN_PEER, "rank 2 gives no answer: it was killed, is stopped, or is cut off",
            cpattn_engine_agree(other, 0, RANKS, 1, all));
    REFUSED(CPATTN_PEER, "the group failed before: ", cpattn_rank_poll(rank));
    if (cpattn_last_error_peer() != 2) failures++, fprintf(stderr, "rank %d is named\n", (int)cpattn_last_error_peer());
    REFUSED(CPATTN_INVALID_HANDLE, "NULL", cpattn_engine_abort(NULL));
    if (cpattn_last_error_peer() != -1) failures++, fprintf(stderr, "a rank is named\n");
    pthread_mutex_lock(&lock);
    stopped[2] = 0;
    leave(0);
  }
  OK(cpattn_engine_abort(other));
  OK(cpattn_rank_destroy(rank));
  OK(cpattn_transport_destroy(other));
  return NULL;
}

int main(void) {
  const int32_t cu_seqlens[] = {0, TOKENS};
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  cpattn_engine_table table = table_of(0);
  cpattn_transport *transport = NULL;
  problem.cu_seqlens_q = cu_seqlens, problem.documents = 1, problem.heads = 1, problem.head_dim = DIM;
  options.world = options.ring = RANKS, options.ulysses = 1, options.layout = CPATTN_LAYOUT_CONTIGUOUS;
  OK(cpattn_plan_create(&problem, &options, &plan));
  REFUSED(CPATTN_INVALID, "deadline_ms is 0", cpattn_engine_group(&table, 0, &transport));
  table.rank = RANKS;
  REFUSED(CPATTN_INVALID, "table.rank is 3, expected below the world of 3", cpattn_engine_group(&table, 1, &transport));
  table.rank = 0, table.world = 0;
  REFUSED(CPATTN_INVALID, "table.world is 0, expected 1 to 1048576", cpattn_engine_group(&table, 1, &transport));
  table.world = RANKS, table.wait = NULL;
  REFUSED(CPATTN_INVALID, "table.wait is NULL, expected a function", cpattn_engine_group(&table, 1, &transport));
  pthread_t threads[RANKS];
  for (size_t i = 0; i < RANKS; i++) pthread_create(&threads[i], NULL, job, (void *)(uintptr_t)i);
  for (size_t i = 0; i < RANKS; i++) pthread_join(threads[i], NULL);
  for (size_t i = 0; i < RANKS; i++)
    if (released[i] != 1) failures++, fprintf(stderr, "rank %zu was released %d times\n", i, released[i]);
  OK(cpattn_plan_destroy(plan));
  return failures != 0;
}
