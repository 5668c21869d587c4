// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exchanges: drives the pipes to and from all peers until all listed messages have moved.

use std::{ffi::c_int, vec::Vec};

use super::{
    group::MpiGroup,
    notices::WaitsFor,
    pipe::{self, Broken, Pipe, PipeDirection},
    raw::Comm,
};
use crate::{
    error::Cause,
    transport::{Message, fault::GroupFailure},
};

/// Messages have a communicator to themselves.
const TAG: c_int = 1;

/// Two pipes for each peer.
pub(super) struct Pipes {
    sends: Vec<Pipe>,
    recvs: Vec<Pipe>,
    /// The pipes of this exchange that are not done, by direction and peer.
    active: Vec<(PipeDirection, usize)>,
    pub piece: usize,
}

impl Pipes {
    pub(super) fn new(world: usize) -> Self {
        let pipes = |way| (0..world).map(|peer| Pipe::new(way, peer)).collect();
        Self {
            sends: pipes(PipeDirection::Send),
            recvs: pipes(PipeDirection::Receive),
            active: Vec::with_capacity(2 * world),
            piece: pipe::PIECE,
        }
    }

    /// Lists the messages of an exchange.
    pub(super) fn list(&mut self, sends: &[Message], recvs: &[Message]) {
        self.active.clear();
        for (way, list) in [(PipeDirection::Receive, recvs), (PipeDirection::Send, sends)] {
            let pipes = if way == PipeDirection::Send { &mut self.sends } else { &mut self.recvs };
            for &message in list {
                if pipes[message.peer].add(message, self.piece) {
                    self.active.push((way, message.peer));
                }
            }
        }
    }

    /// Forgets the messages of an exchange.
    pub(super) fn clear(&mut self, sends: &[Message], recvs: &[Message]) {
        for message in recvs {
            self.recvs[message.peer].clear();
        }
        for message in sends {
            self.sends[message.peer].clear();
        }
    }

    /// Moves the listed messages.
    ///
    /// # Safety
    /// As [`Transport::exchange`](crate::transport::Transport::exchange).
    pub(super) unsafe fn travel(&mut self, own: &MpiGroup, comm: Comm) -> Result<(), GroupFailure> {
        let (mut state, mut failed) = (own.deadline_state(), None);
        while !self.active.is_empty() {
            let mut moved = false;
            let (mut at, mut broken) = (0, None);
            while let Some(&(way, peer)) = self.active.get(at) {
                let pipe = match way {
                    PipeDirection::Send => &mut self.sends[peer],
                    PipeDirection::Receive => &mut self.recvs[peer],
                };
                // SAFETY: the messages' bytes are valid until the exchange is over (the contract of
                // `Transport::exchange`).
                match unsafe { pipe.advance(comm, TAG) } {
                    Ok(now) => moved |= now,
                    Err(why) => {
                        broken = Some((peer, why));
                        break;
                    }
                }
                if pipe.is_done() {
                    self.active.swap_remove(at);
                } else {
                    at += 1;
                }
            }
            if let Some((peer, why)) = broken {
                return Err(match why {
                    Broken::Mpi(refused) => own.fail_mpi(peer, refused),
                    Broken::Size { ours, theirs } => {
                        own.fail(GroupFailure::of_size(own.rank, peer, [ours as u64, theirs]))
                    }
                    Broken::Order => own.fail_by(peer, Cause::Failed),
                });
            }
            if moved {
                state.moved();
                continue;
            }
            // A message that arrived before the notice of a failure counts.
            if let Some(failure) = failed {
                return Err(failure);
            }
            // Receives first: a rank that waits to send waits for a peer that has not come to receive.
            let first = self.active.iter().find(|a| a.0 == PipeDirection::Receive).or(self.active.first());
            if let Some(&(_, on)) = first {
                let pipes = || self.sends.iter().chain(&self.recvs);
                let wait = WaitsFor { on, agreeing: false };
                failed = own.pause(&mut state, wait, || pipes().map(Pipe::waiting).sum()).err();
            }
        }
        Ok(())
    }

    /// After a failure: cancels receives.
    pub(super) fn cancel(&mut self) {
        self.recvs.iter_mut().for_each(Pipe::cancel);
    }

    /// Whether all requests are complete; tests all of them.
    pub(super) fn is_free(&mut self) -> bool {
        let pipes = self.sends.iter_mut().chain(&mut self.recvs);
        pipes.filter_map(|p| (!p.is_free()).then_some(())).count() == 0
    }
}
