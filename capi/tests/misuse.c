/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What goes wrong in real programs is answered with a status and a text. Run against a debug build of the library, which
 * also knows destroyed handles for certain.
 */
#define _POSIX_C_SOURCE 199309L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "expect.h"

enum { TOKENS = 8, HEADS = 2, DIM = 4 };
static const int32_t documents[] = {0, 3, TOKENS};
static float memory[5][TOKENS * HEADS * DIM];
static int64_t rows[] = {TOKENS, HEADS, DIM}, lse_shape[] = {HEADS, TOKENS};

static cpattn_problem small_problem(void) {
  cpattn_problem p = CPATTN_PROBLEM_INIT;
  p.cu_seqlens_q = documents;
  p.documents = 2;
  p.heads = HEADS;
  p.head_dim = DIM;
  return p;
}

static cpattn_tensor tensor(int i) {
  cpattn_tensor t;
  memset(&t, 0, sizeof t);
  t.data = memory[i];
  t.device.device_type = CPATTN_DEVICE_CPU;
  t.ndim = i == 4 ? 2 : 3;
  t.dtype.code = 2;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = i == 4 ? lse_shape : rows;
  return t;
}

static cpattn_tensor t[5];
static cpattn_forward_args args(void) {
  cpattn_forward_args a = CPATTN_FORWARD_ARGS_INIT;
  for (int i = 0; i < 5; i++) t[i] = tensor(i);
  a.q = &t[0];
  a.k = &t[1];
  a.v = &t[2];
  a.o = &t[3];
  a.lse = &t[4];
  return a;
}

/* A plan for another kind of layer has the documents and the tokens of its base, or is refused. */
static void tokens_of_another(const cpattn_plan *alone) {
  cpattn_problem p = small_problem(), other = CPATTN_PROBLEM_INIT;
  cpattn_options o = CPATTN_OPTIONS_INIT;
  cpattn_plan *base = NULL, *plan = NULL;
  uint64_t names[3];
  o.world = o.ring = 2, o.layout = CPATTN_LAYOUT_BALANCED, o.layout_parameter = 2;
  OK(cpattn_plan_create(&p, &o, &base));
  other.heads = 3, other.head_dim = 16, other.window_left = 1;
  OK(cpattn_plan_with_tokens_of(base, &other, NULL, &plan));
  OK(cpattn_plan_verify(plan));
  OK(cpattn_plan_distribution(base, &names[0]));
  OK(cpattn_plan_distribution(plan, &names[1]));
  OK(cpattn_plan_distribution(alone, &names[2]));
  if (names[0] != names[1] || names[0] == names[2]) failures++, fprintf(stderr, "distributions do not name the tokens\n");
  OK(cpattn_plan_destroy(plan));
  other.sinks = 1, o.gather = CPATTN_GATHER_OTHERS;
  OK(cpattn_plan_with_tokens_of(base, &other, &o, &plan));
  OK(cpattn_plan_destroy(plan));
  OK(cpattn_plan_with_tokens_of(base, &p, &o, &plan));
  OK(cpattn_plan_destroy(plan));
  o.layout = CPATTN_LAYOUT_ZIGZAG, o.layout_parameter = 0;
  REFUSED(CPATTN_INVALID, "options.layout is zigzag", cpattn_plan_with_tokens_of(base, &other, &o, &plan));
  o.layout = CPATTN_LAYOUT_AUTO, o.world = 4;
  REFUSED(CPATTN_INVALID, "options.world is 4, expected 0, or the base plan's 2", cpattn_plan_with_tokens_of(base, &other, &o, &plan));
  int32_t less[2] = {0, 3};
  other.cu_seqlens_q = less, other.documents = 1;
  REFUSED(CPATTN_INVALID, "problem.cu_seqlens_q is of length 2, expected 3", cpattn_plan_with_tokens_of(base, &other, NULL, &plan));
  REFUSED(CPATTN_INVALID_HANDLE, "NULL", cpattn_plan_with_tokens_of(NULL, &other, NULL, &plan));
  REFUSED(CPATTN_INVALID, "distribution is NULL", cpattn_plan_distribution(base, NULL));
  OK(cpattn_plan_destroy(base));
}

/* The plans of all kinds of a model's layers have the same tokens. */
static void plans_of_a_model(void) {
  cpattn_problem p = small_problem(), other = CPATTN_PROBLEM_INIT;
  cpattn_options o = CPATTN_OPTIONS_INIT;
  const cpattn_problem *kinds[2] = {&p, &other};
  cpattn_plan *two[2] = {NULL, NULL};
  uint64_t layers[2] = {1, 5}, names[2];
  other.heads = 3, other.head_dim = 16, other.window_left = 1;
  o.world = 2;
  OK(cpattn_plan_auto_for(kinds, layers, 2, &o, two));
  for (int i = 0; i < 2; i++) {
    OK(cpattn_plan_distribution(two[i], &names[i]));
    OK(cpattn_plan_verify(two[i]));
    OK(cpattn_plan_destroy(two[i]));
    two[i] = NULL;
  }
  if (names[0] != names[1]) failures++, fprintf(stderr, "kinds of layers have different tokens\n");
  REFUSED(CPATTN_INVALID, "kinds is none", cpattn_plan_auto_for(kinds, layers, 0, &o, two));
  REFUSED(CPATTN_INVALID, "problems is NULL", cpattn_plan_auto_for(NULL, layers, 2, &o, two));
  REFUSED(CPATTN_INVALID, "layers is NULL", cpattn_plan_auto_for(kinds, NULL, 2, &o, two));
  REFUSED(CPATTN_INVALID, "plans is NULL", cpattn_plan_auto_for(kinds, layers, 2, &o, NULL));
  layers[1] = 0;
  REFUSED(CPATTN_INVALID, "layers is 0, expected 1 to", cpattn_plan_auto_for(kinds, layers, 2, &o, two));
  layers[1] = 5, o.ring = 2;
  REFUSED(CPATTN_INVALID, "options.ring is 2, expected 0", cpattn_plan_auto_for(kinds, layers, 2, &o, two));
  o.ring = 0, kinds[1] = NULL;
  REFUSED(CPATTN_INVALID, "problems[1] is NULL", cpattn_plan_auto_for(kinds, layers, 2, &o, two));
  kinds[1] = &other;
  int32_t less[2] = {0, 3};
  other.cu_seqlens_q = less, other.documents = 1;
  REFUSED(CPATTN_INVALID, "problems[…].cu_seqlens_q is of length 2", cpattn_plan_auto_for(kinds, layers, 2, &o, two));
  if (two[0] || two[1]) failures++, fprintf(stderr, "a refused call has written plans\n");
}

