// SPDX-License-Identifier: MIT OR Apache-2.0
//! Interprets PTX on the CPU, as unkindly as CUDA allows.
//!
//! A kernel that passes here has not relied on luck: asynchronous copies land at their wait and not before, warps and
//! blocks run in a seeded, jumbled order, memory is poison until it is written, and every byte knows who wrote it. What
//! is wrong is reported with the line of the PTX, the thread and the memory concerned ([`Report`]).
//!
//! ```text
//! ptx/     text → syntax tree
//! op/      what instructions do, and their executable form: one file per family
//! mem/     allocations, shared memory, shadows
//! exec/    warps, blocks, grids; vector clocks
//! module   modules and kernels
//! mutation kernels with one piece of their synchronisation lost
//! tensormap  what tensor copies know of their tensors
//! driver/  the stand-in libcuda.so.1 on top
//! ```
//!
//! It can be used without the driver: [`Module::parse`], [`Module::load`] into a [`Memory`], [`launch`].
//!
//! It executes PTX as documented: no weak memory beyond race detection, no timing, no promise about the order in which
//! a matrix product is summed.

pub mod driver;
mod exec;
mod mem;
mod module;
mod mutation;
mod num;
mod op;
mod ptx;
mod report;
mod tensormap;

pub use exec::{Launch, Options, Stats, launch};
pub use mem::{Footprint, Memory, Owner};
pub use module::{Kernel, Loaded, Module};
pub use mutation::{Change, Mutant};
pub use ptx::Param;
pub use report::{Fault, LoadError, Report};
pub use tensormap::{Swizzle, TensorMap};

/// The opcodes whose operands are registers and nothing else, sorted: what a test of every instruction has to cover.
/// Those with a form of their own (memory, exchanges, barriers, matrices) are not among them.
pub fn opcodes() -> Vec<String> {
    let mut names: Vec<String> = op::table::Table::new().names().cloned().collect();
    names.sort();
    names
}
