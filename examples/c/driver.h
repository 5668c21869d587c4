/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The few functions of the CUDA driver that a program needs to own device memory and a stream, found at run time: no
 * toolkit is needed to compile it, and no driver to start it. A real program would use the CUDA runtime or its framework.
 */
#ifndef CPATTN_EXAMPLE_DRIVER_H
#define CPATTN_EXAMPLE_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* CUdeviceptr is a 64-bit number; handles are pointers. */
typedef unsigned long long device_address;

static struct {
  int (*init)(unsigned);
  int (*retain)(void **context, int device);
  int (*set_current)(void *context);
  int (*alloc)(device_address *, size_t);
  int (*free)(device_address);
  int (*info)(size_t *available, size_t *total);
  int (*upload)(device_address, const void *, size_t, void *stream);
  int (*download)(void *, device_address, size_t, void *stream);
  int (*stream_create)(void **stream, unsigned flags);
  int (*stream_destroy)(void *stream);
  int (*stream_wait)(void *stream);
} driver;

/* Why driver_open gave 0. */
static const char *driver_missing = "";

/* Loads the driver and makes the primary context of a device current on this thread, as the CUDA runtime would. 0 when
 * there is no driver or no such device. */
static int driver_open(int device) {
  static const char *const names[] = {"cuInit", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemAlloc_v2",
                                      "cuMemFree_v2", "cuMemGetInfo_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2",
                                      "cuStreamCreate", "cuStreamDestroy_v2", "cuStreamSynchronize"};
  void *context, *found[sizeof names / sizeof names[0]];
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  driver_missing = "no CUDA driver (libcuda.so.1)";
  if (!library) return 0;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (!(found[i] = dlsym(library, names[i]))) return 0;
  /* ISO C has no cast from object to function pointers; POSIX makes their bytes the same. */
  memcpy(&driver, found, sizeof driver);
  driver_missing = "no such CUDA device";
  return driver.init(0) == 0 && driver.retain(&context, device) == 0 && driver.set_current(context) == 0;
}

/* Whether a call of the driver succeeded. */
static int driver_ok(int code, const char *what) {
  if (code) fprintf(stderr, "%s: CUDA error %d\n", what, code);
  return code == 0;
}

#endif
