// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kinds of runs: the fingerprint that ranks compare, and the name in errors.

use std::{format, string::String};

use crate::{
    batch::Side,
    error::{RunKind, RunName},
    plan::{Fingerprint, Plan},
    schedule::{AllToAll, AllToAllDirection, Combine, Direction, Purpose, Scan},
};

impl Purpose {
    /// How errors name such a run.
    pub(super) fn name(self, plan: &Plan) -> RunName {
        let kind = match self {
            Self::Attention(Direction::Forward) => RunKind::Forward,
            Self::Attention(Direction::Backward) => RunKind::Backward,
            Self::AllToAll(AllToAll { direction: AllToAllDirection::ToHeads, .. }) => RunKind::ToHeads,
            Self::AllToAll(AllToAll { direction: AllToAllDirection::ToTokens, .. }) => RunKind::ToTokens,
            Self::Combine(_) => RunKind::Combine,
            Self::Scan(_) => RunKind::Scan,
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
            Self::Scan(Scan { decay, heads, key_dim, value_dim, dtype, reverse, form }) => {
                let mut h = Fingerprint::new();
                [heads, key_dim, value_dim].into_iter().for_each(|n| h.word(n.into()));
                [decay as u64, dtype as u64, reverse.into(), form as u64].into_iter().for_each(|n| h.word(n));
                h.finish()
            }
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
    /// dim and an element type of its own, and the tokens and heads of its side; a scan has heads of its own too.
    pub(super) fn describe(self, plan: &Plan) -> String {
        let p = plan.problem();
        let (side, dim, dtype) = match self {
            Self::Attention(_) => (Side::Q, p.head_dim(), p.dtype()),
            Self::AllToAll(AllToAll { side, dim, dtype, .. }) => (side, dim as usize, dtype),
            Self::Combine(of) => (Side::Q, p.value_dim(), of.partial),
            Self::Scan(of) => (Side::Q, of.state_dim() as usize, of.dtype),
        };
        let heads = match (self, side) {
            (Self::Scan(of), _) => of.heads as usize,
            (_, Side::Q) => p.heads(),
            (_, Side::K) => p.kv_heads(),
        };
        let tokens = p.batch().tokens(side);
        let how = match self {
            Self::Scan(Scan { decay, key_dim, value_dim, reverse, form, .. }) => {
                let way = if reverse { "reverse" } else { "forward" };
                format!(" ({key_dim} × {value_dim}, {decay:?} decay, {way}, form {form:?})")
            }
            _ => String::new(),
        };
        let documents = p.batch().documents();
        let nodes = match plan.has_two_levels() {
            true => format!(", nodes of {} ranks", plan.options().ranks_per_node),
            false => String::new(),
        };
        format!(
            "the {} of {tokens} tokens in {documents} documents, {heads} heads of {dim} {dtype}{how}, {}, {}{nodes}, {}",
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
