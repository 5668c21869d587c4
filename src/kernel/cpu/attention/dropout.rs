// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which pairs of some lanes and a tile of keys are kept, and what becomes of their numbers: see
//! [`DropoutMask`](crate::call::DropoutMask).
//!
//! Four neighbouring tokens of k share one hash, so that a vector of lanes is hashed once for four keys of a tile if
//! its keys are neighbours, as they are in all layouts but stripes of fewer than four tokens. The hash is written as
//! loops over a few lanes, which the compiler makes vectors of. Nothing here is reached in a call without dropout.

use super::slots::Slots;
use super::tile::Lanes;
use crate::call::{Dropout, DropoutMask, MULTIPLIERS, QRange, ROUNDS, Ranges, WEYL};
use crate::element::Accumulator;
use crate::kernel::cpu::memory::arena::{Arena, KEYS, LANES_BACK};
use crate::kernel::cpu::vector::routine::Routine;
use crate::kernel::cpu::vector::simd::Vector;
use core::ops::Range;

/// Lanes that are hashed together: two of the widest vectors, so that one multiplies while the other waits.
const HASHED: usize = 16;
/// The most lanes of a tile.
const MOST: usize = LANES_BACK;
/// Bytes of the memory of one worker.
pub(crate) const BYTES: usize = KEYS * MOST + (2 * 4 + 4 * 8) * MOST;

/// The pairs of the current lanes and keys.
pub(crate) struct Kept<'a> {
    /// `[key][lane]`: 1 for a pair that is kept, 0 for one that is dropped.
    pairs: &'a mut [u8],
    /// The q token and the q head of each lane.
    rows: &'a mut [u32],
    heads: &'a mut [u32],
    /// `[k token modulo 4][lane]`: a word in the low half of each number.
    words: &'a mut [u64],
}

impl<'a> Kept<'a> {
    /// Memory for a call; none if it has no dropout.
    pub(crate) fn new(arena: &mut Arena<'a>, dropout: &Option<Dropout>) -> Self {
        let lanes = if dropout.is_some() { MOST } else { 0 };
        Self {
            pairs: arena.take(KEYS * lanes),
            rows: arena.take(lanes),
            heads: arena.take(lanes),
            words: arena.take(4 * lanes),
        }
    }

    /// Draws the pairs of `width` lanes from `first` on with some keys of a tile. The lanes are rows of `q`; `head` is
    /// the first q head of the call.
    ///
    /// # Safety
    /// The instruction set of `V` is present.
    #[inline(always)]
    pub(crate) unsafe fn draw<V: Vector>(
        &mut self,
        dropout: &Dropout,
        ranges: &Ranges,
        (q, head): (&QRange, u32),
        (lanes, first, width): (&Lanes<'a, V::T>, usize, usize),
        keys: &Slots<'a, V::T>,
        range: Range<usize>,
    ) {
        // SAFETY: the contract.
        unsafe { V::call(Draw { kept: self, dropout, ranges, q, head, lanes, first, width, keys, range }) }
    }

    /// Multiplies numbers of pairs, `[key][lane]` with keys `ld` apart, by `factor`; those of dropped pairs become 0.
    ///
    /// # Safety
    /// The instruction set of `V` is present; `x` has `width` numbers for each key of `range`, which [`Kept::draw`] was
    /// called for.
    #[inline(always)]
    pub(crate) unsafe fn apply<V: Vector>(
        &self,
        x: *mut V::T,
        ld: usize,
        range: Range<usize>,
        width: usize,
        factor: V::T,
    ) {
        // SAFETY: the contract.
        unsafe { V::call(Apply { kept: self, x, ld, range, width, factor }) }
    }
}

/// [`Kept::draw`].
struct Draw<'d, 'a, A> {
    kept: &'d mut Kept<'a>,
    dropout: &'d Dropout<'d>,
    ranges: &'d Ranges<'d>,
    q: &'d QRange,
    head: u32,
    lanes: &'d Lanes<'a, A>,
    first: usize,
    width: usize,
    keys: &'d Slots<'a, A>,
    range: Range<usize>,
}

impl<V: Vector> Routine<V> for Draw<'_, '_, V::T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self) {
        let Self { kept, dropout, ranges, q, head, lanes, first, width, keys, range } = self;
        debug_assert!(width <= MOST && width.is_multiple_of(4));
        let base = dropout.q_tokens[q.range.doc as usize];
        let mut l = 0;
        while l < width.next_multiple_of(HASHED) {
            // Lanes that are not used have some token of their range.
            let at = (first + l).min(lanes.n - 1);
            kept.rows[l] = (base + q.range.position((lanes.row[at] - q.range.row) as u32)) as u32;
            kept.heads[l] = head + lanes.head[at];
            l += 1;
        }
        let mut hashed = None;
        for j in range {
            let pairs = &mut kept.pairs[j * MOST..][..MOST];
            if keys.row[j] < 0 {
                continue;
            }
            let k = &ranges.k[keys.index[j] as usize];
            let token = k.position((keys.row[j] - k.row) as u32) + dropout.k_tokens[k.doc as usize];
            let four = (token >> 2) as u32;
            if hashed != Some(four) {
                hashed = Some(four);
                let mut l = 0;
                while l < width {
                    let rows: &[u32; HASHED] = kept.rows[l..l + HASHED].try_into().expect("as long");
                    let heads: &[u32; HASHED] = kept.heads[l..l + HASHED].try_into().expect("as long");
                    let words = hash(rows, four, heads, &dropout.mask);
                    let mut word = 0;
                    while word < 4 {
                        let to: &mut [u64; HASHED] =
                            (&mut kept.words[word * MOST + l..][..HASHED]).try_into().expect("as long");
                        *to = words[word];
                        word += 1;
                    }
                    l += HASHED;
                }
            }
            let (words, last) = (&kept.words[(token & 3) as usize * MOST..][..MOST], dropout.mask.last_dropped());
            let mut l = 0;
            while l < width {
                pairs[l] = u8::from(words[l] as u32 > last);
                l += 1;
            }
        }
    }
}

