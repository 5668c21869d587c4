// SPDX-License-Identifier: MIT OR Apache-2.0
//! Packed documents.
//!
//! A batch is a sequence of documents without padding between them, described by `cu_seqlens` as in FlashAttention:
//! `n + 1` non-decreasing `i32`, the first 0. q and k usually have the same documents. If they differ (cross-attention,
//! a prefix computed earlier), `q_start` gives the *position* of each document's first q token; by default q is aligned
//! to the bottom right, so that the last q is aligned with the last k.

use alloc::{format, sync::Arc, vec::Vec};

use crate::{
    call,
    error::{Error, Result},
    mask::Mask,
    slice::{
        Slice,
        parts::{Allowed, DocumentEnds, Parts},
    },
};

pub use crate::side::Side;

/// Documents of one packed batch. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Batch {
    cu_q: Arc<[i32]>,
    cu_k: Arc<[i32]>,
    q_start: Option<Arc<[i64]>>,
    /// The slices, cut at documents; without them each document attends to itself.
    parts: Option<Arc<Parts>>,
}

fn check(name: &'static str, cu: &[i32]) -> Result<()> {
    let first =
        *cu.first().ok_or_else(|| Error::invalid(name, "empty", "n + 1 entries for n documents, the first 0"))?;
    if first != 0 {
        return Err(Error::invalid(format!("{name}[0]"), first, 0)
            .hint("these are offsets, not lengths: 0, then the end of each document"));
    }
    for (i, pair) in cu.windows(2).enumerate() {
        if pair[1] < pair[0] {
            return Err(Error::invalid(
                format!("{name}[{}]", i + 1),
                pair[1],
                format!("at least {name}[{i}] = {}", pair[0]),
            ));
        }
    }
    Ok(())
}

impl Batch {
    /// Documents in which q and k are the same tokens.
    pub fn new(cu_seqlens: &[i32]) -> Result<Self> {
        check("cu_seqlens", cu_seqlens)?;
        let cu: Arc<[i32]> = cu_seqlens.into();
        Ok(Self { cu_k: cu.clone(), cu_q: cu, q_start: None, parts: None })
    }

    /// Documents with different q and k. `q_start[d]` is the position of document `d`'s first q token among its k
    /// tokens; without it, `len_k − len_q` (which may be negative).
    ///
    /// A document without keys, or without queries, can be used as padding: for equal shapes in every step, append one
    /// document that has only the spare q rows, and one that has only the spare k rows. No other row attends to them.
    /// If they hold finite numbers, their o, dq, dk and dv are 0 and their lse is −∞. They cost no multiply-adds.
    ///
    /// ```
    /// // Two documents of 9 and 6 tokens in tensors of 20 q rows and 18 k rows.
    /// let padded = cpattn::Batch::cross(&[0, 9, 15, 20, 20], &[0, 9, 15, 15, 18], None)?;
    /// assert_eq!((padded.documents(), padded.tokens(cpattn::Side::Q), padded.tokens(cpattn::Side::K)), (4, 20, 18));
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn cross(cu_seqlens_q: &[i32], cu_seqlens_k: &[i32], q_start: Option<&[i64]>) -> Result<Self> {
        check("cu_seqlens_q", cu_seqlens_q)?;
        check("cu_seqlens_k", cu_seqlens_k)?;
        if cu_seqlens_q.len() != cu_seqlens_k.len() {
            return Err(Error::invalid(
                "cu_seqlens_k",
                format!("of length {}", cu_seqlens_k.len()),
                format!("{}, the length of cu_seqlens_q", cu_seqlens_q.len()),
            ));
        }
        if let Some(starts) = q_start {
            if starts.len() + 1 != cu_seqlens_q.len() {
                return Err(Error::invalid(
                    "q_start",
                    format!("of length {}", starts.len()),
                    format!("{}: one for each document", cu_seqlens_q.len() - 1),
                ));
            }
            if let Some((d, &start)) = starts.iter().enumerate().find(|(_, s)| s.unsigned_abs() > 1 << 40) {
                return Err(Error::invalid(format!("q_start[{d}]"), start, "a position within ±2^40"));
            }
        }
        let q_start = q_start.map(Into::into);
        Ok(Self { cu_q: cu_seqlens_q.into(), cu_k: cu_seqlens_k.into(), q_start, parts: None })
    }

