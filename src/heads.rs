// SPDX-License-Identifier: MIT OR Apache-2.0
//! The heads of each Ulysses rank: a range of q heads, and the kv heads that they read.
//!
//! Ulysses rank u of U holds q heads `⌊uH/U⌋ .. ⌊(u+1)H/U⌋` and the kv heads that these read. Kernels take the offset
//! of the first head, so any `U ≤ H` works: H need not be a multiple of U, and there may be fewer kv heads than ranks.
//! A kv head that several ranks read is sent to each of them from one source (over several nodes to one rank of each
//! node, which passes it on), and its partial gradients are sent back and summed in rank order. The caller's memory has
//! no copies and no padding.

use alloc::vec::Vec;
use core::ops::Range;

use crate::call::HeadMap;

/// The heads of one Ulysses rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeadShare {
    /// Its q heads.
    pub q: Range<u32>,
    /// The kv heads they read.
    pub kv: Range<u32>,
}

impl HeadShare {
    /// Rank `u` of `ulysses`; needs `u < ulysses ≤ heads` and `kv_heads` dividing `heads`, without which the result has
    /// no meaning.
    pub fn new(u: usize, ulysses: usize, heads: u32, kv_heads: u32) -> Self {
        let cut = |i: usize| (i as u128 * u128::from(heads) / ulysses.max(1) as u128) as u32;
        let group = heads.checked_div(kv_heads).unwrap_or(0).max(1);
        let q = cut(u)..cut(u.saturating_add(1));
        let kv = q.start / group..q.end.div_ceil(group);
        Self { q, kv }
    }

    /// The map a kernel needs when its tensors hold just these heads.
    pub fn map(&self, group: u32) -> HeadMap {
        HeadMap { q_offset: self.q.start, kv_offset: self.kv.start, group }
    }
}

/// The heads of all Ulysses ranks, counted.
pub(crate) struct HeadCounts {
    /// The most q heads, and the most kv heads, of a rank.
    pub q: u32,
    pub kv: u32,
    /// The kv heads of all ranks; a head that several ranks hold counts for each of them.
    pub all_kv: u32,
}

impl HeadCounts {
    pub(crate) fn new(ulysses: usize, [heads, kv_heads]: [u32; 2]) -> Self {
        (0..ulysses).fold(Self { q: 0, kv: 0, all_kv: 0 }, |counts, u| {
            let share = HeadShare::new(u, ulysses, heads, kv_heads);
            let [q, kv] = [share.q, share.kv].map(|heads| heads.end - heads.start);
            Self { q: counts.q.max(q), kv: counts.kv.max(kv), all_kv: counts.all_kv + kv }
        })
    }
}

/// Whether some kv head is read by more than one of the Ulysses ranks `n · ranks .. (n + 1) · ranks`, for any n.
pub(crate) fn shared_kv_in(ranks: usize, ulysses: usize, [heads, kv_heads]: [u32; 2]) -> bool {
    let kv = |u| HeadShare::new(u, ulysses, heads, kv_heads).kv;
    (1..ulysses).any(|u| u % ranks > 0 && kv(u - 1).end > kv(u).start)
}

/// The ranks of `node` that hold a kv head. They are consecutive.
pub(crate) fn holders(heads: &[HeadShare], node: &Range<usize>, head: u32) -> Range<usize> {
    let first = node.start + heads[node.clone()].partition_point(|share| share.kv.end <= head);
    first..first + heads[first..node.end].partition_point(|share| share.kv.start <= head)
}

/// The minimum load of the busiest rank, if each head's rows may be divided among its holders; as a fraction of the
/// rows of one head.
pub(crate) fn least_load(held_by: &[Range<usize>], ranks: &Range<usize>) -> (u64, u64) {
    // A run of consecutive ranks must carry the heads that no rank outside the run holds.
    let mut most = (0, 1);
    for first in ranks.clone() {
        let mut ends: Vec<usize> = held_by.iter().filter(|h| h.start >= first).map(|h| h.end).collect();
        ends.sort_unstable();
        for (heads, &end) in (1..).zip(&ends) {
            let load = (heads, (end - first) as u64);
            if load.0 * most.1 > most.0 * load.1 {
                most = load;
            }
        }
    }
    most
}

/// The minimum load of the busiest rank of a node for the rows of kv heads that cross its border, as a fraction of one
/// head.
pub(crate) fn carried_kv(ranks: usize, ulysses: usize, [heads, kv_heads]: [u32; 2]) -> (u64, u64) {
    let shares: Vec<HeadShare> = (0..ulysses).map(|u| HeadShare::new(u, ulysses, heads, kv_heads)).collect();
    let of_node = |first: usize| {
        let node = first..first + ranks;
        let kv = shares[first].kv.start..shares[node.end - 1].kv.end;
        least_load(&kv.map(|head| holders(&shares, &node, head)).collect::<Vec<_>>(), &node)
    };
    (0..ulysses).step_by(ranks).map(of_node).max_by(|a, b| (a.0 * b.1).cmp(&(b.0 * a.1))).unwrap_or((1, 1))
}

/// `⌈H/U⌉·U/H`: the heads of the busiest rank divided by the mean.
pub(crate) fn imbalance(ulysses: usize, heads: u32) -> f64 {
    f64::from(heads.div_ceil(ulysses as u32)) * ulysses as f64 / f64::from(heads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_without_a_meaning_have_a_share() {
        let some = [0, 1, 7, u32::MAX];
        for (u, ulysses) in some.into_iter().flat_map(|u| some.map(|n| (u as usize, n as usize))) {
            for (heads, kv_heads) in some.into_iter().flat_map(|h| some.map(|kv| (h, kv))) {
                let _ = HeadShare::new(u, ulysses, heads, kv_heads);
            }
        }
        let _ = HeadShare::new(usize::MAX, 0, 1, 1);
    }

    #[test]
    fn shares_cover_every_head_once_and_every_kv_head_they_read() {
        for kv_heads in 1..9u32 {
            for group in 1..5u32 {
                let heads = kv_heads * group;
                for ulysses in 1..=heads as usize {
                    let mut next = 0;
                    for u in 0..ulysses {
                        let s = HeadShare::new(u, ulysses, heads, kv_heads);
                        assert_eq!(s.q.start, next);
                        assert!(!s.q.is_empty());
                        next = s.q.end;
                        let map = s.map(group);
                        for h in 0..s.q.len() as u32 {
                            assert!(map.kv(h) < s.kv.len() as u32);
                            assert_eq!(map.kv(h) + s.kv.start, (s.q.start + h) / group);
                        }
                    }
                    assert_eq!(next, heads);
                }
            }
        }
    }

    #[test]
    fn nine_heads_on_four_ranks_share_kv_heads() {
        assert!(shared_kv_in(4, 4, [9, 3]) && HeadCounts::new(4, [9, 3]).all_kv > 3);
        assert!(!shared_kv_in(3, 3, [9, 3]) && HeadCounts::new(3, [9, 3]).all_kv == 3);
        assert!(shared_kv_in(2, 4, [9, 3]) && shared_kv_in(2, 4, [4, 1]));
        assert!(!shared_kv_in(1, 4, [9, 3]) && !shared_kv_in(3, 6, [12, 6]));
        assert!((imbalance(4, 9) - 12.0 / 9.0).abs() < 1e-12);
    }
}
