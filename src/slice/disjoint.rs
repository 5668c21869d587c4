// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whether two slices allow the same pair, in `n log n` steps for n slices, however many share their queries.
//!
//! At each query a slice allows an interval of keys, whose ends stay or move by one from a query to the next, and the
//! queries where the interval is not empty are a run. So of two slices that are apart, the same one comes first at all
//! queries that both have (if it were not so, they would have met on the way). One sweep over the queries keeps the
//! slices in the order of their intervals, and compares two when they become neighbours: the first pair that meets are
//! neighbours just before, or one of them begins there (Shamos and Hoey, "Geometric intersection problems", 1976).

use alloc::{format, vec::Vec};
use core::cmp::Ordering;

use super::Slice;
use crate::error::{Error, Result};

/// The pairs of one slice: those of `q` and `k` at distances `k − q` within `delta`, all of them tokens of the pack.
#[derive(Clone, Copy)]
struct PairRegion {
    /// The number of the slice.
    slice: u32,
    q: [i64; 2],
    k: [i64; 2],
    delta: (i64, i64),
}

impl PairRegion {
    /// Of a slice that has a pair. `q` are the queries that have one.
    fn new((i, s): (usize, &Slice)) -> Option<Self> {
        let delta = s.delta()?;
        let (k, q) = ([i64::from(s.k_begin), i64::from(s.k_end)], [i64::from(s.q_begin), i64::from(s.q_end)]);
        let q = [q[0].max(k[0] - delta.1), q[1].min(k[1] - delta.0)];
        Some(Self { slice: i as u32, q, k, delta })
    }

    /// The first and the last key of a query.
    fn keys(&self, q: i64) -> (i64, i64) {
        (self.k[0].max(q + self.delta.0), (self.k[1] - 1).min(q + self.delta.1))
    }

    /// The order of two at a query that both have; equal if they share a key.
    fn order(&self, other: &Self, q: i64) -> Ordering {
        let (mine, theirs) = (self.keys(q), other.keys(q));
        if mine.1 < theirs.0 {
            Ordering::Less
        } else if theirs.1 < mine.0 {
            Ordering::Greater
        } else {
            Ordering::Equal
        }
    }

    /// Refuses a pair that both allow.
    fn refuse_common_pair(&self, other: &Self) -> Result<()> {
        let q = [self.q[0].max(other.q[0]), self.q[1].min(other.q[1])];
        let k = [self.k[0].max(other.k[0]), self.k[1].min(other.k[1])];
        let low = self.delta.0.max(other.delta.0).max(k[0] - (q[1] - 1));
        let high = self.delta.1.min(other.delta.1).min(k[1] - 1 - q[0]);
        if q[0] >= q[1] || k[0] >= k[1] || low > high {
            return Ok(());
        }
        let token = q[0].max(k[0] - low);
        let (first, second) = (self.slice.min(other.slice), self.slice.max(other.slice));
        let found = format!("one that allows q token {token} with k token {}", token + low);
        let expected = format!("pairs that slices[{first}] does not allow: a pair may be in one slice only");
        Err(Error::invalid(format!("slices[{second}]"), found, expected))
    }
}

