// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernels of a device that were loaded so far, and what those of attention are compiled for.

use super::abi::shapes::{LARGEST, SHAPES, Shape, Shaped};
use super::{abi::shapes, launch::check};
use crate::device::driver::{Function, Module};
use crate::element::Dtype;
use crate::error::Result;

/// The names of element types in those of modules.
pub(super) const ELEMENTS: [&str; 2] = ["f16", "bf16"];

/// What a kernel of attention is compiled for: an element type, and head dims.
#[derive(Clone, Copy, Debug)]
pub(super) struct Instance {
    /// Of [`ELEMENTS`].
    pub element: usize,
    /// Of [`SHAPES`].
    pub index: usize,
}

impl Instance {
    /// The smallest shape that holds these head dims.
    pub(super) fn find(dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<Self> {
        check::element(dtype)?;
        check::dim("head_dim", head_dim, LARGEST.0)?;
        check::dim("value_dim", value_dim, LARGEST.1)?;
        let (index, _) = shapes::find(head_dim, value_dim).expect("the largest shape holds every dim that passed");
        Ok(Self { element: usize::from(dtype == Dtype::Bf16), index })
    }

    /// That of the kernels with dropout, and of the forward over pages, for these head dims.
    pub(super) fn find_dropped(dtype: Dtype, head_dim: u32, value_dim: u32) -> Result<Self> {
        let instance = Self::find(dtype, head_dim, value_dim)?;
        let index = shapes::find_dropped(head_dim, value_dim).expect("the largest shape has them");
        Ok(Self { index, ..instance })
    }

    pub(super) fn shape(self) -> &'static Shape {
        &SHAPES[self.index]
    }
}

/// The modules of attention. Each exists for every [`Instance`] or for some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttentionModule {
    Forward,
    /// All gradients at once.
    Fused,
    /// The gradients of one side each: the kernels for dq, for dk, and for dv if it has its own.
    Sides,
    HopperForward,
    HopperCluster,
    HopperBackward,
    /// With dropout, for the instances that [`Instance::find_dropped`] finds.
    DroppedForward,
    /// The kernels for dq, and for dk and dv.
    DroppedSides,
    /// Over k and v in pages, for the same instances.
    PagedForward,
}

/// One kernel, ready to launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadedKernel {
    pub function: Function,
    pub launch: Shaped,
    /// Blocks of it that a multiprocessor holds.
    pub each: u32,
}

/// The kernels of `transform.ptx`, `sinks.ptx` and `tags.ptx`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    pub transform: Function,
    pub delta: Function,
    pub finish: Function,
    pub merge: Function,
    pub combine: Function,
    pub sinks: Function,
    pub begin_run: Function,
    pub arrived: Function,
}

/// Some kernels, and the modules that keep them alive.
#[derive(Debug)]
pub(super) struct Loaded<K, const N: usize> {
    pub kernels: K,
    pub _modules: [Module; N],
}

pub(super) type LoadedModule = Loaded<[Option<LoadedKernel>; 3], 1>;

/// The kernels that are loaded.
#[derive(Debug, Default)]
pub(super) struct LoadedKernels {
    /// By [`AttentionModule`] and [`Instance`].
    attention: [[[Option<LoadedModule>; SHAPES.len()]; ELEMENTS.len()]; 9],
    pub blocks: Option<Loaded<Blocks, 3>>,
}

impl LoadedKernels {
    pub(super) fn slot(&mut self, module: AttentionModule, instance: Instance) -> &mut Option<LoadedModule> {
        &mut self.attention[module as usize][instance.element][instance.index]
    }
}
