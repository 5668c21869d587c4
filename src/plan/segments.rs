// SPDX-License-Identifier: MIT OR Apache-2.0
//! The segments of a rank's tokens: what a recurrent layer runs over without a break.
//!
//! A recurrent layer carries a state from token to token. Where the next row of a rank is not the next token of the
//! same document, the state ends; what it was there belongs to whoever holds the next token. So the unit of a state
//! that travels is a segment: consecutive tokens of one document in consecutive rows of one rank.

use alloc::vec::Vec;

use super::LocalTokens;
use crate::batch::Side;

/// Consecutive tokens of one document, in consecutive rows of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSegment {
    /// First of the rank's rows.
    pub row: usize,
    /// First token of the packed batch.
    pub token: usize,
    /// How many tokens.
    pub tokens: usize,
    /// The document.
    pub document: usize,
    /// Position of the first token in its document.
    pub position: i64,
}

impl LocalTokens<'_> {
    /// The rank's segments in the order of its rows: each as long as the tokens of consecutive rows follow one another
    /// in one document. Together they are all of the rank's tokens.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, Side};
    /// let problem = Problem::new(Batch::from_lengths(&[3, 5])?, 2, 2, 4, Dtype::F32);
    /// let plan = Plan::new(&problem, Mesh::ring(2)?, Layout::Contiguous)?;
    /// let of = |rank| plan.local_tokens(Side::Q, rank).segments();
    /// let ends = |rank| of(rank).iter().map(|s| (s.document, s.position, s.tokens)).collect::<Vec<_>>();
    /// assert_eq!((ends(0), ends(1)), (vec![(0, 0, 3), (1, 0, 1)], vec![(1, 1, 4)]));
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Panics
    /// If the rank is not in the mesh.
    pub fn segments(&self) -> Vec<TokenSegment> {
        let batch = self.plan().problem().batch();
        let side: Side = self.side();
        let mut list: Vec<TokenSegment> = Vec::new();
        self.for_each_run(|row, token, tokens, document| match list.last_mut() {
            Some(s) if s.document == document && s.token + s.tokens == token => s.tokens += tokens,
            _ => {
                let begin = batch.document(side, document).start;
                let position = (token - begin) as i64 + batch.start(side, document);
                list.push(TokenSegment { row, token, tokens, document, position });
            }
        });
        list
    }
}
