// SPDX-License-Identifier: MIT OR Apache-2.0
//! The tokens that a rank holds: which they are, and their rows in tensors of the whole batch.
//!
//! Inputs and outputs of a rank are the tokens that the layout gives it, with all heads. [`LocalTokens`] lists them,
//! and copies rows of any `Copy` type by them, so that a data loader, a test or a checkpoint does not have to know the
//! layout: token ids (`row_len` 1), activations (`heads · head_dim`), gradients, losses.
//!
//! [`LocalTokens::shift`] gives each token the value of the token `by` places later in its document; with 1, that is
//! the label for next-token prediction. Neighbours in a document are often on different ranks, and neighbours in a
//! shard are often of different documents, so shifting the shard itself would be wrong at almost every boundary.

use alloc::{format, vec::Vec};
use core::ops::Range;

use super::Plan;
use crate::{
    batch::Side,
    error::{Error, Result},
    layout::{Segment, cut},
    mesh::Coordinates,
};

/// Refuses a tensor that does not have one row of `row_len` values for each token.
fn check_len(name: &str, found: usize, tokens: usize, row_len: usize, of: &str) -> Result<()> {
    match tokens.checked_mul(row_len) {
        Some(expected) if expected == found => Ok(()),
        Some(expected) => {
            let expected = format!("{expected}: {row_len} for each of {tokens} tokens{of}");
            Err(Error::invalid(name, format!("of length {found}"), expected))
        }
        None => Err(Error::invalid("row_len", row_len, format!("at most {} for {tokens} tokens", usize::MAX / tokens))),
    }
}

/// The tokens of one side that a rank holds, in its order: [`Plan::local_tokens`].
///
/// A rank outside the mesh is an error where a method returns one, and panics elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct LocalTokens<'a> {
    plan: &'a Plan,
    side: Side,
    rank: usize,
}

