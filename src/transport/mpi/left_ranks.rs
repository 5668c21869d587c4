// SPDX-License-Identifier: MIT OR Apache-2.0
//! How a rank leaves: it notifies all others, and frees its communicators once all have left.
//!
//! If a communicator is freed while messages for it are in flight, MPI may reuse its number for a new one, which would
//! then receive them. So a rank that leaves before the others keeps its two communicators, with the receive for
//! notices, and checks again whenever the process makes or drops a transport. Otherwise they stay until MPI is
//! finalised.

use std::{
    sync::{Mutex, PoisonError},
    vec::Vec,
};

use super::{
    in_flight::poll_until,
    notices::{Notice, Notices},
    raw::Comm,
};

/// The communicators and notices of a rank that has left.
struct LeftRank {
    rank: usize,
    notices: Notices,
    comms: [Comm; 2],
}

/// The state of its communicators.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Departures {
    /// Not all others have left.
    Waiting,
    Freed,
    /// The group failed after this rank had left: memory that MPI holds is never freed.
    Abandoned,
}

impl LeftRank {
    fn poll(&mut self) -> Departures {
        if !matches!(self.notices.listen(), Ok(None)) {
            return Departures::Abandoned;
        }
        if !(self.notices.all_left(self.rank) && self.notices.all_sent()) {
            return Departures::Waiting;
        }
        if !self.notices.close() {
            return Departures::Abandoned;
        }
        self.comms.into_iter().for_each(Comm::free);
        Departures::Freed
    }
}

static LEFT_RANKS: Mutex<Vec<LeftRank>> = Mutex::new(Vec::new());

/// Notifies all others that this rank leaves, and waits a moment for them to leave too.
pub(super) fn leave(rank: usize, world: usize, notices: Notices, comms: [Comm; 2]) {
    for peer in (0..world).filter(|&peer| peer != rank) {
        notices.send(peer, Notice::Left { from: rank });
    }
    let mut left = LeftRank { rank, notices, comms };
    if !poll_until(|| left.poll() != Departures::Waiting) {
        LEFT_RANKS.lock().unwrap_or_else(PoisonError::into_inner).push(left);
    }
    sweep();
}

/// Frees communicators of ranks that left earlier, where all others have left too. MPI has to be usable.
pub(super) fn sweep() {
    LEFT_RANKS.lock().unwrap_or_else(PoisonError::into_inner).retain_mut(|left| left.poll() == Departures::Waiting);
}
