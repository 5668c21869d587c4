/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* The check of a ring's links: what it measures, what it refuses, and which link it names. */
#include <cpattn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"

#define RANKS 3

typedef struct {
  cpattn_transport *transport;
  cpattn_rank *rank;
  cpattn_link links[2 * RANKS];
  size_t count;
  int32_t status;
  char said[512];
} end;

static void *check(void *argument) {
  end *e = argument;
  e->status = cpattn_ring_check(e->transport, 100000, e->links, 2 * RANKS, &e->count);
  if (e->status) strncpy(e->said, cpattn_last_error(), sizeof e->said - 1); /* this thread's */
  return NULL;
}

/* Rank r of `missing` and beyond does not take part. */
static void on_threads(end *ends, int missing, uint64_t deadline_ms) {
  cpattn_transport *transports[RANKS];
  pthread_t threads[RANKS];
  memset(ends, 0, sizeof(end) * RANKS);
  OK(cpattn_local_group(RANKS, deadline_ms, transports));
  for (int r = 0; r < RANKS; r++) {
    ends[r].transport = transports[r];
    if (r < missing && pthread_create(&threads[r], NULL, check, &ends[r])) exit(2);
  }
  for (int r = 0; r < missing; r++) pthread_join(threads[r], NULL);
  for (int r = 0; r < RANKS; r++) OK(cpattn_transport_destroy(transports[r]));
}

static void *check_by_rank(void *argument) {
  end *e = argument;
  e->status = cpattn_rank_ring_check(e->rank, 1000, e->links, 2 * RANKS, &e->count);
  return NULL;
}

/* The same once transports have become ranks. */
static void by_ranks(void) {
  end ends[RANKS];
  cpattn_transport *transports[RANKS];
  pthread_t threads[RANKS];
  memset(ends, 0, sizeof ends);
  OK(cpattn_local_group(RANKS, 60000, transports));
  for (int r = 0; r < RANKS; r++) OK(cpattn_rank_create(transports[r], NULL, &ends[r].rank));
  cpattn_rank *rank = ends[0].rank;
  cpattn_link *links = ends[0].links;
  size_t count = 99;
  OK(cpattn_rank_ring_check(rank, 1000, NULL, 0, &count));
  if (count != 2 * RANKS) failures++, fprintf(stderr, "room for %zu links\n", count);
  REFUSED(CPATTN_INVALID_HANDLE, "rank is NULL", cpattn_rank_ring_check(NULL, 8, links, 6, &count));
  REFUSED(CPATTN_INVALID, "count is NULL", cpattn_rank_ring_check(rank, 8, links, 6, NULL));
  REFUSED(CPATTN_INVALID, "links is NULL", cpattn_rank_ring_check(rank, 8, NULL, 6, &count));
  REFUSED(CPATTN_INVALID, "capacity is 5, expected at least 6", cpattn_rank_ring_check(rank, 8, links, 5, &count));
  REFUSED(CPATTN_INVALID, "bytes is 0", cpattn_rank_ring_check(rank, 0, links, 6, &count));
  for (int r = 0; r < RANKS; r++)
    if (pthread_create(&threads[r], NULL, check_by_rank, &ends[r])) exit(2);
  for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
  for (int r = 0; r < RANKS; r++) {
    OK(ends[r].status);
    OK(cpattn_rank_poll(ends[r].rank));
  }
  if (ends[0].count != 2 * RANKS || links[5].from != 1 || links[5].to != 0 || !(links[5].latency > 0.0))
    failures++, fprintf(stderr, "%zu links by ranks\n", ends[0].count);
  for (int r = 0; r < RANKS; r++) OK(cpattn_rank_destroy(ends[r].rank));
}

static int32_t agree(void *context, uint32_t first, uint32_t end, uint64_t number, uint64_t *all, int64_t *blame) {
  (void)context, (void)blame;
  for (uint32_t i = first; i < end; i++) all[i - first] = number;
  return 0;
}

