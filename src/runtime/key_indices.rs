// SPDX-License-Identifier: MIT OR Apache-2.0
//! The lists of keys of a run, as a rank is given them.

/// For each of this rank's q tokens, the keys that it attends to, out of those that the plan's mask allows.
#[derive(Clone, Copy, Debug)]
pub struct KeyIndices<'a> {
    /// `[tokens, heads, entries]`, compact, a row for each of this rank's q tokens in its order: positions of keys in
    /// the token's document, from 0, in any order and each at most once; −1 for none.
    pub indices: &'a [i32],
    /// 1 for lists that all kv heads share, or the problem's kv heads.
    pub heads: usize,
    /// Entries of a list; 0 for lists of no key. All ranks have the same number.
    pub entries: usize,
}

/// [`KeyIndices`] without a lifetime, for the duration of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawKeyIndices {
    pub(super) indices: *const i32,
    pub(super) len: usize,
    pub(super) heads: usize,
    pub(super) entries: usize,
}

impl RawKeyIndices {
    /// What all ranks must have in common.
    pub(super) fn shape(&self) -> [usize; 2] {
        [self.heads, self.entries]
    }

    /// All entries.
    ///
    /// # Safety
    /// They are valid for reads.
    pub(super) unsafe fn all<'a>(self) -> &'a [i32] {
        // Without entries the address may be none.
        // SAFETY: so many entries are readable (the contract).
        if self.len == 0 { &[] } else { unsafe { core::slice::from_raw_parts(self.indices, self.len) } }
    }
}
