/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Streams, memory and failures of ranks on devices: nothing is allocated after preparing, runs of one rank keep their
 * order on any streams, a transport of the caller's moves device memory or fails to, an abort ends a run, a fault on the
 * device is found by polling; and calls of their own give what the CPU gives: the two all-to-alls its bits, a combine.
 *
 *   cuda_streams         all but the last
 *   cuda_streams fault   the last, on the stand-in driver, whose context does not recover from it
 */
#define _POSIX_C_SOURCE 200112L
#include <pthread.h>
#include <time.h>
#include "cuda_test.h"

enum { TOKENS = 70, HEADS = 2, DIM = 32, RANKS = 2 };
static const int32_t documents[] = {0, 33, TOKENS};
enum { Q, K, V, DO, O, DQ, DK, DV, LSE, TENSORS };

/* A ring of the world, or Ulysses over it. */
static cpattn_plan *plan_of(uint32_t ring, uint32_t ulysses) {
  cpattn_problem p = CPATTN_PROBLEM_INIT;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  cpattn_plan *plan = NULL;
  p.cu_seqlens_q = documents;
  p.documents = 2;
  p.heads = HEADS;
  p.head_dim = DIM;
  p.dtype = CPATTN_F16;
  options.world = ring * ulysses;
  options.ring = ring, options.ulysses = ulysses;
  OK(cpattn_plan_create(&p, &options, &plan));
  return plan;
}

static cpattn_plan *plan_for(uint32_t world) { return plan_of(world, 1); }

static void arrays_make(array *a, int64_t tokens) {
  for (int i = 0; i < LSE; i++) array_make(&a[i], 16, 3, tokens, HEADS, DIM);
  array_make(&a[LSE], 32, 2, HEADS, tokens, 1);
}

static int32_t forward(cpattn_rank *rank, const cpattn_plan *plan, array *a, int device, void *stream) {
  cpattn_forward_args f = CPATTN_FORWARD_ARGS_INIT;
#define OF(i) (device ? &a[i].device : &a[i].cpu)
  f.q = OF(Q), f.k = OF(K), f.v = OF(V), f.o = OF(O), f.lse = OF(LSE), f.stream = stream;
  return cpattn_forward(rank, plan, &f);
}

static int32_t backward(cpattn_rank *rank, const cpattn_plan *plan, array *a, int device, void *stream) {
  cpattn_backward_args b = CPATTN_BACKWARD_ARGS_INIT;
  b.q = OF(Q), b.k = OF(K), b.v = OF(V), b.o = OF(O), b.lse = OF(LSE), b.d_o = OF(DO);
  b.dq = OF(DQ), b.dk = OF(DK), b.dv = OF(DV), b.stream = stream;
  return cpattn_backward(rank, plan, &b);
}

/* One rank: runs alternate between two streams that nothing else orders, and take no memory. */
static void one_rank(void) {
  const int32_t device[] = {0};
  static array a[TENSORS];
  cpattn_plan *plan = plan_for(1);
  cpattn_transport *transport = NULL, *local = NULL;
  cpattn_rank *rank = NULL, *cpu = NULL;
  void *streams[2];
  for (int i = 0; i < 2; i++) CUDA(driver.stream_create(&streams[i], 1));
  OK(cpattn_peer_group(1, device, 1000, &transport));
  OK(cpattn_rank_create(transport, NULL, &rank));
  OK(cpattn_rank_prepare(rank, plan, CPATTN_FORWARD, NULL));
  OK(cpattn_rank_prepare(rank, plan, CPATTN_BACKWARD, NULL));
  arrays_make(a, TOKENS);
  size_t before = available();
  for (int i = 0; i < 3; i++) {
    OK(forward(rank, plan, a, 1, streams[i & 1]));
    OK(backward(rank, plan, a, 1, streams[~i & 1]));
  }
  TRUE(available() == before);
  OK(cpattn_rank_poll(rank));

  OK(cpattn_local_group(1, 1000, &local));
  OK(cpattn_rank_create(local, NULL, &cpu));
  OK(forward(cpu, plan, a, 0, NULL));
  OK(backward(cpu, plan, a, 0, NULL));
  CUDA(driver.stream_wait(streams[0]));
  CUDA(driver.stream_wait(streams[1]));
  for (int i = O; i < TENSORS; i++) AGREES(a[i], streams[1], i == LSE ? 1e-5 : 2e-3);

  /* The plan may go as soon as the call has returned, the rank whenever its owner likes. */
  OK(forward(rank, plan, a, 1, streams[0]));
  OK(cpattn_plan_destroy(plan));
  OK(cpattn_rank_destroy(rank));
  OK(cpattn_rank_destroy(cpu));
  for (int i = 0; i < TENSORS; i++) array_free(&a[i]);
  for (int i = 0; i < 2; i++) CUDA(driver.stream_destroy(streams[i]));
}

