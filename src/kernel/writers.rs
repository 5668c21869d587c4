// SPDX-License-Identifier: MIT OR Apache-2.0
//! Checks that each row is written by one range only.
//!
//! A call distributes its ranges over independent workers or blocks, so a row in two ranges would be written by two at
//! the same time. Nothing would fail, but the result would be that of the later writer, or a mixture. So ranges whose
//! rows are written are compared before a call writes anything. Ranges that are only read may share rows: documents
//! with a common prefix list its keys once each.
//!
//! Kernels may not allocate, so there is nowhere to sort a long list. Lists in the order of their rows, as from the
//! planner and most callers, are checked in one pass. Any other list is sorted in parts of some thousand entries on the
//! stack, and the entries after each part are searched in it.

use alloc::format;

use crate::call::{Block, Range, Ranges, RawTensor};
use crate::error::{Error, Result};

/// Entries that are sorted at a time; their numbers take 16 KiB of stack.
const PART: usize = 8192;

impl Ranges<'_> {
    /// Refuses a row in two q ranges, if rows of q ranges are written, or in two k ranges, if theirs are. Rows were
    /// checked to lie within their tensors.
    pub(super) fn one_writer(&self, queries: bool, keys: bool) -> Result<()> {
        if queries {
            disjoint("ranges.q", self.q.len(), |i| &self.q[i].range)?;
        }
        if keys {
            disjoint("ranges.k", self.k.len(), |i| &self.k[i])?;
        }
        Ok(())
    }
}

impl Block {
    /// The sources of block `i` that begin where it does, which only its first may, with its type and strides (those
    /// that anything steps by).
    pub(super) fn check_in_place(&self, i: usize, sources: &[RawTensor]) -> Result<()> {
        let dst = &self.dst;
        if dst.tokens == 0 || dst.heads == 0 || dst.dim == 0 {
            return Ok(());
        }
        for (j, s) in sources.iter().enumerate().filter(|(_, s)| s.ptr == dst.ptr) {
            let name = || format!("blocks[{i}].sources[{j}]");
            let used = |count: u64, stride| if count > 1 { stride } else { 0 };
            let strides = |t: &RawTensor| (used(dst.tokens, t.token_stride), used(u64::from(dst.heads), t.head_stride));
            if j > 0 {
                return Err(Error::invalid(name(), "dst", "another tensor: only the first source may be dst"));
            }
            if s.dtype != dst.dtype || strides(s) != strides(dst) {
                let say = |t: &RawTensor| format!("{} with strides {:?}", t.dtype, strides(t));
                return Err(Error::invalid(name(), say(s), format!("{}, as dst, where it lies", say(dst))));
            }
        }
        Ok(())
    }
}

