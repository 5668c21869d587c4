/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What a rank or a scratch on a device refuses, and what it says.
 *
 *   cuda_refusals                       a device of compute capability 8.0 or later (two of them, for some)
 *   cuda_refusals without STATUS WORD   a library without CUDA, no driver, or a device too old: what it then says
 */
#define _POSIX_C_SOURCE 200112L
#include "cuda_test.h"

enum { TOKENS = 20, HEADS = 2, DIM = 32 };
static const int32_t documents[] = {0, 7, TOKENS};
static array q, k, v, o, lse;

static cpattn_problem problem(int32_t dtype, uint32_t dim) {
  cpattn_problem p = CPATTN_PROBLEM_INIT;
  p.cu_seqlens_q = documents;
  p.documents = 2;
  p.heads = HEADS;
  p.head_dim = dim;
  p.dtype = dtype;
  return p;
}

static cpattn_plan *plan_of(cpattn_problem p, int32_t reproducible) {
  cpattn_options options = CPATTN_OPTIONS_INIT;
  cpattn_plan *plan = NULL;
  options.reproducible = reproducible;
  OK(cpattn_plan_create(&p, &options, &plan));
  return plan;
}

static cpattn_tensor t[5];
static cpattn_forward_args args(void) {
  cpattn_forward_args a = CPATTN_FORWARD_ARGS_INIT;
  t[0] = q.device, t[1] = k.device, t[2] = v.device, t[3] = o.device, t[4] = lse.device;
  a.q = &t[0], a.k = &t[1], a.v = &t[2], a.o = &t[3], a.lse = &t[4];
  return a;
}

/* Nothing of a device is there, and each way to ask for one says so. The CPU goes on. */
static int without(int32_t status, const char *word) {
  const int32_t devices[] = {0};
  cpattn_transport *transport = NULL;
  cpattn_scratch *scratch = NULL;
  cpattn_rank *rank = NULL;
  REFUSED(status, word, cpattn_peer_group(1, devices, 1000, &transport));
  REFUSED(status, word, cpattn_scratch_create_cuda(0, &scratch));
  OK(cpattn_scratch_create(1, &scratch));
  OK(cpattn_scratch_reserve(scratch, CPATTN_F16, 8, 8));
  OK(cpattn_scratch_destroy(scratch));
  OK(cpattn_local_group(1, 1000, &transport));
  OK(cpattn_rank_create(transport, NULL, &rank));
  OK(cpattn_rank_destroy(rank));
  return finished("cuda_refusals without");
}

