/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Schedules executed by this program: four ranks in turn on one thread, the library's kernels by the operations' own arguments,
 * and a list of messages in place of a communicator. Forward and backward of every form are compared with one rank's run.
 */
#include <cpattn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "expect.h"

#define WORLD 4
#define TOKENS 53
#define HEADS 4
#define KV_HEADS 2
#define DIM 8
#define VALUE_DIM 4

typedef struct {
  cpattn_schedule *schedule;
  cpattn_schedule_info info;
  char **data; /* of each buffer */
  char *workspace;
  size_t next; /* the next operation */
  int posted;  /* whether its sends are in the mail */
} executed;

typedef struct {
  uint32_t from, to, tag;
  uint64_t bytes;
  char *data;
} letter;

static letter mail[4096];
static size_t letters;

static size_t size_of(int32_t dtype) { return dtype == CPATTN_F64 ? 8 : dtype == CPATTN_F32 ? 4 : 2; }

/* The tensor of a view, and what it points to. */
typedef struct {
  cpattn_tensor tensor;
  int64_t shape[3], strides[3];
} held;

enum axes { ROWS, HEAD_MAJOR, WORDS, PER_HEAD, PER_SINK };

/* NULL where an operation does not have the view. */
static const cpattn_tensor *at(const executed *r, const cpattn_view *v, enum axes axes, held *h) {
  if (v->heads == 0) return NULL;
  const cpattn_buffer *b = &r->info.buffers[v->buffer];
  const int64_t row = (int64_t)b->heads * b->dim;
  const int64_t shapes[5][3] = {{(int64_t)v->rows, v->heads, b->dim}, {v->heads, (int64_t)v->rows, 0}, {v->heads, (int64_t)v->rows, b->dim}, {v->heads, 0, 0}, {v->heads, b->dim, 0}};
  const int64_t strides[5][3] = {{row, b->dim, 1}, {b->dim, row, 0}, {b->dim, row, 1}, {b->dim, 0, 0}, {b->dim, 1, 0}};
  static const int32_t dims[5] = {3, 2, 3, 1, 2};
  memcpy(h->shape, shapes[axes], sizeof h->shape);
  memcpy(h->strides, strides[axes], sizeof h->strides);
  h->tensor.data = r->data[v->buffer] + ((int64_t)v->row * row + (int64_t)v->head * b->dim) * (int64_t)size_of(b->dtype);
  h->tensor.device.device_type = CPATTN_DEVICE_CPU;
  h->tensor.device.device_id = 0;
  h->tensor.ndim = dims[axes];
  h->tensor.dtype.code = 2;
  h->tensor.dtype.bits = (uint8_t)(8 * size_of(b->dtype));
  h->tensor.dtype.lanes = 1;
  h->tensor.shape = h->shape;
  h->tensor.strides = h->strides;
  h->tensor.byte_offset = 0;
  return &h->tensor;
}

static letter *find(uint32_t from, uint32_t to, uint32_t tag) {
  for (size_t i = 0; i < letters; i++)
    if (mail[i].from == from && mail[i].to == to && mail[i].tag == tag) return &mail[i];
  return NULL;
}

/* 1 when all messages of the exchange have come. */
static int exchange(executed *r, const cpattn_op *op) {
  const uint32_t me = r->info.rank;
  for (size_t i = 0; i < op->message_count && !r->posted; i++) {
    const cpattn_op_message *m = &op->messages[i];
    if (!m->send) continue;
    letter l = {me, m->peer, m->tag, m->bytes, malloc(m->bytes)};
    memcpy(l.data, r->data[m->view.buffer] + m->offset, m->bytes);
    if (find(me, m->peer, m->tag) || letters == sizeof mail / sizeof *mail) exit(3);
    mail[letters++] = l;
  }
  r->posted = 1;
  for (size_t i = 0; i < op->message_count; i++)
    if (!op->messages[i].send && !find(op->messages[i].peer, me, op->messages[i].tag)) return 0;
  for (size_t i = 0; i < op->message_count; i++) {
    const cpattn_op_message *m = &op->messages[i];
    if (m->send) continue;
    const letter *l = find(m->peer, me, m->tag);
    if (l->bytes != m->bytes) exit(4);
    memcpy(r->data[m->view.buffer] + m->offset, l->data, m->bytes);
  }
  r->posted = 0;
  return 1;
}

