// SPDX-License-Identifier: MIT OR Apache-2.0
//! The duplicates of a caller's communicator: two for each transport that is made of it, one after the other.
//!
//! MPI matches duplicates by their order: the third that one process begins is the third of all others too. A process
//! that gives up cannot take back one that it has begun. So the order is kept on the communicator: attempt `n` to make
//! a transport uses duplicates `2 n` and `2 n + 1` on every process, and a process that gave up before it began all of
//! its own begins them in its next attempt.
//!
//! At most one is under way at a time. MPI allows more, but Open MPI (4.1) then waits for ever now and then: a
//! duplicate takes several reductions over the communicator, and those of two duplicates of one communicator may be
//! begun in a different order on different processes. A C program with four at once hangs in every run. Open MPI gives
//! numbers to new communicators of one process in turn (`ompi_comm_nextcid_nb`), so a duplicate that cannot complete,
//! because a process does not come, holds up others that the program makes; the module `mpi` says what callers must not
//! do then.

use super::{
    in_flight::MemoryInFlight,
    raw::{Comm, Refused},
};

/// The duplicates of one communicator, on this process.
#[derive(Default)]
pub(super) struct Duplicates {
    /// How many attempts there were.
    attempts: u64,
    /// How many duplicates are complete, of all attempts.
    complete: u64,
    under_way: Option<MemoryInFlight<Comm>>,
    /// The first of this attempt, while the second is made.
    first: Option<Comm>,
}

impl Duplicates {
    /// Begins the next attempt, and returns its number, from 0. Duplicates of earlier attempts are neither used nor
    /// freed, since other processes may still send on them.
    pub(super) fn new_attempt(&mut self) -> u64 {
        self.first = None;
        self.attempts += 1;
        self.attempts - 1
    }

    /// Continues to make the duplicates. Returns those of this attempt once both are complete.
    pub(super) fn poll(&mut self, comm: Comm) -> Result<Option<[Comm; 2]>, Refused> {
        loop {
            let Some(under_way) = &mut self.under_way else {
                self.under_way = Some(MemoryInFlight::duplicate(comm)?);
                continue;
            };
            let Some(&mut made) = under_way.poll()? else { return Ok(None) };
            self.under_way = None;
            self.complete += 1;
            match (2 * self.attempts - self.complete, self.first.take()) {
                (0, Some(first)) => return Ok(Some([first, made])),
                (1, _) => self.first = Some(made),
                // A duplicate of an attempt that was given up.
                _ => {}
            }
        }
    }
}
