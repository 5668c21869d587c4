/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Just enough of the safetensors format for the examples: eight bytes with the header's length (little-endian), the
 * header as JSON, then the bytes that each entry's data_offsets point into. Little-endian machines only.
 */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  char *file;
  const char *json;
  const char *data;
} safetensors;

static int safetensors_open(safetensors *s, const char *path) {
  FILE *f = fopen(path, "rb");
  if (!f) return 0;
  fseek(f, 0, SEEK_END);
  long size = ftell(f);
  rewind(f);
  s->file = size >= 8 ? (char *)malloc((size_t)size + 1) : NULL;
  int ok = s->file && fread(s->file, 1, (size_t)size, f) == (size_t)size;
  fclose(f);
  if (!ok) return 0;
  s->file[size] = 0;
  uint64_t header;
  memcpy(&header, s->file, 8);
  if (header > (uint64_t)size - 8) return 0;
  s->json = s->file + 8;
  s->data = s->json + header;
  return 1;
}

/* The bytes of an entry, or NULL; *bytes how many. The header has no other string that looks like a key. */
static const void *safetensors_find(const safetensors *s, const char *name, size_t *bytes) {
  char key[64];
  snprintf(key, sizeof key, "\"%s\":{", name);
  const char *at = strstr(s->json, key);
  if (!at || at >= s->data || !(at = strstr(at, "\"data_offsets\":["))) return NULL;
  char *end;
  unsigned long long begin = strtoull(at + strlen("\"data_offsets\":["), &end, 10);
  *bytes = (size_t)(strtoull(end + 1, NULL, 10) - begin);
  return s->data + begin;
}

#endif
