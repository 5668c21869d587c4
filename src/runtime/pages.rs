// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of pages of a cache, as a run is given it.

use std::format;

use crate::error::{Error, Result};

/// Where the rows of k and v of this rank lie: a table of pages for each document.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// `[documents, pages]`, compact: the pages that hold this rank's k rows of each document of the batch, in the
    /// order in which the rank holds them. Row i of a document is in entry `i / page_size`. Entries beyond its rows are
    /// not read; documents may share pages. Pages lie within the first 2³² − 1 rows of k and v.
    pub block_table: &'a [i32],
    /// Entries of a document in the table.
    pub pages_per_document: usize,
    /// Rows of a page.
    pub page_size: usize,
    /// Rows of k and of v from one page to the next; `page_size` if pages adjoin.
    pub page_stride: usize,
}

/// [`Pages`] whose table is in the memory of the rank's device, where engines keep it: no run uploads or checks it.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub struct DevicePages {
    /// The device address of `[documents, pages]`, compact, as [`Pages::block_table`], aligned to 4 bytes. It is read
    /// when the run reaches it in stream order, by each replay of a graph too. The entries of a document's rows must be
    /// pages of k and v: the kernels read where they say.
    pub block_table: *const i32,
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
    /// Entries of the table; `None` for one in device memory.
    pub(super) entries: Option<usize>,
    pub(super) pages_per_document: usize,
    pub(super) page_size: usize,
    pub(super) page_stride: usize,
}

impl RawPages {
    /// Refuses pages that no table can describe.
    ///
    /// # Errors
    /// A page without rows, or pages that overlap.
    pub(super) fn check_sizes(&self) -> Result<()> {
        for (name, value, least) in
            [("page_size", self.page_size, 1), ("page_stride", self.page_stride, self.page_size)]
        {
            if value < least {
                return Err(Error::invalid(name, value, format!("at least {least}")));
            }
        }
        Ok(())
    }

    /// The refusal of a table that is too small for the `rows` rows that a rank has of a document.
    pub(super) fn too_few(&self, rows: u64, document: usize, rank: usize) -> Error {
        let found = format!("{} pages of {} rows", self.pages_per_document, self.page_size);
        let expected = format!("room for the {rows} k rows of document {document} on rank {rank}");
        Error::invalid("block_table", found, expected)
    }
}
