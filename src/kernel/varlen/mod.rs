// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels of others for attention in host memory: what a crate implements so that plans run with it.
//!
//! A plan says which rows of q attend to which rows of k by ranges and bands. A kernel for packed sequences of several
//! lengths takes less: [`Rectangles`], with one pair of window limits that count from the bottom-right corner. So a
//! [`VarlenKernel`] gets packed copies of the rows of such rectangles, and what it computes is merged or added in f32.
//! Any band of any two ranges becomes rectangles (`pieces`, `table`); a test draws them.
//!
//! Everything else is done outside of the kernel, and so every kernel has it: sinks, several of a head, with gradients;
//! the gradient of lse; merges of ring steps, with the second word of lse; stripes, slices, Ulysses, rings, combines.
//!
//! - `call`: the arguments of a kernel; `honours`: what a kernel can do, and the refusal of what it cannot;
//! - `pieces`, `table`: from ranges and bands to rectangles, once for each operation of a prepared plan;
//! - `memory`: packed rows; `calls`: a kernel with its memory; `forward`, `backward`: an operation by calls of it.

mod backward;
mod call;
mod calls;
mod forward;
mod honours;
mod memory;
mod pieces;
mod table;
#[cfg(test)]
mod tests;

pub use call::{Elements, ElementsMut, Rectangles};
pub(crate) use calls::KernelCalls;
pub use honours::Honours;
pub(crate) use table::CallTable;

use super::{cpu, merge};
use crate::{
    call::{Merge, Transform},
    error::{Error, Result},
};

/// A kernel for packed sequences of several lengths, on host memory: [`Rank::with_kernel`](crate::Rank::with_kernel)
/// runs plans with it.
///
/// Tensors of a call are compact. q, o, d_o and dq are `[rows, heads, dim]`, k, v, dk and dv `[keys, kv heads, dim]`;
/// lse and delta are `[heads, rows]`. q head `h` reads kv head `h / (heads / kv_heads)`. Each row has a key, and each
/// key a row. o, lse, dq, dk and dv are filled with NaN before the call. A call is made by the thread that runs the
/// plan; the kernel may use others.
///
/// The example `own_kernels` is one, forward and backward.
pub trait VarlenKernel: Send {
    /// Its name in errors. Ranks compare it before they run a plan.
    fn name(&self) -> &str;

    /// What it computes right. It is read once.
    fn honours(&self) -> Honours;

    /// o and the natural-log lse of every row. o is in the accumulator's type (f32; f64 of f64), or in q's with
    /// [`Honours::rounded_o`]; lse in the accumulator's type.
    ///
    /// # Errors
    /// Any, if it failed; the run ends on all ranks with [`Error::Kernel`], which has this error's text.
    fn forward(
        &mut self,
        call: &Rectangles<'_>,
        inputs: [Elements<'_>; 3],
        o: ElementsMut<'_>,
        lse: ElementsMut<'_>,
    ) -> Result<()>;

    /// dq, dk and dv of every row, in the accumulator's type, from q, k, v and d_o: `p = exp(s − lse)`, and the
    /// gradient of a score is `p · (d_o·v − delta)`. `lse` and `delta` are those of whole rows, of which the call may
    /// have a part of the keys. A row whose lse is +∞ has a `p` of 0. Called if [`Honours::backward`] is set.
    ///
    /// # Errors
    /// As [`VarlenKernel::forward`].
    fn backward(
        &mut self,
        call: &Rectangles<'_>,
        inputs: [Elements<'_>; 4],
        lse: Elements<'_>,
        delta: Elements<'_>,
        gradients: [ElementsMut<'_>; 3],
    ) -> Result<()> {
        let _ = (call, inputs, lse, delta, gradients);
        Err(Error::unsupported("backward", "the kernel has none", "do not say that it honours one, or write it"))
    }

    /// Copies, casts and ordered sums of blocks. By default, the library's.
    ///
    /// # Errors
    /// As [`VarlenKernel::forward`].
    ///
    /// # Safety
    /// Sources are valid for reads, blocks for writes; blocks overlap no other block and no source, but for a first
    /// source that is the block itself.
    unsafe fn transform(&mut self, args: &Transform<'_>) -> Result<()> {
        // SAFETY: the contract is the same.
        unsafe { cpu::transform(args) }
    }

    /// Merges a partial result into another. By default, the library's.
    ///
    /// # Errors
    /// As [`VarlenKernel::forward`].
    ///
    /// # Safety
    /// All tensors are valid for reads, o and lse for writes, which overlap nothing else.
    unsafe fn merge(&mut self, args: &Merge) -> Result<()> {
        // SAFETY: the contract is the same.
        unsafe { merge::merge(&args.o, &args.lse, &args.with_o, &args.with_lse) }
    }
}