/* Slices: planned and proved, of all kinds of layers, or refused with their index and both values. */
static void slices_of_a_batch(void) {
  const int64_t none = INT64_MIN, open = CPATTN_UNLIMITED;
  /* A prompt of 3 and two answers, in two documents of 3 and 5 tokens. */
  cpattn_slice list[] = {{0, 3, 0, 3, 0, none, 0}, {3, 5, 0, 3, 3, none, open}, {3, 5, 3, 5, 0, none, 0},
                         {5, 8, 0, 3, 3, none, open}, {5, 8, 5, 8, 0, none, 0}};
  cpattn_problem p = small_problem(), other = CPATTN_PROBLEM_INIT;
  cpattn_options o = CPATTN_OPTIONS_INIT;
  cpattn_plan *plan = NULL, *two = NULL;
  uint64_t names[2];
  o.world = o.ring = 2;
  p.slices = list, p.slice_count = 5;
  /* No pair of these has its key after the query, so that the window of the INIT macro cuts nothing. */
  OK(cpattn_plan_create(&p, &o, &plan));
  OK(cpattn_plan_verify(plan));
  other.heads = 3, other.head_dim = 16;
  OK(cpattn_plan_with_tokens_of(plan, &other, NULL, &two));
  OK(cpattn_plan_verify(two));
  OK(cpattn_plan_distribution(plan, &names[0]));
  OK(cpattn_plan_distribution(two, &names[1]));
  if (names[0] != names[1]) failures++, fprintf(stderr, "slices have other tokens than their documents\n");
  OK(cpattn_plan_destroy(two));

  /* Each token of the prompt sees all of it: without the slices of the base, with them, and cut by a window. */
  list[0].high = open;
  const char *cut = "window_right is 0 (causal), expected CPATTN_UNLIMITED: slices[0] has keys up to 2 positions after a query";
  other.slices = list, other.slice_count = 1;
  REFUSED(CPATTN_INVALID, cut, cpattn_plan_with_tokens_of(plan, &other, NULL, &two));
  other.window_right = CPATTN_UNLIMITED;
  OK(cpattn_plan_with_tokens_of(plan, &other, NULL, &two));
  OK(cpattn_plan_verify(two));
  OK(cpattn_plan_destroy(plan));
  other.slices = NULL, other.slice_count = 0, other.window_right = 0;
  REFUSED(CPATTN_INVALID, cut, cpattn_plan_with_tokens_of(two, &other, NULL, &plan));
  other.window_right = 1;
  OK(cpattn_plan_with_tokens_of(two, &other, NULL, &plan));
  OK(cpattn_plan_destroy(plan));
  OK(cpattn_plan_destroy(two));
  const cpattn_problem *kinds[2] = {&p, &other};
  cpattn_plan *both[2] = {NULL, NULL};
  uint64_t layers[2] = {1, 5};
  o.ring = 0;
  REFUSED(CPATTN_INVALID, "problems[0].window_right is 0", cpattn_plan_auto_for(kinds, layers, 2, &o, both));
  p.window_right = CPATTN_UNLIMITED;
  OK(cpattn_plan_auto_for(kinds, layers, 2, &o, both));
  for (int i = 0; i < 2; i++) {
    OK(cpattn_plan_verify(both[i]));
    OK(cpattn_plan_destroy(both[i]));
  }

  plan = NULL;
  list[4].k_begin = 4; /* and slices[2] allows k token 4 */
  OK(cpattn_plan_create(&p, &o, &plan));
  OK(cpattn_plan_destroy(plan));
  plan = NULL;
  list[4].q_begin = 4;
  REFUSED(CPATTN_INVALID, "problem.slices[4] is one that allows q token 4 with k token 4", cpattn_plan_create(&p, &o, &plan));
  list[4].q_begin = 5, list[4].k_begin = 5;
  list[3].q_end = TOKENS + 1;
  REFUSED(CPATTN_INVALID, "problem.slices[3].q_end is 9, expected at most 8, the tokens of q", cpattn_plan_create(&p, &o, &plan));
  list[3].q_end = 4;
  REFUSED(CPATTN_INVALID, "problem.slices[3].q_begin is 5, expected 0 to q_end = 4", cpattn_plan_create(&p, &o, &plan));
  list[3].q_end = TOKENS, list[3].q_start = ((int64_t)1 << 40) + 1;
  REFUSED(CPATTN_INVALID, "problem.slices[3].q_start is 1099511627777", cpattn_plan_create(&p, &o, &plan));
  list[3].q_start = 3;
  p.slice_count = 0;
  REFUSED(CPATTN_INVALID, "problem.slice_count is 0, expected at least 1, or slices NULL", cpattn_plan_create(&p, &o, &plan));
  p.slices = NULL, p.slice_count = 5;
  REFUSED(CPATTN_INVALID, "problem.slices is NULL, expected an address", cpattn_plan_create(&p, &o, &plan));
  p.slices = list, p.slice_count = SIZE_MAX;
  REFUSED(CPATTN_INVALID, "problem.length of slices is", cpattn_plan_create(&p, &o, &plan));
  if (plan) failures++, fprintf(stderr, "a refused call has written a plan\n");
}

/* The description of a machine chooses mesh and layout. */
static void plan_on_a_machine(void) {
  const char *machine =
      "name = two hosts\nestimate = yes\nranks_per_node = 1\ncards_per_node = 1\nmemory = 1e9\noperation = 1e-6\ncopy = 1e10\n"
      "inside.latency = 1e-6\ninside.rate = 1e10\nbetween.latency = 1e-5\nbetween.rate = 1e9\n"
      "kernel f32 16/16 forward = rate 1e11, row 1e-9, key 1e-9, edge 0, call 1e-6\n"
      "kernel f32 16/16 backward = rate 1e11, row 1e-9, key 1e-9, edge 0, call 1e-6\n";
  cpattn_problem p = small_problem();
  cpattn_options o = CPATTN_OPTIONS_INIT;
  cpattn_plan *plan = NULL;
  char text[8192];
  size_t needed = 0;
  o.world = 2;
  OK(cpattn_plan_create_on(&p, &o, machine, &plan));
  OK(cpattn_plan_explain(plan, text, sizeof text, &needed));
  if (!strstr(text, "two hosts")) failures++, fprintf(stderr, "explain does not name the machine:\n%s\n", text);
  /* A rank on each host: two levels are the same as one, which is then the plan's, but where nodes are given. */
  cpattn_plan_info info = CPATTN_PLAN_INFO_INIT;
  OK(cpattn_plan_describe(plan, &info));
  OK(cpattn_plan_destroy(plan));
  if (info.ranks_per_node != 0) failures++, fprintf(stderr, "ranks_per_node is %u\n", info.ranks_per_node);
  o.ranks_per_node = 2, plan = NULL;
  OK(cpattn_plan_create_on(&p, &o, machine, &plan));
  OK(cpattn_plan_describe(plan, &info));
  if (info.ranks_per_node != 2) failures++, fprintf(stderr, "ranks_per_node is %u\n", info.ranks_per_node);
  OK(cpattn_plan_destroy(plan));
  plan = NULL;
  REFUSED(CPATTN_INVALID, "machine is NULL", cpattn_plan_create_on(&p, &o, NULL, &plan));
  REFUSED(CPATTN_INVALID, "machine is not UTF-8 at byte 7", cpattn_plan_create_on(&p, &o, "name = \xff", &plan));
  REFUSED(CPATTN_INVALID, "line 1", cpattn_plan_create_on(&p, &o, "nothing", &plan));
  o.ring = 2;
  REFUSED(CPATTN_INVALID, "options.ring is 2, expected 0", cpattn_plan_create_on(&p, &o, machine, &plan));
  if (plan) failures++, fprintf(stderr, "a refused call has written a plan\n");
}