/// Refuses the first two of `count` ranges that are found to share a row.
fn disjoint<'a>(list: &str, count: usize, range: impl Fn(usize) -> &'a Range) -> Result<()> {
    let begin = |i: usize| range(i).row;
    let end = |i: usize| range(i).row + i64::from(range(i).len);
    let filled = |from: usize, to: usize| (from..to).filter(|&i| range(i).len > 0);
    let mut last = i64::MIN;
    if filled(0, count).all(|i| core::mem::replace(&mut last, end(i)) <= begin(i)) {
        return Ok(());
    }
    let shared = |a: usize, b: usize| {
        let (a, b) = (a.min(b), a.max(b));
        let expected = format!("no row of {list}[{a}], which is rows {}..{}", begin(a), end(a));
        Error::invalid(format!("{list}[{b}]"), format!("rows {}..{}", begin(b), end(b)), expected)
            .hint("a row has one writer in a call: pair its range with all it meets, or make two calls")
    };
    let mut part = [0u16; PART];
    for first in (0..count).step_by(PART) {
        let behind = count.min(first + PART);
        let mut n = 0;
        for i in filled(first, behind) {
            part[n] = (i - first) as u16;
            n += 1;
        }
        let part = &mut part[..n];
        part.sort_unstable_by_key(|&i| begin(first + usize::from(i)));
        let at = |i: usize| first + usize::from(part[i]);
        if let Some(i) = (1..n).find(|&i| begin(at(i)) < end(at(i - 1))) {
            return Err(shared(at(i - 1), at(i)));
        }
        if n == 0 {
            continue;
        }
        let (low, high) = (begin(at(0)), end(at(n - 1)));
        for i in filled(behind, count).filter(|&i| begin(i) < high && low < end(i)) {
            // Of the part, whose rows are disjoint, the last range that begins before this one ends is the one that
            // reaches farthest into it.
            let before = part.partition_point(|&other| begin(first + usize::from(other)) < end(i));
            if before > 0 && begin(i) < end(at(before - 1)) {
                return Err(shared(at(before - 1), i));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::{string::ToString, vec::Vec};

    fn check(list: &[(i64, u32)]) -> Result<()> {
        let ranges: Vec<_> = list.iter().map(|&(row, len)| Range::plain(row, len, 0, 0)).collect();
        Ranges { k: &ranges, ..Ranges::default() }.one_writer(false, true)
    }

    /// Whether two ranges share a row, pair by pair.
    fn shares(list: &[(i64, u32)]) -> bool {
        let met = |a: &(i64, u32), b: &(i64, u32)| {
            a.1 > 0 && b.1 > 0 && a.0 < b.0 + i64::from(b.1) && b.0 < a.0 + i64::from(a.1)
        };
        list.iter().enumerate().any(|(i, a)| list[..i].iter().any(|b| met(a, b)))
    }

    /// Few ranges over so many rows that about half of the lists are disjoint.
    #[test]
    fn short_lists_as_pair_by_pair() {
        for seed in 0..2000 {
            let mut draw = fastrand::Rng::with_seed(seed);
            let list: Vec<_> = (0..draw.usize(..9)).map(|_| (draw.i64(0..60), draw.u32(..6))).collect();
            assert_eq!(check(&list).is_err(), shares(&list), "seed {seed}: {list:?}");
        }
    }

    /// Lists of several parts, in an order that mixes them, and one range that shares a single row with another, far
    /// away or near, before it or behind it in the list.
    #[test]
    fn long_lists_in_any_order() {
        let n = 3 * PART as i64 + 17;
        // 7 has no factor in common with n, so every place is taken once.
        assert_ne!(n % 7, 0);
        let mut list: Vec<_> = (0..n).map(|i| (i * 7 % n * 10, (i % 7) as u32)).collect();
        assert!(check(&list).is_ok());
        for (i, j) in
            [(0, 1), (5, PART), (PART, 5), (PART + 1, PART + 900), (n as usize - 1, 3), (2 * PART, n as usize - 2)]
        {
            let (from, to) = (list[i], list[j]);
            // The last row of another range, or its first.
            let last = (to.0 + i64::from(to.1.max(1)) - 1, 3);
            for (moved, len) in [last, (to.0 - 2, 3)] {
                list[i] = (moved, len);
                list[j].1 = to.1.max(1);
                let error = check(&list).unwrap_err().to_string();
                let names = [i.max(j), i.min(j)].map(|x| alloc::format!("ranges.k[{x}]"));
                assert!(error.starts_with(&names[0]) && error.contains(&names[1]), "{i}, {j}: {error}");
                (list[i], list[j]) = (from, to);
            }
        }
    }

    #[test]
    fn the_refusal_names_both_entries() {
        let error = check(&[(20, 4), (0, 8), (7, 2)]).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("ranges.k[2] is rows 7..9, expected no row of ranges.k[1], which is rows 0..8; ")
        );
        assert!(check(&[(5, 0), (0, 9), (9, 1), (3, 0)]).is_ok(), "empty ranges share nothing");
    }
}
