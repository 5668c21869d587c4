// SPDX-License-Identifier: MIT OR Apache-2.0
//! The pairs of schedules over listed keys: those that the mask allows, of a q token with a key of its ring rank's own
//! share or with a key that this ring rank lists.
//!
//! It is made of the lists and of the tokens that ranks hold, and does not use the code that plans.

use alloc::vec::Vec;

use crate::{batch::Side, plan::Plan};

/// Positions of one document: document, first and last.
pub(super) type Span = (u32, i64, i64);

/// Tokens as intervals, first and end.
pub(super) type TokenIntervals = Vec<(usize, usize)>;

pub(super) struct ListedPairs {
    /// By ring rank: the k tokens that its q tokens may attend to.
    keys: Vec<TokenIntervals>,
    /// By ring rank: its q tokens.
    queries: Vec<TokenIntervals>,
}

impl ListedPairs {
    /// `keys`: by ring rank, the k tokens that its lists name. `of_share`: the tokens of its share.
    pub(super) fn new(keys: &[Vec<u32>], of_share: impl Fn(Side, usize) -> TokenIntervals) -> Self {
        let reached = |(ring, list): (usize, &Vec<u32>)| {
            let mut all = of_share(Side::K, ring);
            all.extend(list.iter().map(|&token| (token as usize, token as usize + 1)));
            joined(all)
        };
        let queries = (0..keys.len()).map(|ring| joined(of_share(Side::Q, ring))).collect();
        Self { keys: keys.iter().enumerate().map(reached).collect(), queries }
    }

    /// The parts of a span of positions of the other side that a token of `side` may meet.
    pub(super) fn clip(&self, plan: &Plan, side: Side, token: usize, span: Span, out: &mut Vec<Span>) {
        let batch = plan.problem().batch();
        let (doc, low, high) = span;
        let other = side.other();
        let first = batch.document(other, doc as usize).start as i64 - batch.start(other, doc as usize);
        let (a, e) = ((low + first) as usize, (high + first) as usize + 1);
        for (keys, queries) in self.keys.iter().zip(&self.queries) {
            let (own, theirs) = if side == Side::Q { (queries, keys) } else { (keys, queries) };
            if !has(own, token) {
                continue;
            }
            let from = theirs.partition_point(|run| run.1 <= a);
            let within = theirs[from..].iter().take_while(|run| run.0 < e);
            out.extend(within.map(|run| (doc, run.0.max(a) as i64 - first, run.1.min(e) as i64 - 1 - first)));
        }
    }
}

fn has(list: &TokenIntervals, token: usize) -> bool {
    list.get(list.partition_point(|run| run.1 <= token)).is_some_and(|run| run.0 <= token)
}

/// The intervals in order, joined where they touch or overlap.
fn joined(mut list: TokenIntervals) -> TokenIntervals {
    list.sort_unstable();
    let mut joined = TokenIntervals::new();
    for (a, e) in list {
        match joined.last_mut() {
            Some(last) if a <= last.1 => last.1 = last.1.max(e),
            _ => joined.push((a, e)),
        }
    }
    joined
}
