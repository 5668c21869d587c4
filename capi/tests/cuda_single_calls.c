/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Single calls on a device, each beside the same call on the CPU: attention in one call and in three, its
 * backward, delta, finish, the sinks' gradient, merge, transform. All device calls go on one stream without a wait in
 * between. Then what a scratch refuses, and that no call takes memory.
 *
 *   cuda_single_calls [N]   N multiprocessors are left free of attention
 */
#define _POSIX_C_SOURCE 200112L
#include "cuda_test.h"

enum { TOKENS = 50, HEADS = 4, KV_HEADS = 2, DIM = 32 };
static array q, k, v, d_o, o, running, words, lse, sinks, slopes, delta, dq, dk, dv, dsinks, delta_of_lse, other_o, other_lse, small_o, empty_o, empty_lse, moved, moved_wide, sum;
static cpattn_scratch *cpu, *gpu;
static void *stream;

/* Two documents; the second's queries begin at position 5. Keys in three pieces, one of them a stripe. */
static cpattn_range keys[] = {{0, 0, 12, 1, 1, 0}, {12, 12, 8, 1, 1, 0}, {20, 0, 30, 3, 5, 1}};
static const cpattn_pair pairs[] = {{0, 0}, {1, 0}, {2, 0}};
static const cpattn_band whole[] = {CPATTN_BAND_WHOLE};

static cpattn_attend_args attend_args(int device, cpattn_q_range *ranges, size_t count) {
  cpattn_attend_args a = CPATTN_ATTEND_ARGS_INIT;
#define OF(x) (device ? &x.device : &x.cpu)
  a.q = OF(q), a.k = OF(k), a.v = OF(v), a.o = OF(o), a.lse = OF(lse), a.running = OF(running);
  a.alibi_slopes = OF(slopes), a.sinks = OF(sinks);
  a.heads.group = HEADS / KV_HEADS;
  a.score.scale = 0.2, a.score.softcap = 3.0, a.score.window_left = 30;
  a.ranges.q = ranges, a.ranges.q_count = count;
  a.ranges.k = keys, a.ranges.k_count = 3;
  a.ranges.pairs = pairs, a.ranges.pair_count = 3;
  a.ranges.bands = whole, a.ranges.band_count = 1;
  a.stream = device ? stream : NULL;
  return a;
}

static cpattn_attend_backward_args backward_args(int device, cpattn_q_range *ranges, size_t count) {
  cpattn_attend_args f = attend_args(device, ranges, count);
  cpattn_attend_backward_args a = CPATTN_ATTEND_BACKWARD_ARGS_INIT;
  a.q = f.q, a.k = f.k, a.v = f.v, a.alibi_slopes = f.alibi_slopes, a.lse = f.lse;
  a.d_o = OF(d_o), a.delta = OF(delta), a.dq = OF(dq), a.dk = OF(dk), a.dv = OF(dv);
  a.heads = f.heads, a.score = f.score, a.ranges = f.ranges, a.stream = f.stream;
  return a;
}

static void attention(void) {
  cpattn_q_range once[] = {{{0, 0, 20, 1, 1, 0}, {0, 0}, 0, 2, CPATTN_ONLY, {0}}, {{20, 5, 30, 1, 1, 1}, {0, 0}, 2, 3, CPATTN_ONLY, {0}}};
  cpattn_q_range first[] = {{{0, 0, 20, 1, 1, 0}, {0, 0}, 0, 1, CPATTN_FIRST, {0}}, {{20, 5, 30, 1, 1, 1}, {0, 0}, 2, 3, CPATTN_FIRST, {0}}};
  cpattn_q_range merge[] = {{{0, 0, 20, 1, 1, 0}, {0, 0}, 1, 2, CPATTN_MERGE, {0}}, {{20, 5, 30, 1, 1, 1}, {0, 0}, 0, 0, CPATTN_MERGE, {0}}};
  cpattn_q_range last[] = {{{0, 0, 20, 1, 1, 0}, {0, 0}, 0, 0, CPATTN_LAST, {0}}, {{20, 5, 30, 1, 1, 1}, {0, 0}, 0, 0, CPATTN_LAST, {0}}};
  for (int device = 0; device < 2; device++) {
    cpattn_scratch *scratch = device ? gpu : cpu;
    cpattn_q_range *visits[] = {once, first, merge, last};
    for (int i = 0; i < 4; i++) {
      cpattn_attend_args a = attend_args(device, visits[i], 2);
      if (i == 0) a.o = OF(small_o), a.lse = OF(other_lse), a.running = NULL;
      else a.running_lse = OF(words);
      OK(cpattn_attend(scratch, &a));
    }
    OK(cpattn_delta(scratch, OF(o), OF(d_o), OF(delta), device ? stream : NULL));
    OK(cpattn_delta_with_lse(scratch, OF(o), OF(d_o), OF(lse), OF(other_lse), OF(delta_of_lse), device ? stream : NULL));
    cpattn_attend_backward_args b = backward_args(device, once, 2);
    OK(cpattn_attend_backward(scratch, &b));
    b.gradients = CPATTN_GRADIENTS_KEYS, b.dq = NULL, b.accumulate_keys = 1;
    OK(cpattn_attend_backward(scratch, &b)); /* twice the gradients */
    OK(cpattn_sink_gradient(scratch, OF(lse), OF(delta), OF(sinks), OF(dsinks), device ? stream : NULL));
  }
  AGREES(small_o, stream, 2e-3);
  AGREES(other_lse, stream, 1e-5);
  AGREES(o, stream, 2e-3);
  AGREES(lse, stream, 1e-5);
  AGREES(words, stream, 1e-5);
  AGREES(delta, stream, 2e-3);
  AGREES(delta_of_lse, stream, 2e-3);
  AGREES(dq, stream, 2e-3);
  AGREES(dk, stream, 2e-3);
  AGREES(dv, stream, 2e-3);
  AGREES(dsinks, stream, 2e-3);
}

