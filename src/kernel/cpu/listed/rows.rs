// SPDX-License-Identifier: MIT OR Apache-2.0
//! The listed rows of a part of a call: found among the k ranges, copied, and their gradients added to those of k and
//! v.

use super::lists::KeyLists;
use crate::call::{Band, Pair, QRange, Range, Ranges, RawTensor};
use crate::element::Dtype;
use crate::kernel::cpu::memory::rows::address;
use alloc::vec::Vec;

/// A position that no k range of the call holds.
const ABSENT: u32 = u32::MAX;
/// Rows of q of a part.
const ROWS: usize = 1 << 12;

/// Memory of the lists of calls, kept from call to call.
#[derive(Debug, Default)]
pub(crate) struct ListScratch {
    /// The row of k of each position of the current q range's document, or `ABSENT`.
    row_of: Vec<u32>,
    /// The rows of k that the part's q rows attend to, q row by q row.
    table: Vec<u32>,
    q: Vec<QRange>,
    k: Vec<Range>,
    pairs: Vec<Pair>,
    /// Copies of rows; words, so that elements are aligned.
    copies: Vec<u64>,
}

/// Where the next part begins: a q range, and a row of it.
#[derive(Debug, Default)]
pub(super) struct NextPart {
    range: usize,
    row: u32,
}

impl ListScratch {
    /// Lists the next part: rows with at most `most` entries, or one row. False if there are no more rows. With `each`
    /// every key is a range of its own, at its position.
    pub(super) fn fill(
        &mut self,
        ranges: &Ranges,
        lists: &KeyLists,
        list: usize,
        each: bool,
        most: usize,
        cursor: &mut NextPart,
    ) -> bool {
        self.table.clear();
        self.q.clear();
        self.k.clear();
        self.pairs.clear();
        while let Some(q) = ranges.q.get(cursor.range) {
            if cursor.row == 0 {
                self.place(ranges, q);
            }
            while cursor.row < q.range.len {
                let full = self.table.len() + lists.entries > most || self.q.len() == ROWS;
                if full && !self.q.is_empty() {
                    return true;
                }
                self.push(q, cursor.row, lists, list, each);
                cursor.row += 1;
            }
            *cursor = NextPart { range: cursor.range + 1, row: 0 };
        }
        !self.q.is_empty()
    }

    /// Notes where the keys of a q range lie.
    fn place(&mut self, ranges: &Ranges, q: &QRange) {
        self.row_of.clear();
        for k in ranges.pairs_of(q).iter().map(|pair| &ranges.k[pair.k as usize]).filter(|k| k.len > 0) {
            let end = (k.last() + 1) as usize;
            if self.row_of.len() < end {
                self.row_of.resize(end, ABSENT);
            }
            (0..k.len).for_each(|i| self.row_of[k.position(i) as usize] = (k.row + i64::from(i)) as u32);
        }
    }

    /// Adds a row of q with its keys.
    fn push(&mut self, q: &QRange, i: u32, lists: &KeyLists, list: usize, each: bool) {
        let (row, doc) = (q.range.row + i64::from(i), q.range.doc);
        let (begin, first) = (self.table.len(), self.k.len() as u32);
        for &position in lists.of(row, list) {
            // −1 is no position of a document.
            let found = usize::try_from(position).ok().and_then(|at| self.row_of.get(at));
            let Some(&row) = found.filter(|&&row| row != ABSENT) else { continue };
            if each {
                self.k.push(Range::plain(self.table.len() as i64, 1, position.into(), doc));
            }
            self.table.push(row);
        }
        let count = (self.table.len() - begin) as u32;
        if !each && count > 0 {
            // Without a window and slopes positions do not matter.
            self.k.push(Range::plain(begin as i64, count, begin as i64, doc));
        }
        let keys_begin = self.pairs.len() as u32;
        self.pairs.extend((first..self.k.len() as u32).map(Pair::of));
        // Forward and backward choose their algorithm by the lengths, of which every part has the same.
        let document = if q.document == [0; 2] { q.document } else { [1, lists.entries as u32] };
        let range = Range::plain(row, 1, q.range.position(i), doc);
        self.q.push(QRange { range, document, keys_begin, keys_end: self.pairs.len() as u32, mode: q.mode });
    }