static void sums(executed *r, const cpattn_op *op) {
  held dst, sources[CPATTN_MAX_SOURCES];
  const cpattn_tensor *list[CPATTN_MAX_SOURCES];
  for (size_t i = 0; i < op->sum_count; i++) {
    const cpattn_sum *s = &op->sums[i];
    const size_t n = s->sources_end - s->sources_begin;
    for (size_t j = 0; j < n; j++) list[j] = at(r, &op->sources[s->sources_begin + j], ROWS, &sources[j]);
    if (op->kind == CPATTN_OP_SINK_TOTAL) {
      OK(cpattn_sink_total(at(r, &op->sources[s->sources_begin], PER_SINK, &sources[0]), at(r, &s->dst, PER_SINK, &dst)));
    } else {
      OK(cpattn_transform(NULL, at(r, &s->dst, ROWS, &dst), list, n, NULL));
    }
  }
}

static void merges(executed *r, const cpattn_op *op) {
  held h[4];
  for (size_t i = 0; i + 1 < op->sum_count; i += 2) {
    const cpattn_view *o = &op->sources[op->sums[i].sources_begin], *lse = &op->sources[op->sums[i + 1].sources_begin];
    OK(cpattn_merge(NULL, at(r, &o[0], ROWS, &h[0]), at(r, &lse[0], WORDS, &h[1]), at(r, &o[1], ROWS, &h[2]), at(r, &lse[1], WORDS, &h[3]), NULL));
  }
}

static void attend(executed *r, const cpattn_op *op, cpattn_scratch *scratch) {
  held h[8];
  cpattn_attend_args args = CPATTN_ATTEND_ARGS_INIT;
  args.q = at(r, &op->q, ROWS, &h[0]);
  args.k = at(r, &op->k, ROWS, &h[1]);
  args.v = at(r, &op->v, ROWS, &h[2]);
  args.running = at(r, &op->running, ROWS, &h[3]);
  args.running_lse = at(r, &op->running_lse, WORDS, &h[4]);
  args.o = at(r, &op->o, ROWS, &h[5]);
  args.lse = at(r, &op->lse, HEAD_MAJOR, &h[6]);
  args.sinks = at(r, &op->sinks, PER_HEAD, &h[7]);
  args.heads = op->heads;
  args.aligned = op->aligned;
  args.score = op->score;
  args.ranges = op->ranges;
  args.q_range_size = op->q_range_size;
  args.pair_size = op->pair_size;
  OK(cpattn_attend(scratch, &args));
}

static void attend_backward(executed *r, const cpattn_op *op, cpattn_scratch *scratch) {
  held h[9];
  cpattn_attend_backward_args args = CPATTN_ATTEND_BACKWARD_ARGS_INIT;
  args.q = at(r, &op->q, ROWS, &h[0]);
  args.k = at(r, &op->k, ROWS, &h[1]);
  args.v = at(r, &op->v, ROWS, &h[2]);
  args.d_o = at(r, &op->d_o, ROWS, &h[3]);
  args.lse = at(r, &op->lse, HEAD_MAJOR, &h[4]);
  args.delta = at(r, &op->delta, HEAD_MAJOR, &h[5]);
  args.dq = at(r, &op->dq, ROWS, &h[6]);
  args.dk = at(r, &op->dk, ROWS, &h[7]);
  args.dv = at(r, &op->dv, ROWS, &h[8]);
  args.heads = op->heads;
  args.aligned = op->aligned;
  args.accumulate_keys = op->accumulate_keys;
  args.per_q_head = op->per_q_head;
  args.gradients = op->gradients;
  args.score = op->score;
  args.ranges = op->ranges;
  args.q_range_size = op->q_range_size;
  args.pair_size = op->pair_size;
  OK(cpattn_attend_backward(scratch, &args));
}

