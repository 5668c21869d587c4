// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ulysses ranks of a node that hold the same kv head: how the rows of a node slot are divided among them.
//!
//! Each of the *holders* has a counterpart in the other node that holds the same rows of the same head. So a part of
//! the rows crosses to each holder, and the holders pass their parts on to one another. Parts are chosen to minimise
//! the load of the node's busiest network card. A head that several ranks hold is one pass, so that all its rows are
//! divided alike.

use alloc::{vec, vec::Vec};
use core::ops::Range;

use crate::heads::{HeadShare, holders, least_load};

/// The holders of one kv head, and their parts of the rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Holders {
    /// Their places among the Ulysses ranks.
    pub(super) places: Range<u32>,
    /// This rank's index among them.
    pub(super) me: usize,
    /// Holder i has the rows from `⌊ends[i]·n/whole⌋` to `⌊ends[i + 1]·n/whole⌋` of n.
    pub(super) ends: Vec<u64>,
    pub(super) whole: u64,
}

impl Holders {
    /// A head that no other rank of the node holds.
    pub(crate) fn alone() -> Self {
        Self { places: 0..1, me: 0, ends: vec![0, 1], whole: 1 }
    }

    /// The holders of a kv head among the Ulysses ranks `node`; `me` is this rank. `heads` are the heads of every rank.
    pub(crate) fn of(heads: &[HeadShare], node: &Range<usize>, head: u32, me: usize) -> Self {
        let kv = heads[node.start].kv.start..heads[node.end - 1].kv.end;
        let held_by: Vec<Range<usize>> = kv.clone().map(|h| holders(heads, node, h)).collect();
        let (most, whole) = least_load(&held_by, node);
        // Head by head, the first ranks with capacity left take it. `whole` units are one head.
        let mut left = vec![most; node.len()];
        let mut ends = Vec::new();
        for places in &held_by[..=(head - kv.start) as usize] {
            ends.clear();
            ends.push(0);
            let mut taken = 0;
            for place in places.clone() {
                let part = left[place - node.start].min(whole - taken);
                left[place - node.start] -= part;
                taken += part;
                ends.push(taken);
            }
        }
        let places = &held_by[(head - kv.start) as usize];
        Self { places: places.start as u32..places.end as u32, me: me - places.start, ends, whole }
    }

    /// Whether there is one holder only.
    pub(super) fn is_alone(&self) -> bool {
        self.places.len() == 1
    }

    pub(super) fn me(&self) -> usize {
        self.me
    }

    /// Their places among the Ulysses ranks, in order.
    pub(super) fn places(&self) -> Range<u32> {
        self.places.clone()
    }

    /// The holders except this rank, as (index, place).
    pub(super) fn others(&self) -> impl Iterator<Item = (usize, u32)> + use<> {
        let me = self.me;
        (0..).zip(self.places()).filter(move |(holder, _)| *holder != me)
    }

    /// First and end of a holder's part of `rows` rows.
    pub(super) fn part(&self, holder: usize, rows: i64) -> (i64, i64) {
        let at = |end: u64| (i128::from(end) * i128::from(rows) / i128::from(self.whole)) as i64;
        (at(self.ends[holder]), at(self.ends[holder + 1]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of each head are all of it, and no rank carries more than the minimum, which is the mean where heads
    /// divide.
    #[test]
    fn parts_are_whole_and_even() {
        let mut uneven = 0;
        for (kv_heads, group) in (1..9u32).flat_map(|kv| (1..6u32).map(move |group| (kv, group))) {
            for ulysses in 2..=(kv_heads * group).min(9) as usize {
                for ranks in (1..=ulysses).filter(|n| ulysses.is_multiple_of(*n)) {
                    let heads: Vec<HeadShare> =
                        (0..ulysses).map(|u| HeadShare::new(u, ulysses, kv_heads * group, kv_heads)).collect();
                    for node in (0..ulysses / ranks).map(|n| n * ranks..(n + 1) * ranks) {
                        let rows = 5040 * 17;
                        let mut load = vec![0; ranks];
                        for head in heads[node.start].kv.start..heads[node.end - 1].kv.end {
                            let mut next = 0;
                            for u in node.clone().filter(|&u| heads[u].kv.contains(&head)) {
                                let h = Holders::of(&heads, &node, head, u);
                                assert_eq!((h.places.start as usize + h.me, h.is_alone()), (u, h.places.len() == 1));
                                let part = h.part(h.me, rows);
                                assert_eq!(part.0, next);
                                next = part.1;
                                load[u - node.start] += part.1 - part.0;
                            }
                            assert_eq!(next, rows);
                        }
                        let of_node = i64::from(heads[node.end - 1].kv.end - heads[node.start].kv.start);
                        let (most, mean) = (*load.iter().max().unwrap(), of_node * rows / ranks as i64);
                        // A run of consecutive ranks must carry the heads that only ranks of the run hold.
                        let must = node.clone().flat_map(|a| (a + 1..=node.end).map(move |e| (a, e))).map(|(a, e)| {
                            let inside = |h: &u32| {
                                node.clone().filter(|u| heads[*u].kv.contains(h)).all(|u| (a..e).contains(&u))
                            };
                            let all = heads[a].kv.start..heads[e - 1].kv.end;
                            all.filter(inside).count() as i64 * rows / (e - a) as i64
                        });
                        assert_eq!(most, must.max().unwrap());
                        assert!(
                            most == mean
                                || !(kv_heads as usize).is_multiple_of(ranks)
                                    && !ranks.is_multiple_of(kv_heads as usize)
                                || ulysses != ranks
                        );
                        uneven += usize::from(most > mean);
                    }
                }
            }
        }
        assert!(uneven > 10, "{uneven}");
    }
}
