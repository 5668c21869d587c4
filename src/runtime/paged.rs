// SPDX-License-Identifier: MIT OR Apache-2.0
//! A forward whose k and v lie in pages: rows of a cache that are found through a table of pages, without copies.
//!
//! A server keeps k and v in pages of a few rows each, and a table says which pages a sequence has. Before a run the
//! rank lists where each of its k rows lies, and the kernels look rows up where they pack them into tiles. So tiles
//! hold the same rows as in a call without pages, and results have the same bits.
//!
//! Only kernels look rows up: a plan that copies or sends k and v is refused.

#[cfg(feature = "cuda")]
use super::{pages::DevicePages, tensors::DeviceForward};
use super::{pages::Pages, rank::Rank, tensors::Forward};
#[cfg(feature = "cuda")]
use crate::call::RawStream;
use crate::{element::Element, error::Result, plan::Plan, schedule::Direction};

impl Rank {
    /// [`Rank::forward`] over k and v that lie in pages, without copying them. `k` and `v` of `tensors` have the rows
    /// of all pages, `[rows, kv_heads, dim]`: an array of `[pages, size, kv_heads, dim]` seen as rows. `pages` says
    /// which pages hold the k rows of this rank. The result has the bits of a forward whose k and v have these rows one
    /// after another.
    ///
    /// On one rank the table is that of vLLM and FlashAttention (`block_table`), with the lengths of the cached
    /// sequences as the batch's k side. Where the keys are spread over a ring, each rank has a table of the pages of
    /// its own rows, in the order of [`Plan::local_tokens`]: with the striped layout, and documents of k whose lengths
    /// are multiples of `stripe · ring`, row i of a document on ring rank j is that of position `(i / stripe · ring +
    /// j) · stripe + i mod stripe`.
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
    ///     dropout_seed: None,
    /// };
    /// rank.forward_paged(&plan, tensors, Pages { block_table: &[1, 0], pages_per_document: 2, page_size: 2, page_stride: 2 })?;
    /// assert_eq!(o, [4.0, 4.0]);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rank::forward`]; a table that does not fit the plan, an entry that is no page of k and v;
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a plan that has dropout, or copies or sends k and v
    /// (Ulysses ranks; a ring whose k circulates). On a device: `forward_paged_on`.
    pub fn forward_paged<T: Element>(&mut self, plan: &Plan, tensors: Forward<'_, T>, pages: Pages<'_>) -> Result<()> {
        self.expect_host("forward_paged", "call forward_paged_on, with a table in device memory")?;
        let bindings = tensors.bindings(self.device(), plan)?.with_pages(pages);
        // SAFETY: during this call the views guarantee valid memory, the exclusive ones that nothing else uses theirs,
        // and the table is borrowed.
        unsafe { self.run(plan, Direction::Forward, &bindings) }
    }

    /// [`Rank::forward_paged`] on device tensors, with a table in device memory, in the order of `stream`: see
    /// [`Rank::run_on`]. The first call of a plan prepares it; captured graphs read the table anew in each replay. A
    /// block of the kernel walks over all keys of a document, so few q rows over a long cache leave multiprocessors
    /// idle.
    ///
    /// # Errors
    /// As [`Rank::run_on`]; a table that is too small for the rank's rows;
    /// [`Error::Unsupported`](crate::Error::Unsupported) for the plans that [`Rank::forward_paged`] refuses.
    ///
    /// # Safety
    /// As [`Rank::forward_on`]. When the run executes, the table is valid for reads and its entries for the rank's rows
    /// are pages of k and v: the kernels read where they say.
    #[cfg(feature = "cuda")]
    pub unsafe fn forward_paged_on<T: Element>(
        &mut self,
        plan: &Plan,
        tensors: DeviceForward<'_, T>,
        pages: DevicePages,
        stream: RawStream,
    ) -> Result<()> {
        let bindings = tensors.bindings(self.device(), plan)?.with_device_pages(pages);
        // SAFETY: until the work enqueued with them is over, views guarantee valid memory, and exclusive ones that
        // nothing else uses their memory; table and stream are as promised.
        unsafe { self.run_on(plan, Direction::Forward, &bindings, stream) }
    }
}
