// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of pages of a cache, as a run is given it.

/// Where the rows of k and v of this rank lie: a table of pages for each document.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// `[documents, pages]`, compact: the pages that hold this rank's k rows of each document of the batch, in the
    /// order in which the rank holds them. Row i of a document is in entry `i / page_size`. Entries beyond its rows are
    /// not read; documents may share pages.
    pub block_table: &'a [i32],
    /// Entries of a document in the table.
    pub pages_per_document: usize,
    /// Rows of a page.
    pub page_size: usize,
    /// Rows of k and of v from one page to the next; `page_size` if pages adjoin.
    pub page_stride: usize,
}

/// [`Pages`] without a lifetime, for the duration of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawPages {
    pub(super) block_table: *const i32,
    pub(super) entries: usize,
    pub(super) pages_per_document: usize,
    pub(super) page_size: usize,
    pub(super) page_stride: usize,
}
