// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lists of keys of a run: checked against the plan, and exchanged between Ulysses ranks.

use std::{format, string::String, vec::Vec};

use super::keys::RawKeyIndices;
use crate::{
    batch::Side,
    call::Score,
    error::{Error, Result, RunName},
    kernel::cpu::listed::{KeyLists, ListScratch},
    plan::Plan,
    schedule::{AttendPart, BufferView, CirculatingSide, Direction, OpKind, Purpose, Schedule},
    transport::{Label, Message, Transport},
};

/// The lists of a rank's runs; room that is kept from run to run.
#[derive(Default)]
pub(super) struct RankLists {
    /// Those of all tokens of the ring share, on a mesh with Ulysses ranks.
    of_share: Vec<i32>,
    /// For each position of a document, the list that named it last.
    named_by: Vec<u64>,
    /// Memory of the kernels.
    pub(super) scratch: ListScratch,
}

impl RankLists {
    /// Checks the lists of a rank's tokens.
    ///
    /// # Errors
    /// Another shape than the plan needs; an entry that is no key of its token, or that its list has twice.
    ///
    /// # Safety
    /// The lists are valid for reads.
    pub(super) unsafe fn check(&mut self, plan: &Plan, rank: usize, given: RawKeyIndices) -> Result<()> {
        let p = plan.problem();
        let [heads, entries] = given.shape();
        if heads != 1 && heads != p.kv_heads() {
            let expected = format!("1, for all kv heads, or {}, the kv heads of the plan", p.kv_heads());
            return Err(Error::invalid("key_indices.heads", heads, expected));
        }
        let tokens = plan.local_tokens(Side::Q, rank).len();
        if tokens.checked_mul(heads).and_then(|lists| lists.checked_mul(entries)) != Some(given.len) {
            let expected =
                format!("{entries} entries of {heads} heads for each of the {tokens} q tokens of rank {rank}");
            return Err(Error::invalid("key_indices", format!("of {} entries", given.len), expected)
                .hint("a rank gives the lists of its own tokens: its shard of the plan"));
        }
        // SAFETY: valid for reads (the contract).
        let all = unsafe { given.all() };
        let (score, batch) = (p.score(), p.batch());
        let longest = (0..batch.documents()).map(|doc| batch.document(Side::K, doc).len()).max().unwrap_or(0);
        self.named_by.clear();
        self.named_by.resize(longest, 0);
        let (mut row, mut failure) = (0, None);
        plan.local_tokens(Side::Q, rank).for_each(|_, position, doc| {
            let keys = batch.document(Side::K, doc).len();
            for head in 0..heads {
                let list = row * heads + head;
                for (entry, &key) in all[list * entries..][..entries].iter().enumerate() {
                    if failure.is_some() || key == -1 {
                        continue;
                    }
                    let within = usize::try_from(key).is_ok_and(|key| key < keys);
                    if !within || !score.allows(position, key.into()) {
                        let limits = if within { Some((position, score)) } else { None };
                        let expected = expected(doc, keys, limits);
                        failure = Some((row, head, entry, key, expected));
                    } else if core::mem::replace(&mut self.named_by[key as usize], list as u64 + 1) == list as u64 + 1 {
                        failure = Some((row, head, entry, key, "each key once in a list".into()));
                    }
                }
            }
            row += 1;
        });
        match failure {
            None => Ok(()),
            Some((row, head, entry, key, expected)) => {
                Err(Error::invalid(format!("key_indices[{row}][{head}][{entry}]"), key, expected)
                    .hint("entries are positions in the token's document; -1 stands for no key"))
            }
        }
    }