/* Executes the next operation; 0 if it waits for a message. */
static int step(executed *r, cpattn_scratch *scratch) {
  cpattn_op op = CPATTN_OP_INIT;
  held h[4];
  OK(cpattn_schedule_op(r->schedule, r->next, &op));
  switch (op.kind) {
    case CPATTN_OP_DELTA:
      OK(cpattn_delta(NULL, at(r, &op.o, ROWS, &h[0]), at(r, &op.d_o, ROWS, &h[1]), at(r, &op.delta, HEAD_MAJOR, &h[2]), NULL));
      break;
    case CPATTN_OP_SINK_GRADIENT:
      OK(cpattn_sink_gradient(NULL, at(r, &op.lse, HEAD_MAJOR, &h[0]), at(r, &op.delta, HEAD_MAJOR, &h[1]), at(r, &op.sinks, PER_SINK, &h[2]),
                              at(r, &op.dsinks, PER_SINK, &h[3]), NULL));
      break;
    case CPATTN_OP_SINK_TOTAL:
    case CPATTN_OP_SUM: sums(r, &op); break;
    case CPATTN_OP_MERGE: merges(r, &op); break;
    case CPATTN_OP_EXCHANGE:
      if (!exchange(r, &op)) return 0;
      break;
    case CPATTN_OP_ATTEND: attend(r, &op, scratch); break;
    case CPATTN_OP_ATTEND_BACKWARD: attend_backward(r, &op, scratch); break;
    default: exit(5);
  }
  /* It waits for an operation of the other lane, before it in the list. */
  if (op.after >= 0) {
    cpattn_op other = CPATTN_OP_INIT;
    OK(cpattn_schedule_op(r->schedule, (size_t)op.after, &other));
    if (op.after >= (int64_t)r->next || other.lane == op.lane) exit(6);
  }
  r->next++;
  return 1;
}

/* The whole batch, by tensor: q, k, v, o, lse, d_o, dq, dk, dv, and the sinks. */
static double whole[11][TOKENS * HEADS * DIM];
static double result[11][TOKENS * HEADS * DIM];
static float sinks[HEADS];

static int is_key(int32_t tensor) {
  return tensor == CPATTN_TENSOR_K || tensor == CPATTN_TENSOR_V || tensor == CPATTN_TENSOR_DK || tensor == CPATTN_TENSOR_DV ||
         tensor == CPATTN_TENSOR_OWN_TOKENS; /* of k, here */
}

/* Copies a rank's rows of one of the caller's tensors between the whole batch and a buffer. */
static void rows(const cpattn_plan *plan, const executed *r, uint32_t buffer, double *all, int out) {
  static int64_t tokens[TOKENS];
  const cpattn_buffer *b = &r->info.buffers[buffer];
  const size_t n = (size_t)b->heads * b->dim;
  OK(cpattn_plan_tokens(plan, is_key(b->tensor) ? CPATTN_K : CPATTN_Q, r->info.rank, tokens, TOKENS));
  for (size_t i = 0; i < b->rows; i++) {
    double *mine = (double *)r->data[buffer] + i * n, *theirs = all + (size_t)tokens[i] * n;
    memcpy(out ? theirs : mine, out ? mine : theirs, n * sizeof(double));
  }
}