impl LocalTokens<'_> {
    /// Their side.
    pub(super) fn side(&self) -> Side {
        self.side
    }

    pub(super) fn plan(&self) -> &Plan {
        self.plan
    }

    /// How many they are.
    #[expect(clippy::len_without_is_empty, reason = "no tokens are not a case of their own")]
    pub fn len(&self) -> usize {
        self.rows().len()
    }

    /// Their rows in the rank's ring share, which is what the ranks of its Ulysses group hold together.
    pub fn rows(&self) -> Range<usize> {
        let Coordinates { ring, ulysses, .. } = self.plan.coordinates(self.rank);
        let (rows, ranks) = (self.plan.shares().rows(self.side, ring), self.plan.mesh().ulysses);
        cut(ulysses, rows, ranks)..cut(ulysses + 1, rows, ranks)
    }

    /// Their indices in the packed batch.
    pub fn indices(&self) -> Vec<usize> {
        let mut out = Vec::with_capacity(self.len());
        self.for_each(|token, _, _| out.push(token));
        out
    }

    /// Their positions in their documents (for rotary embeddings and the like).
    pub fn positions(&self) -> Vec<i64> {
        let mut out = Vec::with_capacity(self.len());
        self.for_each(|_, position, _| out.push(position));
        out
    }

    /// Calls `each(global token, position, document)` for every token.
    pub fn for_each(&self, mut each: impl FnMut(usize, i64, usize)) {
        let (batch, side) = (self.plan.problem().batch(), self.side);
        self.for_each_run(|_, token, rows, doc| {
            let base = batch.document(side, doc).start as i64 - batch.start(side, doc);
            (token..token + rows).for_each(|token| each(token, token as i64 - base, doc));
        });
    }

    /// Calls `each(local row, first global token, rows, document)` for each sequence of tokens that is contiguous in
    /// the packed batch.
    pub fn for_each_run(&self, mut each: impl FnMut(usize, usize, usize, usize)) {
        let (rows, plan, side) = (self.rows(), self.plan, self.side);
        let mut segments: Vec<Segment> = Vec::new();
        plan.shares().segments(side, plan.mesh().coordinates(self.rank).ring, &mut segments);
        let batch = plan.problem().batch();
        for s in &segments {
            let (range, first, doc) = (&s.range, s.range.row as usize, s.range.doc as usize);
            let base = batch.document(side, doc).start as i64 - batch.start(side, doc);
            let end = rows.end.min(first + range.len as usize);
            let mut row = rows.start.max(first);
            while row < end {
                let i = (row - first) as u32;
                let run = if range.is_plain() { end - row } else { (range.block - i % range.block) as usize };
                let run = run.min(end - row);
                each(row - rows.start, (base + range.position(i)) as usize, run, doc);
                row += run;
            }
        }
    }

    fn check_full(&self, found: usize, row_len: usize) -> Result<()> {
        check_len("full", found, self.plan.problem().batch().tokens(self.side), row_len, "")
    }

    /// Checks the tensors of a copy between the whole batch and the rank, and calls `each` with the places of each run
    /// in the values of both.
    fn for_each_copy(
        &self,
        [full, local]: [usize; 2],
        row_len: usize,
        mut each: impl FnMut(Range<usize>, Range<usize>),
    ) -> Result<()> {
        self.plan.check_rank(self.rank)?;
        self.check_full(full, row_len)?;
        check_len("local", local, self.len(), row_len, &format!(" of rank {}", self.rank))?;
        let values = |first: usize, rows: usize| first * row_len..(first + rows) * row_len;
        self.for_each_run(|row, token, rows, _| each(values(token, rows), values(row, rows)));
        Ok(())
    }

    /// The rank's rows of `full`, a tensor of all tokens of the side: `[tokens, row_len]`, compact. The result is
    /// `[local tokens, row_len]`.
    ///
    /// # Errors
    /// A rank outside the mesh, and a `full` whose length is not `tokens · row_len`.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, Side};
    /// let problem = Problem::new(Batch::from_lengths(&[8])?, 2, 2, 4, Dtype::F32);
    /// let plan = Plan::new(&problem, Mesh::ring(2)?, Layout::Zigzag)?;
    /// let ids = [10, 11, 12, 13, 14, 15, 16, 17];
    /// let own = plan.local_tokens(Side::Q, 0);
    /// assert_eq!((own.len(), own.indices()), (4, vec![0, 1, 6, 7]));
    /// assert_eq!(own.shard(&ids, 1)?, [10, 11, 16, 17]);
    /// assert_eq!(own.shift(&ids, -100, 1)?, [11, 12, 17, -100]);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn shard<T: Copy>(&self, full: &[T], row_len: usize) -> Result<Vec<T>> {
        self.plan.check_rank(self.rank)?;
        self.check_full(full.len(), row_len)?;
        let mut local = Vec::with_capacity(self.len() * row_len);
        self.for_each_run(|_, token, rows, _| {
            local.extend_from_slice(&full[token * row_len..(token + rows) * row_len]);
        });
        Ok(local)
    }

    /// As [`LocalTokens::shard`], into the caller's memory: `[local tokens, row_len]`.
    ///
    /// # Errors
    /// Those of [`LocalTokens::shard`], and a `local` whose length is not `local tokens · row_len`. Nothing is written
    /// then.
    pub fn shard_into<T: Copy>(&self, full: &[T], local: &mut [T], row_len: usize) -> Result<()> {
        self.for_each_copy([full.len(), local.len()], row_len, |of_full, of_local| {
            local[of_local].copy_from_slice(&full[of_full]);
        })
    }

    /// Writes the rank's rows to their places in `full`; the rows of other ranks are not changed. Over all ranks of a
    /// group every row of `full` is written exactly once.
    ///
    /// # Errors
    /// Those of [`LocalTokens::shard_into`]. Nothing is written then.
    pub fn unshard_into<T: Copy>(&self, local: &[T], full: &mut [T], row_len: usize) -> Result<()> {
        self.for_each_copy([full.len(), local.len()], row_len, |of_full, of_local| {
            full[of_full].copy_from_slice(&local[of_local]);
        })
    }

    /// For each token, the value of the token `by` places on in the same document (back, when `by` is negative), and
    /// `fill` where the document has none. `full` holds one value for each token of the batch.
    ///
    /// With `by` 1 and `fill` the loss function's ignore index these are the labels of next-token prediction.
    ///
    /// # Errors
    /// A rank outside the mesh, and a `full` whose length is not the number of tokens.
    pub fn shift<T: Copy>(&self, full: &[T], fill: T, by: i64) -> Result<Vec<T>> {
        self.check_full(full.len(), 1)?;
        let mut out = Vec::new();
        self.for_each_shifted(by, |token| out.push(token.map_or(fill, |t| full[t])))?;
        Ok(out)
    }

    /// Calls `each` for every token with the token `by` places on in the same document, if there is one: the indices
    /// that [`LocalTokens::shift`] reads at.
    ///
    /// # Errors
    /// A rank outside the mesh.
    pub fn for_each_shifted(&self, by: i64, mut each: impl FnMut(Option<usize>)) -> Result<()> {
        self.plan.check_rank(self.rank)?;
        let (batch, side) = (self.plan.problem().batch(), self.side);
        self.for_each_run(|_, token, rows, doc| {
            let doc = batch.document(side, doc);
            for token in token..token + rows {
                let at = (token as i64).checked_add(by).and_then(|t| usize::try_from(t).ok());
                each(at.filter(|t| doc.contains(t)));
            }
        });
        Ok(())
    }
}