static int32_t exchange(void *context, const char *operation, uint32_t step, const cpattn_message *sends, size_t send_count, const cpattn_message *recvs, size_t recv_count, void *stream, int64_t *blame) {
  (void)context, (void)operation, (void)step, (void)sends, (void)send_count, (void)recvs, (void)recv_count, (void)stream;
  *blame = 1;
  return 7;
}

static int32_t poll_now(void *context, int64_t *blame) {
  (void)context, (void)blame;
  return 0;
}

static void count_aborts(void *context) { ++*(int *)context; }

int main(void) {
  static const uint32_t from[] = {0, 1, 2, 0, 2, 1}, to[] = {1, 2, 0, 2, 1, 0};
  end ends[RANKS];
  on_threads(ends, RANKS, 60000);
  for (int r = 0; r < RANKS; r++) OK(ends[r].status);
  if (ends[0].count != 2 * RANKS) failures++, fprintf(stderr, "%zu links\n", ends[0].count);
  for (int i = 0; i < 2 * RANKS; i++) {
    cpattn_link l = ends[0].links[i];
    if (l.from != from[i] || l.to != to[i] || !(l.latency > 0.0) || !(l.latency < 10.0) || !(l.bytes_per_second > 1e4))
      failures++, fprintf(stderr, "link %d: %u %u %g %g\n", i, l.from, l.to, l.latency, l.bytes_per_second);
  }

  /* Rank 2 takes no part: rank 1, which is to send to it, names the link; all have the error. */
  on_threads(ends, RANKS - 1, 3000);
  for (int r = 0; r < RANKS - 1; r++)
    if (ends[r].status != CPATTN_PEER || !strstr(ends[r].said, "rank 2 did not answer") || !strstr(ends[r].said, "; try: "))
      failures++, fprintf(stderr, "rank %d: %d %s\n", r, ends[r].status, ends[r].said);
  if (!strstr(ends[1].said, "link 1 → 2 failed")) failures++, fprintf(stderr, "rank 1: %s\n", ends[1].said);

  by_ranks();

  cpattn_transport *transport = NULL, *pair[2];
  cpattn_link links[2 * RANKS];
  size_t count = 99;
  OK(cpattn_local_group(1, 1000, &transport));
  REFUSED(CPATTN_INVALID_HANDLE, "transport is NULL", cpattn_ring_check(NULL, 8, links, 2, &count));
  REFUSED(CPATTN_INVALID, "count is NULL", cpattn_ring_check(transport, 8, links, 2, NULL));
  REFUSED(CPATTN_INVALID, "links is NULL", cpattn_ring_check(transport, 8, NULL, 2, &count));
  REFUSED(CPATTN_INVALID, "the ring was not checked: world is 1", cpattn_ring_check(transport, 8, links, 2, &count));
  OK(cpattn_transport_destroy(transport));
  OK(cpattn_local_group(2, 1000, pair));
  REFUSED(CPATTN_INVALID, "capacity is 3, expected at least 4", cpattn_ring_check(pair[0], 8, links, 3, &count));
  REFUSED(CPATTN_INVALID, "bytes is 0", cpattn_ring_check(pair[0], 0, links, 4, &count));
  for (int i = 0; i < 2; i++) OK(cpattn_transport_destroy(pair[i]));

  int aborts = 0;
  cpattn_transport_table table = CPATTN_TRANSPORT_TABLE_INIT;
  table.context = &aborts, table.world = 2, table.agree = agree, table.exchange = exchange, table.poll = poll_now;
  table.abort = count_aborts;
  OK(cpattn_transport_create(&table, &transport));
  REFUSED(CPATTN_PEER, "link 0 → 1 failed: rank 0, ring check, step 0: rank 1 failed: the transport's exchange returned 7; try: ",
      cpattn_ring_check(transport, 8, links, 4, &count));
  if (aborts != 1 || count != 99) failures++, fprintf(stderr, "%d aborts, count %zu\n", aborts, count);
  OK(cpattn_transport_destroy(transport));
  return failures != 0;
}