/* Rows that are only read may lie in two ranges: keys that two documents share, queries of a backward for keys alone. */
static void shared_rows(void) {
  cpattn_range prefix[] = {{0, 0, 12, 1, 1, 0}, {0, 0, 12, 1, 1, 1}}, halves[] = {{0, 0, 12, 1, 1, 0}, {12, 0, 8, 1, 1, 1}};
  cpattn_q_range apart[] = {{{0, 9, 20, 1, 1, 0}, {0, 0}, 0, 1, CPATTN_ONLY, {0}}, {{20, 5, 30, 1, 1, 1}, {0, 0}, 1, 2, CPATTN_ONLY, {0}}};
  cpattn_q_range twice[] = {{{0, 9, 20, 1, 1, 0}, {0, 0}, 0, 1, CPATTN_ONLY, {0}}, {{10, 5, 30, 1, 1, 1}, {0, 0}, 1, 2, CPATTN_ONLY, {0}}};
  for (int device = 0; device < 2; device++) {
    cpattn_scratch *scratch = device ? gpu : cpu;
    cpattn_attend_args a = attend_args(device, apart, 2);
    a.ranges.k = prefix;
    a.ranges.k_count = a.ranges.pair_count = 2;
    OK(cpattn_attend(scratch, &a));
    cpattn_attend_backward_args b = backward_args(device, twice, 2);
    b.ranges.k = halves;
    b.ranges.k_count = b.ranges.pair_count = 2;
    const char *both = "ranges.q[1] is rows 10..40, expected no row of ranges.q[0], which is rows 0..20";
    REFUSED(CPATTN_INVALID, both, cpattn_attend_backward(scratch, &b));
    b.gradients = CPATTN_GRADIENTS_KEYS, b.dq = NULL;
    OK(cpattn_attend_backward(scratch, &b));
    a.ranges.q = twice;
    REFUSED(CPATTN_INVALID, both, cpattn_attend(scratch, &a));
    b = backward_args(device, apart, 2);
    b.ranges = a.ranges, b.ranges.q = apart;
    REFUSED(CPATTN_INVALID, "ranges.k[1] is rows 0..12, expected no row of ranges.k[0]", cpattn_attend_backward(scratch, &b));
    b.gradients = CPATTN_GRADIENTS_QUERIES, b.dk = b.dv = NULL;
    OK(cpattn_attend_backward(scratch, &b));
  }
  AGREES(o, stream, 2e-3);
  AGREES(lse, stream, 1e-5);
  AGREES(dq, stream, 2e-3);
  AGREES(dk, stream, 2e-3);
  AGREES(dv, stream, 2e-3);
}

static void rows(void) {
  cpattn_range empty[] = {{3, 0, 5, 1, 1, 0}, {40, 0, 10, 1, 1, 0}};
  for (int device = 0; device < 2; device++) {
    cpattn_scratch *scratch = device ? gpu : cpu;
    void *on = device ? stream : NULL;
    OK(cpattn_finish(scratch, OF(empty_o), OF(empty_lse), OF(sinks), empty, 1, on));
    OK(cpattn_finish(scratch, OF(empty_o), OF(empty_lse), NULL, empty + 1, 1, on));
    OK(cpattn_merge(scratch, OF(running), OF(lse), OF(other_o), OF(other_lse), on));
    OK(cpattn_merge(scratch, OF(running), OF(words), OF(other_o), OF(lse), on)); /* two words with one */
    const cpattn_tensor *one[] = {OF(q)}, *three[] = {OF(sum), OF(q), OF(d_o)};
    OK(cpattn_transform(scratch, OF(moved), one, 1, on));
    OK(cpattn_transform(scratch, OF(moved_wide), one, 1, on));
    OK(cpattn_transform(scratch, OF(sum), three, 3, on));
  }
  AGREES(empty_o, stream, 0);
  AGREES(empty_lse, stream, 0);
  AGREES(running, stream, 1e-3);
  AGREES(lse, stream, 1e-5);
  AGREES(words, stream, 1e-5);
  AGREES(moved, stream, 0);
  AGREES(moved_wide, stream, 0);
  AGREES(sum, stream, 0);
}