static void plans(void) {
  cpattn_problem p = small_problem();
  cpattn_options o = CPATTN_OPTIONS_INIT;
  cpattn_plan *plan = NULL;
  REFUSED(CPATTN_INVALID, "problem is NULL", cpattn_plan_create(NULL, &o, &plan));
  REFUSED(CPATTN_INVALID, "options is NULL", cpattn_plan_create(&p, NULL, &plan));
  REFUSED(CPATTN_INVALID, "plan is NULL", cpattn_plan_create(&p, &o, NULL));
  p.struct_size = 8;
  REFUSED(CPATTN_INVALID, "problem.struct_size is 8", cpattn_plan_create(&p, &o, &plan));
  p = small_problem();
  p.heads = 3;
  p.kv_heads = 2;
  REFUSED(CPATTN_INVALID, "problem.heads is 3, expected a multiple of kv_heads = 2", cpattn_plan_create(&p, &o, &plan));
  p = small_problem();
  p.dtype = 9;
  REFUSED(CPATTN_INVALID, "problem.dtype is 9, expected CPATTN_F16, CPATTN_BF16, CPATTN_F32 or CPATTN_F64", cpattn_plan_create(&p, &o, &plan));
  p = small_problem();
  p.window_left = -2;
  REFUSED(CPATTN_INVALID, "problem.window_left is -2", cpattn_plan_create(&p, &o, &plan));
  p = small_problem();
  p.softcap = -1.0;
  REFUSED(CPATTN_INVALID, "problem.softcap is -1.0", cpattn_plan_create(&p, &o, &plan));
  p = small_problem();
  p.sinks = 4097;
  REFUSED(CPATTN_INVALID, "problem.sinks is 4097, expected 0 to 4096", cpattn_plan_create(&p, &o, &plan));
  p.sinks = -1;
  REFUSED(CPATTN_INVALID, "problem.sinks is -1, expected 0 to 4096", cpattn_plan_create(&p, &o, &plan));
  p = small_problem();
  p.alibi_rows = 2;
  REFUSED(CPATTN_INVALID, "problem.alibi_rows is 2, expected 0 if alibi_slopes is NULL", cpattn_plan_create(&p, &o, &plan));
  static const float slopes[2 * HEADS] = {0.5f};
  p.alibi_slopes = slopes;
  OK(cpattn_plan_create(&p, &o, &plan));
  OK(cpattn_plan_destroy(plan));
  static const int32_t wrong[] = {1, 3, -1, INT32_MAX};
  for (int i = 0; i < 4; i++) {
    p.alibi_rows = wrong[i];
    REFUSED(CPATTN_INVALID, "(alibi_rows), expected 2 rows, one for each document", cpattn_plan_create(&p, &o, &plan));
  }
  p = small_problem();
  static const int32_t falling[] = {0, 5, 3};
  p.cu_seqlens_q = falling;
  REFUSED(CPATTN_INVALID, "problem.cu_seqlens_q[2] is 3, expected at least cu_seqlens_q[1] = 5", cpattn_plan_create(&p, &o, &plan));
  p = small_problem();
  p.documents = (size_t)-1;
  REFUSED(CPATTN_INVALID, "problem.documents", cpattn_plan_create(&p, &o, &plan));
  p = small_problem();
  o.gather = 4;
  REFUSED(CPATTN_INVALID, "options.gather is 4, expected CPATTN_GATHER_AUTO, CPATTN_GATHER_OTHERS, CPATTN_GATHER_STEPS or CPATTN_GATHER_TOGETHER", cpattn_plan_create(&p, &o, &plan));
  o.gather = 0;
  o.layout = 6;
  REFUSED(CPATTN_INVALID, "options.layout is 6, expected CPATTN_LAYOUT_AUTO, ", cpattn_plan_create(&p, &o, &plan));
  o.layout = CPATTN_LAYOUT_ZIGZAG;
  o.layout_parameter = 3;
  REFUSED(CPATTN_INVALID, "options.layout_parameter is 3", cpattn_plan_create(&p, &o, &plan));
  o.layout_parameter = 0;
  o.reproducible = 1;
  o.wire = CPATTN_WIRE_BF16;
  REFUSED(CPATTN_UNSUPPORTED, "wire bf16 with reproducible", cpattn_plan_create(&p, &o, &plan));

  cpattn_options good = CPATTN_OPTIONS_INIT;
  /* A batch of no documents has a plan; its list still has one entry. */
  p.documents = 0;
  OK(cpattn_plan_create(&p, &good, &plan));
  cpattn_plan_info info = CPATTN_PLAN_INFO_INIT;
  OK(cpattn_plan_describe(plan, &info));
  if (info.q_tokens || info.k_tokens) failures++, fprintf(stderr, "an empty batch has tokens\n");
  OK(cpattn_plan_destroy(plan));
  p.cu_seqlens_q = NULL, plan = NULL;
  REFUSED(CPATTN_INVALID, "problem.cu_seqlens_q is NULL, expected an address", cpattn_plan_create(&p, &good, &plan));
  p = small_problem();
  OK(cpattn_plan_create(&p, &good, &plan));
  char text[16];
  size_t needed = 0;
  OK(cpattn_plan_explain(plan, text, sizeof text, &needed));
  if (needed < 100 || strlen(text) != sizeof text - 1) failures++, fprintf(stderr, "explain: %zu, %s\n", needed, text);
  OK(cpattn_plan_explain(plan, NULL, 0, &needed));
  uint64_t bytes;
  tokens_of_another(plan);
  slices_of_a_batch();
  plans_of_a_model();
  plan_on_a_machine();
  REFUSED(CPATTN_INVALID, "rank is 1, expected below the world of 1", cpattn_plan_workspace(plan, 1, CPATTN_FORWARD, &bytes));
  REFUSED(CPATTN_INVALID, "direction is 2, expected CPATTN_FORWARD or CPATTN_BACKWARD", cpattn_plan_workspace(plan, 0, 2, &bytes));
  int64_t tokens[TOKENS];
  REFUSED(CPATTN_INVALID, "capacity is 7, expected at least the 8 tokens", cpattn_plan_tokens(plan, CPATTN_Q, 0, tokens, 7));
  OK(cpattn_plan_tokens(plan, CPATTN_Q, 0, tokens, TOKENS));

  /* Labels: the next token of the same document. */
  int32_t ids[TOKENS], labels[TOKENS], ignore = -100;
  int64_t n[] = {TOKENS};
  for (int i = 0; i < TOKENS; i++) ids[i] = i;
  cpattn_tensor whole = tensor(0), local = tensor(0);
  whole.data = ids, local.data = labels;
  whole.ndim = local.ndim = 1;
  whole.shape = local.shape = n;
  whole.dtype.code = local.dtype.code = 0;
  OK(cpattn_plan_shift(plan, 0, 1, &ignore, &whole, &local));
  const int32_t wanted[] = {1, 2, -100, 4, 5, 6, 7, -100};
  if (memcmp(labels, wanted, sizeof wanted)) failures++, fprintf(stderr, "shift is wrong\n");
  local.data = ids + 1;
  REFUSED(CPATTN_INVALID, "overlaps whole", cpattn_plan_shard(plan, CPATTN_Q, 0, &whole, &local));
  /* Strides and shapes whose products leave 64 and 128 bits. */
  int64_t wide[] = {TOKENS, INT64_C(1) << 61, 1}, far[] = {INT64_MAX, INT64_MAX, 1};
  cpattn_tensor large = whole, small = local;
  large.ndim = small.ndim = 3;
  large.shape = small.shape = wide;
  large.strides = small.strides = far;
  REFUSED(CPATTN_INVALID, "address space", cpattn_plan_shard(plan, CPATTN_Q, 0, &large, &small));
  REFUSED(CPATTN_INVALID, "address space", cpattn_plan_unshard(plan, CPATTN_Q, 0, &small, &large));
  REFUSED(CPATTN_INVALID, "address space", cpattn_plan_shift(plan, 0, 1, &ignore, &large, &small));

  /* What a plan of another kind cannot do is said in the words of this header. */
  cpattn_problem mixing = small_problem();
  mixing.kind = CPATTN_OTHER;
  cpattn_plan *mixed = NULL;
  cpattn_options alone = CPATTN_OPTIONS_INIT;
  OK(cpattn_plan_create(&mixing, &alone, &mixed));
  REFUSED(CPATTN_UNSUPPORTED, "kind CPATTN_OTHER", cpattn_plan_workspace(mixed, 0, CPATTN_FORWARD, &bytes));
  REFUSED(CPATTN_UNSUPPORTED, "kind CPATTN_OTHER", cpattn_plan_verify(mixed));
  OK(cpattn_plan_destroy(mixed));
  alone.world = 2, alone.ring = 2;
  REFUSED(CPATTN_UNSUPPORTED, "kind other on a ring", cpattn_plan_create(&mixing, &alone, &mixed));
  alone.world = 4, alone.ring = 0;
  REFUSED(CPATTN_UNSUPPORTED, "the world of 4 has more ranks than 2 heads", cpattn_plan_create(&mixing, &alone, &mixed));
  alone.ulysses = 4;
  REFUSED(CPATTN_INVALID, "options.ulysses is 4, expected at most heads = 2", cpattn_plan_create(&mixing, &alone, &mixed));
  cpattn_options many = CPATTN_OPTIONS_INIT;
  many.passes = 3;
  REFUSED(CPATTN_INVALID, "options.passes is 3, expected 1 to kv_heads = 2", cpattn_plan_create(&p, &many, &mixed));
  many.passes = 1, many.layout = CPATTN_LAYOUT_STRIPED;
  REFUSED(CPATTN_INVALID, "options.layout_parameter is 0, expected at least 1", cpattn_plan_create(&p, &many, &mixed));
  many.layout = CPATTN_LAYOUT_BALANCED, many.layout_parameter = 1 << 21;
  REFUSED(CPATTN_INVALID, "options.layout_parameter is 2097152, expected 1 to 1048576", cpattn_plan_create(&p, &many, &mixed));
  many = (cpattn_options)CPATTN_OPTIONS_INIT, many.world = 0;
  REFUSED(CPATTN_INVALID, "options.world is 0", cpattn_plan_create(&p, &many, &mixed));

  /* Handles. */
  cpattn_plan *dead = plan;
  OK(cpattn_plan_destroy(plan));
  REFUSED(CPATTN_INVALID_HANDLE, "destroyed", cpattn_plan_destroy(dead));
  REFUSED(CPATTN_INVALID_HANDLE, "destroyed", cpattn_plan_verify(dead));
  REFUSED(CPATTN_INVALID_HANDLE, "NULL", cpattn_plan_verify(NULL));
  REFUSED(CPATTN_INVALID_HANDLE, "no handle", cpattn_plan_verify((const cpattn_plan *)(const void *)memory));
  OK(cpattn_plan_destroy(NULL));
}

