// SPDX-License-Identifier: MIT OR Apache-2.0
//! Distributes the chunks of a balanced layout over ring ranks.
//!
//! All ranks compute this distribution alone and must get the same result, so the rule uses only integers, and ties go
//! to the lower index. It runs for each batch, so it must be fast: keys contain the compared values, chunks are sorted
//! by the digits of their areas, and a [`Tournament`] finds the least loaded rank for each chunk.

use alloc::{collections::BTreeSet, vec, vec::Vec};
use core::{cmp::Reverse, mem};

/// An area and an index in one number, so that comparing needs no look-ups.
trait AreaKey: Copy + Ord {
    const MAX: Self;
    fn new(area: u64, index: u32) -> Self;
    fn area(self) -> u64;
    fn index(self) -> u32;
    fn plus(self, area: u64) -> Self;
    /// Sorts keys that are given in the order of their indices.
    fn sort(list: &mut Vec<Self>);
}

/// Bits of an index: there are at most 2²⁰ chunks ([`chunk_limit`]).
const INDEX_BITS: u32 = 20;

/// The largest index.
const LAST_INDEX: u32 = (1 << INDEX_BITS) - 1;

/// Bits of an area that one pass of a sort counts.
const DIGIT_BITS: u32 = 11;

/// Shorter lists are sorted by comparison, because a pass takes a step for each digit too.
const COUNTED: usize = 200;

impl AreaKey for u64 {
    const MAX: Self = Self::MAX;

    fn new(area: u64, index: u32) -> Self {
        area << INDEX_BITS | Self::from(index)
    }

    fn area(self) -> u64 {
        self >> INDEX_BITS
    }

    fn index(self) -> u32 {
        self as u32 & LAST_INDEX
    }

    fn plus(self, area: u64) -> Self {
        self + (area << INDEX_BITS)
    }

    fn sort(list: &mut Vec<Self>) {
        if list.len() < COUNTED {
            return list.sort_unstable();
        }
        let mut room = list.clone();
        let used = list.iter().fold(0, |used, key| used | key);
        for shift in (INDEX_BITS..Self::BITS - used.leading_zeros()).step_by(DIGIT_BITS as usize) {
            let digit = |key: Self| (key >> shift) as usize & ((1 << DIGIT_BITS) - 1);
            let mut next = [0u32; 1 << DIGIT_BITS];
            list.iter().for_each(|&key| next[digit(key)] += 1);
            let mut sum = 0;
            next.iter_mut().for_each(|n| sum += mem::replace(n, sum));
            for &key in &*list {
                let at = &mut next[digit(key)];
                room[*at as usize] = key;
                *at += 1;
            }
            mem::swap(list, &mut room);
        }
    }
}

impl AreaKey for u128 {
    const MAX: Self = Self::MAX;

    fn new(area: u64, index: u32) -> Self {
        Self::from(area) << 32 | Self::from(index)
    }

    fn area(self) -> u64 {
        (self >> 32) as u64
    }

    fn index(self) -> u32 {
        self as u32
    }

    fn plus(self, area: u64) -> Self {
        self + (Self::from(area) << 32)
    }

    fn sort(list: &mut Vec<Self>) {
        list.sort_unstable();
    }
}

/// Deals `ring × per` chunks of equal token count and the given mask areas, so that every rank gets `per` of them and
/// about the same area: largest area first, each to the least loaded rank that still has room (the
/// longest-processing-time rule, with a limit on the count), then exchanges between the most and the least loaded while
/// they help. The chunks of rank r are entries `r·per .. (r+1)·per` of the result.
pub(crate) fn deal(areas: &[u64], ring: usize, per: usize) -> Vec<u32> {
    let total = areas.iter().fold(0u64, |sum, &area| sum.saturating_add(area));
    let narrow = total >> (u64::BITS - INDEX_BITS) == 0;
    let (mut mine, loads) =
        if narrow { largest_first::<u64>(areas, ring, per) } else { largest_first::<u128>(areas, ring, per) };
    even_out(&mut mine, loads, areas, per);
    // The chunks of each rank in ascending order.
    let mut owner = vec![0; mine.len()];
    for (r, chunks) in (0u32..).zip(mine.chunks_exact(per)) {
        chunks.iter().for_each(|&c| owner[c as usize] = r);
    }
    let mut next = starts(ring, per);
    for (c, &r) in (0u32..).zip(&owner) {
        mine[next[r as usize]] = c;
        next[r as usize] += 1;
    }
    mine
}

/// Where the chunks of each rank begin.
fn starts(ring: usize, per: usize) -> Vec<usize> {
    (0..ring).map(|r| r * per).collect()
}

/// The least of some keys, of which one at a time is replaced: a tree whose nodes hold the minimum of their two
/// children. A replacement takes one comparison for each level, without branches, where a heap's path depends on the
/// keys.
struct Tournament<K>(Vec<K>);