/* Several ranks, each a thread. */
static struct {
  pthread_mutex_t lock;
  pthread_cond_t changed;
  uint32_t arrived, round, left;
  uint64_t numbers[RANKS];
  const cpattn_message *sends[RANKS];
  size_t counts[RANKS];
} board = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* Waits until all have come. */
static void meet(void) {
  pthread_mutex_lock(&board.lock);
  uint32_t round = board.round;
  if (++board.arrived == RANKS) board.arrived = 0, board.round++, pthread_cond_broadcast(&board.changed);
  while (board.round == round) pthread_cond_wait(&board.changed, &board.lock);
  pthread_mutex_unlock(&board.lock);
}

/* A communicator that waits for the device on the host: slow, but it moves device memory by the contract. */
typedef struct {
  uint32_t rank;
  int exchanges, released;
  void *memory;
  size_t capacity;
} member;

static int32_t agree(void *context, uint32_t first, uint32_t end, uint64_t number, uint64_t *all, int64_t *blame) {
  member *m = context;
  (void)blame;
  board.numbers[m->rank] = number;
  meet();
  for (uint32_t i = first; i < end; i++) all[i - first] = board.numbers[i];
  meet();
  return 0;
}

static int32_t exchange(void *context, const char *operation, uint32_t step, const cpattn_message *sends, size_t send_count, const cpattn_message *recvs, size_t recv_count, void *stream, int64_t *blame) {
  member *m = context;
  (void)operation, (void)step;
  *blame = m->rank;
  if (!stream) return 1;
  m->exchanges++;
  if (driver.stream_wait(stream)) return 2; /* what wrote the bytes is done */
  board.sends[m->rank] = sends, board.counts[m->rank] = send_count;
  meet();
  for (size_t i = 0; i < recv_count; i++) {
    /* The n-th message to this rank in the peer's list is the n-th from that peer in ours. */
    size_t n = 0, j = 0;
    for (size_t p = 0; p < i; p++) n += recvs[p].peer == recvs[i].peer;
    const cpattn_message *theirs = board.sends[recvs[i].peer];
    for (;; j++) {
      if (j == board.counts[recvs[i].peer]) return 3;
      if (theirs[j].peer == m->rank && n-- == 0) break;
    }
    if (theirs[j].bytes != recvs[i].bytes) return 4;
    if (theirs[j].bytes > m->capacity) m->memory = realloc(m->memory, m->capacity = theirs[j].bytes);
    if (driver.download(m->memory, (device_address)(uintptr_t)theirs[j].data, theirs[j].bytes, stream)) return 5;
    if (driver.stream_wait(stream)) return 6;
    if (driver.upload((device_address)(uintptr_t)recvs[i].data, m->memory, recvs[i].bytes, stream)) return 7;
  }
  if (driver.stream_wait(stream)) return 8;
  meet();
  return 0;
}

static int32_t alike(void *context, uint32_t first, uint32_t end, uint64_t number, uint64_t *all, int64_t *blame) {
  (void)context, (void)blame;
  for (uint32_t i = first; i < end; i++) all[i - first] = number;
  return 0;
}

static int32_t fails(void *context, const char *operation, uint32_t step, const cpattn_message *sends, size_t send_count, const cpattn_message *recvs, size_t recv_count, void *stream, int64_t *blame) {
  (void)context, (void)operation, (void)step, (void)sends, (void)send_count, (void)recvs, (void)recv_count, (void)stream;
  *blame = 1;
  return 7;
}

static int32_t fine(void *context, int64_t *blame) {
  (void)context, (void)blame;
  return 0;
}
static void ends(void *context) { ((member *)context)->released |= 2; }
static void released(void *context) { ((member *)context)->released |= 1; }

enum { TOKENS_OWN, AT_HEADS, BACK, MOVED, PART = MOVED, PART_LSE, MERGED, MERGED_LSE, EXCHANGED };
typedef struct {
  cpattn_rank *rank, *cpu;
  const cpattn_plan *plan, *ulysses;
  int device;
  array a[TENSORS], moved[EXCHANGED];
} job;

/* To heads and back. */
static int32_t all_to_alls(cpattn_rank *rank, job *j, int device, void *stream) {
  array *a = j->moved;
  int32_t status = cpattn_rank_to_heads(rank, j->ulysses, CPATTN_Q, OF(TOKENS_OWN), OF(AT_HEADS), stream);
  return status ? status : cpattn_rank_to_tokens(rank, j->ulysses, CPATTN_Q, OF(AT_HEADS), OF(BACK), stream);
}

