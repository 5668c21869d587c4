// SPDX-License-Identifier: MIT OR Apache-2.0
//! Any local kernel under Ulysses: the two all-to-alls as calls of their own, and both around a closure.
//!
//! Softmax attention can be merged from parts; most other things that mix tokens cannot, but they work head by head.
//! Give every rank whole sequences of some heads, run them there, and bring it back. Mark such a problem with
//! [`Kind::Other`](crate::plan::AttentionKind::Other), and planning refuses it a ring.

use std::{vec, vec::Vec};

use super::rank::Rank;
use crate::{
    batch::Side,
    call::RawTensor,
    element::Element,
    error::Result,
    heads::HeadShare,
    plan::Plan,
    schedule::{AllToAll, Way},
    tensor::{View, ViewMut},
};

impl Rank {
    /// From `[local tokens, heads, dim]` to `[share's tokens, own heads, dim]`: all tokens of the rank's ring share (of
    /// the whole batch, where the ring is 1), in the layout's order, for the heads that [`Plan::heads_of`] names. `side`
    /// says whether rows and heads are those of q or those of k and v. `to` must be compact.
    ///
    /// # Errors
    /// As [`Rank::run`].
    pub fn to_heads<T: Element>(
        &mut self,
        plan: &Plan,
        side: Side,
        from: View<'_, T>,
        to: ViewMut<'_, T>,
    ) -> Result<()> {
        // SAFETY: views vouch for their memory.
        unsafe {
            self.all_to_all(
                plan,
                AllToAll { way: Way::ToHeads, side, dim: from.dim() as u32, dtype: T::DTYPE },
                from.raw(),
                to.raw(),
            )
        }
    }

    /// Back from `[share's tokens, own heads, dim]` to `[local tokens, heads, dim]`. Of a kv head that several ranks
    /// hold, the sum over them, in rank order: what a gradient needs. `from` must be compact.
    ///
    /// # Errors
    /// As [`Rank::run`].
    pub fn to_tokens<T: Element>(
        &mut self,
        plan: &Plan,
        side: Side,
        from: View<'_, T>,
        to: ViewMut<'_, T>,
    ) -> Result<()> {
        // SAFETY: views vouch for their memory.
        unsafe {
            self.all_to_all(
                plan,
                AllToAll { way: Way::ToTokens, side, dim: from.dim() as u32, dtype: T::DTYPE },
                to.raw(),
                from.raw(),
            )
        }
    }

    /// Brings every input to heads, runs `local` on whole sequences, and brings every output back to tokens. Inputs and
    /// outputs are given with their side. The gathered tensors are allocated by the call; use [`Rank::to_heads`] and
    /// [`Rank::to_tokens`] to keep them.
    ///
    /// ```
    /// # use cpattn::{transport::local, *};
    /// # use std::time::Duration;
    /// // A running sum over each document, head by head: nothing that a ring could merge.
    /// let problem = Problem::new(Batch::new(&[0, 3, 7])?, 2, 2, 4, Dtype::F32).with_kind(plan::AttentionKind::Other);
    /// let plan = Plan::new(&problem, Mesh::ulysses(2)?, Layout::Contiguous)?;
    /// std::thread::scope(|scope| {
    ///     for end in local::group(2, Duration::from_secs(10)).unwrap() {
    ///         let plan = &plan;
    ///         scope.spawn(move || {
    ///             let mut rank = Rank::new(end);
    ///             let n = plan.local_tokens(Side::Q, rank.rank());
    ///             let (x, mut y) = (vec![1.0f32; n * 2 * 4], vec![0.0; n * 2 * 4]);
    ///             let x = View::new(&x, n, 2, 4).unwrap();
    ///             let out = ViewMut::new(&mut y, n, 2, 4).unwrap();
    ///             rank.ulysses(plan, &[(Side::Q, x)], &mut [(Side::Q, out)], |_, x, y| {
    ///                 for document in plan.problem().batch().cu_seqlens(Side::Q).windows(2) {
    ///                     let mut sum = 0.0;
    ///                     for t in document[0] as usize..document[1] as usize {
    ///                         sum += x[0].row(t, 0)[0];
    ///                         y[0].row_mut(t, 0).fill(sum);
    ///                     }
    ///                 }
    ///                 Ok(())
    ///             }).unwrap();
    ///             let positions = plan.positions(Side::Q, rank.rank());
    ///             assert!(positions.iter().enumerate().all(|(i, &p)| y[i * 8] == (p + 1) as f32));
    ///         });
    ///     }
    /// });
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rank::run`], and what `local` returns: the other ranks then get an error too, as they wait for this one. So
    /// they do when it panics.
    pub fn ulysses<T: Element>(
        &mut self,
        plan: &Plan,
        inputs: &[(Side, View<'_, T>)],
        outputs: &mut [(Side, ViewMut<'_, T>)],
        local: impl FnOnce(&HeadShare, &[View<'_, T>], &mut [ViewMut<'_, T>]) -> Result<()>,
    ) -> Result<()> {
        plan.fits_world(self.world())?;
        let share = plan.heads_of(self.rank());
        let shape = |side: Side| self.held_shape(plan, side);
        let room = |side: Side, dim: usize| {
            let [rows, heads] = shape(side);
            vec![T::from_f64(0.0); rows * heads * dim]
        };
        let mut gathered: Vec<Vec<T>> = inputs.iter().map(|(side, x)| room(*side, x.dim())).collect();
        let mut made: Vec<Vec<T>> = outputs.iter().map(|(side, y)| room(*side, y.dim())).collect();
        for ((side, x), held) in inputs.iter().zip(&mut gathered) {
            let [rows, heads] = self.held_shape(plan, *side);
            self.to_heads(plan, *side, *x, ViewMut::new(held, rows, heads, x.dim())?)?;
        }
        let shape = |side: Side| self.held_shape(plan, side);
        let seen: Vec<View<'_, T>> = inputs
            .iter()
            .zip(&gathered)
            .map(|((side, x), held)| View::new(held, shape(*side)[0], shape(*side)[1], x.dim()))
            .collect::<Result<_>>()?;
        let mut written: Vec<ViewMut<'_, T>> = outputs
            .iter()
            .zip(&mut made)
            .map(|((side, y), held)| ViewMut::new(held, shape(*side)[0], shape(*side)[1], y.dim()))
            .collect::<Result<_>>()?;
        self.on_host_for("ulysses")?.watched(|| local(&share, &seen, &mut written))?;
        for ((side, y), held) in outputs.iter_mut().zip(&written) {
            self.to_tokens(plan, *side, held.as_view(), y.reborrow())?;
        }
        Ok(())
    }

    /// Rows and heads that this rank holds between the two all-to-alls.
    fn held_shape(&self, plan: &Plan, side: Side) -> [usize; 2] {
        let share = plan.heads_of(self.rank());
        let heads = if side == Side::Q { share.q.len() } else { share.kv.len() };
        [plan.shares().rows(side, plan.mesh().coordinates(self.rank()).ring), heads]
    }

    /// One all-to-all of tensors given without their types: `tokens` by tokens, `held` by heads.
    ///
    /// # Errors
    /// As [`Rank::run`]; a rank on a device.
    ///
    /// # Safety
    /// As [`Rank::run`].
    pub(crate) unsafe fn all_to_all(
        &mut self,
        plan: &Plan,
        all_to_all: AllToAll,
        tokens: RawTensor,
        held: RawTensor,
    ) -> Result<()> {
        // SAFETY: the tensors are valid for the call (promised).
        unsafe { self.on_host_for("an all-to-all alone")?.all_to_all(plan, all_to_all, tokens, held) }
    }
}
