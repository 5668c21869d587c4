// SPDX-License-Identifier: MIT OR Apache-2.0
//! Joins messages to one peer into packets, with a header.
//!
//! A separate message costs an engine tens of microseconds; a copy of some kilobytes costs much less. So consecutive
//! small messages to one peer are joined. Sender and receiver join in the same way, since sizes and order are the same
//! on both; the header is compared to check this before the rest of the packet is used.
//!
//! An agreement sends a header alone, in the same order of messages: so a rank that exchanges finds a peer that agrees,
//! and the other way round, with the first header that arrives.

use core::num::NonZeroU64;
use std::{format, string::String, vec, vec::Vec};

use super::{super::Message, verdict::Verdict};
use crate::{
    error::{RunKind, RunName},
    plan::Fingerprint,
};

/// Messages below this many bytes are joined, and packets up to it travel with their header.
pub(super) const SMALL: usize = 64 << 10;

/// Messages of one peer that travel together: several are copied on both sides, a single large one is not.
#[derive(Debug)]
pub(super) struct Packet {
    pub(super) peer: usize,
    pub(super) messages: Vec<Message>,
}

impl Packet {
    /// The bytes of all its messages.
    pub(super) fn bytes(&self) -> usize {
        self.messages.iter().map(|m| m.bytes).sum()
    }

    /// Whether it is sent together with its header.
    pub(super) fn is_small(&self) -> bool {
        self.bytes() <= SMALL
    }

    /// Whether it has several messages.
    pub(super) fn is_joined(&self) -> bool {
        self.messages.len() > 1
    }

    /// Copies its messages to `to`, one behind the other.
    ///
    /// # Safety
    /// The messages are valid for reads, and `to` for writes of as many bytes, apart from them.
    pub(super) unsafe fn gather(&self, mut to: *mut u8) {
        for m in &self.messages {
            // SAFETY: promised.
            unsafe {
                to.copy_from_nonoverlapping(m.ptr, m.bytes);
                to = to.add(m.bytes);
            }
        }
    }

    /// Copies bytes from elsewhere to where the messages lie.
    ///
    /// # Safety
    /// The messages are valid for writes, and `from` for reads of as many bytes, apart from them.
    pub(super) unsafe fn scatter(&self, mut from: *const u8) {
        for m in &self.messages {
            // SAFETY: promised.
            unsafe {
                m.ptr.copy_from_nonoverlapping(from, m.bytes);
                from = from.add(m.bytes);
            }
        }
    }
}

/// Joins neighbouring small messages of each peer.
pub(super) fn packets(list: &[Message]) -> Vec<Packet> {
    let mut done: Vec<Packet> = Vec::with_capacity(list.len());
    // Packets that can still grow, at most one for each peer.
    let mut growing: Vec<usize> = Vec::new();
    for &m in list {
        let open = growing.iter().position(|&at| done[at].peer == m.peer);
        match open {
            Some(open) if m.bytes < SMALL => {
                done[growing[open]].messages.push(m);
                continue;
            }
            Some(open) => {
                growing.swap_remove(open);
            }
            None if m.bytes < SMALL => growing.push(done.len()),
            None => {}
        }
        done.push(Packet { peer: m.peer, messages: vec![m] });
    }
    done
}

/// The purpose of a packet, and the run of its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// 0 in an exchange, 1 in an agreement.
    agreeing: u64,
    bytes: u64,
    messages: u64,
    /// A hash of the size of each message, in their order; in an agreement the number that is gathered.
    sizes: u64,
    /// 0 for none, otherwise 1 plus the index of the kind in `KINDS`.
    kind: u64,
    plan: u64,
    /// What the ranks compare in the run; 0 if that is not known.
    fingerprint: u64,
}

const KINDS: [RunKind; 6] =
    [RunKind::Forward, RunKind::Backward, RunKind::ToHeads, RunKind::ToTokens, RunKind::Combine, RunKind::Scan];

impl Header {
    pub(super) const BYTES: usize = 56;

    pub(super) fn new(packet: &Packet, run: Option<RunName>) -> Self {
        let mut sizes = Fingerprint::new();
        packet.messages.iter().for_each(|m| sizes.word(m.bytes as u64));
        Self {
            bytes: packet.bytes() as u64,
            messages: packet.messages.len() as u64,
            sizes: sizes.finish(),
            ..Self::of_run(run)
        }
    }

    /// The header of an agreement, in which this rank gives `number`.
    pub(super) fn of_agreement(number: u64, run: Option<RunName>) -> Self {
        Self { agreeing: 1, sizes: number, ..Self::of_run(run) }
    }

    fn of_run(run: Option<RunName>) -> Self {
        let place = |kind| KINDS.iter().position(|&k| k == kind).map_or(0, |at| at as u64 + 1);
        Self {
            agreeing: 0,
            bytes: 0,
            messages: 0,
            sizes: 0,
            kind: run.map_or(0, |run| place(run.kind)),
            plan: run.map_or(0, |run| run.plan),
            fingerprint: run.and_then(|run| run.fingerprint).map_or(0, NonZeroU64::get),
        }
    }

