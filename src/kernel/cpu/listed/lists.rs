// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lists of keys of a call.

/// The keys of each q row of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyLists<'a> {
    /// `[q rows, heads, entries]`, compact: positions in the document of the row, or −1 for none.
    pub positions: &'a [i32],
    /// 1 for all kv heads, or the kv heads of the whole problem.
    pub heads: usize,
    /// Entries of a row.
    pub entries: usize,
}

impl<'a> KeyLists<'a> {
    /// The entries of a row for a head of the lists.
    pub(crate) fn of(&self, row: i64, head: usize) -> &'a [i32] {
        let first = (row as usize * self.heads + head) * self.entries;
        &self.positions[first..first + self.entries]
    }
}