/* Parts of the same queries, merged: each rank gets the heads of the all-to-all. */
static int32_t combine(cpattn_rank *rank, job *j, int device, void *stream) {
  array *a = j->moved;
  cpattn_combine_args args = CPATTN_COMBINE_ARGS_INIT;
  args.partial_o = OF(PART), args.partial_lse = OF(PART_LSE), args.o = OF(MERGED), args.lse = OF(MERGED_LSE), args.stream = stream;
  return cpattn_rank_combine(rank, j->plan, CPATTN_COMBINE_TO_HEADS, &args);
}

/* A rank on its device, and meanwhile the same one on the CPU. */
static void *both(void *argument) {
  job *j = argument;
  void *stream = NULL;
  if (!driver_open(j->device)) return (void *)1;
  CUDA(driver.stream_create(&stream, 1));
  cpattn_purpose moved = CPATTN_PURPOSE_INIT, merged = CPATTN_PURPOSE_INIT;
  moved.side = CPATTN_Q, moved.dim = DIM, moved.dtype = CPATTN_F16;
  merged.to = CPATTN_COMBINE_TO_HEADS, merged.dtype = CPATTN_F16;
  int ok = forward(j->rank, j->plan, j->a, 1, stream) == CPATTN_OK && backward(j->rank, j->plan, j->a, 1, stream) == CPATTN_OK &&
           forward(j->cpu, j->plan, j->a, 0, NULL) == CPATTN_OK && backward(j->cpu, j->plan, j->a, 0, NULL) == CPATTN_OK &&
           cpattn_rank_prepare(j->rank, j->ulysses, CPATTN_TO_HEADS, &moved) == CPATTN_OK &&
           cpattn_rank_prepare(j->rank, j->ulysses, CPATTN_TO_TOKENS, &moved) == CPATTN_OK &&
           all_to_alls(j->rank, j, 1, stream) == CPATTN_OK && all_to_alls(j->cpu, j, 0, NULL) == CPATTN_OK &&
           cpattn_rank_prepare(j->rank, j->plan, CPATTN_COMBINE, &merged) == CPATTN_OK &&
           combine(j->rank, j, 1, stream) == CPATTN_OK && combine(j->cpu, j, 0, NULL) == CPATTN_OK;
  if (!ok) fprintf(stderr, "a rank: %s\n", cpattn_last_error());
  CUDA(driver.stream_wait(stream));
  CUDA(driver.stream_destroy(stream));
  return ok ? NULL : (void *)1;
}