/// Refuses two slices that allow the same pair.
pub(super) fn check_disjoint(slices: &[Slice]) -> Result<()> {
    let mut regions: Vec<PairRegion> = slices.iter().enumerate().filter_map(PairRegion::new).collect();
    regions.sort_by_key(|r| r.q[0]);
    let mut ends: Vec<u32> = (0..regions.len() as u32).collect();
    ends.sort_by_key(|&i| regions[i as usize].q[1]);
    let mut ends = ends.into_iter().peekable();
    let of = |i: &u32| &regions[*i as usize];
    // Those that have the query of the sweep, in the order of their keys: numbers, so that little moves where one comes
    // or goes.
    let mut open: Vec<u32> = Vec::new();
    // What two slices have between them may end before they meet, also after the last slice has begun.
    let begins = regions.iter().zip(0u32..).map(|(r, i)| (r.q[0], Some((r, i))));
    for (q, begins) in begins.chain([(i64::MAX, None)]) {
        while let Some(gone) = ends.next_if(|i| of(i).q[1] <= q) {
            let gone = of(&gone);
            let at = open.partition_point(|i| of(i).order(gone, gone.q[1] - 1) == Ordering::Less);
            open.remove(at);
            if at > 0 && at < open.len() {
                of(&open[at - 1]).refuse_common_pair(of(&open[at]))?;
            }
        }
        let Some((region, i)) = begins else { break };
        let at = open.partition_point(|i| of(i).order(region, q) == Ordering::Less);
        open[at.saturating_sub(1)..open.len().min(at + 1)].iter().try_for_each(|i| of(i).refuse_common_pair(region))?;
        open.insert(at, i);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    /// What every pair of slices says.
    fn one_by_one(slices: &[Slice]) -> bool {
        let regions: Vec<PairRegion> = slices.iter().enumerate().filter_map(PairRegion::new).collect();
        (0..regions.len()).all(|i| regions[..i].iter().all(|r| r.refuse_common_pair(&regions[i]).is_ok()))
    }

    fn shares(a: &Slice, b: &Slice, tokens: usize) -> bool {
        (0..tokens).any(|q| (0..tokens).any(|k| a.allows(q, k) && b.allows(q, k)))
    }

    /// Small slices that are apart until one more comes, against the pairs themselves.
    #[test]
    fn drawn_slices() {
        let mut r = fastrand::Rng::with_seed(4);
        let (mut apart, mut met) = (0, 0);
        for _ in 0..400 {
            let mut list: Vec<Slice> = Vec::new();
            for _ in 0..r.usize(1..60) {
                let mut run = || {
                    let (a, b) = (r.usize(0..21), r.usize(0..21));
                    a.min(b)..a.max(b)
                };
                let (q, k) = (run(), run());
                let mut s = Slice::new(q, k).q_start(r.i64(-10..10));
                let near = r.i64(-12..12);
                s = [s, s.causal(), s.band(near, near + r.i64(-1..6)), s.band(near, i64::MAX), s.band(i64::MIN, near)]
                    [r.usize(0..5)];
                list.push(s);
                let free = list[..list.len() - 1].iter().all(|other| !shares(other, &s, 20));
                assert_eq!(check_disjoint(&list).is_ok(), free, "{list:?}");
                assert_eq!(one_by_one(&list), free, "{list:?}");
                if !free {
                    let text = check_disjoint(&list).unwrap_err().to_string();
                    assert!(text.starts_with(&format!("slices[{}]", list.len() - 1)), "{text}");
                    // Also where the slice that overlaps is not the last one.
                    list.reverse();
                    assert!(check_disjoint(&list).is_err());
                    list.reverse();
                    list.pop();
                    met += 1;
                } else {
                    apart += 1;
                }
            }
            // In any order.
            r.shuffle(&mut list);
            check_disjoint(&list).unwrap();
        }
        assert!(apart > 2000 && met > 4000, "{apart} {met}");
    }

    /// Diagonals beside each other, of all queries.
    #[test]
    fn slices_of_the_same_queries() {
        let n = 3000;
        let all = Slice::new(0..n, 0..n);
        let mut list: Vec<Slice> = (0..n as i64).map(|d| all.band(-d, -d)).collect();
        check_disjoint(&list).unwrap();
        list.push(all.band(-1700, -1700));
        let text = check_disjoint(&list).unwrap_err().to_string();
        assert!(text.contains("slices[3000] is one that allows q token 1700 with k token 0"), "{text}");
        assert!(check_disjoint(&[all.band(5, 4); 3]).is_ok());
    }

    /// The largest numbers: no sum of them overflows.
    #[test]
    fn extremes() {
        let most = i32::MAX as usize;
        let far = Slice::new(0..most, 0..most).q_start(1 << 40);
        check_disjoint(&[far, far.band(i64::MAX, i64::MAX)]).unwrap();
        check_disjoint(&[far.band(i64::MIN, -1 - (1 << 40)), far.band(-(1 << 40), i64::MAX)]).unwrap();
        assert!(check_disjoint(&[far.band(i64::MIN, -(1 << 40)), far.band(-(1 << 40), i64::MAX)]).is_err());
    }
}
