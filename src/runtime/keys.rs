// SPDX-License-Identifier: MIT OR Apache-2.0
//! Which keys a run of attention reads, and where they lie.
//!
//! A server keeps k and v in pages of a few rows each, and a table says which pages a sequence has. Before a run the
//! rank lists where each of its k rows lies, and the kernels look rows up where they pack them into tiles. So tiles
//! hold the same rows as in a call without pages, and results have the same bits. Only kernels look rows up: a plan
//! that copies or sends k and v is refused.
//!
//! Lists are sparse attention whose keys an indexer chose, a few for each token: data that each rank has for its own
//! tokens. A plan does not know them, and moves the rows that its mask allows. Each kernel call of the run then attends
//! to those of its keys that a row lists. Where Ulysses ranks exchange heads for tokens, they exchange the lists before
//! the run.

use core::marker::PhantomData;
use std::format;

use crate::error::{Error, Result};

/// The keys of a forward or a backward.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum Keys<'a> {
    /// All that the mask allows, one row after another in k and v.
    #[default]
    All,
    /// All that the mask allows, in pages, of a forward: k and v are not copied.
    ///
    /// k and v have the rows of all pages, `[rows, kv_heads, dim]`: an array of `[pages, size, kv_heads, dim]` seen as
    /// rows. The result has the bits of a forward whose k and v have these rows one after another.
    ///
    /// On one rank the table is that of vLLM and FlashAttention (`block_table`), with the lengths of the cached
    /// sequences as the batch's k side. Where the keys are spread over a ring, each rank has a table of the pages of
    /// its own rows, in the order of [`Plan::local_tokens`](crate::Plan::local_tokens): with the striped layout, and
    /// documents of k whose lengths are multiples of `stripe · ring`, row i of a document on ring rank j is that of
    /// position `(i / stripe · ring + j) · stripe + i mod stripe`.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, View, ViewMut, transport::local};
    /// use cpattn::runtime::{BlockTable, Keys, Pages};
    ///
    /// // One new token of a sequence with three cached rows: pages of two rows, the second page before the first.
    /// let batch = Batch::cross(&[0, 1], &[0, 3], None)?;
    /// let plan = Plan::new(&Problem::new(batch, 1, 1, 2, Dtype::F32), Mesh::single(), Layout::Contiguous)?;
    /// let mut rank = Rank::new(local::group(1, std::time::Duration::from_secs(10))?.remove(0));
    /// let (k, v) = ([0.0f32; 8], [9.0f32, 9.0, f32::NAN, f32::NAN, 3.0, 0.0, 0.0, 3.0]);
    /// let (mut o, mut lse) = ([0.0f32; 2], [0.0f32]);
    /// let (q, k, v) = (View::new(&[1.0, 1.0], 1, 1, 2)?, View::new(&k, 4, 1, 2)?, View::new(&v, 4, 1, 2)?);
    /// let (out, sums) = (ViewMut::new(&mut o, 1, 1, 2)?, ViewMut::new(&mut lse, 1, 1, 1)?);
    /// let block_table = BlockTable::new(&[1, 0]);
    /// let pages = Pages { block_table, pages_per_document: 2, page_size: 2, page_stride: 2 };
    /// rank.forward(&plan, Forward::new(q, k, v, out, sums).keys(Keys::Pages(pages)))?;
    /// assert_eq!(o, [4.0, 4.0]);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// Refused: a table that does not fit the plan; on the CPU, an entry that is no page of k and v; a plan that has
    /// dropout, or copies or sends k and v (Ulysses ranks; a ring whose k circulates); a backward.
    ///
    /// On a device the table is in its memory. The first call of a plan prepares it; captured graphs read the table
    /// anew in each replay. A block of the kernel walks over all keys of a document, so few q rows over a long cache
    /// leave multiprocessors idle.
    Pages(Pages<'a>),
    /// Those that each q token lists: the result of a dense run whose mask has these pairs alone.
    ///
    /// A token without any gets o 0 and lse −∞, or those of the sinks. Rows of k and v that no token lists may hold
    /// anything, and get gradients 0; each gradient is a sum in the order of the tokens, so that a run repeats bit for
    /// bit. All ranks of the group give lists of the same heads and entries; a backward is given those of its forward.
    ///
    /// All options of a problem are honoured but slices; a row's window and causal limit are those of the plan's mask,
    /// within which its keys must be. In a ring the rows of k and v that the lists of a rank's tokens name go to it, or
    /// all that the mask allows, whichever are fewer bytes: [`KeyRows`](crate::plan::KeyRows) chooses,
    /// [`RankWorkspace::key_row_bytes`](super::RankWorkspace::key_row_bytes) counts. Results are the same bits either
    /// way, except over several nodes. Time and memory of the kernels are those of the listed pairs, and of the rows of
    /// k for each part of a sequence.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, View, ViewMut, transport::local};
    /// use cpattn::runtime::{KeyIndices, Keys};
    ///
    /// // Three tokens, causal; each lists at most two keys.
    /// let plan = Plan::new(&Problem::new(Batch::new(&[0, 3])?, 1, 1, 2, Dtype::F32), Mesh::single(), Layout::Contiguous)?;
    /// let mut rank = Rank::new(local::group(1, std::time::Duration::from_secs(10))?.remove(0));
    /// let (q, k, v) = ([0.0f32; 6], [1.0f32; 6], [2.0, 0.0, f32::NAN, 4.0, 6.0, 8.0]);
    /// let (mut o, mut lse) = ([9.0f32; 6], [0.0f32; 3]);
    /// let [q, k, v] = [&q, &k, &v].map(|x| View::new(x, 3, 1, 2));
    /// let (out, sums) = (ViewMut::new(&mut o, 3, 1, 2)?, ViewMut::new(&mut lse, 3, 1, 1)?);
    /// let keys = Keys::Listed(KeyIndices { indices: &[0, -1, -1, -1, 2, 0], heads: 1, entries: 2 });
    /// rank.forward(&plan, Forward::new(q?, k?, v?, out, sums).keys(keys))?;
    /// assert_eq!(o, [2.0, 0.0, 0.0, 0.0, 4.0, 4.0]);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// Refused: lists of another shape; a key that is not in the token's document or that the mask does not allow, or
    /// that a list has twice; batches with slices, plans that are reproducible, plans that were made to circulate
    /// queries ([`circulate_forward`](crate::Options::circulate_forward), and
    /// [`circulate`](crate::Options::circulate) for a backward), and a rank on a device. Where a plan may choose the
    /// side, k and v circulate.
    Listed(KeyIndices<'a>),
}

/// Where the rows of k and v of this rank lie: a table of pages for each document.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    /// The pages that hold this rank's k rows of each document of the batch.
    pub block_table: BlockTable<'a>,
    /// Entries of a document in the table.
    pub pages_per_document: usize,
    /// Rows of a page.
    pub page_size: usize,
    /// Rows of k and of v from one page to the next; `page_size` if pages adjoin.
    pub page_stride: usize,
}

