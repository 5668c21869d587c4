// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sets of byte ranges: what a kernel or a copy read and wrote.

use std::collections::BTreeMap;

/// Disjoint, non-adjacent ranges of addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// start → end
    ranges: BTreeMap<u64, u64>,
    /// The range grown last: accesses come in runs.
    last: (u64, u64),
}

impl Footprint {
    /// Adds `[start, start + len)`.
    pub fn add(&mut self, start: u64, len: u64) {
        if len == 0 {
            return;
        }
        let (mut start, mut end) = (start, start + len);
        if start >= self.last.0 && end <= self.last.1 {
            return;
        }
        if let Some((&s, &e)) = self.ranges.range(..=start).next_back()
            && e >= start
        {
            if e >= end {
                self.last = (s, e);
                return;
            }
            start = s;
        }
        while let Some((&s, &e)) = self.ranges.range(start..=end).next_back() {
            if s < start {
                break;
            }
            end = end.max(e);
            self.ranges.remove(&s);
            if s == start {
                break;
            }
        }
        self.ranges.insert(start, end);
        self.last = (start, end);
    }

    /// The ranges, in order: (start, end).
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.ranges.iter().map(|(&s, &e)| (s, e))
    }

    /// The first overlap with another set.
    pub fn overlap(&self, other: &Self) -> Option<(u64, u64)> {
        let (small, large) = if self.ranges.len() <= other.ranges.len() { (self, other) } else { (other, self) };
        for (&s, &e) in &small.ranges {
            if let Some((&os, &oe)) = large.ranges.range(..e).next_back()
                && oe > s
            {
                return Some((s.max(os), e.min(oe)));
            }
        }
        None
    }

    /// Whether nothing was touched.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_merge() {
        let mut f = Footprint::default();
        for (s, n) in [(0, 4), (8, 4), (4, 4), (20, 2), (1, 2), (12, 8), (30, 1), (0, 40)] {
            f.add(s, n);
        }
        assert_eq!(f.iter().collect::<Vec<_>>(), [(0, 40)]);
        let mut g = Footprint::default();
        g.add(40, 8);
        assert_eq!(f.overlap(&g), None);
        g.add(36, 2);
        assert_eq!(f.overlap(&g), Some((36, 38)));
    }

    #[test]
    fn agrees_with_a_bit_set() {
        let mut x = 7u64;
        let mut f = Footprint::default();
        let mut bits = [false; 300];
        for _ in 0..400 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (s, n) = ((x >> 33) % 280, (x >> 20) % 12);
            f.add(s, n);
            bits[s as usize..(s + n) as usize].fill(true);
            let mut mine = [false; 300];
            for (s, e) in f.iter() {
                mine[s as usize..e as usize].fill(true);
            }
            assert_eq!(mine, bits);
            if bits.iter().filter(|b| **b).count() > 200 {
                f = Footprint::default();
                bits.fill(false);
            }
        }
    }
}