    /// The ranges of the part; k ranges have rows of the table.
    pub(super) fn ranges(&self) -> Ranges<'_> {
        Ranges { q: &self.q, k: &self.k, pairs: &self.pairs, bands: &[Band::WHOLE] }
    }

    pub(super) fn table(&self) -> &[u32] {
        &self.table
    }

    /// Compact tensors of the heads and dims of these, with a row for each entry of the table; NONE for NONE.
    pub(super) fn reserve(&mut self, like: [RawTensor; 4]) -> [RawTensor; 4] {
        let rows = self.table.len();
        let words = like.map(|t| (rows * bytes_of_row(&t)).div_ceil(size_of::<u64>()));
        let all = words.iter().sum();
        if self.copies.len() < all {
            self.copies.resize(all, 0);
        }
        let mut next = self.copies.as_mut_ptr();
        core::array::from_fn(|i| {
            let (t, ptr) = (&like[i], next);
            next = next.wrapping_add(words[i]);
            if t.is_none() { *t } else { RawTensor::compact(ptr.cast(), t.dtype, rows as u64, t.heads, t.dim) }
        })
    }

    /// Copies the rows of the table, and returns the copies.
    ///
    /// # Safety
    /// The rows are valid in `from`; `to` is of [`ListScratch::reserve`], for `from`.
    pub(super) unsafe fn copy(&self, from: &RawTensor, to: RawTensor) -> RawTensor {
        let bytes = from.dim as usize * from.dtype.size();
        for (i, &row) in self.table.iter().enumerate() {
            for head in 0..from.heads {
                // SAFETY: a row and a head of each (the contract), which are apart.
                unsafe {
                    let (source, target) = (address(from, row.into(), head), address(&to, i as i64, head));
                    core::ptr::copy_nonoverlapping(source, target, bytes);
                }
            }
        }
        to
    }
}

/// Bytes of a row of all heads, without gaps; 0 for NONE.
pub(super) fn bytes_of_row(t: &RawTensor) -> usize {
    if t.is_none() { 0 } else { t.heads as usize * t.dim as usize * t.dtype.size() }
}

/// Writes zeros to the rows of ranges.
///
/// # Safety
/// The rows are valid for writes.
pub(super) unsafe fn clear_rows(t: &RawTensor, ranges: &[Range]) {
    let bytes = t.dim as usize * t.dtype.size();
    for range in ranges {
        for row in range.row..range.row + i64::from(range.len) {
            for head in 0..t.heads {
                // SAFETY: a row of the ranges (the contract); zeros are a number of every type.
                unsafe { core::ptr::write_bytes(address(t, row, head), 0, bytes) };
            }
        }
    }
}

/// Adds row i of `from` to row `table[i]` of `to`, in this order.
///
/// # Safety
/// The rows are valid in both, of an accumulator's type, and apart.
pub(super) unsafe fn add_rows(to: &RawTensor, from: &RawTensor, table: &[u32]) {
    /// # Safety
    /// As above, of this type.
    unsafe fn add<A: Copy + core::ops::AddAssign>(to: &RawTensor, from: &RawTensor, table: &[u32]) {
        let dim = to.dim as usize;
        for (i, &row) in table.iter().enumerate() {
            for head in 0..to.heads {
                // SAFETY: a row and a head of each (the contract), which are apart.
                unsafe {
                    let target = core::slice::from_raw_parts_mut(address(to, row.into(), head).cast::<A>(), dim);
                    let source = core::slice::from_raw_parts(address(from, i as i64, head).cast::<A>(), dim);
                    target.iter_mut().zip(source).for_each(|(to, &from)| *to += from);
                }
            }
        }
    }
    // SAFETY: the contract.
    unsafe {
        match to.dtype {
            Dtype::F64 => add::<f64>(to, from, table),
            _ => add::<f32>(to, from, table),
        }
    }
}
