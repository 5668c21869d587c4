// SPDX-License-Identifier: MIT OR Apache-2.0
//! Your own kernel with Ulysses: the two all-to-alls as separate calls, and both around a closure.
//!
//! Partial results of softmax attention can be merged. For most other kernels that mix tokens this is not so, but they
//! treat each head separately. So give every rank the whole sequences of some heads, run the kernel there, and send the
//! result back. Set the kind [`AttentionKind::Other`](crate::plan::AttentionKind::Other) for such a problem: a mesh
//! with a ring is then refused.

use core::ptr::null_mut;
use std::{format, vec, vec::Vec};

use super::{
    failure::watched,
    operands::{InputTensor, Operand, OutputTensor},
    rank::Rank,
    tensors::TypedTensors,
};
use crate::{
    batch::Side,
    call::{RawStream, RawTensor},
    device::Device,
    element::Element,
    error::{Error, Result},
    heads::HeadShare,
    plan::Plan,
    schedule::{AllToAll, AllToAllDirection, TensorId},
    tensor::{View, ViewMut},
};

/// The all-to-alls of a rank over a plan: [`Rank::all_to_all`].
#[derive(Debug)]
pub struct AllToAlls<'a> {
    rank: &'a mut Rank,
    plan: &'a Plan,
    stream: RawStream,
}

impl Rank {
    /// The all-to-alls over a plan, as calls of their own.
    pub fn all_to_all<'a>(&'a mut self, plan: &'a Plan) -> AllToAlls<'a> {
        AllToAlls { rank: self, plan, stream: null_mut() }
    }
}

impl AllToAlls<'_> {
    /// As [`Forward::on`](crate::Forward::on).
    ///
    /// # Safety
    /// As [`Forward::on`](crate::Forward::on).
    #[must_use]
    pub unsafe fn on(mut self, stream: RawStream) -> Self {
        self.stream = stream;
        self
    }

    /// From `[local tokens, heads, dim]` to `[tokens of the ring share, own heads, dim]`: all tokens of the rank's ring
    /// share (the whole batch, if the ring is 1), in the layout's order, for the heads that [`Plan::heads_of`] returns.
    /// `side` says whether rows and heads are those of q or those of k and v. `to` must be compact. On a device
    /// elements are f16, bf16 or f32.
    ///
    /// # Errors
    /// As [`Rank::forward`].
    pub fn to_heads<'t, T: Element>(
        &mut self,
        side: Side,
        from: impl InputTensor<'t, Element = T>,
        to: impl OutputTensor<'t, Element = T>,
    ) -> Result<()> {
        // SAFETY: the views guarantee valid memory, and the exclusive one that nothing else uses its memory, during the
        // call, on a device until the work enqueued with them is over.
        unsafe { self.run(AllToAllDirection::ToHeads, side, from, to) }
    }

    /// Back from `[tokens of the ring share, own heads, dim]` to `[local tokens, heads, dim]`. If several ranks hold a
    /// kv head, the result is the sum over them, in rank order, as a gradient needs. `from` must be compact. On a
    /// device elements are f16, bf16 or f32; a sum of several ranks' heads is made in f32 and rounded once.
    ///
    /// # Errors
    /// As [`Rank::forward`].
    pub fn to_tokens<'t, T: Element>(
        &mut self,
        side: Side,
        from: impl InputTensor<'t, Element = T>,
        to: impl OutputTensor<'t, Element = T>,
    ) -> Result<()> {
        // SAFETY: the views guarantee valid memory, and the exclusive one that nothing else uses its memory, during the
        // call, on a device until the work enqueued with them is over.
        unsafe { self.run(AllToAllDirection::ToTokens, side, from, to) }
    }

    /// Calls [`to_heads`](Self::to_heads) for every input, runs `local` on whole sequences, and calls
    /// [`to_tokens`](Self::to_tokens) for every output. Inputs and outputs are given with their side. The call
    /// allocates the tensors in between; use the two calls directly to keep them. For host memory only: on a device,
    /// call the two around your kernel, on its stream.
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
    ///             rank.all_to_all(plan).ulysses(&[(Side::Q, x)], &mut [(Side::Q, out)], |_, x, y| {
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
        inputs: &[(Side, View<'_, T>)],
        outputs: &mut [(Side, ViewMut<'_, T>)],
        local: impl FnOnce(&HeadShare, &[View<'_, T>], &mut [ViewMut<'_, T>]) -> Result<()>,
    ) -> Result<()> {
        if let device @ Device::Cuda(_) = self.rank.device() {
            return Err(Error::unsupported(
                format!("ulysses of a rank on {device}"),
                "it works on host memory",
                "call to_heads and to_tokens around your kernel, on its stream",
            ));
        }
        let plan = self.plan;
        plan.fits_world(self.rank.world())?;
        let (rank, share) = (self.rank.rank(), plan.heads_of(self.rank.rank()));
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
            self.to_heads(*side, *x, ViewMut::new(held, rows, heads, x.dim())?)?;
            seen.push(View::new(held, rows, heads, x.dim())?);
        }
        for ((side, y), held) in outputs.iter().zip(&mut made) {
            let (rows, heads) = shape(*side);
            written.push(ViewMut::new(held, rows, heads, y.dim())?);
        }
        // If `local` fails or panics, only `watched` tells the other ranks: code that catches the panic may keep the
        // rank, which is then not dropped.
        watched(self.rank.backend.transport(), self.rank.backend.failure(), || local(&share, &seen, &mut written))?;
        for ((side, y), held) in outputs.iter_mut().zip(&written) {
            self.to_tokens(*side, held.as_view(), y.reborrow())?;
        }
        Ok(())
    }

    /// One all-to-all.
    ///
    /// # Errors
    /// As [`Rank::forward`].
    ///
    /// # Safety
    /// As [`Rank::run`], for the memory of both tensors.
    unsafe fn run(&mut self, way: AllToAllDirection, side: Side, from: impl Operand, to: impl Operand) -> Result<()> {
        let (tokens, heads) = (TensorId::OwnTokens, TensorId::OwnHeads);
        let (source, target) = match way {
            AllToAllDirection::ToHeads => (tokens, heads),
            AllToAllDirection::ToTokens => (heads, tokens),
        };
        let tensors = TypedTensors::default().with_name(source, "from", from).with_name(target, "to", to);
        let bindings = tensors.bindings(self.rank.device(), self.plan)?.on(self.stream);
        let RawTensor { dim, dtype, .. } = *bindings.get(source);
        // SAFETY: the two tensors are as `run` asks for them (the contract of this function), and the stream as
        // promised to `on`.
        unsafe { self.rank.run(self.plan, AllToAll { direction: way, side, dim, dtype }, &bindings) }
    }
}
