// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kinds of runs: the fingerprint that ranks compare, and the name in errors.

use std::{format, string::String};

use crate::{
    batch::Side,
    error::{Result, RunKind, RunName},
    plan::Plan,
    schedule::{AllToAll, AllToAllDirection, Combine, Direction, Purpose, Schedule},
};

impl Purpose {
    /// The schedule of such a run on one rank.
    ///
    /// # Errors
    /// Those of planning: a rank outside the mesh; tensors without an innermost dimension.
    pub(super) fn schedule(self, plan: &Plan, rank: usize) -> Result<Schedule> {
        match self {
            Self::Attention(direction) => Schedule::new(plan, rank, direction),
            Self::AllToAll(all_to_all) => Schedule::all_to_all(plan, rank, all_to_all),
            Self::Combine(combine) => Schedule::combine(plan, rank, combine),
        }
    }

    /// How errors name such a run.
    pub(super) fn name(self, plan: &Plan) -> RunName {
        let kind = match self {
            Self::Attention(Direction::Forward) => RunKind::Forward,
            Self::Attention(Direction::Backward) => RunKind::Backward,
            Self::AllToAll(AllToAll { direction: AllToAllDirection::ToHeads, .. }) => RunKind::ToHeads,
            Self::AllToAll(AllToAll { direction: AllToAllDirection::ToTokens, .. }) => RunKind::ToTokens,
            Self::Combine(_) => RunKind::Combine,
        };
        RunName::new(kind, plan.fingerprint())
    }

    /// The fingerprint that the ranks of a group compare before a run.
    pub(super) fn fingerprint(self, plan: &Plan) -> u64 {
        let salt = match self {
            Self::Attention(Direction::Forward) => 0,
            Self::Attention(Direction::Backward) => 1,
            Self::AllToAll(AllToAll { direction: way, side, dim, dtype }) => {
                2 | (way as u64) << 2 | (side as u64) << 3 | (dtype as u64) << 4 | u64::from(dim) << 8
            }
            Self::Combine(Combine { to, partial }) => 3 | (to as u64) << 2 | (partial as u64) << 4,
        };
        plan.fingerprint() ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// As [`Purpose::describe`], with the seed of dropout, and heads and entries of lists of keys.
    pub(super) fn describe_with(
        self,
        plan: &Plan,
        dropout_seed: Option<u64>,
        key_indices: Option<[usize; 2]>,
    ) -> String {
        let seed = dropout_seed.map_or(String::new(), |seed| format!(", dropout_seed {seed}"));
        let lists = |[heads, entries]: [usize; 2]| format!(", key_indices of {heads} heads and {entries} entries");
        self.describe(plan) + &seed + &key_indices.map_or(String::new(), lists)
    }

    /// A run in words: direction, tokens, heads, mesh, layout; then all else that ranks compare. An all-to-all has a
    /// dim and an element type of its own, and the tokens and heads of its side.
    pub(super) fn describe(self, plan: &Plan) -> String {
        let p = plan.problem();
        let (side, dim, dtype) = match self {
            Self::Attention(_) => (Side::Q, p.head_dim(), p.dtype()),
            Self::AllToAll(AllToAll { side, dim, dtype, .. }) => (side, dim as usize, dtype),
            Self::Combine(of) => (Side::Q, p.value_dim(), of.partial),
        };
        let (tokens, heads) = match side {
            Side::Q => (p.batch().tokens(side), p.heads()),
            Side::K => (p.batch().tokens(side), p.kv_heads()),
        };
        let documents = p.batch().documents();
        let nodes = match plan.has_two_levels() {
            true => format!(", nodes of {} ranks", plan.options().ranks_per_node),
            false => String::new(),
        };
        format!(
            "the {} of {tokens} tokens in {documents} documents, {heads} heads of {dim} {dtype}, {}, {}{nodes}, {}",
            self.name(plan).kind,
            plan.mesh(),
            plan.layout(),
            plan.describe_settings()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{batch::Batch, element::Dtype, layout::Layout, mesh::Mesh, plan::Problem};

    /// An all-to-all is named by its own tensors: side, dim and element type are not those of attention.
    #[test]
    fn an_all_to_all_is_named_by_its_tensors() {
        let batch = Batch::cross(&[0, 5, 9], &[0, 7, 12], None).unwrap();
        let plan = Plan::new(&Problem::new(batch, 4, 2, 16, Dtype::Bf16), Mesh::single(), Layout::Contiguous).unwrap();
        let all_to_all = |way, side| Purpose::AllToAll(AllToAll { direction: way, side, dim: 3, dtype: Dtype::F32 });
        for (run, words) in [
            (Purpose::Attention(Direction::Backward), "the backward of 9 tokens in 2 documents, 4 heads of 16 bf16, "),
            (
                all_to_all(AllToAllDirection::ToHeads, Side::Q),
                "the all-to-all to heads of 9 tokens in 2 documents, 4 heads of 3 f32, ",
            ),
            (
                all_to_all(AllToAllDirection::ToTokens, Side::K),
                "the all-to-all to tokens of 12 tokens in 2 documents, 2 heads of 3 f32, ",
            ),
        ] {
            let text = run.describe(&plan);
            assert!(text.starts_with(words), "{text:?} does not begin with {words:?}");
        }
    }
}