static void tensors(void) {
  cpattn_problem p = small_problem();
  cpattn_options o = CPATTN_OPTIONS_INIT;
  cpattn_plan *plan = NULL;
  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL;
  OK(cpattn_plan_create(&p, &o, &plan));
  OK(cpattn_local_group(1, 1000, &transport));
  cpattn_rank_options device = CPATTN_RANK_OPTIONS_INIT;
  device.device_type = CPATTN_DEVICE_CUDA;
  /* A library with CUDA knows the device, and refuses it for what it is beside. */
  int cuda = cpattn_rank_create(transport, &device, &rank) == CPATTN_INVALID;
  int32_t refusal = cuda ? CPATTN_INVALID : CPATTN_UNSUPPORTED;
  REFUSED(refusal, cuda ? "options.device is CUDA device 0, expected the CPU" : "options.device type 2 id 0 (CUDA)",
      cpattn_rank_create(transport, &device, &rank));
  device.device_type = CPATTN_DEVICE_CPU, device.sm_margin = 2;
  REFUSED(CPATTN_INVALID, "options.sm_margin is 2, expected 0 on the CPU", cpattn_rank_create(transport, &device, &rank));
  OK(cpattn_rank_create(transport, NULL, &rank));
  REFUSED(CPATTN_INVALID_HANDLE, "destroyed", cpattn_transport_destroy(transport));
  REFUSED(CPATTN_INVALID_HANDLE, "another kind", cpattn_rank_poll((const cpattn_rank *)(const void *)plan));

  cpattn_forward_args a = args();
  OK(cpattn_forward(rank, plan, &a));
  int on_stack;
  a.stream = &on_stack;
  REFUSED(CPATTN_UNSUPPORTED, "stream", cpattn_forward(rank, plan, &a));
  a = args();
  a.k = NULL;
  REFUSED(CPATTN_INVALID, "k is NULL", cpattn_forward(rank, plan, &a));
  a = args();
  a.sinks = &t[0];
  REFUSED(CPATTN_INVALID, "sinks.ndim is 3, expected 1 to 2", cpattn_forward(rank, plan, &a));
  a.sinks = &t[4];
  int64_t heads[] = {HEADS};
  t[4] = tensor(0), t[4].ndim = 1, t[4].shape = heads;
  cpattn_tensor lse = tensor(4);
  a.lse = &lse;
  REFUSED(CPATTN_INVALID, "plan a problem that has sinks", cpattn_forward(rank, plan, &a));
#define CHANGED(change, status, word) a = args(), change, REFUSED(status, word, cpattn_forward(rank, plan, &a))
  CHANGED(t[0].device.device_type = CPATTN_DEVICE_CUDA, refusal, cuda ? "q.device is type 2" : "q.device type 2");
  CHANGED(t[0].dtype.lanes = 2, CPATTN_INVALID, "q.dtype.lanes is 2");
  CHANGED(t[0].dtype.code = 0, CPATTN_INVALID, "q.dtype is code 0 with 32 bits");
  CHANGED(t[0].dtype.bits = 13, CPATTN_INVALID, "q.dtype.bits is 13");
  CHANGED(t[0].dtype.bits = 64, CPATTN_INVALID, "q.dtype is f64, expected f32");
  CHANGED(t[1].ndim = 2, CPATTN_INVALID, "k.ndim is 2, expected 3");
  CHANGED(t[1].shape = NULL, CPATTN_INVALID, "k.shape is NULL");
  CHANGED(t[1].data = NULL, CPATTN_INVALID, "k.data is NULL");
  CHANGED(t[2].byte_offset = 2, CPATTN_INVALID, "v.byte_offset is 2");
  CHANGED(t[2].byte_offset = UINT64_MAX - 3, CPATTN_INVALID, "address space");
  CHANGED(t[2].data = (char *)t[2].data + 1, CPATTN_INVALID, "a multiple of 4");
  CHANGED(t[3].data = memory[0], CPATTN_INVALID, "o is memory that overlaps q");
  int64_t far[] = {INT64_MAX / 2, DIM, 1}, back[] = {-HEADS * DIM, DIM, 1}, gaps[] = {2 * HEADS * DIM, 2 * DIM, 2};
  CHANGED(t[0].strides = far, CPATTN_INVALID, "q.strides");
  CHANGED(t[0].strides = back, CPATTN_INVALID, "q.strides[0] is -8");
  CHANGED(t[0].strides = gaps, CPATTN_INVALID, "q.strides[2] is 2, expected 1");
  int64_t negative[] = {-1, HEADS, DIM}, shape[] = {TOKENS, HEADS, DIM + 1};
  CHANGED(t[0].shape = negative, CPATTN_INVALID, "q.shape[0] is -1");
  CHANGED(t[1].shape = shape, CPATTN_INVALID, "k.head_dim is 5");
  char unaligned[300];
  REFUSED(CPATTN_INVALID, "workspace is", cpattn_rank_lend_workspace(rank, unaligned + ((size_t)unaligned % 2 ? 0 : 1), 100));
  /* Some plans need no workspace, and some allocators give NULL for 0 bytes. */
  uint64_t bytes = 1;
  OK(cpattn_plan_workspace(plan, 0, CPATTN_FORWARD, &bytes));
  if (bytes != 0) failures++, fprintf(stderr, "one rank's forward needs %d bytes, so the next lines test nothing\n", (int)bytes);
  REFUSED(CPATTN_INVALID, "workspace is NULL", cpattn_rank_lend_workspace(rank, NULL, 1));
  static long double room[64]; /* some multiple of 256 lies in it */
  OK(cpattn_rank_lend_workspace(rank, (void *)(((uintptr_t)room + 255) / 256 * 256), 0));
  cpattn_forward_args none = args();
  OK(cpattn_forward(rank, plan, &none));
  OK(cpattn_plan_workspace(plan, 0, CPATTN_BACKWARD, &bytes));
  REFUSED(CPATTN_INVALID, "workspace is 0 bytes", cpattn_rank_prepare(rank, plan, CPATTN_BACKWARD, NULL));
  /* Taken back: the rank has memory of its own. */
  OK(cpattn_rank_lend_workspace(rank, NULL, 0));
  OK(cpattn_rank_prepare(rank, plan, CPATTN_BACKWARD, NULL));
  OK(cpattn_rank_destroy(rank));
  REFUSED(CPATTN_INVALID_HANDLE, "destroyed", cpattn_rank_destroy(rank));
  REFUSED(CPATTN_INVALID_HANDLE, "destroyed", cpattn_rank_abort(rank));
  OK(cpattn_plan_destroy(plan));
}