/// [`Kept::apply`].
struct Apply<'d, 'a, A> {
    kept: &'d Kept<'a>,
    x: *mut A,
    ld: usize,
    range: Range<usize>,
    width: usize,
    factor: A,
}

impl<V: Vector> Routine<V> for Apply<'_, '_, V::T> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self) {
        let Self { kept: all, x, ld, range, width, factor } = self;
        for j in range {
            let kept = &all.pairs[j * MOST..][..width];
            // SAFETY: the numbers of key j (the contract).
            let x = unsafe { core::slice::from_raw_parts_mut(x.add(j * ld), width) };
            let mut l = 0;
            while l < width {
                x[l] = if kept[l] != 0 { x[l] * factor } else { V::T::ZERO };
                l += 1;
            }
        }
    }
}

/// The four words of each lane with four neighbouring keys: Philox 4x32-10, as in `call/dropout.rs`. Words are the low
/// halves of 64-bit numbers, whose products vectors have.
#[inline(always)]
fn hash(rows: &[u32; HASHED], four: u32, heads: &[u32; HASHED], mask: &DropoutMask) -> [[u64; HASHED]; 4] {
    const LOW: u64 = 0xffff_ffff;
    let [mut a, mut b, mut c, mut d] = [[0u64; HASHED]; 4];
    let mut l = 0;
    while l < HASHED {
        (a[l], b[l], c[l], d[l]) = (rows[l].into(), four.into(), heads[l].into(), 0);
        l += 1;
    }
    let [mut k0, mut k1] = mask.key();
    let mut round = 0;
    while round < ROUNDS {
        let mut l = 0;
        while l < HASHED {
            let p = (a[l] & LOW) * u64::from(MULTIPLIERS[0]);
            let q = (c[l] & LOW) * u64::from(MULTIPLIERS[1]);
            a[l] = (q >> 32) ^ b[l] ^ u64::from(k0);
            c[l] = (p >> 32) ^ d[l] ^ u64::from(k1);
            b[l] = q;
            d[l] = p;
            l += 1;
        }
        (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
        round += 1;
    }
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_lanes_is_that_of_pairs() {
        let mask = DropoutMask::new(0.37, 0xfedc_ba98_7654_3210).unwrap();
        let rows = [0, 1, 77, u32::MAX, 1 << 31, 5, 5, 5, 6, 7, 8, 9, 10, 1 << 20, 1 << 30, 3];
        let heads = [0, 3, 65_535, 1, 2, 0, 1, 2, 0, 0, 0, 0, 1, 1, 1, 1];
        for four in [0, 1, 12_345, u32::MAX >> 2] {
            let words = hash(&rows, four, &heads, &mask);
            for l in 0..HASHED {
                for k in 0..4 {
                    let kept = words[k as usize][l] as u32 > mask.last_dropped();
                    assert_eq!(kept, mask.keeps(rows[l], 4 * four + k, heads[l]));
                }
            }
        }
    }
}