impl Plan {
    /// The tokens that a rank holds.
    pub fn local_tokens(&self, side: Side, rank: usize) -> LocalTokens<'_> {
        LocalTokens { plan: self, side, rank }
    }

    fn check_rank(&self, rank: usize) -> Result<()> {
        let world = self.mesh().world();
        if rank >= world {
            return Err(Error::invalid("rank", rank, format!("below the world of {world}")));
        }
        Ok(())
    }

    /// [`LocalTokens::shift`] if no rank holds the whole tensor: the rows that each rank sends to each other rank.
    ///
    /// A rank applies its copies (the owner is the reader), sends each peer the rows listed for it in the order listed,
    /// and writes what arrives from each peer in the order listed. Rows that are in no list get the fill value. All
    /// ranks list the messages between two of them alike. Takes `O(tokens)` time and memory for the runs of the whole
    /// group.
    ///
    /// # Errors
    /// A rank outside the mesh.
    #[cfg_attr(not(feature = "std"), allow(dead_code, reason = "shifts and runs need std"))]
    pub(crate) fn shift_messages(&self, rank: usize, by: i64) -> Result<Vec<ShiftMessage>> {
        self.check_rank(rank)?;
        let batch = self.problem().batch();
        // Runs of all ranks by token: (first token, rows, rank, local row).
        let mut runs = Vec::new();
        for r in self.mesh().group_of(rank) {
            self.local_tokens(Side::Q, r).for_each_run(|row, token, rows, doc| runs.push((token, rows, r, row, doc)));
        }
        runs.sort_unstable();
        let mut out = Vec::new();
        for &(token, rows, reader, reader_row, doc) in &runs {
            // The tokens whose values these rows take, clipped to the document.
            let doc = batch.document(Side::Q, doc);
            let shifted = |t: usize| (t as i64).saturating_add(by).clamp(doc.start as i64, doc.end as i64) as usize;
            let (low, high) = (shifted(token), shifted(token + rows));
            let mut at = low;
            let mut i = runs.partition_point(|r| r.0 + r.1 <= low);
            while at < high {
                let (first, n, owner, owner_row, _) = runs[i];
                let end = high.min(first + n);
                if owner == rank || reader == rank {
                    let to = reader_row + (at as i64 - by) as usize - token;
                    out.push(ShiftMessage { owner, reader, from: owner_row + at - first, to, rows: end - at });
                }
                (at, i) = (end, i + 1);
            }
        }
        Ok(out)
    }
}

