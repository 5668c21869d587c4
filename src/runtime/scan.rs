// SPDX-License-Identifier: MIT OR Apache-2.0
//! States of recurrent layers passed on along documents: a call of its own, for programs whose kernels are theirs.
//!
//! Each rank runs the layer over its own segments from a zero state. A scan gives it the state before each segment, and
//! what travels does not grow with the tokens.

use core::marker::PhantomData;

use super::{
    operands::{InputTensor, OutputTensor},
    rank::Rank,
    tensors::TypedTensors,
};
use crate::{
    element::Accumulator,
    error::Result,
    plan::Plan,
    schedule::{Scan, TensorId},
};

/// The tensors of a scan, with a row for each of the rank's segments
/// ([`LocalTokens::segments`](crate::plan::LocalTokens::segments)) in their order. All are compact, and those of a rank
/// without segments have no rows.
#[derive(Debug)]
pub struct ScanTensors<'a, T: Accumulator> {
    tensors: TypedTensors,
    memory: PhantomData<&'a mut T>,
}

impl<'a, T: Accumulator> ScanTensors<'a, T> {
    /// A scan of `decay`, `[segments, heads, key_dim]`, or `[segments, heads, key_dim · key_dim]` of matrices, and
    /// `state`, `[segments, heads, key_dim · value_dim]`, each segment's end state from a zero state. It writes the
    /// state before each segment to `initial_state`. The decay of a document's first segment is not read, and neither
    /// are decay and state of its last (in a reverse scan the other way round).
    pub fn new(
        decay: impl InputTensor<'a, Element = T>,
        state: impl InputTensor<'a, Element = T>,
        initial_state: impl OutputTensor<'a, Element = T>,
    ) -> Self {
        let tensors = TypedTensors::default()
            .with(TensorId::Decay, decay)
            .with(TensorId::State, state)
            .with(TensorId::InitialState, initial_state);
        Self { tensors, memory: PhantomData }
    }
}

impl Rank {
    /// Passes states on along the documents of a plan's q tokens: `initial_state[next] = decay · initial_state + state`
    /// from segment to segment, and zeros before the first. All ranks of the group take part with their own segments,
    /// whatever the mesh. Of the plan, only documents, mesh and layout matter.
    ///
    /// Each state is a fixed expression of the decays and states before it, so the result has the same bits in every
    /// run. Forms and meshes round differently. For ranks on the CPU.
    ///
    /// ```
    /// use cpattn::{Batch, Dtype, Layout, Mesh, Plan, Problem, Rank, View, ViewMut, transport::local};
    /// use cpattn::{runtime::ScanTensors, schedule::{Decay, Scan}};
    /// use std::time::Duration;
    ///
    /// // A document on three ranks, one head of one number: each rank halves the state and adds its own number.
    /// let problem = Problem::new(Batch::from_lengths(&[6])?, 1, 1, 1, Dtype::F32);
    /// let plan = &Plan::new(&problem, Mesh::ring(3)?, Layout::Contiguous)?;
    /// std::thread::scope(|scope| {
    ///     for end in local::group(3, Duration::from_secs(10)).unwrap() {
    ///         scope.spawn(move || {
    ///             let mut rank = Rank::new(end);
    ///             let (decay, state, mut initial) = ([0.5f32], [[1.0], [2.0], [4.0]][rank.rank()], [f32::NAN]);
    ///             let tensors = ScanTensors::new(
    ///                 View::new(&decay, 1, 1, 1).unwrap(),
    ///                 View::new(&state, 1, 1, 1).unwrap(),
    ///                 ViewMut::new(&mut initial, 1, 1, 1).unwrap(),
    ///             );
    ///             rank.scan(plan, Scan::new(Decay::Diagonal, 1, 1, 1), tensors).unwrap();
    ///             assert_eq!(initial, [[0.0], [1.0], [2.5]][rank.rank()]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), cpattn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rank::forward`] and [`Schedule::scan`](crate::schedule::Schedule::scan); on a device
    /// [`Error::Unsupported`](crate::Error::Unsupported).
    pub fn scan<T: Accumulator>(&mut self, plan: &Plan, scan: Scan, call: ScanTensors<'_, T>) -> Result<()> {
        let bindings = call.tensors.bindings(self.device(), plan)?;
        // SAFETY: as long as `call` lives, views guarantee valid memory, and exclusive ones that nothing else uses
        // their memory.
        unsafe { self.run(plan, scan, &bindings) }
    }
}
