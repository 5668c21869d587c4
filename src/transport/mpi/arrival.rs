// SPDX-License-Identifier: MIT OR Apache-2.0
//! Finds which processes have not made their transport, when some are missing.
//!
//! A duplicate of the caller's communicator exists only once all processes have asked for it; until then the transport
//! has no communicator of its own. So a rank whose deadline passes sends a message on the caller's communicator, with a
//! separate tag, that it is there and how long it has waited, and listens for a while for the same message of others.
//! Ranks that send nothing have not come. A rank that comes later finds these messages at once. If all come in time
//! nothing is sent.
//!
//! Time in which a process is stopped does not count as waiting. If all ranks are there, the error names the one that
//! has waited for the shortest time: it came last, or it was stopped while the others waited.
//!
//! The messages contain how often the rank has made a transport of this communicator, so that those of an earlier
//! attempt are not mistaken for those of a later one. The number is kept on the communicator (`duplicates.rs`).

use std::{
    ffi::c_int,
    sync::{Mutex, PoisonError},
    time::Duration,
    vec::Vec,
};

use super::{
    duplicates::Duplicates,
    in_flight::MemoryInFlight,
    raw::{Comm, Refused},
    wait::{DeadlineState, SHORTEST_GRACE},
};
use crate::error::{Cause, Error, Result};
use crate::transport::{
    Label,
    fault::{grace, millis},
};

/// The operation, in errors.
const MAKING: &str = "making the transport";

/// The tag on the caller's communicator: below the smallest limit on tags that MPI allows, and unlikely to be the
/// caller's.
const TAG: c_int = 32_611;

/// Rank, attempt, and the two times of [`Attendance`].
type Words = [u64; 4];

/// For how long a rank has been there, in milliseconds.
#[derive(Clone, Copy)]
struct Attendance {
    /// How long the rank has waited, without the time in which its process did not run.
    waited: u64,
    /// How long others could have met the rank: the time since its process last resumed, or `waited` less the time in
    /// which the process did not run, whichever is longer. Equal to `waited` if the process always ran.
    met: u64,
}

/// Duplicates `comm` twice, unless not all processes ask for it in time.
pub(super) fn duplicates(comm: Comm, rank: usize, world: usize, deadline: Duration) -> Result<[Comm; 2]> {
    // SAFETY: no other place calls this, so the type is always the same; the caller's communicator lives while a
    // transport is made of it.
    let attribute = unsafe { comm.attribute(|| Mutex::new(Duplicates::default())) }?;
    let mut duplicates = attribute.lock().unwrap_or_else(PoisonError::into_inner);
    let attempt = duplicates.new_attempt();
    let mut state = DeadlineState::new(deadline);
    let (mut went_on, mut stopped) = (state.since(), Duration::ZERO);
    let mut roll = Presence { comm, rank, world, attempt, there: std::vec![None; world] };
    loop {
        // Checked before the duplicates: they are useless if other ranks have given up.
        let given_up = roll.receive()?;
        let gap = state.runs();
        if !gap.is_zero() {
            went_on = state.seen();
            stopped += gap;
        }
        if !given_up && let Some(made) = duplicates.poll(comm)? {
            return Ok(made);
        }
        if given_up || state.is_over() {
            let since = |start| state.seen().duration_since(start);
            let waited = since(state.since());
            let met = waited.saturating_sub(stopped).max(since(went_on).min(waited));
            return Err(roll.find_missing(Attendance { waited: millis(waited), met: millis(met) }, deadline)?);
        }
        state.sleep();
    }
}

/// The ranks whose messages have arrived.
struct Presence {
    comm: Comm,
    rank: usize,
    world: usize,
    attempt: u64,
    /// By rank: how long it has been there, by its last message.
    there: Vec<Option<Attendance>>,
}

impl Presence {
    /// Receives messages, and returns whether another rank has given up.
    fn receive(&mut self) -> Result<bool, Refused> {
        while self.comm.has_arrived(TAG)? {
            let mut message = MemoryInFlight::new(Box::<Words>::default());
            message.receive(self.comm, None, TAG)?;
            let mut state = DeadlineState::new(Duration::from_secs(1));
            let [rank, attempt, waited, met] = loop {
                if let Some(&mut words) = message.poll()? {
                    break words;
                }
                // The probe found a message, but another thread of the caller's may have received it since.
                state.runs();
                if state.is_over() {
                    return Ok(false);
                }
            };
            if attempt >= self.attempt && (rank as usize) < self.world {
                self.there[rank as usize] = Some(Attendance { waited, met });
            }
        }
        Ok(self.there.iter().any(Option::is_some))
    }

    /// Sends that this rank is there, receives the same from others, and names a rank that is missing, or else the rank
    /// that could be met for the shortest time.
    fn find_missing(mut self, there: Attendance, deadline: Duration) -> Result<Error> {
        // A process that has ended must not end this one.
        let _errors = self.comm.return_errors_for_now()?;
        self.there[self.rank] = Some(there);
        let words = [self.rank as u64, self.attempt, there.waited, there.met];
        let mut sends = Vec::with_capacity(self.world);
        for peer in (0..self.world).filter(|&peer| peer != self.rank) {
            let mut message = MemoryInFlight::new(Box::new(words));
            // An error is ignored: that rank cannot be reached.
            let _ = message.send(self.comm, size_of::<Words>(), peer, TAG);
            sends.push(message);
        }
        // Long enough for a waiting rank to get a core, and for ranks that came a little later to get these messages.
        let mut state = DeadlineState::new(grace(deadline, SHORTEST_GRACE));
        while !state.is_over() && self.there.iter().any(Option::is_none) {
            let _ = self.receive();
            std::thread::sleep(Duration::from_millis(1));
            state.runs();
        }
        sends.iter_mut().for_each(|message| _ = message.is_done());
        let mut absent = (0..self.world).filter(|&peer| self.there[peer].is_none());
        let heard = || self.there.iter().enumerate().filter_map(|(peer, there)| Some((peer, (*there)?)));
        let longest = heard().map(|(_, there)| there.waited).max().unwrap_or(there.waited);
        let (peer, cause) = match absent.next() {
            Some(first) => (first, Cause::Absent { ms: longest, others: absent.count() }),
            None => {
                let (peer, there) = heard().min_by_key(|(_, there)| there.met).unwrap_or((self.rank, there));
                // Whether it came after others had given up. A rank that was stopped, or came long before, was there in
                // time.
                let late = there.met == there.waited && there.waited < millis(deadline / 2);
                let cause = if late {
                    Cause::Absent { ms: longest, others: 0 }
                } else {
                    Cause::Deadline { ms: longest, bytes: 0 }
                };
                (peer, cause)
            }
        };
        Ok(Label::new(MAKING, 0).error(self.rank, peer, cause))
    }
}