/* Memory for a rank's buffers, filled with NaN: what nothing writes must show. */
static void begin(executed *r) {
  cpattn_schedule_info info = CPATTN_SCHEDULE_INFO_INIT;
  OK(cpattn_schedule_describe(r->schedule, &info));
  r->info = info;
  r->next = 0;
  r->posted = 0;
  r->data = calloc(info.buffer_count, sizeof *r->data);
  r->workspace = malloc(info.workspace_bytes + 1);
  memset(r->workspace, 0xff, info.workspace_bytes + 1);
  for (uint32_t i = 0; i < info.buffer_count; i++) {
    const cpattn_buffer *b = &info.buffers[i];
    const size_t bytes = b->rows * b->heads * b->dim * size_of(b->dtype);
    if (b->tensor >= 0) {
      r->data[i] = malloc(bytes + 1);
      memset(r->data[i], 0xff, bytes + 1);
    } else {
      if (b->offset % CPATTN_WORKSPACE_ALIGNMENT || b->offset + bytes > info.workspace_bytes) exit(7);
      r->data[i] = r->workspace + b->offset;
    }
  }
}

static void end(executed *r) {
  for (uint32_t i = 0; i < r->info.buffer_count; i++)
    if (r->info.buffers[i].tensor >= 0) free(r->data[i]);
  free(r->workspace);
  free(r->data);
  OK(cpattn_schedule_destroy(r->schedule));
}

/* All operations of all ranks, each rank until it waits for a message. */
static void execute(executed *ranks) {
  cpattn_scratch *scratch = NULL;
  OK(cpattn_scratch_create(1, &scratch));
  OK(cpattn_scratch_reserve(scratch, CPATTN_F64, DIM, VALUE_DIM));
  for (int moved = 1; moved;) {
    moved = 0;
    for (uint32_t me = 0; me < WORLD; me++)
      while (ranks[me].next < ranks[me].info.op_count && step(&ranks[me], scratch)) moved = 1;
  }
  for (uint32_t me = 0; me < WORLD; me++)
    if (ranks[me].next != ranks[me].info.op_count) exit(8);
  OK(cpattn_scratch_destroy(scratch));
  while (letters) free(mail[--letters].data);
}

static void run(const cpattn_plan *plan, int32_t direction) {
  executed ranks[WORLD];
  for (uint32_t me = 0; me < WORLD; me++) {
    executed *r = &ranks[me];
    uint64_t workspace = 0;
    OK(cpattn_plan_workspace(plan, me, direction, &workspace));
    OK(cpattn_schedule_create(plan, me, direction, &r->schedule));
    begin(r);
    if (workspace != r->info.workspace_bytes || r->info.rank != me || r->info.direction != direction) exit(9);
    for (uint32_t i = 0; i < r->info.buffer_count; i++) {
      const cpattn_buffer *b = &r->info.buffers[i];
      const int of_forward = b->tensor == CPATTN_TENSOR_O || b->tensor == CPATTN_TENSOR_LSE;
      if (b->tensor == CPATTN_TENSOR_SINKS) memcpy(r->data[i], sinks, sizeof sinks);
      else if (!b->written) rows(plan, r, i, of_forward ? result[b->tensor] : whole[b->tensor], 0);
    }
  }
  execute(ranks);
  for (uint32_t me = 0; me < WORLD; me++) {
    executed *r = &ranks[me];
    for (uint32_t i = 0; i < r->info.buffer_count; i++) {
      const cpattn_buffer *b = &r->info.buffers[i];
      if (b->tensor == CPATTN_TENSOR_DSINKS) memcpy(result[b->tensor], r->data[i], HEADS * sizeof(double));
      else if (b->tensor >= 0 && b->written) rows(plan, r, i, result[b->tensor], 1);
    }
    end(r);
  }
}