impl<K: AreaKey> Tournament<K> {
    fn new(count: usize, keys: impl Iterator<Item = K>) -> Self {
        let leaves = count.next_power_of_two();
        let mut nodes = vec![K::MAX; 2 * leaves];
        nodes[leaves..].iter_mut().zip(keys).for_each(|(node, key)| *node = key);
        for parent in (1..leaves).rev() {
            nodes[parent] = nodes[2 * parent].min(nodes[2 * parent + 1]);
        }
        Self(nodes)
    }

    /// The least key; `MAX` if there is no other.
    fn least(&self) -> K {
        self.0[1]
    }

    /// Replaces a key by its index.
    fn set(&mut self, index: usize, key: K) {
        let (mut node, mut least) = (self.0.len() / 2 + index, key);
        self.0[node] = key;
        while node > 1 {
            least = least.min(self.0[node ^ 1]);
            node /= 2;
            self.0[node] = least;
        }
    }
}

/// The chunks of each rank, and its area.
fn largest_first<K: AreaKey>(areas: &[u64], ring: usize, per: usize) -> (Vec<u32>, Vec<u64>) {
    // Largest area first; among equal areas the lowest index.
    let largest = areas.iter().copied().max().unwrap_or(0);
    let mut order: Vec<K> = areas.iter().zip(0u32..).map(|(&area, c)| K::new(largest - area, c)).collect();
    K::sort(&mut order);
    let area = |key: K| largest - key.area();
    let (mut mine, mut loads) = (vec![0; ring * per], vec![0u64; ring]);
    let mut next = starts(ring, per);
    let mut ranks = Tournament::new(ring, (0..ring as u32).map(|r| K::new(0, r)));
    for key in order {
        // Full ranks are out, and there are as many chunks as places.
        let least = ranks.least();
        let r = least.index() as usize;
        mine[next[r]] = key.index();
        next[r] += 1;
        loads[r] += area(key);
        ranks.set(r, if next[r] == (r + 1) * per { K::MAX } else { least.plus(area(key)) });
    }
    (mine, loads)
}

/// Swaps single chunks between the most and the least loaded rank while that lowers the larger of the two loads. Each
/// rank's chunks come, and are kept, in descending order of area, so that the best partner of a chunk is found by
/// bisection: ranks may have many chunks.
fn even_out(mine: &mut [u32], mut loads: Vec<u64>, areas: &[u64], per: usize) {
    let area = |c: u32| areas[c as usize];
    // Built for the second swap, because mostly there is none.
    let mut by_load: BTreeSet<(u64, usize)> = BTreeSet::new();
    for _ in 0..4 * loads.len() {
        // Among equally loaded ranks the first, for the least and for the largest load.
        let (lo, hi) = if let (Some(&(most, _)), Some(&(_, lo))) = (by_load.last(), by_load.first()) {
            (lo, by_load.range((most, 0)..).next().map_or(lo, |&(_, hi)| hi))
        } else {
            let ranks = || loads.iter().enumerate();
            let least = ranks().min_by_key(|(r, load)| (**load, *r));
            let most = ranks().min_by_key(|(r, load)| (Reverse(**load), *r));
            (least.map_or(0, |(r, _)| r), most.map_or(0, |(r, _)| r))
        };
        let gap = loads[hi] - loads[lo];
        let of = |r: usize| r * per..(r + 1) * per;
        let (of_hi, of_lo) = (&mine[of(hi)], &mine[of(lo)]);
        // The swap that comes closest to moving half the gap.
        let mut best = (gap, None);
        for (i, &a) in of_hi.iter().enumerate() {
            // The remaining gap is smallest if b is nearest to a − gap / 2, from either side.
            let at = of_lo.partition_point(|&b| 2 * area(b) + gap > 2 * area(a));
            let nearest = at.saturating_sub(1);
            for (j, &b) in of_lo.iter().enumerate().skip(nearest).take(at + 1 - nearest) {
                let (a, b) = (area(a), area(b));
                if a > b && a - b < gap {
                    let rest = (2 * (a - b)).abs_diff(gap);
                    if rest < best.0 {
                        best = (rest, Some((i, j)));
                    }
                }
            }
        }
        let Some((i, j)) = best.1 else { return };
        let (a, b) = (of_hi[i], of_lo[j]);
        if by_load.is_empty() {
            by_load = loads.iter().enumerate().map(|(r, &load)| (load, r)).collect();
        }
        let moved = area(a) - area(b);
        for (r, place, chunk, load) in [(hi, i, b, loads[hi] - moved), (lo, j, a, loads[lo] + moved)] {
            let chunks = &mut mine[of(r)];
            chunks[place] = chunk;
            put_in_order(chunks, place, |c| (Reverse(area(c)), c));
            by_load.remove(&(loads[r], r));
            by_load.insert((load, r));
            loads[r] = load;
        }
    }
}

