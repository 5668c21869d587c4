// SPDX-License-Identifier: MIT OR Apache-2.0
//! Exchanges whose bytes are not copied by the ranks' threads but by copies that are enqueued on devices.
//!
//! Both ranks' lists are needed to enqueue a message, but any thread can do it. The second of two ranks to arrive
//! enqueues all messages between the two, in both directions, under the mutex of the board. A rank that arrives before
//! its peers parks once, and is woken when its exchange is complete; a rank that arrives after all its peers does not
//! wait. So enqueueing must be short and must not wait for other ranks.
//!
//! Failures and deadlines, and the ranks that errors name, are as in
//! [`Transport::exchange`](super::Transport::exchange) of this transport. A message is begun only while both lists are
//! posted, hence never after either call has returned.

use super::{Board, GroupFailure, Label, Local, Message, Phase, Shared, WaitProgress, lock};
use crate::error::{Cause, Result};

/// Begins messages from one rank to another: calls `next` for the send and the receive of each, until it gives no more.
/// It may be called for ranks that have none.
pub(in crate::transport) type Enqueue<'a> =
    dyn FnMut([usize; 2], &mut dyn FnMut() -> Option<[Message; 2]>) -> Result<()> + 'a;

impl Shared {
    /// Begins all messages from one rank to another that both have listed.
    fn enqueue_between(&self, board: &mut Board, [from, to]: [usize; 2], enqueue: &mut Enqueue<'_>) -> Result<()> {
        let mut next = || {
            let claim = board.claim(from, to)?;
            if claim.send.bytes != claim.recv.bytes {
                self.fail_size(board, to, &claim);
                return None;
            }
            board.moved(to, from);
            Some([claim.send, claim.recv])
        };
        enqueue([from, to], &mut next).inspect_err(|_| board.take_back(from, to))
    }

    /// Records a rank to be woken, if its batch is complete.
    fn wake_if_complete(&self, board: &mut Board, rank: usize, woken: &mut ToWake) {
        let place = &mut board.ranks[rank];
        if place.phase == Phase::Exchange && place.unread + place.unwritten == 0 && place.parked {
            if woken.count == woken.ranks.len() {
                return self.wake(board, rank);
            }
            place.parked = false;
            woken.ranks[woken.count] = rank;
            woken.count += 1;
        }
    }

    /// Wakes the ranks, after the mutex was released: a rank woken earlier would only wait for the mutex.
    fn notify(&self, woken: &ToWake) {
        woken.ranks[..woken.count].iter().for_each(|&rank| self.condvars[rank].notify_one());
    }
}

/// Ranks to be woken later; ranks that do not fit are woken at once.
#[derive(Default)]
struct ToWake {
    ranks: [usize; 8],
    count: usize,
}

impl Local {
    /// As [`exchange`](super::Transport::exchange), with messages that `enqueue` begins. The call returns when all of
    /// them are begun. An error of `enqueue` fails the group, and is what this rank's call returns.
    ///
    /// The lists are checked before ([`Local::check`]).
    pub(in crate::transport) fn exchange_enqueued(
        &self,
        label: Label,
        sends: &[Message],
        recvs: &[Message],
        enqueue: &mut Enqueue<'_>,
    ) -> Result<()> {
        let (rank, shared) = (self.rank, &*self.shared);
        let mut board = lock(&shared.board);
        board.enter(rank, label, label.number())?;
        board.post(rank, sends, recvs);
        let mut progress = WaitProgress::new(board.ranks[rank].moved);
        // Begins all messages whose peer is here; a peer that comes later begins its own.
        let (mut outcome, mut woken) = (Ok(()), ToWake::default());
        for peer in (0..shared.world).filter(|&peer| peer != rank) {
            for pair in [[peer, rank], [rank, peer]] {
                // A failure removes all lists; after it no message begins.
                if outcome.is_ok() && board.error(rank, label).is_none() {
                    outcome = shared.enqueue_between(&mut board, pair, enqueue);
                }
            }
            shared.wake_if_complete(&mut board, peer, &mut woken);
        }
        if outcome.is_err() {
            shared.fail(&mut board, GroupFailure::of(rank, Cause::Failed));
        }
        let open = |board: &Board| board.ranks[rank].unread + board.ranks[rank].unwritten > 0;
        if outcome.is_ok() && open(&board) {
            if woken.count > 0 {
                drop(board);
                shared.notify(&std::mem::take(&mut woken));
                board = lock(&shared.board);
            }
            while outcome.is_ok() && open(&board) {
                (board, outcome) = self.pause(board, label, &mut progress);
            }
        }
        board.retire(rank);
        drop(board);
        shared.notify(&woken);
        outcome
    }

    /// For models: an exchange whose bytes are copied by the thread that arrives second.
    ///
    /// # Safety
    /// As [`exchange`](super::Transport::exchange).
    #[cfg(cpattn_loom)]
    #[doc(hidden)]
    pub unsafe fn exchange_copied(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        self.shared.memory[self.rank].own();
        let outcome = self.exchange_enqueued(label, sends, recvs, &mut |[from, to], next| {
            while let Some([send, recv]) = next() {
                // SAFETY: both ranges are valid, and written by nothing else, until the exchanges that listed them
                // return (the contract of both), and neither does while the board is locked.
                let copy = || unsafe { std::ptr::copy_nonoverlapping(send.ptr.cast_const(), recv.ptr, recv.bytes) };
                self.shared.memory[from].borrow(copy);
                self.shared.memory[to].own();
            }
            Ok(())
        });
        self.shared.memory[self.rank].own();
        outcome
    }
}