/* k to heads and back. Two ranks have each kv head, so the way back doubles it. */
static void all_to_all(const cpattn_plan *plan) {
  executed to_heads[WORLD], to_tokens[WORLD];
  static int64_t order[TOKENS];
  size_t tokens = 0;
  for (uint32_t me = 0; me < WORLD; me++) {
    OK(cpattn_schedule_create_all_to_all(plan, me, CPATTN_TO_HEADS, CPATTN_K, DIM, CPATTN_F64, &to_heads[me].schedule));
    OK(cpattn_schedule_create_all_to_all(plan, me, CPATTN_TO_TOKENS, CPATTN_K, DIM, CPATTN_F64, &to_tokens[me].schedule));
    begin(&to_heads[me]);
    begin(&to_tokens[me]);
    const cpattn_buffer *own = to_heads[me].info.buffers;
    if (own[0].tensor != CPATTN_TENSOR_OWN_TOKENS || own[1].tensor != CPATTN_TENSOR_OWN_HEADS || own[0].written || !own[1].written) exit(10);
    rows(plan, &to_heads[me], 0, whole[CPATTN_TENSOR_K], 0);
    OK(cpattn_plan_tokens(plan, CPATTN_K, me, order + tokens, TOKENS - tokens));
    tokens += own[0].rows;
  }
  execute(to_heads);
  for (uint32_t me = 0; me < WORLD; me++) {
    const cpattn_buffer *held = &to_heads[me].info.buffers[1];
    cpattn_share share = CPATTN_SHARE_INIT;
    OK(cpattn_plan_share(plan, me, &share));
    if (held->rows != TOKENS || held->heads != share.kv_head_end - share.kv_head_begin) exit(11);
    for (size_t i = 0; i < TOKENS; i++)
      for (uint32_t h = 0; h < held->heads; h++)
        failures += memcmp((double *)to_heads[me].data[1] + (i * held->heads + h) * DIM,
                           whole[CPATTN_TENSOR_K] + ((size_t)order[i] * KV_HEADS + share.kv_head_begin + h) * DIM, DIM * sizeof(double)) != 0;
    memcpy(to_tokens[me].data[1], to_heads[me].data[1], held->rows * held->heads * DIM * sizeof(double));
  }
  execute(to_tokens);
  for (uint32_t me = 0; me < WORLD; me++) rows(plan, &to_tokens[me], 0, result[CPATTN_TENSOR_K], 1);
  for (size_t i = 0; i < TOKENS * KV_HEADS * DIM; i++) failures += result[CPATTN_TENSOR_K][i] != 2 * whole[CPATTN_TENSOR_K][i];
  if (failures) fprintf(stderr, "all-to-all: %d rows or numbers differ\n", failures);
  for (uint32_t me = 0; me < WORLD; me++) end(&to_heads[me]), end(&to_tokens[me]);
}

static cpattn_tensor tensor(double *data, int64_t *shape, int64_t *strides, int32_t ndim) {
  cpattn_tensor t = {data, {CPATTN_DEVICE_CPU, 0}, ndim, {2, 64, 1}, shape, strides, 0};
  return t;
}

/* The same on one rank. */
static void alone(const cpattn_problem *problem) {
  cpattn_options options = CPATTN_OPTIONS_INIT;
  cpattn_plan *plan = NULL;
  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL;
  OK(cpattn_plan_create(problem, &options, &plan));
  OK(cpattn_local_group(1, 10000, &transport));
  OK(cpattn_rank_create(transport, NULL, &rank));
  int64_t q[3] = {TOKENS, HEADS, DIM}, k[3] = {TOKENS, KV_HEADS, DIM}, v[3] = {TOKENS, KV_HEADS, VALUE_DIM}, o[3] = {TOKENS, HEADS, VALUE_DIM};
  int64_t of_lse[2] = {HEADS, TOKENS}, lse_strides[2] = {1, HEADS}, per_head[1] = {HEADS};
  int64_t *shapes[9] = {q, k, v, o, of_lse, o, q, k, v};
  cpattn_tensor t[9];
  for (int i = 0; i < 9; i++) t[i] = tensor(whole[i], shapes[i], i == CPATTN_TENSOR_LSE ? lse_strides : NULL, i == CPATTN_TENSOR_LSE ? 2 : 3);
  cpattn_tensor of_sinks = {sinks, {CPATTN_DEVICE_CPU, 0}, 1, {2, 32, 1}, per_head, NULL, 0};
  cpattn_tensor dsinks = tensor(whole[CPATTN_TENSOR_DSINKS], per_head, NULL, 1);
  cpattn_forward_args forward = CPATTN_FORWARD_ARGS_INIT;
  forward.q = &t[0], forward.k = &t[1], forward.v = &t[2], forward.sinks = &of_sinks, forward.o = &t[3], forward.lse = &t[4];
  OK(cpattn_forward(rank, plan, &forward));
  cpattn_backward_args backward = CPATTN_BACKWARD_ARGS_INIT;
  backward.q = &t[0], backward.k = &t[1], backward.v = &t[2], backward.sinks = &of_sinks, backward.o = &t[3], backward.lse = &t[4];
  backward.d_o = &t[5], backward.dq = &t[6], backward.dk = &t[7], backward.dv = &t[8], backward.dsinks = &dsinks;
  OK(cpattn_backward(rank, plan, &backward));
  OK(cpattn_rank_destroy(rank));
  OK(cpattn_plan_destroy(plan));
}