static void places(void) {
  const int32_t devices[] = {0}, none[] = {99}, negative[] = {-1}, third[] = {0, 0, 7};
  cpattn_transport *transport = NULL, *local = NULL, *transports[3];
  cpattn_scratch *scratch = NULL;
  cpattn_rank *rank = NULL;
  REFUSED(CPATTN_INVALID, "world is 0", cpattn_peer_group(0, devices, 1000, &transport));
  REFUSED(CPATTN_INVALID, "deadline_ms is 0", cpattn_peer_group(1, devices, 0, &transport));
  REFUSED(CPATTN_INVALID, "devices is NULL", cpattn_peer_group(1, NULL, 1000, &transport));
  REFUSED(CPATTN_INVALID, "transports is NULL", cpattn_peer_group(1, devices, 1000, NULL));
  REFUSED(CPATTN_INVALID, "devices[0] is 99, expected a number below", cpattn_peer_group(1, none, 1000, &transport));
  REFUSED(CPATTN_INVALID, "devices[0] is -1", cpattn_peer_group(1, negative, 1000, &transport));
  REFUSED(CPATTN_INVALID, "devices[2] is 7, expected a number below", cpattn_peer_group(3, third, 1000, transports));
  REFUSED(CPATTN_INVALID, "device_id is 99", cpattn_scratch_create_cuda(99, &scratch));
  REFUSED(CPATTN_INVALID, "scratch is NULL", cpattn_scratch_create_cuda(0, NULL));
  REFUSED(CPATTN_INVALID, "transports is NULL", cpattn_peer_group(1, devices, 1000, NULL));

  OK(cpattn_peer_group(1, devices, 1000, &transport));
  OK(cpattn_local_group(1, 1000, &local));
  cpattn_rank_options options = CPATTN_RANK_OPTIONS_INIT;
  REFUSED(CPATTN_INVALID, "options.device is the CPU, expected CUDA device 0", cpattn_rank_create(transport, &options, &rank));
  options.device_id = 1;
  REFUSED(CPATTN_INVALID, "options.device_id is 1, expected 0 on the CPU", cpattn_rank_create(local, &options, &rank));
  options.device_type = CPATTN_DEVICE_CUDA;
  REFUSED(CPATTN_INVALID, "options.device is CUDA device 1, expected CUDA device 0", cpattn_rank_create(transport, &options, &rank));
  options.device_id = 0;
  REFUSED(CPATTN_INVALID, "options.device is CUDA device 0, expected the CPU", cpattn_rank_create(local, &options, &rank));
  options.device_type = 10; /* ROCm */
  REFUSED(CPATTN_UNSUPPORTED, "options.device type 10", cpattn_rank_create(transport, &options, &rank));
  options.device_type = CPATTN_DEVICE_CUDA;
  options.workers = 2;
  /* In builds without threads too: to build another would not help. */
  REFUSED(CPATTN_INVALID, "options.workers is 2, expected 1 on a device", cpattn_rank_create(transport, &options, &rank));
  options.workers = 1;
  options.sm_margin = 1 << 20; /* of all devices there will be */
  REFUSED(CPATTN_INVALID, "options.sm_margin is 1048576, expected below the", cpattn_rank_create(transport, &options, &rank));
  options.sm_margin = 1;
  options.isa = CPATTN_ISA_PORTABLE;
  REFUSED(CPATTN_UNSUPPORTED, "options.isa = CPATTN_ISA_PORTABLE on CUDA device 0", cpattn_rank_create(transport, &options, &rank));
  options.isa = CPATTN_ISA_AUTO;
  OK(cpattn_rank_create(transport, &options, &rank)); /* still the caller's after all these */
  OK(cpattn_scratch_create_cuda(0, &scratch));
  OK(cpattn_scratch_set_isa(scratch, CPATTN_ISA_AUTO));
  REFUSED(CPATTN_UNSUPPORTED, "instruction set portable on CUDA device 0", cpattn_scratch_set_isa(scratch, CPATTN_ISA_PORTABLE));
  OK(cpattn_scratch_destroy(scratch));
  OK(cpattn_rank_destroy(rank));
  OK(cpattn_transport_destroy(local));
}

