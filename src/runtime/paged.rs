// SPDX-License-Identifier: MIT OR Apache-2.0
//! A forward whose k and v lie in pages: rows of a cache that are found through a table of pages, without copies.
//!
//! A server keeps k and v in pages of a few rows each, and a table says which pages a sequence has. Before a run the
//! rank lists where each of its k rows lies, and the kernels look rows up where they pack them into tiles. So tiles
//! hold the same rows as in a call without pages, and results have the same bits.
//!
//! Only kernels look rows up: a plan that copies or sends k and v is refused.

use std::{format, vec::Vec};

use super::{bind::Bindings, rank::Rank, tensors::Forward};
use crate::{
    batch::Side,
    call::RawTensor,
    element::Element,
    error::{Error, Result},
    plan::Plan,
    schedule::{Buf, Direction, OpKind, Purpose, Schedule, TensorId},
};

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
    table: *const i32,
    entries: usize,
    per_document: usize,
    size: usize,
    stride: usize,
}

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
        // Without entries the address may be none.
        let table =
            // SAFETY: so many entries are readable (the contract).
            if pages.entries == 0 { &[] } else { unsafe { core::slice::from_raw_parts(pages.table, pages.entries) } };
        let documents = plan.problem().batch().documents();
        for (name, value) in [("page_size", pages.size), ("page_stride", pages.stride)] {
            let least = if name == "page_size" { 1 } else { pages.size };
            if value < least {
                return Err(Error::invalid(name, value, format!("at least {least}")));
            }
        }
        if documents.checked_mul(pages.per_document) != Some(table.len()) {
            let expected = format!("{documents} documents of {} pages", pages.per_document);
            return Err(Error::invalid("block_table", format!("of {} entries", table.len()), expected));
        }
        let have = [TensorId::K, TensorId::V].map(|t| tensors.get(t).tokens).into_iter().min().unwrap_or(0);
        // Pages that lie within k and v, whose rows have numbers that the kernels hold.
        let (size, stride) = (pages.size as u64, pages.stride as u64);
        let most = have.min(u64::from(u32::MAX));
        let all = if most < size { 0 } else { (most - size) / stride + 1 };
        self.rows.clear();
        self.listed.clear();
        self.listed.resize(documents, 0);
        let mut failure = None;
        plan.for_each_token(Side::K, rank, |_, _, doc| {
            let row = self.listed[doc];
            self.listed[doc] += 1;
            let (page, within) = (row / size, row % size);
            if failure.is_some() {
                return;
            }
            if page >= pages.per_document as u64 {
                failure = Some((doc, None));
                return;
            }
            match table[doc * pages.per_document + page as usize] {
                entry if entry >= 0 && (entry as u64) < all => self.rows.push((entry as u64 * stride + within) as u32),
                entry => failure = Some((doc, Some((page, entry)))),
            }
        });
        match failure {
            None => Ok(()),
            Some((doc, Some((page, entry)))) => {
                let expected = match all {
                    0 => format!("a page of {size} rows: k and v have {have}"),
                    _ => format!("0 to {}: k and v have {have} rows, pages of {size} rows", all - 1),
                };
                Err(Error::invalid(format!("block_table[{doc}][{page}]"), entry, expected))
            }
            Some((doc, None)) => {
                let found = format!("{} pages of {size} rows", pages.per_document);
                let expected = format!("room for the {} k rows of document {doc} on rank {rank}", self.listed[doc]);
                Err(Error::invalid("block_table", found, expected))
            }
        }
    }
}

/// Refuses runs that need k and v elsewhere than in kernels.
pub(super) fn suits(run: Purpose, schedule: &Schedule) -> Result<()> {
    if run == Purpose::Attention(Direction::Backward) {
        let limit = "gradients of k and v have no pages";
        return Err(Error::unsupported("a backward with pages", limit, "gather k and v for a backward"));
    }
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

impl Bindings {
    /// Says that k and v lie in pages. The table must be valid for reads during runs with these tensors; k and v have
    /// as many rows as all pages together. For a forward on the CPU.
    #[must_use]
    pub fn with_pages(mut self, pages: Pages<'_>) -> Self {
        let Pages { table, per_document, size, stride } = pages;
        self.pages = Some(RawPages { table: table.as_ptr(), entries: table.len(), per_document, size, stride });
        self
    }

    /// The shape that a tensor must have: k and v in pages may have any number of rows.
    pub(super) fn shape_of(&self, tensor: TensorId, raw: &RawTensor, [tokens, heads, dim]: [usize; 3]) -> [usize; 3] {
        let paged = self.pages.is_some() && matches!(tensor, TensorId::K | TensorId::V);
        [if paged { raw.tokens as usize } else { tokens }, heads, dim]
    }
}

impl Rank {
    /// [`Rank::forward`] over k and v that lie in pages, without copying them. `k` and `v` of `tensors` have the rows
    /// of all pages, `[rows, kv_heads, dim]`: an array of `[pages, size, kv_heads, dim]` seen as rows. `pages` says
    /// which pages hold the k rows of this rank. The result has the bits of a forward whose k and v have these rows one
    /// after another.
    ///
    /// On one rank the table is that of vLLM and FlashAttention (`block_table`), with the lengths of the cached
    /// sequences as the batch's k side. Where the keys are spread over a ring, each rank has a table of the pages of
    /// its own rows: with the striped layout row i of a document on ring rank j is that of position `(i / stripe ·
    /// ring + j) · stripe + i mod stripe`.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, View, ViewMut, runtime::Pages, transport::local};
    ///
    /// // One new token of a sequence with three cached rows: pages of two rows, the second page before the first.
    /// let batch = Batch::cross(&[0, 1], &[0, 3], None)?;
    /// let plan = Plan::new(&Problem::new(batch, 1, 1, 2, Dtype::F32), Mesh::single(), Layout::Contiguous)?;
    /// let mut rank = Rank::new(local::group(1, std::time::Duration::from_secs(10))?.remove(0));
    /// let (k, v) = ([0.0f32; 8], [9.0f32, 9.0, f32::NAN, f32::NAN, 3.0, 0.0, 0.0, 3.0]);
    /// let (mut o, mut lse) = ([0.0f32; 2], [0.0f32]);
    /// let tensors = Forward {
    ///     q: View::new(&[1.0, 1.0], 1, 1, 2)?,
    ///     k: View::new(&k, 4, 1, 2)?,
    ///     v: View::new(&v, 4, 1, 2)?,
    ///     sinks: None,
    ///     o: ViewMut::new(&mut o, 1, 1, 2)?,
    ///     lse: ViewMut::new(&mut lse, 1, 1, 1)?,
    ///     max_logit: None,
    /// };
    /// rank.forward_paged(&plan, tensors, Pages { table: &[1, 0], per_document: 2, size: 2, stride: 2 })?;
    /// assert_eq!(o, [4.0, 4.0]);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rank::forward`]; a table that does not fit the plan, an entry that is no page of k and v;
    /// [`Error::Unsupported`] for a plan that copies or sends k and v (Ulysses ranks; a ring whose k circulates), and
    /// on a device.
    pub fn forward_paged<T: Element>(&mut self, plan: &Plan, tensors: Forward<'_, T>, pages: Pages<'_>) -> Result<()> {
        self.expect_host("forward_paged", "gather the pages into k and v, and call forward_on")?;
        let bindings = tensors.bindings(self.device(), plan)?.with_pages(pages);
        // SAFETY: during this call the views guarantee valid memory, the exclusive ones that nothing else uses theirs,
        // and the table is borrowed.
        unsafe { self.run(plan, Direction::Forward, &bindings) }
    }
}