    /// The number that a peer gives in an agreement.
    pub(super) fn number(&self) -> u64 {
        self.sizes
    }

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let Self { agreeing, bytes, messages, sizes, kind, plan, fingerprint } = self;
        let words = [agreeing, bytes, messages, sizes, kind, plan, fingerprint];
        let mut all = [0; Self::BYTES];
        for (to, word) in all.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        all
    }

    pub(super) fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let word = |at: usize| u64::from_le_bytes(core::array::from_fn(|i| bytes[8 * at + i]));
        let [agreeing, bytes, messages, sizes, kind, plan, fingerprint] = core::array::from_fn(word);
        Self { agreeing, bytes, messages, sizes, kind, plan, fingerprint }
    }

    /// The error of `rank` if `peer` sends `theirs` and `rank` expects `self`; `None` if they fit together. Two
    /// agreements do: their numbers are compared later.
    pub(super) fn compare(
        &self,
        theirs: &Self,
        rank: usize,
        peer: usize,
        call: impl FnOnce() -> String,
    ) -> Option<Verdict> {
        if (self.agreeing, theirs.agreeing) != (0, 0) {
            return (self.agreeing != theirs.agreeing).then(|| self.crossed(theirs, rank, peer));
        }
        // What differs in the fingerprint alone is found by the runtime, which can say what it is.
        if *self == (Self { fingerprint: self.fingerprint, ..*theirs }) {
            return None;
        }
        let alike = (self.bytes, self.messages) == (theirs.bytes, theirs.messages);
        let others = if alike && self.sizes != theirs.sizes { " of other sizes" } else { "" };
        let text = format!(
            "rank {peer} sends {} and runs {}, rank {rank} expects {}{others} ({}) and runs {}: {}",
            theirs.counted(),
            theirs.running(),
            self.counted(),
            call(),
            self.running(),
            super::verdict::SAME,
        );
        let differ = (self.kind, self.plan) != (theirs.kind, theirs.plan);
        Some(Verdict { peer: Some(peer), text, other: Some(rank), differ, runs: None })
    }

    /// One rank agrees and the other exchanges.
    fn crossed(&self, theirs: &Self, rank: usize, peer: usize) -> Verdict {
        let doing = |header: &Self| if header.agreeing == 1 { "compares" } else { "exchanges for" };
        let text = format!(
            "rank {peer} {} {}, rank {rank} {} {}: {}",
            doing(theirs),
            theirs.running(),
            doing(self),
            self.running(),
            super::verdict::SAME,
        );
        let runs = [theirs.fingerprint, self.fingerprint];
        Verdict { peer: Some(peer), text, other: Some(rank), differ: true, runs: (!runs.contains(&0)).then_some(runs) }
    }

    fn counted(&self) -> String {
        format!("{} bytes in {} message{}", self.bytes, self.messages, if self.messages == 1 { "" } else { "s" })
    }

    fn running(&self) -> String {
        let kind = usize::try_from(self.kind).ok().and_then(|kind| KINDS.get(kind.checked_sub(1)?));
        running(kind.map(|&kind| RunName::new(kind, self.plan)))
    }
}

/// The run of a rank, in words.
pub(super) fn running(run: Option<RunName>) -> String {
    run.map_or_else(|| "no plan".into(), |RunName { kind, plan, .. }| format!("the {kind} of plan {plan:016x}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    fn messages(list: &[(usize, usize)]) -> Vec<Message> {
        let ptr = core::ptr::dangling_mut();
        list.iter().map(|&(peer, bytes)| Message { peer, ptr, bytes }).collect()
    }

    fn cut(list: &[(usize, usize)]) -> Vec<(usize, Vec<usize>)> {
        let sizes = |p: Packet| (p.peer, p.messages.iter().map(|m| m.bytes).collect());
        packets(&messages(list)).into_iter().map(sizes).collect()
    }

    #[test]
    fn small_neighbours_of_a_peer_are_joined() {
        let big = SMALL;
        assert_eq!(cut(&[]), []);
        assert_eq!(
            cut(&[(1, 8), (2, 9), (1, 10), (1, big), (2, 11), (1, 12), (2, 13)]),
            [(1, vec![8, 10]), (2, vec![9, 11, 13]), (1, vec![big]), (1, vec![12])]
        );
        assert_eq!(cut(&[(1, big), (1, big + 1)]), [(1, vec![big]), (1, vec![big + 1])]);
        // Joined messages may be larger than a packet that travels with its header.
        let joined = &packets(&messages(&[(1, big - 1), (1, big - 1)]))[0];
        assert!(!joined.is_small() && joined.bytes() == 2 * big - 2);
    }

    #[test]
    fn what_differs_is_named() {
        let header = |sizes: &[usize], run| {
            let list: Vec<_> = sizes.iter().map(|&bytes| (1, bytes)).collect();
            Header::new(&packets(&messages(&list))[0], run)
        };
        let of_plan = |plan| Some(RunName::new(RunKind::Backward, plan));
        let ours = header(&[10, 20], of_plan(7));
        assert_eq!(Header::from_bytes(ours.to_bytes()), ours);
        assert!(ours.compare(&header(&[10, 20], of_plan(7)), 0, 1, || "ring, step 3".into()).is_none());
        let said = |theirs: Header| {
            let verdict = ours.compare(&theirs, 0, 1, || "ring, step 3".into()).unwrap();
            assert_eq!((verdict.on(0), verdict.on(1), verdict.on(2)), (Some(1), Some(0), Some(1)));
            (verdict.differ, verdict.text.split(':').next().unwrap().to_string())
        };
        let expects = "(ring, step 3) and runs the backward of plan 0000000000000007";
        let runs = "and runs the backward of plan 0000000000000007, rank 0 expects 30 bytes in 2 messages";
        assert_eq!(
            said(header(&[20, 10], of_plan(7))),
            (false, format!("rank 1 sends 30 bytes in 2 messages {runs} of other sizes {expects}"))
        );
        assert_eq!(
            said(header(&[30], of_plan(7))),
            (false, format!("rank 1 sends 30 bytes in 1 message {runs} {expects}"))
        );
        let (differ, text) = said(header(&[10, 20], None));
        assert!(differ && text.starts_with("rank 1 sends 30 bytes in 2 messages and runs no plan, rank 0 "), "{text}");
        assert!(said(header(&[10, 20], of_plan(8))).0);
    }
}
