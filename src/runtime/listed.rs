// SPDX-License-Identifier: MIT OR Apache-2.0
//! A forward and a backward over listed keys: sparse attention whose keys an indexer chose, a few for each token.
//!
//! The lists are data that each rank has for its own tokens: a plan does not know them, and moves the rows that its
//! mask allows. Each kernel call of the run then attends to those of its keys that a row lists. Where Ulysses ranks
//! exchange heads for tokens, they exchange the lists before the run.

use super::{
    key_indices::KeyIndices,
    rank::Rank,
    tensors::{Backward, Forward},
};
use crate::{element::Element, error::Result, plan::Plan, schedule::Direction};

impl Rank {
    /// [`Rank::forward`] where each q token attends only to the keys that it lists: the result of a dense forward whose
    /// mask has these pairs alone. A token without any gets o 0 and lse −∞, or those of the sinks. Rows of k and v that
    /// no token lists may hold anything. All ranks of the group call it, with lists of the same heads and entries.
    ///
    /// All options of a problem are honoured but slices; a row's window and causal limit are those of the plan's mask,
    /// within which its keys must be. k and v go to the ranks whose tokens may read them by the mask. Time and memory
    /// of the kernels are those of the listed pairs, and of the rows of k for each part of a sequence.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, View, ViewMut, runtime::KeyIndices, transport::local};
    ///
    /// // Three tokens, causal; each lists at most two keys.
    /// let plan = Plan::new(&Problem::new(Batch::new(&[0, 3])?, 1, 1, 2, Dtype::F32), Mesh::single(), Layout::Contiguous)?;
    /// let mut rank = Rank::new(local::group(1, std::time::Duration::from_secs(10))?.remove(0));
    /// let (q, k, v) = ([0.0f32; 6], [1.0f32; 6], [2.0, 0.0, f32::NAN, 4.0, 6.0, 8.0]);
    /// let (mut o, mut lse) = ([9.0f32; 6], [0.0f32; 3]);
    /// let tensors = Forward {
    ///     q: View::new(&q, 3, 1, 2)?,
    ///     k: View::new(&k, 3, 1, 2)?,
    ///     v: View::new(&v, 3, 1, 2)?,
    ///     sinks: None,
    ///     o: ViewMut::new(&mut o, 3, 1, 2)?,
    ///     lse: ViewMut::new(&mut lse, 3, 1, 1)?,
    ///     max_logit: None,
    ///     dropout_seed: None,
    /// };
    /// let indices = [0, -1, -1, -1, 2, 0];
    /// rank.forward_listed(&plan, tensors, KeyIndices { indices: &indices, heads: 1, entries: 2 })?;
    /// assert_eq!(o, [2.0, 0.0, 0.0, 0.0, 4.0, 4.0]);
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rank::forward`]; lists of another shape; a key that is not in the token's document or that the mask does
    /// not allow, or that a list has twice; [`Error::Unsupported`](crate::Error::Unsupported) for batches with slices,
    /// plans that are reproducible, plans made with [`circulate_forward`](crate::Options::circulate_forward) queries,
    /// and on a device. Where a plan may choose the side, k and v circulate.
    pub fn forward_listed<T: Element>(
        &mut self,
        plan: &Plan,
        tensors: Forward<'_, T>,
        keys: KeyIndices<'_>,
    ) -> Result<()> {
        self.expect_host("forward_listed", "use a rank on the CPU, or a mask for a dense forward_on")?;
        let bindings = tensors.bindings(self.device(), plan)?.with_key_indices(keys);
        // SAFETY: during this call the views guarantee valid memory, the exclusive ones that nothing else uses theirs,
        // and the lists are borrowed.
        unsafe { self.run(plan, Direction::Forward, &bindings) }
    }

    /// [`Rank::backward`] of [`Rank::forward_listed`], with the same lists. Rows of k and v that no token lists get
    /// gradients 0. Each gradient is a sum in the order of the tokens, so that a run repeats bit for bit.
    ///
    /// # Errors
    /// As [`Rank::forward_listed`]; the option for the side is [`circulate`](crate::Options::circulate).
    pub fn backward_listed<T: Element>(
        &mut self,
        plan: &Plan,
        tensors: Backward<'_, T>,
        keys: KeyIndices<'_>,
    ) -> Result<()> {
        self.expect_host("backward_listed", "use a rank on the CPU, or a mask for a dense backward_on")?;
        let bindings = tensors.bindings(self.device(), plan)?.with_key_indices(keys);
        // SAFETY: during this call the views guarantee valid memory, the exclusive ones that nothing else uses theirs,
        // and the lists are borrowed.
        unsafe { self.run(plan, Direction::Backward, &bindings) }
    }
}