/* A rank that waits for a peer that never comes is freed by an abort from another thread. */
static cpattn_plan *pair_plan;
static cpattn_rank *waiting;
static int32_t outcome;
static char said[256];

static void *wait_for_peer(void *unused) {
  (void)unused;
  cpattn_forward_args a = args();
  cpattn_share share = CPATTN_SHARE_INIT;
  if (cpattn_plan_share(pair_plan, 0, &share) != CPATTN_OK) return NULL;
  int64_t mine[] = {(int64_t)share.q_tokens, HEADS, DIM}, lse[] = {HEADS, (int64_t)share.q_tokens};
  for (int i = 0; i < 5; i++) t[i].shape = i == 4 ? lse : mine;
  /* The other thread may be inside a call itself, which refuses this one. */
  do outcome = cpattn_forward(waiting, pair_plan, &a);
  while (outcome == CPATTN_BUSY);
  strncpy(said, cpattn_last_error(), sizeof said - 1); /* this thread's */
  return NULL;
}

static void aborts(void) {
  cpattn_problem p = small_problem();
  cpattn_options o = CPATTN_OPTIONS_INIT;
  o.world = 2;
  cpattn_transport *transports[2];
  OK(cpattn_plan_create(&p, &o, &pair_plan));
  OK(cpattn_local_group(2, 60000, transports));
  OK(cpattn_rank_create(transports[0], NULL, &waiting));

  /* Tensors of the whole batch; keys that would have to be packed before they travel. */
  cpattn_forward_args whole = args();
  REFUSED(CPATTN_INVALID, "its shard of the plan", cpattn_forward(waiting, pair_plan, &whole));
  cpattn_plan *ring = NULL;
  cpattn_share share = CPATTN_SHARE_INIT;
  o.ring = 2;
  OK(cpattn_plan_create(&p, &o, &ring));
  OK(cpattn_plan_share(ring, 0, &share));
  int64_t mine[] = {(int64_t)share.q_tokens, HEADS, DIM}, lse[] = {HEADS, (int64_t)share.q_tokens}, gaps[] = {HEADS * DIM + DIM, DIM, 1};
  for (int i = 0; i < 5; i++) t[i].shape = i == 4 ? lse : mine;
  t[1].strides = gaps;
  REFUSED(CPATTN_INVALID, "plan with pack_inputs", cpattn_forward(waiting, ring, &whole));
  OK(cpattn_plan_destroy(ring));

  pthread_t thread;
  if (pthread_create(&thread, NULL, wait_for_peer, NULL)) exit(2);
  /* A second call is refused as soon as the first is inside; until then it succeeds. */
  int32_t status = CPATTN_OK;
  struct timespec pause = {0, 1000000};
  for (int i = 0; i < 10000 && status != CPATTN_BUSY; i++) {
    nanosleep(&pause, NULL);
    status = cpattn_rank_prepare(waiting, pair_plan, CPATTN_BACKWARD, NULL);
  }
  REFUSED(CPATTN_BUSY, "one call at a time", cpattn_rank_prepare(waiting, pair_plan, CPATTN_BACKWARD, NULL));
  REFUSED(CPATTN_BUSY, "one call at a time", cpattn_rank_destroy(waiting));
  OK(cpattn_rank_poll(waiting));
  OK(cpattn_rank_abort(waiting));
  pthread_join(thread, NULL);
  if (outcome != CPATTN_PEER || !strstr(said, "aborted")) failures++, fprintf(stderr, "abort: %d %s\n", outcome, said);
  REFUSED(CPATTN_PEER, "aborted", cpattn_rank_poll(waiting));
  OK(cpattn_rank_destroy(waiting));
  OK(cpattn_transport_destroy(transports[1]));
  OK(cpattn_plan_destroy(pair_plan));
}

/* A transport of the caller's that fails says with which number, and in which of its functions. */
typedef struct {
  int32_t agree, exchange, poll;
} codes;

static int32_t agree(void *context, uint32_t first, uint32_t end, uint64_t number, uint64_t *all, int64_t *blame) {
  (void)blame;
  for (uint32_t i = first; i < end; i++) all[i - first] = number;
  return ((codes *)context)->agree;
}

static int32_t exchange(void *context, const char *operation, uint32_t step, const cpattn_message *sends, size_t send_count, const cpattn_message *recvs, size_t recv_count, void *stream, int64_t *blame) {
  (void)operation, (void)step, (void)sends, (void)send_count, (void)recvs, (void)recv_count, (void)stream;
  *blame = 1;
  return ((codes *)context)->exchange;
}

static int32_t poll_now(void *context, int64_t *blame) {
  (void)blame;
  return ((codes *)context)->poll;
}

static void nothing(void *context) { (void)context; }