/// A table of pages, `[documents, pages]`, compact: a row for each document of the batch, with the pages of its rows in
/// the order in which the rank holds them. Row i of a document is in entry `i / page_size`. Entries beyond its rows are
/// not read; documents may share pages. Pages lie within the first 2³² − 1 rows of k and v.
#[derive(Clone, Copy, Debug)]
pub struct BlockTable<'a> {
    first: *const i32,
    /// Entries of the table; `None` for one in device memory.
    entries: Option<usize>,
    memory: PhantomData<&'a [i32]>,
}

// SAFETY: a table of the host is a shared slice; one of a device is an address, which no code here reads through.
unsafe impl Send for BlockTable<'_> {}
// SAFETY: as above.
unsafe impl Sync for BlockTable<'_> {}

impl<'a> BlockTable<'a> {
    /// A table in host memory, for a rank on the CPU.
    pub const fn new(table: &'a [i32]) -> Self {
        Self { first: table.as_ptr(), entries: Some(table.len()), memory: PhantomData }
    }

    /// A table in the memory of the rank's device, where engines keep it: no run uploads or checks it. The address is
    /// aligned to 4 bytes.
    ///
    /// # Safety
    /// When a run with the table executes, and in each replay of a graph that captured it, the table is valid for reads
    /// and its entries for the rank's rows are pages of k and v: the kernels read where they say.
    #[cfg(feature = "cuda")]
    pub const unsafe fn on_device(table: *const i32) -> Self {
        Self { first: table, entries: None, memory: PhantomData }
    }
}

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

/// [`Keys`] without a lifetime, for the duration of a run.
#[derive(Clone, Copy, Debug)]
pub(super) enum RawKeys {
    All,
    Pages(RawPages),
    Listed(RawKeyIndices),
}

/// [`Pages`] without a lifetime.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawPages {
    pub(super) block_table: *const i32,
    /// Entries of the table; `None` for one in device memory.
    pub(super) entries: Option<usize>,
    pub(super) pages_per_document: usize,
    pub(super) page_size: usize,
    pub(super) page_stride: usize,
}

/// [`KeyIndices`] without a lifetime.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawKeyIndices {
    pub(super) indices: *const i32,
    pub(super) len: usize,
    pub(super) heads: usize,
    pub(super) entries: usize,
}

impl From<Keys<'_>> for RawKeys {
    fn from(keys: Keys<'_>) -> Self {
        match keys {
            Keys::All => Self::All,
            Keys::Pages(Pages { block_table, pages_per_document, page_size, page_stride }) => {
                let BlockTable { first: block_table, entries, memory: _ } = block_table;
                Self::Pages(RawPages { block_table, entries, pages_per_document, page_size, page_stride })
            }
            Keys::Listed(KeyIndices { indices, heads, entries }) => {
                Self::Listed(RawKeyIndices { indices: indices.as_ptr(), len: indices.len(), heads, entries })
            }
        }
    }
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
