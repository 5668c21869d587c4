// SPDX-License-Identifier: MIT OR Apache-2.0
//! The shared state of a local group: which rank waits for what.
//!
//! A plain data structure without locks or threads: `local` keeps it behind one mutex, and everything here runs under
//! that mutex. A rank that enters an exchange posts its two lists here, by address; peers read them there while it
//! waits. Between the ranks `s` and `d`, the next message is the first of `s`'s sends to `d` and the first of `d`'s
//! receives from `s` that no rank has claimed yet: two cursors per pair say where those are. Batches need not pair up
//! one to one: what one rank sends in one exchange, its peer may receive in two.
//!
//! Nothing here allocates, except in the search for the rank at fault, when the group has failed anyway.

mod waits;

use super::super::{Label, Message, fault::GroupFailure, rules};
use crate::error::{Error, Result};
use std::ops::Range;
use std::time::Duration;

/// The state of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// In no call.
    Idle,
    /// In an exchange; its lists are posted.
    Exchange,
    /// In an agree that is not complete.
    Agree,
    /// In an agreement that is complete, but the rank has not read the result yet.
    Answered,
    /// In a call that has failed; the rank waits until no peer reads its memory.
    Ending,
    /// Dropped.
    Gone,
}

/// The address of a list of messages whose owner stays in its exchange for as long as the list is posted.
#[derive(Clone, Copy)]
struct PostedList(*const [Message]);

// SAFETY: an address and a number; `PostedList::list` says why the list may be read from every thread.
unsafe impl Send for PostedList {}

impl PostedList {
    const NOTHING: Self = Self(&[]);

    fn list(&self) -> &[Message] {
        // SAFETY: the address is that of a slice that its owner borrows until its exchange returns, and the owner
        // calls `Board::retire` under the board's mutex before that. The result borrows the board, hence the mutex, so
        // it is gone by then. Nothing writes a list while it is borrowed.
        unsafe { &*self.0 }
    }
}

/// One rank's place on the board.
pub(super) struct RankOnBoard {
    pub(super) phase: Phase,
    /// Its current call, or its last one.
    pub(super) label: Label,
    pub(super) deadline: Duration,
    /// The rank is parked, and no other rank has woken it since.
    pub(super) parked: bool,
    sends: PostedList,
    recvs: PostedList,
    /// Sends that have not been copied to the end.
    pub(super) unread: usize,
    /// Receives that have not been copied to the end.
    pub(super) unwritten: usize,
    /// Peers that copy from its memory at this moment.
    pub(super) readers: usize,
    /// It copies a message from a peer at this moment.
    copying: bool,
    /// Counts the messages that left or reached it: a rank whose count grows is not stuck.
    pub(super) moved: u64,
    group: Range<usize>,
    /// What the ranks compare in its current or last call: in an agreement, or in a run. None in an exchange outside of
    /// runs.
    number: Option<u64>,
    /// The first rank with another number, and that number.
    pub(super) verdict: Option<(usize, u64)>,
}

/// A message that is to move now: from `send` to `recv`, both of the same size unless the ranks disagree.
pub(super) struct Claim {
    pub(super) send: Message,
    pub(super) recv: Message,
}

/// The state of all ranks, and the first failure.
pub(super) struct Board {
    pub(super) ranks: Vec<RankOnBoard>,
    failure: Option<GroupFailure>,
    /// `[s, d]`: sends of `s` before this index that go to `d` are claimed.
    sent: Vec<usize>,
    /// `[d, s]`: receives of `d` before this index that come from `s` are claimed.
    received: Vec<usize>,
}

impl Board {
    pub(super) fn new(world: usize, deadline: Duration) -> Self {
        let place = |_| RankOnBoard {
            phase: Phase::Idle,
            label: Label::new("start", 0),
            deadline,
            parked: false,
            sends: PostedList::NOTHING,
            recvs: PostedList::NOTHING,
            unread: 0,
            unwritten: 0,
            readers: 0,
            copying: false,
            moved: 0,
            group: 0..0,
            number: None,
            verdict: None,
        };
        Self {
            ranks: (0..world).map(place).collect(),
            failure: None,
            sent: vec![0; world * world],
            received: vec![0; world * world],
        }
    }

    /// Starts a call of `rank`, unless the group has failed or the rank is in another call. The ranks compare `number`
    /// in it, if any.
    pub(super) fn enter(&mut self, rank: usize, label: Label, number: Option<u64>) -> Result<()> {
        let place = &mut self.ranks[rank];
        if place.phase != Phase::Idle {
            return Err(rules::not_serial(label, rank, Some(place.label)));
        }
        (place.label, place.number) = (label, number);
        self.error(rank, label).map_or(Ok(()), Err)
    }