static void refusals(void) {
  cpattn_q_range once = {{0, 0, 20, 1, 1, 0}, {0, 0}, 0, 2, CPATTN_ONLY, {0}};
  cpattn_attend_args a = attend_args(1, &once, 1), host = attend_args(0, &once, 1);
  cpattn_scratch *fresh = NULL;
  OK(cpattn_scratch_create_cuda(0, &fresh));
  REFUSED(CPATTN_INVALID, "q.device is type 2, CUDA device 0, expected the CPU", cpattn_attend(cpu, &a));
  REFUSED(CPATTN_INVALID, "q.device is type 1, the CPU, expected CUDA device 0", cpattn_attend(gpu, &host));
  REFUSED(CPATTN_INVALID_HANDLE, "scratch is NULL", cpattn_attend(NULL, &a));
  REFUSED(CPATTN_INVALID, "o.device is type 2, CUDA device 0, expected the CPU", cpattn_delta(NULL, &o.device, &d_o.device, &delta.device, stream));
  host.stream = stream;
  REFUSED(CPATTN_UNSUPPORTED, "the CPU has no streams", cpattn_attend(cpu, &host));
  REFUSED(CPATTN_UNSUPPORTED, "the CPU has no streams", cpattn_delta(NULL, &o.cpu, &d_o.cpu, &delta.cpu, stream));
  a.running = NULL, a.aligned = 1;
  REFUSED(CPATTN_UNSUPPORTED, "aligned", cpattn_attend(gpu, &a));
  a.aligned = 0;
  a.running = a.o;
  REFUSED(CPATTN_INVALID, "running.dtype", cpattn_attend(gpu, &a));
  a.running = NULL;

  /* Kernels of another shape. Another process may have loaded them; this one has not. */
  array wide_q, wide_k;
  array_make(&wide_q, 16, 3, TOKENS, HEADS, 96), array_make(&wide_k, 16, 3, TOKENS, KV_HEADS, 96);
  cpattn_attend_args w = a;
  w.q = &wide_q.device, w.k = &wide_k.device;
  REFUSED(CPATTN_INVALID, "reserved for f16 with head_dim 96 and value_dim 32", cpattn_attend(fresh, &w));
  REFUSED(CPATTN_UNSUPPORTED, "dtype f32", cpattn_scratch_reserve(fresh, CPATTN_F32, 32, 32));
  REFUSED(CPATTN_UNSUPPORTED, "value_dim 12", cpattn_scratch_reserve(fresh, CPATTN_F16, 16, 12));
  OK(cpattn_scratch_reserve(fresh, CPATTN_F16, 96, DIM));
  OK(cpattn_attend(fresh, &w));
  array_free(&wide_q), array_free(&wide_k);

  /* More lists than there is room for; the number that is asked for is the one that is needed. */
  enum { MANY = 8000 };
  static cpattn_pair all[MANY];
  uint64_t bytes = 0, back = 0;
  cpattn_attend_args m = a;
  m.ranges.pairs = all, m.ranges.pair_count = MANY;
  static cpattn_q_range many[MANY];
  for (int i = 0; i < MANY; i++) many[i] = once, many[i].range.len = 0, many[i].keys_end = 0;
  many[0] = once, many[0].keys_end = 1;
  m.ranges.q = many, m.ranges.q_count = MANY;
  OK(cpattn_attend_metadata(gpu, &m, &bytes));
  TRUE(bytes > 8000 * 56 && bytes < 8000 * 80);
  REFUSED(CPATTN_INVALID, "room for scheduler metadata is 262144 bytes", cpattn_attend(gpu, &m));
  /* The kernels for sm_80 do without the 16 bytes of a counter. */
  const char *least = strstr(cpattn_last_error(), "expected at least ");
  unsigned long long needed = 0;
  TRUE(least && sscanf(least, "expected at least %llu for this call", &needed) == 1);
  TRUE(needed == bytes || needed + 16 == bytes);
  many[0].keys_end = MANY + 1; /* what is wrong with the ranges is said first */
  REFUSED(CPATTN_INVALID, "ranges.q[0].keys", cpattn_attend(gpu, &m));
  many[0].keys_end = 1;
  REFUSED(CPATTN_INVALID, "calls is 0", cpattn_scratch_reserve_metadata(gpu, bytes, 0));
  REFUSED(CPATTN_INVALID, "bytes is", cpattn_scratch_reserve_metadata(gpu, UINT64_MAX, 1));
  REFUSED(CPATTN_UNSUPPORTED, "scheduler metadata of the CPU", cpattn_scratch_reserve_metadata(cpu, bytes, 1));
  OK(cpattn_scratch_reserve_metadata(gpu, bytes, 100));
  OK(cpattn_attend(gpu, &m));
  OK(cpattn_attend_metadata(cpu, &host, &back));
  TRUE(back == 0);
  cpattn_attend_backward_args b = backward_args(1, &once, 1);
  OK(cpattn_attend_backward_metadata(gpu, &b, &back));
  TRUE(back > 0 && back < 2000);

  /* What only the CPU does. */
  array f64;
  array_make(&f64, 64, 3, TOKENS, HEADS, DIM);
  const cpattn_tensor *sources[] = {&f64.device};
  REFUSED(CPATTN_UNSUPPORTED, "f64", cpattn_transform(gpu, &moved.device, sources, 1, stream));
  REFUSED(CPATTN_UNSUPPORTED, "dtype f64", cpattn_delta(gpu, &f64.device, &f64.device, &delta.device, stream));
  array_free(&f64);
  /* Memory of the host that says it is the device's. */
  cpattn_tensor lies = q.device;
  lies.data = q.host;
  const cpattn_tensor *lying[] = {&lies};
  REFUSED(CPATTN_INVALID, "sources[0].ptr is 0x", cpattn_transform(gpu, &moved.device, lying, 1, stream));
  OK(cpattn_scratch_destroy(fresh));
}

