// SPDX-License-Identifier: MIT OR Apache-2.0
//! Extracts a rank's rows from tensors of the whole batch, and writes them back.
//!
//! Inputs and outputs of a rank are the tokens that the layout gives it, with all heads. These helpers copy rows of any
//! `Copy` type by that layout, so that a data loader, a test or a checkpoint does not have to know the layout: token
//! ids (`row_len` 1), activations (`heads · head_dim`), gradients, losses.
//!
//! [`Plan::shift`] gives each token the value of the token `by` places later in its document; with 1, that is the label
//! for next-token prediction. Neighbours in a document are often on different ranks, and neighbours in a shard are
//! often of different documents, so shifting the shard itself would be wrong at almost every boundary.

use alloc::{format, vec::Vec};
use core::ops::Range;

use super::Plan;
use crate::{
    batch::Side,
    error::{Error, Result},
    layout::Segment,
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

impl Plan {
    fn check_rank(&self, rank: usize) -> Result<()> {
        let world = self.mesh().world();
        if rank >= world {
            return Err(Error::invalid("rank", rank, format!("below the world of {world}")));
        }
        Ok(())
    }

    fn check_full(&self, side: Side, found: usize, row_len: usize) -> Result<()> {
        check_len("full", found, self.problem().batch().tokens(side), row_len, "")
    }

    /// Checks the tensors of a copy between the whole batch and a rank, and calls `each` with the places of each run in
    /// the values of both.
    fn for_each_copy(
        &self,
        side: Side,
        rank: usize,
        [full, local]: [usize; 2],
        row_len: usize,
        mut each: impl FnMut(Range<usize>, Range<usize>),
    ) -> Result<()> {
        self.check_rank(rank)?;
        self.check_full(side, full, row_len)?;
        check_len("local", local, self.local_tokens(side, rank), row_len, &format!(" of rank {rank}"))?;
        let values = |first: usize, rows: usize| first * row_len..(first + rows) * row_len;
        self.for_each_run(side, rank, |row, token, rows, _| each(values(token, rows), values(row, rows)));
        Ok(())
    }

    /// Calls `each(local row, first global token, rows, document)` for each sequence of a rank's tokens that is
    /// contiguous in the packed batch, in the rank's order.
    ///
    /// # Panics
    /// A rank outside the mesh.
    pub fn for_each_run(&self, side: Side, rank: usize, mut each: impl FnMut(usize, usize, usize, usize)) {
        let rows = self.local_rows(side, rank);
        let mut segments: Vec<Segment> = Vec::new();
        self.shares().segments(side, self.mesh().coordinates(rank).ring, &mut segments);
        let batch = self.problem().batch();
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

    /// A rank's rows of `full`, a tensor of all tokens of one side: `[tokens, row_len]`, compact. The result is
    /// `[local tokens, row_len]` in the rank's order.
    ///
    /// # Errors
    /// A rank outside the mesh, and a `full` whose length is not `tokens · row_len`.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, Side};
    /// let problem = Problem::new(Batch::from_lengths(&[8])?, 2, 2, 4, Dtype::F32);
    /// let plan = Plan::new(&problem, Mesh::ring(2)?, Layout::Zigzag)?;
    /// let ids = [10, 11, 12, 13, 14, 15, 16, 17];
    /// assert_eq!(plan.shard(Side::Q, 0, &ids, 1)?, [10, 11, 16, 17]);
    /// assert_eq!(plan.shift(0, &ids, -100, 1)?, [11, 12, 17, -100]);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn shard<T: Copy>(&self, side: Side, rank: usize, full: &[T], row_len: usize) -> Result<Vec<T>> {
        self.check_rank(rank)?;
        self.check_full(side, full.len(), row_len)?;
        let mut local = Vec::with_capacity(self.local_tokens(side, rank) * row_len);
        self.for_each_run(side, rank, |_, token, rows, _| {
            local.extend_from_slice(&full[token * row_len..(token + rows) * row_len]);
        });
        Ok(local)
    }

    /// As [`Plan::shard`], into the caller's memory: `[local tokens, row_len]`.
    ///
    /// # Errors
    /// Those of [`Plan::shard`], and a `local` whose length is not `local tokens · row_len`. Nothing is written then.
    pub fn shard_into<T: Copy>(
        &self,
        side: Side,
        rank: usize,
        full: &[T],
        local: &mut [T],
        row_len: usize,
    ) -> Result<()> {
        self.for_each_copy(side, rank, [full.len(), local.len()], row_len, |of_full, of_local| {
            local[of_local].copy_from_slice(&full[of_full]);
        })
    }

    /// Writes a rank's rows to their places in `full`; the rows of other ranks are not changed. Over all ranks of a
    /// group every row of `full` is written exactly once.
    ///
    /// # Errors
    /// Those of [`Plan::shard_into`]. Nothing is written then.
    pub fn unshard_into<T: Copy>(
        &self,
        side: Side,
        rank: usize,
        local: &[T],
        full: &mut [T],
        row_len: usize,
    ) -> Result<()> {
        self.for_each_copy(side, rank, [full.len(), local.len()], row_len, |of_full, of_local| {
            full[of_full].copy_from_slice(&local[of_local]);
        })
    }

    /// For each of a rank's q tokens, the value of the token `by` places on in the same document (back, when `by` is
    /// negative), and `fill` where the document has none. `full` holds one value for each q token of the batch.
    ///
    /// With `by` 1 and `fill` the loss function's ignore index these are the labels of next-token prediction.
    ///
    /// # Errors
    /// A rank outside the mesh, and a `full` whose length is not the number of q tokens.
    pub fn shift<T: Copy>(&self, rank: usize, full: &[T], fill: T, by: i64) -> Result<Vec<T>> {
        self.check_full(Side::Q, full.len(), 1)?;
        let mut out = Vec::new();
        self.for_each_shifted(rank, by, |token| out.push(token.map_or(fill, |t| full[t])))?;
        Ok(out)
    }

    /// Calls `each` for every q token a rank holds, in its order, with the token `by` places on in the same document,
    /// if there is one: the indices that [`Plan::shift`] reads at.
    ///
    /// # Errors
    /// A rank outside the mesh.
    pub fn for_each_shifted(&self, rank: usize, by: i64, mut each: impl FnMut(Option<usize>)) -> Result<()> {
        self.check_rank(rank)?;
        let batch = self.problem().batch();
        self.for_each_run(Side::Q, rank, |_, token, rows, doc| {
            let doc = batch.document(Side::Q, doc);
            for token in token..token + rows {
                let at = (token as i64).checked_add(by).and_then(|t| usize::try_from(t).ok());
                each(at.filter(|t| doc.contains(t)));
            }
        });
        Ok(())
    }

    /// [`Plan::shift`] if no rank holds the whole tensor: the rows that each rank sends to each other rank.
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
            self.for_each_run(Side::Q, r, |row, token, rows, doc| runs.push((token, rows, r, row, doc)));
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
    use proptest::prelude::*;

    fn layouts() -> impl Strategy<Value = Layout> {
        prop_oneof![
            Just(Layout::Contiguous),
            Just(Layout::Zigzag),
            Just(Layout::ZigzagPack),
            (1u32..6).prop_map(|stripe| Layout::Striped { stripe }),
            (1u32..6).prop_map(|chunks| Layout::Balanced { chunks }),
        ]
    }

    fn plans() -> impl Strategy<Value = Plan> {
        let lengths = || proptest::collection::vec(prop_oneof![Just(0usize), 0usize..4, 0usize..40], 0..6);
        (lengths(), lengths(), any::<bool>(), layouts(), 1usize..5, 1usize..4, 1usize..3).prop_map(
            |(q, mut k, cross, layout, ring, ulysses, replicas)| {
                let batch = if cross {
                    k.resize(q.len(), 5);
                    let cu = |l: &[usize]| Batch::from_lengths(l).unwrap().cu_seqlens(Side::Q).to_vec();
                    Batch::cross(&cu(&q), &cu(&k), None).unwrap()
                } else {
                    Batch::from_lengths(&q).unwrap()
                };
                let problem = Problem::new(batch, 4, 2, 8, Dtype::F32);
                Plan::new(&problem, Mesh { replicas, ring, ulysses }, layout).unwrap()
            },
        )
    }

    proptest! {
        #[test]
        fn shards_put_back_are_the_whole(plan in plans(), row_len in 0usize..4) {
            for side in [Side::Q, Side::K] {
                let tokens = plan.problem().batch().tokens(side);
                let full: Vec<u32> = (0..(tokens * row_len) as u32).collect();
                for replica in 0..plan.mesh().replicas {
                    let mut back = vec![u32::MAX; full.len()];
                    let mut written = 0;
                    for rank in plan.mesh().group_of(replica * plan.mesh().group()) {
                        let local = plan.shard(side, rank, &full, row_len).unwrap();
                        let mut again = vec![0; local.len()];
                        plan.shard_into(side, rank, &full, &mut again, row_len).unwrap();
                        prop_assert_eq!(&local, &again);
                        let tokens = plan.token_indices(side, rank);
                        let want: Vec<u32> = tokens.iter().flat_map(|t| full[t * row_len..(t + 1) * row_len].to_vec()).collect();
                        prop_assert_eq!(&local, &want);
                        plan.unshard_into(side, rank, &local, &mut back, row_len).unwrap();
                        written += local.len();
                    }
                    prop_assert_eq!(&back, &full);
                    prop_assert_eq!(written, full.len());
                }
            }
        }

        #[test]
        fn a_shift_stays_in_its_document(plan in plans(), by in -5i64..6) {
            let batch = plan.problem().batch();
            let full: Vec<i64> = (0..batch.tokens(Side::Q) as i64).map(|t| 1000 + t).collect();
            let mut locals: Vec<Vec<i64>> = vec![];
            for rank in plan.mesh().group_of(0) {
                let got = plan.shift(rank, &full, -1, by).unwrap();
                let want: Vec<i64> = plan
                    .token_indices(Side::Q, rank)
                    .into_iter()
                    .map(|t| {
                        let s = t as i64 + by;
                        let doc = batch.document(Side::Q, batch.document_of(Side::Q, t));
                        if (doc.start as i64..doc.end as i64).contains(&s) { full[s as usize] } else { -1 }
                    })
                    .collect();
                prop_assert_eq!(&got, &want);
                locals.push(got);
            }
            // The same result by messages, from local values alone.
            let shards: Vec<_> = plan.mesh().group_of(0).map(|r| plan.shard(Side::Q, r, &full, 1).unwrap()).collect();
            let lists: Vec<_> = plan.mesh().group_of(0).map(|r| plan.shift_messages(r, by).unwrap()).collect();
            for (rank, want) in locals.iter().enumerate() {
                let mut got = vec![-1; want.len()];
                for m in lists[rank].iter().filter(|m| m.reader == rank) {
                    got[m.to..m.to + m.rows].copy_from_slice(&shards[m.owner][m.from..m.from + m.rows]);
                }
                prop_assert_eq!(&got, want);
                for peer in 0..shards.len() {
                    let of = |list: &[ShiftMessage]| {
                        list.iter().copied().filter(|m| m.owner == rank && m.reader == peer).collect::<Vec<_>>()
                    };
                    prop_assert_eq!(of(&lists[rank]), of(&lists[peer]));
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
            text(plan.shard(Side::Q, 0, &[0; 9], 1).map(drop)),
            "full is of length 9, expected 8: 1 for each of 8 tokens"
        );
        assert_eq!(
            text(plan.shard_into(Side::Q, 1, &[0; 16], &mut [0; 9], 2)),
            "local is of length 9, expected 8: 2 for each of 4 tokens of rank 1"
        );
        assert!(text(plan.unshard_into(Side::K, 1, &[0; 4], &mut [0; 7], 1)).contains("full is of length 7"));
        assert_eq!(text(plan.shard(Side::Q, 2, &[0; 8], 1).map(drop)), "rank is 2, expected below the world of 2");
        assert_eq!(text(plan.shift(9, &[0; 8], 0, 1).map(drop)), text(plan.shift_messages(9, 1).map(drop)));
        assert!(plan.shard(Side::Q, 0, &[0u8; 0], usize::MAX).is_err());
        assert_eq!(plan.shift(0, &[0, 1, 2, 3, 4, 5, 6, 7], -9, i64::MAX).unwrap(), [-9; 4]);
        assert_eq!(plan.shift_messages(0, i64::MIN).unwrap(), []);
        // The document ends at token 5, in the middle of rank 1.
        assert_eq!(plan.shift(1, &[0, 1, 2, 3, 4, 5, 6, 7], -9, 1).unwrap(), [-9, 6, 7, -9]);
    }
}