static void tables(void) {
  codes c = {41, -42, 43};
  cpattn_transport_table table = CPATTN_TRANSPORT_TABLE_INIT;
  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL;
  cpattn_plan *plan = NULL;
  table.context = &c, table.world = 2;
  REFUSED(CPATTN_INVALID, "table.agree is NULL", cpattn_transport_create(&table, &transport));
  table.agree = agree, table.exchange = exchange, table.poll = poll_now, table.abort = nothing;
  table.rank = 2;
  REFUSED(CPATTN_INVALID, "table.rank is 2, expected below the world of 2", cpattn_transport_create(&table, &transport));
  table.rank = 0, table.world = 0;
  REFUSED(CPATTN_INVALID, "table.world is 0, expected 1 to 1048576", cpattn_transport_create(&table, &transport));
  table.world = 2;

  cpattn_problem p = small_problem();
  cpattn_options o = CPATTN_OPTIONS_INIT;
  o.world = 2, o.ulysses = 2;
  OK(cpattn_plan_create(&p, &o, &plan));
  cpattn_share share = CPATTN_SHARE_INIT;
  OK(cpattn_plan_share(plan, 0, &share));
  cpattn_forward_args a = args();
  int64_t mine[] = {(int64_t)share.q_tokens, HEADS, DIM}, lse[] = {HEADS, (int64_t)share.q_tokens};
  for (int i = 0; i < 5; i++) t[i].shape = i == 4 ? lse : mine;
  /* A rank that failed stays so; each failure has a rank of its own. */
  for (int i = 0; i < 3; i++) {
    OK(cpattn_transport_create(&table, &transport));
    OK(cpattn_rank_create(transport, NULL, &rank));
    if (i == 0) {
      REFUSED(CPATTN_PEER, "rank 0, poll, step 0: rank 0 failed: the transport's poll returned 43", cpattn_rank_poll(rank));
      c.poll = 0;
      REFUSED(CPATTN_PEER, "the transport's poll returned 43", cpattn_rank_poll(rank));
    } else if (i == 1) {
      OK(cpattn_rank_poll(rank));
      REFUSED(CPATTN_PEER, "rank 0, agree, step 0 of the forward of plan ", cpattn_forward(rank, plan, &a));
      c.agree = 0;
    } else {
      REFUSED(CPATTN_PEER, "rank 1 failed: the transport's exchange returned -42", cpattn_forward(rank, plan, &a));
    }
    OK(cpattn_rank_destroy(rank));
  }
  OK(cpattn_plan_destroy(plan));
}

