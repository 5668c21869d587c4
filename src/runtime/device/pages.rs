// SPDX-License-Identifier: MIT OR Apache-2.0
//! The table of pages of a run on a device: checked as far as the host can see it, and given to the launches.

use super::{DeviceRank, sequence::Sequence};
use crate::{
    error::{Error, Result},
    kernel::cuda::PageTable,
    runtime::{backend::Backend, keys::RawPages},
    transport::Transport,
};

impl DeviceRank {
    /// The table of a run of `sequence`, which was prepared for pages.
    pub(super) fn page_table(&self, pages: &RawPages, sequence: &Sequence) -> Result<PageTable> {
        let at = self.device();
        if pages.entries.is_some() {
            let expected = std::format!("in memory of {at}");
            return Err(Error::invalid("block_table", "in memory of the host", expected)
                .hint("keep the table on the device, as k and v"));
        }
        pages.check_sizes()?;
        let (document, rows) = sequence.longest();
        let each = pages.pages_per_document;
        if (each as u64).saturating_mul(pages.page_size as u64) < rows {
            return Err(pages.too_few(rows, document, self.transport.rank()));
        }
        let table = PageTable::new(pages.block_table as usize as u64, each, pages.page_size, pages.page_stride)?;
        if rows > 0 {
            if !pages.block_table.is_aligned() {
                let found = std::format!("at {:p}", pages.block_table);
                return Err(Error::invalid("block_table", found, "a multiple of 4 bytes"));
            }
            self.gpu().accept_address("block_table", pages.block_table.cast())?;
        }
        Ok(table)
    }
}
