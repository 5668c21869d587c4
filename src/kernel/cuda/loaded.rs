// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels of a device that were loaded so far.

use super::loaded_kernel::LoadedKernel;
use super::shapes::SHAPES;
use crate::device::driver::{Function, Module};

/// The names of element types in those of modules.
pub(super) const ELEMENTS: [&str; 2] = ["f16", "bf16"];

/// One kernel and the module that keeps it alive.
#[derive(Debug)]
pub(super) struct Loaded {
    pub ready: LoadedKernel,
    pub _module: Module,
}

/// Kernels by element type (f16, bf16) and shape.
pub(super) type ByShape<T> = [[Option<T>; SHAPES.len()]; 2];

/// The kernels that are loaded.
#[derive(Debug, Default)]
pub(super) struct LoadedKernels {
    pub forward: ByShape<Loaded>,
    pub fused: ByShape<Loaded>,
    pub sides: ByShape<Sides>,
    pub hopper: ByShape<Loaded>,
    pub hopper_cluster: ByShape<Loaded>,
    pub hopper_backward: ByShape<Loaded>,
    pub blocks: Option<Blocks>,
}

/// The backward kernels of one side each.
#[derive(Debug)]
pub(super) struct Sides {
    pub queries: LoadedKernel,
    pub keys: LoadedKernel,
    pub values: Option<LoadedKernel>,
    pub _module: Module,
}

/// The kernels of `transform.ptx`, `sinks.ptx` and `tags.ptx`.
#[derive(Debug)]
pub(super) struct Blocks {
    pub transform: Function,
    pub delta: Function,
    pub finish: Function,
    pub merge: Function,
    pub sinks: Function,
    pub begin_run: Function,
    pub arrived: Function,
    pub _modules: [Module; 3],
}
