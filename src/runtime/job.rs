// SPDX-License-Identifier: MIT OR Apache-2.0
//! What a schedule is for, as ranks compare it and as errors say it.

use std::{format, string::String};

use crate::{
    plan::Plan,
    schedule::{AllToAll, Direction},
};

/// What a schedule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    Attention(Direction),
    AllToAll(AllToAll),
}

impl Job {
    /// What the ranks of a group compare before a run.
    pub(super) fn fingerprint(self, plan: &Plan) -> u64 {
        let salt = match self {
            Self::Attention(Direction::Forward) => 0,
            Self::Attention(Direction::Backward) => 1,
            Self::AllToAll(AllToAll { way, side, dim, dtype }) => {
                2 | (way as u64) << 2 | (side as u64) << 3 | (dtype as u64) << 4 | u64::from(dim) << 8
            }
        };
        plan.fingerprint() ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// A run in words: direction, tokens, heads, mesh, layout.
    pub(super) fn describe(self, plan: &Plan) -> String {
        let p = plan.problem();
        let run = match self {
            Self::Attention(Direction::Forward) => "the forward",
            Self::Attention(Direction::Backward) => "the backward",
            Self::AllToAll(_) => "an all-to-all",
        };
        let (heads, dim, dtype) = (p.heads(), p.head_dim(), p.dtype());
        let tokens = p.batch().tokens(crate::batch::Side::Q);
        let documents = p.batch().documents();
        format!(
            "{run} of {tokens} tokens in {documents} documents, {heads} heads of {dim} {dtype}, {}, {}",
            plan.mesh(),
            plan.layout()
        )
    }
}
