// SPDX-License-Identifier: MIT OR Apache-2.0
//! What forwards over k and v in pages have of their own, on every device: a kernel for `sm_80` with the tiles of that
//! with dropout. It finds each row through a table in device memory.
//!
//! Where the rows of a run lie in their document is known when the plan is prepared, and is metadata. The table, and
//! the size of pages, are those of a run.

use crate::call::{Attend, Ranges};
use crate::error::{Error, Result};
use crate::kernel::cuda::abi::params::{Divisor, PageParams, PageRun, PageTable};
use crate::kernel::cuda::launch::dropped;
use crate::kernel::cuda::memory::metadata;
use crate::kernel::cuda::memory::metadata_writer::{Writer, padded};
use alloc::sync::Arc;
use alloc::vec::Vec;

/// Consecutive rows of a document that a rank has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldRows {
    /// The first, among all k rows of the rank.
    pub row: u64,
    pub document: u32,
    /// The first, among the rank's rows of the document.
    pub first: u32,
}

/// Where the k rows of a rank lie in their documents, in the order of the rows.
#[derive(Clone, Debug)]
pub(crate) struct HeldDocuments(Arc<[HeldRows]>);

impl HeldDocuments {
    pub(crate) fn new(rows: Vec<HeldRows>) -> Self {
        Self(rows.into())
    }

    /// Where row `row` of the rank lies.
    fn find(&self, row: u64) -> PageRun {
        let at = self.0.partition_point(|held| held.row <= row);
        // A range without rows may begin anywhere.
        let Some(held) = at.checked_sub(1).map(|at| self.0[at]) else { return PageRun { document: 0, first: 0 } };
        PageRun { document: held.document, first: held.first + (row - held.row) as u32 }
    }
}

/// Bytes of the metadata of a forward.
pub(in crate::kernel::cuda) fn forward_bytes(call: &Attend) -> Result<usize> {
    let (_, kernels) = dropped::find(&call.q, &call.v)?;
    let tiles = dropped::forward_tiles(&kernels);
    Ok(metadata::bytes(&call.ranges, tiles) + padded(call.ranges.k.len() * size_of::<PageRun>()))
}

/// Writes where the k runs of a call lie, and returns the parameters of a kernel that has no table yet.
pub(in crate::kernel::cuda) fn write_runs(
    writer: &mut Writer<'_>,
    ranges: &Ranges,
    held: &HeldDocuments,
) -> PageParams {
    let (list, runs) = writer.array::<PageRun>(ranges.k.len());
    list.iter_mut().zip(ranges.k).for_each(|(out, range)| *out = held.find(range.row as u64));
    PageParams { runs, table: PageTable { address: 0, size: Divisor::new(1), stride: 1, per_document: 0, unused: 0 } }
}

impl PageTable {
    /// Of a table in device memory.
    ///
    /// # Errors
    /// Sizes that the kernels cannot count with.
    pub(crate) fn new(address: u64, pages_per_document: usize, page_size: usize, page_stride: usize) -> Result<Self> {
        let number = |name, value: usize| {
            u32::try_from(value).map_err(|_| Error::invalid(name, value, "at most 4294967295 on a device"))
        };
        let [per_document, size, stride] = [
            number("pages_per_document", pages_per_document)?,
            number("page_size", page_size)?,
            number("page_stride", page_stride)?,
        ];
        Ok(Self { address, size: Divisor::new(size.max(1)), stride, per_document, unused: 0 })
    }
}
