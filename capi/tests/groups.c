/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * Documents over groups of ranks that change size: groups of one pass share no rank, each has room for its documents, and wrong
 * limits are refused by their names.
 */
#include <cpattn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "expect.h"

#define DOCUMENTS 6
#define WORLD 8
#define ROOM 1000

int main(void) {
  const int32_t cu[DOCUMENTS + 1] = {0, 100, 3900, 4000, 4900, 4901, 6500};
  const uint32_t sizes[] = {1, 2, 4};
  uint32_t pass[DOCUMENTS], first[DOCUMENTS], ranks[DOCUMENTS];
  cpattn_problem problem = CPATTN_PROBLEM_INIT;
  problem.cu_seqlens_q = cu, problem.documents = DOCUMENTS;
  problem.heads = 4, problem.kv_heads = 2, problem.head_dim = problem.value_dim = 64;
  cpattn_group_limits limits = CPATTN_GROUP_LIMITS_INIT;
  limits.sizes = sizes, limits.size_count = 3, limits.room = ROOM, limits.world = WORLD;
  cpattn_groups_info info = CPATTN_GROUPS_INFO_INIT;
  OK(cpattn_plan_groups(&problem, &limits, NULL, pass, first, ranks, &info));
  if (ranks[1] != 4 || info.passes < 1 || info.bound > info.makespan || !info.makespan) failures++;
  for (int a = 0; a < DOCUMENTS; a++) {
    long tokens = 0;
    if (pass[a] >= info.passes || first[a] % ranks[a] || first[a] + ranks[a] > WORLD) failures++;
    for (int b = 0; b < DOCUMENTS; b++) {
      int same = pass[a] == pass[b] && first[a] == first[b] && ranks[a] == ranks[b];
      int apart = pass[a] != pass[b] || first[a] + ranks[a] <= first[b] || first[b] + ranks[b] <= first[a];
      if (same) tokens += cu[b + 1] - cu[b];
      if (!same && !apart) failures++;
    }
    if (tokens > (long)ranks[a] * ROOM) failures++;
  }

  limits.passes = 1, limits.room = 800;
  REFUSED(CPATTN_INVALID, "limits.room", cpattn_plan_groups(&problem, &limits, NULL, pass, first, ranks, &info));
  limits.room = ROOM, limits.world = 4;
  REFUSED(CPATTN_INVALID, "limits.passes", cpattn_plan_groups(&problem, &limits, NULL, pass, first, ranks, &info));
  limits.world = 6;
  REFUSED(CPATTN_INVALID, "limits.world", cpattn_plan_groups(&problem, &limits, NULL, pass, first, ranks, &info));
  limits.world = WORLD, limits.passes = 0, limits.reserved = 1;
  REFUSED(CPATTN_INVALID, "limits.reserved", cpattn_plan_groups(&problem, &limits, NULL, pass, first, ranks, &info));
  limits.reserved = 0, limits.sizes = NULL;
  REFUSED(CPATTN_INVALID, "limits.sizes", cpattn_plan_groups(&problem, &limits, NULL, pass, first, ranks, &info));
  limits.sizes = sizes;
  REFUSED(CPATTN_INVALID, "machine", cpattn_plan_groups(&problem, &limits, "x", pass, first, ranks, &info));
  REFUSED(CPATTN_INVALID, "first_rank", cpattn_plan_groups(&problem, &limits, NULL, pass, NULL, ranks, &info));
  return failures != 0;
}