    /// Posts the lists of `rank`, which stays in its exchange until it has called [`retire`](Self::retire).
    pub(super) fn post(&mut self, rank: usize, sends: &[Message], recvs: &[Message]) {
        let row = rank * self.ranks.len()..(rank + 1) * self.ranks.len();
        self.sent[row.clone()].fill(0);
        self.received[row].fill(0);
        let place = &mut self.ranks[rank];
        place.phase = Phase::Exchange;
        place.sends = PostedList(sends);
        place.recvs = PostedList(recvs);
        place.unread = sends.len();
        place.unwritten = recvs.len();
    }

    /// Takes the lists of `rank` down.
    pub(super) fn retire(&mut self, rank: usize) {
        let place = &mut self.ranks[rank];
        place.phase = if place.readers == 0 { Phase::Idle } else { Phase::Ending };
        place.sends = PostedList::NOTHING;
        place.recvs = PostedList::NOTHING;
    }

    /// Claims the next message from one rank to another, if both are there.
    pub(super) fn claim(&mut self, from: usize, to: usize) -> Option<Claim> {
        let world = self.ranks.len();
        let [sender, receiver] = [from, to].map(|rank| &self.ranks[rank]);
        if sender.phase != Phase::Exchange || receiver.phase != Phase::Exchange {
            return None;
        }
        let next = |list: &[Message], peer: usize, cursor: &mut usize| {
            while list.get(*cursor).is_some_and(|message| message.peer != peer) {
                *cursor += 1;
            }
            list.get(*cursor).copied()
        };
        let (sent, received) = (&mut self.sent[from * world + to], &mut self.received[to * world + from]);
        let send = next(sender.sends.list(), to, sent)?;
        let recv = next(receiver.recvs.list(), from, received)?;
        *sent += 1;
        *received += 1;
        self.ranks[from].readers += 1;
        self.ranks[to].copying = true;
        Some(Claim { send, recv })
    }

    /// Records that messages between two ranks, counted as moved, have not moved: neither rank's batch becomes
    /// complete.
    #[cfg(any(feature = "cuda", cpattn_loom))]
    pub(super) fn take_back(&mut self, from: usize, to: usize) {
        self.ranks[from].unread += 1;
        self.ranks[to].unwritten += 1;
    }

    /// Notes that a claimed message from `peer` to `rank` was copied, and says whether `peer` has to be woken.
    pub(super) fn moved(&mut self, rank: usize, peer: usize) -> bool {
        self.ranks[rank].unwritten -= 1;
        self.ranks[rank].moved += 1;
        let place = &mut self.ranks[peer];
        place.unread -= 1;
        place.moved += 1;
        self.release(rank, peer)
    }

    /// Notes that `rank` does not read the claimed message from `peer` any more, and says whether `peer` has to be
    /// woken.
    pub(super) fn release(&mut self, rank: usize, peer: usize) -> bool {
        self.ranks[rank].copying = false;
        let place = &mut self.ranks[peer];
        place.readers -= 1;
        place.readers == 0 && (place.unread == 0 || place.phase == Phase::Ending)
    }

    /// Posts that the number of `rank` is for `group`; true if the group is now complete, and every rank of it has its
    /// verdict.
    pub(super) fn offer(&mut self, rank: usize, group: Range<usize>) -> bool {
        let place = &mut self.ranks[rank];
        place.phase = Phase::Agree;
        place.group = group.clone();
        let members = &mut self.ranks[group.clone()];
        if members.iter().any(|member| member.phase != Phase::Agree || member.group != group) {
            return false;
        }
        let number = |member: &RankOnBoard| member.number.unwrap_or_default();
        let first = (group.start, number(&members[0]));
        let other = members.iter().position(|member| number(member) != first.1);
        let other = other.map(|at| (group.start + at, number(&members[at])));
        for member in members {
            member.phase = Phase::Answered;
            member.verdict = other.map(|other| if number(member) == first.1 { other } else { first });
        }
        true
    }

    /// Ends the agreement of a rank that waits in it, with the first rank that differs and its number.
    pub(super) fn answer(&mut self, rank: usize, other: (usize, u64)) {
        let place = &mut self.ranks[rank];
        place.phase = Phase::Answered;
        place.verdict = Some(other);
    }

    /// Records a failure, unless there is one already; true if there was none.
    pub(super) fn fail(&mut self, failure: GroupFailure) -> bool {
        let first = self.failure.is_none();
        self.failure.get_or_insert(failure);
        first
    }

    /// The failure as `rank` reports it.
    pub(super) fn error(&self, rank: usize, label: Label) -> Option<Error> {
        self.failure.map(|failure| failure.error(rank, label, self.ranks[rank].number))
    }
}
