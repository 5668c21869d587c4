// SPDX-License-Identifier: MIT OR Apache-2.0
//! Dropout of attention probabilities by a hash, so that every mesh, layout and kernel drops the same pairs.
//!
//! A pair is identified by the places of its two tokens in the packed batch, and by its q head in the whole problem.
//! These are the same on every rank, and different for any two pairs of a call: a token's place says its document and
//! its position. They are the counter of Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, Parallel Random Numbers, 2011),
//! and the seed is its key:
//!
//! | word | counter |
//! |---|---|
//! | 0 | the q token, from 0 |
//! | 1 | the k token divided by 4, rounded down |
//! | 2 | the q head |
//! | 3 | 0 |
//!
//! The key is the seed's low 32 bits, then its high ones. Of the four words that result, the one whose number is the
//! k token modulo 4 decides: the pair is dropped if it is below `probability · 2^32`. No word is shortened: a batch has
//! at most 2^31 tokens. Do not change this: a mask that was drawn in a forward is drawn again in its backward, perhaps
//! by another version of a kernel.

use alloc::format;

use crate::error::{Error, Result};

/// Which pairs of a call are dropped: a probability and a seed.
///
/// ```
/// use cpattn::call::DropoutMask;
/// let mask = DropoutMask::new(0.25, 7)?;
/// // Whether q token 3 keeps k token 2 in q head 1 of the whole problem.
/// let kept = mask.keeps(3, 2, 1);
/// assert_eq!(kept, DropoutMask::new(0.25, 7)?.keeps(3, 2, 1));
/// assert_eq!((mask.probability(), mask.factor()), (0.25, 4.0 / 3.0));
/// # Ok::<(), cpattn::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutMask {
    probability: f64,
    /// Words up to this one drop.
    last_dropped: u32,
    key: [u32; 2],
}

impl DropoutMask {
    /// The mask of a probability above 0 and below 1, and a seed.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another probability.
    pub fn new(probability: f64, seed: u64) -> Result<Self> {
        check_probability(probability)?;
        if probability == 0.0 {
            return Err(Error::invalid("dropout", probability, "above 0").hint("leave it out for none"));
        }
        // Exact: a power of two. A word below the product is at most its ceiling less 1.
        let scaled = probability * 4_294_967_296.0;
        let floor = scaled as u64;
        let dropped = floor + u64::from((floor as f64) < scaled);
        let last_dropped = (dropped - 1) as u32;
        Ok(Self { probability, last_dropped, key: [0; 2] }.with_seed(seed))
    }

    /// Whether a pair is kept: tokens of the packed batch, and a q head of the whole problem.
    pub const fn keeps(&self, q_token: u32, k_token: u32, head: u32) -> bool {
        philox([q_token, k_token >> 2, head, 0], self.key)[(k_token & 3) as usize] > self.last_dropped
    }

    /// The probability with which a pair is dropped.
    pub const fn probability(&self) -> f64 {
        self.probability
    }

    /// `1 / (1 − probability)`: the factor of pairs that are kept.
    pub const fn factor(&self) -> f64 {
        1.0 / (1.0 - self.probability)
    }

    /// The same probability with another seed.
    #[must_use]
    pub const fn with_seed(self, seed: u64) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], ..self }
    }

    /// Words up to this one drop; those above keep.
    #[cfg_attr(not(feature = "std"), allow(dead_code, reason = "kernels need std"))]
    pub(crate) const fn last_dropped(&self) -> u32 {
        self.last_dropped
    }

    /// The key of Philox.
    #[cfg_attr(not(feature = "std"), allow(dead_code, reason = "kernels need std"))]
    pub(crate) const fn key(&self) -> [u32; 2] {
        self.key
    }
}

/// Refuses a probability that is not from 0 up to, but not including, 1.
pub(crate) fn check_probability(probability: f64) -> Result<()> {
    if (0.0..1.0).contains(&probability) {
        return Ok(());
    }
    Err(Error::invalid("dropout", format!("{probability:?}"), "a probability from 0 up to, but not including, 1"))
}

/// The dropout of a call: the mask, and where the tokens of its ranges are in the packed batch.
///
/// A token at position `pos` of document `doc` is token `pos + q_tokens[doc]` of q, or `pos + k_tokens[doc]` of k.
#[derive(Clone, Copy, Debug)]
pub struct Dropout<'a> {
    /// Which pairs are dropped.
    pub mask: DropoutMask,
    /// For each document, the q token that position 0 is, or would be.
    pub q_tokens: &'a [i64],
    /// For each document, the k token that position 0 is, or would be.
    pub k_tokens: &'a [i64],
}

/// The multipliers of Philox 4x32.
pub(crate) const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// What is added to the key in each round.
pub(crate) const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// Rounds of Philox.
pub(crate) const ROUNDS: u32 = 10;

