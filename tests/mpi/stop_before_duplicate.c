/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* Stops one process while it makes a transport, which duplicates its communicator twice. Preloaded (LD_PRELOAD) it comes before
 * MPI's own MPI_Comm_idup; CPATTN_STOP is "RANK CALL": the rank that is stopped, and before which call, from 0. */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

int MPI_Comm_idup(MPI_Comm comm, MPI_Comm *duplicate, MPI_Request *request) {
  static int calls;
  const char *which = getenv("CPATTN_STOP");
  int rank, stopped, call;
  MPI_Comm_rank(comm, &rank);
  if (which && sscanf(which, "%d %d", &stopped, &call) == 2 && rank == stopped && calls++ == call) raise(SIGSTOP);
  return PMPI_Comm_idup(comm, duplicate, request);
}
