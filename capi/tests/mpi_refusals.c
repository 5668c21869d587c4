/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* cpattn_mpi_group: what it refuses, a transport that becomes a rank, and one that is destroyed unused. */
#include <cpattn.h>
#include <mpi.h>

#include "expect.h"

int main(int argc, char **argv) {
  MPI_Comm comm = MPI_COMM_WORLD;
  cpattn_transport *transport = NULL;
  cpattn_rank *rank = NULL;
  int level;
  if (MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level) != MPI_SUCCESS) return 1;
  REFUSED(CPATTN_INVALID, "comm is NULL, expected the address of an MPI_Comm", cpattn_mpi_group(NULL, 1000, &transport));
  REFUSED(CPATTN_INVALID, "deadline_ms is 0, expected at least 1", cpattn_mpi_group(&comm, 0, &transport));
  REFUSED(CPATTN_INVALID, "transport is NULL", cpattn_mpi_group(&comm, 1000, NULL));
  OK(cpattn_mpi_group(&comm, 60000, &transport));
  OK(cpattn_rank_create(transport, NULL, &rank));
  OK(cpattn_rank_poll(rank));
  OK(cpattn_rank_destroy(rank));
  OK(cpattn_mpi_group(&comm, 60000, &transport));
  OK(cpattn_transport_destroy(transport));
  MPI_Finalize();
  return failures != 0;
}