/// Rows whose values another rank's rows take, in a shift; see [`Plan::shift_messages`].
#[cfg_attr(not(feature = "std"), allow(dead_code, reason = "shifts and runs need std"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShiftMessage {
    /// The rank that holds the values.
    pub owner: usize,
    /// The rank that takes them; the owner itself for a copy.
    pub reader: usize,
    /// First of the owner's local rows.
    pub from: usize,
    /// First of the reader's local rows.
    pub to: usize,
    /// How many rows.
    pub rows: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, Dtype, Layout, Mesh, Problem};
    use alloc::{string::ToString, vec};
    use fastrand::Rng;

    fn any_layout(draw: &mut Rng) -> Layout {
        match draw.u32(..5) {
            0 => Layout::Contiguous,
            1 => Layout::Zigzag,
            2 => Layout::ZigzagPack,
            3 => Layout::Striped { stripe: draw.u32(1..6) },
            _ => Layout::Balanced { chunks: draw.u32(1..6) },
        }
    }

    fn any_plan(draw: &mut Rng) -> Plan {
        let length = |draw: &mut Rng| [0, draw.usize(..4), draw.usize(..40)][draw.usize(..3)];
        let lengths = |draw: &mut Rng| (0..draw.usize(..6)).map(|_| length(draw)).collect::<Vec<_>>();
        let (q, mut k) = (lengths(draw), lengths(draw));
        let batch = if draw.bool() {
            k.resize(q.len(), 5);
            let cu = |l: &[usize]| Batch::from_lengths(l).unwrap().cu_seqlens(Side::Q).to_vec();
            Batch::cross(&cu(&q), &cu(&k), None).unwrap()
        } else {
            Batch::from_lengths(&q).unwrap()
        };
        let problem = Problem::new(batch, 4, 2, 8, Dtype::F32);
        let mesh = Mesh { ring: draw.usize(1..5), ulysses: draw.usize(1..4), replicas: draw.usize(1..3) };
        Plan::new(&problem, mesh, any_layout(draw)).unwrap()
    }

    #[test]
    fn shards_put_back_are_the_whole() {
        for seed in 0..256 {
            let mut draw = Rng::with_seed(seed);
            let (plan, row_len) = (any_plan(&mut draw), draw.usize(..4));
            for side in [Side::Q, Side::K] {
                let tokens = plan.problem().batch().tokens(side);
                let full: Vec<u32> = (0..(tokens * row_len) as u32).collect();
                for replica in 0..plan.mesh().replicas {
                    let mut back = vec![u32::MAX; full.len()];
                    let mut written = 0;
                    for rank in plan.mesh().group_of(replica * plan.mesh().group()) {
                        let tokens = plan.local_tokens(side, rank);
                        let local = tokens.shard(&full, row_len).unwrap();
                        let mut again = vec![0; local.len()];
                        tokens.shard_into(&full, &mut again, row_len).unwrap();
                        assert_eq!(local, again, "seed {seed}");
                        let rows = tokens.indices().into_iter();
                        let want: Vec<u32> = rows.flat_map(|t| full[t * row_len..(t + 1) * row_len].to_vec()).collect();
                        assert_eq!(local, want, "seed {seed}");
                        tokens.unshard_into(&local, &mut back, row_len).unwrap();
                        written += local.len();
                    }
                    assert_eq!(back, full, "seed {seed}");
                    assert_eq!(written, full.len(), "seed {seed}");
                }
            }
        }
    }

    #[test]
    fn a_shift_stays_in_its_document() {
        for seed in 0..256 {
            let mut draw = Rng::with_seed(seed);
            let (plan, by) = (any_plan(&mut draw), draw.i64(-5..6));
            let (batch, group) = (plan.problem().batch(), plan.mesh().group_of(0));
            let full: Vec<i64> = (0..batch.tokens(Side::Q) as i64).map(|t| 1000 + t).collect();
            let shifted = |t: usize| {
                let s = t as i64 + by;
                let doc = batch.document(Side::Q, batch.document_of(Side::Q, t));
                if (doc.start as i64..doc.end as i64).contains(&s) { full[s as usize] } else { -1 }
            };
            let mut locals: Vec<Vec<i64>> = vec![];
            for rank in group.clone() {
                let tokens = plan.local_tokens(Side::Q, rank);
                let got = tokens.shift(&full, -1, by).unwrap();
                let want: Vec<i64> = tokens.indices().into_iter().map(shifted).collect();
                assert_eq!(got, want, "seed {seed}");
                locals.push(got);
            }
            // The same result by messages, from local values alone.
            let shards: Vec<_> =
                group.clone().map(|r| plan.local_tokens(Side::Q, r).shard(&full, 1).unwrap()).collect();
            let lists: Vec<_> = group.map(|r| plan.shift_messages(r, by).unwrap()).collect();
            for (rank, want) in locals.iter().enumerate() {
                let mut got = vec![-1; want.len()];
                for m in lists[rank].iter().filter(|m| m.reader == rank) {
                    got[m.to..m.to + m.rows].copy_from_slice(&shards[m.owner][m.from..m.from + m.rows]);
                }
                assert_eq!(&got, want, "seed {seed}");
                for peer in 0..shards.len() {
                    let of = |list: &[ShiftMessage]| {
                        list.iter().copied().filter(|m| m.owner == rank && m.reader == peer).collect::<Vec<_>>()
                    };
                    assert_eq!(of(&lists[rank]), of(&lists[peer]), "seed {seed}");
                }
            }
        }
    }

    #[test]
    fn wrong_lengths_and_ranks_are_named() {
        let problem = Problem::new(Batch::from_lengths(&[5, 3]).unwrap(), 2, 2, 4, Dtype::F32);
        let plan = Plan::new(&problem, Mesh::ring(2).unwrap(), Layout::Contiguous).unwrap();
        let text = |r: Result<()>| r.unwrap_err().to_string();
        assert_eq!(
            text(plan.local_tokens(Side::Q, 0).shard(&[0; 9], 1).map(drop)),
            "full is of length 9, expected 8: 1 for each of 8 tokens"
        );
        assert_eq!(
            text(plan.local_tokens(Side::Q, 1).shard_into(&[0; 16], &mut [0; 9], 2)),
            "local is of length 9, expected 8: 2 for each of 4 tokens of rank 1"
        );
        assert!(
            text(plan.local_tokens(Side::K, 1).unshard_into(&[0; 4], &mut [0; 7], 1)).contains("full is of length 7")
        );
        assert_eq!(
            text(plan.local_tokens(Side::Q, 2).shard(&[0; 8], 1).map(drop)),
            "rank is 2, expected below the world of 2"
        );
        assert_eq!(
            text(plan.local_tokens(Side::Q, 9).shift(&[0; 8], 0, 1).map(drop)),
            text(plan.shift_messages(9, 1).map(drop))
        );
        assert!(plan.local_tokens(Side::Q, 0).shard(&[0u8; 0], usize::MAX).is_err());
        assert_eq!(plan.local_tokens(Side::Q, 0).shift(&[0, 1, 2, 3, 4, 5, 6, 7], -9, i64::MAX).unwrap(), [-9; 4]);
        assert_eq!(plan.shift_messages(0, i64::MIN).unwrap(), []);
        // The document ends at token 5, in the middle of rank 1.
        assert_eq!(plan.local_tokens(Side::Q, 1).shift(&[0, 1, 2, 3, 4, 5, 6, 7], -9, 1).unwrap(), [-9, 6, 7, -9]);
    }
}
