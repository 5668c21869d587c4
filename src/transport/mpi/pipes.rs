// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exchanges and agreements: drives the pipes to and from all peers until all listed messages have moved.

use std::{ffi::c_int, vec::Vec};

use super::{
    group::MpiGroup,
    in_flight::poll_until,
    notices::{Need, Notice, WaitsFor},
    pipe::{self, Broken, Pipe},
    raw::Comm,
};
use crate::{
    error::Cause,
    transport::{Message, engine::MessageDirection, fault::GroupFailure},
};

/// Differs from the tag of notices, which use the same communicator as agreements.
const TAG: c_int = 1;

/// Two pipes for each peer, for exchanges or for agreements.
pub(super) struct Pipes {
    comm: Comm,
    agreeing: bool,
    /// Those that receive from each rank, then those that send to each.
    all: Vec<Pipe>,
    /// The pipes of this call that are not done.
    active: Vec<usize>,
    pub piece: usize,
}

impl Pipes {
    pub(super) fn new(world: usize, comm: Comm, agreeing: bool) -> Self {
        let ways = [MessageDirection::Receive, MessageDirection::Send];
        let all: Vec<_> = ways.into_iter().flat_map(|way| (0..world).map(move |peer| Pipe::new(way, peer))).collect();
        // All ranks agree with all others once, so the memory of an agreement's pipes has to be small:
        // a piece is one message of three words.
        let piece = if agreeing { size_of::<[u64; 3]>() } else { pipe::PIECE };
        Self { comm, agreeing, active: Vec::with_capacity(all.len()), all, piece }
    }

    /// Moves messages; of an agreement, beside the pipes of `exchanges`.
    ///
    /// # Safety
    /// As [`Transport::exchange`](crate::transport::Transport::exchange).
    pub(super) unsafe fn carry(
        &mut self,
        own: &MpiGroup,
        sends: &[Message],
        recvs: &[Message],
        exchanges: Option<&Self>,
    ) -> Result<(), GroupFailure> {
        let listed = || recvs.iter().map(|m| (m.peer, m)).chain(sends.iter().map(|m| (own.world + m.peer, m)));
        self.active.clear();
        for (at, &message) in listed() {
            if self.all[at].add(message, self.piece) {
                self.active.push(at);
            }
        }
        // SAFETY: the messages' bytes are valid until this returns (the contract of this function).
        let outcome = unsafe { self.travel(own, exchanges) };
        listed().for_each(|(at, _)| self.all[at].clear());
        own.notices.wait_for_none();
        if outcome.is_err() {
            self.all.iter_mut().for_each(Pipe::cancel);
            // The memory of requests that do not end is never freed. All are tested every time, since each test makes
            // progress.
            poll_until(|| self.all.iter_mut().map(Pipe::is_free).fold(true, |all, free| all & free));
        }
        outcome
    }

    /// Moves the listed messages.
    ///
    /// # Safety
    /// As [`Pipes::carry`].
    unsafe fn travel(&mut self, own: &MpiGroup, exchanges: Option<&Self>) -> Result<(), GroupFailure> {
        let (mut state, mut failed) = (own.deadline_state(), None);
        while !self.active.is_empty() {
            let (mut moved, mut at) = (false, 0);
            while let Some(&index) = self.active.get(at) {
                let pipe = &mut self.all[index];
                let peer = index % own.world;
                // SAFETY: the messages' bytes are valid (the contract of this function).
                moved |= unsafe { pipe.advance(self.comm, TAG) }.map_err(|why| match why {
                    Broken::Mpi(refused) => own.fail_mpi(peer, refused),
                    Broken::Size { ours, theirs } => {
                        own.fail(GroupFailure::of_size(own.rank, peer, [ours as u64, theirs]))
                    }
                    Broken::Order => own.fail_by(peer, Cause::Failed),
                })?;
                if pipe.is_done() {
                    self.active.swap_remove(at);
                } else {
                    at += 1;
                }
            }
            if moved {
                state.moved();
                continue;
            }
            // A message that arrived before the notice of a failure counts.
            if let Some(failure) = failed {
                return Err(failure);
            }
            match exchanges {
                Some(exchanges) => self.check_needs(own, exchanges)?,
                None if state.is_slow() => self.notify_needs(own),
                None => {}
            }
            // Receives first: a rank that waits to send waits for a peer that has not come to receive.
            if let Some(first) = self.active.iter().find(|&&at| at < own.world).or(self.active.first()) {
                let wait = WaitsFor { on: first % own.world, agreeing: self.agreeing };
                let waiting = || if self.agreeing { 0 } else { self.all.iter().map(Pipe::waiting).sum() };
                failed = own.pause(&mut state, wait, waiting).err();
            }
        }
        Ok(())
    }

    /// Says to the peers of an exchange which messages this rank waits for.
    fn notify_needs(&self, own: &MpiGroup) {
        for &at in &self.active {
            let fingerprint = own.number().unwrap_or_default();
            let (receives, number) = (at < own.world, self.all[at].moved());
            let need = Need { from: own.rank, receives, number, fingerprint };
            own.notices.send(at % own.world, Notice::Needs(need));
        }
    }

    /// In an agreement: fails if a peer that has not agreed needs a message that no exchange has moved.
    fn check_needs(&self, own: &MpiGroup, exchanges: &Self) -> Result<(), GroupFailure> {
        let stands = |need: &Need| {
            let at = if need.receives { own.world + need.from } else { need.from };
            need.number >= exchanges.all[at].moved()
        };
        let needs = own.notices.needs(stands);
        let Some(need) = needs.into_iter().find(|need| self.active.contains(&need.from)) else { return Ok(()) };
        let fingerprint = Some(need.fingerprint).filter(|&fingerprint| fingerprint != 0);
        Err(own.fail(GroupFailure::crossed(own.rank, need.from).of_runs(own.number(), fingerprint)))
    }
}
