// SPDX-License-Identifier: MIT OR Apache-2.0
//! Partial results of several ranks merged over the ring: a call of its own, for programs whose attention is theirs.
//!
//! A server that spreads a cache over ranks has the same queries on all of them. Each rank attends to its own part of
//! the keys, with any kernel that returns lse, and the parts are merged: decode context parallelism.

use core::marker::PhantomData;

use super::{
    lse_base::LseBase,
    operands::{InputTensor, OutputTensor},
    rank::Rank,
    tensors::{TypedTensors, options},
};
use crate::{
    call::RawStream,
    element::Element,
    error::Result,
    plan::Plan,
    schedule::{Combine, CombineTo, TensorId},
};

/// The tensors of a combine: a partial result, of any type, and the merged result of type `T`.
///
/// Both types have one accumulator: parts of f16, bf16 or f32 are merged in f32, each once, and the result is rounded
/// once to the type of the plan's problem.
#[derive(Debug)]
pub struct CombineTensors<'a, T: Element> {
    tensors: TypedTensors,
    memory: PhantomData<&'a mut T>,
}

impl<'a, T: Element> CombineTensors<'a, T> {
    /// A combine of this rank's o of all q tokens of the batch, `[tokens, own heads, value_dim]`, normalised over the
    /// keys that this rank has, without sinks, and its natural log-sum-exp, `[tokens, own heads, 1]`: −∞ in a row that
    /// has no key on this rank, whose o is not read. It writes the merged o of [`Plan::combined_share`], and its lse.
    pub fn new(
        partial_o: impl InputTensor<'a>,
        partial_lse: impl InputTensor<'a, Element = T::Acc>,
        o: impl OutputTensor<'a, Element = T>,
        lse: impl OutputTensor<'a, Element = T::Acc>,
    ) -> Self {
        let tensors = TypedTensors::default()
            .with(TensorId::PartialO, partial_o)
            .with(TensorId::PartialLse, partial_lse)
            .with(TensorId::O, o)
            .with(TensorId::Lse, lse);
        Self { tensors, memory: PhantomData }
    }
}

options!(CombineTensors: sinks, lse_base, on);

impl Rank {
    /// Merges partial results of the same queries over the ring of the plan's mesh, whichever kernels made them. Each
    /// ring rank gives the result of all q tokens of the plan's batch over its own part of the keys, for the q heads
    /// that [`Plan::heads_of`] returns; `to` says which rows of the merged result each rank gets.
    ///
    /// Of the plan, only the number of q tokens, the q heads, `value_dim`, the element type, the sinks and the mesh
    /// matter. Parts are merged in the order of the ring ranks, so the result has the same bits in every run and on
    /// every rank that gets it. A row that has no key on any rank gets o 0 and lse −∞, or the sink's value if there is
    /// one. On a device elements are f16, bf16 or f32, `value_dim` is a multiple of 8, and rows of o begin at multiples
    /// of 16 bytes; weights are computed in f32, lse in two words of it.
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
    ///             let tensors = CombineTensors::new(
    ///                 View::new(&o, 1, 2, 1).unwrap(),
    ///                 View::new(&lse, 1, 2, 1).unwrap(),
    ///                 ViewMut::new(&mut merged, 1, 2, 1).unwrap(),
    ///                 ViewMut::new(&mut merged_lse, 1, 2, 1).unwrap(),
    ///             );
    ///             rank.combine(plan, CombineTo::All, tensors).unwrap();
    ///             assert_eq!((merged, merged_lse[1]), ([2.0, 7.0], 2.0));
    ///         });
    ///     }
    /// });
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rank::forward`]; parts of a type with another accumulator than the problem's.
    pub fn combine<T: Element>(&mut self, plan: &Plan, to: CombineTo, call: CombineTensors<'_, T>) -> Result<()> {
        let bindings = call.tensors.bindings(self.device(), plan)?;
        let partial = bindings.get(TensorId::PartialO).dtype;
        // SAFETY: as long as `call` lives, on a device until the work enqueued with it is over, views guarantee valid
        // memory, and exclusive ones that nothing else uses their memory; the stream is as promised to `on`.
        unsafe { self.run(plan, Combine { to, partial }, &bindings) }
    }
}
