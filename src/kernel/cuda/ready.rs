// SPDX-License-Identifier: MIT OR Apache-2.0
//! A loaded kernel and how it is launched.

use super::driver::Function;
use super::shapes::Shaped;

/// The names of element types in those of modules.
pub(super) const ELEMENTS: [&str; 2] = ["f16", "bf16"];

/// One kernel, ready to launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    pub function: Function,
    pub launch: Shaped,
    /// Blocks of it that a multiprocessor holds.
    pub each: u32,
}
