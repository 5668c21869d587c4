// SPDX-License-Identifier: MIT OR Apache-2.0
//! The check in later runs: a tag before the first message from one rank to another.
//!
//! The first run of a plan and direction begins with an agreement ([`agreement`](super::agreement)); later runs do not
//! wait for one. Instead, in each run, before its first message to a peer, a rank sends a tag of 16 bytes in the same
//! exchange: the fingerprint of its run, and the number of the run in the group. The receiver compares the tag when the
//! exchange is complete and before the operation counts as done, so before anything reads the received data.
//!
//! This is sufficient. A rank's results depend on other ranks only through the messages that it receives, and rows are
//! sent directly from the rank that has them to the rank that reads them, or by a rank that checked its own peers in
//! the same way. Messages between two ranks keep their order, so the first receive of this run from a peer matches the
//! first message of the peer that was not yet received. If the peer runs another plan or direction, or is a run ahead
//! or behind, that message is either a tag with other numbers, or rows of an unfinished run, whose 16 bytes are not a
//! tag of this run or whose size makes the exchange fail. Two ranks without messages in a run cannot give each other
//! wrong data in it.
//!
//! The schedule determines the first message in each direction with each rank: [`Tags::new`] lists them once. The tags
//! are in the list's own memory, which the transport reads and writes during an exchange. A device keeps them in its
//! own memory, counts its runs there, and compares them after each exchange on the exchange's stream.

use std::{collections::BTreeSet, string::String, vec, vec::Vec};

use crate::{
    error::{Error, Result},
    plan::Plan,
    schedule::{Purpose, Schedule, expand::Expansion},
    transport::Message,
};

/// The content of a tag. All ranks have the same byte order, as for all other data that they send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
struct RunTag {
    fingerprint: u64,
    /// From 1; 0 is a tag that has not arrived.
    run: u64,
}

/// The first message from or to a peer.
#[derive(Clone, Copy, Debug)]
struct First {
    op: u32,
    /// Index of the message in the operation's list.
    message: u32,
    peer: usize,
    /// Index in `memory`: 0, the rank's own tag, for sends.
    slot: u32,
}

/// The tags of one prepared schedule.
#[derive(Debug, Default)]
pub(super) struct Tags {
    /// In the order of operations and of their messages.
    firsts: Vec<First>,
    /// The rank's own tag, then the tag received from each peer. Empty if a device holds them.
    memory: Vec<RunTag>,
    /// If a device holds them: their address there, and the bytes of each.
    on_device: Option<(usize, usize)>,
    /// The sender of each tag, from slot 1 on.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only devices say it by slot"))]
    senders: Vec<usize>,
    rank: usize,
    /// The run, for errors.
    run: Option<(Plan, Purpose)>,
    /// The seed of its dropout, for errors.
    dropout_seed: Option<u64>,
    /// Heads and entries of its lists of keys, for errors.
    key_indices: Option<[usize; 2]>,
}

impl Tags {
    /// The tags of a schedule, in host memory.
    pub(super) fn new(plan: &Plan, run: Purpose, schedule: &Schedule, expansion: &mut Expansion) -> Self {
        let (mut firsts, mut seen, mut senders) = (Vec::new(), BTreeSet::new(), Vec::new());
        for (op, _) in schedule.ops.iter().enumerate().filter(|(_, op)| op.kind.is_exchange()) {
            for (message, m) in expansion.messages(schedule, op).iter().enumerate() {
                if seen.insert((m.peer, m.send)) {
                    if !m.send {
                        senders.push(m.peer);
                    }
                    let slot = if m.send { 0 } else { senders.len() as u32 };
                    firsts.push(First { op: op as u32, message: message as u32, peer: m.peer, slot });
                }
            }
        }
        let memory = vec![RunTag::default(); 1 + senders.len()];
        let (rank, run) = (schedule.rank, Some((plan.clone(), run)));
        Self { firsts, memory, on_device: None, senders, rank, run, dropout_seed: None, key_indices: None }
    }

    /// The same tags in device memory: at `address`, as the backend names it, `bytes` bytes each.
    #[cfg(feature = "cuda")]
    pub(super) fn on_device(self, address: *mut u8, bytes: usize) -> Self {
        Self { memory: Vec::new(), on_device: Some((address as usize, bytes)), ..self }
    }

    /// The sender of each tag, from slot 1 on.
    #[cfg(feature = "cuda")]
    pub(super) fn senders(&self) -> &[usize] {
        &self.senders
    }

    /// The largest number of messages that the check adds to one exchange in one direction.
    pub(super) fn most(&self) -> usize {
        self.firsts.chunk_by(|a, b| a.op == b.op).map(<[First]>::len).max().unwrap_or(0)
    }

    /// Sets the tag that this run sends and expects.
    pub(super) fn begin(
        &mut self,
        fingerprint: u64,
        run: u64,
        dropout_seed: Option<u64>,
        key_indices: Option<[usize; 2]>,
    ) {
        (self.dropout_seed, self.key_indices) = (dropout_seed, key_indices);
        self.memory.fill(RunTag::default());
        if let Some(own) = self.memory.first_mut() {
            *own = RunTag { fingerprint, run };
        }
    }

    fn of(&self, op: usize) -> &[First] {
        let begin = self.firsts.partition_point(|f| (f.op as usize) < op);
        let end = self.firsts.partition_point(|f| f.op as usize <= op);
        &self.firsts[begin..end]
    }

    /// The tag before a message of an operation, if there is one.
    pub(super) fn before(&mut self, op: usize, message: usize) -> Option<Message> {
        let key = |f: &First| (f.op as usize, f.message as usize);
        let f = self.firsts[self.firsts.binary_search_by_key(&(op, message), key).ok()?];
        if let Some((at, bytes)) = self.on_device {
            let ptr = core::ptr::without_provenance_mut(at + f.slot as usize * bytes);
            return Some(Message { peer: f.peer, ptr, bytes });
        }
        let ptr = self.memory.as_mut_ptr().wrapping_add(f.slot as usize).cast();
        Some(Message { peer: f.peer, ptr, bytes: size_of::<RunTag>() })
    }

    /// Compares the tags that arrived with operation `op`, whose exchange is over. If the exchange has failed, tags
    /// that have not arrived prove nothing.
    ///
    /// # Errors
    /// [`Error::Disagreement`] with the first peer whose tag differs.
    pub(super) fn check(&self, op: usize, failed: bool) -> Result<()> {
        let Some(&own) = self.memory.first() else { return Ok(()) };
        for f in self.of(op).iter().filter(|f| f.slot > 0) {
            let theirs = self.memory[f.slot as usize];
            if theirs != own && !(failed && theirs == RunTag::default()) {
                return Err(Error::Disagreement {
                    rank: self.rank,
                    peer: f.peer,
                    ours: own.fingerprint,
                    theirs: theirs.fingerprint,
                    what: self.run.as_ref().map_or(String::new(), |(plan, run)| {
                        run.describe_with(plan, self.dropout_seed, self.key_indices)
                    }),
                    runs: Some([own.run, theirs.run]),
                });
            }
        }
        Ok(())
    }
}
