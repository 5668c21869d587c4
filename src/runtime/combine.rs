// SPDX-License-Identifier: MIT OR Apache-2.0
//! Partial results of several ranks merged over the ring: a call of its own, for programs whose attention is theirs.
//!
//! A server that spreads a cache over ranks has the same queries on all of them. Each rank attends to its own part of
//! the keys, with any kernel that returns lse, and the parts are merged: decode context parallelism.

use core::ptr::null_mut;

#[cfg(feature = "cuda")]
use super::tensors::DeviceViews;
use super::{
    bind::Bindings,
    rank::Rank,
    tensors::{HostViews, Views, raw_on},
};
#[cfg(feature = "cuda")]
use crate::call::RawStream;
use crate::{
    device::Device,
    element::Element,
    error::Result,
    plan::Plan,
    schedule::{Combine, CombineTo, TensorId},
};

/// The tensors of a combine: a partial result of type `P`, and the merged result of type `T`.
///
/// Both types have one accumulator: parts of f16, bf16 or f32 are merged in f32, each once, and the result is rounded
/// once to the type of the plan's problem.
#[derive(Debug)]
pub struct CombineTensors<'a, P: Element, T: Element, V: Views = HostViews> {
    /// This rank's o of all q tokens of the batch, `[tokens, own heads, value_dim]`, normalised over the keys that this
    /// rank has, without sinks. It is not read where the lse is −∞.
    pub partial_o: V::Read<'a, P>,
    /// Its natural log-sum-exp, `[tokens, own heads, 1]`; −∞ in a row that has no key on this rank.
    pub partial_lse: V::Read<'a, T::Acc>,
    /// One logit for each q head of the problem, when it has sinks; `[heads, n]` with several.
    pub sinks: Option<V::PerHead<'a, f32>>,
    /// Written: the merged o of [`Plan::combined_share`].
    pub o: V::Written<'a, T>,
    /// Written: its lse.
    pub lse: V::Written<'a, T::Acc>,
}

impl Rank {
    /// Merges partial results of the same queries over the ring of the plan's mesh, whichever kernels made them. Each
    /// ring rank gives the result of all q tokens of the plan's batch over its own part of the keys, for the q heads
    /// that [`Plan::heads_of`] returns; `to` says which rows of the merged result each rank gets.
    ///
    /// Of the plan, only the number of q tokens, the q heads, `value_dim`, the element type, the sinks and the mesh
    /// matter. Parts are merged in the order of the ring ranks, so the result has the same bits in every run and on
    /// every rank that gets it. A row that has no key on any rank gets o 0 and lse −∞, or the sink's value if there is
    /// one. On a device: `combine_on`.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, View, ViewMut, transport::local};
    /// use cpattn::{runtime::CombineTensors, schedule::CombineTo};
    /// use std::time::Duration;
    ///
    /// // One query, two heads of dim 1, on two ranks: values 1 and 3, of equal weight in head 0; in head 1 only rank 1
    /// // has keys.
    /// let problem = Problem::new(Batch::from_lengths(&[1])?, 2, 2, 1, Dtype::F32);
    /// let plan = &Plan::new(&problem, Mesh::ring(2)?, Layout::Contiguous)?;
    /// std::thread::scope(|scope| {
    ///     for end in local::group(2, Duration::from_secs(10)).unwrap() {
    ///         scope.spawn(move || {
    ///             let mut rank = Rank::new(end);
    ///             let o = [[1.0f32, f32::NAN], [3.0, 7.0]][rank.rank()];
    ///             let lse = [[0.5, f32::NEG_INFINITY], [0.5, 2.0]][rank.rank()];
    ///             let (mut merged, mut merged_lse) = ([0.0f32; 2], [0.0; 2]);
    ///             let tensors = CombineTensors {
    ///                 partial_o: View::new(&o, 1, 2, 1).unwrap(),
    ///                 partial_lse: View::new(&lse, 1, 2, 1).unwrap(),
    ///                 sinks: None,
    ///                 o: ViewMut::new(&mut merged, 1, 2, 1).unwrap(),
    ///                 lse: ViewMut::new(&mut merged_lse, 1, 2, 1).unwrap(),
    ///             };
    ///             rank.combine(plan, CombineTo::All, tensors).unwrap();
    ///             assert_eq!((merged, merged_lse[1]), ([2.0, 7.0], 2.0));
    ///         });
    ///     }
    /// });
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rank::run`]; parts of a type with another accumulator than the problem's.
    pub fn combine<P: Element, T: Element>(
        &mut self,
        plan: &Plan,
        to: CombineTo,
        tensors: CombineTensors<'_, P, T>,
    ) -> Result<()> {
        self.expect_host("combine on host views", "give device tensors to combine_on")?;
        let bindings = tensors.bindings(self.device(), plan)?;
        // SAFETY: during this call the views guarantee valid memory, and the exclusive ones that nothing else uses
        // theirs.
        unsafe { self.run_on(plan, Combine { to, partial: P::DTYPE }, &bindings, null_mut()) }
    }

    /// [`Rank::combine`] on device tensors, in the order of `stream`: see [`Rank::run_on`]. Elements are f16, bf16 or
    /// f32, `value_dim` is a multiple of 8, and rows of o begin at multiples of 16 bytes. Weights are computed in f32,
    /// lse in two words of it.
    ///
    /// # Errors
    /// As [`Rank::run_on`]; a tensor of another device than the rank's.
    ///
    /// # Safety
    /// `stream` is null or one of the driver's that was not destroyed.
    #[cfg(feature = "cuda")]
    pub unsafe fn combine_on<P: Element, T: Element>(
        &mut self,
        plan: &Plan,
        to: CombineTo,
        tensors: CombineTensors<'_, P, T, DeviceViews>,
        stream: RawStream,
    ) -> Result<()> {
        let bindings = tensors.bindings(self.device(), plan)?;
        // SAFETY: until the work enqueued with them is over, views guarantee valid memory, and exclusive ones that
        // nothing else uses their memory; the stream is as promised.
        unsafe { self.run_on(plan, Combine { to, partial: P::DTYPE }, &bindings, stream) }
    }
}

impl<P: Element, T: Element, V: Views> CombineTensors<'_, P, T, V> {
    fn bindings(self, at: Device, plan: &Plan) -> Result<Bindings> {
        let Self { partial_o, partial_lse, sinks, o, lse } = self;
        Bindings::default()
            .with(TensorId::PartialO, raw_on(at, "partial_o", partial_o)?)
            .with(TensorId::PartialLse, raw_on(at, "partial_lse", partial_lse)?)
            .with(TensorId::O, raw_on(at, "o", o)?)
            .with(TensorId::Lse, raw_on(at, "lse", lse)?)
            .with_sinks(at, plan, TensorId::Sinks, sinks)
    }
}