static void ranks(cpattn_transport **transports, const int32_t *devices, int table) {
  static job jobs[RANKS];
  cpattn_plan *plan = plan_for(RANKS), *ulysses = plan_of(1, RANKS);
  cpattn_transport *local[RANKS];
  pthread_t threads[RANKS];
  OK(cpattn_local_group(RANKS, 60000, local));
  for (uint32_t r = 0; r < RANKS; r++) {
    job *j = &jobs[r];
    cpattn_share share = CPATTN_SHARE_INIT;
    cpattn_rank_options options = CPATTN_RANK_OPTIONS_INIT;
    options.device_type = CPATTN_DEVICE_CUDA;
    options.device_id = devices[r];
    OK(cpattn_plan_share(plan, r, &share));
    TRUE(driver_open(devices[r]));
    arrays_make(j->a, (int64_t)share.q_tokens);
    for (int i = 0; i < TENSORS; i++) j->a[i].device.device.device_id = devices[r];
    cpattn_share heads = CPATTN_SHARE_INIT;
    OK(cpattn_plan_share(ulysses, r, &heads));
    array_make(&j->moved[TOKENS_OWN], 16, 3, (int64_t)heads.q_tokens, HEADS, DIM);
    array_make(&j->moved[AT_HEADS], 16, 3, TOKENS, heads.q_head_end - heads.q_head_begin, DIM);
    array_make(&j->moved[BACK], 16, 3, (int64_t)heads.q_tokens, HEADS, DIM);
    array_make(&j->moved[PART], 16, 3, TOKENS, HEADS, DIM);
    array_make(&j->moved[PART_LSE], 32, 2, HEADS, TOKENS, 1);
    array_make(&j->moved[MERGED], 16, 3, TOKENS, HEADS / RANKS, DIM);
    array_make(&j->moved[MERGED_LSE], 32, 2, HEADS / RANKS, TOKENS, 1);
    for (int i = 0; i < EXCHANGED; i++) j->moved[i].device.device.device_id = devices[r];
    j->ulysses = ulysses;
    OK(cpattn_rank_create(transports[r], table ? &options : NULL, &j->rank));
    OK(cpattn_rank_create(local[r], NULL, &j->cpu));
    j->plan = plan, j->device = devices[r];
  }
  for (int r = 0; r < RANKS; r++) TRUE(!pthread_create(&threads[r], NULL, both, &jobs[r]));
  for (int r = 0; r < RANKS; r++) {
    void *failed;
    pthread_join(threads[r], &failed);
    TRUE(!failed);
  }
  for (int r = 0; r < RANKS; r++) {
    TRUE(driver_open(devices[r]));
    for (int i = O; i < TENSORS; i++) AGREES(jobs[r].a[i], NULL, i == LSE ? 1e-5 : 2e-3);
    for (int i = AT_HEADS; i < MOVED; i++) AGREES(jobs[r].moved[i], NULL, 0);
    AGREES(jobs[r].moved[MERGED], NULL, 2e-3);
    AGREES(jobs[r].moved[MERGED_LSE], NULL, 1e-6);
    /* There and back is where it began. */
    TRUE(!memcmp(jobs[r].moved[BACK].host, jobs[r].moved[TOKENS_OWN].host, jobs[r].moved[BACK].bytes));
    OK(cpattn_rank_poll(jobs[r].rank));
  }
  for (int r = 0; r < RANKS; r++) {
    TRUE(driver_open(devices[r]));
    OK(cpattn_rank_destroy(jobs[r].rank));
    OK(cpattn_rank_destroy(jobs[r].cpu));
    for (int i = 0; i < TENSORS; i++) array_free(&jobs[r].a[i]);
    for (int i = 0; i < EXCHANGED; i++) array_free(&jobs[r].moved[i]);
  }
  OK(cpattn_plan_destroy(plan));
  OK(cpattn_plan_destroy(ulysses));
  TRUE(driver_open(0));
}

static void own_transport(void) {
  const int32_t devices[RANKS] = {0, 0};
  static member members[RANKS];
  cpattn_transport *transports[RANKS];
  for (uint32_t r = 0; r < RANKS; r++) {
    cpattn_transport_table table = CPATTN_TRANSPORT_TABLE_INIT;
    members[r].rank = r;
    table.context = &members[r];
    table.rank = r, table.world = RANKS;
    table.agree = agree, table.exchange = exchange, table.poll = fine, table.abort = ends, table.release = released;
    OK(cpattn_transport_create(&table, &transports[r]));
  }
  ranks(transports, devices, 1);
  for (int r = 0; r < RANKS; r++) {
    TRUE(members[r].exchanges > 0 && members[r].released == 1);
    free(members[r].memory);
  }
}

/* A rank that waits for a peer that never comes is freed by an abort from another thread. */
static job alone;
static int32_t outcome;
static char said[256];

static void *wait_for_peer(void *unused) {
  (void)unused;
  /* The other thread may be inside a call itself, which refuses this one. */
  do outcome = forward(alone.rank, alone.plan, alone.a, 1, NULL);
  while (outcome == CPATTN_BUSY);
  strncpy(said, cpattn_last_error(), sizeof said - 1);
  return NULL;
}

/* An exchange that fails on a device: the table's abort is called, and nothing of the run is left. */
static void failing_transport(void) {
  static array a[TENSORS];
  static member m;
  cpattn_plan *plan = plan_for(RANKS);
  cpattn_share share = CPATTN_SHARE_INIT;
  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL;
  cpattn_rank_options options = CPATTN_RANK_OPTIONS_INIT;
  cpattn_transport_table table = CPATTN_TRANSPORT_TABLE_INIT;
  table.context = &m;
  table.world = RANKS;
  table.agree = alike, table.exchange = fails, table.poll = fine, table.abort = ends, table.release = released;
  OK(cpattn_transport_create(&table, &transport));
  options.device_type = CPATTN_DEVICE_CUDA;
  options.device_id = 99;
  REFUSED(CPATTN_INVALID, "options.device_id is 99", cpattn_rank_create(transport, &options, &rank));
  options.device_id = 0;
  OK(cpattn_rank_create(transport, &options, &rank)); /* still the caller's after the refusal */
  OK(cpattn_plan_share(plan, 0, &share));
  arrays_make(a, (int64_t)share.q_tokens);
  OK(cpattn_rank_prepare(rank, plan, CPATTN_FORWARD, NULL));
  OK(cpattn_rank_prepare(rank, plan, CPATTN_BACKWARD, NULL));
  TRUE(m.released == 0);
  int32_t status = forward(rank, plan, a, 1, NULL);
  if (status == CPATTN_OK) status = backward(rank, plan, a, 1, NULL); /* the first rank may need no other to go forward */
  TRUE(status == CPATTN_PEER && strstr(cpattn_last_error(), "rank 1 failed: the transport's exchange returned 7"));
  TRUE(m.released == 2);
  for (int i = 0; i < TENSORS; i++) array_free(&a[i]); /* no kernel works on them any more */
  OK(cpattn_rank_destroy(rank));
  TRUE(m.released == 3);
  OK(cpattn_plan_destroy(plan));
}