static void compare(const char *name) {
  static const size_t row[11] = {0, 0, 0, HEADS * VALUE_DIM, HEADS, 0, HEADS * DIM, KV_HEADS * DIM, KV_HEADS * VALUE_DIM, 0, 0};
  for (int t = 0; t < 11; t++) {
    const size_t n = t == CPATTN_TENSOR_DSINKS ? HEADS : TOKENS * row[t];
    for (size_t i = 0; i < n; i++) {
      if (fabs(result[t][i] - whole[t][i]) < 1e-12) continue;
      fprintf(stderr, "%s: element %zu of tensor %d is %.17g, expected %.17g\n", name, i, t, result[t][i], whole[t][i]);
      failures++;
      break;
    }
  }
}

int main(void) {
  const int32_t cu_seqlens[] = {0, 11, 11, 40, TOKENS};
  /* The last document sees a part of the one before it, too. */
  const cpattn_slice slices[] = {{0, 11, 0, 11, 0, INT64_MIN, CPATTN_UNLIMITED}, {11, 40, 11, 40, 0, -9, 0}, {40, TOKENS, 20, 40, 20, INT64_MIN, CPATTN_UNLIMITED},
                                 {40, TOKENS, 40, TOKENS, 0, INT64_MIN, 0}};
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  problem.cu_seqlens_q = cu_seqlens;
  problem.documents = 4;
  problem.heads = HEADS;
  problem.kv_heads = KV_HEADS;
  problem.head_dim = DIM;
  problem.value_dim = VALUE_DIM;
  problem.dtype = CPATTN_F64;
  problem.sinks = 1;
  problem.softcap = 3;
  for (int h = 0; h < HEADS; h++) sinks[h] = 0.3f * (float)h - 0.4f;
  for (int t = 0; t < 11; t++)
    for (size_t i = 0; i < TOKENS * HEADS * DIM; i++) whole[t][i] = (double)((i * 37 + 11 + (size_t)t * 7) % 101) / 50 - 1;

  cpattn_options cases[7];
  static const char *names[7] = {"ulysses", "ring", "q circulates", "hybrid", "reproducible", "nodes", "passes"};
  for (int i = 0; i < 7; i++) {
    cpattn_options o = CPATTN_OPTIONS_INIT;
    o.world = WORLD;
    o.ring = i == 0 ? 1 : i == 3 || i == 4 ? 2 : 4;
    if (i == 2) o.circulate = o.circulate_forward = CPATTN_CIRCULATE_QUERIES;
    o.reproducible = i == 4;
    o.ranks_per_node = i == 5 ? 2 : 0;
    o.passes = i == 6 ? 2 : 1;
    o.pack_inputs = i == 6;
    cases[i] = o;
  }
  for (int sliced = 0; sliced < 2; sliced++) {
    problem.slices = sliced ? slices : NULL;
    problem.slice_count = sliced ? 4 : 0;
    problem.window_right = sliced ? CPATTN_UNLIMITED : 0;
    alone(&problem);
    for (int i = 0; i < 7; i++) {
      cpattn_plan *plan = NULL;
      OK(cpattn_plan_create(&problem, &cases[i], &plan));
      run(plan, CPATTN_FORWARD);
      run(plan, CPATTN_BACKWARD);
      compare(names[i]);
      OK(cpattn_plan_destroy(plan));
    }
  }

  /* What is refused; a schedule that outlives its plan; a struct of another age. */
  cpattn_plan *plan = NULL;
  cpattn_schedule *schedule = NULL;
  cpattn_op op = CPATTN_OP_INIT;
  cpattn_schedule_info info = CPATTN_SCHEDULE_INFO_INIT;
  OK(cpattn_plan_create(&problem, &cases[3], &plan));
  REFUSED(CPATTN_INVALID_HANDLE, "plan is NULL", cpattn_schedule_create(NULL, 0, CPATTN_FORWARD, &schedule));
  REFUSED(CPATTN_INVALID, "rank is 4, expected below the world of 4", cpattn_schedule_create(plan, 4, CPATTN_FORWARD, &schedule));
  REFUSED(CPATTN_INVALID, "direction is 2, expected CPATTN_FORWARD or CPATTN_BACKWARD", cpattn_schedule_create(plan, 0, 2, &schedule));
  REFUSED(CPATTN_INVALID, "schedule is NULL", cpattn_schedule_create(plan, 0, CPATTN_FORWARD, NULL));
  OK(cpattn_schedule_create(plan, 3, CPATTN_BACKWARD, &schedule));
  REFUSED(CPATTN_INVALID_HANDLE, "another kind", cpattn_schedule_describe((const cpattn_schedule *)plan, &info));
  OK(cpattn_plan_destroy(plan));
  OK(cpattn_schedule_describe(schedule, &info));
  REFUSED(CPATTN_INVALID, "index is ", cpattn_schedule_op(schedule, info.op_count, &op));
  REFUSED(CPATTN_INVALID, "op is NULL", cpattn_schedule_op(schedule, 0, NULL));
  op.struct_size = 16;
  REFUSED(CPATTN_INVALID, "op.struct_size is 16", cpattn_schedule_op(schedule, 0, &op));
  OK(cpattn_schedule_destroy(schedule));
  OK(cpattn_schedule_destroy(NULL));
  problem.kind = CPATTN_OTHER;
  problem.sinks = 0;
  problem.softcap = 0;
  problem.slices = NULL;
  problem.slice_count = 0;
  problem.window_right = 0;
  OK(cpattn_plan_create(&problem, &cases[0], &plan));
  REFUSED(CPATTN_UNSUPPORTED, "CPATTN_OTHER", cpattn_schedule_create(plan, 0, CPATTN_FORWARD, &schedule));
  all_to_all(plan);
  REFUSED(CPATTN_INVALID, "direction is 1, expected CPATTN_TO_HEADS or CPATTN_TO_TOKENS",
          cpattn_schedule_create_all_to_all(plan, 0, CPATTN_BACKWARD, CPATTN_Q, DIM, CPATTN_F32, &schedule));
  REFUSED(CPATTN_INVALID, "side is 2", cpattn_schedule_create_all_to_all(plan, 0, CPATTN_TO_HEADS, 2, DIM, CPATTN_F32, &schedule));
  REFUSED(CPATTN_INVALID, "dim is 0", cpattn_schedule_create_all_to_all(plan, 0, CPATTN_TO_HEADS, CPATTN_Q, 0, CPATTN_F32, &schedule));
  REFUSED(CPATTN_INVALID, "dtype is 4", cpattn_schedule_create_all_to_all(plan, 0, CPATTN_TO_HEADS, CPATTN_Q, DIM, 4, &schedule));
  OK(cpattn_plan_destroy(plan));
  if (failures) return 1;
  puts("ok");
  return 0;
}
