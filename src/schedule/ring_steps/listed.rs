// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ring steps over listed keys: of each share the rows that lists name, and no other.
//!
//! Which rows the mask needs follows from the plan, so every rank finds it alone. Which rows lists name only the rank
//! that has the lists knows. It finds them once, owner by owner, and sends each owner its runs: then both ends of every
//! message have the same runs, and all else is as for a mask: steps, slots, packing, the return of gradients. Rows go
//! straight from their owner to each reader, also where the plan has nodes.

use alloc::{format, string::String, sync::Arc, vec::Vec};

use super::{Holders, RingSteps};
use crate::{
    batch::{Batch, Side},
    call::Range,
    layout::{Segment, Shares},
    plan::Form,
    schedule::join::{Class, Fragment},
    slice::parts::Allowed,
};

/// Rows of a share, first and end, in ascending order and apart.
pub(crate) type RowRuns = Vec<(u32, u32)>;

/// The rows that lists name, as one ring rank knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ListedRows {
    /// By owner: the rows of its share that this rank's lists name. None of its own.
    pub incoming: Vec<RowRuns>,
    /// By reader: the rows of this rank's share that its lists name.
    pub outgoing: Vec<RowRuns>,
}

/// A set of k tokens of a batch.
#[derive(Clone, Debug, Default)]
pub(crate) struct TokenSet(Vec<u64>);

impl TokenSet {
    /// Makes it empty, with room for the tokens of a batch.
    pub(crate) fn clear(&mut self, tokens: usize) {
        self.0.clear();
        self.0.resize(tokens.div_ceil(64), 0);
    }

    pub(crate) fn insert(&mut self, token: usize) {
        self.0[token / 64] |= 1 << (token % 64);
    }

    fn has(&self, token: usize) -> bool {
        self.0[token / 64] >> (token % 64) & 1 == 1
    }

    /// The rows of a share of k that are in the set; `segments` is scratch.
    pub(crate) fn rows_of(&self, shares: &Shares, owner: usize, segments: &mut Vec<Segment>) -> RowRuns {
        shares.segments(Side::K, owner, segments);
        let mut runs = RowRuns::new();
        for range in segments.iter().map(|segment| &segment.range) {
            let first = first_token(shares.batch(), range.doc);
            for i in (0..range.len).filter(|&i| self.has((first + range.position(i)) as usize)) {
                let row = range.row as u32 + i;
                match runs.last_mut() {
                    Some(last) if last.1 == row => last.1 += 1,
                    _ => runs.push((row, row + 1)),
                }
            }
        }
        runs
    }
}

/// The number of the first k token of a document minus its position.
pub(crate) fn first_token(batch: &Batch, doc: u32) -> i64 {
    batch.document(Side::K, doc as usize).start as i64 - batch.start(Side::K, doc as usize)
}

impl ListedRows {
    /// Those of ring rank `me` where each ring rank's lists name these k tokens.
    pub(crate) fn of(shares: &Shares, me: usize, named: &[TokenSet]) -> Self {
        let mut segments = Vec::new();
        let ring = shares.ring();
        let mut rows = |reader: usize, owner: usize| match reader == owner {
            true => RowRuns::new(),
            false => named[reader].rows_of(shares, owner, &mut segments),
        };
        let incoming = (0..ring).map(|owner| rows(me, owner)).collect();
        Self { incoming, outgoing: (0..ring).map(|reader| rows(reader, me)).collect() }
    }

    /// The number of rows of some runs.
    pub(crate) fn count(runs: &RowRuns) -> u64 {
        runs.iter().map(|&(first, end)| u64::from(end - first)).sum()
    }

    /// Checks lists from any source: runs of rows that shares have, in order.
    pub(super) fn check(&self, shares: &Shares, me: usize) -> Result<(), String> {
        let ring = shares.ring();
        for (lists, arriving) in [(&self.incoming, true), (&self.outgoing, false)] {
            if lists.len() != ring {
                return Err(format!("listed rows of {} ring ranks, not of {ring}", lists.len()));
            }
            for (j, runs) in lists.iter().enumerate() {
                let rows = shares.rows(Side::K, if arriving { j } else { me }) as u32;
                let mut end = 0;
                for &(a, e) in runs {
                    if a < end || a >= e || e > rows || j == me {
                        return Err(format!("listed rows {a}..{e} of a share of {rows}, with ring rank {j}"));
                    }
                    end = e;
                }
            }
        }
        Ok(())
    }
}

impl RingSteps {
    /// The ring steps of ring rank `me` over listed keys.
    pub(crate) fn listed(
        shares: &Shares,
        allowed: impl Into<Allowed>,
        form: Form,
        me: usize,
        listed: ListedRows,
    ) -> Self {
        let mut v =
            Self::empty(shares, allowed.into(), Side::K, form, (me, shares.ring()), alloc::vec![Holders::alone()]);
        v.listed = Some(Arc::new(listed));
        v.sweep();
        v
    }

    /// Whether they are those of listed keys.
    pub(crate) fn is_listed(&self) -> bool {
        self.listed.is_some()
    }

    /// Replaces the listed rows without measuring them again, as a wrong plan would.
    #[cfg(test)]
    pub(crate) fn with_listed(&self, listed: ListedRows) -> Self {
        Self { listed: Some(Arc::new(listed)), ..self.clone() }
    }
}

/// Appends the rows of `runs` that are in segments of `class`, as rows of `peer`, from slot row `row` on; returns the
/// row after them.
pub(super) fn take_listed(
    segments: &[Segment],
    runs: &RowRuns,
    class: Class,
    peer: u32,
    mut row: i64,
    fragments: &mut Vec<Fragment>,
) -> i64 {
    let mut from = 0;
    for segment in segments {
        let v = &segment.range;
        let (first, end) = (v.row as u32, v.row as u32 + v.len);
        from += runs[from..].iter().take_while(|run| run.1 <= first).count();
        if !class.has(segment.reverse) {
            continue;
        }
        for run in runs[from..].iter().take_while(|run| run.0 < end) {
            v.split(run.0.max(first) - first, run.1.min(end) - first, |i, piece| {
                fragments.push(Fragment { peer, owner_row: v.row + i64::from(i), range: Range { row, ..piece } });
                row += i64::from(piece.len);
            });
        }
    }
    row
}