    /// Gives this rank's lists to the Ulysses ranks of its ring share, and takes theirs.
    ///
    /// # Errors
    /// Those of the exchange, which belongs to `run`.
    ///
    /// # Safety
    /// The lists are valid for reads, and were checked.
    pub(super) unsafe fn exchange(
        &mut self,
        plan: &Plan,
        run: Option<RunName>,
        transport: &dyn Transport,
        given: RawKeyIndices,
    ) -> Result<()> {
        let ([heads, entries], ulysses, rank) = (given.shape(), plan.mesh().ulysses, transport.rank());
        if ulysses == 1 {
            return Ok(());
        }
        // SAFETY: valid for reads (the contract).
        let own = unsafe { given.all() };
        let peers = rank / ulysses * ulysses..(rank / ulysses + 1) * ulysses;
        let length = |peer| plan.local_tokens(Side::Q, peer).len() * heads * entries;
        self.of_share.clear();
        self.of_share.resize(peers.clone().map(length).sum(), -1);
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        let mut rest = &mut self.of_share[..];
        for peer in peers {
            let (theirs, after) = rest.split_at_mut(length(peer));
            rest = after;
            if peer == rank {
                theirs.copy_from_slice(own);
                continue;
            }
            for (list, ptr, len) in
                [(&mut sends, own.as_ptr().cast_mut(), own.len()), (&mut recvs, theirs.as_mut_ptr(), theirs.len())]
            {
                if len > 0 {
                    list.push(Message { peer, ptr: ptr.cast(), bytes: len * size_of::<i32>() });
                }
            }
        }
        if sends.is_empty() && recvs.is_empty() {
            return Ok(());
        }
        // SAFETY: what is sent is valid for reads (the contract), and what is received is borrowed alone.
        unsafe { transport.exchange(Label { run, ..Label::new("exchange of key_indices", 0) }, &sends, &recvs) }
    }

    /// The lists of the q rows of the run's calls: those of the rank's tokens, or of its ring share once they were
    /// exchanged.
    ///
    /// # Safety
    /// The lists are valid for reads.
    pub(super) unsafe fn of_calls(
        &mut self,
        plan: &Plan,
        rank: usize,
        given: RawKeyIndices,
    ) -> (KeyLists<'_>, &mut ListScratch) {
        let [heads, entries] = given.shape();
        if entries == 0 {
            // Lists without entries are lists of no key.
            self.of_share.clear();
            self.of_share.resize(plan.tokens_between_all_to_alls(Side::Q, rank) * heads, -1);
            return (KeyLists { positions: &self.of_share, heads, entries: 1 }, &mut self.scratch);
        }
        // SAFETY: valid for reads (the contract).
        let positions = if plan.mesh().ulysses == 1 { unsafe { given.all() } } else { &self.of_share };
        (KeyLists { positions, heads, entries }, &mut self.scratch)
    }
}

/// The keys that a token may list, in words: those of its document, and with its position those that the mask allows.
fn expected(doc: usize, keys: usize, limits: Option<(i64, Score)>) -> String {
    let Some((position, score)) = limits else {
        return match keys {
            0 => format!("-1: document {doc} has no k tokens"),
            _ => format!("-1, or 0 to {}: document {doc} has {keys} k tokens", keys - 1),
        };
    };
    let first = if score.window_left == i64::MAX { 0 } else { (position - score.window_left).max(0) };
    let last = if score.window_right == i64::MAX { i64::MAX } else { position + score.window_right };
    let last = last.min(keys as i64 - 1);
    if first > last {
        return format!("-1: the mask allows no key of document {doc} to the token at position {position}");
    }
    format!("-1, or {first} to {last}, which the mask allows to the token at position {position} of document {doc}")
}

/// Refuses runs whose calls have other q rows than the rank's.
pub(super) fn check_supported(run: Purpose, plan: &Plan, schedule: &Schedule) -> Result<()> {
    // The automatic choice is of no matter here: `Plan::for_listed_keys`.
    let (side, way_out) = match run {
        Purpose::Attention(Direction::Backward) => (plan.circulates(Direction::Backward), "plan with circulate keys"),
        _ => (plan.circulates(Direction::Forward), "plan with circulate_forward keys"),
    };
    if plan.mesh().ring > 1 && side == CirculatingSide::Queries {
        let limit = "the lists stay with the rank that has the tokens";
        return Err(Error::unsupported("key_indices in a ring whose q circulates", limit, way_out));
    }
    let rows = plan.tokens_between_all_to_alls(Side::Q, schedule.rank) as u64;
    let is_whole = |q: BufferView| q.row == 0 && q.rows == rows;
    let whole = schedule.ops.iter().all(|op| match &op.kind {
        OpKind::Attend(a) => is_whole(a.q) && a.part != AttendPart::Finish,
        OpKind::Backward(b) => is_whole(b.q),
        _ => true,
    });
    if !whole {
        let limit = "a kernel call of the plan has a part of the q rows of a rank";
        return Err(Error::unsupported("key_indices", limit, "plan with another gather, or without passes"));
    }
    Ok(())
}