static void aborts(void) {
  const int32_t devices[RANKS] = {0, 0};
  cpattn_transport *transports[RANKS];
  cpattn_share share = CPATTN_SHARE_INIT;
  cpattn_plan *plan = plan_for(RANKS);
  pthread_t thread;
  OK(cpattn_peer_group(RANKS, devices, 60000, transports));
  OK(cpattn_plan_share(plan, 0, &share));
  arrays_make(alone.a, (int64_t)share.q_tokens);
  OK(cpattn_rank_create(transports[0], NULL, &alone.rank));
  alone.plan = plan;
  OK(cpattn_rank_prepare(alone.rank, plan, CPATTN_FORWARD, NULL));
  TRUE(!pthread_create(&thread, NULL, wait_for_peer, NULL));
  /* A second call is refused as soon as the first is inside; until then it succeeds. */
  int32_t status = CPATTN_OK;
  struct timespec pause = {0, 1000000};
  for (int i = 0; i < 10000 && status != CPATTN_BUSY; i++) {
    nanosleep(&pause, NULL);
    status = cpattn_rank_prepare(alone.rank, plan, CPATTN_FORWARD, NULL);
  }
  REFUSED(CPATTN_BUSY, "one call at a time", cpattn_rank_destroy(alone.rank));
  OK(cpattn_rank_poll(alone.rank));
  OK(cpattn_rank_abort(alone.rank));
  pthread_join(thread, NULL);
  TRUE(outcome == CPATTN_PEER && strstr(said, "aborted"));
  REFUSED(CPATTN_PEER, "aborted", cpattn_rank_poll(alone.rank));
  OK(cpattn_rank_destroy(alone.rank));
  OK(cpattn_transport_destroy(transports[1]));
  OK(cpattn_plan_destroy(plan));
  for (int i = 0; i < TENSORS; i++) array_free(&alone.a[i]);
}

/* A kernel that reads beyond the memory of a tensor: the call was fine, the device is not, and polling says so. */
static void fault(void) {
  const int32_t device[] = {0};
  static array a[TENSORS];
  cpattn_plan *plan = plan_for(1);
  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL;
  void *stream = NULL;
  CUDA(driver.stream_create(&stream, 1));
  OK(cpattn_peer_group(1, device, 1000, &transport));
  OK(cpattn_rank_create(transport, NULL, &rank));
  arrays_make(a, TOKENS);
  OK(forward(rank, plan, a, 1, stream));
  OK(cpattn_rank_poll(rank));
  TRUE(driver.stream_wait(stream) == 0);
  int64_t beyond[] = {1 << 20, DIM, 1}; /* strides that reach beyond the memory: it cannot be seen before the kernel runs */
  a[K].device.strides = beyond;
  OK(forward(rank, plan, a, 1, stream));
  TRUE(driver.stream_wait(stream) != 0);
  REFUSED(CPATTN_DEVICE, "cu", cpattn_rank_poll(rank));
  REFUSED(CPATTN_DEVICE, "cu", forward(rank, plan, a, 1, stream));
  OK(cpattn_rank_destroy(rank));
  OK(cpattn_plan_destroy(plan));
}

int main(int argc, char **argv) {
  if (!driver_open(0)) return printf("not run: %s\n", driver_missing), 0;
  if (argc == 2 && !strcmp(argv[1], "fault")) return fault(), finished("cuda_streams fault");
  int two = driver_open(1);
  TRUE(driver_open(0));
  one_rank();
  const int32_t devices[2][RANKS] = {{0, 0}, {0, 1}};
  for (int i = 0; i < 1 + two; i++) {
    cpattn_transport *transports[RANKS];
    OK(cpattn_peer_group(RANKS, devices[i], 60000, transports));
    ranks(transports, devices[i], 0);
  }
  own_transport();
  failing_transport();
  aborts();
  return finished(two ? "cuda_streams" : "cuda_streams (one device)");
}
