/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* What the tests in C say of a call: its status and, of a refusal, a word of its message. */
#ifndef CPATTN_TEST_EXPECT_H
#define CPATTN_TEST_EXPECT_H

#include <stdio.h>
#include <string.h>
#include <cpattn.h>

static int failures;

static void expect(int32_t found, int32_t wanted, const char *word, const char *what, int line) {
  const char *text = wanted == CPATTN_OK ? "" : cpattn_last_error();
  if (wanted != CPATTN_OK) printf("refused: %s\n", text); /* library.rs reads these */
  if (found == wanted && (wanted == CPATTN_OK || strstr(text, word))) return;
  fprintf(stderr, "line %d: %s gave %s (%s), expected %s with \"%s\"\n", line, what, cpattn_status_name(found),
          cpattn_last_error(), cpattn_status_name(wanted), word);
  failures++;
}
#define REFUSED(status, word, call) expect(call, status, word, #call, __LINE__)
#define OK(call) expect(call, CPATTN_OK, "", #call, __LINE__)

#endif