    /// Documents of the given lengths.
    pub fn from_lengths(lengths: &[usize]) -> Result<Self> {
        let mut cu = Vec::with_capacity(lengths.len() + 1);
        let mut total = 0i32;
        cu.push(0);
        for (d, &n) in lengths.iter().enumerate() {
            total = i32::try_from(n).ok().and_then(|n| total.checked_add(n)).ok_or_else(|| {
                Error::invalid(format!("lengths[{d}]"), n, "a total of at most 2147483647 tokens (cu_seqlens is i32)")
            })?;
            cu.push(total);
        }
        Self::new(&cu)
    }

    /// The same tokens and documents, of which queries attend to what `slices` say, and to nothing else. Documents are
    /// then what layouts cut and what positions of tokens
    /// ([`LocalTokens::positions`](crate::plan::LocalTokens::positions)) count in. Replaces slices given before.
    ///
    /// The mask of the [`Problem`](crate::Problem) applies inside every slice, by its positions. A problem with slices
    /// begins with [`Mask::full`](crate::Mask::full): the bands of the slices are the mask.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`](crate::Error::Invalid) for tokens outside the batch, a `q_start` beyond ±2^40, and two slices
    /// that allow the same pair, which it names. A slice that allows no pair is legal. More than 2^24 pairs of
    /// documents that slices touch.
    ///
    /// Slices that share queries are compared with each other, so thousands over the same queries take a second.
    ///
    /// ```
    /// use cpattn::{Batch, Slice};
    /// // A prefix of 3 tokens that see each other, in one document of 8.
    /// let prefix = [Slice::new(0..3, 0..3), Slice::new(3..8, 0..8).causal()];
    /// let batch = Batch::new(&[0, 8])?.with_slices(&prefix)?;
    /// assert_eq!(batch.slices(), Some(&prefix[..]));
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    pub fn with_slices(mut self, slices: &[Slice]) -> Result<Self> {
        let ends = DocumentEnds { cu_seqlens: [&self.cu_q, &self.cu_k], q_start: &|d| self.start(Side::Q, d) };
        self.parts = Some(Arc::new(Parts::new(&ends, slices)?));
        Ok(self)
    }

    /// The same tokens and documents, each of which attends to itself.
    pub(crate) fn without_slices(&self) -> Self {
        Self { parts: None, ..self.clone() }
    }

    /// The slices, if they were given.
    pub fn slices(&self) -> Option<&[Slice]> {
        self.parts.as_deref().map(Parts::slices)
    }

    /// The pairs that are computed under a mask.
    pub(crate) fn allowed(&self, mask: Mask) -> Allowed {
        Allowed::new(self.parts.clone(), mask)
    }

    /// How many documents there are, empty ones included.
    pub fn documents(&self) -> usize {
        self.cu_q.len() - 1
    }

    /// `cu_seqlens_q` or `cu_seqlens_k`.
    pub fn cu_seqlens(&self, side: Side) -> &[i32] {
        match side {
            Side::Q => &self.cu_q,
            Side::K => &self.cu_k,
        }
    }

    /// The number of tokens of one side.
    pub fn tokens(&self, side: Side) -> usize {
        self.cu_seqlens(side).last().map_or(0, |&n| n as usize)
    }

    /// The tokens of a document, as a range of the packed batch.
    pub fn document(&self, side: Side, d: usize) -> core::ops::Range<usize> {
        let cu = self.cu_seqlens(side);
        cu[d] as usize..cu[d + 1] as usize
    }

    /// All tokens of a document, with their positions, as rows from 0 on.
    pub(crate) fn whole(&self, side: Side, d: usize) -> call::Range {
        call::Range::plain(0, self.document(side, d).len() as u32, self.start(side, d), d as u32)
    }

