// SPDX-License-Identifier: MIT OR Apache-2.0
//! A loaded kernel and how it is launched.

use super::shapes::Shaped;
use crate::device::driver::Function;

/// One kernel, ready to launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadedKernel {
    pub function: Function,
    pub launch: Shaped,
    /// Blocks of it that a multiprocessor holds.
    pub each: u32,
}