int main(int argc, char **argv) {
  if (!driver_open(0)) return printf("not run: %s\n", driver_missing), 0;
  array *queries[] = {&q, &d_o, &o, &small_o, &empty_o, &moved}, *keys_like[] = {&k, &v};
  array *wide[] = {&running, &other_o, &dq, &moved_wide, &sum}, *gradients[] = {&dk, &dv}, *rows_like[] = {&lse, &delta, &delta_of_lse, &other_lse, &empty_lse};
  for (int i = 0; i < 6; i++) array_make(queries[i], 16, 3, TOKENS, HEADS, DIM);
  for (int i = 0; i < 2; i++) array_make(keys_like[i], 16, 3, TOKENS, KV_HEADS, DIM);
  for (int i = 0; i < 5; i++) array_make(wide[i], 32, 3, TOKENS, HEADS, DIM);
  for (int i = 0; i < 2; i++) array_make(gradients[i], 32, 3, TOKENS, KV_HEADS, DIM);
  for (int i = 0; i < 5; i++) array_make(rows_like[i], 32, 2, HEADS, TOKENS, 1);
  array_make(&words, 32, 3, HEADS, TOKENS, 2);
  array *heads[] = {&sinks, &slopes, &dsinks};
  for (int i = 0; i < 3; i++) array_make(heads[i], 32, 1, HEADS, 1, 1);
  CUDA(driver.stream_create(&stream, 1));
  OK(cpattn_scratch_create(1, &cpu));
  OK(cpattn_scratch_reserve(cpu, CPATTN_F16, DIM, DIM));
  OK(cpattn_scratch_create_cuda(0, &gpu));
  OK(cpattn_scratch_reserve(gpu, CPATTN_F16, DIM, DIM));
  if (argc == 2) OK(cpattn_scratch_set_sm_margin(gpu, (uint32_t)atoi(argv[1])));
  REFUSED(CPATTN_INVALID, "multiprocessors is 1048576, expected below the", cpattn_scratch_set_sm_margin(gpu, 1 << 20)); /* leaves it as it was */
  size_t before = available();
  attention();
  shared_rows();
  rows();
  TRUE(available() == before);
  refusals();
  OK(cpattn_scratch_destroy(cpu));
  OK(cpattn_scratch_destroy(gpu));
  CUDA(driver.stream_destroy(stream));
  for (int i = 0; i < 6; i++) array_free(queries[i]);
  for (int i = 0; i < 2; i++) array_free(keys_like[i]), array_free(gradients[i]);
  for (int i = 0; i < 5; i++) array_free(wide[i]);
  for (int i = 0; i < 4; i++) array_free(rows_like[i]);
  for (int i = 0; i < 3; i++) array_free(heads[i]);
  return finished("cuda_single_calls");
}
