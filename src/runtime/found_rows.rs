// SPDX-License-Identifier: MIT OR Apache-2.0
//! Where each row of k and v lies if they lie in pages: listed before a run, looked up by the kernels.

use std::{format, vec::Vec};

use super::{bind::Bindings, keys::RawPages};
use crate::{
    batch::Side,
    error::{Error, Result},
    plan::Plan,
    schedule::{Buf, OpKind, Schedule, TensorId},
};

/// Where each k row of a rank lies; room that is kept from run to run.
#[derive(Default)]
pub(super) struct FoundRows {
    rows: Vec<u32>,
    /// Rows of each document that have been listed.
    listed: Vec<u64>,
}

impl FoundRows {
    /// Those that were listed last.
    pub(super) fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// Lists the rows of a rank.
    ///
    /// # Errors
    /// A table of another size than the batch needs; an entry whose rows are not those of k and v; rows that take more
    /// pages than a document has entries.
    ///
    /// # Safety
    /// The table is valid for reads.
    pub(super) unsafe fn list(&mut self, plan: &Plan, rank: usize, tensors: &Bindings, pages: RawPages) -> Result<()> {
        let Some(entries) = pages.entries else {
            return Err(Error::invalid("block_table", "in memory of a device", "in memory of the host, on the CPU"));
        };
        // Without entries the address may be none.
        let table =
            // SAFETY: so many entries are readable (the contract).
            if entries == 0 { &[] } else { unsafe { core::slice::from_raw_parts(pages.block_table, entries) } };
        let documents = plan.problem().batch().documents();
        pages.check_sizes()?;
        if documents.checked_mul(pages.pages_per_document) != Some(table.len()) {
            let expected = format!("{documents} documents of {} pages", pages.pages_per_document);
            return Err(Error::invalid("block_table", format!("of {} entries", table.len()), expected));
        }
        let have = [TensorId::K, TensorId::V].map(|t| tensors.get(t).tokens).into_iter().min().unwrap_or(0);
        // Pages that lie within k and v, whose rows have numbers that the kernels hold.
        let (size, stride) = (pages.page_size as u64, pages.page_stride as u64);
        let most = have.min(u64::from(u32::MAX));
        let all = if most < size { 0 } else { (most - size) / stride + 1 };
        self.rows.clear();
        self.listed.clear();
        self.listed.resize(documents, 0);
        let mut failure = None;
        plan.local_tokens(Side::K, rank).for_each(|_, _, doc| {
            let row = self.listed[doc];
            self.listed[doc] += 1;
            let (page, within) = (row / size, row % size);
            if failure.is_some() {
                return;
            }
            if page >= pages.pages_per_document as u64 {
                failure = Some((doc, None));
                return;
            }
            match table[doc * pages.pages_per_document + page as usize] {
                entry if entry >= 0 && (entry as u64) < all => self.rows.push((entry as u64 * stride + within) as u32),
                entry => failure = Some((doc, Some((page, entry)))),
            }
        });
        match failure {
            None => Ok(()),
            Some((doc, Some((page, entry)))) => {
                let expected = match all {
                    0 if most == have => format!("a page of {size} rows: k and v have {have}"),
                    0 => format!("a page of {size} rows: a table finds the first {most} rows of k and v"),
                    _ if most < have => format!(
                        "0 to {}: a table finds the first {most} rows of k and v, which have {have}, in pages of {size} rows",
                        all - 1
                    ),
                    _ => format!("0 to {}: k and v have {have} rows, pages of {size} rows", all - 1),
                };
                Err(Error::invalid(format!("block_table[{doc}][{page}]"), entry, expected))
            }
            Some((doc, None)) => Err(pages.too_few(self.listed[doc], doc, rank)),
        }
    }
}

/// Refuses runs that need k and v elsewhere than in kernels.
pub(super) fn check_supported(schedule: &Schedule) -> Result<()> {
    let is_kv = |buf: Buf| matches!(buf, Buf::User(TensorId::K | TensorId::V));
    let moved = schedule.sources.iter().any(|v| is_kv(v.buf)) || schedule.messages.iter().any(|m| is_kv(m.view.buf));
    let only_kernels = schedule.ops.iter().all(|op| match &op.kind {
        OpKind::Attend(a) => [a.k, a.v].iter().all(|v| is_kv(v.buf) && v.row == 0),
        OpKind::Pack(rows) | OpKind::Fetch { rows, .. } => rows.tensors.iter().all(|t| !is_kv(t.own.buf)),
        _ => true,
    });
    if moved || !only_kernels {
        return Err(Error::unsupported(
            "pages in a plan that copies or sends k and v",
            "rows are found through a table by the attention kernel alone",
            "plan a ring whose q circulates (circulate_forward queries) and no Ulysses ranks, or one rank",
        ));
    }
    Ok(())
}