    /// The position of a document's first token: 0 for k, `q_start` for q.
    pub fn start(&self, side: Side, d: usize) -> i64 {
        match side {
            Side::K => 0,
            Side::Q => match &self.q_start {
                Some(starts) => starts[d],
                None => self.document(Side::K, d).len() as i64 - self.document(Side::Q, d).len() as i64,
            },
        }
    }

    /// The document that holds a token of the packed batch. Empty documents hold none.
    pub fn document_of(&self, side: Side, token: usize) -> usize {
        self.cu_seqlens(side).partition_point(|&c| c as usize <= token) - 1
    }

    /// As [`Batch::document_of`], for a token in document `from` or a later one: fast if it is near `from`.
    pub(crate) fn document_from(&self, side: Side, from: usize, token: usize) -> usize {
        document_from(self.cu_seqlens(side), from, token as i64)
    }

    /// Whether tokens and documents are those of another batch, whatever attends to what.
    pub(crate) fn has_documents_of(&self, other: &Self) -> bool {
        (&self.cu_q, &self.cu_k, &self.q_start) == (&other.cu_q, &other.cu_k, &other.q_start)
    }

    /// Whether q and k are the same tokens at the same positions.
    pub fn is_self_attention(&self) -> bool {
        self.cu_q == self.cu_k && self.q_start.as_ref().is_none_or(|s| s.iter().all(|&x| x == 0))
    }

    pub(crate) fn explicit_starts(&self) -> Option<&[i64]> {
        self.q_start.as_deref()
    }
}

/// As [`Batch::document_from`], of documents by their ends.
pub(crate) fn document_from(cu_seqlens: &[i32], from: usize, token: i64) -> usize {
    let rest = &cu_seqlens[from + 1..];
    let (token, mut step) = (token as i32, 1);
    // Doubling steps, then a binary search in the last step.
    while step <= rest.len() && rest[step - 1] <= token {
        step *= 2;
    }
    let low = step / 2;
    from + low + rest[low..rest.len().min(step)].partition_point(|&c| c <= token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn refusals_name_the_entry_and_both_values() {
        let text = |r: Result<Batch>| r.unwrap_err().to_string();
        assert_eq!(
            text(Batch::new(&[1, 2])),
            "cu_seqlens[0] is 1, expected 0; these are offsets, not lengths: 0, then the end of each document"
        );
        assert_eq!(text(Batch::new(&[0, 5, 3])), "cu_seqlens[2] is 3, expected at least cu_seqlens[1] = 5");
        assert!(text(Batch::new(&[])).starts_with("cu_seqlens is empty"));
        assert!(
            text(Batch::cross(&[0, 1], &[0, 1, 2], None))
                .contains("is of length 3, expected 2, the length of cu_seqlens_q")
        );
        assert!(
            text(Batch::cross(&[0, 1], &[0, 1], Some(&[0, 0]))).contains("q_start is of length 2, expected 1: one")
        );
        assert!(text(Batch::from_lengths(&[usize::MAX])).contains("2147483647"));
    }

    #[test]
    fn empty_documents_hold_no_token() {
        let b = Batch::new(&[0, 0, 3, 3, 3, 5, 5]).unwrap();
        assert_eq!((0..5).map(|t| b.document_of(Side::Q, t)).collect::<Vec<_>>(), [1, 1, 1, 4, 4]);
        assert_eq!(b.documents(), 6);
        for token in 0..5 {
            let d = b.document_of(Side::Q, token);
            (0..=d).for_each(|from| assert_eq!(b.document_from(Side::Q, from, token), d, "{token} from {from}"));
        }
    }

    #[test]
    fn q_is_aligned_to_the_bottom_right() {
        let b = Batch::cross(&[0, 2, 6], &[0, 5, 6], None).unwrap();
        assert_eq!((b.start(Side::Q, 0), b.start(Side::Q, 1), b.start(Side::K, 1)), (3, -3, 0));
    }
}
