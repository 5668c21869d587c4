// SPDX-License-Identifier: MIT OR Apache-2.0
//! Your own kernel with Ulysses: the two all-to-alls as separate calls, and both around a closure.
//!
//! Partial results of softmax attention can be merged. For most other kernels that mix tokens this is not so, but they
//! treat each head separately. So give every rank the whole sequences of some heads, run the kernel there, and send the
//! result back. Set the kind [`AttentionKind::Other`](crate::plan::AttentionKind::Other) for such a problem: a mesh
//! with a ring is then refused.

use core::ptr::null_mut;
use std::{vec, vec::Vec};

use super::{
    bind::Bindings,
    failure::watched,
    rank::Rank,
    tensors::{AnyView, raw_on},
};
#[cfg(feature = "cuda")]
use crate::tensor::{DeviceView, DeviceViewMut};
use crate::{
    batch::Side,
    call::RawStream,
    element::Element,
    error::Result,
    heads::HeadShare,
    plan::Plan,
    schedule::{AllToAll, AllToAllDirection, TensorId},
    tensor::{View, ViewMut},
};

impl Rank {
    /// From `[local tokens, heads, dim]` to `[tokens of the ring share, own heads, dim]`: all tokens of the rank's ring
    /// share (the whole batch, if the ring is 1), in the layout's order, for the heads that [`Plan::heads_of`] returns.
    /// `side` says whether rows and heads are those of q or those of k and v. `to` must be compact. On a device:
    /// `to_heads_on`.
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
        self.expect_host("to_heads on host views", "give device tensors to to_heads_on")?;
        // SAFETY: during this call the views guarantee valid memory, and the exclusive one that nothing else uses its
        // memory.
        unsafe { self.all_to_all_of(plan, AllToAllDirection::ToHeads, side, from, to, null_mut()) }
    }

    /// Back from `[tokens of the ring share, own heads, dim]` to `[local tokens, heads, dim]`. If several ranks hold a
    /// kv head, the result is the sum over them, in rank order, as a gradient needs. `from` must be compact. On a
    /// device: `to_tokens_on`.
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
        self.expect_host("to_tokens on host views", "give device tensors to to_tokens_on")?;
        // SAFETY: during this call the views guarantee valid memory, and the exclusive one that nothing else uses its
        // memory.
        unsafe { self.all_to_all_of(plan, AllToAllDirection::ToTokens, side, from, to, null_mut()) }
    }

    /// [`Rank::to_heads`] on device tensors, in the order of `stream`: see [`Rank::run_on`]. Elements are f16, bf16 or
    /// f32.
    ///
    /// # Errors
    /// As [`Rank::run_on`]; a tensor of another device than the rank's.
    ///
    /// # Safety
    /// `stream` is null or one of the driver's that was not destroyed.
    #[cfg(feature = "cuda")]
    pub unsafe fn to_heads_on<T: Element>(
        &mut self,
        plan: &Plan,
        side: Side,
        from: DeviceView<'_, T>,
        to: DeviceViewMut<'_, T>,
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: until the work enqueued with them is over, the views guarantee valid memory, and the exclusive one
        // that nothing else uses its memory; the stream is as promised.
        unsafe { self.all_to_all_of(plan, AllToAllDirection::ToHeads, side, from, to, stream) }
    }

    /// [`Rank::to_tokens`] on device tensors, in the order of `stream`: see [`Rank::run_on`]. Elements are f16, bf16 or
    /// f32; a sum of several ranks' heads is made in f32 and rounded once.
    ///
    /// # Errors
    /// As [`Rank::to_heads_on`].
    ///
    /// # Safety
    /// As [`Rank::to_heads_on`].
    #[cfg(feature = "cuda")]
    pub unsafe fn to_tokens_on<T: Element>(
        &mut self,
        plan: &Plan,
        side: Side,
        from: DeviceView<'_, T>,
        to: DeviceViewMut<'_, T>,
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: until the work enqueued with them is over, the views guarantee valid memory, and the exclusive one
        // that nothing else uses its memory; the stream is as promised.
        unsafe { self.all_to_all_of(plan, AllToAllDirection::ToTokens, side, from, to, stream) }
    }

    /// Calls [`Rank::to_heads`] for every input, runs `local` on whole sequences, and calls [`Rank::to_tokens`] for
    /// every output. Inputs and outputs are given with their side. The call allocates the tensors in between; use the
    /// two calls directly to keep them. For host memory only: on a device, call `to_heads_on` and `to_tokens_on` around
    /// your kernel, on its stream.
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
    ///             let n = plan.local_tokens(Side::Q, rank.rank()).len();
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
    ///             let positions = plan.local_tokens(Side::Q, rank.rank()).positions();
    ///             assert!(positions.iter().enumerate().all(|(i, &p)| y[i * 8] == (p + 1) as f32));
    ///         });
    ///     }
    /// });
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rank::run`], and what `local` returns. If `local` fails or panics, the other ranks get an error too, since
    /// they wait for this one. [`Error::Unsupported`](crate::Error::Unsupported) on a device.
    pub fn ulysses<T: Element>(
        &mut self,
        plan: &Plan,
        inputs: &[(Side, View<'_, T>)],
        outputs: &mut [(Side, ViewMut<'_, T>)],
        local: impl FnOnce(&HeadShare, &[View<'_, T>], &mut [ViewMut<'_, T>]) -> Result<()>,
    ) -> Result<()> {
        self.expect_host("ulysses", "call to_heads_on and to_tokens_on around your kernel, on its stream")?;
        plan.fits_world(self.world())?;
        let (rank, share) = (self.rank(), plan.heads_of(self.rank()));
        // Rows and heads of a side that this rank holds between the two all-to-alls.
        let shape = |side: Side| {
            let heads = if side == Side::Q { share.q.len() } else { share.kv.len() };
            (plan.tokens_between_all_to_alls(side, rank), heads)
        };
        let room = |side: Side, dim: usize| {
            let (rows, heads) = shape(side);
            vec![T::from_f64(0.0); rows * heads * dim]
        };
        let mut gathered: Vec<Vec<T>> = inputs.iter().map(|(side, x)| room(*side, x.dim())).collect();
        let mut made: Vec<Vec<T>> = outputs.iter().map(|(side, y)| room(*side, y.dim())).collect();
        let (mut seen, mut written) = (Vec::new(), Vec::new());
        for ((side, x), held) in inputs.iter().zip(&mut gathered) {
            let (rows, heads) = shape(*side);
            self.to_heads(plan, *side, *x, ViewMut::new(held, rows, heads, x.dim())?)?;
            seen.push(View::new(held, rows, heads, x.dim())?);
        }
        for ((side, y), held) in outputs.iter().zip(&mut made) {
            let (rows, heads) = shape(*side);
            written.push(ViewMut::new(held, rows, heads, y.dim())?);
        }
        // If `local` fails or panics, only `watched` tells the other ranks: code that catches the panic may keep the
        // rank, which is then not dropped.
        watched(self.backend.transport(), self.backend.failure(), || local(&share, &seen, &mut written))?;
        for ((side, y), held) in outputs.iter_mut().zip(&written) {
            self.to_tokens(plan, *side, held.as_view(), y.reborrow())?;
        }
        Ok(())
    }

    /// One all-to-all of tensors given as views.
    ///
    /// # Errors
    /// As [`Rank::run_on`]; a tensor of another device than the rank's.
    ///
    /// # Safety
    /// As [`Rank::run_on`].
    unsafe fn all_to_all_of(
        &mut self,
        plan: &Plan,
        way: AllToAllDirection,
        side: Side,
        from: impl AnyView,
        to: impl AnyView,
        stream: RawStream,
    ) -> Result<()> {
        let (from, to) = (raw_on(self.device(), "from", from)?, raw_on(self.device(), "to", to)?);
        let all_to_all = AllToAll { direction: way, side, dim: from.dim, dtype: from.dtype };
        let (tokens, held) = match way {
            AllToAllDirection::ToHeads => (from, to),
            AllToAllDirection::ToTokens => (to, from),
        };
        let tensors = Bindings::default().with(TensorId::OwnTokens, tokens).with(TensorId::OwnHeads, held);
        // SAFETY: the two tensors and the stream are as `run_on` asks for them (the contract of this function).
        unsafe { self.run_on(plan, all_to_all, &tensors, stream) }
    }
}
