// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which processes have come to make their transport, where some have not.
//!
//! A duplicate of the caller's communicator is there once all processes have asked for it; until then nothing of the
//! transport's own can carry a word. So a rank whose deadline passes says on the caller's communicator that it is there, and
//! for how long it has waited, under a tag of its own, and hears for a while which others say the same. Those that say
//! nothing have not come. A rank that comes later finds these words at once. Where all come in time nothing is sent.
//!
//! The words carry how often the rank has made a transport of this communicator, so that those of an earlier attempt are not
//! taken for those of a later one. The number is kept on the communicator, as an attribute.

use std::{
    ffi::c_int,
    time::{Duration, Instant},
    vec::Vec,
};

use super::{
    raw::{Comm, Refused, Request},
    wait::Patience,
};
use crate::error::{Cause, Error, Result};

/// The name of what is under way, in errors.
const MAKING: &str = "making the transport";

/// On the caller's communicator: below the least upper bound of tags that MPI promises, and unlikely to be the caller's.
const TAG: c_int = 32_611;

/// Rank, attempt, and the milliseconds for which it has waited.
type Words = [u64; 3];

/// Duplicates `comm` twice, unless not all processes ask for it in time. Both are begun at once, so that every attempt
/// begins as many on each rank, whatever becomes of it: MPI matches them by their order.
pub(super) fn duplicates(comm: Comm, rank: usize, world: usize, deadline: Duration) -> Result<[Comm; 2]> {
    let attempt = comm.count_up()?;
    let (mut first, mut second) = (comm.duplicate()?, comm.duplicate()?);
    let mut patience = Patience::new(deadline);
    let began = Instant::now();
    let mut roll = Roll { comm, rank, world, attempt, waited: std::vec![None; world] };
    loop {
        // Before what is complete: with ranks that have given up, a duplicate is of no use.
        if roll.hear()? || patience.is_over() {
            return Err(roll.call(began, deadline)?);
        }
        if let (Some(first), Some(second)) = (first.poll()?, second.poll()?) {
            return Ok([first, second]);
        }
        patience.sleep();
    }
}

/// What this rank has heard of the others.
struct Roll {
    comm: Comm,
    rank: usize,
    world: usize,
    attempt: u64,
    /// By rank: the milliseconds for which it said that it has waited.
    waited: Vec<Option<u64>>,
}

impl Roll {
    /// Takes what has arrived; whether another rank has given up.
    fn hear(&mut self) -> Result<bool, Refused> {
        while self.comm.has_arrived(TAG)? {
            let words = Box::into_raw(Box::new(Words::default()));
            // SAFETY: the words are leaked where the request does not complete, and nothing else touches them.
            let mut request = unsafe { self.comm.receive(words.cast(), size_of::<Words>(), None, TAG) }?;
            let began = Instant::now();
            while !request.test("MPI_Irecv")? {
                // It has arrived, says MPI; another thread of the caller's may have taken it all the same.
                if began.elapsed() > Duration::from_secs(1) {
                    return Ok(false);
                }
            }
            // SAFETY: made by Box above, and MPI is done with it.
            let [rank, attempt, waited] = *unsafe { Box::from_raw(words) };
            if attempt >= self.attempt && (rank as usize) < self.world {
                self.waited[rank as usize] = Some(waited);
            }
        }
        Ok(self.waited.iter().any(Option::is_some))
    }

    /// Says that this rank is there, hears who else is, and names one that is not, or that came last.
    fn call(mut self, began: Instant, deadline: Duration) -> Result<Error> {
        // A process that is gone must not end this one.
        let _errors = self.comm.return_errors_for_now()?;
        let ms = |time: Duration| time.as_millis().try_into().unwrap_or(u64::MAX);
        let waited = ms(began.elapsed());
        self.waited[self.rank] = Some(waited);
        let words = Box::into_raw(Box::new([self.rank as u64, self.attempt, waited]));
        let mut sends: Vec<Request> = Vec::with_capacity(self.world);
        for peer in (0..self.world).filter(|&peer| peer != self.rank) {
            // SAFETY: the words live until the requests are complete, or for ever. A rank that cannot be reached is not told.
            sends.extend(unsafe { self.comm.send(words.cast_const().cast(), size_of::<Words>(), peer, TAG) });
        }
        // As long as a rank that waits may take to get a core, and those that came a little later to hear of it.
        let grace = (deadline / 2).clamp(Duration::from_millis(250), Duration::from_secs(5));
        let called = Instant::now();
        while called.elapsed() < grace && self.waited.iter().any(Option::is_none) {
            let _ = self.hear();
            std::thread::sleep(Duration::from_millis(1));
        }
        sends.retain_mut(|send| !matches!(send.test("MPI_Isend"), Ok(true)));
        if sends.is_empty() {
            // SAFETY: made by Box above, and MPI is done with it.
            drop(unsafe { Box::from_raw(words) });
        }
        let absent = || self.waited.iter().enumerate().filter(|at| at.1.is_none()).map(|at| at.0);
        let last = || self.waited.iter().enumerate().min_by_key(|at| at.1).map_or(self.rank, |at| at.0);
        let longest = self.waited.iter().flatten().max().copied().unwrap_or(waited);
        let others = absent().count().saturating_sub(1);
        let cause = Cause::Absent { ms: longest, others };
        Ok(Error::Peer {
            rank: self.rank,
            operation: MAKING,
            step: 0,
            peer: absent().next().unwrap_or_else(last),
            cause,
        })
    }
}