static void tensors(int devices) {
  const int32_t device[] = {0};
  cpattn_transport *transport = NULL, *local = NULL;
  cpattn_rank *rank = NULL, *cpu = NULL;
  cpattn_plan *plan = plan_of(problem(CPATTN_F16, DIM), 0);
  OK(cpattn_peer_group(1, device, 1000, &transport));
  OK(cpattn_rank_create(transport, NULL, &rank));
  OK(cpattn_local_group(1, 1000, &local));
  OK(cpattn_rank_create(local, NULL, &cpu));

  /* What devices do not do. */
  cpattn_plan *plans[] = {plan_of(problem(CPATTN_F32, DIM), 0), plan_of(problem(CPATTN_F64, DIM), 0),
                          plan_of(problem(CPATTN_F16, 12), 0), plan_of(problem(CPATTN_F16, 520), 0), plan_of(problem(CPATTN_F16, DIM), 1)};
  const char *words[] = {"dtype f32", "dtype f64", "head_dim 12", "value_dim 520", "reproducible on a device"};
  for (int i = 0; i < 5; i++) {
    REFUSED(CPATTN_UNSUPPORTED, words[i], cpattn_rank_prepare(rank, plans[i], CPATTN_FORWARD, NULL));
    cpattn_forward_args a = args();
    REFUSED(CPATTN_UNSUPPORTED, words[i], cpattn_forward(rank, plans[i], &a));
    OK(cpattn_plan_destroy(plans[i]));
  }

  /* Every refusal leaves the rank as it was: it runs at the end. */
  cpattn_forward_args a = args();
  void *other = NULL;
#define CHANGED(change, status, word) a = args(), change, REFUSED(status, word, cpattn_forward(rank, plan, &a))
  CHANGED(t[0] = q.cpu, CPATTN_INVALID, "q.device is type 1, the CPU, expected CUDA device 0");
  CHANGED(t[1].device.device_type = 3, CPATTN_INVALID, "k.device is type 3, the CPU, expected CUDA device 0");
  CHANGED(t[1].device.device_type = 13, CPATTN_UNSUPPORTED, "k.device type 13 (managed memory)");
  CHANGED(t[1].device.device_type = 10, CPATTN_UNSUPPORTED, "k.device type 10 id 0");
  CHANGED(t[1].device.device_id = 1, CPATTN_INVALID, "k.device is type 2, CUDA device 1, expected CUDA device 0");
  CHANGED(t[1].data = k.host, CPATTN_INVALID, "k.ptr is 0x");
  CHANGED(t[2].byte_offset = 2, CPATTN_INVALID, "v.ptr is 0x");
  CHANGED(t[2].byte_offset = 2, CPATTN_INVALID, "expected aligned to 16 bytes");
  CHANGED(t[2].byte_offset = 1, CPATTN_INVALID, "v.byte_offset is 1");
  CHANGED(t[3].data = t[0].data, CPATTN_INVALID, "o is memory that overlaps q");
  CHANGED(t[4].dtype.bits = 64, CPATTN_INVALID, "lse.dtype is f64, expected f32");
  CHANGED(t[4].data = NULL, CPATTN_INVALID, "lse.data is NULL");
  int64_t odd[] = {HEADS * DIM + 4, DIM, 1};
  CHANGED(t[0].strides = odd, CPATTN_INVALID, "q.token_stride is 136 bytes, expected a multiple of 16");
  int64_t far[] = {(int64_t)1 << 31, DIM, 1};
  CHANGED(t[0].strides = far, CPATTN_UNSUPPORTED, "q.token_stride of 4294967296 bytes");
  if (devices > 1) {
    array there;
    TRUE(driver_open(1));
    array_make(&there, 16, 3, TOKENS, HEADS, DIM);
    CUDA(driver.stream_create(&other, 1));
    CHANGED(t[1].data = there.device.data, CPATTN_INVALID, "k.ptr is memory of device 1, expected memory of device 0");
    CHANGED(a.stream = other, CPATTN_INVALID, "of another context, expected one of device 0");
    REFUSED(CPATTN_INVALID, "workspace.ptr is memory of device 1", cpattn_rank_lend_workspace(rank, there.device.data, 256));
    array_free(&there);
    CUDA(driver.stream_destroy(other));
    TRUE(driver_open(0));
  }

  int (*begin)(void *, unsigned) = NULL, (*end)(void *, void **) = NULL;
  void *library = dlopen("libcuda.so.1", RTLD_NOW), *graph = NULL, *found[2];
  found[0] = dlsym(library, "cuStreamBeginCapture_v2"), found[1] = dlsym(library, "cuStreamEndCapture");
  memcpy(&begin, found, sizeof begin), memcpy(&end, found + 1, sizeof end);
  CUDA(driver.stream_create(&other, 1));
  CUDA(begin(other, 2 /* relaxed */));
  /* A run can be captured once its plan is prepared; this one is, and the other is not. */
  cpattn_problem with_cap = problem(CPATTN_F16, DIM);
  with_cap.softcap = 3;
  cpattn_plan *capped = plan_of(with_cap, 0);
  a = args(), a.stream = other;
  REFUSED(CPATTN_UNSUPPORTED, "a stream that is being captured", cpattn_forward(rank, capped, &a));
  REFUSED(CPATTN_UNSUPPORTED, "call prepare before the capture begins", cpattn_forward(rank, capped, &a));
  OK(cpattn_plan_destroy(capped));
  OK(cpattn_forward(rank, plan, &a));
  CUDA(end(other, &graph));
  CUDA(driver.stream_destroy(other));

  /* The other way round: memory of a device, or a stream, for a rank of the CPU. Page-locked memory is the CPU's. */
  a = args();
  REFUSED(CPATTN_INVALID, "q.device is type 2, CUDA device 0, expected the CPU", cpattn_forward(cpu, plan, &a));
  t[0] = q.cpu, t[1] = k.cpu, t[2] = v.cpu, t[3] = o.cpu, t[4] = lse.cpu;
  t[1].device.device_type = 3;
  OK(cpattn_forward(cpu, plan, &a));
  t[1].device.device_type = 13;
  REFUSED(CPATTN_UNSUPPORTED, "managed memory", cpattn_forward(cpu, plan, &a));
  t[1] = k.cpu;
  CUDA(driver.stream_create(&other, 1));
  a.stream = other;
  REFUSED(CPATTN_UNSUPPORTED, "the CPU has no streams", cpattn_forward(cpu, plan, &a));
  CUDA(driver.stream_destroy(other));

  /* Workspace. */
  uint64_t bytes = 0;
  device_address memory = 0;
  OK(cpattn_plan_workspace(plan, 0, CPATTN_BACKWARD, &bytes));
  CUDA(driver.alloc(&memory, bytes + 256));
  REFUSED(CPATTN_INVALID, "workspace.ptr is 0x", cpattn_rank_lend_workspace(rank, (void *)((uintptr_t)q.host & ~(uintptr_t)255), 256));
  REFUSED(CPATTN_INVALID, "a multiple of 256 bytes", cpattn_rank_lend_workspace(rank, (void *)(uintptr_t)(memory + 16), bytes));
  OK(cpattn_rank_lend_workspace(rank, NULL, 0)); /* what cudaMalloc gives for 0 bytes */
  REFUSED(CPATTN_INVALID, "workspace is NULL", cpattn_rank_lend_workspace(rank, NULL, 256));
  OK(cpattn_rank_lend_workspace(rank, (void *)(uintptr_t)memory, (size_t)bytes - 1));
  REFUSED(CPATTN_INVALID, "workspace is", cpattn_rank_prepare(rank, plan, CPATTN_BACKWARD, NULL));
  OK(cpattn_rank_lend_workspace(rank, (void *)(uintptr_t)memory, (size_t)bytes));
  OK(cpattn_rank_prepare(rank, plan, CPATTN_BACKWARD, NULL));

  a = args(); /* on NULL, the legacy default stream */
  OK(cpattn_forward(rank, plan, &a));
  AGREES(o, NULL, 2e-3);
  AGREES(lse, NULL, 1e-5);
  OK(cpattn_rank_poll(rank));
  OK(cpattn_rank_destroy(rank));
  OK(cpattn_rank_destroy(cpu));
  OK(cpattn_plan_destroy(plan));
  CUDA(driver.free(memory));
}

int main(int argc, char **argv) {
  if (argc == 4 && !strcmp(argv[1], "without")) return without(atoi(argv[2]), argv[3]);
  if (!driver_open(0)) return printf("not run: %s\n", driver_missing), 0;
  array *arrays[] = {&q, &k, &v, &o};
  for (int i = 0; i < 4; i++) array_make(arrays[i], 16, 3, TOKENS, HEADS, DIM);
  array_make(&lse, 32, 2, HEADS, TOKENS, 1);
  int devices = driver_open(1) ? 2 : 1;
  TRUE(driver_open(0));
  size_t before = available();
  places();
  tensors(devices);
  TRUE(available() == before); /* nothing was left behind */
  for (int i = 0; i < 4; i++) array_free(arrays[i]);
  array_free(&lse);
  return finished(devices > 1 ? "cuda_refusals" : "cuda_refusals (one device)");
}
