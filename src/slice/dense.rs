// SPDX-License-Identifier: MIT OR Apache-2.0
//! The slices of a dense mask, for tests and small masks.

use alloc::{format, vec::Vec};
use core::ops::Range;

use super::Slice;
use crate::error::{Error, Result};

/// The most tokens of one side that [`from_dense`] takes.
pub const DENSE: usize = 4096;

/// The slices of a dense mask, row by row: entry `q · k_tokens + k` says whether query `q` attends to key `k`.
///
/// For tests and small masks. Runs of keys of consecutive queries are one slice as long as their ends stay, or move by
/// one key a query, in the order that a band has: the first key stays, then moves; the last key moves, then stays.
/// Positions count in the batch, so distances are those of token numbers.
///
/// ```
/// use cpattn::slices::{DENSE, from_dense};
///
/// // Two documents of two tokens and one, causal.
/// let mask = [[true, false, false], [true, true, false], [false, false, true]].concat();
/// assert_eq!(from_dense(&mask, 3)?.len(), 2);
/// assert!(from_dense(&vec![true; DENSE + 1], 1).is_err());
/// # Ok::<(), cpattn::Error>(())
/// ```
///
/// # Errors
///
/// More than [`DENSE`] tokens on a side, and a list of another length.
pub fn from_dense(mask: &[bool], k_tokens: usize) -> Result<Vec<Slice>> {
    let q_tokens = mask.len().checked_div(k_tokens).unwrap_or(0);
    if q_tokens * k_tokens != mask.len() {
        let expected = format!("a multiple of {k_tokens}, the tokens of k");
        return Err(Error::invalid("mask", format!("of length {}", mask.len()), expected));
    }
    for (name, n) in [("q tokens of the mask", q_tokens), ("k tokens of the mask", k_tokens)] {
        if n > DENSE {
            return Err(Error::invalid(name, n, format!("at most {DENSE}")).hint("make the slices themselves"));
        }
    }
    let (mut done, mut open): (Vec<Slice>, Vec<Growing>) = (Vec::new(), Vec::new());
    for q in 0..q_tokens {
        let row = &mask[q * k_tokens..(q + 1) * k_tokens];
        let mut next = Vec::new();
        let mut k = 0;
        while k < k_tokens {
            let keys = row[k..].iter().take_while(|&&x| x == row[k]).count();
            if row[k] {
                let continued = open.iter().position(|s| s.clone().grow(k, k + keys).is_some());
                next.push(match continued {
                    Some(i) => open.swap_remove(i).grow(k, k + keys).unwrap_or_else(|| Growing::new(q, k, k + keys)),
                    None => Growing::new(q, k, k + keys),
                });
            }
            k += keys;
        }
        done.extend(open.drain(..).map(|s| s.slice(q)));
        open = next;
    }
    done.extend(open.into_iter().map(|s| s.slice(q_tokens)));
    done.sort_by_key(|s| (s.q_begin, s.k_begin));
    Ok(done)
}

/// A slice of consecutive queries while rows are added.
#[derive(Clone)]
struct Growing {
    q_begin: usize,
    /// The first keys of the first query, and those of the last one.
    first: Range<usize>,
    last: Range<usize>,
    /// Whether the first key has begun to move, and whether the last one has stayed.
    moved: bool,
    stayed: bool,
}

impl Growing {
    fn new(q: usize, begin: usize, end: usize) -> Self {
        Self { q_begin: q, first: begin..end, last: begin..end, moved: false, stayed: false }
    }

    /// The slice with one more query that has these keys, if a band allows them.
    fn grow(mut self, begin: usize, end: usize) -> Option<Self> {
        match begin.checked_sub(self.last.start)? {
            0 if !self.moved => {}
            1 => self.moved = true,
            _ => return None,
        }
        match end.checked_sub(self.last.end)? {
            0 => self.stayed = true,
            1 if !self.stayed => {}
            _ => return None,
        }
        self.last = begin..end;
        Some(self)
    }

    /// The slice, whose queries end before `q_end`.
    fn slice(self, q_end: usize) -> Slice {
        let (keys, queries) = (self.first.start..self.last.end, q_end - self.q_begin);
        // Distances from the first query, which is at the position of its token.
        let shift = keys.start as i64 - self.q_begin as i64;
        let slice = Slice::new(self.q_begin..q_end, keys.clone()).q_start(-shift);
        let last_query = (q_end - 1) as i64;
        let low = if self.moved { self.last.start as i64 - last_query } else { i64::MIN };
        let grows = queries > 1 && self.first.end < keys.end;
        let high = if grows { self.first.end as i64 - 1 - self.q_begin as i64 } else { i64::MAX };
        slice.band(low, high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slice::makers::documents;

    fn dense(slices: &[Slice], q: usize, k: usize) -> Vec<bool> {
        (0..q * k).map(|i| slices.iter().filter(|s| s.allows(i / k, i % k)).count() == 1).collect()
    }

    #[test]
    fn dense_masks_are_found_again_in_few_bands() {
        let mut draw = fastrand::Rng::with_seed(5);
        for _ in 0..2000 {
            let (q, k) = (draw.usize(1..9), draw.usize(1..9));
            let mask: Vec<bool> = (0..q * k).map(|_| draw.bool()).collect();
            let slices = from_dense(&mask, k).unwrap();
            assert_eq!(dense(&slices, q, k), mask, "{slices:?}");
        }
        let window = Slice::new(0..40, 0..40).band(-3, 0);
        let found = from_dense(&dense(&[window], 40, 40), 40).unwrap();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(from_dense(&dense(&documents(&[0, 9, 40]), 40, 40), 40).unwrap().len(), 2);
    }
}
