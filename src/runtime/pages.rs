// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of pages of a cache, as a run is given it.

/// Where the rows of k and v of this rank lie: a table of pages for each document.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// `[documents, pages]`, compact: the pages that hold this rank's k rows of each document of the batch, in the
    /// order in which the rank holds them. Row i of a document is in entry `i / size`. Entries beyond its rows are not
    /// read; documents may share pages.
    pub table: &'a [i32],
    /// Entries of a document in the table.
    pub per_document: usize,
    /// Rows of a page.
    pub size: usize,
    /// Rows of k and of v from one page to the next; `size` if pages adjoin.
    pub stride: usize,
}

/// [`Pages`] without a lifetime, for the duration of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawPages {
    pub(super) table: *const i32,
    pub(super) entries: usize,
    pub(super) per_document: usize,
    pub(super) size: usize,
    pub(super) stride: usize,
}
