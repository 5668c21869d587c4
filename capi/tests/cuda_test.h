/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What the programs for devices have in common: calls that must succeed or must be refused with a word, and arrays that
 * lie on the CPU or on a device and describe themselves.
 */
#ifndef CPATTN_CUDA_TEST_H
#define CPATTN_CUDA_TEST_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include "../../examples/c/driver.h"
#include "expect.h"

#define CUDA(call) \
  do { \
    if (!driver_ok(call, #call)) exit(3); \
  } while (0)
#define TRUE(condition) \
  do { \
    if (!(condition)) failures++, fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition); \
  } while (0)

/* Bytes of device memory that are free; of a real driver 0, since it takes memory for itself when it likes. */
static size_t available(void) {
  size_t bytes = 0, total = 0;
  if (!dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuEmuLastReport")) return 0;
  CUDA(driver.info(&bytes, &total));
  return bytes;
}

static double from_f16(uint16_t h) {
  int exponent = h >> 10 & 31, fraction = h & 1023;
  double x = exponent == 0 ? ldexp(fraction, -24) : exponent == 31 ? NAN : ldexp(fraction + 1024, exponent - 25);
  return h >> 15 ? -x : x;
}

/* A compact array of f16, f32 or f64, and the same on a device. The descriptions point into the struct: it stays where it
 * is. */
typedef struct {
  cpattn_tensor cpu, device;
  int64_t shape[3];
  size_t count, bytes;
  void *host, *back; /* what the CPU works on; what came back from the device */
  device_address at;
} array;

static uint32_t random_state = 1;

/* `bits` wide, filled with numbers between 0.25 and 1 of either sign. */
static void array_make(array *a, int bits, int ndim, int64_t x, int64_t y, int64_t z) {
  memset(a, 0, sizeof *a);
  a->shape[0] = x, a->shape[1] = y, a->shape[2] = z;
  a->count = (size_t)(ndim > 0 ? x : 1) * (size_t)(ndim > 1 ? y : 1) * (size_t)(ndim > 2 ? z : 1);
  a->bytes = a->count * (size_t)bits / 8;
  a->host = malloc(a->bytes + 1), a->back = malloc(a->bytes + 1);
  if (!a->host || !a->back) exit(3);
  for (size_t i = 0; i < a->count; i++) {
    random_state = random_state * 1664525u + 1013904223u;
    uint16_t half = (uint16_t)((random_state >> 16 & 0x83ff) | (13u + (random_state >> 15 & 1)) << 10);
    if (bits == 16) ((uint16_t *)a->host)[i] = half;
    if (bits == 32) ((float *)a->host)[i] = (float)from_f16(half);
    if (bits == 64) ((double *)a->host)[i] = from_f16(half);
  }
  a->cpu.data = a->host;
  a->cpu.device.device_type = CPATTN_DEVICE_CPU;
  a->cpu.ndim = ndim;
  a->cpu.dtype.code = 2, a->cpu.dtype.bits = (uint8_t)bits, a->cpu.dtype.lanes = 1;
  a->cpu.shape = a->shape;
  CUDA(driver.alloc(&a->at, a->bytes + 1));
  CUDA(driver.upload(a->at, a->host, a->bytes, NULL));
  CUDA(driver.stream_wait(NULL));
  a->device = a->cpu;
  a->device.data = (void *)(uintptr_t)a->at;
  a->device.device.device_type = CPATTN_DEVICE_CUDA;
}

static void array_free(array *a) {
  CUDA(driver.free(a->at));
  free(a->host), free(a->back);
}

static double element(const void *data, int bits, size_t i) {
  return bits == 16 ? from_f16(((const uint16_t *)data)[i]) : bits == 32 ? (double)((const float *)data)[i] : ((const double *)data)[i];
}

/* Waits for the stream and compares what the device has with what the CPU has: RMS of the difference over RMS. Infinities
 * must be equal. */
static void array_agrees(array *a, void *stream, double bound, const char *name, int line) {
  CUDA(driver.download(a->back, a->at, a->bytes, stream));
  CUDA(driver.stream_wait(stream));
  double error = 0, size = 0;
  int bits = a->cpu.dtype.bits;
  for (size_t i = 0; i < a->count; i++) {
    double x = element(a->host, bits, i), y = element(a->back, bits, i);
    if (isinf(x) && x == y) continue;
    error += (x - y) * (x - y), size += x * x;
  }
  double relative = sqrt(error / (size + 1e-30));
  if (!(relative <= bound)) failures++, fprintf(stderr, "line %d: %s differs by %g, expected %g at most\n", line, name, relative, bound);
}
#define AGREES(a, stream, bound) array_agrees(&(a), stream, bound, #a, __LINE__)

static int finished(const char *program) {
  if (failures) fprintf(stderr, "%s: %d failures\n", program, failures);
  else puts("ok");
  return failures != 0;
}

#endif