/* Single calls: keys in two calls merge to what one call gives; a bad mode or position is refused. */
static void single_calls(void) {
  static float o_one[TOKENS * HEADS * DIM], running[TOKENS * HEADS * DIM], o_two[TOKENS * HEADS * DIM], lse_two[HEADS * TOKENS];
  for (int i = 0; i < TOKENS * HEADS * DIM; i++)
    for (int j = 0; j < 3; j++) memory[j][i] = (float)((i * 7 + j * 3) % 11) / 5.0f - 1.0f;
  cpattn_scratch *scratch = NULL;
  REFUSED(CPATTN_INVALID, "workers is 0", cpattn_scratch_create(0, &scratch));
  OK(cpattn_scratch_create(1, &scratch));
  cpattn_range keys[] = {{0, 0, 5, 1, 1, 0}, {5, 5, 3, 1, 1, 0}};
  cpattn_pair pairs[] = {{0, 0}, {1, 0}};
  cpattn_band bands[] = {CPATTN_BAND_WHOLE, CPATTN_BAND_WHOLE};
  cpattn_q_range q = {{0, 0, TOKENS, 1, 1, 0}, {0, 0}, 0, 2, CPATTN_ONLY, {0}};
  cpattn_attend_args a = CPATTN_ATTEND_ARGS_INIT;
  cpattn_tensor tq = tensor(0), tk = tensor(1), tv = tensor(2), to = tensor(3), tl = tensor(4), tr = tensor(3);
  to.data = o_one;
  tr.data = running;
  a.q = &tq, a.k = &tk, a.v = &tv, a.o = &to, a.lse = &tl;
  a.score.scale = 0.5;
  a.ranges.q = &q, a.ranges.q_count = 1;
  a.ranges.k = keys, a.ranges.k_count = 2;
  a.ranges.pairs = pairs, a.ranges.pair_count = 2;
  a.ranges.bands = bands, a.ranges.band_count = 2;
  REFUSED(CPATTN_INVALID, "multiprocessors is 1, expected 0 on the CPU", cpattn_scratch_set_sm_margin(scratch, 1));
  OK(cpattn_scratch_set_sm_margin(scratch, 0));
  REFUSED(CPATTN_INVALID, "scratch is 0 bytes, expected", cpattn_attend(scratch, &a));
  OK(cpattn_scratch_reserve(scratch, CPATTN_F32, DIM, DIM));
  OK(cpattn_attend(scratch, &a));

  tl.data = lse_two, to.data = o_two;
  a.running = &tr;
  q.mode = CPATTN_FIRST, q.keys_begin = 0, q.keys_end = 1;
  OK(cpattn_attend(scratch, &a));
  q.mode = CPATTN_LAST, q.keys_begin = 1, q.keys_end = 2;
  OK(cpattn_attend(scratch, &a));
  for (int i = 0; i < TOKENS * HEADS * DIM; i++) {
    float d = o_one[i] - o_two[i];
    if (!(d < 1e-5f && d > -1e-5f)) failures++, fprintf(stderr, "o[%d]: %g in one visit, %g in two\n", i, o_one[i], o_two[i]);
  }

  /* The running result may be o itself, and no tensor that the call reads or writes besides. */
  cpattn_tensor *others[] = {&tq, &tk, &tv};
  for (int i = 0; i < 3; i++) {
    cpattn_tensor twin = *others[i];
    a.running = &twin;
    REFUSED(CPATTN_INVALID, "overlaps", cpattn_attend(scratch, &a));
  }
  a.running = &tr;
  /* Three visits with the running lse in two words; or two partial results that are merged: each is what one visit gives. */
  static float words[HEADS * TOKENS * 2], o_three[TOKENS * HEADS * DIM], words_three[HEADS * TOKENS * 2];
  int64_t pair_shape[] = {HEADS, TOKENS, 2};
  cpattn_tensor tw = tl, tw_three = tl, to_three = to;
  tw.ndim = 3, tw.shape = pair_shape, tw.strides = NULL, tw.data = words;
  tw_three = tw, tw_three.data = words_three, to_three.data = o_three;
  a.running_lse = &tw;
  int32_t modes[] = {CPATTN_FIRST, CPATTN_MERGE, CPATTN_LAST};
  for (int i = 0; i < 3; i++) {
    q.mode = modes[i], q.keys_begin = (uint32_t)i - i / 2, q.keys_end = i == 2 ? 1 : (uint32_t)i + 1;
    OK(cpattn_attend(scratch, &a));
  }
  for (int i = 0; i < TOKENS * HEADS * DIM; i++) {
    float d = o_one[i] - o_two[i];
    if (!(d < 1e-5f && d > -1e-5f)) failures++, fprintf(stderr, "o[%d]: %g in one visit, %g in three\n", i, o_one[i], o_two[i]);
  }
  for (int i = 0; i < HEADS * TOKENS; i++) {
    float d = words[2 * i] - lse_two[i];
    if (d != 0 || words[2 * i + 1] > 1e-6f || words[2 * i + 1] < -1e-6f) failures++, fprintf(stderr, "lse[%d] is %g and %g, not %g\n", i, words[2 * i], words[2 * i + 1], lse_two[i]);
  }
  const cpattn_tensor *final_o = a.o, *final_lse = a.lse;
  a.o = a.lse = NULL; /* no mode finishes */
  q.mode = CPATTN_FIRST;
  for (uint32_t i = 0; i < 2; i++) {
    a.running = i ? &to_three : &tr, a.running_lse = i ? &tw_three : &tw;
    q.keys_begin = i, q.keys_end = i + 1;
    OK(cpattn_attend(scratch, &a));
  }
  OK(cpattn_merge(NULL, &tr, &tw, &to_three, &tw_three, NULL));
  /* delta without and with a gradient of lse, which is lse itself here. */
  static float sums[2][HEADS * TOKENS];
  cpattn_tensor without = tl, with = tl;
  without.data = sums[0], with.data = sums[1];
  OK(cpattn_delta(NULL, final_o, final_o, &without, NULL));
  OK(cpattn_delta_with_lse(NULL, final_o, final_o, final_lse, final_lse, &with, NULL));
  for (int i = 0; i < HEADS * TOKENS; i++) {
    float d = sums[0][i] - ((const float *)final_lse->data)[i] - sums[1][i];
    if (!(d < 1e-6f && d > -1e-6f)) failures++, fprintf(stderr, "delta[%d]: %g less lse is not %g\n", i, sums[0][i], sums[1][i]);
  }
  REFUSED(CPATTN_INVALID, "d_lse is NULL", cpattn_delta_with_lse(NULL, final_o, final_o, final_lse, NULL, &with, NULL));
  REFUSED(CPATTN_INVALID, "lse is NULL", cpattn_delta_with_lse(NULL, final_o, final_o, NULL, final_lse, &with, NULL));
  for (int i = 0; i < TOKENS * HEADS * DIM; i++) {
    float d = o_one[i] - running[i];
    if (!(d < 1e-5f && d > -1e-5f)) failures++, fprintf(stderr, "o[%d]: %g in one visit, %g merged\n", i, o_one[i], running[i]);
  }
  pair_shape[2] = 3;
  REFUSED(CPATTN_INVALID, "lse.shape[2] is 3, expected 2: the lse and what rounding it lost", cpattn_merge(NULL, &tr, &tw, &to_three, &tw_three, NULL));
  REFUSED(CPATTN_INVALID, "running_lse.shape[2] is 3", cpattn_attend(scratch, &a));
  a.running_lse = NULL;
  REFUSED(CPATTN_INVALID, "running_lse is none", cpattn_attend(scratch, &a));
  pair_shape[2] = 2;
  a.running = &tr, a.o = final_o, a.lse = final_lse;
  q.mode = CPATTN_ONLY, q.keys_begin = 0, q.keys_end = 2;
  OK(cpattn_attend(scratch, &a));

  /* Two documents with the same keys: each row gives what it gave before. A row of two q ranges has two writers. */
  cpattn_range same[] = {{0, 0, TOKENS, 1, 1, 0}, {0, 0, TOKENS, 1, 1, 1}};
  cpattn_q_range halves[] = {{{0, 0, 5, 1, 1, 0}, {0, 0}, 0, 1, CPATTN_ONLY, {0}}, {{5, 5, 3, 1, 1, 1}, {0, 0}, 1, 2, CPATTN_ONLY, {0}}};
  a.ranges.q = halves, a.ranges.q_count = 2, a.ranges.k = same;
  memset(o_two, 0, sizeof o_two);
  OK(cpattn_attend(scratch, &a));
  if (memcmp(o_one, o_two, sizeof o_one)) failures++, fprintf(stderr, "keys that two documents share give something else\n");
  halves[1].range.row = 4;
  REFUSED(CPATTN_INVALID, "ranges.q[1] is rows 4..7, expected no row of ranges.q[0], which is rows 0..5", cpattn_attend(scratch, &a));
  a.ranges.q = &q, a.ranges.q_count = 1, a.ranges.k = keys;

  /* Elements of a later header, longer by members that are 0, and those of a program that gives no size. */
  struct {
    cpattn_q_range known;
    uint64_t unknown;
  } later[] = {{halves[0], 0}, {halves[1], 0}};
  struct {
    cpattn_pair known;
    uint32_t unknown[2];
  } later_pairs[] = {{pairs[0], {0, 0}}, {pairs[1], {0, 0}}};
  later[1].known.range.row = 5;
  a.ranges.q = &later[0].known, a.ranges.q_count = 2, a.ranges.k = same, a.q_range_size = sizeof later[0];
  a.ranges.pairs = &later_pairs[0].known, a.pair_size = sizeof later_pairs[0];
  memset(o_two, 0, sizeof o_two);
  OK(cpattn_attend(scratch, &a));
  if (memcmp(o_one, o_two, sizeof o_one)) failures++, fprintf(stderr, "ranges of a later header give something else\n");
  later[1].unknown = 1;
  REFUSED(CPATTN_UNSUPPORTED, "a member of ranges.q beyond byte 56", cpattn_attend(scratch, &a));
  later[1].unknown = 0, later_pairs[1].unknown[0] = 1;
  REFUSED(CPATTN_UNSUPPORTED, "a member of ranges.pairs beyond byte 8", cpattn_attend(scratch, &a));
  a.q_range_size = 48;
  REFUSED(CPATTN_INVALID, "args.q_range_size is 48, expected a multiple of 8 from 56", cpattn_attend(scratch, &a));
  a.ranges.q = &q, a.ranges.q_count = 1, a.ranges.k = keys, a.ranges.pairs = pairs, a.q_range_size = a.pair_size = 0;
  OK(cpattn_attend(scratch, &a));
  a.q_range_size = sizeof(cpattn_q_range), a.pair_size = sizeof(cpattn_pair);

  q.document[0] = TOKENS, q.document[1] = 4;
  REFUSED(CPATTN_INVALID, "expected at least 5 tokens of k, the rows of ranges.k[0], or [0, 0] if not given", cpattn_attend(scratch, &a));
  q.document[0] = TOKENS - 1, q.document[1] = TOKENS;
  REFUSED(CPATTN_INVALID, "ranges.q[0].document is [7, 8], expected at least 8 tokens of q", cpattn_attend(scratch, &a));
  q.document[0] = TOKENS;
  OK(cpattn_attend(scratch, &a));
  q.document[0] = q.document[1] = 0;
  q.mode = 4;
  REFUSED(CPATTN_INVALID, "ranges.q[0].mode is 4, expected CPATTN_FIRST, CPATTN_MERGE, CPATTN_LAST or CPATTN_ONLY", cpattn_attend(scratch, &a));
  q.mode = CPATTN_ONLY;
  keys[0].pos = INT64_MAX;
  REFUSED(CPATTN_INVALID, "ranges.k[0].pos", cpattn_attend(scratch, &a));
  keys[0].pos = 0;
  q.keys_end = 3;
  REFUSED(CPATTN_INVALID, "entries of pairs, which has 2", cpattn_attend(scratch, &a));
  q.keys_end = 2;
  keys[1].doc = 3;
  REFUSED(CPATTN_INVALID, "ranges.k[1].doc is 3, expected 0, the document of q range 0, under a band without limits", cpattn_attend(scratch, &a));
  q.keys_end = 1; /* fine where no pair joins them */
  OK(cpattn_attend(scratch, &a));
  keys[1].doc = 0, q.keys_end = 2;
  pairs[1].band = 2;
  REFUSED(CPATTN_INVALID, "ranges.pairs of q range 0: band is 2, expected an index of ranges.bands, which has 2", cpattn_attend(scratch, &a));
  pairs[1].band = 1;
  pairs[0].k = 2;
  REFUSED(CPATTN_INVALID, "ranges.pairs of q range 0: k is 2, expected an index of ranges.k, which has 2", cpattn_attend(scratch, &a));
  pairs[0].k = 0;
  bands[1].shift = ((int64_t)1 << 42) + 1;
  REFUSED(CPATTN_INVALID, "ranges.bands[1].shift is 4398046511105, expected within", cpattn_attend(scratch, &a));
  bands[1].shift = 0;
  a.ranges.bands = NULL;
  REFUSED(CPATTN_INVALID, "ranges.bands is NULL, expected an address", cpattn_attend(scratch, &a));
  a.ranges.band_count = 0;
  REFUSED(CPATTN_INVALID, "band is 0, expected an index of ranges.bands, which has 0", cpattn_attend(scratch, &a));
  a.ranges.bands = bands, a.ranges.band_count = 2;
  /* Bands that are causal by themselves give what the causal window gives; so do ranges of two documents, whose positions the
   * second band shifts. */
  bands[0].high = bands[1].high = 0, pairs[1].band = 1, a.score.window_right = CPATTN_UNLIMITED;
  for (int i = 0; i < 2; i++) {
    keys[1].doc = 3 * i, keys[1].pos = 5 - 4 * i, bands[1].shift = 4 * i;
    memset(o_two, 0, sizeof o_two);
    OK(cpattn_attend(scratch, &a));
    for (int j = 0; j < TOKENS * HEADS * DIM; j++) {
      float d = o_one[j] - o_two[j];
      if (!(d < 1e-6f && d > -1e-6f)) failures++, fprintf(stderr, "o[%d]: %g under a window, %g under bands\n", j, o_one[j], o_two[j]);
    }
  }
  keys[1].doc = 0, keys[1].pos = 5, bands[1].shift = 0;
  bands[0].high = bands[1].high = INT64_MAX, pairs[1].band = 0, a.score.window_right = 0;
  q.range.len = TOKENS + 1;
  REFUSED(CPATTN_INVALID, "ranges.q[0].row", cpattn_attend(scratch, &a));
  OK(cpattn_scratch_destroy(scratch));
  REFUSED(CPATTN_INVALID_HANDLE, "destroyed", cpattn_scratch_destroy(scratch));

  /* A merge of a result with one that saw no key changes nothing. */
  for (int i = 0; i < HEADS * TOKENS; i++) memory[4][i] = -1.0f / 0.0f;
  for (int i = 0; i < TOKENS * HEADS * DIM; i++) memory[3][i] = memory[4][0] - memory[4][0]; /* NaN: it has no say */
  cpattn_tensor other_o = tensor(3), other_lse = tensor(4);
  float before = o_two[3];
  OK(cpattn_merge(NULL, &to, &tl, &other_o, &other_lse, NULL));
  if (o_two[3] != before) failures++, fprintf(stderr, "merge with nothing changed something\n");
  const cpattn_tensor *sources[] = {&to, &tr};
  OK(cpattn_transform(NULL, &other_o, sources, 2, NULL));
  if (memory[3][3] != o_two[3] + running[3]) failures++, fprintf(stderr, "transform is no sum\n");
  REFUSED(CPATTN_INVALID, "overlaps", cpattn_transform(NULL, &tr, sources, 2, NULL));
  REFUSED(CPATTN_INVALID, "source_count is 65", cpattn_transform(NULL, &other_o, sources, 65, NULL));
}

