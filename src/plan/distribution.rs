// SPDX-License-Identifier: MIT OR Apache-2.0
//! One distribution of tokens for many plans.
//!
//! A model has layers of several kinds: a window here, full attention there, other heads, dims and score options. All
//! of them work on the same tokens of a rank, in the same order. Separate plans do not guarantee that: the automatic
//! and the balanced layout depend on mask area, so two masks may give a rank different tokens, often equally many; then
//! the shape of a tensor does not show that it belongs to another plan. So one plan decides, and the plans of the other
//! kinds are made with its tokens: [`PlanBuilder::tokens_of`](super::PlanBuilder::tokens_of).
//!
//! [`Plan::distribution`] identifies which rank holds which tokens. A tensor may be used with any plan of its
//! distribution, and with no other plan.

use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};

use super::{Fingerprint, Plan};
use crate::{
    batch::{Batch, Side},
    error::{Error, Result},
};

/// Which tokens of which batch each rank holds, and in which order.
///
/// Two of them are equal exactly if the batches are equal and every rank of a group holds the same tokens in the same
/// order (but for a probability of 2⁻⁶⁴), whatever layout and mesh led there: every layout over one rank is the same
/// distribution. The number of replicas does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Distribution(u64);

impl Distribution {
    /// The number, for other languages.
    pub const fn id(self) -> u64 {
        self.0
    }
}

impl core::fmt::Display for Distribution {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Plan {
    /// An identifier of the distribution of tokens. Takes `O(documents × ring)` steps; with stripes, a step for each
    /// stripe.
    pub fn distribution(&self) -> Distribution {
        let mut h = Fingerprint::new();
        h.batch(self.problem().batch());
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for rank in 0..self.mesh().group() {
            for side in [Side::Q, Side::K] {
                // Runs are joined, so that they do not depend on the layout that made them.
                runs.clear();
                self.local_tokens(side, rank).for_each_run(|_, token, rows, _| match runs.last_mut() {
                    Some((first, n)) if *first + *n == token => *n += rows,
                    _ => runs.push((token, rows)),
                });
                h.word(runs.len() as u64);
                runs.iter().for_each(|&(first, n)| h.word((first as u64) << 32 | n as u64));
            }
        }
        Distribution(h.finish())
    }
}

/// Refuses a batch other than that of the plan whose tokens are used.
pub(super) fn same_batch(found: &Batch, expected: &Batch) -> Result<()> {
    if found.has_documents_of(expected) {
        return Ok(());
    }
    let refuse = |argument: String, found: String, expected: String| {
        let expected = format!("{expected}, as in the batch of the other plan");
        Err(Error::invalid(argument, found, expected)
            .hint("plans have the same tokens only over the same documents; slices may differ"))
    };
    for (name, side) in [("cu_seqlens_q", Side::Q), ("cu_seqlens_k", Side::K)] {
        let (f, e) = (found.cu_seqlens(side), expected.cu_seqlens(side));
        if f.len() != e.len() {
            return refuse(name.into(), format!("of length {}", f.len()), e.len().to_string());
        }
        if let Some(i) = (0..f.len()).find(|&i| f[i] != e[i]) {
            return refuse(format!("{name}[{i}]"), f[i].to_string(), e[i].to_string());
        }
    }
    let d = (0..found.documents()).find(|&d| found.start(Side::Q, d) != expected.start(Side::Q, d)).unwrap_or(0);
    let [f, e] = [found, expected].map(|b| match b.explicit_starts() {
        Some(starts) => starts.get(d).map_or("empty".into(), |start| start.to_string()),
        None => "not given".into(),
    });
    refuse(format!("q_start[{d}]"), f, e)
}