/// Moves the one entry of a list that is out of order to its place.
fn put_in_order<K: Ord>(list: &mut [u32], at: usize, key: impl Fn(u32) -> K) {
    let (before, rest) = list.split_at(at);
    let wanted = key(rest[0]);
    let to = before.partition_point(|&c| key(c) < wanted);
    if to < at {
        return list[to..=at].rotate_right(1);
    }
    let to = at + rest[1..].partition_point(|&c| key(c) < wanted);
    list[at..=to].rotate_left(1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        batch::{Batch, Side},
        layout::{Layout, Shares},
        mask::Mask,
    };

    /// The rule in its simplest form: every rank is compared for every chunk, and every pair of chunks for every swap.
    /// Also returns the number of swaps.
    fn deal_slowly(areas: &[u64], ring: usize, per: usize) -> (Vec<u32>, usize) {
        let area = |c: u32| areas[c as usize];
        let load = |chunks: &Vec<u32>| chunks.iter().map(|&c| area(c)).sum::<u64>();
        let mut order: Vec<u32> = (0..areas.len() as u32).collect();
        order.sort_by_key(|&c| (Reverse(area(c)), c));
        let mut mine: Vec<Vec<u32>> = vec![Vec::new(); ring];
        for c in order {
            let with_room = (0..ring).filter(|&r| mine[r].len() < per);
            let least = with_room.min_by_key(|&r| (load(&mine[r]), r)).unwrap();
            mine[least].push(c);
        }
        let mut swaps = 0;
        for _ in 0..4 * ring {
            let lo = (0..ring).min_by_key(|&r| (load(&mine[r]), r)).unwrap();
            let hi = (0..ring).min_by_key(|&r| (Reverse(load(&mine[r])), r)).unwrap();
            let gap = load(&mine[hi]) - load(&mine[lo]);
            let pairs = (0..per).flat_map(|i| (0..per).map(move |j| (i, j)));
            let moved = |(i, j): (usize, usize)| area(mine[hi][i]).checked_sub(area(mine[lo][j]));
            let helps = pairs.filter(|&p| moved(p).is_some_and(|m| 0 < m && m < gap));
            let Some((i, j)) = helps.min_by_key(|&p| (2 * moved(p).unwrap()).abs_diff(gap)) else { break };
            (mine[hi][i], mine[lo][j]) = (mine[lo][j], mine[hi][i]);
            mine.iter_mut().for_each(|chunks| chunks.sort_by_key(|&c| (Reverse(area(c)), c)));
            swaps += 1;
        }
        mine.iter_mut().for_each(|chunks| chunks.sort_unstable());
        (mine.concat(), swaps)
    }

    /// Random areas: alike, steep, narrow, and too large for one word together with their index.
    #[test]
    fn chunks_are_dealt_by_the_rule() {
        let mut draw = fastrand::Rng::with_seed(2);
        let (mut swapped, mut wide) = (0, 0);
        for n in 0..3000 {
            // With many ranks keys are sorted by their digits.
            let ring = if n % 97 == 0 { draw.usize(200..240) } else { draw.usize(1..14) };
            let per = draw.usize(1..9);
            let area = |i: usize, draw: &mut fastrand::Rng| match n % 6 {
                0 => draw.u64(..10),
                1 => draw.u64(..1 << 30),
                2 => 1 << draw.u32(..30),
                3 => 1000 * i as u64 + draw.u64(..3),
                4 => draw.u64(1 << 50..1 << 52),
                _ => 7,
            };
            let areas: Vec<u64> = (0..ring * per).map(|i| area(i, &mut draw)).collect();
            let (got, (want, swaps)) = (deal(&areas, ring, per), deal_slowly(&areas, ring, per));
            // Among chunks of equal area any may be swapped.
            let by_rank = |dealt: &[u32]| {
                let sorted = |chunks: &[u32]| {
                    let mut of_rank: Vec<u64> = chunks.iter().map(|&c| areas[c as usize]).collect();
                    of_rank.sort_unstable();
                    of_rank
                };
                dealt.chunks(per).map(sorted).collect::<Vec<_>>()
            };
            assert_eq!(by_rank(&got), by_rank(&want), "{ring} {per} {areas:?}");
            assert!(swaps > 0 || got == want, "{ring} {per} {areas:?}");
            swapped += usize::from(swaps > 0);
            wide += usize::from(areas.iter().sum::<u64>() >> 44 > 0);
        }
        assert!(swapped > 100 && wide > 100, "{swapped} {wide}");
    }

    /// A million chunks are dealt, and evened out, in well under a minute even unoptimised.
    #[test]
    fn many_chunks_are_dealt_in_bounded_time() {
        let lengths: Vec<usize> = (0..3000).map(|i| 1 + i * 7919 % 613).collect();
        let batch = Batch::from_lengths(&lengths).unwrap();
        for (ring, chunks) in [(1, 1 << 20), (2, 1 << 19), (8, 1 << 12)] {
            let shares = Shares::new(&batch, Mask::causal(), Layout::Balanced { chunks }, ring).unwrap();
            let tokens: usize = (0..ring).map(|r| shares.rows(Side::Q, r)).sum();
            assert_eq!(tokens, batch.tokens(Side::Q));
        }
    }
}