/* Dropout: o is that of the mask, and a seed is needed exactly where the problem has dropout. */
static void dropout(void) {
  cpattn_problem p = small_problem();
  cpattn_options o = CPATTN_OPTIONS_INIT;
  cpattn_plan *plan = NULL, *without = NULL;
  cpattn_transport *end = NULL;
  cpattn_rank *rank = NULL;
  cpattn_schedule *schedule = NULL;
  uint64_t seed = UINT64_MAX - 6;
  uint8_t kept[TOKENS * TOKENS];
  OK(cpattn_plan_create(&p, &o, &without));
  p.dropout = 1.0;
  REFUSED(CPATTN_INVALID, "problem.dropout is 1.0, expected a probability from 0 up to, but not including, 1", cpattn_plan_create(&p, &o, &plan));
  p.dropout = 0.5;
  OK(cpattn_plan_create(&p, &o, &plan));
  OK(cpattn_local_group(1, 10000, &end));
  OK(cpattn_rank_create(end, NULL, &rank));
  memset(memory, 0, sizeof memory); /* equal scores */
  for (int i = 0; i < TOKENS * HEADS * DIM; i++) memory[2][i] = (float)(i + 1);
  cpattn_forward_args a = args();
  REFUSED(CPATTN_INVALID, "dropout_seed is not given, expected a number for this layer and step", cpattn_forward(rank, plan, &a));
  a.dropout_seed = &seed;
  REFUSED(CPATTN_INVALID, "dropout_seed is 18446744073709551609, expected none", cpattn_forward(rank, without, &a));
  OK(cpattn_forward(rank, plan, &a));
  for (uint32_t h = 0; h < HEADS; h++) {
    OK(cpattn_dropout_mask(0.5, seed, 0, TOKENS, 0, TOKENS, h, kept));
    for (int i = 0; i < TOKENS; i++) {
      int first = i < documents[1] ? 0 : documents[1];
      float sum = 0, d;
      for (int j = first; j <= i; j++) sum += kept[i * TOKENS + j] ? 2 * memory[2][(j * HEADS + (int)h) * DIM] : 0;
      d = memory[3][(i * HEADS + (int)h) * DIM] - sum / (float)(i - first + 1);
      if (!(d < 1e-4f && d > -1e-4f)) failures++, fprintf(stderr, "o[%d], head %u: off by %g from the mask\n", i, h, d);
    }
  }
  REFUSED(CPATTN_INVALID, "probability is 2.0, expected", cpattn_dropout_mask(2.0, seed, 0, 1, 0, 1, 0, kept));
  REFUSED(CPATTN_INVALID, "kept is NULL", cpattn_dropout_mask(0.5, seed, 0, 1, 0, 1, 0, NULL));
  REFUSED(CPATTN_INVALID, "k_count is 6, expected at most 5", cpattn_dropout_mask(0.5, seed, 0, 1, UINT32_MAX - 5, 6, 0, kept));
  REFUSED(CPATTN_UNSUPPORTED, "the schedule of a plan with dropout 0.5", cpattn_schedule_create(plan, 0, CPATTN_FORWARD, &schedule));
  memset(memory, 0, sizeof memory);
  OK(cpattn_rank_destroy(rank));
  OK(cpattn_plan_destroy(plan));
  OK(cpattn_plan_destroy(without));
}

int main(void) {
  if (cpattn_version() != CPATTN_VERSION || strcmp(cpattn_last_error(), "")) return 2;
  plans();
  tensors();
  aborts();
  tables();
  single_calls();
  dropout();
  if (failures) fprintf(stderr, "%d failures\n", failures);
  else puts("ok");
  return failures != 0;
}
