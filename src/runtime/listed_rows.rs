// SPDX-License-Identifier: MIT OR Apache-2.0
//! Runs over listed keys in which of k and v only the listed rows move: which rows these are, whether they are fewer
//! bytes than what the mask moves, and the schedules that move them.
//!
//! A rank finds from its lists which rows it needs of each other ring rank, in one pass. Then ranks exchange counts:
//! the bytes that they would receive either way, and how long their lists of rows are. All ranks have the same numbers
//! after that, so they choose alike. If listed rows are fewer bytes, the row numbers follow, and every rank makes its
//! schedule from the rows that it needs and the rows that others need of it.
//!
//! Steps are [kept]: the backward of a layer, or another run over lists that name the same rows, finds those of the
//! forward. The numbers of all ranks are the key, and every rank of a group forgets the same entries, so that all find
//! them or none.
//!
//! What is the caller's may not fit listed rows: a lent workspace is for the plan as it is, and tensors may lie behind
//! the part of it that the plan uses. The automatic choice then takes the mask's rows. Where listed rows must move,
//! ranks [exchange] whether they fit, so that all of them refuse the run or none.

use std::vec::Vec;

use super::prepared::Prepared;
use crate::{
    batch::Side,
    error::Result,
    kernel::cpu::listed::KeyLists,
    plan::{Fingerprint, KeyRows, Plan},
    schedule::{
        ListedRows,
        ring_steps::listed::{RowRuns, TokenSet, first_token},
    },
    transport::Transport,
};

mod exchange;
mod kept;

pub(super) use exchange::ListedRun;
use exchange::{RingColumn, RowCounts, agree_on_fit, exchange_counts, exchange_rows};
use kept::KeptSteps;

/// Bytes of k and v, and of the gradients that come back, in one run over listed keys, received by all ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyRowBytes {
    /// If the rows that lists name move, with the numbers of the rows.
    pub listed: u64,
    /// If the rows that the mask allows move.
    pub allowed: u64,
    /// Which of them moved.
    pub moved: KeyRows,
}

/// The listed rows of a rank's runs.
#[derive(Default)]
pub(super) struct ListedRuns {
    named: TokenSet,
    kept: KeptSteps,
    /// Of the last run that counted them.
    bytes: Option<KeyRowBytes>,
}

impl ListedRuns {
    /// Bytes of the last run over listed keys in a ring.
    pub(super) fn bytes(&self) -> Option<KeyRowBytes> {
        self.bytes
    }

    /// The schedule that moves listed rows only; `None` if the rows move that the mask allows.
    ///
    /// # Errors
    /// Those of the exchanges. The inner error, listed rows that do not fit what the caller of a rank has, is one on
    /// all ranks.
    pub(super) fn choose(
        &mut self,
        run: &ListedRun,
        lists: &KeyLists,
        transport: &dyn Transport,
    ) -> Result<Result<Option<&mut Prepared>>> {
        self.bytes = None;
        let (plan, asked) = (run.plan, run.plan.options().key_rows);
        if plan.mesh().ring == 1 || asked == KeyRows::Allowed {
            return Ok(Ok(None));
        }
        let (me, group) = (transport.rank(), run.allowed.group.clone());
        let incoming = self.needed(plan, me, lists);
        let counts = exchange_counts(run, &incoming, transport)?;
        let sum = |of: fn(&RowCounts) -> u64| counts.iter().map(of).sum::<u64>();
        let (listed, allowed) = (sum(|c| c.listed), sum(|c| c.allowed));
        let fits = counts.iter().all(|c| c.bound == 0);
        let fewer = listed < allowed && fits;
        let moved = if asked == KeyRows::Listed || fewer { KeyRows::Listed } else { KeyRows::Allowed };
        self.bytes = Some(KeyRowBytes { listed, allowed, moved });
        if moved == KeyRows::Allowed {
            return Ok(Ok(None));
        }
        let mut h = Fingerprint::new();
        h.word(run.base.fingerprint());
        counts.iter().for_each(|c| h.word(c.rows));
        let place = self.kept.find_or_make((&group, h.finish()), (plan, me), || {
            let ring = RingColumn { ulysses: plan.mesh().ulysses, me, start: group.start };
            let outgoing = exchange_rows(run, ring, &incoming, &counts, transport)?;
            let rows = counts.iter().map(|c| c.needed).max().unwrap_or(0);
            Ok((ListedRows { incoming, outgoing }, rows))
        })?;
        let prepared = self.kept.prepared(place, (plan, me), run.direction)?;
        let needed = prepared.schedule.workspace;
        let tensors = run.tensors.check(&prepared.expected).and_then(|()| {
            let used = prepared.expected.used(run.tensors).map(|(_, name, raw)| (name, *raw));
            run.workspace.check_disjoint(needed, used)
        });
        let agreed = if fits { Ok(tensors?) } else { agree_on_fit(run, needed, tensors, transport)? };
        if agreed.is_err() {
            self.bytes = None;
        }
        Ok(agreed.map(|()| Some(prepared)))
    }

    /// The rows that the lists of this rank's calls name, of each other ring rank's share.
    fn needed(&mut self, plan: &Plan, rank: usize, lists: &KeyLists) -> Vec<RowRuns> {
        let (shares, me) = (plan.shares(), plan.mesh().coordinates(rank).ring);
        let batch = plan.problem().batch();
        let heads = if lists.heads == 1 { 0..1 } else { plan.heads_of(rank).kv };
        let mut segments = Vec::new();
        shares.segments(Side::Q, me, &mut segments);
        self.named.clear(batch.tokens(Side::K));
        for q in segments.iter().map(|segment| &segment.range) {
            let first = first_token(batch, q.doc);
            for row in q.row..q.row + i64::from(q.len) {
                for head in heads.clone() {
                    let keys = lists.of(row, head as usize).iter().filter(|&&key| key >= 0);
                    keys.for_each(|&key| self.named.insert((first + i64::from(key)) as usize));
                }
            }
        }
        let rows = |owner: usize| match owner == me {
            true => RowRuns::new(),
            false => self.named.rows_of(shares, owner, &mut segments),
        };
        (0..plan.mesh().ring).map(rows).collect()
    }
}
