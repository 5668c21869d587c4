// SPDX-License-Identifier: MIT OR Apache-2.0
//! The counts of a verification: pairs, operations, bytes and messages.

use alloc::vec::Vec;

/// The counts of a proof.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// (q, k, q head) triples that were attended, each once; none in an all-to-all.
    pub pairs: u128,
    /// By rank, in the order of the group.
    pub ranks: Vec<RankReport>,
}

/// One rank's part of a [`Report`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// Operations in its list.
    pub operations: usize,
    /// Exchanges among them.
    pub exchanges: usize,
    /// Bytes of its workspace.
    pub workspace: u64,
    /// What it moves, by phase and kind of operation, in the order of first use.
    pub traffic: Vec<Traffic>,
}

/// Messages of one phase and kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// As [`Operation::phase`](crate::schedule::Operation::phase).
    pub phase: &'static str,
    /// `"exchange"`, `"fetch"` or `"return"`.
    pub kind: &'static str,
    /// Messages that arrive.
    pub messages_in: u64,
    /// Messages that leave.
    pub messages_out: u64,
    /// Bytes that arrive.
    pub bytes_in: u64,
    /// Bytes that leave.
    pub bytes_out: u64,
}

impl Report {
    /// Bytes that arrive at all ranks together, in operations of `kind`.
    pub fn bytes(&self, kind: &str) -> u64 {
        self.ranks.iter().map(|r| r.bytes_in(kind)).sum()
    }

    /// Messages of all ranks together.
    pub fn messages(&self) -> u64 {
        self.ranks.iter().flat_map(|r| &r.traffic).map(|t| t.messages_in).sum()
    }
}

impl RankReport {
    /// Bytes that arrive in operations of `kind`.
    pub fn bytes_in(&self, kind: &str) -> u64 {
        self.traffic.iter().filter(|t| t.kind == kind).map(|t| t.bytes_in).sum()
    }

    /// Bytes that leave in operations of `kind`.
    pub fn bytes_out(&self, kind: &str) -> u64 {
        self.traffic.iter().filter(|t| t.kind == kind).map(|t| t.bytes_out).sum()
    }
}
