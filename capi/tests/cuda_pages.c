/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * k and v in pages on a device: what the CPU gives with the same table, in pages that adjoin and in pages of k and v by
 * turns, with another table in a later run of the same plan; a table in the wrong memory, or none, is refused.
 */
#include "cuda_test.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 32, PAGE = 5, PAGES = 20, EACH = 9, DOCUMENTS = 3, QUERIES = 6 };
static const int32_t queries[] = {0, 1, 4, QUERIES}, keys[] = {0, 37, 38, 80};
static array q, pool, k, v, o, lse;
static cpattn_plan *plan;
static cpattn_rank *rank, *cpu;

static int32_t forward(int device, const int32_t *table, size_t stride) {
  cpattn_forward_args f = CPATTN_FORWARD_ARGS_INIT;
#define OF(x) (device ? &x.device : &x.cpu)
  f.q = OF(q), f.k = OF(k), f.v = OF(v), f.o = OF(o), f.lse = OF(lse);
  cpattn_keys in_pages = CPATTN_KEYS_INIT;
  in_pages.kind = CPATTN_KEYS_PAGES, in_pages.block_table = table, in_pages.documents = DOCUMENTS;
  in_pages.pages_per_document = EACH, in_pages.page_size = PAGE, in_pages.page_stride = stride;
  f.keys = &in_pages;
  return cpattn_forward(device ? rank : cpu, plan, &f);
}

/* The rows of `pool` from `first` on, as many as `rows`. */
static array part(int64_t first, int64_t rows) {
  array a = pool;
  size_t skipped = (size_t)first * KV_HEADS * DIM * 2;
  a.shape[0] = rows;
  a.cpu.data = (char *)a.cpu.data + skipped, a.device.data = (char *)a.device.data + skipped;
  return a;
}

/* Pages of documents, in an order of their own; entries that nothing reads are -1. */
static void fill(int32_t *table, int pages, int step) {
  int next = 3;
  for (int d = 0; d < DOCUMENTS; d++)
    for (int i = 0; i < EACH; i++) {
      int used = i * PAGE < keys[d + 1] - keys[d];
      table[d * EACH + i] = used ? (next = (next + step) % pages) : -1;
    }
}

static void same(device_address at, const int32_t *table, size_t stride, double bound) {
  CUDA(driver.upload(at, table, DOCUMENTS * EACH * 4, NULL));
  CUDA(driver.stream_wait(NULL));
  OK(forward(1, (const int32_t *)(uintptr_t)at, stride));
  OK(forward(0, table, stride));
  AGREES(o, NULL, bound);
  AGREES(lse, NULL, 1e-5);
  OK(cpattn_rank_poll(rank));
}

int main(void) {
  if (!driver_open(0)) return printf("not run: %s\n", driver_missing), 0;
  const int32_t device[] = {0};
  int32_t table[DOCUMENTS * EACH];
  device_address at;
  cpattn_problem p = CPATTN_PROBLEM_INIT;
  cpattn_options options = CPATTN_OPTIONS_INIT;
  cpattn_transport *transport = NULL, *local = NULL;
  p.cu_seqlens_q = queries, p.cu_seqlens_k = keys, p.documents = DOCUMENTS;
  p.heads = HEADS, p.kv_heads = KV_HEADS, p.head_dim = DIM, p.dtype = CPATTN_F16;
  options.world = 1;
  OK(cpattn_plan_create(&p, &options, &plan));
  OK(cpattn_peer_group(1, device, 1000, &transport));
  OK(cpattn_rank_create(transport, NULL, &rank));
  OK(cpattn_local_group(1, 1000, &local));
  OK(cpattn_rank_create(local, NULL, &cpu));
  array_make(&q, 16, 3, QUERIES, HEADS, DIM);
  array_make(&pool, 16, 3, 2 * PAGES * PAGE, KV_HEADS, DIM);
  array_make(&o, 16, 3, QUERIES, HEADS, DIM);
  array_make(&lse, 32, 2, HEADS, QUERIES, 1);
  CUDA(driver.alloc(&at, sizeof table));

  k = part(0, PAGES * PAGE), k.cpu.shape = k.device.shape = k.shape;
  v = part(PAGES * PAGE, PAGES * PAGE), v.cpu.shape = v.device.shape = v.shape;
  fill(table, PAGES, 7);
  same(at, table, PAGE, 2e-3);
  fill(table, PAGES, 3);
  same(at, table, PAGE, 2e-3);
  /* Each page of k is followed by its page of v. */
  k = part(0, (2 * PAGES - 1) * PAGE), k.cpu.shape = k.device.shape = k.shape;
  v = part(PAGE, (2 * PAGES - 1) * PAGE), v.cpu.shape = v.device.shape = v.shape;
  same(at, table, 2 * PAGE, 2e-3);

  REFUSED(CPATTN_INVALID, "block_table", forward(1, table, PAGE));
  REFUSED(CPATTN_INVALID, "block_table", forward(1, NULL, PAGE));
  REFUSED(CPATTN_INVALID, "page_stride is 4, expected at least 5", forward(1, (const int32_t *)(uintptr_t)at, 4));
  size_t before = available();
  OK(forward(1, (const int32_t *)(uintptr_t)at, PAGE));
  CUDA(driver.stream_wait(NULL));
  TRUE(available() == before);

  OK(cpattn_rank_destroy(rank));
  OK(cpattn_rank_destroy(cpu));
  OK(cpattn_plan_destroy(plan));
  array_free(&q), array_free(&pool), array_free(&o), array_free(&lse);
  CUDA(driver.free(at));
  return finished("cuda_pages");
}