/// Philox 4x32-10: four random words of a counter and a key.
const fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let ([mut a, mut b, mut c, mut d], [mut k0, mut k1]) = (counter, key);
    let mut round = 0;
    while round < ROUNDS {
        let (p, q) = (a as u64 * MULTIPLIERS[0] as u64, c as u64 * MULTIPLIERS[1] as u64);
        (a, b, c, d) = ((q >> 32) as u32 ^ b ^ k0, q as u32, (p >> 32) as u32 ^ d ^ k1, p as u32);
        (k0, k1) = (k0.wrapping_add(WEYL[0]), k1.wrapping_add(WEYL[1]));
        round += 1;
    }
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::{string::ToString, vec::Vec};

    /// The known answers of Random123 (`kat_vectors`, philox4x32 10).
    #[test]
    fn known_answers() {
        let max = u32::MAX;
        for (counter, key, words) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([max; 4], [max; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox(counter, key), words);
        }
    }

    /// A word is dropped if it is below `probability · 2^32`, without rounding.
    #[test]
    fn the_threshold_is_exact() {
        let unit = 1.0 / 4_294_967_296.0;
        for (probability, dropped) in [
            (unit, 1u64),
            (1.5 * unit, 2),
            (unit / 2.0, 1),
            (f64::MIN_POSITIVE, 1),
            (0.5, 1 << 31),
            (1.0 - unit, (1 << 32) - 1),
            (1.0 - unit / 2.0, 1 << 32),
            (0.1, 429_496_730),
        ] {
            let mask = DropoutMask::new(probability, 0).unwrap();
            assert_eq!(u64::from(mask.last_dropped) + 1, dropped, "{probability:e}");
        }
    }

    /// The share of pairs that is dropped, over all and in each row, column and head; neighbours are independent in all
    /// three directions, and so are seeds that differ in one bit.
    #[test]
    #[cfg_attr(miri, ignore = "hours of an interpreter, and no unsafe code")]
    fn shares_and_independence() {
        const N: u32 = 96;
        const HEADS: u32 = 8;
        for probability in [0.1, 0.5, 0.83] {
            let mask = DropoutMask::new(probability, 0x0123_4567_89ab_cdef).unwrap();
            let other = DropoutMask::new(probability, 0x0123_4567_89ab_cdee).unwrap();
            let high = DropoutMask::new(probability, 0x8123_4567_89ab_cdef).unwrap();
            let near = |what: &str, found: usize, of: u32, share: f64| {
                let (n, found) = (f64::from(of), found as f64);
                let deviation = (n * share * (1.0 - share)).sqrt();
                assert!((found - n * share).abs() < 5.0 * deviation, "{what}: {found} of {n}, expected {share}");
            };
            let all = (0..N).flat_map(|q| (0..N).flat_map(move |k| (0..HEADS).map(move |h| (q, k, h))));
            let all: Vec<_> = all.collect();
            let drops = |m: &DropoutMask, q, k, h| !m.keeps(q, k, h);
            let count = |of: &dyn Fn(u32, u32, u32) -> bool| all.iter().filter(|&&(q, k, h)| of(q, k, h)).count();
            let total = N * N * HEADS;
            near("all", count(&|q, k, h| drops(&mask, q, k, h)), total, probability);
            for i in 0..N {
                near("row", count(&|q, k, h| q == i && drops(&mask, q, k, h)), N * HEADS, probability);
                near("column", count(&|q, k, h| k == i && drops(&mask, q, k, h)), N * HEADS, probability);
            }
            for i in 0..HEADS {
                near("head", count(&|q, k, h| h == i && drops(&mask, q, k, h)), N * N, probability);
            }
            let both = |of: &dyn Fn(u32, u32, u32) -> bool| {
                near("both", count(&|q, k, h| drops(&mask, q, k, h) && of(q, k, h)), total, probability * probability);
            };
            both(&|q, k, h| drops(&mask, q + 1, k, h));
            both(&|q, k, h| drops(&mask, q, k + 1, h));
            both(&|q, k, h| drops(&mask, q, k + 4, h));
            both(&|q, k, h| drops(&mask, q, k, h + 1));
            both(&|q, k, h| drops(&mask, k + N, q + N, h));
            both(&|q, k, h| drops(&other, q, k, h));
            both(&|q, k, h| drops(&high, q, k, h));
        }
    }

    #[test]
    fn refusals() {
        let text = |p: f64| DropoutMask::new(p, 0).unwrap_err().to_string();
        for p in [1.0, -0.1, f64::NAN, f64::INFINITY] {
            let expected = format!("dropout is {p:?}, expected a probability from 0 up to, but not including, 1");
            assert_eq!(text(p), expected);
        }
        assert!(text(0.0).starts_with("dropout is 0, expected above 0"));
    }
}
